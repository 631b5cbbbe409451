"""Weights whose gradient can be made later than that of what they were multiplied with.

A backward pass makes two products at each weight: the gradient of its input, which the layer before waits for, and its own, which nothing waits for.
`Late` multiplies the second by a number; the derivative of a backward pass by that number is then exactly the second products, and
`jax.linearize` splits one from the other: the first part runs now, the second whenever its inputs, kept meanwhile, are given to it.
Source of the split: Qi et al. 2023, "Zero bubble pipeline parallelism", arXiv 2401.10241.
"""

import functools

import jax
import jax.numpy as jnp

from meshloom.core.layout import INSIDE, Layout
from meshloom.core.matmul import flat, product, tall, turned
from meshloom.core.spec import Spec
from meshloom.core.tree import pytree
from meshloom.core.vary import alike


@pytree
class Late:
    """A weight with the number by which its gradient is multiplied."""

    w: jax.Array
    times: jax.Array

    def dot(self, eq: str, x: jax.Array) -> jax.Array:
        """`core.matmul.contract` of x and the weight."""
        x2, w2, transposed, shape = flat(eq, x, self.w)
        *both, times = alike(x2, w2, self.times)
        return _dot(*both, times, transposed).reshape(shape)  # type: ignore  # custom_vjp hides its result


def waits(lay: Layout, s: Spec) -> bool:
    """Whether a layer's parameter is a matrix that `dot` multiplies, on this layout: its gradient can be made later."""
    return (
        s.role == "factor"
        and not s.frozen
        and not s.exact
        and len(s.axes) > 2
        and bool(INSIDE & set(s.axes))
        and "expert" not in s.axes
        and not lay.square
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dot(x, w, times, transposed):
    return product(x, w, transposed)


def _backward(transposed, kept, dy):
    x, w, times = kept
    dw = tall(dy * times.astype(dy.dtype), x) if transposed else tall(x, dy * times.astype(dy.dtype))
    return turned(dy, w, transposed).astype(x.dtype), dw.astype(w.dtype), jnp.zeros_like(times)


_dot.defvjp(lambda x, w, times, transposed: (product(x, w, transposed), (x, w, times)), _backward)
