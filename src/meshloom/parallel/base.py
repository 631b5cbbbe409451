"""What a strategy is: a layout, a check, and what it moves between devices."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from meshloom.core.compress import GATHERED, SCATTERED, bits, carried
from meshloom.core.late import waits
from meshloom.core.layout import Layout
from meshloom.core.leaf import beside_stream, parts, split_embed
from meshloom.core.spec import Spec, leaves_of
from meshloom.core.tree import Same, Tree
from meshloom.parallel.flow import Flow


class Place(NamedTuple):
    """A moment of a step. often: what it comes once for. back: whether it is in the backward pass or behind it. about: a phrase."""

    often: str
    back: bool
    about: str


STEP, MICRO, LAYER = "step", "micro-batch", "layer"
"""What a place comes once for: a step, each micro-batch, each layer in each micro-batch."""
PLACES = {
    "start": Place(STEP, False, "parameters enter the step"),
    "outer": Place(MICRO, False, "weights outside the layers are gathered"),
    "rows": Place(MICRO, False, "what every layer is told about the rows"),
    "embed": Place(MICRO, False, "the embedding"),
    "weights": Place(LAYER, False, "a layer's weights are gathered"),
    "layer": Place(LAYER, False, "a layer"),
    "layer end": Place(LAYER, False, "what only a layer's output needs, not its backward pass"),
    "told": Place(MICRO, False, "what layers tell the objective"),
    "send": Place(MICRO, False, "a pipeline's stage sends on what it has computed"),
    "head": Place(MICRO, False, "the last norm and the objective"),
    "head back": Place(MICRO, True, "their backward pass"),
    "weights again": Place(LAYER, True, "a layer's weights are gathered for its backward pass"),
    "layer again": Place(LAYER, True, "what a layer's backward pass computes again"),
    "layer back": Place(LAYER, True, "a layer's backward pass"),
    "gradients": Place(LAYER, True, "gradients leave a layer"),
    "send back": Place(MICRO, True, "a pipeline's stage sends back a gradient"),
    "gradients late": Place(LAYER, True, "gradients that a schedule puts off leave a layer"),
    "embed back": Place(MICRO, True, "the embedding's backward pass"),
    "outer back": Place(MICRO, True, "gradients of weights outside the layers"),
    "end": Place(STEP, True, "gradients are added up over devices, into table `rest`"),
    "log": Place(STEP, True, "sums for the log; the count of tokens that the loss is divided by is one of them"),
    "norm": Place(STEP, True, "the gradient's norm"),
}
"""Where in a step something moves, in order. A program of the forward pass alone moves what the places say that are not `back`; then it adds up
its sums for the log, the count of tokens not before the objective but with them."""


class Collective(NamedTuple):
    """Arrays moved between devices in one step.

    kind: as XLA names it. axes: the mesh axes whose devices take part, outermost first. count: arrays, each as often as it moves.
    bytes: all of them together, each whole: what a gather yields, what a scatter or an all-reduce takes in, on one device.
    place: a row of PLACES. why: a phrase.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    place: str
    why: str


