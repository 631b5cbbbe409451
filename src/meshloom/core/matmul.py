"""The local product of activations and weights, as one flat 2-D matmul."""

import math

import jax
import jax.numpy as jnp


def contract(eq: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """An einsum "ax,xb->ab" in which x's contracted axes come last and w's first: one 2-D dot."""
    operands, out = eq.split("->")
    first, second = operands.split(",")
    n = sum(letter in second for letter in first)
    if first[len(first) - n :] != second[:n] or out != first[: len(first) - n] + second[n:]:
        return jnp.einsum(eq, x, w)
    inner = math.prod(w.shape[:n])
    y = x.reshape(-1, inner) @ w.reshape(inner, -1)
    return y.reshape(*x.shape[: x.ndim - n], *w.shape[n:])
