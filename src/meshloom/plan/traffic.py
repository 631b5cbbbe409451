"""The collectives of a step, taken apart: one layer's in one micro-batch, those of a micro-batch outside the layers, and those once a step."""

from typing import NamedTuple

from meshloom.core.layout import Layout
from meshloom.models.base import Model
from meshloom.parallel.base import LAYER, MICRO, PLACES, STEP, Collective, Shapes
from meshloom.plan.cost import step_cost, wire_bytes
from meshloom.runner.run import stacks

AT = {name: i for i, name in enumerate(PLACES)}
"""Places in the order of a step."""
TURNED = ("head back", "layer back", "embed back")
"""Places at which things move in the opposite order of the forward pass, in which strategies tell them."""


class Moved(NamedTuple):
    """Collectives alike: count arrays of together so many bytes, whole; sent: bytes that each device sends. place: where in a step, a row of
    PLACES. back: in the backward pass or behind."""

    kind: str
    axes: tuple[str, ...]
    place: str
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


def traffic(model: Model, spelling: str, x: Shapes) -> Traffic:
    """The collectives of a step under a spelling, by what they happen once for, in order.  x: the shapes of the step."""
    repeats = _repeats(model, x)
    times = {LAYER: repeats * x.micro, MICRO: x.micro, STEP: 1}
    shares: dict[str, list[Moved]] = {often: [] for often in times}
    for c in step_cost(spelling, x):
        often = PLACES[c.place].often
        assert c.count % times[often] == c.bytes % times[often] == 0, (c, times)
        shares[often].append(_moved(c, times[often], x.layout))
    return Traffic(*(_in_order(share) for share in shares.values()), x.config.layers, repeats, x.micro)


def _repeats(model: Model, x: Shapes) -> int:
    """How often the layers' pattern repeats: their number where all are alike, 1 where there is none."""
    found = stacks(model.kinds(x.config))
    return found[0].repeat if len(found) == 1 else 1


def _moved(c: Collective, times: int, lay: Layout) -> Moved:
    """A collective's share of one of so many times."""
    return Moved(c.kind, c.axes, c.place, c.why, PLACES[c.place].back, c.count // times, c.bytes // times, wire_bytes(c, lay) / times)


def _in_order(share: list[Moved]) -> tuple[Moved, ...]:
    """By place; at one place in the order of the pass."""
    return tuple(m for _, m in sorted(enumerate(share), key=lambda at: (AT[at[1].place], -at[0] if at[1].place in TURNED else at[0])))


def _plural(n: int, word: str, ending: str = "s") -> str:
    return f"{n} {word}{ending * (n != 1)}"