class Shapes(NamedTuple):
    """What a step's traffic depends on.

    specs: the model's. config: its configuration. layout: of all strategies together. rows, seq: one device's share of a micro-batch,
    padding of the sequence included. micro: micro-batches a step. remat: a row of runner.REMAT, or a pattern over the layers (of a pipeline's part: over its
    slots), see `by_remat`. dtype: of the arithmetic. straight: of each layer in `run`, whether the compiler sees the first and the second computation at
    once, and does what they share once (a CPU's unrolled loop; a loop that runs once). sums: numbers that the objective adds up for the log, the
    count of tokens among them. parallel, wide, told: the model's, see models.base.Model.
    kinds: of each layer, models.base.Kind. run: of each that a step computes: those of a pipeline's slots on all its stages, where it has one.
    flow: of a pipeline, or None. packed: whether rows hold several documents.
    """

    specs: Tree
    config: Any
    layout: Layout
    rows: int
    seq: int
    micro: int
    remat: str
    dtype: str
    straight: tuple[bool, ...]
    sums: int
    parallel: bool
    wide: int
    kinds: tuple[Any, ...]
    packed: bool
    told: Any
    run: tuple[Any, ...]
    flow: Flow | None

    @property
    def width(self) -> int:
        """Bytes of one number of the arithmetic."""
        return jnp.dtype(self.dtype).itemsize

    def width_of(self, s: Spec) -> int:
        """Bytes of one number of a parameter in a step."""
        return jnp.dtype(s.dtype).itemsize if s.exact else self.width

    @property
    def merged(self) -> int:
        """Layers that are `straight`."""
        return sum(self.straight)

    def merged_in(self, path: str) -> int:
        """`merged` in the stack of layers that a parameter is in."""
        return sum(straight for kind, straight in zip(self.run, self.straight) if in_stack(path, kind.stack))

    @property
    def layers(self) -> int:
        """Layers that a step computes."""
        return len(self.run)

    @property
    def parts(self) -> int:
        """Parts that the layers are cut into: 1 but for a pipeline."""
        return self.flow.parts if self.flow else 1

    @property
    def ends(self) -> bool:
        """Whether embedding and head are those of one strategy's devices: no pipeline's, which tells all that moves there."""
        return self.layout.stages == 1

    @property
    def residual(self) -> int:
        """Bytes of one micro-batch's residual stream with its whole sequence, on one device."""
        return self.rows * self.seq * self.config.embed * self.width

    @property
    def twins(self) -> bool:
        """Whether both halves of a layer receive the same gradient: of what the two compute from it alone, XLA moves one."""
        return self.parallel and not self.config.dropout

    @property
    def leaves(self) -> dict[str, Spec]:
        """Every parameter by its path."""
        return leaves_of(Same(self.specs))

    def layer(self, s: Spec) -> int:
        """Elements of one layer's share of a parameter on one device while it runs."""
        return self.elements("live", s) // (s.shape[0] // self.layout.stages)

    def held(self, s: Spec) -> int:
        """Elements of a parameter's gradient on one device when it has been added up over all others of its stage."""
        stages = self.layout.stages if s.axes[0] == "layer" and self.layout.exchanged(s.axes) is None else 1
        return self.elements("rest", s) // stages

    def elements(self, table: str, s: Spec) -> int:
        """Elements of a parameter on one device under a table."""
        return math.prod(self.layout.shard_shape(table, s))


def in_stack(path: str, stack: str) -> bool:
    """Whether a parameter is in a stack of layers.  stack: models.base.Kind's."""
    return path.startswith(f"layers.{stack}." if stack else "layers.")


class Asked(NamedTuple):
    """One word of a spelling, read. sizes: devices along each mesh axis of the strategy. options: what stands behind the colon."""

    sizes: tuple[int, ...]
    options: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """Devices of the strategy."""
        return math.prod(self.sizes)


def fits_always(c: Any, seq: int, lay: Layout) -> None:
    """The `fits` of a strategy that no other one can get in the way of."""


def one_axis(n: int) -> tuple[int]:
    """The sizes of a strategy with one mesh axis."""
    return (n,)


class Strategy(NamedTuple):
    """One way to split a model.

    layout: (devices along each of its mesh axes) -> Layout. check: (config, sequence length, Asked) -> None, or ValueError with a sentence.
    cost: (Shapes) -> the collectives of one step that this strategy causes; those of a product are the sum over its strategies.
    sizes: a number of devices -> devices along each mesh axis, or ValueError with a sentence. axes: how many mesh axes it has.
    options: option -> what it does, in a phrase. apart: option that rounds what moves -> how far it may take a run from one device: relative
    difference of loss, gradient, norm and weights (plan/verify.py). finish: option -> what it makes of the whole layout.
    fits: (config, sequence length, Layout of all strategies) -> None, or ValueError with a sentence: what `check` cannot know of a product.
    also: what an option does that is no row of `options` and can be read too; "" for one that cannot.
    beside: the strategy whose devices this one uses instead of a number of its own.
    """

    name: str
    layout: Callable[..., Layout]
    check: Callable[[Any, int, Asked], None]
    cost: Callable[[Shapes], tuple[Collective, ...]]
    summary: str
    sizes: Callable[[int], tuple[int, ...]] = one_axis
    axes: int = 1
    options: Mapping[str, str] = {}
    apart: Mapping[str, Mapping[str, float]] = {}
    fits: Callable[[Any, int, Layout], None] = fits_always
    beside: str = ""
    also: Callable[[str], str] = lambda option: ""
    finish: Mapping[str, Callable[[Layout], Layout]] = {}

    def does(self, options: tuple[str, ...]) -> list[str]:
        """What it does, and each of the options."""
        return [self.summary, *(f"{option}: {self.options.get(option) or self.also(option)}" for option in options)]


def moved(layout: Layout, before: str, after: str, s: Spec) -> tuple[str, ...]:
    """Mesh axes that split an array under one table and not under another: those it is gathered over on the way (or scattered, the other way)."""
    return layout.gathered(before, after, s.axes)[1]


