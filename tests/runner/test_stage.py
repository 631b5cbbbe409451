"""Work that only some ticks of a loop have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshloom.models.base import alike
from meshloom.parallel.table import build
from meshloom.runner.run import How
from meshloom.runner.stage import Often, get, put, stage_of
from programs import config


@pytest.mark.parametrize("there", [[0, 1, -1, 2], [0, 1, 2, 3], [-1, -1]])
def test_only_ticks_with_a_micro_batch_do_the_work(there) -> None:
    often = Often(sum(m >= 0 for m in there), len(there))
    ms = jnp.array(there)
    got = lax.scan(lambda c, m: (c, often.run(lambda m: {"a": 10.0 + m}, m)), 0, ms)[1]["a"]
    np.testing.assert_array_equal(got, [10.0 + m if m >= 0 else 0 for m in there])


def test_a_ring_reads_what_was_put() -> None:
    ring = put(jnp.zeros((3, 2)), jnp.int32(1), jnp.array([4.0, 5.0]))
    np.testing.assert_array_equal(ring, [[0, 0], [4, 5], [0, 0]])
    np.testing.assert_array_equal(jax.jit(get)(ring, jnp.int32(1)), [4, 5])


def test_a_layout_without_a_pipeline_has_no_stage() -> None:
    model, c = config("llama")
    assert stage_of(model, c, build("data=2", c, 16), How()) is None
    stage = stage_of(model, c, build("pipe=2", c, 16), How())
    assert stage is not None and stage.place.layers.tolist() == [[[0]], [[1]]] and stage.place.kinds == alike(c)[:1]
