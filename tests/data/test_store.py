import errno
import os
import stat
import struct
import subprocess
import sys

import numpy as np
import pytest

from meshloom.data.store import Store, Writer, file_of, token_dtype


def oracle(documents, dtype_code, letter):
    """Megatron's two files for these documents, written from the format's description and nothing of ours."""
    size = struct.calcsize(letter)
    data = b"".join(struct.pack(f"<{len(d)}{letter}", *d) for d in documents)
    idx = (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", dtype_code)
        + struct.pack("<Q", len(documents))
        + struct.pack("<Q", len(documents) + 1)
    )
    for d in documents:
        idx += struct.pack("<i", len(d))
    at = 0
    for d in documents:
        idx += struct.pack("<q", at)
        at += size * len(d)
    for i in range(len(documents) + 1):
        idx += struct.pack("<q", i)
    return data, idx


DOCUMENTS = [[5, 6, 7, 0], [65000, 0], [1], [2, 3, 4, 5, 6, 0]]


@pytest.mark.parametrize("vocab, code, letter", [(65499, 8, "H"), (65500, 4, "i"), (151669, 4, "i")])
def test_bytes_are_megatrons(tmp_path, vocab, code, letter):
    with Writer(tmp_path / "a.b", token_dtype(vocab)) as out:
        for d in DOCUMENTS:
            out.add(d)
        out.finish({})
    data, idx = oracle(DOCUMENTS, code, letter)
    assert (tmp_path / "a.b.bin").read_bytes() == data
    assert (tmp_path / "a.b.idx").read_bytes() == idx


@pytest.mark.parametrize("code, letter", [(1, "B"), (3, "h"), (4, "i"), (5, "q"), (8, "H")])
def test_reads_megatrons_files(tmp_path, code, letter):
    documents = [[d % 100 for d in doc] for doc in DOCUMENTS]
    data, idx = oracle(documents, code, letter)
    (tmp_path / "m.bin").write_bytes(data)
    (tmp_path / "m.idx").write_bytes(idx)
    store = Store(tmp_path / "m")
    assert [store.document(i).tolist() for i in range(len(store))] == documents
    assert store.meta == {}


def test_reads_documents_of_several_sequences(tmp_path):
    """--split-sentences makes a sequence of every sentence; the document indices then skip."""
    data, idx = oracle(DOCUMENTS, 8, "H")
    head = 9 + 8 + 1 + 16 + 4 * 12
    idx = idx[: 9 + 8 + 1 + 8] + struct.pack("<Q", 3) + idx[9 + 8 + 1 + 16 : head] + struct.pack("<3q", 0, 3, 4)
    (tmp_path / "m.bin").write_bytes(data)
    (tmp_path / "m.idx").write_bytes(idx)
    store = Store(tmp_path / "m")
    assert [store.document(i).tolist() for i in range(len(store))] == [[*DOCUMENTS[0], *DOCUMENTS[1], *DOCUMENTS[2]], DOCUMENTS[3]]


def test_empty_store(tmp_path):
    with Writer(tmp_path / "e", token_dtype(10)) as out:
        store = out.finish({})
    assert len(store) == 0 and len(store.tokens) == 0


def test_append_joins_parts(tmp_path):
    for name, some in (("x", DOCUMENTS[:2]), ("y", DOCUMENTS[2:])):
        with Writer(tmp_path / name, token_dtype(65000)) as out:
            for d in some:
                out.add(d)
            out.finish({})
    with Writer(tmp_path / "all", token_dtype(65000)) as out:
        out.append(Store(tmp_path / "x"))
        out.append(Store(tmp_path / "y"))
        out.finish({"k": 1})
    data, idx = oracle(DOCUMENTS, 8, "H")
    assert (tmp_path / "all.bin").read_bytes() == data and (tmp_path / "all.idx").read_bytes() == idx
    assert Store(tmp_path / "all").meta == {"k": 1}


def test_nothing_is_left_without_finish(tmp_path):
    with pytest.raises(RuntimeError), Writer(tmp_path / "a", token_dtype(10)) as out:
        out.add([1, 2])
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_an_id_that_does_not_fit_is_refused(tmp_path):
    with Writer(tmp_path / "a", token_dtype(100)) as out, pytest.raises(ValueError, match="70000 does not fit uint16"):
        out.add([1, 70000])


def test_no_space_is_said_and_leaves_no_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(OSError, match=r"Cannot write the token store .*a: there is no space left on the disk.*data\.cache") as e,
        Writer(tmp_path / "a", token_dtype(10)) as out,
    ):
        out.add([1])
        out.finish({})
    assert e.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_real_full_disk(tmp_path):
    """A limit on file size stands in for a small disk: the kernel really refuses the write."""
    code = (
        "import resource, signal, sys\nfrom meshloom.data.store import *\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))\n"
        "try:\n with Writer(sys.argv[1], token_dtype(10)) as out:\n  [out.add([1] * 1000) for _ in range(100)]\n  out.finish({})\nexcept OSError as e: print(e)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], env=env, capture_output=True, text=True, check=True).stdout
    assert "Cannot write the token store" in said and "File too large" in said
    assert list(tmp_path.iterdir()) == []


def test_no_write_permission_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="a part of that path is a file"), Writer(tmp_path / "file" / "a", token_dtype(10)):
        pass
    if os.geteuid() != 0:
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises(OSError, match="you may not write there"), Writer(tmp_path / "a", token_dtype(10)):
            pass
        tmp_path.chmod(0o700)


def test_no_write_permission_as_root(tmp_path, monkeypatch):
    from pathlib import Path

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(OSError, match=r"you may not write there\. Set data\.cache"), Writer(tmp_path / "a", token_dtype(10)):
        pass


@pytest.mark.parametrize(
    "harm, said",
    [
        (lambda p: file_of(p, "idx").write_bytes(b"something else, and long enough to be read as a header"), "is not a token index"),
        (lambda p: file_of(p, "idx").write_bytes(file_of(p, "idx").read_bytes()[:-8]), "idx is cut off"),
        (lambda p: file_of(p, "bin").write_bytes(file_of(p, "bin").read_bytes()[:-2]), "bin is cut off"),
        (lambda p: file_of(p, "bin").unlink(), r"has no file .*a\.bin"),
    ],
)
def test_a_damaged_store_is_named(tmp_path, harm, said):
    with Writer(tmp_path / "a", token_dtype(65000)) as out:
        for d in DOCUMENTS:
            out.add(d)
        out.finish({})
    harm(tmp_path / "a")
    with pytest.raises(ValueError, match=said):
        Store(tmp_path / "a")


def test_reading_is_mapped_not_loaded(tmp_path):
    with Writer(tmp_path / "a", token_dtype(10)) as out:
        out.add(np.ones(1000, np.int64))
        store = out.finish({})
    base = store.tokens
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    assert type(base).__name__ == "mmap"