def weight_moves(x: Shapes, owner: str) -> tuple[Collective, ...]:
    """The gathers of parameters and the scatters of their gradients between the tables of a layout whose outermost mesh axis is `owner`.

    Once a step, in the type of the arithmetic: from table `rest` to `grad`, from there to `step`; and back, fp32, from `grad` to `rest`.
    Every micro-batch, one array a layer, in the type of the arithmetic: from `step` to `live`, backward again where the layer needs it; gradients
    from `live` to `grad`.
    """
    found: list[Collective] = []
    for path, s in x.leaves.items():
        inside = s.axes[0] == "layer"
        layers = s.shape[0] if inside else 1
        times = x.micro * layers
        live = x.layer(s) if inside else x.elements("live", s)
        gathers, times = (times, times) if inside else edges(x, path, s)
        forward, leaving = ("weights", leaves(x, s)) if inside else ("outer", "outer back")
        for before, after in (("rest", "grad"), ("grad", "step")):
            found.append(_gather(x, s, before, after, x.elements(after, s), 1, "start", "parameters, once a step"))
        if not s.frozen and not twin(s, x, once=True):
            found.append(_scatter(x, s, "rest", "grad", x.elements("grad", s), 1, "end", "gradients, once a step", 4))
        if not s.frozen and not twin(s, x):
            found.append(_scatter(x, s, "grad", "live", live, times, leaving, "gradients, every micro-batch", x.width_of(s)))
        again = x.micro * (layers - x.merged_in(path)) if inside and needed_again(s, x) else 0
        found.append(_gather(x, s, "step", "live", live, gathers, forward, "parameters, every micro-batch"))
        found.append(_gather(x, s, "step", "live", live, again, "weights again", "parameters, every micro-batch, backward"))
    ours = (c._replace(axes=ordered(x.layout, c.axes)) for c in found)
    return merge(c for c in ours if c.axes and c.axes[0] == owner)


