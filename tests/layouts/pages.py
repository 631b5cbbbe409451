"""The tables of docs/layouts and docs/schedules.md, made from the code: `PYTHONPATH=src:tests python -m layouts.pages` writes them into the pages."""

import re
from pathlib import Path

from meshloom.core.layout import TABLES
from meshloom.parallel.base import wherever
from meshloom.parallel.schedules import make
from meshloom.parallel.simulate import RECOMPUTE, STASH, simulate
from meshloom.parallel.slots import compile
from meshloom.parallel.table import STRATEGIES, build, parse
from meshloom.plan.cost import shapes, step_cost, wire_bytes
from meshloom.plan.explain import size
from meshloom.plan.memory import stored
from meshloom.recipes.launch import model_of
from meshloom.recipes.load import load_recipe
from meshloom.recipes.schedule import SHOWN, asked
from meshloom.runner.run import How

FOLDER = Path(__file__).parents[2] / "docs" / "layouts"
PAGES = [*sorted(FOLDER.glob("*.md")), FOLDER.parent / "schedules.md"]
MARK = re.compile(r"(<!-- (splits|traffic|across|memory|schedules|flight): (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
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
        cells = [f"{' x '.join(axes)}: {n:,.0f}" for axes, n in sent.items() if n >= 1000]
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


def schedules(sizes: str) -> str:
    """Ticks, idle time and what is in flight, of stages x micro-batches; behind the word `apart` with one operation a tick."""
    rows = []
    for each in sizes.removeprefix("apart ").split(", "):
        stages, micro = (int(n) for n in each.split(" x "))
        for name in SHOWN:
            found = compile(make(name, stages, micro, packed=not sizes.startswith("apart ")))
            r, even = simulate(found, RECOMPUTE), simulate(found, STASH)
            idle = (r.bubble["uniform"], r.bubble["asynchronous"], even.bubble["uniform"], even.bubble["asynchronous"])
            late = max(r.late) or "-"
            rows.append((f"`{name}`", stages, micro, r.ticks, *(f"{100 * part:.1f} %" for part in idle), max(r.kept), late))
    names = (
        "stages",
        "micro-batches",
        "ticks",
        "idle",
        "idle, asynchronous",
        "F = B = W: idle",
        "asynchronous",
        "inputs kept",
        "left for W",
    )
    return table(("schedule", *names), rows)


def flights(text: str) -> str:
    """Bytes in flight on a device, with more and more micro-batches of one size.  text: recipe, layers, stages, then numbers of micro-batches."""
    recipe, layers, stages, *counts = text.split()
    rows = []
    for name in SHOWN:
        for stash in (False, True):
            held = []
            for micro in counts:
                config = load_recipe(recipe, [f"model.layers={layers}", f"batch.sequences={micro}"])
                found, _ = asked(int(stages), int(micro), name, None, config, stash)
                held.append(size(found[0].flight.bytes) if found[0].flight else "")
            rows.append((f"`{name}`", "what B needs" if stash else "inputs", *held))
    return table(("schedule", "kept", *(f"{micro} micro-batches" for micro in counts)), rows)


TABLE = {"splits": splits, "traffic": traffic, "across": across, "memory": memory, "schedules": schedules, "flight": flights}


def fresh(text: str) -> str:
    """A page with its tables made again."""
    return MARK.sub(lambda m: m[1] + TABLE[m[2]](m[3]) + "\n" + m[5], text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fresh(page.read_text(encoding="utf-8")), encoding="utf-8")
