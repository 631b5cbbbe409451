"""How long a step takes, by formula: work, collectives, and what of them hides behind each other.  Runs nothing; a few milliseconds a call.

A piece of work takes the longer of its products at the attainable rate and its bytes at the memory's, and `op` for each kernel (a roofline; Williams 2009,
doi 10.1145/1498765.1498785). Collectives take what `link.seconds` says.

Overlap rule. A collective that moves weights or their gradients (places in BESIDE) does not wait for the layer that runs beside it: the next layer's
weights can come while this one computes, and the last one's gradients leave. So over a pass it costs what it takes longer than the pass's work, and
one layer's share at least, for which there is nothing to hide behind. Keys and values in a ring go while blocks are multiplied, by the same rule. All else
is waited for: what tensor parallelism, experts and sequences move inside a layer, a pipeline's sends, what moves once a step.
On a CPU nothing overlaps: the same cores compute and copy. `HIDES` says so by platform.

A pipeline runs in lockstep (parallel/simulate.py, way `uniform`): in a tick every stage does all kinds of work that any does, so a step has as many forwards,
backwards and late gradients as its table has ticks of each (`Flow.ticks`); what is above one for each micro-batch and chunk, and slots of a part that no
layer fills, is the bubble.
"""

from collections.abc import Iterable
from typing import NamedTuple

from meshloom.models.base import Model
from meshloom.parallel.base import LAYER, PLACES, Collective, Shapes
from meshloom.parallel.part import by_remat
from meshloom.parallel.pipe import chunks_in
from meshloom.plan.cost import shares
from meshloom.plan.hardware import Cluster, Hardware
from meshloom.plan.link import seconds
from meshloom.plan.memory import kept
from meshloom.plan.work import Work, Works, works

HIDES = {"cpu": False, "gpu": True, "tpu": True}
"""Platform -> whether collectives go on beside work."""
BESIDE = {
    "outer": "forward",
    "weights": "forward",
    "weights again": "backward",
    "gradients": "backward",
    "gradients late": "late",
    "outer back": "backward",
}
"""Place -> the pass whose work its collectives can hide behind."""
PRODUCTS = ("matrices", "experts")
"""Work whose bytes are inputs and results of products, read and written beside them."""
PASSES = {"tpu": {"float32": "bfloat16"}}
"""Platform -> a type -> the one whose rate its products have: JAX's default precision on TPUs multiplies fp32 as bf16."""


class Part(NamedTuple):
    """A part of a step's time. what: "compute", "recompute", "memory", "bubble", "optimizer", "offload", or a collective and its mesh axes. why: a phrase.
    seconds: that the step takes longer for it. hidden: that pass beside other work."""

    what: str
    why: str
    seconds: float
    hidden: float = 0.0


class Time(NamedTuple):
    """A step's time. dtype: of the arithmetic."""

    parts: tuple[Part, ...]
    dtype: str

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(part.seconds for part in self.parts)

    def of(self, what: str) -> float:
        """Seconds of the parts of one kind."""
        return sum(part.seconds for part in self.parts if part.what == what)

    def mfu(self, flops: float, cluster: Cluster) -> float:
        """Part of the devices' peak that a step uses.  flops: of the model in a step, over all devices, nothing counted twice."""
        return flops / (self.total * cluster.devices * rate(cluster.hardware, self.dtype))


def rate(h: Hardware, dtype: str) -> float:
    """Peak of products of a type, operations a second.  Raises ValueError where the hardware has no figure for it."""
    name = PASSES.get(h.platform, {}).get(dtype, dtype)
    if name not in h.flops:
        raise ValueError(
            f"{h.name} has no rate of {dtype} products; it has {', '.join(h.flops)}. Choose one of these (train.precision), or give it in a file of your own."
        )
    return h.flops[name]


def step_time(model: Model, spelling: str, x: Shapes, cluster: Cluster) -> Time:
    """The time of one optimizer step under a layout's spelling, by parts, largest reasons first within a kind.  x: the shapes of the step, made for the
    cluster's platform.  The update is taken to be AdamW's.  The rule of overlap: see the top of this file.
    Raises ValueError for a mesh that the cluster has no room for, and a type that it cannot multiply."""
    if x.layout.devices > cluster.devices:
        raise ValueError(
            f"The layout takes {x.layout.devices} devices, and {cluster.label} has {cluster.devices}. Ask for a larger cluster."
        )
    w, h = works(model, x), cluster.hardware
    takes = lambda given: sum(duration(one, h, x.dtype) for one in given)
    runs = passes(x)
    one = {name: takes(getattr(w, name)) for name in ("forward", "again", "backward", "late")}
    behind = {
        "forward": runs.forward * one["forward"],
        "backward": runs.backward * (one["again"] + one["backward"]),
        "late": runs.late * one["late"],
    }
    moved = moves(spelling, x, cluster, behind)
    return Time((*computed(w, x, h, runs), *moved, *parked(x, h, behind)), x.dtype)


class Runs(NamedTuple):
    """How often a device runs each pass over the layers of its part in a step; share: of that, what is of use."""

    forward: float
    backward: float
    late: float
    share: tuple[float, float, float]


