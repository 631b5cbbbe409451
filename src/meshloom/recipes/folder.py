"""Where a run's files go when no folder is named: runs/NAME, then runs/NAME-2 and so on."""

import re
from pathlib import Path

from meshloom.recipes.load import RESOLVED

ROOT = Path("runs")


def place(recipe: str, name: str, resume: bool, processes: int) -> Path:
    """The folder of a run for which none was named.  recipe: as the user gave it; a resumed run's own folder stays.  name: the run's.
    Raises ValueError where several processes could not agree on one, FileNotFoundError where there is nothing to resume."""
    if processes > 1:
        raise ValueError(f"{processes} processes must agree on the run's folder. Name it with --out.")
    if resume and (Path(recipe) / RESOLVED).is_file():
        return Path(recipe)
    return newest(name) if resume else fresh(name)


def fresh(name: str, root: Path = ROOT) -> Path:
    """The first of root/name, root/name-2, root/name-3 ... that does not exist. Nothing is created."""
    last = _numbers(name, root)
    return root / (f"{name}-{last[-1] + 1}" if last else name)


def newest(name: str, root: Path = ROOT) -> Path:
    """The folder of the run of this name that was started last.  Raises FileNotFoundError."""
    last = _numbers(name, root)
    if not last:
        raise FileNotFoundError(f"There is no run {root / name} to resume. Start it without --resume, or name its folder with --out.")
    return root / (name if last[-1] == 1 else f"{name}-{last[-1]}")


def _numbers(name: str, root: Path) -> list[int]:
    """The numbers that exist, in order; 1 stands for the bare name."""
    if not root.is_dir():
        return []
    found = (re.fullmatch(re.escape(name) + r"(?:-([2-9]|[1-9]\d+))?", path.name) for path in root.iterdir())
    return sorted(int(match[1] or 1) for match in found if match)
