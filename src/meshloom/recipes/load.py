"""Finding recipes: a shipped name, a YAML file, or the folder of an earlier run; `extends` names a recipe to start from."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshloom.core import yamls
from meshloom.core.config import load, merge, parse_sets, unknown
from meshloom.recipes.run import RunConfig

SHIPPED = Path(__file__).parent
RESOLVED = "run.yaml"


def names() -> list[str]:
    """The recipes that ship."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find(recipe: str, beside: Path = Path()) -> Path:
    """The file of a shipped name, of a path (relative to `beside`), or of a run's folder.
    Raises FileNotFoundError with the nearest name."""
    path = beside / Path(recipe).expanduser()
    if path.is_file():
        return path
    if (path / RESOLVED).is_file():
        return path / RESOLVED
    if recipe in names():
        return SHIPPED / f"{recipe}.yaml"
    if "/" in recipe or recipe.endswith((".yaml", ".yml")):
        what = f"{path} is a folder without a {RESOLVED}" if path.is_dir() else f"There is no recipe file {path}"
        raise FileNotFoundError(f"{what}. The recipes that ship: {', '.join(names())}.")
    raise FileNotFoundError(f"{unknown('recipe', recipe, names())} Or give the path of a YAML file.")


def tree(recipe: str, beside: Path = Path(), seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The nested mappings of a recipe, what it extends merged below.  Raises ValueError for a circle of recipes."""
    path = find(recipe, beside).resolve()
    if path in seen:
        raise ValueError(f"{path} extends itself, through {', '.join(p.name for p in seen)}. Take one `extends` out.")
    own = yamls.read(path)
    base = own.pop("extends", None)
    if base is None:
        return own
    if not isinstance(base, str):
        raise ValueError(f"{path}: extends must be the name or the path of one recipe; it is {base!r}.")
    return over(tree(base, path.parent, (*seen, path)), own)


def over(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`own` merged over `base`. A model is named by `from`, `family` or `like`; the one takes the place of the other, with all its keys."""
    old, new = (_names_by(side.get("model")) for side in (base, own))
    if new and old != new:
        base = {key: value for key, value in base.items() if key != "model"}
    return merge(base, own)


def _names_by(model: Any) -> set[str]:
    """The keys by which a `model` section names its model."""
    return {"from", "family", "like"} & set(model) if isinstance(model, dict) else set()


def load_recipe(recipe: str, sets: Iterable[str] = ()) -> RunConfig:
    """The checked configuration of a recipe under `a.b=value` overrides; later ones win.
    Raises OSError where there is no such recipe, ValueError with every mistake otherwise."""
    return load(RunConfig, over(tree(recipe), parse_sets(sets)), recipe)
