"""Causal attention: a plain reference, and a table of faster rows that a caller chooses from by `choose`.

Every row has the same call: q [b, T, h, k], k and v [b, S, g, k] (h a multiple of g: query head i reads kv head i // (h // g)) ->
[b, T, h, k] in q's dtype, softmax in fp32. A device whose query heads do not map to its kv heads that way passes k[:, :, kv_index(...)].
Source: Vaswani 2017, arXiv 1706.03762; grouped heads: Ainslie 2023, arXiv 2305.13245; window: Mistral 7B, arXiv 2310.06825."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshloom.ops.blocks import block_size, causal_blocks
from meshloom.ops.dropout import AttentionDropout, attention_mask
from meshloom.ops.mask import LOW, Pair, visible
from meshloom.ops.ring import ring_attention


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    window: int | None = None,
    segments: Pair | None = None,
    positions: Pair | None = None,
    dropout: AttentionDropout | None = None,
) -> Array:
    """The reference.  A query sees what `mask.visible` says.  scale: on scores.
    segments: document numbers (padding is a document of its own).  positions: not given: indices, T = S.
    A query that sees nothing returns 0.  Returns [b, T, h, k].  Source: see the top of this file."""
    b, t, h, size = q.shape
    g = k.shape[2]
    scores = jnp.einsum("btgrk,bsgk->bgrts", q.reshape(b, t, g, h // g, size), k, preferred_element_type=jnp.float32) * scale
    mask = visible(t, k.shape[1], window, segments, positions)[:, None, None]
    scores = jnp.where(mask, scores, LOW)
    e = jnp.where(mask, jnp.exp(scores - scores.max(-1, keepdims=True)), 0)
    p = e / jnp.maximum(e.sum(-1, keepdims=True), 1e-30)
    if dropout is not None:
        p = p * attention_mask(dropout).reshape(b, g, h // g, t, -1)
    return jnp.einsum("bgrts,bsgk->btgrk", p.astype(v.dtype), v).reshape(q.shape).astype(q.dtype)


def kv_index(first: int | Array, count: int, heads: int, kv_heads: int) -> Array:
    """Number of the kv head of each of `count` query heads from number `first` on, [count]: k[:, :, kv_index(...)] repeats kv heads for a
    device that holds all of them but only some query heads.  heads, kv_heads: in the whole model."""
    return (first + jnp.arange(count)) * kv_heads // heads


@dataclass(frozen=True)
class Case:
    """What a row must be able to do: local shapes and the features in use."""

    platform: str
    """"cpu", "gpu" or "tpu", as `device.platform`."""
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head: int
    """Features a head."""
    dtype: str = "float32"
    batch: int = 1
    window: bool = False
    segments: bool = False
    positions: bool = False
    dropout: bool = False


class Kernel(NamedTuple):
    """A row of the table: what it is good for, and the function."""

    run: Callable[..., Array]
    """Called like `attention`."""
    supports: Callable[[Case], str]
    """Why it cannot serve a case; "" if it can."""


class Choice(NamedTuple):
    """The row that serves a case, and why those before it do not."""

    name: str
    passed_over: tuple[tuple[str, str], ...]
    """(row, why not) for each row that was preferred but cannot serve."""

    def explain(self) -> str:
        """One sentence."""
        why = "; ".join(f"not {name}: {reason}" for name, reason in self.passed_over)
        return f"attention by '{self.name}'" + (f" ({why})" if why else "")


def _decode(q, k, v, *, scale, window=None, segments=None, positions=None, dropout=None) -> Array:
    """Few queries against a cache: products and sums over the cache as it lies, no transposed copy of it."""
    _refuse("decode", dropout is not None and "attention dropout")
    b, t, h, size = q.shape
    g = k.shape[2]
    mask = visible(t, k.shape[1], window, segments, positions)[:, :, :, None, None]
    rows = q.reshape(b, t, 1, g, h // g, size).astype(jnp.float32) * scale
    scores = jnp.where(mask, _summed(rows * k[:, None, :, :, None]), LOW)  # [b, t, S, g, r]
    e = jnp.where(mask, jnp.exp(scores - scores.max(2, keepdims=True)), 0)
    p = e / jnp.maximum(e.sum(2, keepdims=True), 1e-30)
    return (p[..., None] * v[:, None, :, :, None]).sum(2).reshape(q.shape).astype(q.dtype)


def _summed(x: Array) -> Array:
    """x, fp32, summed over its last axis.  For one row on a CPU as a product with ones, which takes 0.64 of the attention of a token there."""

    def product(x: Array) -> Array:
        ones = jnp.ones(x.shape[-1], x.dtype)
        return lax.dot_general(x.reshape(-1, x.shape[-1]), ones, (((1,), (0,)), ((), ()))).reshape(x.shape[:-1])

    plain = lambda x: x.sum(-1)
    return lax.platform_dependent(x, cpu=product, default=plain) if x.shape[0] == 1 else plain(x)


def _decode_supports(c: Case) -> str:
    if c.dropout:
        return "no attention dropout"
    return f"made for at most 4 queries, here {c.queries}" if c.queries > 4 else ""


def _blocks(q, k, v, *, scale, window=None, segments=None, positions=None, dropout=None) -> Array:
    _refuse("blocks", positions is not None and "positions", dropout is not None and "attention dropout")
    return causal_blocks(q, k, v, segments, scale=scale, window=window)


def _whole_supports(c: Case) -> str:
    if c.dropout:
        return "no attention dropout"
    if c.positions or c.queries != c.keys:
        return "a query's index must be its position (whole sequences, no cache)"
    return ""


def _blocks_supports(c: Case) -> str:
    # a window makes blocks and what they see small
    if not c.window and c.batch * c.heads * block_size(c.queries, None) * c.keys * 4 > 1 << 30 and not c.queries % 2:
        return "the scores of one block would take over 1 GiB"
    return _whole_supports(c)


def _stream(q, k, v, *, scale, window=None, segments=None, positions=None, dropout=None) -> Array:
    _refuse("stream", positions is not None and "positions")
    known = None if segments is None else segments[0]
    return ring_attention(q, k, v, axes=(), ring=1, scale=scale, window=window, segments=known, dropout=dropout)


def _stream_supports(c: Case) -> str:
    if c.queries % 2:
        return f"needs an even number of tokens, here {c.queries}"
    if c.dropout and c.batch * c.heads * c.queries * c.keys * 4 <= 1 << 30:
        return "the reference is faster with attention dropout as long as all scores fit 1 GiB"
    return _whole_supports(replace(c, dropout=False))


def _cudnn(q, k, v, *, scale, window=None, segments=None, positions=None, dropout=None) -> Array:
    _refuse("cudnn", positions is not None and "positions", dropout is not None and "attention dropout")
    mask = None
    if segments is not None:
        # without the causal part, which cuDNN applies itself and skips blocks by
        mask = (segments[0][:, :, None] == segments[1][:, None, :])[:, None]
    local = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, is_causal=True, implementation="cudnn", local_window_size=local)


def _cudnn_supports(c: Case) -> str:
    if c.platform not in ("gpu", "cuda"):
        return f"needs an NVIDIA GPU, here {c.platform}"
    if c.dtype not in ("bfloat16", "float16"):
        return f"needs bfloat16 or float16, here {c.dtype}"
    if c.head % 8 or c.head > 128:
        return f"needs a multiple of 8 up to 128 features a head, here {c.head}"
    if c.segments and c.batch * c.queries * c.keys * 2 > 1 << 30:
        return "the mask of packed documents would take over 1 GiB"
    return _whole_supports(c)


def _refuse(row: str, *used: str | bool) -> None:
    for what in used:
        if what:
            raise ValueError(f"Attention row '{row}' cannot do {what}. Take the row that `choose` returns for this case, or 'reference'.")


KERNELS: dict[str, Kernel] = {
    "reference": Kernel(attention, lambda c: ""),
    "blocks": Kernel(_blocks, _blocks_supports),
    "stream": Kernel(_stream, _stream_supports),
    "cudnn": Kernel(_cudnn, _cudnn_supports),
    "decode": Kernel(_decode, _decode_supports),
}

PREFERRED = ("decode", "cudnn", "blocks", "stream", "reference")
"""Best first."""


def choose(case: Case) -> Choice:
    """The first row of PREFERRED that serves the case, with why each one before it does not.  The caller reports it."""
    passed = []
    for name in PREFERRED:
        why = KERNELS[name].supports(case)
        if not why:
            return Choice(name, tuple(passed))
        passed.append((name, why))
    raise AssertionError("the reference serves every case")
