"""`layout: auto`: the planner's choice for the devices present, the same in every process and on every start.

A CPU is no measured one here but a fixed one (NOMINAL), since processes must agree and a run must not wait to be measured; accelerators have the figures
of the table. Where no hardware is known, the rule of `parallel.table.default` stands in.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from meshloom.core.layout import Layout
from meshloom.core.remat import automatic
from meshloom.parallel.table import default, parse, spell
from meshloom.plan.explain import size
from meshloom.plan.hardware import Cluster, Hardware, Link, cluster, present, read
from meshloom.plan.memory import stored
from meshloom.plan.search import Candidate, Question, search
from meshloom.plan.space import Allowed
from meshloom.plan.why import seconds, why
from meshloom.recipes.launch import DTYPES, check_length, kept, method, model_of
from meshloom.recipes.run import RunConfig
from meshloom.train.method import check as check_method

NOMINAL = Hardware(
    "cpu", "cpu", 64 << 30, 1.5e11, {"float32": 1.9e11, "bfloat16": 1.5e11, "float16": 1.5e11}, 1.0, 1 << 20, Link(2e10, 7e-6), Link(2e10, 7e-6), 0,
    ("two cores of an AMD EPYC with AVX-512, rounded: meshloom calibrate --devices 8 on 30 November 2026",), start=1.5e-5, op=2.4e-7, shared=True,
    slower={"all-to-all": 3.1, "collective-permute": 1.7},
)  # fmt: skip
"""A machine with a few cores, of which each simulated device has its share."""
STANDS_FOR = {"gpu": "h100", "tpu": "v5p"}
"""Platform -> hardware to choose for where none is present: `meshloom layout`."""


class Automatic(NamedTuple):
    """What was chosen. micro: micro-batches, None where nothing chose them. said: why, in a line."""

    spelling: str
    micro: int | None
    said: str


def question_of(config: RunConfig, on: Cluster, allowed: Allowed) -> Question:
    """What a recipe asks the planner on a cluster.  Raises ValueError where its sequences are too long for its model."""
    model, c, _ = model_of(config)
    check_length(config, c)
    way, specs = method(config), model.specs(c)
    beside = kept(config, specs)

    def held(lay: Layout) -> Mapping[str, int]:
        return {kind: stored(lay, tree) for kind, tree in beside.items()}

    return Question(
        model, c, on, config.data.seq, config.batch.sequences, DTYPES[config.train.precision], config.data.packing == "documents", held,
        allowed, lambda lay: check_method(way, lay, specs), config.train.runner,
    )  # fmt: skip


def automatic_layout(config: RunConfig, devices: int, platform: str, here: bool = True) -> Automatic:
    """The layout that the planner chooses for so many devices.  here: whether they are present; else those of STANDS_FOR.
    Raises ValueError, with the sentence of a check, where no layout admits the recipe."""
    c: Any = model_of(config)[1]
    if devices == 1:
        return Automatic("", None, "layout: one device (chosen: 1 device present)")
    on = _cluster(devices, platform, here)
    if on is None:
        spelling = default(devices, c)
        return Automatic(spelling, None, f"layout: {spell(parse(spelling))} (chosen by rule: {devices} devices whose speed is not known)")
    remats = Allowed().remats if automatic(config.train.remat) else (config.train.remat,)
    micro = None if config.batch.micro_batches == "auto" else config.batch.micro_batches
    found = search(question_of(config, on, Allowed(remats=remats, micro=micro)), 2)
    one = found.best or found.least
    if one is None:
        spelling = default(devices, c)
        return Automatic(spelling, None, f"layout: {spell(parse(spelling))} (chosen by rule: the planner found none)")
    return Automatic(one.spelling, one.micro, _said(one, found.best, found.others, devices, on))


def _cluster(devices: int, platform: str, here: bool) -> Cluster | None:
    """What is chosen for; None where nobody knows how fast it is."""
    if platform == "cpu":
        return cluster(NOMINAL, (devices,), f"cpu:{devices}")
    if not here:
        try:
            return read(f"{STANDS_FOR[platform]}:{devices}")
        except ValueError:
            return None
    try:
        there = present()
    except ValueError:
        return None
    return there if there.devices == devices else None


def _said(one: Candidate, best: Candidate | None, others: tuple[Candidate, ...], devices: int, on: Cluster) -> str:
    """Why, in a line."""
    name = one.spelling or "one device"
    said = f"layout: {name} in {one.micro} micro-batch{'es' * (one.micro > 1)} (chosen for {devices} devices: {seconds(one.time.total)} a step by the cost model"
    if best is None:
        return f"{said}; nothing fits by its formulas, this needs least: {size(one.memory.total)} of {size(on.hardware.memory)} on each)"
    if not others:
        return f"{said}; no other kind is admitted)"
    return f"{said}; next {others[0].spelling}, {seconds(others[0].time.total)}: {why(best, others[0])})"