def _gather(x: Shapes, s: Spec, before: str, after: str, elements: int, times: int, place: str, why: str) -> Collective:
    """An array of so many elements gathered between two tables, in blocks (numbers and scales) where an option says so."""
    axes = moved(x.layout, before, after, s)
    if width := bits(x.layout, GATHERED, axes, s.axes, s.exact):
        n = x.layout.size(axes)
        return Collective("all-gather", axes, 2 * times, times * n * carried(elements // n, width), place, why)
    return Collective("all-gather", axes, times, times * elements * x.width_of(s), place, why)


def _scatter(x: Shapes, s: Spec, before: str, after: str, elements: int, times: int, place: str, why: str, width: int) -> Collective:
    """The gradient of such an array on the way back, `width` bytes a number or in blocks."""
    axes = moved(x.layout, before, after, s)
    if few := bits(x.layout, SCATTERED, axes, s.axes):
        n = x.layout.size(axes)
        return Collective("all-to-all", axes, 2 * times, times * n * carried(elements // n, few), place, why)
    return Collective("reduce-scatter", axes, times, times * elements * width, place, why)


def gradient_sums(x: Shapes, owner: str) -> tuple[Collective, ...]:
    """The all-reduces of gradients, of the sums for the log and of the norm whose outermost mesh axis is `owner`.

    A parameter's fp32 gradient is all-reduced once a step over the axes of the tokens, and those of `core.leaf.parts`, that no scatter has served.
    What is frozen has no gradient, and no part in the norm.
    """
    found: list[Collective] = []
    trained = [s for s in x.leaves.values() if not s.frozen]
    for s in trained:
        if s.role == "settled" or twin(s, x, once=True):
            continue
        served = {*moved(x.layout, "rest", "grad", s), *(a for name in s.axes for a in x.layout.grad.get(name, ()))}
        axes = tuple(a for a in (*x.layout.tokens, *parts(x.layout, s.axes)) if a not in served)
        found.append(Collective("all-reduce", ordered(x.layout, axes), 1, 4 * x.held(s), "end", "gradients, once a step"))
    found += _routers(x)
    if x.layout.tokens:
        # the count of tokens is of rows as they are given, the objective's sums of rows as it has them
        for axes, n in ((x.layout.tokens, 1), (x.layout.summed, x.sums - 1)):
            found.append(Collective("all-reduce", ordered(x.layout, axes), n, 4 * n, "log", "sums for the log"))
    splits = (ordered(x.layout, tuple(a for over in x.layout.entries("rest", s.axes) for a in over)) for s in trained)
    found += [Collective("all-reduce", axes, 1, 4, "norm", "the gradient's norm") for axes in dict.fromkeys(splits)]
    return merge(c for c in found if c.axes and c.axes[0] == owner)


def _routers(x: Shapes) -> list[Collective]:
    """What routers tell, every micro-batch; the loads of each sequence again where `full` computes a layer again."""
    lay, told = x.layout, x.told
    telling, seq = sum(kind.tells for kind in x.run) // x.parts, lay.acts.get("whole_seq", ())
    rows = x.micro * telling * x.parts
    found = (
        ((*lay.tokens, *lay.within.work), x.micro, x.micro * told.load * telling, "told", "the routers' load"),
        (lay.within.work, x.micro, x.micro * told.parts * telling, "told", "the routers' probabilities"),
        (seq, rows, rows * x.rows * told.row, "layer", "the routers' load of each sequence"),
        (seq, rows, rows * x.rows * told.row * (x.remat == "full"), "layer again", "the routers' load of each sequence, recomputed"),
    )
    return [Collective("all-reduce", ordered(lay, axes), count if n else 0, 4 * n, place, why) for axes, count, n, place, why in found]


def leaves(x: Shapes, s: Spec) -> str:
    """The place at which the gradient of a layer's parameter leaves the layer."""
    return "gradients late" if x.flow and x.flow.late and waits(x.layout, s) else "gradients"


def edges(x: Shapes, path: str, s: Spec) -> tuple[int, int]:
    """How often a step gathers a parameter outside the layers, and scatters its gradient. A pipeline keeps embedding and head apart: a table that both
    have goes its way for each of them."""
    if not x.flow:
        return x.micro, x.micro
    embeds = s.axes[0] in ("vocab", "position") and path != "head"
    heads = not embeds or (path == "embed" and "head" not in x.leaves)
    which = 2 if embeds and heads else int(heads)
    return x.flow.gathers[which], x.micro * (embeds + heads)


def twin(s: Spec, x: Shapes, once: bool = False) -> bool:
    """Whether a parameter's gradient is that of another, which is moved for both: where a layer's halves are parallel, the biases of both outputs.
    once: at the end of a step. What micro-batches have added up, or was cut to parts of embed that are kept, is then no longer known to be the same."""
    if any(other.frozen for other in x.leaves.values() if other.role == "ends layer"):
        return False
    known = x.micro == x.parts == 1 and not (x.remat == "none" and split_embed(x.layout)) if once else True
    return known and x.twins and s.role == "ends first half"


def needed_again(s: Spec, x: Shapes) -> bool:
    """Whether the backward pass of a layer needs a parameter again: all but biases, which are only added; and of these, where the layer is
    computed again, all that something comes after. What was cut to a part of the residual stream's embed is kept where anything is."""
    if x.remat == "none" and split_embed(x.layout) and beside_stream(s.axes):
        return False
    unless = {"added": x.remat != "none", "ends first half": x.remat != "none" and not x.parallel, "ends layer": False}
    return unless.get(s.role, True)


def ordered(layout: Layout, axes: Iterable[str]) -> tuple[str, ...]:
    """Mesh axes in the order of the mesh, each once."""
    return tuple(a for a in layout.sizes if a in set(axes))


def merge(found: Iterable[Collective]) -> tuple[Collective, ...]:
    """Collectives alike in kind, axes, place and reason as one; those that move nothing left out."""
    return _joined(found, lambda c: (c.kind, c.axes, c.place, c.why))


def wherever(found: Iterable[Collective]) -> tuple[Collective, ...]:
    """As `merge`, but also as one what is moved for the same reason at several places: for tables that people read."""
    return _joined(found, lambda c: (c.kind, c.axes, c.why))


def _joined(found: Iterable[Collective], key_of: Callable[[Collective], tuple]) -> tuple[Collective, ...]:
    out: dict[tuple, Collective] = {}
    for c in found:
        key = key_of(c)
        have = out.get(key)
        out[key] = c if have is None else have._replace(count=have.count + c.count, bytes=have.bytes + c.bytes)
    return tuple(c for c in out.values() if c.count)


def root(n: int, power: int) -> int:
    """The whole number whose power is n; 0 where there is none."""
    side = round(n ** (1 / power))
    return side if side**power == n else 0


def divisors(n: int, most: int = 64) -> str:
    """The divisors of n up to `most`, for an error message."""
    return ", ".join(str(d) for d in range(1, min(n, most) + 1) if n % d == 0)
