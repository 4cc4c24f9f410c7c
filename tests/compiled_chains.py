"""A model whose weights were written by hand to solve chains: eight layers, each prompt hop in a layer of its own.

Tokens are biorthogonal codes, and the residual stream has a room for each thing that a token can know: its own name,
the word before it, whether it is what a statement gives (the token two places after `=`), and its number. Layer 0 looks
one and two tokens back by rotary embeddings. Every head of `SERVES` does one look-up, for the names of one class: a
token that is a name finds what a statement gives that name, and copies its number. Where there is nothing to find, a
sink logit takes the attention.

So a question of h hops needs h - 1 layers of look-ups that see the whole prompt, one after the other, for the tokens of
the prompt; the last look-up is the answer's own, which full-attention decode gives.
"""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from swa_jax.data.chains import VOCAB_SIZE, ChainWords, chain_tokenizer
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern

LAYERS, KV_HEADS, WINDOW_SIZE = 8, 4, 8
CLASSES = KV_HEADS  # of names: the i-th name is of class i % CLASSES
# Layer: the classes that its heads look up, head c those of class c. The last layer's are the answer's.
SERVES: Mapping[int, Sequence[int]] = {2: (0, 1, 2, 3), 5: (0, 1, 2), 6: (3,), 7: (0, 1, 2, 3)}
PROMPT_LAYERS = (2, 5, 6)
NAME, NUMBER = 32, 64  # channels of a code
ROOMS = {"name": NAME, "before": NAME, "asked": 1, "is =": 1, "is ?": 1, "given": 1, "number": NUMBER, "constant": 1}
STARTS = dict(zip(ROOMS, np.cumsum([0, *ROOMS.values()]).tolist(), strict=False))
WIDTH = sum(ROOMS.values())
CONSTANT = 10.0  # so that the norm of every token is nearly this
HEAD = 64  # the first half is turned
MATCH = 40.0  # of each of the two things that a look-up asks for, in nats
CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=WIDTH,
    intermediate_size=8,
    num_hidden_layers=LAYERS,
    num_attention_heads=KV_HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD,
    partial_rotary_factor=0.5,
    rope_theta=100.0,
    attention_scale=1.0,
    sink_logits=True,
    rms_norm_eps=1e-12,
)


def small_tokenizer() -> Tokenizer:
    """All words of chains, with next to no text behind it: made in no time."""
    return chain_tokenizer(VOCAB_SIZE, ["a text"])


def room(name: str) -> slice:
    return slice(STARTS[name], STARTS[name] + ROOMS[name])


def codes(count: int, size: int) -> np.ndarray:
    """[count, size]: words of length 1, two of which are orthogonal or opposite; `count` is at most 2 `size`."""
    hadamard = np.ones((1, 1))
    while len(hadamard) < size:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    return np.concatenate([hadamard, -hadamard])[:count] / np.sqrt(size)


def compiled_chains(tokenizer: Tokenizer) -> Decoder:
    """The model, with full attention in every layer."""
    words = ChainWords.of(tokenizer)
    model = Decoder(CONFIG, AttentionPattern.from_recipe("full", LAYERS), rngs=nnx.Rngs(0))
    names, numbers = codes(len(words.names), NAME), codes(len(words.numbers), NUMBER)
    embedding, head = np.zeros((VOCAB_SIZE, WIDTH)), np.zeros((WIDTH, VOCAB_SIZE))
    embedding[:, room("constant")] = CONSTANT
    embedding[words.names, room("name")] = names
    embedding[words.numbers, room("number")] = numbers
    embedding[words.states, room("is =")] = 1
    embedding[words.asks, room("is ?")] = 1
    head[room("number"), words.numbers] = 20 * numbers.T
    head[room("before"), words.names] = 20 * names.T
    head[room("asked"), words.states] = 400  # more than any number: after ` ? otter` comes ` =`
    head[room("constant"), words.fillers[0]] = 1 / CONSTANT  # said where there is nothing to say
    q, k, v = np.zeros((3, LAYERS, WIDTH, KV_HEADS * HEAD))
    o = np.zeros((LAYERS, KV_HEADS * HEAD, WIDTH))
    sinks = np.full((LAYERS, KV_HEADS), 100.0)  # heads that do nothing
    for heads, back in ((0, 1), (1, 2)):
        _look_back(q[0], k[0], heads * HEAD, back)
        sinks[0, heads] = -1000
    _copy(v[0], o[0], 0, [("name", "before", names.shape[1]), ("is ?", "asked", 1)])
    _copy(v[0], o[0], HEAD, [("is =", "given", 1)])
    for layer, classes in SERVES.items():
        for c in classes:
            _look_up(q[layer], k[layer], c * HEAD, names[c::CLASSES])
            _copy(v[layer], o[layer], c * HEAD, [("number", "number", NUMBER)])
            sinks[layer, c] = 1.5 * MATCH  # more than one of two matches, less than both
    attention = model.layers.attention
    for parameter, value in (
        (model.embedding, embedding),
        (model.lm_head.kernel, head),
        (attention.sink_logits, sinks),
        (attention.q_proj.kernel, q),
        (attention.k_proj.kernel, k),
        (attention.v_proj.kernel, v),
        (attention.o_proj.kernel, o),
        (model.layers.mlp.down_proj.kernel, 0),
        (model.layers.input_norm.scale, CONSTANT / np.sqrt(WIDTH)),
        (model.norm.scale, CONSTANT / np.sqrt(WIDTH)),
    ):
        parameter[...] = jnp.broadcast_to(jnp.asarray(value, jnp.float32), parameter.shape)
    return model


def _look_back(q: np.ndarray, k: np.ndarray, start: int, tokens: int) -> None:
    """Attend to the token so many places back: a sum of cosines that is greatest there."""
    half = HEAD // 4
    angles = tokens * 100.0 ** (-np.arange(half) / half)
    constant = STARTS["constant"]
    q[constant, start : start + half] = 30 * np.cos(angles) / CONSTANT
    q[constant, start + half : start + 2 * half] = -30 * np.sin(angles) / CONSTANT
    k[constant, start : start + half] = 1 / CONSTANT


def _look_up(q: np.ndarray, k: np.ndarray, start: int, names: np.ndarray) -> None:
    """Attend from one of these names to what a statement gives it: the word before is that name, and it is given."""
    start += HEAD // 2
    basis = names[: len(names) // 2].T  # [NAME, 8]: the other half are the same words with the opposite sign
    content = slice(start, start + basis.shape[1])
    q[room("name"), content] = MATCH * basis
    k[room("before"), content] = basis
    q[STARTS["constant"], content.stop] = MATCH / CONSTANT
    k[STARTS["given"], content.stop] = 1


def _copy(v: np.ndarray, o: np.ndarray, start: int, rooms: Sequence[tuple[str, str, int]]) -> None:
    """Carry what stands in a room of the token attended to into a room of the token that attends."""
    for source, to, size in rooms:
        v[room(source), start : start + size] = np.eye(size)
        o[start : start + size, room(to)] = np.eye(size)
        start += size
