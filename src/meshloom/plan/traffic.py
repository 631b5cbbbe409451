"""The collectives of a step, taken apart: one layer's in one micro-batch, those of a micro-batch outside the layers, and those once a step.

Nothing is stated twice: `step_cost` is asked for the model with its layers twice and for one micro-batch more, and the differences are the shares.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from meshloom.core.layout import Layout
from meshloom.models.base import Model
from meshloom.parallel.base import Collective, Shapes
from meshloom.plan.cost import step_cost, wire_bytes
from meshloom.runner.run import stacks

ShapesOf = Callable[[Any, int], Shapes]
"""A model's configuration and a number of micro-batches of one size -> the shapes of a step."""

BACKWARD = ("backward", "recomputed", "gradient", "sums for the log")
"""Words in a collective's reason that place it in the backward pass or behind it."""
ORDER = (
    "parameters",
    "the embedding",
    "statistics",
    "into",
    "heads for",
    "keys and values",
    "",
    "recomputed",
    "out of",
    "the head",
    "the loss",
)
"""Words of reasons in the order of the forward pass; "" is any other."""
BACK = (
    "the head", "parameters", "recomputed", "out of", "heads for", "keys and values", "their gradients", "", "into", "statistics", "the embedding",
    "gradients", "sums", "the gradient's norm",
)  # fmt: skip
"""The same, backward."""


class Moved(NamedTuple):
    """Collectives alike: count arrays of together so many bytes, whole; sent: bytes that each device sends. back: in the backward pass or behind."""

    kind: str
    axes: tuple[str, ...]
    why: str
    back: bool
    count: int
    bytes: int
    sent: float


class Traffic(NamedTuple):
    """layer: of one layer in one micro-batch (of a pattern of layers, where they differ). micro: of one micro-batch, outside the layers. once: of a
    step, beside these. layers: of the model. repeats: how often the first stands in it. micros: micro-batches a step."""

    layer: tuple[Moved, ...]
    micro: tuple[Moved, ...]
    once: tuple[Moved, ...]
    layers: int
    repeats: int
    micros: int

    @property
    def parts(self) -> tuple[tuple[str, int, tuple[Moved, ...]], ...]:
        """The three shares: what each is, how often it happens in a step, its collectives."""
        size, micros = self.layers // self.repeats, _plural(self.micros, "micro-batch", "es")
        many = _plural(self.layers, "layer") if size == 1 else f"{self.repeats} of {_plural(self.layers, 'layer')}"
        one = "one layer" if size == 1 else f"{size} layers together"
        return (
            (f"{one}, in one micro-batch (x {many}, x {micros})", self.repeats * self.micros, self.layer),
            (f"outside the layers, in one micro-batch (x {micros})", self.micros, self.micro),
            ("once a step", 1, self.once),
        )

    @property
    def totals(self) -> dict[tuple[str, ...], tuple[float, float, float]]:
        """Mesh axes that take part together -> bytes that each device sends over them in a step, by the three shares."""
        found: dict[tuple[str, ...], list[float]] = {}
        for i, (_, times, share) in enumerate(self.parts):
            for m in share:
                found.setdefault(m.axes, [0.0, 0.0, 0.0])[i] += times * m.sent
        return {axes: (a, b, c) for axes, (a, b, c) in sorted(found.items(), key=lambda item: -sum(item[1]))}

    @property
    def sent(self) -> float:
        """Bytes that each device sends in a step."""
        return sum(sum(shares) for shares in self.totals.values())


def traffic(model: Model, c: Any, spelling: str, of: ShapesOf, micro: int) -> Traffic:
    """The collectives of a step under a spelling, by what they happen once for.  of: the shapes of a step.  micro: micro-batches a step."""
    sides = [_cost(spelling, of, c, micro + more, times) for times, more in ((1, 0), (2, 0), (1, 1), (2, 1))]
    repeats, shares, lay = _repeats(model, c), ([], [], []), of(c, micro).layout
    for key in sides[0]:
        now, deep, long, both = (side.get(key, (0, 0)) for side in sides)
        layers = tuple(d - l - b + a for a, b, l, d in zip(now, deep, long, both))
        layers = layers if layers[0] > 0 else (0, 0)  # else one array of all layers together
        outside = tuple(l - a - all for a, l, all in zip(now, long, layers))
        once = tuple(a - micro * (all + out) for a, all, out in zip(now, layers, outside))
        for share, found in zip(shares, (tuple(n // repeats for n in layers), outside, once)):
            if any(found):
                share.append(_moved(key, *found, lay))
    return Traffic(*(tuple(sorted(share, key=_place)) for share in shares), c.layers, repeats, micro)


def _repeats(model: Model, c: Any) -> int:
    """How often the layers' pattern repeats: their number where all are alike, 1 where there is none."""
    found = stacks(model.kinds(c))
    return found[0].repeat if len(found) == 1 else 1


def twice(c: Any, times: int = 2) -> Any:
    """The configuration with its layers so many times over, those of lists that have an entry for each layer too."""
    more = {name: value * times for name, value in c if isinstance(value, tuple) and len(value) == c.layers}
    return c.model_copy(update={"layers": c.layers * times, **more}) if times > 1 else c


def _cost(spelling: str, of: ShapesOf, c: Any, micro: int, times: int) -> dict[tuple, tuple[int, int]]:
    """Count and bytes by kind, axes and reason. What a compiler merges of some layers it merges of all these."""
    x = of(twice(c, times), micro)._replace(merged={stack: n * times for stack, n in of(c, micro).merged.items()})
    return {(m.kind, m.axes, m.why): (m.count, m.bytes) for m in step_cost(spelling, x)}


def _moved(key: tuple, count: int, size: int, lay: Layout) -> Moved:
    kind, axes, why = key
    back = any(word in why for word in BACKWARD)
    return Moved(kind, axes, why, back, count, size, wire_bytes(Collective(kind, axes, count, size, why), lay))


def _place(m: Moved) -> tuple[bool, int]:
    """Where a collective stands in a step."""
    words = BACK if m.back else ORDER
    last = [i for i, word in enumerate(words) if word and word in m.why]
    return m.back, last[0] if last else words.index("")


def _plural(n: int, word: str, ending: str = "s") -> str:
    return f"{n} {word}{ending * (n != 1)}"
