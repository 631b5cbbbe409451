"""What a pipeline makes of a step, for its costs: how often its program does what."""

from typing import Any, NamedTuple


class Ticks(NamedTuple):
    """Ticks of a step in which any stage of a pipeline has work of each kind; those that send something on, and back."""

    forward: int
    backward: int
    weight: int
    sent: int
    sent_back: int


class Flow(NamedTuple):
    """What a pipeline makes of a step. parts: so many its layers are cut into, each computed at once. seen: whether a compiler sees that nobody reads the
    last output of a part that is computed for its backward pass alone. late: whether gradients of matrices are work of their own. gathers: how often
    a step gathers weights outside the layers: those of the embedding, of the head, and of both. ticks: of its table. heavy: kinds of the layers of the
    fullest part, where slots that no layer fills are left out, so that a tick takes as long as these; (): it takes all slots."""

    parts: int
    seen: bool
    late: bool
    gathers: tuple[int, int, int]
    ticks: Ticks
    heavy: tuple[Any, ...] = ()
