"""What the engine said, beside what we compute and count."""

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.checkpoint.servers.allocation import grouped_entries

CLOSE = 1e-4  # in log-probability; of values below -10 that part of 10


def limit_of(largest: float) -> float:
    """How far log-probabilities may differ, of which `largest` is the greatest in size."""
    return CLOSE * max(1, largest / 10)


def difference_of(model, prompts, said) -> tuple[float, float]:
    """The greatest difference between the log-probabilities of prompts, and the greatest of ours."""
    differences, largest = [], []
    for prompt, theirs in zip(prompts, said["logprobs"], strict=True):
        ours = jax.nn.log_softmax(model(jnp.array([prompt]))[0].astype(jnp.float32))  # [T, V]
        ours = np.asarray(ours)[np.arange(len(prompt) - 1), prompt[1:]]
        differences.append(np.abs(ours - theirs).max())
        largest.append(np.abs(ours).max())
    return max(differences), max(largest)


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
