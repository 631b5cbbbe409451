"""Products of matrices of which every device of a square holds one block, panel by panel: nothing is gathered.

Device (i, j) of a q x q square holds block X_ij of the activations (tokens over i, features over j). In step s of q it works with the panels of index
t = i + j + s (mod q), which come straight from where they lie, and sends sums straight to where they belong: each device receives q - 1 panels of each
operand that moves, as SUMMA's broadcasts bring it, and works with one at a time.  Source: van de Geijn and Watts 1997, LAPACK working note 96; the three
forms and their backward passes: Xu et al. 2021, arXiv 2104.05343, section 3.1.  The schedule of t is Cannon's, without his first alignment.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from meshloom.core.vary import alike

PRODUCT = "streamed product"
"""Name of a result, so that a rematerialisation policy may keep it and not the panels' products that it is the sum of."""


class Square(NamedTuple):
    """Mesh axes of a square of q x q devices."""

    rows: str
    cols: str
    side: int


def streamed(grid: Square, x: Array, weights: tuple[Array, ...], into: bool) -> Array:
    """x [m, k] @ weights side by side, on blocks.  into: they are W_ij [k, n] of W [K over rows, N over cols]; else [k, n] of W [K over cols, N over
    rows].  Returns Y_ij [m, n].  Numbers received, forward and backward: 3 (q-1) (MK + KN) / q^2, or (q-1) (2 MN + 3 KN) / q^2."""
    x, *alike_weights = alike(x, *weights)
    y = _into(x, tuple(alike_weights), grid) if into else _out_of(x, _beside(alike_weights), grid)
    return checkpoint_name(y, PRODUCT)


def _beside(weights: Sequence[Array]) -> Array:
    return weights[0] if len(weights) == 1 else jnp.concatenate(weights, 1)


def _move(x: Array, grid: Square, s: int, over: str, back: bool) -> Array:
    """The block of index t along mesh axis `over`, of the device's own row or column; back: this block to the device of index t."""
    q, pairs = grid.side, []
    for i in range(q):
        for j in range(q):
            t = (i + j + s) % q
            far, here = (i, t) if over == grid.cols else (t, j), (i, j)
            a, b = (here, far) if back else (far, here)
            pairs.append((a[0] * q + a[1], b[0] * q + b[1]))
    return lax.ppermute(x, (grid.rows, grid.cols), pairs)


def _mul(a: Array, b: Array, i: int = 1, j: int = 0) -> Array:
    """The product over a's axis i and b's axis j."""
    return lax.dot_general(a, b, (((i,), (j,)), ((), ())), preferred_element_type=jnp.result_type(a, b))


def _steps(grid: Square, operands: tuple[Array, ...], step: Callable[..., tuple[Array, ...]]) -> tuple[Array, ...]:
    """The sums of what q steps make.  step: (s, *operands) -> terms. A step's panels do not set out before the step before it has made its terms."""
    totals: tuple[Array, ...] = ()
    for s in range(grid.side):
        if totals:
            operands, totals = lax.optimization_barrier((operands, totals))
        terms = step(s, *operands)
        totals = tuple(a + b for a, b in zip(totals, terms)) if totals else terms
    return totals


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _into(x, weights, grid):
    return _into_forward(x, weights, grid)[0]


def _into_forward(x, weights, grid):
    step = lambda s, x, w: (_mul(_move(x, grid, s, grid.cols, False), _move(w, grid, s, grid.rows, False)),)
    # what is kept are the weights as they were given: no copy, and not what ZeRO has gathered
    return _steps(grid, (x, _beside(weights)), step)[0], (x, weights)


def _into_backward(grid, kept, dy):
    """dX_ik is the sum over j of dY_ij W_kj^T, dW_kj that over i of X_ik^T dY_ij: panels of W and X come, sums go.
    (What has moved before is moved turned, so that no compiler takes the panels for those of the forward pass, and keeps them since then.)"""
    x, weights = kept

    def step(s, xt, wt, dy):
        dx = _mul(dy, _move(wt, grid, s, grid.rows, False))
        dw = _mul(_move(xt, grid, s, grid.cols, False), dy)
        return _move(dx, grid, s, grid.cols, True), _move(dw, grid, s, grid.rows, True)

    dx, dw = _steps(grid, (x.T, _beside(weights).T, dy), step)
    ends = list(itertools.accumulate(w.shape[1] for w in weights))
    return dx, tuple(jnp.split(dw, ends[:-1], 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _out_of(x, w, grid):
    return _out_of_forward(x, w, grid)[0]


def _out_of_forward(x, w, grid):
    def step(s, x, w):
        y = _mul(x, _move(w, grid, s, grid.rows, False))
        return (_move(y, grid, s, grid.cols, True),)

    return _steps(grid, (x, w), step)[0], (x, w)


def _out_of_backward(grid, kept, dy):
    """dX_ik is the sum over n of dY_in W_kn^T, dW_kn that over i of X_ik^T dY_in: one panel of dY serves both."""
    x, w = kept

    def step(s, x, wt, dy):
        panel = _move(dy, grid, s, grid.cols, False)
        dw = _mul(x, panel, 0, 0)
        return _mul(panel, _move(wt, grid, s, grid.rows, False)), _move(dw, grid, s, grid.rows, True)

    return _steps(grid, (x, w.T, dy), step)


_into.defvjp(_into_forward, _into_backward)
_out_of.defvjp(_out_of_forward, _out_of_backward)
