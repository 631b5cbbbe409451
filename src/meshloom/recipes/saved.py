"""A plan as a file: what `meshloom plan --save` writes and `meshloom train --plan` takes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from meshloom.core import yamls
from meshloom.core.config import Section, load, parse_sets, to_tree
from meshloom.core.files import write_text
from meshloom.parallel.table import devices
from meshloom.recipes.launch import model_of
from meshloom.recipes.load import over, tree
from meshloom.recipes.run import RunConfig

TAKES = ("layout", "batch.micro_batches", "train.remat", "train.runner")
"""Settings of a recipe that a plan fills."""


HEAD = "# A plan for "
"""How the file of a plan begins."""


class Saved(Section):
    """A plan in a file."""

    model: dict[str, Any]
    """Family and fields of the model that it is for, as a recipe spells them."""
    hardware: str
    """What it was planned for, as `--on` spells it."""
    devices: int
    """How many devices it takes."""
    seq: int
    """Tokens of a sequence."""
    sequences: int
    """Sequences of a step."""
    precision: str
    """As train.precision."""
    layout: str
    """The compact spelling; "" for one device."""
    micro_batches: int
    """As batch.micro_batches."""
    remat: str
    """As train.remat."""
    runner: str
    """As train.runner."""
    predicted: dict[str, float] = Field(default_factory=dict)
    """Seconds of a step, bytes of a device: for people."""


class Taken(NamedTuple):
    """A recipe with a plan in it. said: what was done, in lines."""

    tree: dict[str, Any]
    said: tuple[str, ...]


def save(plan: Saved, path: Path) -> None:
    """Writes a plan, whole or not at all."""
    head = f"{HEAD}{plan.devices} devices ({plan.hardware}): meshloom train RECIPE --plan {path.name}\n"
    write_text(path, head + yamls.text(to_tree(plan)))


def read(path: Path) -> Saved:
    """A plan from its file.  Raises OSError where there is none, ValueError where it is no plan."""
    tree = yamls.read(path)
    if lacking := [name for name, field in Saved.model_fields.items() if field.is_required() and name not in tree]:
        raise ValueError(f"{path} is no plan: it lacks {', '.join(lacking)}. Write one with: meshloom plan MODEL --on HARDWARE --save FILE")
    return load(Saved, tree, str(path))


def settings(plan: Saved) -> dict[str, Any]:
    """The settings of a recipe that a plan fills."""
    return {
        "layout": plan.layout,
        "batch": {"micro_batches": plan.micro_batches},
        "train": {"remat": plan.remat, "runner": plan.runner},
    }


def take(recipe: dict[str, Any], plan: Saved, sets: dict[str, Any], path: Path) -> Taken:
    """A recipe under a plan under what --set says.  recipe, sets: trees."""
    own = [name for name in TAKES if _at(sets, name) is not None and _at(sets, name) != _at(settings(plan), name)]
    said = [
        f"plan: {path} ({plan.layout or 'one device'}, {plan.micro_batches} micro-batch{'es' * (plan.micro_batches > 1)}, remat {plan.remat})"
    ]
    said += [f"plan: --set {name}={_at(sets, name)} stands in place of the plan's {_at(settings(plan), name)}" for name in own]
    return Taken(over(over(recipe, settings(plan)), sets), tuple(said))


def check(config: RunConfig, model: dict[str, Any], plan: Saved, there: int, path: Path) -> list[str]:
    """Refuses a plan of another model or another number of devices; lines about what else differs.  model: of the run, as a recipe spells it.
    there: devices present."""
    own = to_tree(plan)["model"]
    other = [key for key in {**model, **own} if model.get(key) != own.get(key)]  # the family first
    if other:
        key = other[0]
        raise ValueError(
            f"{path} is a plan of another model: its {key} is {own.get(key)!r}, and this recipe's {model.get(key)!r}"
            f"{f' ({len(other)} settings differ)' * (len(other) > 1)}. Plan this one: meshloom plan RECIPE --on {plan.hardware} --save {path}"
        )
    if config.layout != plan.layout and devices(config.layout) != there:
        raise ValueError(
            f"--set layout={config.layout} takes {devices(config.layout)} devices, and {there} {'are' if there > 1 else 'is'} here. "
            f"Use other numbers, or leave it out: the plan's is {plan.layout or 'one device'}."
        )
    if devices(config.layout) != there:
        raise ValueError(
            f"{path} is a plan for {devices(config.layout)} devices, and {there} {'are' if there > 1 else 'is'} here. "
            f"Plan for these, or start the run where there are as many (to try it: --devices {devices(config.layout)})."
        )
    asked = {"data.seq": (plan.seq, config.data.seq), "batch.sequences": (plan.sequences, config.batch.sequences),
             "train.precision": (plan.precision, config.train.precision)}  # fmt: skip
    differ = [f"{name} {here} (planned for {there})" for name, (there, here) in asked.items() if there != here]
    return [f"plan: the run differs from it in {', '.join(differ)}: the layout works, the numbers predicted do not hold"] if differ else []


def _at(tree: dict[str, Any], name: str) -> Any:
    """The value at a dotted key, or None."""
    for key in name.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None  # type: ignore[assignment]
    return tree


def planned(recipe: str, sets: Iterable[str], path: Path) -> tuple[RunConfig, tuple[str, ...]]:
    """The configuration of a recipe under a plan under what --set says, and what is to be said of it.
    Raises as `load_recipe`, `read` and `check`."""
    import jax

    plan = read(path)
    taken = take(tree(recipe), plan, parse_sets(sets), path)
    config = load(RunConfig, taken.tree, recipe)
    return config, (*taken.said, *check(config, model_tree(config), plan, jax.device_count(), path))


def model_tree(config: RunConfig) -> dict[str, Any]:
    """Family and fields of a recipe's model, also where it comes from a folder."""
    model, c, _ = model_of(config)
    return {"family": model.name, **to_tree(c)}
