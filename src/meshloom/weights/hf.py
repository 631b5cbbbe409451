"""Hugging Face folders: config.json, generation_config.json, safetensors files, tokenizer files. Both ways."""

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import ValidationError

from meshloom.core.spec import is_spec
from meshloom.core.tree import Tree, named_leaves
from meshloom.models.base import Model, Row
from meshloom.models.table import find
from meshloom.weights import safetensors
from meshloom.weights.folder import check_free, whole_folder
from meshloom.weights.load import Source
from meshloom.weights.rows import Place, make_map, theirs_from
from meshloom.weights.stored import refuse_pickle

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
"""What a tokenizer consists of; copied byte for byte."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
SCHEMA_KEYS = {
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "rotary_pct",
    "rotary_emb_base",
    "layer_types",
    "torch_dtype",
    "dtype",
    "original_max_position_embeddings",
    "transformers_version",
    "_name_or_path",
}
"""Keys of config.json that one schema has and the other does not, or that speak of where the model came from: written anew, never kept."""


def open_folder(folder: str | Path) -> Source:
    """What a Hugging Face folder holds; reads no weight.  Raises ValueError for a folder that is not one, for pickles (never unpickled), for a
    model that is not implemented and for quantised weights."""
    folder = Path(folder)
    said = _json(folder / "config.json")
    if said is None:
        raise ValueError(f"{folder} has no config.json. Give a folder that `save_pretrained` or Meshloom's export has written.")
    if said.get("quantization_config"):
        raise ValueError(
            f"{folder} holds quantised weights ({said['quantization_config'].get('quant_method')}). Take the unquantised checkpoint."
        )
    model = find(said)
    config = _config(model, said, folder / "config.json")
    generation = _json(folder / "generation_config.json") or {}
    ids = {key: said[key] for key in TOKEN_IDS if said.get(key) is not None}
    found = _tensors(folder)
    rows = _rows_for(model, config, found)
    tensors = _with_prefix(found, rows[0].theirs.split(".")[0] + ".", {row.theirs for row in rows})
    return Source(str(folder), model, config, tensors, rows, {}, said, {**ids, **generation})


def _rows_for(model: Model, config: Any, tensors: Mapping[str, Any]) -> tuple[Row, ...]:
    """The model's map, or its second one where the tensors have names of that alone."""
    one, other = (
        {p.theirs for p in make_map(rows, model.specs(config)).places} if rows else set()
        for rows in (model.hf(config), model.fused(config))
    )
    return model.fused(config) if (other - one) & set(tensors) and not (one - other) & set(tensors) else model.hf(config)


def _config(model: Model, said: Mapping[str, Any], file: Path) -> Any:
    """The sizes that a config.json gives.  Raises ValueError naming the file where they contradict each other or are of the wrong type."""
    try:
        return model.from_hf(said)
    except ValidationError as error:
        found = [f"{'.'.join(map(str, e['loc']))}{': ' * bool(e['loc'])}{e['msg'].removeprefix('Value error, ')}" for e in error.errors()]
        raise ValueError(f"{file} does not describe a model: {'; '.join(found)} Correct it, or take another folder.") from None
    except (TypeError, AttributeError, ZeroDivisionError, LookupError) as error:
        raise ValueError(f"{file} does not describe a model: a value is of the wrong type or size ({error}). Correct it.") from error


