"""The scores of heads and layers by the papers' equations on whole T x T matrices: what each is held to, [L, H]."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from whole_attention import whole_attention

SEED = 7  # of the random text of RAZOR


@functools.cache
def whole(model, tokens):
    """Attention's logits and probabilities, and the queries, of one text, in float64."""
    return tuple(np.asarray(x, np.float64) for x in whole_attention(model, tokens)[1:])


def over_rows(model, examples, row):
    """The mean over examples and targets t of `row(logits [L, H, t + 1], weights likewise, example's q)`."""
    values = []
    for e in examples:
        logits, weights, q = whole(model, tuple(e.prompt + e.answer))
        values += [row(logits[:, :, t, : t + 1], weights[:, :, t, : t + 1], q) for t in range(weights.shape[2])]
    return np.mean(values, axis=0)


def dcam(model, examples, window):
    return over_rows(model, examples, lambda _, weights, q: weights[..., -window:].sum(-1))


def qada(model, examples, window):
    def row(logits, _, q):
        near, far = logits[..., -window:], logits[..., :-window]
        if far.shape[-1] == 0:
            return np.ones(logits.shape[:2])
        buffer = far[..., -64:]
        inside = np.exp(near).sum(-1)
        outside = far.shape[-1] * np.exp(buffer.mean(-1) + buffer.var(-1) / 2)
        return inside / (inside + outside)

    return over_rows(model, examples, row)


def proxy(model, examples, window):
    def row(_, weights, q):
        blocks = -(-weights.shape[-1] // 64)
        masses = np.stack([weights[..., 64 * b : 64 * (b + 1)].sum(-1) for b in range(blocks)], -1)  # [L, H, n]
        needed = np.zeros(masses.shape[:2])
        for layer in range(len(masses)):
            head = np.linalg.norm(q[layer], axis=-1).mean(0).argmax()
            order = np.argsort(-masses[layer, head], kind="stable")
            for h in range(masses.shape[1]):
                reached = np.cumsum(masses[layer, h, order])
                needed[layer, h] = 1 + np.argmax(reached >= 0.9 * masses[layer, h].sum())
        return needed / blocks

    return over_rows(model, examples, row)


def apl(model, examples, window):
    lags = []
    for e in examples:
        _, weights, _ = whole(model, tuple(e.prompt + e.answer))
        lags.append(np.argmax(weights[:, :, -1, ::-1], axis=-1))
    return 1 - np.minimum(1, np.median(lags, axis=0) / window)


def razor(model, examples, window):
    period = max(len(e.prompt) + len(e.answer) for e in examples) // 4
    passage = np.random.default_rng(SEED).integers(model.config.vocab_size, size=period).tolist()
    _, weights, _ = whole(model, tuple(passage * 4))
    targets = np.arange(period, 4 * period)
    z = []
    for source in (targets - period, targets - period + 1):
        mean = weights[:, :, targets, source].mean(-1)
        z.append((mean - mean.mean()) / mean.std())
    return np.maximum(*z)


def fisher(model, examples, window):
    sums = 0
    for e in examples:
        tokens = e.prompt + e.answer

        def loss(probes, tokens=tokens, e=e):
            log_p = jax.nn.log_softmax(whole_attention(model, tokens, probes)[0])
            return -log_p[np.arange(len(e.prompt) - 1, len(tokens) - 1), jnp.asarray(e.answer)].mean()

        weights = whole(model, tuple(tokens))[1]
        slope = jax.jit(jax.grad(loss))(jnp.zeros(weights.shape))
        phi = (np.asarray(slope, np.float64) * weights) ** 2
        lag = np.subtract.outer(np.arange(len(tokens)), np.arange(len(tokens)))
        sums += np.stack([np.where(lag < window, phi, 0).sum((2, 3)), phi.sum((2, 3))])
    return sums[0] / sums[1]


SCORES = {"dcam": dcam, "apl": apl, "proxy": proxy, "qada": qada, "razor": razor, "fisher": fisher}


def lazy_ratios(model, prompt, last, sinks, recent):
    """[L]"""
    place = np.arange(len(prompt))
    near = (place[:, None] - place < recent) | (place < sinks)
    return (whole(model, tuple(prompt))[1] * near).sum(-1)[:, :, -last:].mean((1, 2))
