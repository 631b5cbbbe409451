"""The least time that what moves between devices takes in a step, for many meshes at once: the strategies' formulas and `plan.link` with arrays, for
`bounds.py`.  Of one mesh the links are asked of `plan.link` itself; of many at once on a torus the fastest that so many devices can have are taken."""

import math
from typing import Any, NamedTuple

import numpy as np

from meshloom.core.layout import INSIDE, Layout
from meshloom.core.spec import Spec
from meshloom.plan import link
from meshloom.plan.hardware import Cluster
from meshloom.plan.splits import WIDE, Splits, own

Array = np.ndarray


class Moved(NamedTuple):
    """Seconds, at least: of what can hide behind a pass over the layers, and of all that is waited for."""

    forward: Array
    backward: Array
    waits: Array


class Speed(NamedTuple):
    """devices: that take part. rate: bytes a second that each sends at most; late: seconds that one collective waits at least; swap: seconds for each byte
    of an exchange; step: bytes a second to a neighbour."""

    devices: Array
    rate: Array
    late: Array
    swap: Array
    step: Array


class Ways:
    """The ways between devices of many meshes."""

    def __init__(self, s: Splits) -> None:
        self.s, self.cluster = s, s.q.cluster
        self.known: dict[tuple[str, ...], Speed] = {}

    def speed(self, *axes: str) -> Speed:
        """Over these mesh axes, those that there are."""
        there = tuple(axis for axis in self.s.sizes if axis in axes)
        if there not in self.known:
            kind = exact if self.s.exact else on_torus if self.cluster.hardware.torus else on_switch
            self.known[there] = kind(self.s, self.cluster, there)
        return self.known[there]

    def gathered(self, size: Array, count: Array, *axes: str) -> Array:
        """Seconds of gathers or scatters of so many bytes in all, in so many collectives."""
        at = self.speed(*axes)
        factor = min(self.slower("all-gather"), self.slower("reduce-scatter"))
        return np.where(at.devices > 1, factor * size * (1 - 1 / at.devices) / at.rate + count * at.late, 0.0)

    def slower(self, kind: str) -> float:
        """What a kind's bytes take more than those of a gather."""
        return self.cluster.hardware.slower.get(kind, 1.0)

    def summed(self, size: Array, count: Array, *axes: str) -> Array:
        """Seconds of all-reduces."""
        twice = 1 if self.cluster.hardware.platform == "cpu" else 2
        at, start = self.speed(*axes), self.cluster.hardware.start
        late = start + twice * (at.late - start)
        return np.where(at.devices > 1, self.slower("all-reduce") * 2 * size * (1 - 1 / at.devices) / at.rate + count * late, 0.0)

    def swapped(self, size: Array, count: Array, *axes: str) -> Array:
        """Seconds of all-to-alls."""
        at = self.speed(*axes)
        return np.where(at.devices > 1, self.slower("all-to-all") * size * at.swap + count * at.late, 0.0)

    def passed(self, size: Array, *axes: str) -> Array:
        """Seconds of what goes on to a neighbour."""
        at = self.speed(*axes)
        return np.where(at.devices > 1, self.slower("collective-permute") * size / at.step, 0.0)


