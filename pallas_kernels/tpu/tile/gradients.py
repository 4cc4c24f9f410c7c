"""What the backward kernels share: the derivatives of one tile, and the order of the work."""

import jax.numpy as jnp

from pallas_kernels.tpu.tile.tiles import sigmoid_weights

_AHEAD = 2  # units whose products stand before the rest of a unit


def weights_and_slopes(call, s, derivative, dw, lse, delta, seen):
    """The weights w of one tile, and the derivative of the loss by its logits before and after the softcap.

    Args:
      seen: the mask of the tile, None where every pair is visible. It comes last, so that nothing of what it hides gets
        through, not even NaN.
    """
    if call.softmax:
        w = jnp.exp2(s - lse)
        ds = w * (dw - delta)
    else:
        w = sigmoid_weights(s)
        ds = (w - w * w) * dw
    dlogits = ds if derivative is None else ds * derivative
    if seen is not None:
        w, dlogits = jnp.where(seen, w, 0), jnp.where(seen, dlogits, 0)
        ds = dlogits if derivative is None else jnp.where(seen, ds, 0)
    return w, ds, dlogits


def pipelined(units, products, finish):
    """The products of the units to come stand before the rest of this one, to keep the matrix unit busy."""
    units = list(units)
    queue = [products(unit) for unit in units[:_AHEAD]]
    for i, unit in enumerate(units):
        if i + _AHEAD < len(units):
            queue.append(products(units[i + _AHEAD]))
        finish(unit, *queue.pop(0))
