"""Rows in groups times a matrix a group: the product inside a mixture of experts. A reference, and a row for each platform beside it.

`jax.lax.ragged_dot` is one kernel on GPU and TPU. On a CPU XLA makes it a masked product of every row with every matrix: 450 ms where this file's
blocks take 31 to 60 and the dense product of the same size 40 to 60 (4096 rows, 8 matrices of 384 x 768, 2 cores).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshloom.core.vary import alike, vary, varying

BLOCK, TALL = 64, 128
"""Rows of one block on a CPU: of a product that makes rows, and of one that sums over rows (it reads and writes the whole sum for each block)."""


def reference(x: Array, w: Array, sizes: Array) -> Array:
    """x [rows, in], sorted by group; w [groups, in, out]; sizes [groups] int32, rows of each group.  Returns [rows, out], each row times its
    group's matrix; rows beyond the last group are zero."""
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(x.shape[0]), side="right")
    mine = (group[:, None] == jnp.arange(w.shape[0])).astype(x.dtype)
    return jnp.einsum("ri,rg,gio->ro", x, mine, w)


def ragged(x: Array, w: Array, sizes: Array) -> Array:
    """As `reference`, by `jax.lax.ragged_dot`, which has its own gradient."""
    return lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.result_type(x, w)).astype(x.dtype)


def blocks(x: Array, w: Array, sizes: Array) -> Array:
    """As `reference`, a block of rows at a time: as many blocks run as the groups have, none for a group without rows."""
    x, w, sizes = alike(x, w, sizes)
    return _blocks(x, w, sizes)


@jax.custom_vjp
def _blocks(x: Array, w: Array, sizes: Array) -> Array:
    return _rows(x, w, sizes, 0)


def _rows(x: Array, w: Array, sizes: Array, side: int) -> Array:
    """Each row times its group's matrix (side 0) or its transpose (side 1).

    A group's last block also writes rows of the next one, which come after it and write these again; the rows beyond the last are cleared."""
    rows, out = x.shape[0], w.shape[2 - side]
    x = jnp.pad(x, ((0, BLOCK), (0, 0)))

    def group(y: Array, given: tuple[Array, Array, Array]) -> tuple[Array, None]:
        matrix, start, size = given

        def block(i: Array, y: Array) -> Array:
            part = lax.dynamic_slice_in_dim(x, start + i * BLOCK, BLOCK)
            new = lax.dot_general(part, matrix, (((1,), (side,)), ((), ())))
            return lax.dynamic_update_slice_in_dim(y, new.astype(y.dtype), start + i * BLOCK, 0)

        return lax.fori_loop(jnp.zeros_like(size), -(-size // BLOCK), block, y), None

    y = vary(jnp.zeros((rows + BLOCK, out), x.dtype), varying(x))
    y, _ = lax.scan(group, y, (w, jnp.cumsum(sizes) - sizes, sizes))
    return jnp.where((jnp.arange(rows) < jnp.sum(sizes))[:, None], y[:rows], 0)


def _outer(x: Array, y: Array, sizes: Array, dtype: jnp.dtype) -> Array:
    """x.T @ y over the rows of each group.  x [rows, in], y [rows, out] -> [groups, in, out]."""
    x, y = (jnp.pad(a, ((0, TALL), (0, 0))) for a in (x, y))

    def add(block: int, start: Array, end: Array, at: Array, total: Array) -> Array:
        first = start + at * block
        a, b = (lax.dynamic_slice_in_dim(v, first, block) for v in (x, y))
        a = jnp.where((first + jnp.arange(block) < end)[:, None], a, 0)
        return total + lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    def group(_: None, given: tuple[Array, Array]) -> tuple[None, Array]:
        start, size = given
        end, wide, none = start + size, size // TALL, jnp.zeros_like(size)
        total = vary(jnp.zeros((x.shape[1], y.shape[1]), jnp.float32), varying(x) | varying(y))
        total = lax.fori_loop(none, wide, partial(add, TALL, start, end), total)
        rest = size - wide * TALL
        total = lax.fori_loop(none, -(-rest // BLOCK), partial(add, BLOCK, start + wide * TALL, end), total)
        return None, total.astype(dtype)

    return lax.scan(group, None, (jnp.cumsum(sizes) - sizes, sizes))[1]


def _blocks_fwd(x: Array, w: Array, sizes: Array) -> tuple[Array, tuple]:
    return _rows(x, w, sizes, 0), (x, w, sizes)


def _blocks_bwd(kept: tuple, dy: Array) -> tuple[Array, Array, None]:
    x, w, sizes = kept
    return _rows(dy, w, sizes, 1).astype(x.dtype), _outer(x, dy, sizes, w.dtype), None


_blocks.defvjp(_blocks_fwd, _blocks_bwd)

KERNELS: dict[str, Callable[[Array, Array, Array], Array]] = {"reference": reference, "blocks": blocks, "ragged": ragged}
PREFERRED = {"cpu": "blocks"}
"""Platform -> its row; elsewhere `ragged`."""


def grouped(platform: str, x: Array, w: Array, sizes: Array) -> Array:
    """The platform's row of KERNELS; see `reference`."""
    return KERNELS[PREFERRED.get(platform, "ragged")](x, w, sizes)
