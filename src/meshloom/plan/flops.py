"""Floating-point operations of a model, counted from its matrices."""

from typing import Any

import numpy as np

from meshloom.core.spec import Spec, is_spec
from meshloom.core.tree import named_leaves
from meshloom.models.base import Kind, Model

TABLES = ("vocab", "position")
"""An array with one of these axes is looked up, not multiplied; the output head is counted by itself."""


def visible_keys(seq: int, window: int | None) -> float:
    """Keys that a query sees on average over a sequence with causal attention."""
    seen = np.arange(1, seq + 1)
    return float(np.minimum(seen, window or seq).mean())


def attention_flops(c: Any, seq: int, kind: Kind) -> float:
    """Operations a token of one layer's two products of attention, forward."""
    return 4 * c.heads * c.head * visible_keys(seq, kind.window)


def forward_flops(model: Model, c: Any, seq: int) -> float:
    """Operations a token, forward: 2 for each element of each matrix that the token goes through, 4 x heads x head x keys seen for attention's two products."""
    specs = named_leaves(model.specs(c), is_spec)
    matrices = sum(s.size * model.active(c, s) for s in specs.values() if is_matrix(s))
    attention = sum(attention_flops(c, seq, kind) for kind in model.kinds(c))
    return 2 * matrices + 2 * c.vocab_padded * c.embed + attention


def train_flops(model: Model, c: Any, seq: int) -> float:
    """Operations a token of a training step: the backward pass takes twice the forward's, without the products that a frozen matrix's gradient would
    take. Recomputed work is not counted (model FLOPs)."""
    specs = named_leaves(model.specs(c), is_spec)
    frozen = sum(s.size * model.active(c, s) for s in specs.values() if s.frozen and is_matrix(s))
    head = specs.get("head", specs["embed"])
    return 3 * forward_flops(model, c, seq) - 2 * frozen - 2 * head.size * head.frozen


def is_matrix(s: Spec) -> bool:
    """Whether an array multiplies activations: it joins embed, or what latent attention narrows it to, with another axis, and is no table."""
    own = [a for a in s.axes if a not in ("layer", "expert")]
    return bool({"embed", "query_rank", "key_rank"} & set(own)) and len(own) > 1 and not any(a in TABLES for a in own)
