"""RMS norm and layer norm over the last axis. Statistics in fp32; the backward pass keeps the input and one or two numbers a row."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshloom.core.leaf import sum_over
from meshloom.core.vary import alike


def rms_norm(x: Array, gain: Array, eps: float, axes: tuple[str, ...] = ()) -> Array:
    """x / rms(x) * gain.  x: [..., d], any leading axes (per head: [b, t, h, k]).  gain: [d].  Same shape and dtype as x.
    axes: mesh axes that split d; one all-reduce of a number a row each way.
    Source: Zhang and Sennrich 2019, arXiv 1910.07467; the rounding to x's dtype before the gain is that of `transformers`."""
    return _rms_norm(*alike(x, gain), eps, axes)


def layer_norm(x: Array, gain: Array, bias: Array, eps: float, axes: tuple[str, ...] = ()) -> Array:
    """(x - mean(x)) / std(x) * gain + bias.  x: [..., d].  gain, bias: [d].  Same shape and dtype as x.
    axes: mesh axes that split d; two all-reduces of a number a row each way.  Source: Ba 2016, arXiv 1607.06450; biased variance."""
    return _layer_norm(*alike(x, gain, bias), eps, axes)


def _mean(x: Array, axes: tuple[str, ...]) -> Array:
    """Over the last axis, which `axes` split."""
    mean = x.mean(-1, keepdims=True)
    return sum_over(mean, axes) / math.prod(lax.axis_size(a) for a in axes) if axes else mean


def _rms_forward(x, gain, eps, axes):
    wide = x.astype(jnp.float32)
    r = lax.rsqrt(_mean(jnp.square(wide), axes) + eps)
    return ((wide * r).astype(x.dtype) * gain).astype(x.dtype), (x, r, gain)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rms_norm(x, gain, eps, axes):
    return _rms_forward(x, gain, eps, axes)[0]


def _rms_backward(eps, axes, kept, dy):
    x, r, gain = kept
    dy = dy.astype(jnp.float32)
    unit = x.astype(jnp.float32) * r
    dunit = dy * gain
    dx = r * (dunit - unit * _mean(dunit * unit, axes))
    return dx.astype(x.dtype), (dy * unit).sum(tuple(range(x.ndim - 1))).astype(gain.dtype)


_rms_norm.defvjp(_rms_forward, _rms_backward)


def _layer_forward(x, gain, bias, eps, axes):
    wide = x.astype(jnp.float32)
    m = _mean(wide, axes)
    r = lax.rsqrt(_mean(jnp.square(wide - m), axes) + eps)
    # bias rides along for its dtype only
    return ((wide - m) * r * gain + bias).astype(x.dtype), (x, m, r, gain, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _layer_norm(x, gain, bias, eps, axes):
    return _layer_forward(x, gain, bias, eps, axes)[0]


def _layer_backward(eps, axes, kept, dy):
    x, m, r, gain, bias = kept
    dy = dy.astype(jnp.float32)
    unit = (x.astype(jnp.float32) - m) * r
    dunit = dy * gain
    dx = r * (dunit - _mean(dunit, axes) - unit * _mean(dunit * unit, axes))
    rows = tuple(range(x.ndim - 1))
    return dx.astype(x.dtype), (dy * unit).sum(rows).astype(gain.dtype), dy.sum(rows).astype(bias.dtype)


_layer_norm.defvjp(_layer_forward, _layer_backward)
