from data.helpers import make_store, odd_documents
from meshloom.data.config import Data, Source
from meshloom.data.inspect import inspect, show, tokenizer_of
from meshloom.data.prepare import store_of
from meshloom.data.tokenizer import load, train


def test_counts_lengths_and_sample(tmp_path):
    (tmp_path / "a.txt").write_text("To be.\nOr not to be, that is the question.\n")
    tok = load()
    store = store_of([Source(path=str(tmp_path / "a.txt"), split="line")], tok, Data(cache=str(tmp_path / "c"))).store
    found = inspect(store, tok, sample=5)
    lengths = sorted(len(d) for d in tok.encode_documents(["To be.", "Or not to be, that is the question."]))
    assert (found.documents, found.tokens, found.dtype) == (2, sum(lengths), "uint16")
    assert [found.lengths["shortest"], found.lengths["longest"]] == lengths
    assert sorted(found.sample) == ["'Or not to be, that is the question.<|endoftext|>'", "'To be.<|endoftext|>'"]


def test_the_command(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("To be, or not to be.")
    own = train(["To be, or not to be."] * 9, 270, tmp_path / "tok")
    store = store_of([Source(path=str(tmp_path / "a.txt"))], own, Data(cache=str(tmp_path / "c")), out=tmp_path / "x").store
    show(tmp_path / "x.idx")
    assert "1 documents" in (said := capsys.readouterr().out) and "To be, or not to be.<|endoftext|>" in said
    assert tokenizer_of(store).hash == own.hash
    train(["other"] * 9, 265, tmp_path / "tok")  # the tokenizer at that path is another now
    show(tmp_path / "x")
    assert "> ids [" in (said := capsys.readouterr().out) and "is not known or not there any more" in said


def test_a_store_from_elsewhere_and_an_empty_one(tmp_path):
    assert inspect(make_store(tmp_path / "m", odd_documents(5)), None).sample[0].startswith("ids [")
    assert inspect(make_store(tmp_path / "e", []), None).documents == 0
