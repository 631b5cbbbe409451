"""Draws the pictures of the pages: axis names between a model's specs and the mesh (README), each strategy's layout (docs/layouts), and schedules of
pipelines (docs/schedules.md).

    make pictures                       # or: python docs/pictures/draw.py

Specs, tables, shards and bytes are read from the code, so that no picture can say what the code does not. Those of layouts are what
`meshloom layout` draws, for the model and the batch of the pages' tables.
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from meshloom.core.layout import Layout
from meshloom.core.spec import Spec, is_spec
from meshloom.core.tree import named_leaves
from meshloom.models.llama import MODEL, Config
from meshloom.parallel.schedules import described, make
from meshloom.parallel.table import build
from meshloom.plan.draw import Drawing
from meshloom.plan.page import INK, PAPER, SOFT, colours
from meshloom.plan.picture import draw
from meshloom.plan.timeline import draw as draw_schedules
from meshloom.plan.timeline import study
from meshloom.recipes.layout import drawn
from meshloom.recipes.load import load_recipe

LAYOUTS = {
    "data": "data=8",
    "zero1": "zero1=8",
    "zero3": "zero3=8",
    "tensor": "tensor=4",
    "sequence": "tensor=4 sequence",
    "tensor2d": "tensor2d=2x2",
    "tensor25d": "tensor25d=2x2x2",
    "tensor3d": "tensor3d=2x2x2",
    "context": "context=4",
    "ulysses": "ulysses=4",
    "expert": "expert=4",
    "pipe": "pipe=2:interleaved2 tensor=2 zero1=2",
    "product": "zero3=4 tensor=2 sequence",
}
"""Name of a picture -> the layout that it shows."""
RECIPES = {"expert": "moe-small"}
"""Name of a picture -> its recipe, where that is not quickstart."""
SCHEDULES = {
    "schedules": [study(make(name, 4, 8), what=described(name)) for name in ("gpipe", "1f1b", "interleaved2", "zb")],
    "schedule-apart": [study(make("1f1b", 4, 8, packed=False), what="with one operation a tick")],
    "schedule-zb": [study(make("zb", 4, 8), stash=True, what=described("zb"))],
}
"""Name of a picture -> the schedules that it shows."""
SIZES = Config(layers=4, embed=256, heads=8, kv_heads=4, ffn=688, vocab=4096, max_seq=256)
SPELLING = "zero3=4 tensor=2"
SHOWN = ("embed", "layers.attn.q", "layers.attn.k", "layers.attn.o", "layers.mlp.up", "layers.mlp.down")
NAMES = ("embed", "heads", "kv_heads", "ffn", "vocab")
COLOURS = colours(("zero3", "tensor"))
MONO = {"family": "monospace", "size": 13}


def box(ax, x: float, y: float, w: float, h: float, title: str, below: str) -> None:
    """A panel with a title and a line under it."""
    ax.add_patch(FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=1.2", facecolor=PAPER, edgecolor="#d0d7de"))
    ax.text(x + 2, y + h - 4, title, size=15, weight="bold", color=INK, va="center")
    ax.text(x + 2, y + h - 8, below, size=12, color=SOFT, va="center")


def words(ax, x: float, y: float, parts: list[tuple[str, str]], step: float = 1.084) -> None:
    """Words of several colours on one line."""
    for text, colour in parts:
        ax.text(x, y, text, color=colour, va="center", weight="bold" if colour in COLOURS.values() else "normal", **MONO)
        x += step * (len(text) + 1)


def colour(lay: Layout, name: str) -> str:
    """The colour of the mesh axis that splits an axis at rest."""
    axes = lay.rest.get(name, ())
    return COLOURS[axes[0]] if axes else INK


def model(ax, lay: Layout, leaves: dict[str, Spec]) -> None:
    """The specs, with the names in the colours of the mesh axes that split them."""
    box(ax, 1, 38, 58, 60, "A model names axes", "specs: what each array is; a block never mentions a device")
    for i, path in enumerate(SHOWN):
        y = 84 - 5.2 * i
        ax.text(3, y, path.removeprefix("layers."), color=INK, va="center", **MONO)
        words(ax, 18.5, y, [("[", SOFT), *((name, colour(lay, name)) for name in leaves[path].axes), ("]", SOFT)])
    ax.text(3, 50.5, 'dot(lay, "bTd,dhk->bThk", x, w.q)', color=INK, va="center", **MONO)
    ax.text(3, 46.3, 'dot(lay, "bThk,hkd->btd", y, w.o)', color=INK, va="center", **MONO)
    ax.text(3, 41.8, "over a split axis, the sum between devices is made here", size=12, color=SOFT, va="center")


def tables(ax, lay: Layout) -> None:
    """The layout's tables, name by name."""
    box(ax, 72, 38, 47, 60, "A layout maps names to the mesh", f'"{SPELLING}"')
    for j, table in enumerate(("rest", "live", "acts")):
        ax.text(90 + 10 * j, 84, table, size=12.5, color=SOFT, va="center", ha="center")
    for i, name in enumerate(("batch", *NAMES)):
        y = 79 - 5.2 * i
        ax.text(74, y, name, color=INK, va="center", **MONO)
        for j, table in enumerate(("rest", "live", "acts")):
            axes = getattr(lay, table).get(name, ())
            text, shade = (axes[0], COLOURS[axes[0]]) if axes else ("-", SOFT)
            ax.text(90 + 10 * j, y, text, color=shade, va="center", ha="center", weight="bold" if axes else "normal", **MONO)
    ax.text(74, 45.8, "rest: between steps   live: while a layer runs", size=12, color=SOFT, va="center")
    ax.text(74, 41.8, "acts: activations", size=12, color=SOFT, va="center")


