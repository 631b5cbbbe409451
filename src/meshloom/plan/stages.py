"""A pipeline before it runs: which stage has which layers, how long stages stand idle, and what they have in flight.  Allocates nothing."""

from typing import NamedTuple

from meshloom.models.base import Model
from meshloom.parallel.base import Shapes
from meshloom.parallel.pipe import stashes, table_of
from meshloom.parallel.simulate import RECOMPUTE, STASH, simulate
from meshloom.plan.flight import flight
from meshloom.plan.timeline import Flight
from meshloom.runner.stage import placed


class Pipeline(NamedTuple):
    """What a plan says of its pipeline. layers: stage -> chunk -> numbers of its layers. slots: layers that every chunk computes. ticks: of a step.
    idle: the part of a step in which a stage does nothing of use, in lockstep. flight: bytes that a stage's device has in flight."""

    schedule: str
    micro: int
    layers: tuple[tuple[tuple[int, ...], ...], ...]
    slots: int
    ticks: int
    idle: float
    flight: Flight

    @property
    def said(self) -> str:
        """The pipeline in a line, its schedule first."""
        return f"{self.schedule}: {self.size}"

    @property
    def size(self) -> str:
        """Its parts, its micro-batches and its idle time, in a line."""
        chunks, stages = len(self.layers[0]), len(self.layers)
        parts = f"{stages} stages" + (f" x {chunks} chunks" if chunks > 1 else "") + f" of {self.slots} layer{'s' * (self.slots > 1)}"
        return f"{parts}, {self.micro} micro-batch{'es' * (self.micro > 1)} in {self.ticks} ticks, idle {self.idle:.1%} of a step"

    @property
    def held(self) -> str:
        """Which stage has which layers, in a line; of many stages the first and the last."""
        shown = [0, 1, len(self.layers) - 1] if len(self.layers) > 4 else range(len(self.layers))
        return "; ".join(f"{'... ' * (at > 2 and len(self.layers) > 4)}stage {at}: {self.stage(at)}" for at in shown)

    def stage(self, at: int) -> str:
        """The layers of one stage, those of a chunk together: "layers 0-1, 4-5"."""
        runs = [f"{min(chunk)}-{max(chunk)}" if len(chunk) > 1 else str(min(chunk)) for chunk in self.layers[at] if chunk]
        return f"layer{'s' * (sum(map(len, self.layers[at])) > 1)} {', '.join(runs)}" if runs else "no layer"


def pipeline(model: Model, x: Shapes) -> Pipeline | None:
    """The pipeline of a step; None for a layout without one.  Raises ValueError where the micro-batches do not fit its schedule."""
    where, table = placed(model, x.config, x.layout), table_of(x.layout, x.micro)
    if where is None or table is None:
        return None
    stash = stashes(x.layout)
    held = in_flight(model, x)
    assert held
    times = simulate(table, STASH if stash else RECOMPUTE)
    layers = tuple(tuple(tuple(int(n) for n in slots if n >= 0) for slots in chunks) for chunks in where.layers)
    return Pipeline(table.schedule.name, x.micro, layers, len(where.kinds), times.ticks, times.bubble["uniform"], held)


def in_flight(model: Model, x: Shapes) -> Flight | None:
    """What a pipeline has in flight; None for a layout without one.  Raises ValueError as `pipeline`."""
    where, table = placed(model, x.config, x.layout), table_of(x.layout, x.micro)
    if where is None or table is None:
        return None
    return flight(table, x, len(where.kinds), model.name, stashes(x.layout))
