"""What a strategy is: a layout, a check, and what it costs."""

from collections.abc import Callable
from typing import Any, NamedTuple

from meshloom.core.layout import Layout


class Strategy(NamedTuple):
    """One way to split a model.

    layout: (devices) -> Layout. check: (config, sequence length, devices) -> None, or ValueError with a sentence.
    """

    name: str
    layout: Callable[[int], Layout]
    check: Callable[[Any, int, int], None]
    summary: str


def divisors(n: int, most: int = 64) -> str:
    """The divisors of n up to `most`, for an error message."""
    return ", ".join(str(d) for d in range(1, min(n, most) + 1) if n % d == 0)
