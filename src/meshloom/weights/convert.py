"""Conversions between formats, with a proof that nothing changed."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshloom.core.tree import Tree
from meshloom.models.base import Model
from meshloom.weights import gguf, hf
from meshloom.weights.folder import check_free
from meshloom.weights.load import load
from meshloom.weights.proof import Proof, our_logits, same_bits, same_logits, sample_tokens, transformers_logits


class Held(NamedTuple):
    """A model in memory, with what its format keeps beside the weights."""

    model: Model
    config: Any
    weights: Tree
    dtype: str | Mapping[str, np.dtype]
    """Of the stored tensors: one for all, or by Hugging Face name."""
    said: Mapping[str, Any]
    generation: Mapping[str, Any]
    tokenizer: Path | Mapping[str, str] | None


def convert(
    source: str | Path,
    target: str | Path,
    to: str = "hf",
    *,
    step: int | None = None,
    old_config: bool = False,
    check: bool = False,
    dtype: str | None = None,
    overwrite: bool = False,
    limit: float = 1e-4,
    say: Callable[[str], None] = print,
) -> bool:
    """Converts a model.  source: a Hugging Face folder, a GGUF file or a Meshloom run.  to: a row of WRITERS.  dtype: of the result; not given,
    that of the source.  check: the result is read again and compared bit for bit, and its logits with those of `transformers` where that is
    installed.  limit: on the difference of logits.  Returns False where the check found a difference.  say: takes lines for people.
    """
    if to not in WRITERS:
        raise ValueError(f"'{to}' is not a format that can be written. These are: {', '.join(WRITERS)}.")
    source, target = Path(source), Path(target)
    check_free(target, overwrite)
    held = READERS[kind_of(source)](source, step, say)
    held = held if dtype is None else held._replace(dtype=dtype)
    WRITERS[to](held, target, old_config, overwrite)
    say(f"wrote {target}")
    if not check:
        return True
    found = prove(held, source, target, limit)
    for line in found.lines:
        say(line)
    return found.equal


def kind_of(source: Path) -> str:
    """The format of a file or folder: a row of READERS.  Raises ValueError for one that is none, naming pickles as what they are."""
    if source.is_file() and source.open("rb").read(4) == b"GGUF":
        return "gguf"
    if (source / "config.json").is_file():
        return "hf"
    if not source.exists():
        raise ValueError(f"{source} does not exist. Give a Hugging Face folder, a GGUF file or a run.")
    if source.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise ValueError(f"{source} is a pickle, which can run any code and is never opened. Ask for a safetensors version of the model.")
    raise ValueError(f"{source} is neither a Hugging Face folder (config.json), nor a GGUF file, nor a run.")


def _read_hf(folder: Path, step: int | None, say: Callable[[str], None]) -> Held:
    source = hf.open_folder(folder)
    loaded = load(source)
    say(loaded.report)
    kinds = {name: tensor.dtype for name, tensor in source.tensors.items()}
    tokenizer = folder if hf.tokenizer_files(folder) else None
    return Held(source.model, source.config, loaded.weights, kinds, source.said, source.generation, tokenizer)


def _read_gguf(path: Path, step: int | None, say: Callable[[str], None]) -> Held:
    file = gguf.read(path)
    loaded = load(file.source)
    say(loaded.report)
    words = file.tokenizer()
    texts = {"tokenizer.json": words.json, "tokenizer_config.json": json.dumps(words.config, indent=2, ensure_ascii=False) + "\n"}
    return Held(file.source.model, file.source.config, loaded.weights, "float32", {}, file.source.generation, texts)


def _write_hf(held: Held, target: Path, old: bool, overwrite: bool) -> None:
    hf.save(
        target,
        held.model,
        held.config,
        held.weights,
        dtype=held.dtype,
        old=old,
        said=held.said,
        generation=held.generation,
        tokenizer=held.tokenizer,
        overwrite=overwrite,
    )


READERS: dict[str, Callable[[Path, int | None, Callable[[str], None]], Held]] = {"hf": _read_hf, "gguf": _read_gguf}
"""Format -> reader of a path (and a run's step)."""
WRITERS: dict[str, Callable[[Held, Path, bool, bool], None]] = {"hf": _write_hf}
"""Format -> writer of a model to a folder."""


def prove(held: Held, source: Path, target: Path, limit: float = 1e-4) -> Proof:
    """Reads a conversion's result again: bits against what was held, rounded to the stored dtype; its logits against those of `transformers`
    from whichever of the two is a Hugging Face folder."""
    from meshloom.runner.forward import logits

    again = READERS[kind_of(target)](target, None, lambda line: None)
    proofs = [same_bits(_rounded(held), again.weights, f"{target} read again")]
    if again.config != held.config:
        proofs.append(Proof((f"the configuration DIFFERS: {held.config} was written, {again.config} was read",), False))
    tokens = sample_tokens(held.config.vocab, held.config.max_seq)
    theirs = next((transformers_logits(path, tokens) for path in (target, source) if kind_of(path) == "hf"), None)
    if theirs is None:
        proofs.append(
            Proof(("logits were not compared: transformers and torch are not installed, or neither side is a Hugging Face folder",), True)
        )
    else:
        proofs.append(same_logits(our_logits(logits, held.model, held.config, again.weights, tokens), theirs, limit))
    return Proof(tuple(line for p in proofs for line in p.lines), all(p.equal for p in proofs))


def _rounded(held: Held) -> Tree:
    """The weights as they come back from the dtype that they are stored in."""
    if not isinstance(held.dtype, str):
        return held.weights
    kind = jnp.dtype(held.dtype)
    return jax.tree.map(lambda x: x.astype(kind).astype(x.dtype), held.weights)
