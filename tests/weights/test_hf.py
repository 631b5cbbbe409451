"""Hugging Face folders, in and out."""

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from goldens import small
from meshloom.weights import safetensors as files
from meshloom.weights.hf import open_folder, save
from meshloom.weights.load import Source, load


def export(source: Source, folder: Path, **kwargs) -> Source:
    """The source, read and written again."""
    save(folder, source.model, source.config, load(source).weights, **{"dtype": "bfloat16", "said": source.said, **kwargs})
    return open_folder(folder)


def bits(source: Source) -> dict[str, tuple]:
    """Every tensor of a checkpoint, exactly."""
    return {name: (t.dtype, t.shape, t.view().tobytes()) for name, t in source.tensors.items()}


@pytest.mark.parametrize("old", [False, True], ids=["new schema", "old schema"])
@pytest.mark.parametrize("name", small.names())
def test_import_then_export_is_equal_bit_for_bit(name: str, old: bool, tmp_path: Path) -> None:
    before = small.source(name)
    after = export(before, tmp_path / "out", old=old)
    assert bits(after) == bits(before)
    assert after.config == before.config and after.model is before.model
    lost = {key for key in small.said(name, old) if key not in after.said}
    assert lost <= {"transformers_version", "partial_rotary_factor", "layer_types"}
    assert after.said["torch_dtype" if old else "dtype"] == "bfloat16"
    assert ("rope_parameters" in after.said) == (not old and "rope_parameters" in before.said)


def test_several_files_are_read_as_one(tmp_path: Path) -> None:
    before = small.source("llama")
    after = export(before, tmp_path / "out", file_bytes=20_000)
    parts = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(parts) > 2 and parts[0] == f"model-00001-of-{len(parts):05}.safetensors"
    assert bits(after) == bits(before)
    (tmp_path / "out" / parts[1]).unlink()
    with pytest.raises(ValueError, match=f"lacks {parts[1]}, which model.safetensors.index.json names"):
        open_folder(tmp_path / "out")


def test_padding_rows_never_leave(tmp_path: Path) -> None:
    source = small.source("mistral")
    assert source.config.vocab_padded == 384
    after = export(source, tmp_path / "out")
    assert after.tensors["model.embed_tokens.weight"].shape == after.tensors["lm_head.weight"].shape == (257, 32)


def test_every_tensor_may_keep_its_own_dtype(tmp_path: Path) -> None:
    source = small.source("llama")
    kinds = {name: np.dtype(np.float32) if "norm" in name else t.dtype for name, t in source.tensors.items()}
    after = export(source, tmp_path / "out", dtype=kinds)
    assert {name: t.dtype for name, t in after.tensors.items()} == kinds and after.said["dtype"] == "bfloat16"


def test_several_end_ids_stay_and_both_files_agree(tmp_path: Path) -> None:
    golden = tmp_path / "in"
    shutil.copytree(small.FOLDER / "llama", golden)
    (golden / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "temperature": 0.6}))
    source = open_folder(golden)
    assert source.said["eos_token_id"] == 2 and source.generation["eos_token_id"] == [2, 7]
    after = export(source, tmp_path / "out", generation=source.generation)
    assert after.said["eos_token_id"] == after.generation["eos_token_id"] == [2, 7]
    assert after.generation["temperature"] == 0.6 and after.said["bos_token_id"] == 1


def test_unknown_ids_are_null_so_that_no_default_of_a_class_creeps_in(tmp_path: Path) -> None:
    source = small.source("llama")
    after = export(source, tmp_path / "out", said={})
    assert after.said["eos_token_id"] is None and after.said["bos_token_id"] is None


def test_a_new_models_ids_are_those_of_its_tokenizer(tmp_path: Path) -> None:
    words = {"model": {"vocab": {"a": 0, "</s>": 5}}, "added_tokens": [{"content": "<pad>", "id": 9}]}
    named = {"eos_token": "</s>", "pad_token": {"content": "<pad>"}, "bos_token": None}
    texts = {"tokenizer.json": json.dumps(words), "tokenizer_config.json": json.dumps(named)}
    after = export(small.source("llama"), tmp_path / "out", said={}, tokenizer=texts)
    for file in (after.said, json.loads((tmp_path / "out" / "generation_config.json").read_text())):
        assert (file["eos_token_id"], file["pad_token_id"], file["bos_token_id"]) == (5, 9, None)


