"""Drawings of small models, for the tests of pictures."""

import functools

from meshloom.parallel.table import STRATEGIES, build
from meshloom.plan.cost import shapes
from meshloom.plan.draw import Drawing, drawing
from meshloom.runner.run import How
from meshloom.train.config import OptimizerConfig
from meshloom.train.optimizer import make_optimizer, state_specs
from programs import FAMILIES, config

SPELLINGS = (
    "",
    "data=8",
    "zero1=4",
    "zero2=2 tensor=2",
    "zero3=4 tensor=2 sequence",
    "data=2 zero3=2 tensor=2",
    "data=16",
    "zero3=32 tensor=8",
)


def example(name: str) -> tuple[str, str]:
    """A spelling of a strategy over the fewest devices, and a family whose model admits it."""
    s = STRATEGIES[name]
    word = name if s.beside else f"{name}={'x'.join(str(n) for n in s.sizes(2**s.axes))}"
    spelling = f"{example(s.beside)[0]} {word}" if s.beside else word
    for family in FAMILIES:
        try:
            build(spelling, config(family, layers=3)[1], 16)
        except ValueError:
            continue
        return spelling, family
    raise AssertionError(f"no family of programs.FAMILIES admits {spelling}")


@functools.cache
def drawn(spelling: str, family: str = "llama", micro: int = 2, device: int = 0, optimizer: str = "adamw", seq: int = 16) -> Drawing:
    """The drawing of a model of `programs.config` under a layout."""
    model, c = config(family, layers=3)
    lay, specs = build(spelling, c, seq, "gpu"), model.specs(c)
    x = shapes(model, c, lay, seq, 64 * micro, micro, How(), "bfloat16")
    kept = {"optimizer": state_specs(make_optimizer(OptimizerConfig(kind=optimizer), specs), specs)}
    return drawing(model, spelling, x, seq, kept, device)