def mesh(ax, lay: Layout, s: Spec) -> None:
    """Eight devices, and the part of one array that each holds."""
    box(ax, 1, 1, 118, 31, "The mesh holds shards", "zero x tensor = 4 x 2 devices")
    for row in range(lay.sizes["tensor"]):
        for col in range(lay.sizes["zero3"]):
            x, y = 40 + 10.5 * col, 4.5 + 9 * (1 - row)
            ax.add_patch(Rectangle((x, y), 9, 7.6, facecolor="white", edgecolor=INK, linewidth=1))
            ax.text(x + 4.5, y + 3.8, str(lay.sizes["tensor"] * col + row), size=12.5, color=INK, va="center", ha="center")
    ax.text(60.5, 26.2, "zero", color=COLOURS["zero3"], weight="bold", va="center", ha="center", **MONO)
    ax.add_patch(FancyArrowPatch((40, 23.9), (80.5, 23.9), arrowstyle="->", mutation_scale=12, color=COLOURS["zero3"], linewidth=1.6))
    ax.text(36.6, 12.8, "tensor", color=COLOURS["tensor"], weight="bold", va="center", ha="center", rotation=90, **MONO)
    ax.add_patch(FancyArrowPatch((38.5, 21.1), (38.5, 4.5), arrowstyle="->", mutation_scale=12, color=COLOURS["tensor"], linewidth=1.6))
    ax.text(
        3,
        17,
        "Another layout moves the\nparts elsewhere; losses and\ngradients stay the same.",
        size=12,
        color=INK,
        va="top",
        linespacing=1.5,
    )
    shard = lay.shard_shape("rest", s)
    left, top, w, h = 86, 6, 11.5, 14.5
    ax.text(left, 26.2, "attn.q  at rest", color=INK, va="center", **MONO)
    ax.text(left + w / 2, 22.6, "heads", size=12, color=COLOURS["tensor"], va="center", ha="center")
    ax.text(left - 1.2, top + h / 2, "embed", size=12, color=COLOURS["zero3"], va="center", ha="center", rotation=90)
    for i in range(lay.sizes["zero3"]):
        for j in range(lay.sizes["tensor"]):
            part = (left + w / 2 * j, top + h - h / 4 * (i + 1))
            ax.add_patch(Rectangle(part, w / 2, h / 4, facecolor="#dbe9f6" if (i + j) % 2 else "#eef4fa", edgecolor=INK, linewidth=0.8))
            ax.text(part[0] + w / 4, part[1] + h / 8, str(2 * i + j), size=10.5, color=INK, va="center", ha="center")
    for i, (name, whole, own) in enumerate(zip(s.axes, s.shape, shard)):
        text = f"{name:6}{whole:>4}" + (f" -> {own}" if own != whole else "")
        ax.text(100, 18.6 - 3.9 * i, text, color=colour(lay, name), va="center", **{**MONO, "size": 12})


def layout(name: str) -> Drawing:
    """What the picture of a layout shows: the model of the tables of docs/layouts, its batch in two micro-batches."""
    return drawn(
        load_recipe(RECIPES.get(name, "quickstart"), ["batch.micro_batches=2", "train.runner=scan"]), LAYOUTS[name], platform="cpu"
    )


def main() -> None:
    """All pictures."""
    names()
    for name in LAYOUTS:
        draw(layout(name), Path(__file__).with_name(f"{name}.svg"))
    for name, shown in SCHEDULES.items():
        draw_schedules(shown, Path(__file__).with_name(f"{name}.svg"))


def names() -> None:
    """The picture of the README."""
    lay, leaves = build(SPELLING, SIZES, SIZES.max_seq), named_leaves(MODEL.specs(SIZES), is_spec)
    matplotlib.rcParams |= {"svg.hashsalt": "meshloom", "svg.fonttype": "path", "font.family": "DejaVu Sans"}
    figure, ax = plt.subplots(figsize=(12, 10))
    ax.set(xlim=(0, 120), ylim=(0, 99))
    ax.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    model(ax, lay, leaves)
    tables(ax, lay)
    mesh(ax, lay, leaves["layers.attn.q"])
    ax.add_patch(FancyArrowPatch((59.6, 68), (71.4, 68), arrowstyle="<->", mutation_scale=18, color=INK, linewidth=1.8))
    ax.text(65.5, 71, "names", size=13, weight="bold", color=INK, va="center", ha="center")
    ax.text(65.5, 65, "all that\nthey share", size=12, color=SOFT, va="top", ha="center")
    for x in (30, 95.5):
        ax.add_patch(FancyArrowPatch((x, 37.6), (x, 32.6), arrowstyle="->", mutation_scale=18, color=INK, linewidth=1.8))
    figure.savefig(Path(__file__).with_name("meshloom.svg"), facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
