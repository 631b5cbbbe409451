"""A layout in the terminal: the same mesh, shards and collectives as in the picture, in characters."""

from typing import Any

from meshloom.parallel.base import STEP
from meshloom.plan.draw import MOMENTS, Drawing, Held, Part, labels, shown, visible
from meshloom.plan.explain import size
from meshloom.plan.page import colours
from meshloom.plan.shards import Faces, faces
from meshloom.plan.traffic import WHEN

OWN, OTHER = "\u2588", "\u2591\u2592"
"""The device's own piece; others', by turns."""
THIN, THICK = "\u250c\u2500\u2510\u2502\u2514\u2518", "\u250f\u2501\u2513\u2503\u2517\u251b"
"""The borders of a device, and of the one whose part is shown."""
WIDE = 16
"""Characters of a rectangle."""


def sketch(d: Drawing, console: Any) -> None:
    """Prints a layout."""
    of = colours(d.sizes)
    console.print(d.spelling, style="bold")
    for line in (d.title, d.how):
        console.print(line, soft_wrap=True, style="dim")
    _heading(console, f"The mesh: {d.devices} device{'s' * (d.devices > 1)}")
    for line in _block(d, list(d.sizes), {}, of, console.width):
        console.print(line)
    _legend(d, console, of)
    _heading(console, "What the device holds of the parameters", "bytes are of all arrays that a row names")
    console.print(_row([_styled(f"{m}\n{MOMENTS[m]}", "bold") for m in ("rest", "step", "live", "grad")]))
    for held in (*d.weights, *d.kept):
        console.print()
        console.print(_whole(held))
        console.print(_row([_cell(part, face, of) for part, face in zip(held.parts, faces(held))]))
    _heading(console, "What the device holds of the activations", "of one micro-batch")
    for start in range(0, len(d.acts), 4):
        line = d.acts[start : start + 4]
        console.print(_row([_styled(held.paths[0], "bold") for held in line]))
        console.print(_row([_cell(held.parts[0], faces(held)[0], of) for held in line]))
        console.print()
    _traffic(d, console, of)


def _heading(console: Any, said: str, more: str = "") -> None:
    from rich.rule import Rule

    console.print()
    console.print(Rule(f"[bold]{said}[/]" + (f" [dim]{more}[/]" if more else ""), align="left", style="dim"))


def _styled(said: str, style: str) -> Any:
    from rich.text import Text

    return Text(said, style=style)


def _legend(d: Drawing, console: Any, of: dict[str, str]) -> None:
    """What each mesh axis is for."""
    from rich.text import Text

    place = ", ".join(f"{axis} {at}" for axis, at in d.place.items())
    if place:
        console.print(f"Thick: device {d.device} ({place}), whose part ({OWN}) is shown below.", style="dim")
    for axis in d.axes:
        console.print(Text.assemble((f"{axis.name} = {axis.size}", f"bold {of[axis.name]}"), f"  {axis.what}"))
        console.print(Text("    " + axis.said, style="dim"))


def _block(d: Drawing, axes: list[str], place: dict[str, int | None], of: dict[str, str], room: int) -> list[Any]:
    """A block of devices as lines: the innermost two axes are a grid, outer ones blocks beside each other, or below where there is no room."""
    from rich.text import Text

    if len(axes) <= 2:
        return _grid(d, axes, place, of, room)
    axis, blocks = axes[0], []
    for at in shown(d, axis):
        title = Text(f"{axis} {at}" if at is not None else "...", style=f"bold {of[axis]}")
        blocks.append([title, *_block(d, axes[1:], {**place, axis: at}, of, room)])
    wide = max(line.cell_len for block in blocks for line in block) + 3
    if wide * len(blocks) > room:
        return [line for block in blocks for line in (*block, Text(""))]
    lines = []
    for parts in zip(*blocks):
        line = Text()
        for part in parts:
            line.append_text(part)
            line.append(" " * (wide - part.cell_len))
        lines.append(line)
    return lines


def _grid(d: Drawing, axes: list[str], place: dict[str, int | None], of: dict[str, str], room: int) -> list[Any]:
    """Rows and columns of devices, with the axes' names and places."""
    from rich.text import Text

    columns = shown(d, axes[-1]) if axes else [0]
    rows, name = (shown(d, axes[0]), axes[0]) if len(axes) == 2 else ([0], "")
    side, lines = len(name) + 5 if name else 0, []
    wide = 7 if side + 7 * len(columns) <= room else 5
    if axes:
        lines.append(Text(" " * side + axes[-1], style=of[axes[-1]]))
        lines.append(Text(" " * side + "".join(f"{_at(at):^{wide}}" for at in columns), style=of[axes[-1]]))
    for row in rows:
        three = [Text(" " * side), Text(f"{name} {_at(row)}".ljust(side) if name else "", style=of[name] if name else ""), Text(" " * side)]
        for column in columns:
            here = {**place, **dict(zip(axes, (row, column) if name else (column,)))}
            for line, part in zip(three, _device(d, here, wide)):
                line.append_text(part)
        lines += three
    return lines


def _at(at: int | None) -> str:
    return "..." if at is None else str(at)


