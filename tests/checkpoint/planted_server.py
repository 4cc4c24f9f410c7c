"""A completions endpoint in a thread, which computes with our decoder under a planted fault."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from web_server import Requests, web_server

from swa_jax.model.attention import LayerData, kinds_of, layer_data, model_spec
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

ROWS, WIDTH = 8, 72  # of every computation on prompts, so that one program serves all requests
LONGEST = 128  # of a prompt and its answer
BLOCK = 16  # tokens of a block of the cache


@dataclasses.dataclass(frozen=True)
class Planted:
    """What the server computes.

    Attributes:
      model: with the pattern and the configuration that it reads.
      padding: "" or whether shorter prompts of a request are padded on the left with what is then "seen", or "masked".
      positions: of the tokens of a row, from their indices.
      before: tokens put in front of each prompt.
      also: changes the log-probabilities [.., V], such as rounding.
      decode: what generated tokens see; None: what the model's pattern says.
      taken_over: whether whole blocks of answers serve later prompts that begin with them.
    """

    model: Decoder
    padding: str = ""
    positions: Callable[[np.ndarray], np.ndarray] = lambda t: t
    before: tuple[int, ...] = ()
    also: Callable[[np.ndarray], np.ndarray] = lambda x: x
    decode: AttentionPattern | None = None
    taken_over: bool = False
    earlier: list[tuple[list[int], int]] = dataclasses.field(default_factory=list)  # texts, and where answers began

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], list[np.ndarray]]:
        """`count` greedy tokens, and what each was drawn from, [V]."""
        pattern = self.decode or self.model.pattern
        if pattern.full_attention_decode:
            pattern = dataclasses.replace(pattern, layer_types=(FULL,) * pattern.num_layers, full_kv_heads=())
        text, found = list(prompt), []
        tokens, generated = np.zeros((1, LONGEST), np.int32), np.zeros((1, LONGEST), bool)
        for before, begun in self.earlier if self.taken_over else ():
            same = [*(a == b for a, b in zip(before, prompt, strict=False)), False].index(False)
            generated[0, begun : same // BLOCK * BLOCK] = True
        generated[0, len(prompt) :] = True
        for _ in range(count):
            tokens[0, : len(text)] = text
            rows = after_each(*nnx.split(self.model), pattern, tokens, generated)
            found.append(self.also(np.asarray(rows[0, len(text) - 1])))
            text.append(int(found[-1].argmax()))
        self.earlier.append((text, len(prompt)))
        return text[len(prompt) :], found

    def log_probs(self, prompts: list[list[int]]) -> list[np.ndarray]:
        """[T, V] for each prompt: of what follows each of its tokens."""
        rows = [[*self.before, *prompt] for prompt in prompts]
        longest = max(map(len, rows))
        starts = [longest - len(row) if self.padding else 0 for row in rows]
        tokens, segments = np.zeros((ROWS, WIDTH), np.int32), np.ones((ROWS, WIDTH), np.int32)
        positions = np.tile(np.arange(WIDTH, dtype=np.int32), (ROWS, 1))
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            tokens[i, start : start + len(row)] = row
            if self.padding == "masked":
                segments[i], positions[i] = positions[i] >= start, positions[i] - start
        found = np.asarray(forward(*self.program, tokens, segments, self.positions(positions)))
        return [
            self.also(found[i, start + len(self.before) : start + len(row)])
            for i, (row, start) in enumerate(zip(rows, starts, strict=True))
        ]

    @functools.cached_property
    def program(self) -> tuple[nnx.GraphDef, nnx.State, LayerData]:
        """Full and windowed layers are data: patterns of these that agree in the rest are one program."""
        model, pattern, kinds = self.model, self.model.pattern, ()
        if pattern.sliding_window is not None and {*pattern.layer_types} <= {FULL, WINDOW}:
            alike = dataclasses.replace(pattern, layer_types=(FULL, *[WINDOW] * (pattern.num_layers - 1)))
            model, kinds = model.with_pattern(alike), kinds_of(alike)
        return *nnx.split(model), layer_data(pattern, model.config, kinds)


@functools.partial(jax.jit, static_argnums=0)
def forward(graph, weights, data, tokens, segments, positions):
    model = nnx.merge(graph, weights)
    hidden, *_ = model.features(tokens, segment_ids=segments, positions=positions, data=data)
    return jax.nn.log_softmax(model.logits(hidden))


@functools.partial(jax.jit, static_argnums=(0, 2))
def after_each(graph, weights, pattern, tokens, generated):
    """[1, T, V]: the log-probabilities of what follows each token, if those that are `generated` see by `pattern`."""
    model = nnx.merge(graph, weights)
    context = model.context(tokens)
    later = dataclasses.replace(context, spec=model_spec(model.config, pattern))
    stream, data = model.begin(tokens)

    def layer(stream, block, rows):
        of_prompts, of_answers = block(stream, rows[0], context)[0], block(stream, rows[1], later)[0]
        return of_prompts._replace(x=jnp.where(generated[..., None], of_answers.x, of_prompts.x)), None

    stream, _ = model.scan(layer, stream, (data, layer_data(pattern, model.config)))
    return jax.nn.log_softmax(model.logits(model.norm(stream.x)))


def with_config(model: Decoder, **fields) -> Decoder:
    """The same weights in a decoder of another configuration."""
    config = dataclasses.replace(model.config, **fields)
    graph, wanted = nnx.split(nnx.eval_shape(lambda: Decoder(config, model.pattern, rngs=nnx.Rngs(0))))
    mine = dict(nnx.to_flat_state(nnx.state(model)))
    return nnx.merge(graph, nnx.from_flat_state({path: mine[path] for path, _ in nnx.to_flat_state(wanted)}))


def with_noise(model: Decoder, size: float) -> Decoder:
    """Weights that are off by a share of themselves, as quantised ones are."""
    graph, state = nnx.split(model)
    rng = np.random.default_rng(0)
    return nnx.merge(
        graph, jax.tree.map(lambda x: x * (1 + size * rng.standard_normal(x.shape).astype(np.float32)), state)
    )


class Completions(Requests):
    """Answers as the servers' sources have it; `server.speaks` says which of their ways it knows."""

    def do_GET(self):
        self.answer({"data": [{"id": "planted"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        speaks = self.server.speaks
        if self.path == "/generate" and speaks == "sglang":
            self.answer(self.native(body))
        elif self.path != "/v1/completions":
            self.answer({"error": "Not Found"}, 404)
        elif body.get("echo") and speaks != "echo":
            self.answer({"error": "echo is not supported"}, 400)
        else:
            self.answer({"choices": self.completions(body)})

    def completions(self, body):
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        choices = []
        for i, (prompt, found) in enumerate(zip(prompts, self.of_prompts(prompts, body["max_tokens"]), strict=True)):
            choice = {"index": i, "text": "?", "logprobs": None}
            own = of_prompt(prompt, found)
            if body.get("prompt_logprobs") is not None and self.server.speaks in ("vllm", "cut", "texts"):
                rows = [None] + [{str(t): {"logprob": x, "rank": 1}} for t, x in zip(prompt[1:], own[1:], strict=True)]
                choice["prompt_logprobs"] = rows
            if body.get("logprobs") is not None:
                new, rows = self.generated(prompt, found, body["max_tokens"])
                # Two tokens have one text, and a server's answer has each text once.
                by_id = body.get("return_tokens_as_token_ids") and self.server.speaks != "texts"
                called = "token_id:{0}" if by_id else "token {1}"
                top = [{called.format(t, t // 2): x for x, t in likeliest(row, body["logprobs"])} for row in rows]
                names = [called.format(t, t // 2) for t in new]
                choice["logprobs"] = {"tokens": names, "token_logprobs": [max(row.values()) for row in top]}
                choice["logprobs"]["top_logprobs"] = top
                if body.get("echo"):
                    choice["logprobs"]["token_logprobs"][:0] = own
                if self.server.speaks == "content":
                    most = [[{"id": t, "logprob": x} for x, t in likeliest(row, body["logprobs"])] for row in rows]
                    pairs = zip(new, most, strict=True)
                    choice["logprobs"] = {"content": [{"id": t, "top_logprobs": top} for t, top in pairs]}
            choices.append(choice)
        return choices[::-1]  # `index` has their order

    def of_prompts(self, prompts, count):
        """As `Planted.log_probs`, which only those who ask for one new token ask for."""
        return self.server.planted.log_probs(prompts) if count == 1 else [None] * len(prompts)

    def generated(self, prompt, found, count):
        """As `Planted.generate`; one token follows from the log-probabilities of the prompt."""
        if count == 1:
            return [int(found[-1].argmax())], [found[-1]]
        return self.server.planted.generate(prompt, 3 if self.server.speaks == "cut" else count)

    def native(self, body):
        prompts, most = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        answers = []
        for prompt, found in zip(prompts, self.of_prompts(prompts, most), strict=True):
            own = of_prompt(prompt, found)
            said = {"input_token_logprobs": [[x, t, None] for x, t in zip(own, prompt, strict=True)]}
            new, rows = self.generated(prompt, found, most)
            said["output_token_logprobs"] = [[float(row[t]), t, None] for row, t in zip(rows, new, strict=True)]
            if top := body.get("top_logprobs_num"):
                said["output_top_logprobs"] = [[[x, t, None] for x, t in likeliest(row, top)] for row in rows]
            answers.append({"text": "?", "meta_info": said})
        return answers

    def answer(self, value, status=200):
        self.say(json.dumps(value).encode(), status)


def likeliest(row, count):
    """(log-probability, token) of the likeliest tokens."""
    return [(float(row[t]), int(t)) for t in np.argsort(-row)[:count]]


def of_prompt(prompt, found):
    """The log-probabilities of a prompt's own tokens; the first has none."""
    if found is None:
        return [None] * len(prompt)
    return [None, *(float(found[t, token]) for t, token in enumerate(prompt[1:]))]


def serving(planted: Planted, speaks: str = "vllm") -> contextlib.AbstractContextManager[str]:
    """The URL of a server, while it runs."""
    return web_server(Completions, planted=planted, speaks=speaks)
