"""Shapes of well-known models, as data (`known.yaml`): a name is enough to plan one, or to start a recipe from (`model: {like: llama3-8b}`)."""

import functools
from pathlib import Path
from typing import Any

from meshloom.core import yamls
from meshloom.core.config import load, unknown
from meshloom.models.base import Model
from meshloom.models.table import MODELS

FILE = Path(__file__).parent / "known.yaml"


@functools.cache
def table() -> dict[str, dict[str, Any]]:
    """Name -> family, fields of its Config, source."""
    return yamls.read(FILE)


def names() -> list[str]:
    """All names, in the order of the file."""
    return list(table())


def fields(name: str) -> dict[str, Any]:
    """Family and fields of a model, as a recipe's `model` section spells them.  Raises ValueError for an unknown name, with the nearest and all."""
    if name not in table():
        raise ValueError(unknown("known model", name, names()))
    return {key: value for key, value in table()[name].items() if key != "source"}


def known(name: str) -> tuple[Model, Any]:
    """The family of a model and its configuration.  Raises ValueError for an unknown name."""
    given = fields(name)
    model = MODELS[given["family"]]
    return model, load(model.Config, given, f"known.yaml, {name}")
