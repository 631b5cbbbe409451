"""The collectives of a step, taken apart: one layer's in one micro-batch (of a pipeline, one tick's), those of a micro-batch outside the layers, and those
once a step."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from meshloom.core.layout import Layout
from meshloom.models.base import Model
from meshloom.parallel.base import LAYER, MICRO, PLACES, STEP, Collective, Shapes, merge
from meshloom.plan.cost import Ticking, shares, wire_bytes
from meshloom.runner.run import stacks

AT = {name: i for i, name in enumerate(PLACES)}
"""Places in the order of a step."""
TURNED = ("head back", "layer back", "embed back")
"""Places at which things move in the opposite order of the forward pass, in which strategies tell them."""
WHEN = {False: ("forward", "backward"), True: ("before", "after")}
"""Whether once a step -> what the two passes are called."""
ALIKE = {"layer end": "layer"}
"""Places that are one to a reader."""


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


class Share(NamedTuple):
    """Collectives that come together. often: what they come once for, a row of base.PLACES. times: how often that is in a step."""

    title: str
    often: str
    times: int
    moves: tuple[Moved, ...]


class Traffic(NamedTuple):
    """shares: of a step. repeats: how often the first stands in the model, where it is of one layer, or of a pattern of layers that differ."""

    shares: tuple[Share, ...]
    repeats: int

    @property
    def layer(self) -> tuple[Moved, ...]:
        """Inside the layers."""
        return self._of(LAYER)

    @property
    def micro(self) -> tuple[Moved, ...]:
        """In a micro-batch, outside the layers."""
        return self._of(MICRO)

    @property
    def once(self) -> tuple[Moved, ...]:
        """Once a step."""
        return self._of(STEP)

    def _of(self, often: str) -> tuple[Moved, ...]:
        return tuple(m for share in self.shares if share.often == often for m in share.moves)

    @property
    def totals(self) -> dict[tuple[str, ...], tuple[float, float, float]]:
        """Mesh axes that take part together -> bytes that each device sends over them in a step, in layers, outside them
        and once a step."""
        found: dict[tuple[str, ...], list[float]] = {}
        for share in self.shares:
            for m in share.moves:
                found.setdefault(m.axes, [0.0, 0.0, 0.0])[(LAYER, MICRO, STEP).index(share.often)] += share.times * m.sent
        return {axes: (a, b, c) for axes, (a, b, c) in sorted(found.items(), key=lambda item: -sum(item[1]))}

    @property
    def sent(self) -> float:
        """Bytes that each device sends in a step."""
        return sum(sum(shares) for shares in self.totals.values())


def traffic(model: Model, spelling: str, x: Shapes) -> Traffic:
    """The collectives of a step under a spelling, by what they happen once for, in order.  x: the shapes of the step."""
    rest, ticks = shares(spelling, x)
    repeats = _repeats(model, x)
    own = _ticking(ticks, x) if x.flow else [_layer(rest, x, repeats)]
    micros, between = _plural(x.micro, "micro-batch", "es"), ("send", "send back")
    outside = [c for c in rest if PLACES[c.place].often == MICRO and c.place not in between]
    found = (
        *own,
        Share("between stages, in all ticks of a step", MICRO, 1, _moved([c for c in rest if c.place in between], 1, x.layout)),
        Share(f"outside the layers, in one micro-batch (x {micros})", MICRO, x.micro, _moved(outside, x.micro, x.layout)),
        Share("once a step", STEP, 1, _moved([c for c in rest if PLACES[c.place].often == STEP], 1, x.layout)),
    )
    return Traffic(tuple(share for share in found if share.moves), repeats)


def _layer(found: Iterable[Collective], x: Shapes, repeats: int) -> Share:
    """What one layer moves in one micro-batch, or a pattern of layers together."""
    layers, micros = x.config.layers, _plural(x.micro, "micro-batch", "es")
    size = layers // repeats
    many = _plural(layers, "layer") if size == 1 else f"{repeats} of {_plural(layers, 'layer')}"
    one = "one layer" if size == 1 else f"{size} layers together"
    mine = [c for c in found if PLACES[c.place].often == LAYER]
    times = repeats * x.micro
    return Share(f"{one}, in one micro-batch (x {many}, x {micros})", LAYER, times, _moved(mine, times, x.layout))


def _ticking(ticks: Mapping[str, Ticking], x: Shapes) -> list[Share]:
    """What the layers of a stage that run together move in one tick."""
    said = {"forward": "with a forward", "backward": "with a backward", "weight": "with gradients put off"}
    layers = _plural(x.layers // x.parts, "layer")
    return [
        Share(f"one tick {said[kind]}, {layers} on each stage (x {_plural(t.times, 'tick')})", LAYER, t.times, _moved(t.moves, 1, x.layout))
        for kind, t in ticks.items()
    ]


def _repeats(model: Model, x: Shapes) -> int:
    """How often the layers' pattern repeats: their number where all are alike, 1 where there is none."""
    found = stacks(model.kinds(x.config), "none" if x.flow else x.remat)
    return found[0].repeat if len(found) == 1 else 1


def _moved(found: Iterable[Collective], times: int, lay: Layout) -> tuple[Moved, ...]:
    """One share of so many, in order: by place, and at one place in the order of the pass."""
    out = []
    for c in merge(c._replace(place=ALIKE.get(c.place, c.place)) for c in found):
        assert c.count % times == c.bytes % times == 0, (c, times)
        back = PLACES[c.place].back
        out.append(Moved(c.kind, c.axes, c.place, c.why, back, c.count // times, c.bytes // times, wire_bytes(c, lay) / times))
    return tuple(m for _, m in sorted(enumerate(out), key=lambda at: (AT[at[1].place], -at[0] if at[1].place in TURNED else at[0])))


def _plural(n: int, word: str, ending: str = "s") -> str:
    return f"{n} {word}{ending * (n != 1)}"
