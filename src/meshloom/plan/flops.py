"""Floating-point operations of a model, counted from its matrices."""

from typing import Any

import numpy as np

from meshloom.core.spec import Spec, is_spec
from meshloom.core.tree import named_leaves
from meshloom.models.base import Model

TABLES = ("vocab", "position")
"""An array with one of these axes is looked up, not multiplied; the output head is counted by itself."""


def visible_keys(seq: int, window: int | None) -> float:
    """Keys that a query sees on average over a sequence with causal attention."""
    seen = np.arange(1, seq + 1)
    return float(np.minimum(seen, window or seq).mean())


def forward_flops(model: Model, c: Any, seq: int) -> float:
    """Operations a token, forward: 2 for each element of each matrix that the token goes through, 4 x heads x head x keys seen for attention's two products."""
    specs = named_leaves(model.specs(c), is_spec)
    matrices = sum(s.size * model.active(c, s) for s in specs.values() if _is_matrix(s))
    attention = sum(4 * c.heads * c.head * visible_keys(seq, kind.window) for kind in model.kinds(c))
    return 2 * matrices + 2 * c.vocab_padded * c.embed + attention


def train_flops(model: Model, c: Any, seq: int) -> float:
    """Operations a token of a training step: the backward pass takes twice the forward's. Recomputed work is not counted (model FLOPs)."""
    return 3 * forward_flops(model, c, seq)


def _is_matrix(s: Spec) -> bool:
    """Whether an array multiplies activations: it joins embed with another axis, and is no table."""
    own = [a for a in s.axes if a not in ("layer", "expert")]
    return "embed" in own and len(own) > 1 and not any(a in TABLES for a in own)