def passes(x: Shapes) -> Runs:
    """Of a pipeline the ticks of its table, of all else the micro-batches."""
    if not x.flow:
        return Runs(x.micro, x.micro, 0, (1.0, 1.0, 1.0))
    slots = x.parts * len(x.flow.heavy) if x.flow.heavy else len(x.run)
    ticks, useful = x.flow.ticks, x.micro * chunks_in(x.layout) * len(x.kinds) / slots
    share = lambda n: useful / n if n else 1.0
    return Runs(ticks.forward, ticks.backward, ticks.weight, (share(ticks.forward), share(ticks.backward), share(ticks.weight)))


def duration(work: Work, h: Hardware, dtype: str) -> float:
    """Seconds of a piece of work. Where the rate of what lies between products was measured, they do not hide it: the same cores do both."""
    products = work.flops / (rate(h, dtype) * h.efficiency) if work.flops else 0.0
    if h.between_products and work.what not in PRODUCTS:
        return products + work.bytes / h.between_products + work.ops * h.op
    return max(products, work.bytes / (h.bandwidth * h.stream)) + work.ops * h.op


def computed(w: Works, x: Shapes, h: Hardware, runs: Runs) -> list[Part]:
    """The parts in which devices compute."""
    found: list[Part] = []
    idle = 0.0
    sides = (
        ("forward", w.forward, runs.forward, runs.share[0], "compute"),
        ("backward", w.backward, runs.backward, runs.share[1], "compute"),
        ("again, for the backward pass", w.again, runs.backward, runs.share[1], "recompute"),
        ("gradients of matrices, put off", w.late, runs.late, runs.share[2], "compute"),
        ("every micro-batch", w.outside, x.micro, 1.0, "compute"),
    )
    for when, given, times, share, what in sides:
        for reason in dict.fromkeys(one.what for one in given):
            mine = [one for one in given if one.what == reason]
            total = times * sum(duration(one, h, x.dtype) for one in mine)
            kind = "memory" if what == "compute" and not any(one.flops for one in mine) else what
            found.append(Part(kind, f"{reason}, {when}", share * total))
            idle += (1 - share) * total
    found += [Part("bubble", "ticks without work for a stage", idle)] if x.flow else []
    return [*found, *(Part("optimizer", one.what, duration(one, h, x.dtype)) for one in w.once)]


def moves(spelling: str, x: Shapes, cluster: Cluster, behind: dict[str, float]) -> list[Part]:
    """The parts in which devices wait for what moves, and what of it hides.  behind: seconds of work in each pass."""
    rest, ticks = shares(spelling, x)
    every = [*rest, *(c._replace(count=c.count * t.times, bytes=c.bytes * t.times) for t in ticks.values() for c in t.moves)]
    found: dict[tuple[str, str], list[float]] = {}
    for beside, mine in _by_pass(every, x):
        taken = [seconds(c, x.layout, cluster) for c in mine]
        total, free = sum(taken), behind.get(beside, 0.0) if HIDES[cluster.hardware.platform] else 0.0
        least = 1 / max(1, x.layers // x.layout.stages)
        shown = max(total - free, least * total) / total if beside and total else 1.0
        for c, time in zip(mine, taken):
            pair = found.setdefault((f"{c.kind} over {' x '.join(c.axes)}", c.why), [0.0, 0.0])
            pair[0] += shown * time
            pair[1] += (1 - shown) * time
    return sorted((Part(*key, *pair) for key, pair in found.items()), key=lambda part: -part.seconds)


def parked(x: Shapes, h: Hardware, behind: dict[str, float]) -> list[Part]:
    """What `offload` moves to the host's memory and back: results of products, behind the pass that makes or needs them, by the rule of overlap.
    Raises ValueError for hardware whose way to its host is not known."""
    away = by_remat(x).get("offload")
    if away is None:
        return []
    if not h.host:
        raise ValueError(
            f"{h.name} has no rate to its host's memory, so remat 'offload' has no time. Give it in a file (host: 32e9), or use 'selective'."
        )
    each = kept(away._replace(remat="selective")) - kept(away._replace(remat="full"))
    layers, runs, found = away.layers // away.parts, passes(x), []
    for beside, times, why in (
        ("forward", runs.forward, "results of products, to the host"),
        ("backward", runs.backward, "results of products, back"),
    ):
        total = times * layers * each / h.host
        shown = max(total - behind[beside], total / layers)
        found.append(Part("offload", why, shown, total - shown))
    return found


def _by_pass(given: Iterable[Collective], x: Shapes) -> Iterable[tuple[str, list[Collective]]]:
    """The collectives that can hide, by the pass behind whose work; "" for those that are waited for."""
    groups: dict[str, list[Collective]] = {}
    for c in given:
        around = c.kind == "collective-permute" and PLACES[c.place].often == LAYER
        turn = ("backward" if PLACES[c.place].back else "forward") if around else BESIDE.get(c.place, "")
        groups.setdefault(turn, []).append(c)
    return groups.items()