def test_tokenizer_files_are_equal_byte_for_byte(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tokenizer / name).write_bytes(b'{"odd":   "spacing \xc3\xa9"}\r\n')
    export(small.source("llama"), tmp_path / "out", tokenizer=tokenizer)
    assert all((tmp_path / "out" / p.name).read_bytes() == p.read_bytes() for p in tokenizer.iterdir())
    export(small.source("llama"), tmp_path / "one", tokenizer=tokenizer / "tokenizer.json")
    assert json.loads((tmp_path / "one" / "tokenizer_config.json").read_text()) == {"tokenizer_class": "PreTrainedTokenizerFast"}
    with pytest.raises(ValueError, match="holds no tokenizer"):
        export(small.source("llama"), tmp_path / "two", tokenizer=tmp_path)
    assert not (tmp_path / "two").exists()


def test_names_without_the_models_prefix_are_read(tmp_path: Path) -> None:
    held = {name.removeprefix("transformer."): t.view() for name, t in small.source("gpt2").tensors.items()}
    safetensors.numpy.save_file(held, tmp_path / "model.safetensors")
    shutil.copy(small.FOLDER / "gpt2" / "config.json", tmp_path)
    assert bits(open_folder(tmp_path)) == bits(small.source("gpt2"))


def test_a_folder_is_overwritten_only_if_told(tmp_path: Path) -> None:
    export(small.source("llama"), tmp_path / "out")
    with pytest.raises(FileExistsError, match="exists already"):
        export(small.source("gpt2"), tmp_path / "out")
    assert export(small.source("gpt2"), tmp_path / "out", overwrite=True).model.name == "gpt2"


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write", full)
    with pytest.raises(OSError, match=r"could not write .*out \(\d+ bytes free"):
        export(small.source("llama"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def folder(tmp_path: Path, config: str | None = None, **named: bytes) -> Path:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    for name, content in named.items():
        (tmp_path / name.replace("__", ".")).write_bytes(content)
    return tmp_path


LLAMA = json.dumps(small.said("llama"))


@pytest.mark.parametrize(
    "config, named, message",
    [
        (None, {}, "has no config.json"),
        ("{", {}, "config.json is not valid JSON"),
        (LLAMA, {}, "has no safetensors file"),
        (
            LLAMA,
            dict(pytorch_model__bin=b"x"),
            r"pytorch_model.bin is a pickle: loading it runs whatever code it holds, so Meshloom never does.*safe_serialization",
        ),
        (LLAMA, dict(model__safetensors=b"x" * 9), "not a whole safetensors file"),
        (json.dumps({**small.said("llama"), "quantization_config": {"quant_method": "gptq"}}), {}, r"quantised weights \(gptq\)"),
        (json.dumps({"model_type": "bert"}), {}, "model_type 'bert' is not implemented"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, config: str | None, named: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_folder(folder(tmp_path, config, **named))


@pytest.mark.parity
@pytest.mark.parametrize("old", [False, True], ids=["new schema", "old schema"])
@pytest.mark.parametrize("name", small.names())
def test_transformers_loads_the_export_with_the_same_logits(name: str, old: bool, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    export(small.source(name), tmp_path / "out", dtype="float32", old=old)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    golden = np.load(small.FOLDER / name / "logits.npz")
    with torch.no_grad():
        got = np.concatenate([model(torch.tensor(row[None].astype(np.int64))).logits.numpy() for row in golden["tokens"]])
    assert np.abs(got[:, :, ::4] - golden["logits"]).max() < 1e-5  # gelu_fast is written as gelu_new, which rounds otherwise


@pytest.mark.parametrize(
    "over, message",
    [
        ({"num_key_value_heads": 3, "num_attention_heads": 4}, r"config\.json does not describe a model: .*cannot share 3 key/value heads evenly"),
        ({"hidden_size": "64"}, r"config\.json does not describe a model: "),
        ({"num_hidden_layers": -1}, r"config\.json does not describe a model: layers: "),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_itself_is_named(tmp_path: Path, over: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_folder(folder(tmp_path, json.dumps({**small.said("llama"), **over})))
