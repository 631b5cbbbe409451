"""Patterns of remat measured by benchmarks/remat.py and remat_tpu.py: what the formulas say of them is so."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import remat_tpu

from meshloom.models.table import MODELS
from meshloom.parallel.table import build
from meshloom.plan.cost import shapes
from meshloom.plan.hardware import Cluster, Hardware, Link
from meshloom.plan.layer import kept
from meshloom.plan.memory import working
from meshloom.plan.remat import choose
from meshloom.runner.run import How

DATA = Path(__file__).parents[2] / "benchmarks"
CPU = json.loads((DATA / "remat.json").read_text())
TPU = {row["remat"]: row for row in map(json.loads, (DATA / "remat_tpu.jsonl").read_text().splitlines())}
NOISE = 0.05
"""Part by which processor seconds of the same step differ on the machine of the data, which did other work besides."""


def given(spelling: str, platform: str, data: dict, dtype: str):
    model = MODELS[data["model"]["family"]]
    c = model.Config(**data["model"])
    lay = build(spelling, c, data["seq"], platform)
    return model, shapes(model, c, lay, data["seq"], data["sequences"], 1, How(), dtype, False)


def cluster() -> Cluster:
    """The machine of the data."""
    h, link = CPU["hardware"], Link(1.0, 0.0)
    return Cluster(Hardware("cpu", "cpu", 2**40, h["bandwidth"], {"float32": h["flops"]}, 1.0, 1, link, link, 0, ()), (1, 1))


def test_bytes_on_a_cpu() -> None:
    model, x = given("", "cpu", CPU, "float32")
    found = {remat: sum(working(model, x._replace(remat=remat)).values()) / row["temp"] for remat, row in CPU["measured"].items()}
    assert {remat: ratio for remat, ratio in found.items() if ":" not in remat and not 0.92 < ratio < 1.09} == {}


def test_less_is_kept_in_the_order_that_is_predicted() -> None:
    model, x = given("", "cpu", CPU, "float32")
    predicted = {remat: sum(working(model, x._replace(remat=remat)).values()) for remat in CPU["measured"] if ":" not in remat}
    assert sorted(predicted, key=predicted.__getitem__) == sorted(predicted, key=lambda remat: CPU["measured"][remat]["temp"])


@pytest.mark.parametrize("row", CPU["chosen"], ids=lambda row: row["remat"])
def test_what_is_chosen_fits_and_nothing_that_fits_is_faster(row) -> None:
    """The data's limits, chosen again by the formulas of today; of all measured patterns none that the compiler lets fit is faster."""
    model, x = given("", "cpu", CPU, "float32")
    assert choose(model, x, "", cluster(), row["limit"]).remat == row["remat"]
    own = CPU["measured"][row["remat"]]
    assert own["temp"] <= row["limit"]
    fit = {remat: one["seconds"] for remat, one in CPU["measured"].items() if one["temp"] <= row["limit"]}
    assert own["seconds"] <= min(fit.values()) * (1 + NOISE), fit


def test_offload_on_a_tpu_is_in_its_hosts_memory() -> None:
    """What the compiler puts there is what the formulas say, to the byte, and the device has as much less."""
    away, here = TPU["offload"], TPU["selective"]
    model, x = given(away["layout"], "tpu", {**away, "model": remat_tpu.MODEL}, "bfloat16")
    moved = x.layers * (kept(x._replace(remat="selective")) - kept(x._replace(remat="full")))
    assert model.name == "llama" and (away["host"], here["host"]) == (moved, 0)
    assert here["temp"] - away["temp"] >= moved
