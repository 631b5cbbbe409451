"""The collectives of a step, taken apart: one layer's in one micro-batch, those of a micro-batch outside the layers, and those once a step.

Nothing is stated twice: `step_cost` is asked for the model with one layer more and for one micro-batch more, and the differences are the shares.
"""

from typing import NamedTuple

from meshloom.models.base import Model
from meshloom.parallel.base import Collective, Shapes
from meshloom.plan.cost import step_cost, wire_bytes

BACKWARD = ("backward", "recomputed", "gradient", "sums for the log")
"""Words in a collective's reason that place it in the backward pass or behind it."""
ORDER = ("parameters", "the embedding", "statistics", "into", "", "recomputed", "out of", "the head", "the loss")
"""Words of reasons in the order of the forward pass; "" is any other."""
BACK = (
    "the head",
    "parameters",
    "recomputed",
    "out of",
    "",
    "into",
    "statistics",
    "the embedding",
    "gradients",
    "sums",
    "the gradient's norm",
)
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
    """layer: of one layer in one micro-batch. micro: of one micro-batch, outside the layers. once: of a step, beside these.
    layers, micros: how often the first two happen."""

    layer: tuple[Moved, ...]
    micro: tuple[Moved, ...]
    once: tuple[Moved, ...]
    layers: int
    micros: int

    @property
    def parts(self) -> tuple[tuple[str, int, tuple[Moved, ...]], ...]:
        """The three shares: what each is, how often it happens in a step, its collectives."""
        layers, micros = _plural(self.layers, "layer"), _plural(self.micros, "micro-batch", "es")
        return (
            (f"one layer, in one micro-batch (x {layers}, x {micros})", self.layers * self.micros, self.layer),
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
    """The collectives of a step under a spelling, by what they happen once for."""
    now, deep, long, both = (_cost(model, spelling, x, more, micro) for more, micro in ((0, 0), (1, 0), (0, 1), (1, 1)))
    layers, shares = x.config.layers, ([], [], [])
    nothing = (0, 0)
    for key in now:
        at = [side.get(key, nothing) for side in (now, deep, long, both)]
        layer = tuple(d - c - b + a for a, b, c, d in zip(*at))
        if layer[0] <= 0:  # one array of all layers together
            layer = nothing
        micro = tuple(at[2][i] - at[0][i] - layers * layer[i] for i in (0, 1))
        once = tuple(at[0][i] - x.micro * (layers * layer[i] + micro[i]) for i in (0, 1))
        for share, (count, size) in zip(shares, (layer, micro, once)):
            if count or size:
                share.append(_moved(key, count, size, x))
    return Traffic(*(tuple(sorted(share, key=_place)) for share in shares), layers, x.micro)


def _cost(model: Model, spelling: str, x: Shapes, layers: int, micro: int) -> dict[tuple, tuple[int, int]]:
    """Count and bytes by kind, axes and reason, of the model with so many more layers and of a step with so many more micro-batches."""
    if layers:
        c = x.config.model_copy(update={"layers": x.config.layers + layers})
        straight = x.merged == x.config.layers  # all layers are one piece of code, the new one too
        x = x._replace(config=c, specs=model.specs(c), merged=x.merged + layers * straight)
    found = step_cost(spelling, x._replace(micro=x.micro + micro))
    return {(c.kind, c.axes, c.why): (c.count, c.bytes) for c in found}


def _moved(key: tuple, count: int, size: int, x: Shapes) -> Moved:
    kind, axes, why = key
    back = any(word in why for word in BACKWARD)
    return Moved(kind, axes, why, back, count, size, wire_bytes(Collective(kind, axes, count, size, why), x.layout))


def _place(m: Moved) -> tuple[bool, int]:
    """Where a collective stands in a step."""
    words = BACK if m.back else ORDER
    last = [i for i, word in enumerate(words) if word and word in m.why]
    return m.back, last[0] if last else words.index("")


def _plural(n: int, word: str, ending: str = "s") -> str:
    return f"{n} {word}{ending * (n != 1)}"
