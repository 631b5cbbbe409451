"""Tokens to experts and back: a plain reference, and dispatch by sorting, with a capacity or without.

A *buffer* has one row for each assignment of a token to an expert, the rows of one expert together. Moving rows there and back is a gather in both
directions, forward and backward: scattered sums are slow everywhere and on a CPU run on one core.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshloom.core.vary import alike
from meshloom.ops.act import GATED
from meshloom.ops.grouped import grouped


class Moves(NamedTuple):
    """Which assignment lies where. source: int32 [rows], the assignment (token x top + choice) in each row of the buffer, or tokens x top for an
    empty row. slot: int32 [tokens, top], the row of each assignment, or `rows` for one that has none. sizes: int32 [experts], rows of each."""

    source: Array
    slot: Array
    sizes: Array


def reference(x: Array, expert: Array, weight: Array, gate: Array, up: Array, down: Array) -> Array:
    """Every expert on every token, and the chosen ones' results added up.  x: [tokens, embed].  expert, weight: [tokens, top].
    gate, up: [experts, embed, ffn].  down: [experts, ffn, embed].  Returns [tokens, embed]."""
    hidden = GATED["silu"](jnp.einsum("nd,edf->nef", x, gate), jnp.einsum("nd,edf->nef", x, up))
    chosen = (expert[..., None] == jnp.arange(gate.shape[0])) * weight[..., None]
    return jnp.einsum("nef,efd,nke->nd", hidden, down, chosen)


def capacity(tokens: int, top: int, experts: int, factor: float) -> int:
    """Rows that one expert has for one sequence of `tokens` positions: its even share times `factor`, rounded up; never more than the tokens."""
    return min(tokens, math.ceil(tokens * top * factor / experts))


def by_expert(expert: Array, experts: int, first: Array | int = 0) -> Moves:
    """Dropless: all assignments sorted by expert, then by token.  expert: int32 [tokens, top].  experts: how many are here, from number `first` on;
    assignments to others, and padding, lie behind all rows that count."""
    tokens, top = expert.shape
    local = expert.reshape(-1) - first
    local = jnp.where((local >= 0) & (local < experts), local, experts)
    _, source = lax.sort((local, jnp.arange(tokens * top, dtype=jnp.int32)), num_keys=1, is_stable=True)
    slot = jnp.zeros(tokens * top, jnp.int32).at[source].set(jnp.arange(tokens * top, dtype=jnp.int32), unique_indices=True)
    sizes = (local[:, None] == jnp.arange(experts)).sum(0, dtype=jnp.int32)
    return Moves(source, slot.reshape(tokens, top), sizes)


def by_capacity(expert: Array, experts: int, rows: int, room: int) -> Moves:
    """With `room` places for each expert and sequence, taken in the order of the positions (and of a token's choices): a token that comes too late
    is dropped by that expert. So what is dropped depends on its own sequence alone, not on how a batch is cut.
    expert: int32 [rows x seq, top].  The buffer is [experts, rows, room]."""
    tokens, top = expert.shape
    total = tokens * top
    number = jnp.arange(total, dtype=jnp.int32)
    row = number // (total // rows)
    flat = expert.reshape(-1)
    queue = jnp.where(flat < experts, flat * rows + row, experts * rows)
    ordered, source = lax.sort((queue, number), num_keys=1, is_stable=True)
    place = number - jnp.searchsorted(ordered, ordered, side="left").astype(jnp.int32)
    kept = (place < room) & (ordered < experts * rows)
    at = jnp.where(kept, ordered * room + place, experts * rows * room)
    slot = jnp.zeros(total, jnp.int32).at[source].set(at, unique_indices=True)
    back = jnp.full(experts * rows * room, total, jnp.int32).at[at].set(source, mode="drop", unique_indices=True)
    return Moves(back, slot.reshape(tokens, top), jnp.full(experts, rows * room, jnp.int32))


def spread(x: Array, moves: Moves) -> Array:
    """Rows of tokens as rows of the buffer, empty ones zero.  x: [tokens, embed] -> [rows, embed]."""
    x, source, slot = alike(x, moves.source, moves.slot)
    return _spread(x, source, slot)


@jax.custom_vjp
def _spread(x: Array, source: Array, slot: Array) -> Array:
    top = slot.shape[1]
    return _take(x, source // top, source < slot.size)


def _take(x: Array, index: Array, there: Array) -> Array:
    """Rows of x, zero where `there` is False."""
    return jnp.where(there[..., None], jnp.take(x, index, axis=0, mode="clip"), 0)


def _spread_bwd(kept: tuple[Array, Array], dy: Array) -> tuple:
    source, slot = kept
    return _take(dy, slot, slot < source.size).sum(1), None, None


_spread.defvjp(lambda x, source, slot: (_spread(x, source, slot), (source, slot)), _spread_bwd)


def collect(y: Array, weight: Array, moves: Moves) -> Array:
    """Each token's results, weighted and added up.  y: [rows, embed].  weight: fp32 [tokens, top].  Returns [tokens, embed] of y's type."""
    y, weight, source, slot = alike(y, weight, moves.source, moves.slot)
    return _collect(y, weight, source, slot)


@jax.custom_vjp
def _collect(y: Array, weight: Array, source: Array, slot: Array) -> Array:
    parts = _take(y, slot, slot < source.size)
    return (parts * weight[..., None].astype(jnp.float32)).sum(1).astype(y.dtype)


def _collect_fwd(y: Array, weight: Array, source: Array, slot: Array) -> tuple[Array, tuple]:
    return _collect(y, weight, source, slot), (y, weight, source, slot)


def _collect_bwd(kept: tuple, dout: Array) -> tuple:
    y, weight, source, slot = kept
    there = source < slot.size
    share = jnp.where(there, jnp.take(weight.reshape(-1), source, mode="clip"), 0)
    dy = jnp.take(dout, source // slot.shape[1], axis=0, mode="clip") * share[:, None]
    dweight = jnp.einsum("nkd,nd->nk", _take(y, slot, slot < source.size), dout, preferred_element_type=jnp.float32)
    return dy.astype(y.dtype), dweight.astype(weight.dtype), None, None


_collect.defvjp(_collect_fwd, _collect_bwd)


def experts_mlp(platform: str, x: Array, sizes: Array, gate: Any, up: Any, down: Any) -> Array:
    """The gated MLP of each row's expert.  x: [rows, embed] by expert.  sizes: int32 [experts].  Returns [rows, embed]."""
    hidden = GATED["silu"](grouped(platform, x, gate, sizes), grouped(platform, x, up, sizes))
    return grouped(platform, hidden, down, sizes)
