"""Tables of results in Markdown, and putting them into a page between markers."""

import os
import platform
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from measure import Row

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
PACKAGES = ("jax", "torch", "transformers", "accelerate")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def compared(rows: Sequence[Row], unit: str, amount: float) -> str:
    """Programs against the base, the first row.  amount: how many of `unit` one turn makes (tokens)."""
    head = ("program", "wall s", "CPU s / cores", f"{unit}/s", "times our wall (quartiles)", "times our CPU")
    lines = [
        (
            r.name,
            f"{r.wall:.3f}",
            f"{r.cpu:.3f}",
            f"{amount / r.wall:,.0f}",
            f"**{r.ratio:.2f}** ({r.low:.2f} to {r.high:.2f})",
            f"{r.cpu_ratio:.2f}",
        )
        for r in rows
    ]
    return table(head, lines)


def machine() -> str:
    """What this ran on, in one line."""
    name = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores ({name}), {platform.system()}, Python {platform.python_version()}, " + ", ".join(
        map(_version, PACKAGES)
    )


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def page(parts: Sequence[str], command: str, load: float) -> str:
    """All tables with what they are figures of."""
    about = f"`{command}` on {time.strftime('%Y-%m-%d')}, {machine()}. Load average before the start: {load:.1f}."
    return "\n\n".join([about, *parts])


def write(path: Path, text: str) -> None:
    """Puts the text between the markers of a page.  Raises ValueError where the page has none."""
    old = path.read_text(encoding="utf-8")
    if BEGIN not in old or END not in old:
        raise ValueError(f"{path} has no {BEGIN} and {END}, between which the table belongs. Add both lines.")
    before, rest = old.split(BEGIN, 1)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")
