"""Which weights a step gathers at its start."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshloom.core.mesh import make_mesh
from meshloom.core.spec import spec
from meshloom.parallel.zero import strategy
from meshloom.plan.hlo import collectives, total
from meshloom.runner.gather import gather_step
from programs import compiled

SPECS = {"w": spec({"embed": 8, "ffn": 4}, "ffn embed"), "b": spec({"ffn": 4}, "ffn")}


@pytest.mark.parametrize("stage, whole", [(1, "w"), (2, "copy"), (3, "")])
def test_what_is_whole(stage, whole) -> None:
    lay, axis = strategy(stage).layout(4), f"zero{stage}"

    def fn(w, b):
        assert gather_step(lay, SPECS, {"w": w, "b": b}, "bfloat16")[0]["w"].dtype == "bfloat16"
        step, copy = gather_step(lay, SPECS, {"w": w, "b": b}, "float32")
        assert (copy["w"] is not None) == (whole == "copy")
        assert (step["w"].shape == (4, 8)) == (whole == "w") and (whole != "copy" or copy["w"].shape == (4, 8))
        return copy["w"] if whole == "copy" else step["w"]

    text = compiled(fn, make_mesh(lay), (P(None, axis), P()), P(axis), (4, 8), (4,))
    moved = total(collectives(text, lay.sizes))
    assert moved == ({} if stage == 3 else {("all-gather", (axis,)): (1, 128)})


def test_values_are_those_of_the_master() -> None:
    lay = strategy(2).layout(4)
    w = np.arange(32, dtype=np.float32).reshape(4, 8)
    fn = lambda w, b: gather_step(lay, SPECS, {"w": w, "b": b}, "float32")[1]["w"][None]
    out = jax.jit(jax.shard_map(fn, mesh=make_mesh(lay), in_specs=(P(None, "zero2"), P()), out_specs=P("zero2")))(w, w[:, 0])
    for copy in np.asarray(out):
        np.testing.assert_array_equal(copy, w)


def test_each_stage_leaves_one_table_more_split() -> None:
    for stage, tables in ((1, ("step", "grad", "live")), (2, ("step", "live")), (3, ("live",))):
        lay = strategy(stage).layout(2)
        assert [t for t in ("step", "grad", "live") if lay.gathered("rest", t, SPECS["w"].axes) == (1, (f"zero{stage}",))] == list(tables)
        assert lay.gathered("rest", "rest", SPECS["w"].axes) == (0, ())
