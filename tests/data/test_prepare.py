import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from meshloom.data import prepare as prepare_file
from meshloom.data.config import Data, Source
from meshloom.data.config import Tokenizer as Section
from meshloom.data.prepare import open_store, parts_of, prepare, show, store_of, train_tokenizer
from meshloom.data.store import Store, Writer
from meshloom.data.tokenizer import load, train

TEXTS = [f"Document {i}: " + "to be or not to be. " * (i % 7) for i in range(40)]


def write(path, texts=TEXTS, key="text"):
    path.write_text("".join(json.dumps({key: t}) + "\n" for t in texts))
    return Source(path=str(path), field=key)


def data(tmp_path, **how):
    return Data(cache=str(tmp_path / "cache"), **{"workers": 1, **how})


@pytest.fixture
def small_parts(monkeypatch):
    """Many parts, and processes even for little text."""
    monkeypatch.setattr(prepare_file, "PART", 200)
    monkeypatch.setattr(prepare_file, "SMALL", 0)


def ids_of(store):
    return [store.document(i).tolist() for i in range(len(store))]


def test_a_store_holds_every_document_with_its_end(tmp_path):
    tok = load()
    made = store_of([write(tmp_path / "a.jsonl")], tok, data(tmp_path))
    assert ids_of(made.store) == tok.encode_documents(TEXTS) and not made.cached
    assert made.store.dtype == np.uint16 and made.report == [f"40 documents, {sum(map(len, TEXTS)):,} characters; 0 skipped as bad"]


@pytest.mark.parametrize("workers", [1, 3])
def test_processes_and_parts_do_not_change_the_bytes(tmp_path, small_parts, workers):
    source = write(tmp_path / "a.jsonl")
    made = store_of([source], load(), data(tmp_path, workers=workers), out=tmp_path / "out" / "x")
    assert ids_of(made.store) == load().encode_documents(TEXTS)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["x.bin", "x.idx", "x.json", "x.lock"]


def test_the_second_time_it_is_found(tmp_path, monkeypatch):
    source = write(tmp_path / "a.jsonl")
    first = store_of([source], load(), data(tmp_path))
    monkeypatch.setattr(prepare_file, "tokenize", None)  # would fail if called
    again = store_of([source], load(), data(tmp_path, workers=2))
    assert again.cached and again.store.prefix == first.store.prefix and again.report == first.report
    os.utime(source.path)  # the time of a file is not its content
    assert store_of([source], load(), data(tmp_path)).cached


@pytest.mark.parametrize("change", ["text", "tokenizer", "end", "bos", "control_text", "field", "split", "max_bytes", "on_bad", "order"])
def test_c45_every_change_makes_a_new_store(tmp_path, change):
    lines = [json.dumps({"text": t, "other": t.upper()}) + "\n" for t in TEXTS]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    source, how, tok = Source(path=str(tmp_path / "a.jsonl")), data(tmp_path), Section()
    first = store_of([source], load(config=tok), how)
    if change == "text":
        (tmp_path / "a.jsonl").write_text("".join(lines).replace("Document 7", "Document 8"))  # the same length
    elif change == "order":
        (tmp_path / "a.jsonl").write_text("".join(reversed(lines)))
    elif change == "tokenizer":
        train(TEXTS, 300, tmp_path / "tok")
        tok = Section(path=str(tmp_path / "tok"))
    elif change in ("end", "bos", "control_text"):
        tok = Section(**{change: {"end": "<|im_end|>", "bos": True, "control_text": "control"}[change]})
    elif change in ("field", "split"):
        source = source.model_copy(update={change: {"field": "other", "split": "line"}[change]})
    else:
        how = data(tmp_path, **{change: {"max_bytes": 10**5, "on_bad": "skip"}[change]})
    second = store_of([source], load(tok.path, tok), how)
    same_ids = change in ("bos", "split", "max_bytes", "on_bad", "control_text")  # this tokenizer has no start token, and so on
    assert (first.store.prefix == second.store.prefix) == (change == "bos") and second.cached == (change == "bos")
    assert (ids_of(first.store) == ids_of(second.store)) == same_ids


def test_c45_a_store_of_another_tokenizer_is_refused_by_name(tmp_path):
    store_of([write(tmp_path / "a.jsonl")], load(), data(tmp_path), out=tmp_path / "x")
    other = train(TEXTS, 300, tmp_path / "tok")
    for prefix in ("x", "x.idx", "x.bin"):
        with pytest.raises(ValueError, match=r"was made with another tokenizer \('.*'; now '.*'\)"):
            open_store(str(tmp_path / prefix), other)
    with pytest.raises(ValueError, match=r"another tokenizer\.end \(0; now 3\)"):
        open_store(str(tmp_path / "x"), load(config=Section(end="<|im_end|>")))
    assert store_of([Source(path=str(tmp_path / "x"))], load(), data(tmp_path)).cached


def test_a_store_from_megatron_needs_no_facts(tmp_path):
    with Writer(tmp_path / "m", np.dtype("<u2")) as out:
        out.add([1, 2, 3])
        out.finish({})
    (tmp_path / "m.json").unlink()
    made = store_of([Source(path=str(tmp_path / "m"))], load(), data(tmp_path))
    assert ids_of(made.store) == [[1, 2, 3]]
    with pytest.raises(ValueError, match="is a token store already; it needs no preparing"):
        store_of([Source(path=str(tmp_path / "m"))], load(), data(tmp_path), out=tmp_path / "y")


