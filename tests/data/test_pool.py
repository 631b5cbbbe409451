import errno

import pytest

from meshloom.data.pool import Pool
from meshloom.data.store import Store
from meshloom.data.tokenizer import load


def test_a_process_writes_what_it_is_told(tmp_path):
    tok = load()
    texts = ["one\nline", "zwei ä 日本", "<|endoftext|>"]
    with Pool(1, tok) as pool:
        pool.run(str(tmp_path / "a"), texts)
        pool.run(str(tmp_path / "b"), texts[:1])
    store = Store(tmp_path / "a")
    assert [store.document(i).tolist() for i in range(3)] == tok.encode_documents(texts)
    assert len(Store(tmp_path / "b")) == 1
    assert all(p.returncode == 0 for p in pool.all)


def test_an_error_there_is_one_here(tmp_path):
    (tmp_path / "file").write_text("")
    with Pool(1, load()) as pool, pytest.raises(OSError, match="Cannot write the token store") as e:
        pool.run(str(tmp_path / "file" / "a"), ["text"])
    assert e.value.errno in (errno.ENOTDIR, errno.EEXIST)


def test_a_process_that_died_is_told(tmp_path):
    with Pool(1, load()) as pool:
        pool.all[0].kill()
        pool.all[0].wait()
        with pytest.raises(RuntimeError, match=r"died \(exit code -9\).*Lower data\.workers"):
            pool.run(str(tmp_path / "a"), ["text"])
