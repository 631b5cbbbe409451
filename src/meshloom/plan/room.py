"""The least memory that a step needs on one device, for many meshes at once: `plan.memory` and `plan.layer` with arrays, for `bounds.py`.

Left out is what can only add: what a layer works with, the head's share, the update's, a compiler's own; of what a layer keeps, scores and rows of experts.
"""

from typing import Any

import numpy as np

from meshloom.plan.layer import KEPT, LONG, Parts
from meshloom.plan.splits import Splits

Array = np.ndarray
LEAST = {row: Parts(*(min(pair) for pair in zip(kept, LONG.get(row, kept)))) for row, kept in KEPT.items()}
"""What a layer keeps, by row of remat, under any attention at least."""


def room(s: Splits, run: Any, beside: float) -> Array:
    """Bytes of a device, at least.  beside: bytes that one device alone would keep beside the parameters."""
    return s.bytes("rest", 4) + beside / s.most + steps(s, run) + activations(s, run)


def steps(s: Splits, run: Any) -> Array:
    """The step's own copy of the weights that are cast or gathered, the layers' gradients, and their sum over several micro-batches."""
    found, several = s.ones * 0, np.where(run.micro > 1, 1.0, 0.0)
    for leaf in s.leaves:
        inside, width = leaf.axes[0] == "layer", 4 if leaf.exact else s.width
        copied = (s.split("rest", *leaf.axes) > s.split("step", *leaf.axes)) | (s.width != 4 and not leaf.exact) | ((s.stages > 1) & inside)
        found = found + np.where(copied, s.elements("step", leaf) * width, 0) * (1.0 if inside else several)
        if not leaf.frozen:
            found = found + s.elements("grad", leaf) * (width * inside + 4 * several)
    return found


def kept(s: Splits, run: Any) -> dict[str, Array]:
    """Bytes that one layer keeps of a micro-batch, at least: row of remat -> bytes."""
    c, q = s.q.config, s.q
    work, stream = s.wide * s.over("cube_embed"), c.embed / (s.short * s.narrow)
    enters = c.embed / (s.narrow if s.streams else s.over("cube_embed"))
    heads = np.floor(c.heads * c.head / work)
    keys = np.floor(c.kv_heads * c.head / (s.keys * s.over("cube_embed")))
    routed = any(kind.tells for kind in q.model.kinds(c))
    wide = (c.top * s.over("expert") * 2 * c.expert_ffn if routed else q.model.wide(c)) / work
    down = wide / (2 if routed or q.model.wide(c) == 2 * c.ffn else 1)
    each = s.tokens / run.micro
    sizes = {"stream": stream, "enters": enters, "heads": heads, "keys": keys, "wide": wide, "down": down}
    outs, numbers = 4 * heads, 4 / s.short
    return {
        row: each
        * (sum(getattr(least, name) * size for name, size in sizes.items()) * s.width + least.outs * outs + least.numbers * numbers)
        for row, least in LEAST.items()
    }


def activations(s: Splits, run: Any) -> Array:
    """What is kept for the backward pass; in a pipeline what is in flight, and what one part's backward works on."""
    by = kept(s, run)
    mine = np.where(run.full > 0, by["full"], np.where(run.some > 0, by["selective"], by["none"]))
    layers = s.q.config.layers
    if "pipe" not in s.pattern.words:
        return layers * mine
    part = layers / (s.stages * run.chunks)
    return np.where(run.again > 0, run.places * by["full"] + part * mine, run.places * part * mine)


def parked(s: Splits, run: Any) -> Array:
    """Seconds in which what a step parks in the host's memory goes there, or comes back, at least."""
    host = s.q.cluster.hardware.host
    if not host:
        return s.ones * 0
    by = kept(s, run)
    return run.parked * (by["selective"] - by["full"]) * run.micro * run.fill * s.q.config.layers / s.stages / host
