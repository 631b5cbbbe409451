import itertools
import json
import threading
import time
import tracemalloc

import numpy as np
import pytest

from data.helpers import load, make_store, numbered, odd_documents
from meshloom.data import loader as loader_file
from meshloom.data.loader import pack
from meshloom.data.packing import stream


def take(iterator, n):
    return list(itertools.islice(iterator, n))


def same(a, b):
    return all((x == y).all() and x.dtype == y.dtype for x, y in zip(a, b))


def test_shapes_and_types(tmp_path):
    batch = take(load(tmp_path, odd_documents(50)).batches(0, 4), 1)[0]
    assert [(a.shape, a.dtype.name) for a in batch[:5]] == [((4, 16), t) for t in ("int32", "int32", "float32", "int32", "int32")]
    assert batch.samples.tolist() == [0, 1, 2, 3] and batch.samples.dtype == np.int32


def test_an_epoch_is_every_row_once_and_the_next_has_another_order(tmp_path):
    load_ = load(tmp_path, odd_documents(60))
    n = load_.rows
    whole = sorted(tuple(r) for b in load_.once(5) for r, s in zip(b.tokens, b.segments) if s.any())
    epochs = [load_.read(np.arange(e * n, (e + 1) * n)).tokens for e in range(3)]
    assert all(sorted(map(tuple, e)) == whole for e in epochs)
    assert not (epochs[0] == epochs[1]).all()


def test_c17_resume_in_a_later_epoch(tmp_path):
    """14 rows, batches of 3, stop after step 8 (in the second epoch): steps 9 .. 15 are those of the run that was not stopped."""
    load_ = load(tmp_path, numbered([16 * 14 + 1]))
    assert load_.rows == 14
    whole = take(load_.batches(0, 3), 15)
    again, start = load(tmp_path, numbered([16 * 14 + 1])).resume(json.loads(json.dumps(load_.state(24))))
    assert start == 24
    assert all(same(a, b) for a, b in zip(whole[8:], take(again.batches(start, 3), 7)))
    first, second = np.concatenate([b.tokens[:, 0] for b in whole])[:14], np.concatenate([b.tokens[:, 0] for b in whole])[14:28]
    assert set(first) == set(second) and first.tolist() != second.tolist()


def test_c19_resume_reads_nothing_of_what_it_skips(tmp_path, monkeypatch):
    load_ = load(tmp_path, odd_documents(400), prefetch=2)
    reads = []
    real = loader_file.read
    monkeypatch.setattr(loader_file, "read", lambda s, pieces, rows, *rest: reads.append(rows) or real(s, pieces, rows, *rest))
    iterator = load_.batches(10**6, 4)
    next(iterator)
    iterator.close()
    assert sum(reads) <= 4 * (load_.how.prefetch + 1)
    near, far = (min(timed(load_, at) for _ in range(5)) for at in (0, 2 * 10**9 - 64))
    assert far < 5 * near + 0.01


def timed(load_, at):
    t = time.perf_counter()
    load_.read(np.arange(at, at + 64))
    return time.perf_counter() - t


@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_c21_restore_at_every_step(tmp_path, packing):
    """50 documents of odd lengths in rows of 16, two sources: the ten batches after a stop at any step are those of the run that was not stopped."""
    load_ = load(tmp_path, odd_documents(25, 1), odd_documents(25, 2), packing=packing, weights=[1, 2])
    whole = take(load_.batches(0, 3), 30)
    for k in range(1, 21):
        again, start = load_.resume(load_.state(3 * k))
        assert all(same(a, b) for a, b in zip(whole[k:], take(again.batches(start, 3), 10)))


def test_the_batch_size_may_change_at_a_resume(tmp_path):
    load_ = load(tmp_path, odd_documents(60))
    a = np.concatenate([b.tokens for b in take(load_.batches(0, 6), 4)])
    b = np.concatenate([b.tokens for b in [*take(load_.batches(0, 3), 2), *take(load_.batches(6, 9), 2)]])
    assert (a == b).all()


def test_processes_share_a_batch(tmp_path):
    load_ = load(tmp_path, odd_documents(60))
    whole = take(load_.batches(0, 8), 3)
    for rows in (slice(0, 4), slice(4, 8), slice(2, 3)):
        assert all(same([x[rows] for x in w], s) for w, s in zip(whole, take(load_.batches(0, 8, rows), 3)))


