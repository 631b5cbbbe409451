"""Activations and gated units whose backward pass keeps nothing but the inputs.

Arithmetic is in fp32 whatever the input's dtype; the result has the input's dtype, as in PyTorch."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshloom.core.vary import alike

_TANH = math.sqrt(2 / math.pi)
_CUBE = 0.044715


def _silu(u: Array) -> Array:
    return u * jax.nn.sigmoid(u)


def _silu_slope(u: Array) -> Array:
    s = jax.nn.sigmoid(u)
    return s * (1 + u * (1 - s))


def _gelu(u: Array) -> Array:
    return 0.5 * u * (1 + lax.erf(u * math.sqrt(0.5)))


def _gelu_slope(u: Array) -> Array:
    return 0.5 * (1 + lax.erf(u * math.sqrt(0.5))) + u * jnp.exp(-0.5 * u * u) * (1 / math.sqrt(2 * math.pi))


def _gelu_tanh(u: Array) -> Array:
    return 0.5 * u * (1 + jnp.tanh(_TANH * (u + _CUBE * u * u * u)))


def _gelu_tanh_slope(u: Array) -> Array:
    t = jnp.tanh(_TANH * (u + _CUBE * u * u * u))
    return 0.5 * (1 + t) + 0.5 * u * (1 - t * t) * _TANH * (1 + 3 * _CUBE * u * u)


def _relu(u: Array) -> Array:
    return jnp.maximum(u, 0)


def _relu_slope(u: Array) -> Array:
    return (u > 0).astype(u.dtype)


def _relu2(u: Array) -> Array:
    return jnp.square(jnp.maximum(u, 0))


def _relu2_slope(u: Array) -> Array:
    return 2 * jnp.maximum(u, 0)


def _tanh_slope(u: Array) -> Array:
    return 1 - jnp.square(jnp.tanh(u))


def _lean(value: Callable[[Array], Array], slope: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """The activation `value` with derivative `slope`, computed in fp32; the backward pass keeps the input alone."""

    @jax.custom_vjp
    def act(u):
        return value(u.astype(jnp.float32)).astype(u.dtype)

    def backward(u, dy):
        return ((dy.astype(jnp.float32) * slope(u.astype(jnp.float32))).astype(u.dtype),)

    act.defvjp(lambda u: (act(u), u), backward)
    return act


def _lean_gated(value: Callable[[Array], Array], slope: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    """value(gate) * up as one function; the backward pass keeps gate and up alone."""

    @jax.custom_vjp
    def act(gate, up):
        return (value(gate.astype(jnp.float32)) * up).astype(up.dtype)

    def backward(kept, dy):
        gate, up = kept
        g, dy = gate.astype(jnp.float32), dy.astype(jnp.float32)
        return (dy * up * slope(g)).astype(gate.dtype), (dy * value(g)).astype(up.dtype)

    act.defvjp(lambda gate, up: (act(gate, up), (gate, up)), backward)
    return lambda gate, up: act(*alike(gate, up))


# name as in Hugging Face's `hidden_act`: (value, slope).  gelu: exact, Hendrycks and Gimpel 2016, arXiv 1606.08415; gelu_new and
# gelu_pytorch_tanh: its tanh form; silu: Elfwing 2017, arXiv 1702.03118; relu2: So 2021, arXiv 2109.08668
_ROWS = {
    "silu": (_silu, _silu_slope),
    "gelu": (_gelu, _gelu_slope),
    "gelu_new": (_gelu_tanh, _gelu_tanh_slope),
    "gelu_pytorch_tanh": (_gelu_tanh, _gelu_tanh_slope),
    "relu": (_relu, _relu_slope),
    "relu2": (_relu2, _relu2_slope),
    "tanh": (jnp.tanh, _tanh_slope),
}

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {name: _lean(*row) for name, row in _ROWS.items()}
"""name -> act(u): same shape and dtype as u."""

GATED: dict[str, Callable[[Array, Array], Array]] = {name: _lean_gated(*row) for name, row in _ROWS.items()}
"""name -> act(gate, up) = ACTIVATIONS[name](gate) * up.  Source: Shazeer 2020, arXiv 2002.05202."""
