"""The least memory that a step needs on one device, for many meshes at once: `plan.memory` and `plan.flight` with arrays, for `bounds.py`."""

from typing import Any

import numpy as np

from meshloom.plan.splits import Splits

Array = np.ndarray
TABLES = {"vocab", "position"}
"""Axes of what lies outside the layers."""


def room(s: Splits, run: Any, beside: float) -> Array:
    """Bytes of a device, at least.  beside: bytes that one device alone would keep beside the parameters."""
    stored = s.bytes("rest", 4) + beside / s.most
    return stored + weights(s) + s.trained("grad", 4) + activations(s, run) + loss(s, run)


def weights(s: Splits) -> Array:
    """The step's own copy of what is cast or gathered, and one layer of what is gathered while it runs."""
    found = s.ones * 0
    gathers = s.over("zero3", "cube_rows") * (1 if s.streams else s.over("rows")) > 1
    for leaf in s.leaves:
        staged = (s.stages > 1) & (leaf.axes[0] == "layer")
        copied = staged | (s.split("rest", *leaf.axes) > s.split("step", *leaf.axes)) | (s.width != 4 and not leaf.exact)
        width = 4 if leaf.exact else s.width
        found = found + np.where(copied, s.elements("step", leaf) * width, 0)
        layers = leaf.shape[0] if leaf.axes[0] == "layer" else 1
        found = found + np.where(gathers & ("embed" in leaf.axes), s.elements("live", leaf) / layers * width, 0)
    return found


def loss(s: Splits, run: Any) -> Array:
    """The head's gradient, and logits of the fewest tokens that a chunk has."""
    rows = s.q.config.vocab_padded / (s.wide * s.stages)
    return rows * s.q.config.embed * 4 + 2 * np.minimum(s.tokens / run.micro, 256) * rows * 4


def kept(s: Splits, run: Any) -> tuple[Array, Array, Array]:
    """Bytes that one layer keeps of a micro-batch under no remat, `selective`, `full`."""
    c = s.q.config
    work, stream = s.wide * s.over("cube_embed"), c.embed / (s.short * s.narrow)
    enters = c.embed / (s.narrow if s.streams else s.over("cube_embed"))
    heads = np.floor(c.heads * c.head / work)
    keys = np.floor(c.kv_heads * c.head / (s.keys * s.over("cube_embed")))
    wide = np.floor(s.q.model.wide(c) / work)
    each = s.tokens / run.micro * s.width
    none = 4 * stream + 2 * enters + 3 * heads + 4 * keys + 2 * wide
    return each * none, each * (3 * stream + heads + 2 * keys + wide), each * stream


def activations(s: Splits, run: Any) -> Array:
    """What is kept for the backward pass; in a pipeline what is in flight, and what one part's backward works on."""
    none, some, full = kept(s, run)
    mine = np.where(run.full > 0, full, np.where(run.some > 0, some, none))
    layers = s.q.config.layers
    if "pipe" not in s.pattern.words:
        return layers * mine
    part = layers / (s.stages * run.chunks)
    again = part * mine + run.some * none
    return np.where(run.again > 0, run.places * full + again, run.places * part * mine) + 2 * full
