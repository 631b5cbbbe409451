"""Learning rates against NumPy formulas written from the papers."""

import jax
import numpy as np
import pytest

from meshloom.train.config import ScheduleConfig
from meshloom.train.schedule import FALLS, SCHEDULES, make_schedule

LR, TOTAL = 3e-3, 100


def rise(done, w):
    return min(done / w, 1) if w else 1.0


def linear(done, w, m):
    return m + (1 - m) * (1 - max(done - w, 0) / (TOTAL - w))


def cosine(done, w, m):
    return m + (1 - m) * (1 + np.cos(np.pi * max(done - w, 0) / (TOTAL - w))) / 2


def wsd(fall, d, m):
    return lambda done: 1.0 if done <= TOTAL - d else m + (1 - m) * fall((done - (TOTAL - d)) / d)


CASES = [
    (dict(kind="constant"), lambda s: 1.0),
    (dict(kind="constant", warmup=10), lambda s: rise(s, 10)),
    (dict(kind="linear", warmup=10, min_ratio=0.1), lambda s: rise(s, 10) * linear(s, 10, 0.1)),
    (dict(kind="linear"), lambda s: linear(s, 0, 0)),
    (dict(kind="cosine", warmup=7, min_ratio=0.05), lambda s: rise(s, 7) * cosine(s, 7, 0.05)),
    (dict(kind="cosine"), lambda s: cosine(s, 0, 0)),
    (dict(kind="cosine", warmup=1), lambda s: cosine(s, 1, 0)),
    (dict(kind="wsd", warmup=5, decay=20), lambda s: rise(s, 5) * wsd(lambda x: 1 - x, 20, 0)(s)),
    (dict(kind="wsd", decay=30, decay_shape="sqrt", min_ratio=0.2), wsd(lambda x: 1 - np.sqrt(x), 30, 0.2)),
    (
        dict(kind="wsd", warmup=50, decay=50, decay_shape="cosine"),
        lambda s: rise(s, 50) * wsd(lambda x: (1 + np.cos(np.pi * x)) / 2, 50, 0)(s),
    ),
    (dict(kind="inverse_sqrt", warmup=16), lambda s: rise(s, 16) * (1 if s <= 16 else np.sqrt(16 / s))),
    (dict(kind="inverse_sqrt", warmup=4, min_ratio=0.5), lambda s: rise(s, 4) * max(np.sqrt(4 / max(s, 4)), 0.5)),
]


@pytest.mark.parametrize("values, factor", CASES)
def test_gold(values, factor):
    schedule = jax.jit(make_schedule(ScheduleConfig(**values), LR, TOTAL))
    got = np.array([schedule(done) for done in range(1, TOTAL + 1)])
    want = np.array([LR * factor(done) for done in range(1, TOTAL + 1)])
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-9)


def test_every_row_is_covered():
    assert {v["kind"] for v, _ in CASES} == set(SCHEDULES)
    assert {v.get("decay_shape", "linear") for v, _ in CASES} == set(FALLS)


def test_first_peak_and_last():
    schedule = make_schedule(ScheduleConfig(kind="cosine", warmup=10, min_ratio=0.1), 1.0, 50)
    assert float(schedule(1)) == pytest.approx(0.1) and float(schedule(10)) == 1.0
    assert float(schedule(50)) == pytest.approx(0.1) and float(schedule(70)) == pytest.approx(0.1)


def test_tokens_and_steps_agree():
    """A run counted in tokens follows the same curve, also where the count is past int32."""
    per_step = 4 * 2**20
    steps = make_schedule(ScheduleConfig(kind="cosine", warmup=100), 1.0, 1000)
    tokens = make_schedule(ScheduleConfig(kind="cosine", warmup=100 * per_step, unit="tokens"), 1.0, 1000 * per_step)
    for done in (1, 50, 101, 700, 1000):
        assert float(tokens(float(done) * per_step)) == pytest.approx(float(steps(done)), abs=1e-6)


REFUSALS = [
    (dict(kind="cosine", warmup=101), "A warm-up of 101 steps does not fit into a run of 100 steps"),
    (dict(kind="wsd", warmup=60, decay=41), "Lower schedule.decay to 40 or less"),
]


@pytest.mark.parametrize("values, message", REFUSALS)
def test_refusals(values, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(ScheduleConfig(**values), 1.0, 100)


def test_warmup_as_long_as_the_run():
    for kind in ("linear", "cosine", "constant"):
        assert np.isfinite(float(make_schedule(ScheduleConfig(kind=kind, warmup=100), 1.0, 100)(100)))
