"""The tables of docs/layouts, made from the code: `PYTHONPATH=src:tests python -m layouts.pages` writes them into the pages."""

import re
from pathlib import Path

from meshloom.core.layout import TABLES
from meshloom.parallel.base import wherever
from meshloom.parallel.table import STRATEGIES, build, parse
from meshloom.plan.cost import shapes, step_cost, wire_bytes
from meshloom.plan.memory import stored
from meshloom.recipes.launch import model_of
from meshloom.recipes.load import load_recipe
from meshloom.runner.run import How

FOLDER = Path(__file__).parents[2] / "docs" / "layouts"
MARK = re.compile(r"(<!-- (splits|traffic|across|memory): (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
SEQ, SEQUENCES, MICRO = 256, 16, 2


def table(head: tuple[str, ...], rows: list[tuple]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def splits(names: str) -> str:
    """Which axes a strategy splits in each table of a layout."""
    rows = []
    for name in names.split():
        layout = STRATEGIES[name].layout(*(2,) * STRATEGIES[name].axes)
        cells = (", ".join(f"{axis}: {' x '.join(over)}" for axis, over in getattr(layout, t).items()) or "-" for t in TABLES)
        rows.append((f"`{name}`", *cells))
    return table(("strategy", *TABLES), rows)


def shown(text: str):
    """The model and the rest of a mark: of the recipe that stands before a colon and a space, else of quickstart."""
    recipe, _, rest = text.partition(": ")
    model, c, _ = model_of(load_recipe(recipe if rest else "quickstart"))
    return model, c, rest or text


def traffic(text: str) -> str:
    """What one step of the model moves."""
    model, c, spelling = shown(text)
    layout = build(spelling, c, SEQ)
    cost = step_cost(spelling, shapes(model, c, layout, SEQ, SEQUENCES, MICRO, How(), "float32"))
    rows = [(m.why, m.kind, " x ".join(m.axes), f"{m.count:,}", f"{m.bytes:,}", f"{wire_bytes(m, layout):,.0f}") for m in wherever(cost)]
    sent = sum(wire_bytes(m, layout) for m in cost)
    return table(("why", "kind", "over", "arrays", "bytes", "sent by a device"), [*rows, ("all", "", "", "", "", f"{sent:,.0f}")])


def across(spellings: str) -> str:
    """What one device sends in a step of the model, by the mesh axes over which it goes."""
    model, c, spellings = shown(spellings)
    rows = []
    for spelling in re.split(r", (?=\w+\d?=)", spellings):
        layout, sent = build(spelling, c, SEQ), {}
        for m in step_cost(spelling, shapes(model, c, layout, SEQ, SEQUENCES, MICRO, How(), "float32")):
            sent[m.axes] = sent.get(m.axes, 0) + wire_bytes(m, layout)
        cells = [f"{' x '.join(axes)}: {size:,.0f}" for axes, size in sent.items() if size >= 1000]
        rows.append((f"`{spelling}`", ", ".join(cells), f"{sum(sent.values()):,.0f}"))
    return table(("layout", "sent by a device, bytes, by mesh axes", "all"), rows)


def memory(spellings: str) -> str:
    """Bytes of the model's parameters on one device between steps."""
    model, c, spellings = shown(spellings)
    rows = []
    for spelling in re.split(r", (?=\w+\d?=)", spellings):
        assert parse(spelling) is not None
        rows.append((f"`{spelling or 'one device'}`", f"{stored(build(spelling, c, SEQ), model.specs(c)):,}"))
    return table(("layout", "fp32 parameters on a device, bytes"), rows)


TABLE = {"splits": splits, "traffic": traffic, "across": across, "memory": memory}


def fresh(text: str) -> str:
    """A page with its tables made again."""
    return MARK.sub(lambda m: m[1] + TABLE[m[2]](m[3]) + "\n" + m[5], text)


if __name__ == "__main__":
    for page in FOLDER.glob("*.md"):
        page.write_text(fresh(page.read_text(encoding="utf-8")), encoding="utf-8")
