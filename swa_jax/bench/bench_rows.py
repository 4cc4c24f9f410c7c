"""The rows of tokens of what is measured: their documents, the tokens of one device, those that are routed."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.math.ring import RowOrder
from pallas_kernels.math.spec import Coordinates


def segment_ids(T: int, documents: int | None) -> np.ndarray:
    """[1, T] int32: one document, or documents of so many tokens, whose edges are those of no block."""
    start = 0 if documents is None else documents - int(0.38 * documents)
    return (1 + (np.arange(T, dtype=np.int32)[None] + start) // (documents or T)).astype(np.int32)


def of_first_device(where: Coordinates, context: int) -> Coordinates:
    """Coordinates of a row that so many devices share in zig-zag order: the first one's queries, and all keys."""
    order = RowOrder(context, True).tokens_as_held(where.q_order.shape[1])

    def held(x, devices: int = 1):
        return None if x is None else jnp.asarray(x)[:, order[: len(order) // devices]]

    return where._replace(
        q_pos=held(where.q_pos, context),
        kv_pos=held(where.kv_pos),
        q_order=held(where.q_order, context),
        kv_order=held(where.kv_order),
        q_segment_ids=held(where.q_segment_ids, context),
        kv_segment_ids=held(where.kv_segment_ids),
    )


def routed_rows(T: int, ratio: float) -> np.ndarray:
    """Which of T tokens are routed, at even distances: as good as random for what is measured. [T] bool."""
    return np.diff(np.floor(np.arange(T + 1) * ratio)) > 0
