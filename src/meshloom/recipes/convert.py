"""`meshloom convert`: from one format to another, with a proof that nothing changed."""

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from meshloom.core.config import to_tree
from meshloom.core.tree import Tree
from meshloom.models import moe, upcycle
from meshloom.recipes.proof import Proof, our_logits, same_bits, same_logits, sample_tokens, transformers_logits
from meshloom.weights import hf
from meshloom.weights.checkpoint import Checkpoints
from meshloom.weights.folder import check_free, check_model, whole_folder
from meshloom.weights.load import check as check_source
from meshloom.weights.opened import Opened, open_model
from meshloom.weights.rows import make_map

Dtype = str | Mapping[str, str]
"""Type of the stored tensors: one for all, or one for each Hugging Face name."""


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
    experts: int = 0,
    top: int = 2,
    limit: float = 1e-4,
    say: Callable[[str], None] = print,
) -> bool:
    """Converts a model.  source: whatever `open_model` opens.  to: a row of WRITERS.  dtype: of the result; not given, that of the source.
    check: the result is read again and compared bit for bit, and its logits with those of `transformers` where that is installed.
    experts, top: make it a mixture of so many copies of its MLP, so many of them for a token; 0: as it is.
    limit: on the difference of logits.  say: takes lines for people.  Returns False where the check found a difference.
    Raises FileExistsError where `target` holds files and overwrite was not asked for.
    """
    if to not in WRITERS:
        raise ValueError(f"'{to}' is not a format that can be written. These are: {', '.join(WRITERS)}.")
    source, target = Path(source), Path(target)
    check_free(target, overwrite)
    check_model(target)
    if source.resolve() == target.resolve():
        raise ValueError(f"{target} is both what to read and what to write. Give another folder to write.")
    opened = open_model(source, step)
    weights = opened.weights(None)
    say(f"{opened.name}: {check_source(opened.source) if opened.source else 'a checkpoint of ours'}, a {opened.model.name} model")
    mixture = upcycled(opened, weights, experts, top, limit, say) if experts else None
    kinds = stored_dtype(opened) if dtype is None and mixture is None else dtype or "float32"
    opened, weights = mixture or (opened, weights)
    if to == "hf" and not opened.model.hf(opened.config):
        raise ValueError(f"This model has no counterpart in Hugging Face (family {opened.model.name}). Write it by --to meshloom.")
    WRITERS[to](opened, weights, kinds, target, old_config, overwrite)
    say(f"wrote {target}")
    if not check:
        return True
    found = prove(opened, weights, kinds if to == "hf" else "float32", source, target, limit)
    for line in found.lines:
        say(line)
    return found.equal


def upcycled(opened: Opened, weights: Tree, experts: int, top: int, limit: float, say: Callable[[str], None]) -> tuple[Opened, Tree]:
    """A dense model as a mixture of copies of its MLP.  Raises ValueError where the mixture's logits are not the dense model's."""
    c = upcycle.config(opened.model, opened.config, experts, top)
    made = upcycle.weights(c, weights)
    tokens = sample_tokens(c.vocab, c.max_seq)
    same = same_logits(our_logits(moe.MODEL, c, made, tokens), our_logits(opened.model, opened.config, weights, tokens), limit)
    say(
        f"{experts} experts, {top} of them for a token, as {c.variant}; {same.lines[0].replace('against transformers', 'against the dense model')}"
    )
    if not same.equal:
        raise ValueError("The mixture's logits differ from the dense model's. Raise the limit, or report this model.")
    kept = {key: value for key, value in opened.said.items() if key not in ("architectures", "model_type")}
    return opened._replace(model=moe.MODEL, config=c, said=kept, source=None, info={}), made


def stored_dtype(opened: Opened) -> Dtype:
    """The type that the source's tensors have: by name where they differ; fp32 for quantised ones and for our own training."""
    if opened.source is None:
        return opened.info.get("huggingface", {}).get("dtype", "float32")
    names = [place.theirs for place in make_map(opened.model.hf(opened.config), opened.model.specs(opened.config)).places]
    if not set(names) <= set(opened.source.tensors):
        return "float32"
    kinds = {name: str(opened.source.tensors[name].dtype) for name in names}
    return kinds if len(set(kinds.values())) > 1 else kinds[names[0]]


def _write_hf(opened: Opened, weights: Tree, dtype: Dtype, target: Path, old: bool, overwrite: bool) -> None:
    kinds = dtype if isinstance(dtype, str) else {name: np.dtype(jnp.dtype(kind)) for name, kind in dtype.items()}
    kept = {"said": opened.said, "generation": opened.generation, "tokenizer": opened.tokenizer}
    hf.save(target, opened.model, opened.config, weights, dtype=kinds, old=old, overwrite=overwrite, **kept)


def _write_meshloom(opened: Opened, weights: Tree, dtype: Dtype, target: Path, old: bool, overwrite: bool) -> None:
    """A folder like a run's: its checkpoint of step 0 holds the weights alone, in fp32, and what Hugging Face's files said."""
    said = {"said": opened.said, "generation": opened.generation, "dtype": dtype}
    info = {"model": {"family": opened.model.name, **to_tree(opened.config)}, "huggingface": said}
    with whole_folder(target, overwrite) as new:
        with closing(Checkpoints(new / "checkpoints")) as checkpoints:
            checkpoints.save(0, {"params": weights}, info)
        if opened.tokenizer is not None:
            (new / "tokenizer").mkdir()
            hf.write_tokenizer(opened.tokenizer, new / "tokenizer")


WRITERS: dict[str, Callable[[Opened, Tree, Dtype, Path, bool, bool], None]] = {"hf": _write_hf, "meshloom": _write_meshloom}
"""Format -> writer of a model to a folder."""


def prove(opened: Opened, weights: Tree, dtype: Dtype, source: Path, target: Path, limit: float = 1e-4) -> Proof:
    """Reads a conversion's result again: bits against the weights as that dtype rounds them; its logits against those of `transformers` from
    whichever of the two is a Hugging Face folder.  dtype: that the weights went through."""
    model, c = opened.model, opened.config
    again = open_model(target)
    read = again.weights(None)
    proofs = [same_bits(_rounded(weights, dtype), read, f"{target} read again")]
    if again.config != c:
        proofs.append(Proof((f"the configuration DIFFERS: {c} was written, {again.config} was read",), False))
    tokens = sample_tokens(c.vocab, c.max_seq)
    theirs = next((transformers_logits(path, tokens) for path in (target, source) if (path / "config.json").is_file()), None)
    if theirs is None:
        why = "transformers and torch are not installed, or neither side is a Hugging Face folder"
        proofs.append(Proof((f"logits were not compared: {why}",), True))
    else:
        proofs.append(same_logits(our_logits(model, c, read, tokens), theirs, limit))
    return Proof(tuple(line for p in proofs for line in p.lines), all(p.equal for p in proofs))


def _rounded(weights: Tree, dtype: Dtype) -> Tree:
    """The weights as they come back from the type that they are stored in; where that differs by tensor, it is the source's, which loses nothing."""
    if not isinstance(dtype, str):
        return weights
    return jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)).astype(x.dtype), weights)