def test_after_kill_9_only_the_missing_parts_are_made(tmp_path, small_parts):
    """Kills a real process in the middle, then finishes in this one: same bytes, no part made twice, nothing left over."""
    source = write(tmp_path / "a.jsonl", TEXTS * 5)
    code = (
        "import sys, time\nfrom meshloom.data import prepare as p\nfrom meshloom.data.config import *\nfrom meshloom.data.tokenizer import load\n"
        "p.PART = 200\nreal = p.make_part\ndef slow(*a, **k):\n real(*a, **k)\n time.sleep(0.02)\np.make_part = slow\n"
        f"p.store_of([Source(path={source.path!r})], load(), Data(cache={str(tmp_path / 'cache')!r}, workers=1), out={str(tmp_path / 'x')!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"])
    deadline = time.time() + 30
    while len(list(tmp_path.glob("*.parts/*.idx"))) < 5 and time.time() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    made = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*.parts/*.idx")}
    assert len(made) >= 5 and not (tmp_path / "x.idx").exists()
    (tmp_path / "x.bin.tmp-1").write_bytes(b"left by a kill")
    again = []
    real = prepare_file.make_part
    prepare_file.make_part = lambda tok, prefix, texts: again.append(prefix) or real(tok, prefix, texts)
    try:
        done = store_of([source], load(), data(tmp_path), out=tmp_path / "x")
    finally:
        prepare_file.make_part = real
    assert again and not {f"{p}.idx" for p in again} & {str(p) for p in made}
    assert ids_of(done.store) == load().encode_documents(TEXTS * 5)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "cache") == ["a.jsonl", "x.bin", "x.idx", "x.json", "x.lock"]


def test_processes_that_want_the_same_store_make_it_once(tmp_path, monkeypatch):
    source, made = write(tmp_path / "a.jsonl"), []
    real = prepare_file.tokenize
    monkeypatch.setattr(prepare_file, "tokenize", lambda *a: made.append(1) or time.sleep(0.1) or real(*a))
    found = []
    threads = [threading.Thread(target=lambda: found.append(store_of([source], load(), data(tmp_path)))) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(made) == 1 and sorted(f.cached for f in found) == [False, True, True, True]


def test_no_space_leaves_nothing_half_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left on the disk.*data.cache"):
        store_of([write(tmp_path / "a.jsonl")], load(), data(tmp_path), out=tmp_path / "x")
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".bin", ".idx") or "tmp" in p.name]


def test_no_write_permission(tmp_path):
    (tmp_path / "cache").write_text("a file, where a folder should be")
    with pytest.raises(OSError, match=r"Cannot write the token store .*a part of that path is a file.*Set data\.cache"):
        store_of([write(tmp_path / "a.jsonl")], load(), data(tmp_path))


def test_bad_documents_stop_or_are_reported(tmp_path):
    source = write(tmp_path / "a.jsonl")
    with open(source.path, "a") as f:
        f.write("{broken\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:41: broken JSON"):
        store_of([source], load(), data(tmp_path))
    made = store_of([source], load(), data(tmp_path, on_bad="skip"))
    assert len(made.store) == 40 and "1 broken JSON" in made.report[1]
    assert made.store.meta["found"]["bad"] == {"broken JSON": 1}


def test_parts_depend_on_the_texts_alone():
    assert list(parts_of(iter(["aaa", "bb", "c", "dddd", "e"]), 4)) == [["aaa", "bb"], ["c", "dddd"], ["e"]]


def test_the_commands(tmp_path, capsys):
    sources = (write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", ["one more"], key="body"))
    how = data(tmp_path, train=sources)
    made = prepare(how, Section(), tmp_path / "both", progress=False)
    show(made)
    assert len(made.store) == 41 and "Written: " in capsys.readouterr().out
    show(prepare(how, Section(), tmp_path / "both", progress=False))
    assert "nothing changed since" in capsys.readouterr().out
    assert train_tokenizer(how, 300, tmp_path / "tok").size <= 300
    assert "41 documents" in capsys.readouterr().out and Store(tmp_path / "both").meta["vocab"] == 4096


def test_progress_is_shown(tmp_path, capsys, small_parts):
    store_of([write(tmp_path / "a.jsonl")], load(), data(tmp_path), progress=True)
    told = capsys.readouterr()
    assert "Tokenizing" in told.err and not told.out


def test_a_damaged_store_is_made_anew_in_the_cache(tmp_path):
    source = [write(tmp_path / "a.jsonl")]
    made = store_of(source, load("shipped"), data(tmp_path)).store
    for ending, held in (("json", '{"made'), ("json", "[1]"), ("idx", "junk"), ("bin", "")):
        (tmp_path / "cache" / f"{made.prefix.rsplit('/', 1)[1]}.{ending}").write_text(held)
        again = store_of(source, load("shipped"), data(tmp_path))
        assert not again.cached and ids_of(again.store) == ids_of(Store(made.prefix))


def test_what_it_did_not_make_is_not_overwritten(tmp_path):
    (tmp_path / "mine.bin").write_bytes(b"precious")
    with pytest.raises(
        ValueError, match=r"mine\.bin or \.idx is there already and was not made by `meshloom data prepare`\. Choose another"
    ):
        store_of([write(tmp_path / "a.jsonl")], load("shipped"), data(tmp_path), out=tmp_path / "mine")
    assert (tmp_path / "mine.bin").read_bytes() == b"precious"
