import errno
import json
import os
import subprocess
import sys

import pytest

from meshloom.data.config import Tokenizer as Section
from meshloom.data.tokenizer import beside, check_vocabulary, load, train

SAMPLE = "A<|im_end|><|im_start|>assistant B\n  é 日本 🙂 12345\r\n\ttail  "
LLAMA = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|eot_id|>", "special": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder of a small tokenizer with other control tokens, an own template that adds a start token, and several end ids."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    out = tmp_path_factory.mktemp("llama")
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tok.train_from_iterator(["some text for a small vocabulary"] * 3, trainer)
    tok.post_processor = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)])
    tok.enable_truncation(4)
    tok.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps({**LLAMA, "chat_template": "{{ bos_token }}{{ messages }}"}))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    return out


def section(path, **how):
    return Section(path=str(path), **how)


def test_the_shipped_one():
    tok = load()
    assert (tok.size, tok.bos, tok.eos, tok.end, tok.pad) == (4096, None, (0,), 0, 1)
    assert tok.decode(tok.encode(SAMPLE)) == SAMPLE
    assert tok.encode_documents(["To be"]) == [[*tok.encode("To be"), 0]]
    text = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife."
    assert len(tok.encode(text)) < len(text) / 3.5


def test_reads_a_hugging_face_folder(folder):
    tok = load(str(folder))
    assert (tok.bos, tok.eos, tok.end) == (0, (2, 1), 2)
    assert tok.chat_template.startswith("{{ bos_token }}")
    assert load(str(folder), section(folder, end="<|end_of_text|>")).end == 1
    assert len(tok.encode("some text for a small vocabulary")) > 4  # the file's truncation does not cut training text


def test_a_bare_file_is_searched_for_usual_names(folder):
    tok = load(str(folder / "tokenizer.json"))
    assert (tok.bos, tok.eos) == (0, (1,))


def test_c42_a_start_token_comes_once(folder):
    """The tokenizer's own rule adds a start token, and so does a template; neither document nor prompt gets two."""
    plain, with_bos = load(str(folder)), load(str(folder), section(folder, bos=True, control_text="control"))
    assert plain.encode("text")[0] != 0
    assert plain.encode_documents(["text"])[0].count(0) == 0
    assert with_bos.encode_documents(["text"])[0].count(0) == 1
    rendered = "<|begin_of_text|>text"
    assert with_bos.encode_documents([rendered]) == with_bos.encode_documents(["text"])
    assert with_bos.encode(rendered).count(0) == 1
    assert with_bos.encode_documents(["text"], cores="one") == with_bos.encode_documents(["text"], cores="all")


@pytest.mark.parametrize("name", ["shipped", "folder"])
def test_c43_control_text_is_plain_text(name, folder):
    path = "shipped" if name == "shipped" else str(folder)
    plain, control = load(path), load(path, section(path, control_text="control"))
    marks = {plain.backend.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")} - {None}
    assert marks and not marks & set(plain.encode(SAMPLE))
    assert plain.decode(plain.encode(SAMPLE)) == SAMPLE
    assert marks & set(control.encode(SAMPLE))
    assert plain.hash != control.hash


def test_the_hash_covers_what_changes_ids(folder, tmp_path):
    sections = [section(folder), section(folder, bos=True), section(folder, end="<|end_of_text|>"), section(folder, control_text="control")]
    hashes = [load(str(folder), s).hash for s in sections]
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["merges"] = raw["model"]["merges"][:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(LLAMA))
    hashes.append(load(str(tmp_path)).hash)
    assert len(set(hashes)) == 5
    assert load(str(folder)).hash == hashes[0]


def test_saved_byte_for_byte(folder, tmp_path):
    load(str(folder)).save(tmp_path / "copy")
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {p.name: p.read_bytes() for p in (tmp_path / "copy").iterdir()}
    again = load(str(tmp_path / "copy"))
    assert again.hash == load(str(folder)).hash and again.eos == (2, 1)


def test_a_bare_file_is_saved_with_what_hugging_face_needs(folder, tmp_path):
    bare = load(str(folder / "tokenizer.json"))
    bare.save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|end_of_text|>" and settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert load(str(tmp_path)).eos == bare.eos


@pytest.mark.parity
def test_transformers_reads_what_we_save(tmp_path):
    import transformers

    ours = load()
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "To be, or not to be: that is the question 1603."
    assert theirs(text)["input_ids"] == ours.encode(text) and theirs.eos_token_id == ours.end


def test_vocab_and_merges(tmp_path):
    load().backend.model.save(str(tmp_path))
    tok = load(str(tmp_path))
    assert tok.decode(tok.encode("To be, or not")) == "To be, or not" and tok.end == 0


def test_training(tmp_path):
    texts = ["the cat and the dog and the cat"] * 50
    tok = train(iter(texts), 270, tmp_path / "t")
    assert tok.size <= 270 and tok.decode(tok.encode(SAMPLE)) == SAMPLE
    assert len(tok.encode("the cat and the dog")) < len("the cat and the dog")
    assert all(len(tok.encode(d)) == 3 for d in ("123", "450"))  # digits one by one
    assert train(iter(texts), 270, tmp_path / "u").hash == tok.hash
    assert load(str(tmp_path / "t")).hash == tok.hash


def test_refusals(tmp_path, folder):
    (tmp_path / "x.txt").write_text("")
    (tmp_path / "broken.json").write_text('{"model": 1}')
    with pytest.raises(ValueError, match="There is no tokenizer at .*nowhere"):
        load(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="holds no tokenizer.json. Found: broken.json, x.txt"):
        load(str(tmp_path))
    with pytest.raises(ValueError, match="broken.json is not a tokenizer.json that"):
        load(str(tmp_path / "broken.json"))
    with pytest.raises(ValueError, match="names the token '<|no|>', which its vocabulary of"):
        load(str(folder), section(folder, end="<|no|>"))
    with pytest.raises(ValueError, match="vocabulary of 100 is too small.*need 260"):
        train(["text"], 100, tmp_path)
    with pytest.raises(ValueError, match="no text to train a tokenizer on"):
        train([], 300, tmp_path)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused():
    check_vocabulary(4096, 4096)
    with pytest.raises(ValueError, match=r"has 4000 entries, but the tokenizer gives ids up to 4095\. Set model\.vocab to at least 4096"):
        check_vocabulary(4096, 4000)


def test_importing_data_brings_no_jax():
    code = "import meshloom.data.sets, meshloom.data.inspect, meshloom.data.pool; "
    code += "print([m for m in ('jax', 'tokenizers', 'pyarrow', 'datasets') if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_a_full_disk_is_told_and_leaves_no_half_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"Cannot write .*tokenizer_config\.json .*: the disk has .* free\. Free some space"):
        load().save(tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


def test_beside_a_model_as_a_folder_or_as_texts(tmp_path):
    """The same tokenizer both ways; where there is none, a sentence."""
    shipped = load()
    shipped.save(tmp_path)
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    folder, made = (beside(files, Section(), "m") for files in (tmp_path, texts))
    assert folder.encode("a ship at sea") == made.encode("a ship at sea") == shipped.encode("a ship at sea")
    with pytest.raises(ValueError, match="m has no tokenizer beside it"):
        beside(None, Section(), "m")
