"""Whether a conversion is right: the same bits when read again, and the same logits as `transformers`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshloom.core.tree import Tree, named_leaves
from meshloom.models.base import Model
from meshloom.runner.forward import logits


class Proof(NamedTuple):
    """What was compared. lines: for people. equal: whether all of it agreed."""

    lines: tuple[str, ...]
    equal: bool


def same_bits(before: Tree, after: Tree, what: str) -> Proof:
    """Compares two trees bit for bit, leaf by leaf on the host.  Names up to eight leaves that differ."""
    a, b = named_leaves(before), named_leaves(after)
    differ = [name for name in a | b if name not in a or name not in b or np.asarray(a[name]).tobytes() != np.asarray(b[name]).tobytes()]
    if differ:
        return Proof((f"{what}: {len(differ)} of {len(a | b)} parameters DIFFER: {', '.join(differ[:8])}",), False)
    return Proof((f"{what}: all {len(a)} parameters are equal bit for bit",), True)


def same_logits(ours: np.ndarray, theirs: np.ndarray, limit: float) -> Proof:
    """Compares logits [batch, seq, vocab] at every position.  limit: on the mean KL divergence in nats, and on the largest difference of
    logits up to 10 in size; beyond that in proportion, as the rounding of fp32 is."""
    wide = [np.asarray(x, np.float64) for x in (ours, theirs)]
    p, q = (x - x.max(-1, keepdims=True) for x in wide)
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    largest, kl = float(np.abs(wide[0] - wide[1]).max()), float((np.exp(q) * (q - p)).sum(-1).mean())
    top = float((wide[0].argmax(-1) == wide[1].argmax(-1)).mean())
    allowed = limit * max(1.0, float(np.abs(wide[1]).max()) / 10)
    equal = largest <= allowed and kl <= limit
    line = f"logits against transformers: largest difference {largest:.2e} (limit {allowed:.1e}), KL {max(kl, 0):.2e} nats, same first token {top:.2%}"
    return Proof((line + ("" if equal else ": DIFFER"),), equal)


def transformers_logits(folder: Any, tokens: np.ndarray) -> np.ndarray | None:
    """The logits that `transformers` computes in fp32 from a folder, row by row; None where it is not installed.  tokens: [batch, seq]."""
    try:
        import torch
        import transformers
    except ModuleNotFoundError:
        return None
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return np.concatenate([model(torch.tensor(row[None].astype(np.int64))).logits.numpy() for row in tokens])


def our_logits(model: Model, c: Any, w: Tree, tokens: np.ndarray) -> np.ndarray:
    """Our logits [batch, seq, vocab] in fp32."""
    w = jax.tree.map(lambda x: x.astype(jnp.float32), w)
    with jax.default_matmul_precision("highest"):
        run = jax.jit(functools.partial(logits, model, c))
        return np.concatenate([np.asarray(run(w, row[None])) for row in tokens])


def sample_tokens(vocab: int, max_seq: int, batch: int = 2, seq: int = 80) -> np.ndarray:
    """Random token ids [batch, seq], always the same; long enough to show a mistake in the positions."""
    return np.random.default_rng(0).integers(0, vocab, (batch, min(seq, max_seq))).astype(np.int32)
