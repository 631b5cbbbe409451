import json
import re
from pathlib import Path

import numpy as np
import pytest

from meshloom.data.config import Data, Source
from meshloom.data.sets import describe, open_sets
from meshloom.data.store import Writer
from meshloom.data.tokenizer import load

TEXTS = [f"Document number {i} says {'word ' * (i % 9)}{i * i}." for i in range(200)]


def write(path, texts=TEXTS):
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return str(path)


def data(tmp_path, **how):
    return Data(**{"cache": str(tmp_path / "cache"), "workers": 1, "seq": 16, "train": write(tmp_path / "a.jsonl"), **how})


def texts_of(loader):
    """The documents of a set, put together from its rows in order."""
    ids = [t for b in loader.once(8) for r, s in zip(b.tokens, b.segments) for t in r[s > 0].tolist()]
    return load().decode(ids)


def test_no_document_is_in_both_sets_and_none_is_lost(tmp_path):
    train, valid, _ = open_sets(data(tmp_path, valid=0.1), load(), 0)
    found = [texts_of(s).removesuffix("<|endoftext|>").split("<|endoftext|>") for s in (train, valid)]
    assert sorted(found[0] + found[1]) == sorted(TEXTS)
    assert 8 <= len(found[1]) <= 35


def test_the_split_does_not_depend_on_the_training_seed(tmp_path):
    a, b, c = (open_sets(data(tmp_path, valid=0.1, split_seed=s), load(), seed) for seed, s in ((0, 0), (7, 0), (0, 1)))
    assert texts_of(a.valid) == texts_of(b.valid) != texts_of(c.valid)
    assert (a.train.read(np.arange(8)).tokens != b.train.read(np.arange(8)).tokens).any()


def test_valid_sources_of_their_own(tmp_path):
    v = write(tmp_path / "v.jsonl", ["held out"])
    train, valid, report = open_sets(data(tmp_path, valid=v), load(), 0)
    assert texts_of(valid).startswith("held out") and valid.rows == 1 and len(report) == 2
    assert train.tokens == sum(map(len, load().encode_documents(TEXTS)))


def test_no_valid_set(tmp_path):
    assert open_sets(data(tmp_path, valid=0), load(), 0).valid is None


def test_an_empty_held_out_set_is_refused(tmp_path):
    few = write(tmp_path / "few.jsonl", ["a longer text than that, please, and more"] * 5)
    with pytest.raises(ValueError, match=r"held-out set is empty: data\.valid = 0\.001 of 5 documents chose none.*split: paragraph"):
        open_sets(data(tmp_path, train=few, valid=0.001), load(), 0)


def test_nothing_left_to_train_on_is_refused(tmp_path):
    one = write(tmp_path / "one.jsonl", ["only"])
    with pytest.raises(ValueError, match="All 1 documents of .*one.jsonl' are held out"):
        open_sets(data(tmp_path, train=one, valid=0.999), load(), 0)


def test_a_corpus_shorter_than_one_row_is_refused(tmp_path):
    short = write(tmp_path / "s.jsonl", ["To be", "or not"])
    with pytest.raises(ValueError, match=r"has \d+ tokens, fewer than one row of seq \+ 1 = 17"):
        open_sets(data(tmp_path, train=short, valid=0), load(), 0)


def test_missing_and_empty_sources_are_refused(tmp_path):
    with pytest.raises(ValueError, match="There is no file or folder"):
        open_sets(data(tmp_path, train=str(tmp_path / "no.jsonl")), load(), 0)
    (tmp_path / "e.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no documents"):
        open_sets(data(tmp_path, train=str(tmp_path / "e.jsonl")), load(), 0)


def test_mixture_and_description(tmp_path):
    b = write(tmp_path / "b.jsonl", [t.upper() for t in TEXTS])
    a = write(tmp_path / "a.jsonl")
    train, valid, _ = open_sets(data(tmp_path, train=(Source(path=a, weight=1), Source(path=b, weight=3))), load(), 0)
    lines = describe(train, valid, 1000)
    assert "0.25 of the samples, 250 rows" in lines[2] and "0.75 of the samples, 750 rows" in lines[3] and " epochs" in lines[3]
    assert np.bincount(train.mixture.draw(np.arange(1000))[0]).tolist() == [250, 750]


def test_a_resume_notices_changed_data(tmp_path):
    state = open_sets(data(tmp_path), load(), 0).train.state(8)
    assert open_sets(data(tmp_path), load(), 0).train.resume(json.loads(json.dumps(state)))[1] == 8
    changed = [TEXTS[0].replace("says", "said"), *TEXTS[1:]]
    write(tmp_path / "c.jsonl", changed)
    with pytest.raises(ValueError, match="started with data sources"):
        open_sets(data(tmp_path, train=str(tmp_path / "c.jsonl")), load(), 0).train.resume(state)
    with pytest.raises(ValueError, match="started with data sources"):
        open_sets(data(tmp_path, valid=0.3), load(), 0).train.resume(state)


def test_the_pages_example_runs(tmp_path, capsys):
    page = Path(__file__).parents[2] / "docs" / "data.md"
    code = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[1]
    small = f"train={write(tmp_path / 'a.jsonl')!r}, cache={str(tmp_path / 'c')!r}, valid=0.1"
    exec(code.replace("Data(seq=128)", f"Data(seq=128, {small})"), {})
    assert "(8, 128)" in capsys.readouterr().out and small


def test_the_shipped_corpus_by_default(tmp_path):
    from meshloom.data.sources import CORPUS

    assert (CORPUS / "README.md").read_text().count("public domain") == 2
    assert Data().train == (Source(path="corpus"),)


def test_a_store_with_ids_that_the_tokenizer_lacks_is_refused(tmp_path):
    with Writer(tmp_path / "theirs", np.dtype("<u2")) as out:
        out.add(np.arange(5000))
        out.finish({})
    (tmp_path / "theirs.json").unlink()
    sets = open_sets(Data(train=(Source(path=str(tmp_path / "theirs")),), valid=0, seq=100), load("shipped"), seed=0)
    said = r"theirs' holds token id \d+, and the tokenizer has ids 0 to 4095\. It was made with another tokenizer, or is damaged"
    with pytest.raises(ValueError, match=said):
        sets.train.read(np.arange(sets.train.rows))
