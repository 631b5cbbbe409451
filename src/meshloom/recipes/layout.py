"""`meshloom layout`: the picture of a layout for a recipe's own model, in the terminal and as a file.  Allocates nothing and asks for no device."""

import sys
from pathlib import Path

from meshloom.core.remat import automatic, pieces
from meshloom.parallel.table import build
from meshloom.plan.cost import shapes
from meshloom.plan.draw import Drawing, drawing
from meshloom.plan.page import check
from meshloom.plan.picture import draw
from meshloom.plan.sketch import sketch
from meshloom.recipes.auto import automatic_layout
from meshloom.recipes.launch import DTYPES, check_length, kept, micro_batches, model_of, runner
from meshloom.recipes.run import RunConfig
from meshloom.runner.run import How

WIDE = 100
"""Columns where no terminal says how many it has."""


def drawable(remat: str) -> str:
    """One word to draw: of a pattern, which may be of another layout's parts, the first; `auto` has none before there is a device."""
    return "none" if automatic(remat) else pieces(remat)[0].row


def show(
    config: RunConfig, layout: str | None = None, out: Path | None = None, device: int = 0, devices: int = 8, platform: str = "gpu"
) -> None:
    """Prints the picture of a layout and, where `out` is given, writes it there.  layout: a spelling; the recipe's by default.
    Raises ValueError where the model does not admit it, or the file is neither SVG nor PNG."""
    from rich.console import Console

    if out:
        check(out)
    d = drawn(config, layout, device, devices, platform)
    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)
    sketch(d, console)
    if out:
        draw(d, out)
        console.print(f"Written: {out}", soft_wrap=True)


def drawn(config: RunConfig, layout: str | None = None, device: int = 0, devices: int = 8, platform: str = "gpu") -> Drawing:
    """What to draw.  device: whose part is shown.  devices: for which `auto` is decided.  platform: which compiler's program."""
    if devices < 1:
        raise ValueError(f"--devices {devices} is no number of devices. Give 1 or more.")
    model, c, _ = model_of(config)
    check_length(config, c)
    spelling = config.layout if layout is None else layout
    micro = None
    if spelling == "auto":
        spelling, micro, _ = automatic_layout(config, devices, platform, here=False)
    remat = drawable(config.train.remat)
    seq, how, batch = config.data.seq, How(runner(config, c, platform, remat), remat), config.batch
    lay, dtype = build(spelling, c, seq, platform), DTYPES[config.train.precision]
    packed = config.data.packing == "documents"
    x = shapes(model, c, lay, seq, batch.sequences, micro or micro_batches(config, lay), how, dtype, packed)
    return drawing(model, spelling, x, seq, kept(config, model.specs(c)), device)
