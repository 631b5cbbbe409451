"""Weights go straight to their shards; contradictions are refused."""

from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from goldens import small
from meshloom.core.layout import Layout
from meshloom.core.mesh import make_mesh, shardings
from meshloom.core.tree import named_leaves
from meshloom.weights.hf import open_folder
from meshloom.weights.load import load

BOTH = dict(vocab=("tensor",), heads=("tensor",), ffn=("tensor",), embed=("zero",))
LAYOUTS = {
    "whole": Layout(dict(data=8)),
    "zero": Layout(dict(zero=8), rest=dict(embed=("zero",))),
    "tensor and zero": Layout(dict(zero=4, tensor=2), rest=BOTH),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", ["gpt2", "neox", "llama"])
def test_under_every_layout_the_weights_are_the_same_bits(name: str, layout: Layout) -> None:
    source = small.source(name)
    whole = load(source)
    assert whole.report == f"loaded {len(source.tensors)} of {len(source.tensors)} tensors, 0 missing, 0 unexpected"
    where = shardings(make_mesh(layout), layout, "rest", source.model.specs(source.config))
    split = load(source, where).weights
    for path, a in named_leaves(whole.weights).items():
        b = named_leaves(split)[path]
        assert (np.asarray(a) == np.asarray(b)).all(), path
        assert b.sharding == named_leaves(where)[path]


def test_padding_rows_are_zero() -> None:
    w = load(small.source("llama")).weights
    assert w.embed.shape == w.head.shape == (384, 32)
    assert not np.asarray(w.embed)[257:].any() and np.asarray(w.embed)[:257].any(-1).all()


def test_the_dtype_is_the_models_or_as_told() -> None:
    assert {str(x.dtype) for x in jax.tree.leaves(load(small.source("gpt2")).weights)} == {"float32"}
    assert {str(x.dtype) for x in jax.tree.leaves(load(small.source("gpt2"), dtype="bfloat16").weights)} == {"bfloat16"}


def changed(folder: Path, name: str, config: dict | None = None, drop: str = "", **tensors: np.ndarray) -> Path:
    """A copy of a golden with config.json keys changed, a tensor dropped and others added."""
    import json

    held = {key: value.view() for key, value in small.source(name).tensors.items() if key != drop}
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file({**held, **{key.replace("__", "."): value for key, value in tensors.items()}}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**small.said(name), **(config or {})}))
    return folder


def test_a_tied_head_may_be_stored_twice_but_not_differently(tmp_path: Path) -> None:
    embed = np.asarray(small.source("qwen2").tensors["model.embed_tokens.weight"].view())
    assert load(open_folder(changed(tmp_path, "qwen2", lm_head__weight=embed))).weights.head is None
    with pytest.raises(ValueError, match=r"tied to the embedding \(tie_word_embeddings true\), but lm_head.weight differs"):
        load(open_folder(changed(tmp_path, "qwen2", lm_head__weight=embed + 1)))


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not tied .* but lm_head.weight is not there"):
        load(open_folder(changed(tmp_path, "qwen2", dict(tie_word_embeddings=False))))


def test_what_is_missing_unexpected_or_of_another_shape_is_listed(tmp_path: Path) -> None:
    gone = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=f"19 of 20 tensors are there; 1 missing: {gone}; 1 that the model does not have: extra"):
        load(open_folder(changed(tmp_path, "llama_linear", drop=gone, extra=np.ones(3, np.float32))))
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight is \[257, 32\], not \[300, 32\]"):
        load(open_folder(changed(tmp_path, "llama_linear", dict(vocab_size=300))))
    with pytest.raises(ValueError, match=r"6 that the model does not have: model.layers.0.self_attn.[qkv]_proj.bias"):
        load(open_folder(changed(tmp_path, "qwen2", dict(model_type="llama"))))


def test_old_buffers_are_ignored(tmp_path: Path) -> None:
    mask = np.ones((1, 1, 64, 64), bool)
    load(open_folder(changed(tmp_path, "gpt2", **{"transformer.h.0.attn.bias": mask, "transformer.h.1.attn.masked_bias": mask})))


def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=rf"not plain floating point: {name} \(int8\)"):
        load(open_folder(changed(tmp_path, "llama", drop=name, **{name: np.ones((44, 32), np.int8)})))
