"""What each layer of a model keeps under a layout, as a chain (plan/chain.py) of what plan/memory.py and plan/time.py say of it; and the best pattern."""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from meshloom.core.remat import GROUPED, ROWS, group_of, spelled
from meshloom.models.base import Model
from meshloom.parallel.base import Shapes
from meshloom.parallel.pipe import stashes, table_of
from meshloom.plan.chain import Chain, Choice, peak, sized, solve
from meshloom.plan.flight import flight
from meshloom.plan.hardware import Cluster
from meshloom.plan.layer import kept, working_of
from meshloom.plan.memory import loss, residuals, working
from meshloom.plan.time import step_time
from meshloom.plan.work import STACK
from meshloom.runner.run import UNOFFERED, stacks

GROUPS = (2, 4)
"""Layers that may share one input."""
RUNS = {"cpu": 2}
"""Platform -> repeated units that keep the same, one after the other, at least: of one alone, which is no loop, a CPU's compiler merges what is computed
again with the first computation, so that nothing is saved. Elsewhere its barriers hold."""


class Refined(NamedTuple):
    """remat: a pattern (core/remat.py). seconds: that it adds to a step in which nothing is computed again. peak: bytes of a device; limit: that it may
    hold. alone: each word for all layers -> the same peak and seconds."""

    remat: str
    seconds: float
    peak: int
    limit: int
    alone: Mapping[str, tuple[int, float]]

    @property
    def said(self) -> str:
        """The choice and why, in a line."""
        fits = sorted((seconds, word) for word, (peak, seconds) in self.alone.items() if peak <= self.limit)
        others = ", ".join(f"{word} {sized(peak)} and {seconds:.3g} s" for word, (peak, seconds) in self.alone.items())
        best = f"; the fastest single word that fits is {fits[0][1]}" if fits and fits[0][1] != self.remat else ""
        return (
            f"remat: {self.remat} (chosen: takes {sized(self.peak)} of {sized(self.limit)} and {self.seconds:.3g} s a step to compute again; "
            f"for all layers {others}{best})"
        )


class Links(NamedTuple):
    """A chain of a model. widths: layers of each link. outside: bytes that a step
    adds beside the layers' activations and the loss. end: those of the loss. least: of the optimizer's update, whatever layers keep, where it needs more
    than the leanest of them."""

    chain: Chain
    widths: tuple[int, ...]
    outside: int
    end: int
    least: int


def choose(model: Model, x: Shapes, spelling: str, cluster: Cluster, limit: int, stored: int = 0) -> Refined:
    """The pattern of remat that adds the fewest seconds to a step of those with which a device holds no more than `limit` bytes.
    x: the shapes of the step, whatever its remat.  stored: bytes that it keeps between steps.  Allocates nothing; some tens of milliseconds.

    Raises ValueError where none fits, with by how much."""
    # without the copies of a CPU's loop: where nothing is computed again its layers are unrolled, and there are none
    parts_of = lambda remat: step_time(model, spelling, x._replace(remat=remat), cluster).parts
    took = functools.cache(lambda remat: sum(part.seconds for part in parts_of(remat) if STACK not in part.why))
    links = links_of(model, x, cluster, took)
    besides = links.outside + stored
    if links.least + stored > limit:
        raise ValueError(
            f"No choice of what layers keep fits {sized(limit)}: the optimizer's update takes {sized(links.least + stored)} whatever they keep, "
            f"{sized(links.least + stored - limit)} more. Use a layout that splits more."
        )
    found = solve(links.chain, limit - besides, links.end, besides)
    remat = spelled(tuple(word for word, width in zip(found.words, links.widths, strict=True) for _ in range(width)))
    rows = [{choice.word: choice for choice in choices} for choices in links.chain]
    uniform = {word: [row[word] for row in rows] for word in ROWS if word in rows[0]}
    alone = {word: (peak(pieces, links.end) + besides, sum(piece.seconds for piece in pieces)) for word, pieces in uniform.items()}
    return Refined(remat, found.seconds, max(found.peak + besides, links.least + stored), limit, alone)


def links_of(model: Model, x: Shapes, cluster: Cluster, took: Callable[[str], float]) -> Links:
    """The chain of a model's layers, or of those of one part of a pipeline, which runs them all in each of its ticks.

    Seconds of a word are the difference that it makes to the whole step where all layers have it, shared out evenly: collectives that come again
    included, and what of them hides.  took: a pattern -> seconds of the step.
    Bytes beside: what the backward pass of a layer works with (plan/layer.py)."""
    slots, unit = x.layers // x.parts, _unit(x)
    runs = RUNS.get(x.layout.platform, 1)
    table, stash, bare = table_of(x.layout, x.micro), stashes(x.layout), x._replace(remat="full")
    flying = flight(table, bare, slots, model.name, stash) if table else None
    held = working(model, bare, flying)
    places = flying.rings["kept"].places if flying and stash else 1
    count = max(1, slots // (unit * runs))
    widths = (*[unit * runs] * (count - 1), slots - unit * runs * (count - 1))
    rows: dict[int, list[Choice]] = {width: [] for width in widths}
    for word in _words(x, cluster, unit):
        group, one = group_of(word), x._replace(remat=word)
        whole = slots // group * group
        each = max(0.0, took(word if whole == slots else f"{word} {whole}, none {slots - whole}") - took("none")) / whole
        for width, row in rows.items():
            span = max(width, runs * group)
            if span % width == 0:
                row.append(Choice(word, span // width, places * span * kept(one), each * span, working_of(one)))
    least = sum(held.values()) if held["update"] else 0
    inner = sum(held[kind] for kind in ("activations", "loss", "layer", "update"))
    outside = sum(held.values()) - inner - (places * residuals(bare) if stash else 0)
    alike = lambda at, c: set(widths[at : at + c.layers]) == {widths[at]}
    chain = tuple(tuple(c for c in rows[width] if alike(at, c)) for at, width in enumerate(widths))
    return Links(chain, widths, outside, loss(x), least)


def _words(x: Shapes, cluster: Cluster, size: int) -> list[str]:
    """What layers may keep on these devices, from the most on.  size: layers of a link."""
    slots = x.layers // x.parts
    offered = [row for row in ROWS if row != "offload" or (x.layout.platform not in UNOFFERED and cluster.hardware.host)]
    return [*offered, *(f"{GROUPED}:{group}" for group in GROUPS if group % size == 0 and 2 * group <= slots)]


def _unit(x: Shapes) -> int:
    """Layers of a pattern that repeats throughout, which a loop takes together; 1 where there is none."""
    found = stacks(x.run[: x.layers // x.parts])
    return len(found[0].unit) if len(found) == 1 else 1