def _json(path: Path) -> dict[str, Any] | None:
    """A JSON file, or None if there is none.  Raises ValueError naming a broken one."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}. Correct it.") from None


def _tensors(folder: Path) -> dict[str, safetensors.Tensor]:
    """Every tensor of a folder, by name."""
    listed = _json(folder / INDEX)
    files = sorted(set(listed["weight_map"].values())) if listed else sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        refuse_pickle(folder)
        raise ValueError(f"{folder} has no safetensors file. Copy the model's weights there.")
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise ValueError(f"{folder} lacks {', '.join(absent)}, which {INDEX} names. Copy the missing files.")
    found: dict[str, safetensors.Tensor] = {}
    for name in files:
        found.update(safetensors.index(folder / name))
    lost = [name for name in (listed or {"weight_map": {}})["weight_map"] if name not in found]
    if lost:
        raise ValueError(f"{folder}: {INDEX} names tensors that no file holds: {', '.join(lost[:20])}. Copy the files again.")
    return found


def _with_prefix(tensors: dict[str, Any], prefix: str, known: set[str]) -> dict[str, Any]:
    """The tensors by the names of the whole model, where the file holds the names of the model without its head ("wte.weight")."""
    if any(name.startswith(prefix) for name in tensors):
        return tensors
    return {name if name in known else prefix + name: tensor for name, tensor in tensors.items()}


def save(
    folder: str | Path,
    model: Model,
    c: Any,
    weights: Tree,
    *,
    dtype: str | Mapping[str, np.dtype] = "float32",
    old: bool = False,
    said: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    tokenizer: str | Path | Mapping[str, str] | None = None,
    overwrite: bool = False,
    file_bytes: int = 5 << 30,
) -> None:
    """Writes a model as a Hugging Face folder, whole or not at all; padding rows are left out, a tied head is written once.

    dtype: of every tensor, or of each by its Hugging Face name.  old: config.json as transformers 4 wrote it.  said: a config.json whose other
    keys are kept.  generation: generation_config.json; its token ids go into both files (several end ids stay several).
    tokenizer: a folder or a tokenizer.json, copied byte for byte; or text by file name.  file_bytes: largest file.
    Called by every process; the first one writes.  Raises FileExistsError unless told to overwrite.
    """
    folder = Path(folder)
    check_free(folder, overwrite)
    places = make_map(model.hf(c), model.specs(c)).places
    kinds = {p.theirs: np.dtype(jnp.dtype(dtype if isinstance(dtype, str) else dtype[p.theirs])) for p in places}
    if jax.process_index():
        for _ in _values(places, weights):
            pass
        return
    with whole_folder(folder, overwrite) as target:
        most = max(set(kinds.values()), key=lambda kind: sum(math.prod(p.shape) for p in places if kinds[p.theirs] == kind))
        if tokenizer is not None:
            write_tokenizer(tokenizer, target)
        ids = token_ids(said or {}, generation or {}, target)
        _write_json(target / "config.json", config_json(model, c, str(most), old, said or {}) | ids)
        _write_json(target / "generation_config.json", {**(generation or {}), **ids})
        _write_tensors(target, places, kinds, _values(places, weights), file_bytes)


def config_json(model: Model, c: Any, dtype: str, old: bool, said: Mapping[str, Any]) -> dict[str, Any]:
    """config.json: what the configuration says, and the rest of `said`."""
    kept = {key: value for key, value in said.items() if key not in SCHEMA_KEYS}
    return {**kept, **model.to_hf(c, old), "torch_dtype" if old else "dtype": dtype}


def token_ids(said: Mapping[str, Any], generation: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Token ids for both files: generation's, else config's, else those of the tokenizer in the folder, else null (so that no default of a
    class creeps in)."""
    stated = {key: generation.get(key) if generation.get(key) is not None else said.get(key) for key in TOKEN_IDS}
    named = _json(folder / "tokenizer_config.json") or {}
    words = _json(folder / "tokenizer.json") or {}
    known = {**words.get("model", {}).get("vocab", {}), **{token["content"]: token["id"] for token in words.get("added_tokens", [])}}
    for key in TOKEN_IDS:
        token = named.get(key.removesuffix("_id"))
        if stated[key] is None and key not in said and token is not None:
            stated[key] = known.get(token["content"] if isinstance(token, dict) else token)
    return stated


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _values(places: Sequence[Place], weights: Tree) -> Iterator[np.ndarray]:
    """Their tensors one after the other, on this host.  Every process must ask for all of them."""
    leaves = named_leaves(weights, is_spec)
    for place in places:
        parts = [leaves[path][place.at] if place.at else leaves[path] for path in place.ours]
        yield theirs_from([_fetch(part) for part in parts], place)


def _fetch(x: Any) -> np.ndarray:
    """An array, whole, on this host."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        from jax.experimental.multihost_utils import process_allgather

        return np.asarray(process_allgather(x, tiled=True))
    return np.asarray(x)


def _write_tensors(
    target: Path, places: Sequence[Place], kinds: Mapping[str, np.dtype], values: Iterator[np.ndarray], file_bytes: int
) -> None:
    """Writes one file, or several with an index where there is more than file_bytes."""
    size = {p.theirs: int(np.prod(p.shape)) * kinds[p.theirs].itemsize for p in places}
    groups: list[list[Place]] = [[]]
    for place in places:
        if groups[-1] and sum(size[p.theirs] for p in groups[-1]) + size[place.theirs] > file_bytes:
            groups.append([])
        groups[-1].append(place)
    names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))] if len(groups) > 1 else [SINGLE]
    for name, group in zip(names, groups):
        tensors = {p.theirs: (p.shape, kinds[p.theirs]) for p in group}
        safetensors.write(target / name, tensors, (next(values) for _ in group))
    if len(groups) > 1:
        weight_map = {place.theirs: name for name, group in zip(names, groups) for place in group}
        _write_json(target / INDEX, {"metadata": {"total_size": sum(size.values())}, "weight_map": weight_map})


def write_tokenizer(source: str | Path | Mapping[str, str], target: Path) -> None:
    """Writes a tokenizer's files into a folder.  source: a folder or a tokenizer.json, copied byte for byte; or text by file name.
    Raises ValueError if there is none."""
    if isinstance(source, Mapping):
        for name, text in source.items():
            (target / name).write_text(text, encoding="utf-8")
        return
    source = Path(source)
    found = ["tokenizer.json"] if source.is_file() else tokenizer_files(source)
    for name in found:
        original = source if source.is_file() else source / name
        (shutil.copytree if original.is_dir() else shutil.copyfile)(original, target / name)
    if not found:
        raise ValueError(f"{source} holds no tokenizer ({', '.join(TOKENIZER_FILES[:3])} ...). Give its folder, or a tokenizer.json.")
    if found == ["tokenizer.json"]:
        _write_json(target / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def tokenizer_files(folder: Path) -> list[str]:
    """The files of a tokenizer that a folder holds."""
    return [name for name in TOKENIZER_FILES if (folder / name).exists()]
