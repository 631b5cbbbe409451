"""Rotary position embedding with every scaling that checkpoints use. Pairs are (i, i + half), Hugging Face's convention.

Source: Su 2021, arXiv 2104.09864."""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshloom.core.apart import apart
from meshloom.core.config import Section
from meshloom.core.vary import vary, varying


class Rope(Section):
    """Parameters of a rotary embedding; a scaling reads those that it needs."""

    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    """Which scaling; Hugging Face's `rope_type`."""
    theta: float = 10000.0
    """Base of the wavelengths."""
    partial: float = 1.0
    """Fraction of each head that is rotated, from its start."""
    factor: float = 1.0
    """How many times longer than the original the context becomes."""
    original: int = 8192
    """Length that the model was first trained with, in tokens (dynamic: `max_position_embeddings`)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original / low_freq_factor are stretched by the whole factor."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original / high_freq_factor are left alone."""
    beta_fast: float = 32.0
    """yarn: features that turn more often than this within the original length are left alone."""
    beta_slow: float = 1.0
    """yarn: features that turn less often than this are stretched by the whole factor."""
    attention_factor: float | None = None
    """yarn: factor on cos and sin; not given: 0.1 ln(factor) + 1, or the quotient of the two mscales."""
    mscale: float = 0.0
    """yarn: numerator's mscale (0: not used)."""
    mscale_all_dim: float = 0.0
    """yarn: denominator's mscale (0: not used)."""
    truncate: bool = True
    """yarn: round the ramp's ends to whole features."""


def rotated(rope: Rope, head: int) -> int:
    """Number of features of a head that are rotated.  head: features a head."""
    return int(head * rope.partial)


def check_pairs(rope: Rope, head: int) -> None:
    """Raises ValueError where the last feature that is rotated has no partner in its head."""
    if rotated(rope, head) % 2 and rotated(rope, head) == head:
        raise ValueError(f"Rotary positions turn pairs of features, and each head has {head}. Use an even width of heads (embed / heads).")


def _default(rope: Rope, size: int) -> np.ndarray:
    return np.float32(1) / np.float32(rope.theta) ** (np.arange(0, size, 2, dtype=np.float32) / np.float32(size))


def _linear(rope: Rope, size: int) -> np.ndarray:
    """Source: Chen 2023, arXiv 2306.15595."""
    return _default(rope, size) / np.float32(rope.factor)


def _llama3(rope: Rope, size: int) -> np.ndarray:
    """Long waves divided by the factor, short ones kept, a smooth ramp between.  Source: Llama 3.1's model card."""
    freq = _default(rope, size)
    turns = np.float32(rope.original) * freq / np.float32(2 * math.pi)
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(ramp, 0, 1).astype(np.float32)
    return (1 - keep) * freq / np.float32(rope.factor) + keep * freq


def _yarn(rope: Rope, size: int) -> np.ndarray:
    """Few turns within the original length: divided by the factor; many: kept; a linear ramp over features between.
    Source: Peng 2023, arXiv 2309.00071, section 3.2."""

    def feature(turns: float) -> float:
        return size * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = feature(rope.beta_fast), feature(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low if high != low else 0.001
    stretch = np.clip((np.arange(size // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    freq = _default(rope, size)
    return freq / np.float32(rope.factor) * stretch + freq * (1 - stretch)


def _dynamic(rope: Rope, size: int, length: Array) -> Array:
    """The base grows with the length of the text, length: [b, 1] tokens -> [b, 1, size/2].  Source: `transformers`' "dynamic"."""
    grown = jnp.maximum(length, rope.original).astype(jnp.float32)
    stretch = (rope.factor * grown / rope.original - (rope.factor - 1)) ** (size / (size - 2))
    power = jnp.arange(0, size, 2, dtype=jnp.float32) / size
    return 1 / (rope.theta * stretch[..., None]) ** power


SCALINGS: dict[str, Callable] = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "dynamic": _dynamic}
"""rope_type -> frequencies(rope, rotated features), radians a token; "dynamic" takes the length too."""


def attention_factor(rope: Rope) -> float:
    """Factor on cos and sin: 1 except for yarn.  Source: arXiv 2309.00071, equation 22; mscale as DeepSeek-V2 uses it."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(m: float) -> float:
        return 0.1 * m * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    return scale(rope.mscale) / scale(rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else scale(1.0)


def tables(rope: Rope, head: int, positions: Array, length: int | None = None) -> tuple[Array, Array]:
    """cos and sin, fp32, each [b, T, rotated/2].  positions: [b, T] tokens.  head: features a head.
    length: tokens, for "dynamic" only: not given, each row takes its own largest position + 1, so that rows never touch each other.
    Apart, since XLA:CPU would compute every cosine again for each head of each layer (3.6 % of a Llama step)."""
    size = rotated(rope, head)
    if rope.kind == "dynamic":
        longest = positions.max(-1, keepdims=True) + 1 if length is None else jnp.full((1, 1), length)
        frequencies = _dynamic(rope, size, longest)
    else:
        frequencies = jnp.asarray(SCALINGS[rope.kind](rope, size))
    angles = positions[..., None].astype(jnp.float32) * frequencies
    factor = attention_factor(rope)
    return apart(lambda a: (jnp.cos(a) * factor, jnp.sin(a) * factor), angles)


def apply(x: Array, cos: Array, sin: Array) -> Array:
    """x with its first 2 * cos.shape[-1] features rotated, the rest as they are.  x: [b, T, h, k].  cos, sin: [b or 1, T, rotated/2].
    Same shape and dtype as x.  cos and sin get no gradient."""
    return _apply(vary(x, varying(cos) | varying(sin)), cos, sin)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    half = cos.shape[-1]
    c, s = cos[:, :, None], sin[:, :, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([(a * c - b * s).astype(x.dtype), (b * c + a * s).astype(x.dtype), rest], -1)


@jax.custom_vjp
def _apply(x, cos, sin):
    return _rotate(x, cos, sin)


_apply.defvjp(lambda x, cos, sin: (_rotate(x, cos, sin), (cos, sin)), lambda kept, dy: (_rotate(dy, kept[0], -kept[1]), None, None))
