"""The learning rate as a pure function of how much is done: no counter of its own, so a resume cannot shift it.

`done` is what the run has finished once this step is: step + 1, or (samples before + samples of this step) x sequence length. So the
first step of a warm-up of w steps takes lr / w, not 0, step w is the first at the peak, and the last step takes exactly the final value.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from meshloom.train.config import ScheduleConfig

Schedule = Callable[[ArrayLike], Array]
"""From what is done (steps or tokens, a scalar of any type) to the learning rate, fp32."""

FALLS = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: 0.5 * (1 + jnp.cos(jnp.pi * x)),
    "sqrt": lambda x: 1 - jnp.sqrt(x),
}
"""From the part of a fall that is over, 0..1, to the factor, 1..0. sqrt: arXiv 2405.18392."""


def _fall(done: Array, start: float, end: float, shape: str, floor: float) -> Array:
    """1 until `start`, `floor` from `end` on, and the named shape between."""
    over = jnp.clip((done - float(start)) / float(max(end - start, 1)), 0, 1)
    return floor + (1 - floor) * FALLS[shape](over)


def constant(c: ScheduleConfig, total: float, done: Array) -> Array:
    """The peak throughout."""
    return jnp.ones_like(done)


def linear(c: ScheduleConfig, total: float, done: Array) -> Array:
    """Falls in a line from the end of warm-up to min_ratio at the end."""
    return _fall(done, c.warmup, total, "linear", c.min_ratio)


def cosine(c: ScheduleConfig, total: float, done: Array) -> Array:
    """Falls as half a cosine from the end of warm-up to min_ratio at the end. Source: arXiv 1608.03983."""
    return _fall(done, c.warmup, total, "cosine", c.min_ratio)


def wsd(c: ScheduleConfig, total: float, done: Array) -> Array:
    """Warm-up, stable, decay: the peak until the last `decay` units. Source: MiniCPM, arXiv 2404.06395."""
    return _fall(done, total - c.decay, total, c.decay_shape, c.min_ratio)


def inverse_sqrt(c: ScheduleConfig, total: float, done: Array) -> Array:
    """sqrt(warmup / done) after the warm-up, never below min_ratio. Source: arXiv 1706.03762."""
    return jnp.maximum(jnp.sqrt(float(c.warmup) / jnp.maximum(done, float(c.warmup))), c.min_ratio)


SCHEDULES = {"constant": constant, "linear": linear, "cosine": cosine, "wsd": wsd, "inverse_sqrt": inverse_sqrt}


def make_schedule(c: ScheduleConfig, lr: float, total: float) -> Schedule:
    """The learning rate of a run that is `total` units long (c.unit: steps or tokens).  lr: the peak.  Returns done -> fp32 scalar.
    Raises ValueError if warm-up and decay do not fit into the run."""
    if c.warmup > total:
        raise ValueError(
            f"A warm-up of {c.warmup:,} {c.unit} does not fit into a run of {total:,} {c.unit}. Lower schedule.warmup, or train longer."
        )
    if c.warmup + c.decay > total:
        raise ValueError(
            f"A warm-up of {c.warmup:,} and a decay of {c.decay:,} {c.unit} do not fit into a run of {total:,} {c.unit}. "
            f"Lower schedule.decay to {int(total) - c.warmup:,} or less, or train longer."
        )
    shape = SCHEDULES[c.kind]

    def schedule(done: ArrayLike) -> Array:
        done = jnp.asarray(done, jnp.float32)
        rise = jnp.minimum(done / float(c.warmup), 1) if c.warmup else 1.0
        return jnp.asarray(lr * rise * shape(c, total, done), jnp.float32)

    return schedule
