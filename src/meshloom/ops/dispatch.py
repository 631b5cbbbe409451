"""A mixture's tokens between devices that have other experts: what each mode moves over the mesh axes that split experts.

Mesh axes that split the experts are of two sorts: those whose devices hold other tokens (*across*: tokens go to the experts' device and back), and
those whose devices hold the same tokens (*aside*, tensor parallelism's: each serves its own experts, and the partial results are added with the
layer's other ones, so that nothing more moves).

capacity: buffers of [experts, sequences x room, embed] are exchanged all to all, there and back; the transposes are the same again.  Source: GShard,
Lepikhin 2020, arXiv 2006.16668, algorithm 2.
dropless: how many tokens go where is not known before the step runs, and no worst case is smaller than all of them: all devices' tokens are gathered
with their choices, each device adds up its own experts' part, and the sums are scattered back: (n - 1) tokens in, (n - 1) out, where an exchange
of exactly what is needed would move top x (n - 1) / n: less only for n > top.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from meshloom.core.layout import Layout
from meshloom.ops.moe import Moves, by_capacity, by_expert, collect, experts_mlp, spread
from meshloom.ops.ring import KEPT


def across(lay: Layout) -> tuple[str, ...]:
    """Mesh axes that split both the experts and the tokens."""
    return tuple(a for a in lay.live.get("expert", ()) if a in lay.tokens)


def aside(lay: Layout) -> tuple[str, ...]:
    """Mesh axes that split the experts and not the tokens."""
    return tuple(a for a in lay.live.get("expert", ()) if a not in lay.tokens)


def dropless(lay: Layout, x: Array, expert: Array, weight: Array, gate: Array, up: Array, down: Array) -> Array:
    """The experts' weighted sum for every token, a part of it where experts or their matrices are split over devices with the same tokens.
    x: [tokens, embed].  expert, weight: [tokens, top], numbers of all experts.  gate, up, down: this device's experts.  Returns [tokens, embed]."""
    owners, over = lay.live.get("expert", ()), across(lay)
    if over:
        x, expert, weight = (lax.all_gather(a, over, axis=0, tiled=True) for a in (x, expert, weight))
    here = gate.shape[0]
    moves = by_expert(expert, here, lax.axis_index(owners) * here if owners else 0)
    y = collect(experts_mlp(lay.platform, spread(x, moves), moves.sizes, gate, up, down), weight, moves)
    return lax.psum_scatter(y, over, scatter_dimension=0, tiled=True) if over else y


def capacity(
    lay: Layout, rows: int, room: int, x: Array, expert: Array, weight: Array, gate: Array, up: Array, down: Array
) -> tuple[Array, Moves]:
    """As `dropless`, with `room` places for each expert and sequence (`ops.moe.by_capacity`).  rows: sequences here.  Also returns what went where."""
    over, beside = across(lay), aside(lay)
    n, t, here = lay.size(over), lay.size(beside), gate.shape[0]
    moves = by_capacity(expert, n * t * here, rows, room)
    sent = spread(x, moves).reshape(n, t, here, rows * room, x.shape[1])
    sent = lax.dynamic_index_in_dim(sent, lax.axis_index(beside), 1, keepdims=False) if beside else sent[:, 0]
    got = _exchanged(sent, over)
    sizes = jnp.full(here, n * rows * room, jnp.int32)
    y = experts_mlp(lay.platform, got.swapaxes(0, 1).reshape(-1, x.shape[1]), sizes, gate, up, down)
    y = y.reshape(here, n, rows * room, -1).swapaxes(0, 1)
    back = _exchanged(y, over)
    if beside:
        mine = jnp.arange(t) == lax.axis_index(beside)
        back = jnp.where(mine[:, None, None, None], back[:, None], 0)
    return collect(back.reshape(-1, x.shape[1]), weight, moves), moves


def _exchanged(x: Array, over: tuple[str, ...]) -> Array:
    """Part i of x's first axis to device i of these mesh axes, and theirs in order; x itself for none."""
    return checkpoint_name(lax.all_to_all(x, over, split_axis=0, concat_axis=0, tiled=True), KEPT) if over else x
