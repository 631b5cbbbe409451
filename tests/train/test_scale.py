"""The loss-scale machine against a plain Python one, skipping, and the average of weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.train.config import LossScaleConfig
from meshloom.train.scale import average, check_skips, init_scale, next_scale, select

C = LossScaleConfig(initial=2.0**16, window=4, hysteresis=2, minimum=1.0, maximum=2.0**18)


def machine(c, verdicts):
    """The same rule in plain Python: the list of scales after each step."""
    scale, good, patience, out = c.initial, 0, c.hysteresis, []
    for ok in verdicts:
        if ok:
            good += 1
            if good == c.window:
                scale, good, patience = min(scale * 2, c.maximum), 0, c.hysteresis
        else:
            good, patience = 0, max(patience - 1, 0)
            if patience == 0:
                scale = max(scale / 2, c.minimum)
        out.append(scale)
    return out


STORIES = {
    "grows to its maximum": [1] * 20,
    "one overflow is borne, the second halves": [1, 0, 1, 0, 0, 1, 1, 1, 1, 0, 1],
    "falls to its floor": [0] * 30 + [1] * 9,
    "random": list(np.random.default_rng(0).integers(0, 5, 200) > 0),
}


@pytest.mark.parametrize("name", STORIES)
def test_gold(name):
    step = jax.jit(lambda s, ok: next_scale(C, "fp16", s, ok))
    state, got = init_scale(C, "fp16"), []
    for ok in STORIES[name]:
        state = step(state, jnp.asarray(bool(ok)))
        got.append(float(state.scale))
    assert got == machine(C, STORIES[name])
    assert int(state.skipped) == len(STORIES[name]) - sum(STORIES[name])


def test_known_values():
    """By hand: window 4, hysteresis 2, from 65536."""
    assert machine(C, [1, 1, 1, 1, 0, 0, 0]) == [65536, 65536, 65536, 131072, 131072, 65536, 32768]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions_count_skips_only(precision):
    state = init_scale(C, precision)
    for ok in (True, False, False):
        state = next_scale(C, precision, state, jnp.asarray(ok))
    assert (float(state.scale), int(state.skipped), int(state.consecutive)) == (1.0, 2, 2)
    assert int(next_scale(C, precision, state, jnp.asarray(True)).consecutive) == 0


def test_select_is_bitwise():
    old = {"a": jnp.array([-0.0, jnp.nan, 1.5]), "n": jnp.array(3)}
    new = {"a": jnp.array([jnp.inf, 0.0, 2.5]), "n": jnp.array(4)}
    kept = jax.jit(select)(jnp.asarray(False), new, old)
    assert all(np.asarray(kept[k]).tobytes() == np.asarray(old[k]).tobytes() for k in old)
    assert int(select(jnp.asarray(True), new, old)["n"]) == 4


def test_average():
    ema = p = np.array([1.0, -2.0], np.float32)
    for i in range(5):
        p = p + np.float32(i)
        got = average({"w": jnp.asarray(ema)}, {"w": jnp.asarray(p)}, 0.9)["w"]
        ema = 0.9 * ema + 0.1 * p
        np.testing.assert_allclose(got, ema, rtol=1e-6)


def test_too_many_skips():
    check_skips(3, 3, step=7)
    with pytest.raises(
        FloatingPointError, match=r"not finite in 4 steps in a row, up to step 7 \(loss scale 2\); train.nonfinite_limit is 3"
    ):
        check_skips(3, 4, step=7, scale=2.0)
