"""The small models of tests/goldens/models, and how far our logits are from those of `transformers`."""

import functools
import json
from pathlib import Path

import jax
import numpy as np

from meshloom.runner.forward import logits
from meshloom.weights.hf import open_folder
from meshloom.weights.load import Source, load

FOLDER = Path(__file__).parent / "models"


def names(*starts: str) -> list[str]:
    """Models whose name begins with one of these; all of them if none is given."""
    return sorted(path.name for path in FOLDER.iterdir() if path.name.startswith(starts or ("",)))


def said(name: str, old: bool = False) -> dict:
    """A model's config.json, in either schema."""
    return json.loads((FOLDER / name / ("config_old.json" if old else "config.json")).read_text())


def source(name: str) -> Source:
    """A model, not read yet."""
    return open_folder(FOLDER / name)


def difference(name: str) -> float:
    """Largest difference over every position and every fourth token."""
    s, golden = source(name), np.load(FOLDER / name / "logits.npz")
    got = jax.jit(functools.partial(logits, s.model, s.config))(load(s).weights, golden["tokens"])
    assert got.shape == (*golden["tokens"].shape, s.config.vocab)
    return float(np.abs(np.asarray(got)[:, :, ::4] - golden["logits"]).max())
