"""The order of a row's tokens over the devices that split the sequence: one rule, for the host that places rows and the devices that ask where a
token stood.

A ring of P devices gives device r the pieces r and 2P-1-r of 2P equal ones, so that causal attention costs each the same. Rows are padded
at their end up to a length that the devices share evenly.  Source of the order: Brandon et al. 2023, "Striped attention", arXiv 2311.09431
(the imbalance), and the pairing of first with last pieces in Llama 3, arXiv 2407.21783, section 3.3.2.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from meshloom.core.batch import Batch
from meshloom.core.layout import Layout

BLOCK = 512
"""Most tokens of a block of attention in a ring; longer pieces are padded to a multiple of as few blocks as this allows."""
ROWS = ("tokens", "targets", "weights", "segments", "positions")
"""Fields of a batch that have a sequence."""


def padded(lay: Layout, seq: int) -> int:
    """Tokens of a row as the devices hold it, padding included.  seq: without."""
    if not lay.acts.get("whole_seq"):
        return seq
    ring, shards = lay.size(lay.ring), lay.size(tuple(dict.fromkeys((*lay.acts["whole_seq"], *lay.acts.get("seq", ())))))
    unit = math.lcm(2 * ring, shards) if lay.ring else shards
    size = -(-seq // unit) * unit
    if not lay.ring:
        return size
    blocks = -(-size // (2 * ring * BLOCK))
    unit = math.lcm(2 * ring * blocks, shards)
    return -(-seq // unit) * unit


def true_place(lay: Layout, slots: Any, length: int) -> Any:
    """The place in its row of what stands in these slots, counted along the devices.  slots: ints of any shape.  length: of the whole row.
    Returns the same shape."""
    if not lay.ring:
        return slots
    pieces = 2 * lay.size(lay.ring)
    size = length // pieces
    device, second = slots // size // 2, slots // size % 2
    return (device + second * (pieces - 1 - 2 * device)) * size + slots % size


def places(lay: Layout, name: str, count: int) -> Array:
    """The place in its row of each of this device's tokens along axis `name` ("seq" or "whole_seq"), int32 [count]."""
    axes = lay.acts.get(name, ())
    first = lax.axis_index(axes) * count if axes else 0
    return true_place(lay, first + jnp.arange(count), count * lay.size(axes))


def arrange(lay: Layout, rows: np.ndarray) -> np.ndarray:
    """Rows [..., seq] as the devices hold them, [..., padded]: zeros at the end, then the order of the ring."""
    length = padded(lay, rows.shape[-1])
    if length != rows.shape[-1]:
        rows = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, length - rows.shape[-1])])
    return rows[..., true_place(lay, np.arange(length), length)] if lay.ring else rows


def arranged(lay: Layout, batch: Batch) -> Batch:
    """A batch on the host as the devices hold it. Padding has weight 0 and is of segment 0."""
    rows = {name: getattr(batch, name) for name in ROWS}
    return dataclasses.replace(batch, **{name: a if a is None else arrange(lay, np.asarray(a)) for name, a in rows.items()})


def told(lay: Layout, seq: int) -> str:
    """What the plan says about padding; "" where there is none."""
    length = padded(lay, seq)
    if length == seq:
        return ""
    over = " ".join(f"{a}={lay.sizes[a]}" for a in lay.acts["whole_seq"])
    return f"sequence: rows of {seq:,} tokens are padded to {length:,} for {over} ({(length - seq) / length:.1%} of the work, weight 0)"
