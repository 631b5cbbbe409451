"""Conversions and their proof."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from goldens import small
from meshloom.recipes import convert as module
from meshloom.recipes.convert import convert
from meshloom.weights import hf
from meshloom.weights.load import load
from meshloom.weights.opened import open_model


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if transformers were not installed."""
    monkeypatch.setattr(module, "transformers_logits", lambda folder, tokens: None)


@pytest.mark.usefixtures("alone")
def test_a_folder_is_converted_and_proved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    shutil.copytree(small.FOLDER / "qwen2", tmp_path / "in", dirs_exist_ok=True)
    (tmp_path / "in" / "tokenizer.json").write_bytes(b"{}")
    assert convert(tmp_path / "in", tmp_path / "out", old_config=True, check=True)
    lines = capsys.readouterr().out
    assert (
        "loaded 26 of 26 tensors, 0 missing, 0 unexpected, a llama model" in lines
        and "all 14 parameters are equal bit for bit" in lines
        and "logits were not compared" in lines
    )
    assert "rope_theta" in hf.open_folder(tmp_path / "out").said
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"{}"
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == pytest.approx(
        (tmp_path / "in" / "model.safetensors").stat().st_size, rel=0.1
    )


@pytest.mark.usefixtures("alone")
def test_another_dtype_is_proved_after_rounding(tmp_path: Path) -> None:
    said: list[str] = []
    assert convert(small.FOLDER / "gpt2", tmp_path / "out", dtype="float16", check=True, say=said.append)
    assert any("equal bit for bit" in line for line in said)
    assert {t.dtype for t in hf.open_folder(tmp_path / "out").tensors.values()} == {np.dtype(np.float16)}


@pytest.mark.usefixtures("alone")
def test_a_wrong_conversion_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    right = hf.theirs_from

    def wrong(parts, place):
        x = right(parts, place)
        return np.roll(x, 1, 0) if "k_proj" in place.theirs else x

    monkeypatch.setattr(hf, "theirs_from", wrong)
    assert not convert(small.FOLDER / "llama", tmp_path / "out", check=True, say=said.append)
    assert any("1 of 12 parameters DIFFER: layers.attn.k" in line for line in said)


def test_what_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'onnx' is not a format that can be written. These are: hf, meshloom"):
        convert(small.FOLDER / "llama", tmp_path / "out", to="onnx")
    with pytest.raises(FileExistsError, match="exists already"):
        convert(small.FOLDER / "llama", small.FOLDER)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mixed", [False, True], ids=["one dtype", "several dtypes"])
def test_to_a_checkpoint_and_back_is_equal_bit_for_bit(tmp_path: Path, mixed: bool) -> None:
    """Tensors with their dtypes, config.json, generation_config.json, tokenizer."""
    first = small.source("qwen3_windows_biases")
    kinds = {name: np.dtype(np.float32) if "norm" in name and mixed else t.dtype for name, t in first.tensors.items()}
    words = {"tokenizer.json": "{}", "tokenizer_config.json": "{ }"}
    hf.save(
        tmp_path / "a",
        first.model,
        first.config,
        load(first).weights,
        dtype=kinds,
        said=first.said,
        generation={"eos_token_id": [2, 7]},
        tokenizer=words,
    )
    assert convert(tmp_path / "a", tmp_path / "b", to="meshloom", check=True, say=lambda line: None)
    assert convert(tmp_path / "b", tmp_path / "c", check=True, say=lambda line: None)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "c").iterdir()) and len(names) == 5
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes() for name in names)


@pytest.mark.parity
@pytest.mark.parametrize("name", small.names())
def test_the_proof_against_transformers_holds_for_every_family(name: str, tmp_path: Path) -> None:
    said: list[str] = []
    assert convert(small.FOLDER / name, tmp_path / "out", check=True, say=said.append)
    assert any("logits against transformers: largest difference" in line for line in said)


@pytest.mark.parity
def test_a_mistake_both_ways_is_found_by_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading and writing that are wrong in the same way give equal bits."""
    said: list[str] = []
    monkeypatch.setattr(module, "our_logits", lambda model, c, w, tokens: np.zeros((*tokens.shape, c.vocab), np.float32))
    assert not convert(small.FOLDER / "llama", tmp_path / "out", check=True, say=said.append)
    assert any("equal bit for bit" in line for line in said) and any("DIFFER" in line for line in said)


def test_a_dense_model_becomes_a_mixture(tmp_path):
    """Written as Mixtral, read again bit for bit, with the dense model's logits."""
    said = []
    assert convert(small.FOLDER / "llama", tmp_path / "out", experts=4, top=2, check=True, say=said.append)
    assert "4 experts, 2 of them for a token, as mixtral; logits against the dense model: largest difference" in said[1]
    again = open_model(tmp_path / "out")
    assert (again.config.variant, again.config.experts, again.model.name) == ("mixtral", 4, "moe")


def test_a_mixture_without_a_counterpart_stays_ours(tmp_path):
    with pytest.raises(ValueError, match=r"This model has no counterpart in Hugging Face \(family moe\). Write it by --to meshloom."):
        convert(small.FOLDER / "qwen2", tmp_path / "out", experts=4, say=lambda line: None)
    assert convert(small.FOLDER / "qwen2", tmp_path / "ours", "meshloom", experts=4, check=True, say=lambda line: None)
    with pytest.raises(ValueError, match=r"This model has no counterpart in Hugging Face \(family moe\). Write it by --to meshloom."):
        convert(tmp_path / "ours", tmp_path / "out", say=lambda line: None)
    assert convert(tmp_path / "ours", tmp_path / "again", "meshloom", check=True, say=lambda line: None)
