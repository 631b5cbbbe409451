import numpy as np
import pytest

from data.helpers import make_store, numbered, odd_documents
from meshloom.data.packing import PACKINGS, read, stream, target_weights, tokens_of


def rows_of(store, seq, packing, long="error", keep=None):
    how = PACKINGS[packing]
    s, n = how.plan(stream(store, keep), seq, long)
    return read(s, how.pieces(s, np.arange(n), seq), n, seq, how.borders), n


def oracle(documents, seq, borders):
    """The rows of window packing, token by token."""
    flat = [(t, d, i) for d, doc in enumerate(documents) for i, t in enumerate(doc)]
    rows = []
    for begin in range(0, max(1, len(flat) - 1), seq):
        window = flat[begin : begin + seq + 1]
        row = []
        segment, position, last = 0, 0, None
        for i in range(seq):
            if i >= len(window):
                row.append((0, 0, 0.0, 0, 0))
                continue
            token, doc, _ = window[i]
            if doc != last and (borders or last is None):
                segment, position = segment + 1, 0
            last = doc
            more = i + 1 < len(window)
            inside = more and (not borders or window[i + 1][1] == doc)
            row.append((token, window[i + 1][0] if more else 0, float(inside), segment, position))
            position += 1
        rows.append(row)
    return [np.array([[c[k] for c in row] for row in rows]) for k in range(5)]


@pytest.mark.parametrize("packing", ["documents", "stream"])
@pytest.mark.parametrize("seq", [1, 2, 7, 16, 64])
def test_windows_equal_the_oracle(tmp_path, packing, seq):
    documents = odd_documents(30, seed=seq)
    got, _ = rows_of(make_store(tmp_path / "a", documents), seq, packing)
    for ours, theirs, name in zip(got, oracle(documents, seq, packing == "documents"), got._fields):
        assert ours.tolist() == theirs.tolist(), name
    assert [a.dtype for a in got] == [np.int32, np.int32, np.float32, np.int32, np.int32]


def test_windows_of_a_part_of_the_documents(tmp_path):
    documents = odd_documents(30)
    keep = np.random.default_rng(1).random(30) < 0.5
    got, _ = rows_of(make_store(tmp_path / "a", documents), 8, "documents", keep=keep)
    for ours, theirs in zip(got, oracle([d for d, k in zip(documents, keep) if k], 8, True)):
        assert ours.tolist() == theirs.tolist()


def test_every_token_but_the_first_of_a_document_is_scored_once(tmp_path):
    documents = odd_documents(40)
    got, _ = rows_of(make_store(tmp_path / "a", documents), 16, "documents")
    scored = sorted(got.targets[got.weights > 0].tolist())
    expected = sorted(t for d in documents for t in d[1:])
    assert scored == expected


def test_no_token_is_dropped_by_the_last_row(tmp_path):
    documents = numbered([10, 10, 3])
    got, n = rows_of(make_store(tmp_path / "a", documents), 16, "stream")
    assert n == 2 and got.targets[got.weights > 0].tolist() == list(range(2, 24))
    assert got.segments[1].tolist() == [1] * 7 + [0] * 9 and got.weights[1].sum() == 6


def test_c47_weights_shift_with_the_targets():
    mask, segments = np.array([[0, 0, 1, 1, 1, 0, 1, 1]]), np.array([[1, 1, 1, 1, 1, 2, 2, 2]])
    assert target_weights(segments, mask).tolist() == [[0, 1, 1, 1, 0, 1, 1, 0]]
    assert target_weights(segments).tolist() == [[1, 1, 1, 1, 0, 1, 1, 0]]
    assert target_weights(np.array([[3, 3, 7, 7, 0, 0]])).tolist() == [[1, 0, 1, 0, 0, 0]]


@pytest.mark.parametrize("long, rows", [("drop", [5, 10]), ("truncate", [5, 10, 10]), ("split", [5, 10, 10, 5])])
def test_c49_long_documents(tmp_path, long, rows):
    documents = numbered([5, 10, 15])
    store = make_store(tmp_path / "a", documents)
    got, n = rows_of(store, 10, "rows", long)
    assert [int((r > 0).sum()) for r in got.segments] == rows and n == len(rows)
    assert got.tokens.shape[1] == 10 and set(np.unique(got.segments)) <= {0, 1}
    targets = sorted(got.targets[got.weights > 0].tolist())
    kept = {"drop": documents[:2], "truncate": [*documents[:2], documents[2][:10]], "split": documents}[long]
    assert targets == sorted(t for d in kept for t in d[1:])  # split scores the token after a cut too, and keeps the end token


def test_c49_error_names_the_document(tmp_path):
    store = make_store(tmp_path / "a", numbered([5, 10, 15, 20]))
    with pytest.raises(
        ValueError, match=r"Document 2 of .*a has 15 tokens, more than seq = 10 \(2 documents do\).*drop, truncate or split"
    ):
        rows_of(store, 10, "rows", "error")


def test_dropping_everything_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No document has at most 3 tokens"):
        rows_of(make_store(tmp_path / "a", numbered([5, 10])), 3, "rows", "drop")


def test_one_token_documents_and_empty_ones(tmp_path):
    documents = [[1], [2], [], [3, 4], [5]]
    store = make_store(tmp_path / "a", documents)
    assert tokens_of(stream(store)) == 5
    got, _ = rows_of(store, 4, "documents")
    assert got.segments.tolist() == [[1, 2, 3, 3]] and got.weights.tolist() == [[0, 0, 1, 0]] and got.targets.tolist() == [[2, 3, 4, 5]]