def on_switch(s: Splits, cluster: Cluster, axes: tuple[str, ...]) -> Speed:
    """Nodes of devices: as `plan.link` lays mesh axes over them, which comes down to greatest common divisors."""
    h, node = cluster.hardware, cluster.shape[-1]
    here, devices = s.ones, s.ones
    for axis in axes:
        inside = np.gcd(s.inner(axis).astype(int), node)
        here = here * np.gcd(s.sizes[axis].astype(int), node // inside)
        devices = devices * s.sizes[axis]
    apart = devices / here
    rate = np.where(apart > 1, np.minimum(h.inside.rate if axes else math.inf, here * h.between.rate), h.inside.rate)
    rate = np.where((apart > 1) & (here == 1), h.between.rate, rate)
    steps = lambda n: np.minimum(n - 1, 1) if h.platform == "cpu" else np.ceil(np.log2(n))
    late = h.start + h.inside.latency * steps(here) + h.between.latency * steps(apart)
    away = np.where(apart > 1, (devices - here) / devices / h.between.rate, 0.0)
    swap = np.maximum(away, (here - 1) / devices / h.inside.rate)
    return Speed(devices, rate, late, swap, np.where(apart > 1, h.between.rate, h.inside.rate))


def on_torus(s: Splits, cluster: Cluster, axes: tuple[str, ...]) -> Speed:
    """The fastest: all dimensions that so many devices can lie in, each a ring where one is long enough."""
    h, n = cluster.hardware, s.over(*axes)
    sides = cluster.shape[-h.torus :]
    ring = min((side for side in sides if side % h.wrap == 0), default=math.inf)
    dimensions = np.minimum(sum(side > 1 for side in sides), np.floor(np.log2(np.maximum(n, 2))))
    rate = h.inside.rate * dimensions * np.where(n >= ring, 2, 1)
    apart = n > math.prod(sides)
    late = h.start + h.inside.latency * (n > 1)
    swap = np.where(n > 1, (2 if ring == math.inf else 1) * np.maximum(2.0, n ** (1 / h.torus)) / 8 / h.inside.rate, 0.0)
    rate = np.where(apart, np.minimum(rate, math.prod(sides) * h.between.rate), rate)
    swap = np.where(cluster.slices > 1, 0.0, swap)
    return Speed(
        n,
        rate * (math.inf if cluster.slices > 1 else 1),
        late * (cluster.slices == 1) + h.start * (cluster.slices > 1),
        swap,
        s.ones * math.inf,
    )


def exact(s: Splits, cluster: Cluster, axes: tuple[str, ...]) -> Speed:
    """One mesh: its links themselves."""
    there = tuple(axis for axis in axes if s.sizes[axis][0] > 1)
    if not there:
        return Speed(s.ones, s.ones, s.ones * 0, s.ones * 0, s.ones)
    lay = Layout({axis: int(n[0]) for axis, n in s.sizes.items() if axis and n[0] > 1})
    way, far = link.link(cluster, lay, there), link.neighbour(cluster, lay, there)
    late = cluster.hardware.start + way.latency
    return Speed(s.over(*there), s.ones * way.rate, s.ones * late, s.ones * link.exchange(cluster, lay, there), s.ones * far.rate)


def moved(s: Splits, run: Any) -> Moved:
    """Seconds of what a step moves."""
    w = Ways(s)
    forward, backward, once = weights(w, run)
    ring = around(w, run)
    rest = matrices(w, run) + exchanged(w, run) + experts(w, run) + stages(w, run)
    streamed = panels(w, run)
    return Moved(forward + ring[0] + streamed[0], backward + ring[1] + streamed[1], once + rest)


def passes(s: Splits, run: Any) -> Array:
    """Layers that a device runs forward in a step, each for all its tokens: with the bubble's."""
    return s.q.config.layers / s.stages * run.fill


def residual(s: Splits) -> Array:
    """Bytes of a step's residual stream on a device, its sequence whole."""
    return s.tokens * s.q.config.embed * s.width


def weights(w: Ways, run: Any) -> tuple[Array, Array, Array]:
    """Parameters on their way in, gradients on their way out: what hides forward, backward, and what comes once a step."""
    s, forward, backward, once = w.s, w.s.ones * 0, w.s.ones * 0, w.s.ones * 0
    inner = ("zero3", "cube_rows") if s.streams else ("zero3", "rows", "cube_rows")
    again = 0.0 if s.q.cluster.hardware.platform == "cpu" else run.some if "cols" in s.sizes else 1.0
    for leaf in (leaf for leaf in s.leaves if "embed" in leaf.axes):  # nothing gathers the others
        inside = leaf.axes[0] == "layer"
        times = run.micro * (run.fill if inside else 1)
        many = times * (leaf.shape[0] / s.stages if inside else 1)
        live = s.elements("live", leaf) * (4 if leaf.exact else s.width)
        come = w.gathered(live * times, many, *inner)
        forward = forward + (come if inside or "pipe" not in s.sizes else 0)
        backward = backward + (come * again if inside else 0)
        once = once + w.gathered(s.elements("grad", leaf) * (4 if leaf.exact else s.width), 1, "zero1")
        once = once + w.gathered(s.elements("step", leaf) * (4 if leaf.exact else s.width), 1, "zero2")
        if leaf.frozen:
            continue
        out = run.micro * (run.late + (1 - run.late) * run.fill) if inside else run.micro
        backward = backward + w.gathered(live * out, out * (leaf.shape[0] / s.stages if inside else 1), "zero2", *inner)
        once = once + w.gathered(s.elements("grad", leaf) * 4, 1, "zero1")
        tokens = ("data", "depth", "context", "ulysses", *(() if "expert" in leaf.axes else ("expert",)))
        # key heads that every device has whole are summed over more devices, by ways that may be faster
        there = (
            np.where(s.keys == s.wide, 1, 0) if "kv_heads" in leaf.axes else 1 if set(WIDE) & set(leaf.axes) else np.where(s.wide > 1, 0, 1)
        )
        once = once + there * w.summed(s.elements("rest", leaf) * 4, 1, *tokens)
    return forward, backward, once


def matrices(w: Ways, run: Any) -> Array:
    """What ways to split the matrices move into and out of a layer's halves, and at the ends."""
    s, c = w.s, w.s.q.config
    parallel = bool(s.q.model.parallel(c))
    twins = parallel and not c.dropout
    size, layers = residual(s), passes(s, run)
    spare = np.maximum(0, 1 - s.stages * run.chunks / c.layers) * layers * run.again
    one = lambda move, each, n, *axes: move(each * n, run.micro * n, *axes)
    if "tensor" in s.sizes and "sequence" not in s.pattern.words:
        n = layers * (4 + run.full * (not parallel)) + spare * (not parallel) + np.where(s.stages == 1, 2, 0)
        return one(w.summed, size, n, "tensor")
    axis = next((axis for axis in ("tensor", "cols", "cube_heads") if axis in s.sizes), None)
    if axis is None:
        return s.ones * 0
    halves = 6 + (1 if twins else 2) + 2 * run.some + run.full * (not parallel)
    n = (0 if s.streams else layers * halves + 2 * spare) + np.where(s.stages == 1, 4, 0)
    found = one(w.gathered, size / s.over("cube_embed"), n, axis)
    return found + (turns(w, run, layers) if "cube_embed" in s.sizes else 0)


def turns(w: Ways, run: Any, layers: Array) -> Array:
    """A cube's own: results of first products scattered over rows, inputs of second ones gathered, and back."""
    s, found = w.s, w.s.ones * 0
    for leaf in s.leaves:
        if leaf.axes[0] == "layer" and "embed" in leaf.axes and INSIDE & set(leaf.axes):
            features = math.prod(n for n, name in zip(leaf.shape, leaf.axes) if name not in ("layer", "embed"))
            names = [name for name in own(leaf) if name != "embed"]
            size = s.tokens * features / s.split("live", *names) * s.width
            n = 2 * leaf.shape[0] / s.q.config.layers * layers
            found = found + w.gathered(size * n, run.micro * n, "cube_embed")
    return found


def panels(w: Ways, run: Any) -> tuple[Array, Array]:
    """Activations and weights of streamed products, panel by panel: forward, backward."""
    s = w.s
    if "stream" not in s.pattern.options.values():
        return s.ones * 0, s.ones * 0
    each = residual(s) * (1 - 1 / s.over("cols")) * passes(s, run)
    matrices = (leaf for leaf in s.leaves if leaf.axes[0] == "layer" and "embed" in leaf.axes and INSIDE & set(leaf.axes))
    weights = sum((s.elements("live", leaf) for leaf in matrices), s.ones * 0) * s.width * (s.over("rows") - 1) * run.micro * run.fill
    forward, backward = w.passed(4 * each, "cols"), w.passed(5 * each, "cols")
    return forward + w.passed(weights, "rows"), backward + w.passed(2 * weights, "rows")


def around(w: Ways, run: Any) -> tuple[Array, Array]:
    """Keys and values around a ring: forward, backward."""
    s, c = w.s, w.s.q.config
    if "context" not in s.sizes:
        return s.ones * 0, s.ones * 0
    heads = np.where(c.kv_heads % s.wide == 0, c.kv_heads / s.wide, 1.0)
    array = s.tokens / s.over("cube_embed") * c.head * heads
    hops = [1 if kind.window else s.over("context") - 1 for kind in s.q.model.kinds(c)]
    steps = sum(hops) / s.stages * run.fill
    again = 2 * run.full
    return w.passed(2 * s.width * array * steps, "context"), w.passed((2 * s.width + 8 + again * s.width) * array * steps, "context")


def exchanged(w: Ways, run: Any) -> Array:
    """Heads for sequence."""
    s, c = w.s, w.s.q.config
    if "ulysses" not in s.sizes:
        return s.ones * 0
    keys = np.where(c.kv_heads % s.wide == 0, c.kv_heads / s.wide, 1.0)
    size = 2 * (c.heads / s.wide + keys) * s.tokens / s.over("cube_embed") * c.head * s.width
    n = (2 + run.some) * passes(s, run)
    return w.swapped(size * n, 4 * run.micro * n, "ulysses")


def experts(w: Ways, run: Any) -> Array:
    """Tokens to their experts and back, where none is dropped."""
    s, c = w.s, w.s.q.config
    if "expert" not in s.sizes or c.capacity:
        return s.ones * 0
    sparse = sum(kind.tells for kind in s.q.model.kinds(c)) / s.stages * run.fill
    n = (4 + run.some) * sparse
    return w.gathered(residual(s) * s.over("expert") * n, run.micro * n, "expert")


def stages(w: Ways, run: Any) -> Array:
    """A pipeline's own: layers to their stages and gradients back, activations from stage to stage, and what all stages share at the ends."""
    s = w.s
    if "pipe" not in s.sizes:
        return s.ones * 0
    size = residual(s)
    there = size / (s.short * s.narrow)
    edge = ("pipe",) if "sequence" in s.pattern.words else ("pipe", "tensor")
    layers: list[Spec] = [leaf for leaf in s.leaves if leaf.axes[0] == "layer" and INSIDE & set(leaf.axes) and "embed" in leaf.axes]
    moves = sum(
        (s.elements("rest", leaf) * (4 if leaf.exact else s.width) + s.elements("rest", leaf) * 4 * (not leaf.frozen) for leaf in layers),
        s.ones * 0,
    )
    found = w.swapped(moves, 2 * len(layers), "pipe") + w.passed(2 * run.chunks * there, "pipe")
    found = found + w.summed(2 * there, 2 * run.micro, "pipe")
    return found + w.summed(there + size / s.over("cube_embed") * ("cols" not in s.sizes), 2 * run.micro, *edge)