def _device(d: Drawing, place: dict[str, int | None], wide: int) -> list[Any]:
    """One device: three lines of so many characters."""
    from rich.text import Text

    if any(at is None for at in place.values()):
        return [Text(" " * wide), Text(f"{'...':^{wide}}", style="dim"), Text(" " * wide)]
    number = 0
    for axis, count in d.sizes.items():
        number = number * count + (place[axis] or 0)
    a, b, c, side, e, f = THICK if number == d.device else THIN
    style, inner = "bold yellow" if number == d.device else "", wide - 3
    lines = (a + b * inner + c, f"{side}{number:^{inner}}{side}", e + b * inner + f)
    return [Text(line + " ", style=style) for line in lines]


def _row(cells: list[Any]) -> Any:
    """Cells of one line, four to a line of 100 columns."""
    from rich.table import Table

    table = Table.grid(padding=(0, 1, 0, 0))
    for _ in range(4):
        table.add_column(width=24)
    table.add_row(*cells)
    return table


def _whole(held: Held) -> Any:
    """A kind of array: which they are, their axes and whole shape."""
    from rich.text import Text

    said = "; ".join(labels(held.paths))
    return Text.assemble((said, "bold"), f"  [{' '.join(held.axes)}]  ", (" x ".join(str(n) for n in held.shape), "dim"))


def _cell(part: Part, face: Faces, of: dict[str, str]) -> Any:
    """One array at one moment: its rectangle, what splits it, shape and bytes."""
    said = _rectangle(face)
    for cut in part.cuts:
        if cut.parts > 1:
            said.append("\n").append(f"{cut.name} / {cut.parts} ").append(" ".join(cut.over), style=of[cut.over[-1]])
    if all(cut.parts == 1 for cut in part.cuts):
        said.append("\nwhole", style="dim")
    said.append("\n")
    for i, (cut, n) in enumerate(zip(part.cuts, part.shape)):
        said.append(" x " if i else "", style="dim").append(str(n), style=of[cut.over[-1]] if cut.parts > 1 else "")
    said.append(f"\n{size(part.bytes)}" + (f", {part.copies} copies" if part.copies > 1 else ""), style="bold")
    return said.append(f"\n{part.note}", style="dim") if part.note else said


def _rectangle(face: Faces) -> Any:
    """An array cut into its pieces, the device's own marked. Sheets behind it are left to the line that names the split."""
    from rich.text import Text

    said = Text()
    columns = visible(face.columns.parts, face.columns.own) if face.columns else [0]
    rows = visible(face.rows.parts, face.rows.own) if face.rows else [0]
    wide = max(2, WIDE // len(columns))
    for i, row in enumerate(rows * (2 if face.rows and len(rows) == 1 else 1)):
        said.append("\n" if i else "")
        for j, column in enumerate(columns):
            if row is None or column is None:
                said.append("...".center(wide)[:wide], style="dim")
                continue
            mine = (face.rows is None or row == face.rows.own) and (face.columns is None or column == face.columns.own)
            other = OTHER[((i if len(rows) > 1 else 0) + j) % 2]
            said.append((OWN if mine else other) * wide, style="yellow" if mine else "dim")
    return said


def _traffic(d: Drawing, console: Any, of: dict[str, str]) -> None:
    """The collectives of a step, and its bytes by mesh axes."""
    from rich import box
    from rich.table import Table

    _heading(console, "What moves between devices", "bytes are of whole arrays; sent: by each device, in a ring")
    t, plain = (
        d.traffic,
        {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True},
    )
    if not t.sent:
        console.print("Nothing: each device works alone.")
        return
    wide = {
        "": 8,
        "kind": max(len(m.kind) for share in t.shares for m in share.moves),
        "over": max(len(" x ".join(a)) for a in t.totals),
        "bytes": 10,
        "sent": 10,
    }
    for share in t.shares:
        table = Table(title=share.title[0].upper() + share.title[1:], **plain, expand=True)
        for name in ("", "kind", "over", "why", "arrays", "bytes", "sent"):
            how = "right" if name in ("arrays", "bytes", "sent") else "left"
            table.add_column(name, justify=how, min_width=wide.get(name), ratio=1 if name == "why" else None)
        for m in share.moves:
            when = WHEN[share.often == STEP][m.back]
            table.add_row(when, m.kind, _over(m.axes, of), m.why, str(m.count), size(m.bytes), size(m.sent))
        console.print(table)
    table = Table(title="A step in all, sent by each device", **plain)
    for i, name in enumerate(("over", "in the layers", "outside them", "once a step", "all")):
        table.add_column(name, justify="right" if i else "left")
    for axes, shares in t.totals.items():
        table.add_row(_over(axes, of), *(size(n) for n in (*shares, sum(shares))))
    table.add_section()
    table.add_row("all", "", "", "", size(t.sent), style="bold")
    console.print(table)


def _over(axes: tuple[str, ...], of: dict[str, str]) -> Any:
    """Mesh axes, each in its colour."""
    from rich.text import Text

    said = Text()
    for i, axis in enumerate(axes):
        said.append(" x " if i else "", style="dim").append(axis, style=of[axis])
    return said
