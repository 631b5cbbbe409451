"""Products of activations with weights, as one two-dimensional dot each.

XLA's CPU dots are fast for two-dimensional operands and insert transposed copies for others; on GPU and TPU the flat form compiles to the
same kernels. Everything here sees local shards, so flattening the tokens moves nothing between devices."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshloom.core.vary import alike


def contract(eq: str, x: Array, w: Any) -> Array:
    """einsum(eq, x, w) as one two-dimensional dot, e.g. "btd,dhk->bthk", "bthk,hkd->btd", "btd,vd->btv".
    The summed letters must be x's last ones, and w's first or last ones, in the same order; the rest of x, then of w, is the result.
    w: an array, or any leaf with `.dot(eq, x)` (an adapter, int8).  Raises ValueError for any other eq.  Returns x's dtype."""
    if not isinstance(w, jax.Array):
        return w.dot(eq, x)
    x2, w2, transposed, shape = flat(eq, x, w)
    return _dot(*alike(x2, w2), transposed).reshape(shape)  # type: ignore  # custom_vjp hides its result


def flat(eq: str, x: Array, w: Array) -> tuple[Array, Array, bool, tuple[int, ...]]:
    """x [n, i], w [i, o] (or [o, i], then True) as the product of eq takes them, and the shape of its result."""
    letters, transposed = _plan(eq)
    n = len(letters)
    rows, inner = x.shape[: x.ndim - n], math.prod(x.shape[x.ndim - n :])
    columns = w.shape[: w.ndim - n] if transposed else w.shape[n:]
    w2 = w.reshape(-1, inner) if transposed else w.reshape(inner, -1)
    return x.reshape(-1, inner), w2, transposed, (*rows, *columns)


@functools.cache
def _plan(eq: str) -> tuple[str, bool]:
    """(summed letters, whether they are w's last ones) of eq."""
    left, _, out = eq.partition("->")
    a, _, b = left.partition(",")
    for n in range(1, min(len(a), len(b)) + 1):
        summed, rows = a[-n:], a[:-n]
        if out == rows + b[n:] and b[:n] == summed:
            return summed, False
        if out == rows + b[:-n] and b[-n:] == summed:
            return summed, True
    raise ValueError(f"'{eq}' is not one flat product. Let the summed letters end x's and begin or end w's: 'btd,df->btf', 'btd,vd->btv'.")


def _mul(a: Array, b: Array, i: int, j: int) -> Array:
    return lax.dot_general(a, b, (((i,), (j,)), ((), ())), preferred_element_type=jnp.result_type(a, b))


def product(x: Array, w: Array, transposed: bool) -> Array:
    """x [n, i] @ w [i, o], or w [o, i] if transposed -> [n, o]."""
    return _mul(x, w, 1, 1 if transposed else 0).astype(x.dtype)


_dot = jax.custom_vjp(product, nondiff_argnums=(2,))


def _dot_backward(transposed, kept, dy):
    x, w = kept
    dw = tall(dy, x) if transposed else tall(x, dy)
    return turned(dy, w, transposed).astype(x.dtype), dw.astype(w.dtype)


def turned(dy: Array, w: Array, transposed: bool) -> Array:
    """The gradient of x, [n, i]."""
    return _mul(dy, w, 1, 0 if transposed else 1)


def tall(a: Array, b: Array) -> Array:
    """a.T @ b, [i, o] from [n, i] and [n, o].  On a CPU the narrower operand goes first and a wide result is turned afterwards: for
    n, i, o = 2048, 1536, 384 that is 96 against 80 GFLOP/s a core; the barrier keeps XLA from undoing it."""
    if a.shape[1] <= b.shape[1]:
        return _mul(a, b, 0, 0)
    return lax.platform_dependent(
        a, b, cpu=lambda a, b: lax.optimization_barrier(_mul(b, a, 0, 0)).T, default=lambda a, b: _mul(a, b, 0, 0)
    )


# the plain product, so that a rematerialisation policy sees a dot and may keep its result
_dot.defvjp(lambda x, w, transposed: (product(x, w, transposed), (x, w)), _dot_backward)
