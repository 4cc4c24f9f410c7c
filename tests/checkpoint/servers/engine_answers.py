"""What the engine said, beside what we compute and count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from swa_jax.checkpoint.servers.allocation import grouped_entries

CLOSE = 1e-4  # in log-probability; of values below -10 that part of 10
PADDED = 64  # lengths are padded to a multiple of it, so that few programs are compiled


def limit_of(largest: float) -> float:
    """How far log-probabilities may differ, of which `largest` is the greatest in size."""
    return CLOSE * max(1, largest / 10)


@functools.partial(jax.jit, static_argnames="graph")
def _logprobs(graph, weights, tokens, segment_ids, full_from):
    logits = nnx.merge(graph, weights)(tokens, segment_ids=segment_ids, full_from=full_from)
    return jax.nn.log_softmax(logits)  # [B, T, V]


def logprobs_of(model, prompts, answers) -> list[np.ndarray]:
    """What we expect behind each token of prompts with their answers: log-probabilities [T, V], in one pass.

    Where each token of an answer is the likeliest behind those before it, `generate` would have given that answer.
    """
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    tokens = np.zeros((len(rows), -(-max(map(len, rows)) // PADDED) * PADDED), np.int32)
    for row, said in zip(tokens, rows, strict=True):
        row[: len(said)] = said
    inside = np.arange(tokens.shape[1]) < np.array([[len(row)] for row in rows])
    begins = jnp.array([len(prompt) for prompt in prompts]) if model.pattern.full_attention_decode else None
    found = np.asarray(_logprobs(*nnx.split(model), tokens, inside.astype(np.int32), begins))
    return [one[: len(row)] for one, row in zip(found, rows, strict=True)]


def difference_of(ours, prompts, said) -> tuple[float, float]:
    """The greatest difference between the log-probabilities of prompts, and the greatest of ours (`logprobs_of`)."""
    ours = [one[np.arange(len(prompt) - 1), prompt[1:]] for one, prompt in zip(ours, prompts, strict=True)]
    pairs = zip(ours, said["logprobs"], strict=True)
    return max(np.abs(one - theirs).max() for one, theirs in pairs), max(np.abs(one).max() for one in ours)


def check_likeliest(ours, prompts, answers) -> None:
    """Asserts that every token of the answers is the likeliest by `logprobs_of`."""
    likeliest = [one[len(prompt) - 1 : -1].argmax(-1).tolist() for one, prompt in zip(ours, prompts, strict=True)]
    assert answers == likeliest


def check_answers(model, prompts, said, turn=(), close=None) -> None:
    """Asserts that the engine computes what we do: prompts, answers, these once more, and the next turn's.

    Args:
      turn: as in `run` of `engine.py`. close: how far log-probabilities may differ; None: `limit_of` them.
    """
    assert "refused" not in said, said
    asked, answers = list(prompts), said["tokens"]
    if turn:
        asked += [[*prompt, *answer, *turn] for prompt, answer in zip(prompts, answers, strict=True)]
    ours = logprobs_of(model, asked, answers + said["next_turn"])
    difference, largest = difference_of(ours[: len(prompts)], prompts, said)
    assert difference <= (close or limit_of(largest))
    check_likeliest(ours, asked, answers + said["next_turn"])
    assert said["second"] == answers
    assert min(said["reused"] + said["next_reused"]) > 0
    for one, answer, theirs in zip(ours[len(prompts) :], said["next_turn"], said["next_logprobs"], strict=True):
        expected = one[-len(answer) - 1 : -1][np.arange(len(answer)), answer]
        assert np.abs(expected - theirs).max() <= limit_of(np.abs(expected).max())


def granted_entries(said) -> list[int]:
    """Tokens times layers that the engine's planner grants a sequence, without and with async scheduling."""
    layers = max(len(group["layers"]) for group in said["groups"])
    blocks = (sum(group["granted"][on] for group in said["groups"]) for on in (0, 1))
    return [layers * said["block_tokens"] * count for count in blocks]


def held_as_granted(said) -> bool:
    """Whether no request held more blocks of a group than the planner grants."""
    granted = [group["granted"][0] for group in said["groups"]]
    return all(most <= limit for held in said["held"] for most, limit in zip(held, granted, strict=True))


def counted_entries(memory, full: int, windowed: int, window: int, sink_tokens: int = 0) -> list[int]:
    """The same by our count, with one batch in flight and with two."""
    blocks = [memory.blocks._replace(in_flight=batches * memory.batched_tokens) for batches in (1, 2)]
    return [grouped_entries(full, windowed, window, memory.length, one, sink_tokens) for one in blocks]