def test_c51_no_process_runs_out_before_the_others(tmp_path):
    """10 rows on 4 processes, one row each: every one has the same number of batches, and the stream crosses the epoch's border."""
    load_ = load(tmp_path, numbered([16 * 10 + 1]))
    shares = [take(load_.batches(0, 4, slice(p, p + 1)), 5) for p in range(4)]
    first = [int(shares[p][i].tokens[0, 0]) for i in range(5) for p in range(4)]
    assert sorted(first[:10]) == sorted(first[10:]) == list(range(1, 161, 16))
    once = [list(load_.once(4, slice(p, p + 1))) for p in range(4)]
    assert [len(o) for o in once] == [3] * 4
    assert sorted(int(b.tokens[0, 0]) for o in once for b in o if b.weights.any()) == list(range(1, 161, 16))
    assert sum(not b.segments.any() for o in once for b in o) == 2  # the last batch, filled up with rows of weight 0


def test_once_does_not_depend_on_the_batch_size(tmp_path):
    load_ = load(tmp_path, odd_documents(30), odd_documents(7))
    sums = [
        (sum(float(b.weights.sum()) for b in load_.once(n)), sum(int((b.targets * b.weights).sum()) for b in load_.once(n)))
        for n in (1, 3, 8, 1000)
    ]
    assert len(set(sums)) == 1 and sums[0][0] > 0


def test_c50_weights_and_epochs(tmp_path):
    a, b = numbered([161]), numbered([321])  # 10 and 20 rows
    load_ = load(tmp_path, a, b, weights=[0.25, 0.75])
    print(*load_.epochs(1000))
    assert [(e.samples, e.epochs) for e in load_.epochs(1000)] == [(250, 25.0), (750, 37.5)]
    changed, start = load(tmp_path, a, b, weights=[0.5, 0.5]).resume(load_.state(500))
    assert start == 500
    for source, rows in ((0, 10), (1, 20)):
        numbers = np.arange(1000)
        mine = numbers[changed.mixture.draw(numbers)[0] == source]
        first = changed.read(mine).tokens[:, 0]
        assert all(
            len(set(first[e : e + rows].tolist())) == rows for e in range(0, len(first) - rows, rows)
        )  # each epoch whole, over the change too


@pytest.mark.parametrize(
    "field, how", [("seed", {"seed": 1}), ("seq", {"seq": 8}), ("packing", {"packing": "stream"}), ("shuffle", {"shuffle": False})]
)
def test_a_resume_that_would_repeat_samples_is_refused(tmp_path, field, how):
    state = load(tmp_path, odd_documents(50)).state(30)
    with pytest.raises(ValueError, match=f"started with data {field} = .*start a new run"):
        load(tmp_path, odd_documents(50), **how).resume(state)


def test_a_resume_with_other_data_is_refused(tmp_path):
    state = load(tmp_path, odd_documents(50)).state(30)
    with pytest.raises(ValueError, match="started with data sources"):
        load(tmp_path, odd_documents(51)).resume(state)


def test_sources_without_enough_text_are_refused(tmp_path):
    s = stream(make_store(tmp_path / "a", numbered([5, 5])))
    with pytest.raises(ValueError, match="'a' has 10 tokens, fewer than one row of seq \\+ 1 = 17.*at most 9"):
        pack("a", s, seq=16, packing="documents")
    assert pack("a", s, seq=16, packing="documents", short=True).rows == 1
    with pytest.raises(ValueError, match="'b' has no documents"):
        pack("b", stream(make_store(tmp_path / "b", [])), seq=16, packing="documents")


def test_an_error_in_the_thread_reaches_the_caller(tmp_path, monkeypatch):
    load_ = load(tmp_path, odd_documents(50))
    monkeypatch.setattr(load_, "read", lambda _: (_ for _ in ()).throw(OSError("disk gone")))
    with pytest.raises(OSError, match="disk gone"):
        next(load_.batches(0, 2))


def test_the_thread_ends_with_the_iterator(tmp_path):
    iterator = load(tmp_path, odd_documents(50)).batches(0, 2)
    next(iterator)
    iterator.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("meshloom-loader")]


def test_memory_does_not_grow_with_the_position(tmp_path):
    load_ = load(tmp_path, odd_documents(100))
    load_.read(np.arange(8))
    tracemalloc.start()
    load_.read(np.arange(2 * 10**9, 2 * 10**9 + 8))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
