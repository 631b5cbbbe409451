"""Which weights a step gathers at its start."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshloom.core.leaf import live
from meshloom.core.mesh import make_mesh
from meshloom.core.spec import spec
from meshloom.parallel.table import build
from meshloom.parallel.zero import strategy
from meshloom.plan.hlo import collectives, total
from meshloom.runner.gather import gather_step
from programs import compiled, config

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


@pytest.mark.parametrize("spelling", ["zero1=2 zero3=4", "zero1=2 zero2=4", "zero2=2 zero3=4", "zero1=2 zero2=2 zero3=2"])
def test_every_device_of_nested_stages_has_the_rows_that_its_table_says(spelling) -> None:
    lay = build(spelling, config("llama")[1], 16)
    w, specs = np.arange(4 * 16, dtype=np.float32).reshape(4, 16), {"w": spec({"embed": 16, "ffn": 4}, "ffn embed")}
    rest, grad, step = (lay.partition(table, specs["w"].axes) for table in ("rest", "grad", "step"))

    def fn(w):
        (shard,), (whole,) = (list(tree.values()) for tree in gather_step(lay, specs, {"w": w}, "float32"))
        whole = shard if whole is None else whole
        return shard, whole, live(lay, specs["w"].axes, shard, whole, w)

    mapped = jax.shard_map(fn, mesh=make_mesh(lay), in_specs=rest, out_specs=(grad, step, P()), check_vma=False)
    for got in jax.jit(mapped)(w):
        for shard in got.addressable_shards:
            np.testing.assert_array_equal(shard.data, w[shard.index])


def test_each_stage_leaves_one_table_more_split() -> None:
    for stage, tables in ((1, ("step", "grad", "live")), (2, ("step", "live")), (3, ("live",))):
        lay = strategy(stage).layout(2)
        assert [t for t in ("step", "grad", "live") if lay.gathered("rest", t, SPECS["w"].axes) == (1, (f"zero{stage}",))] == list(tables)
        assert lay.gathered("rest", "rest", SPECS["w"].axes) == (0, ())
