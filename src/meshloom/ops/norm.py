"""RMS norm and layer norm over the last axis. Statistics in fp32; the backward pass keeps the input and one or two numbers a row."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshloom.core.vary import alike


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """x / rms(x) * gain.  x: [..., d], any leading axes (per head: [b, t, h, k]).  gain: [d].  Same shape and dtype as x.
    Source: Zhang and Sennrich 2019, arXiv 1910.07467; the rounding to x's dtype before the gain is that of `transformers`."""
    return _rms_norm(*alike(x, gain), eps)


def layer_norm(x: Array, gain: Array, bias: Array, eps: float) -> Array:
    """(x - mean(x)) / std(x) * gain + bias.  x: [..., d].  gain, bias: [d].  Same shape and dtype as x.
    Source: Ba 2016, arXiv 1607.06450; biased variance."""
    return _layer_norm(*alike(x, gain, bias), eps)


def _mean(x: Array) -> Array:
    return x.mean(-1, keepdims=True)


def _rms_forward(x, gain, eps):
    wide = x.astype(jnp.float32)
    r = lax.rsqrt(_mean(jnp.square(wide)) + eps)
    return ((wide * r).astype(x.dtype) * gain).astype(x.dtype), (x, r, gain)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(x, gain, eps):
    return _rms_forward(x, gain, eps)[0]


def _rms_backward(eps, kept, dy):
    x, r, gain = kept
    dy = dy.astype(jnp.float32)
    unit = x.astype(jnp.float32) * r
    dunit = dy * gain
    dx = r * (dunit - unit * _mean(dunit * unit))
    return dx.astype(x.dtype), (dy * unit).sum(tuple(range(x.ndim - 1))).astype(gain.dtype)


_rms_norm.defvjp(_rms_forward, _rms_backward)


def _layer_forward(x, gain, bias, eps):
    wide = x.astype(jnp.float32)
    m = _mean(wide)
    r = lax.rsqrt(_mean(jnp.square(wide - m)) + eps)
    # bias rides along for its dtype only
    return ((wide - m) * r * gain + bias).astype(x.dtype), (x, m, r, gain, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _layer_norm(x, gain, bias, eps):
    return _layer_forward(x, gain, bias, eps)[0]


def _layer_backward(eps, kept, dy):
    x, m, r, gain, bias = kept
    dy = dy.astype(jnp.float32)
    unit = (x.astype(jnp.float32) - m) * r
    dunit = dy * gain
    dx = r * (dunit - _mean(dunit) - unit * _mean(dunit * unit))
    rows = tuple(range(x.ndim - 1))
    return dx.astype(x.dtype), (dy * unit).sum(rows).astype(gain.dtype), dy.sum(rows).astype(bias.dtype)


_layer_norm.defvjp(_layer_forward, _layer_backward)
