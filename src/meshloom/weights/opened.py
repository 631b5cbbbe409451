"""Opening a model wherever it lies: a run's folder, one checkpoint, a Hugging Face folder, a GGUF file. Reads no weights until asked."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from meshloom.core.config import load as load_section
from meshloom.core.spec import abstract, is_spec
from meshloom.core.tree import Tree
from meshloom.models.base import Model
from meshloom.models.table import MODELS
from meshloom.weights import checkpoint, gguf, hf, stored
from meshloom.weights.load import Source, load


class Opened(NamedTuple):
    """A model before its weights are read.

    weights: shardings (None: this process's first device) -> parameters. tokenizer: the folder that holds its files, or their names and texts;
    None where there is none. said, generation: config.json and generation_config.json where it came, or began, from a checkpoint of another library.
    info: a Meshloom checkpoint's, else {}. source: the checkpoint of another library, or None.
    """

    name: str
    model: Model
    config: Any
    weights: Callable[[Tree | None], Tree]
    tokenizer: Path | Mapping[str, str] | None
    said: dict[str, Any]
    generation: dict[str, Any]
    info: dict[str, Any]
    source: Source | None


def open_model(path: str | Path, step: int | None = None) -> Opened:
    """The model that lies at a path, its weights not read yet.  step: which checkpoint of a run's folder; the newest by default.
    Raises FileNotFoundError or ValueError saying what is there."""
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"There is no {path}. Give the folder of a run or of a Hugging Face model, or a GGUF file.")
    stored.refuse_pickle(path)
    for is_kind, opened in KINDS:
        if is_kind(path):
            if step is not None and opened is not _run:
                raise ValueError(
                    f"{path} is one model, not the folder of a run with its checkpoints. Leave --step {step} out, or give the run's folder."
                )
            return opened(path, step)
    raise ValueError(
        f"{path} is neither the folder of a run (checkpoints), nor a checkpoint, nor a Hugging Face folder (config.json), nor a GGUF file."
    )


def _gguf(path: Path, step: int | None) -> Opened:
    file = gguf.read(path)
    made = file.tokenizer()
    texts = {"tokenizer.json": made.json, "tokenizer_config.json": json.dumps(made.config, indent=2, ensure_ascii=False) + "\n"}
    return _other(file.source, texts)


def _hf(path: Path, step: int | None) -> Opened:
    return _other(hf.open_folder(path), path if hf.tokenizer_files(path) else None)


def _other(source: Source, tokenizer: Path | Mapping[str, str] | None) -> Opened:
    """A checkpoint of another library."""
    read = lambda where: load(source, where).weights
    return Opened(source.name, source.model, source.config, read, tokenizer, source.said, source.generation, {}, source)


def _run(path: Path, step: int | None) -> Opened:
    return _one(_choose(path / "checkpoints", step), path / "tokenizer")


KINDS: tuple[tuple[Callable[[Path], bool], Callable[[Path, int | None], Opened]], ...] = (
    (gguf.is_gguf, _gguf),
    (lambda path: (path / "info.json").is_file(), lambda path, step: _one(path, path.parent.parent / "tokenizer")),
    (lambda path: (path / "checkpoints").is_dir(), _run),
    (lambda path: (path / "config.json").is_file(), _hf),
)
"""(whether a path is of this kind, what opens it)."""


def _choose(folder: Path, step: int | None) -> Path:
    """The checkpoint of a step, or the newest that is whole."""
    steps = sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal() and stored.whole(p))
    if not steps:
        raise FileNotFoundError(f"{folder} holds no whole checkpoint yet. Train first, or give a Hugging Face folder.")
    if step is not None and step not in steps:
        raise FileNotFoundError(f"{folder} has no checkpoint of step {step}. There are: {', '.join(map(str, steps))}.")
    return folder / str(steps[-1] if step is None else step)


def _one(path: Path, tokenizer: Path) -> Opened:
    """A checkpoint of ours: the weights alone, without the optimizer's state."""
    info = stored.read_info(path)
    fields = dict(info["model"])
    model = MODELS[fields.pop("family")]
    c = load_section(model.Config, fields, str(path / "info.json"))

    def weights(where: Tree | None) -> Tree:
        specs = model.specs(c)
        here = SingleDeviceSharding(jax.local_devices()[0])
        places = jax.tree.map(lambda _: here, specs, is_leaf=is_spec) if where is None else where
        return checkpoint.load(path, {"params": abstract(specs, places)}, part=True)["params"]

    begun = info.get("huggingface", {})
    words = tokenizer if tokenizer.is_dir() else None
    return Opened(str(path), model, c, weights, words, begun.get("said", {}), begun.get("generation", {}), info, None)
