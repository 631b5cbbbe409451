"""From documents to rows of tokens. A sample is a row; which documents it holds is a pure function of its index.

A *stream* is the documents of a set, one after another, each with its end token. Packing `documents` and `stream` cut it in windows: row i holds the
tokens i*seq .. i*seq+seq, the last being only a target, so that every token but the stream's first is a target once an epoch. The last row of an epoch
is filled up with padding: no token is dropped. Packing `rows` gives every document a row of its own."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from meshloom.data.store import Store


class Rows(NamedTuple):
    """A batch of rows, all [batch, seq]."""

    tokens: np.ndarray  # int32
    targets: np.ndarray  # int32: the next token
    weights: np.ndarray  # float32, 1 where the target counts: in the same document, and not padding
    segments: np.ndarray  # int32: 1, 2, ... in a row; 0 is padding
    positions: np.ndarray  # int32: from 0 in every segment


class Stream(NamedTuple):
    """Some documents of a store, seen one after another."""

    store: Store
    starts: np.ndarray  # (documents,) first token in the store
    ends: np.ndarray  # (documents,) tokens of the stream up to and with this document


class Pieces(NamedTuple):
    """Runs of tokens, in the order of the rows that they fill: all (pieces,)."""

    row: np.ndarray
    start: np.ndarray  # in the store
    length: np.ndarray


def stream(store: Store, keep: np.ndarray | None = None) -> Stream:
    """The documents of a store, or those where `keep` (documents,) bool is set."""
    starts, lengths = store.spans
    if keep is not None:
        starts, lengths = starts[keep], lengths[keep]
    return Stream(store, starts, np.cumsum(lengths))


def tokens_of(s: Stream) -> int:
    """Tokens in the stream."""
    return int(s.ends[-1]) if len(s.ends) else 0


def window_count(s: Stream, seq: int) -> int:
    """Rows of an epoch for `documents` and `stream`, the last filled up with padding."""
    return max(1, -(-(tokens_of(s) - 1) // seq))


def window_pieces(s: Stream, index: np.ndarray, seq: int) -> Pieces:
    """The pieces of documents in the windows with these indices.  index: (rows,)."""
    begin = index * seq
    end = np.minimum(begin + seq + 1, tokens_of(s))
    first = np.searchsorted(s.ends, begin, side="right")
    last = np.searchsorted(s.ends, end - 1, side="right")
    per_row = last - first + 1
    row = np.repeat(np.arange(len(index)), per_row)
    doc = np.arange(len(row)) + np.repeat(first - (np.cumsum(per_row) - per_row), per_row)
    doc_end = s.ends[doc]
    doc_begin = np.where(doc > 0, s.ends[doc - 1], 0)
    from_ = np.maximum(doc_begin, begin[row])
    return Pieces(row, s.starts[doc] + from_ - doc_begin, np.minimum(doc_end, end[row]) - from_)


def fill(tokens: np.ndarray, pieces: Pieces, rows: int, width: int, borders: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copies pieces into rows: tokens, segments, positions, each (rows, width) int32, zero where nothing was copied.

    borders: each piece is a segment with positions of its own; else a row is one segment."""
    row, start, length = pieces
    flat = np.cumsum(length) - length  # where a piece begins, counted over all pieces
    first = np.searchsorted(row, row)  # the first piece of the same row
    column = flat - flat[first]
    total = int(length.sum())
    step = np.arange(total)
    to = step + np.repeat(row * width + column - flat, length)
    out = [np.zeros(rows * width, np.int32) for _ in range(3)]
    out[0][to] = tokens[step + np.repeat(start - flat, length)]
    out[1][to] = np.repeat(np.arange(len(row)) - first + 1 if borders else np.ones(len(row), np.int64), length)
    out[2][to] = step - np.repeat(flat if borders else flat[first], length)
    return tuple(a.reshape(rows, width) for a in out)  # type: ignore[return-value]


def target_weights(segments: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """Weight of each position's target, the next token: [batch, n] -> [batch, n] float32 of 0 and 1; the last is 0.

    1 where the next token is in the same segment, not padding, and `mask` (over tokens, e.g. the answer of a dialogue) is set for it."""
    following = segments[:, 1:]
    scored = (following == segments[:, :-1]) & (following > 0)
    if mask is not None:
        scored &= np.asarray(mask)[:, 1:] > 0
    return np.pad(scored, ((0, 0), (0, 1))).astype(np.float32)


def read(s: Stream, pieces: Pieces, rows: int, seq: int, borders: bool) -> Rows:
    """The rows that these pieces fill."""
    tokens, segments, positions = fill(s.store.tokens, pieces, rows, seq + 1, borders)
    weights = target_weights(segments)[:, :-1]
    return Rows(tokens[:, :-1], tokens[:, 1:], weights, segments[:, :-1], positions[:, :-1])


class Packing(NamedTuple):
    """How a stream becomes rows: one row of PACKINGS."""

    plan: Callable[[Stream, int, str], tuple[Stream, int]]  # (stream, seq, rule for long documents) -> what `pieces` reads, rows an epoch
    pieces: Callable[[Stream, np.ndarray, int], Pieces]
    borders: bool


def plan_windows(s: Stream, seq: int, long: str) -> tuple[Stream, int]:
    """Windows need no plan: their count."""
    return s, window_count(s, seq)


def plan_rows(s: Stream, seq: int, long: str) -> tuple[Stream, int]:
    """The rows that documents become under the rule for long ones, as a stream whose 'documents' are those rows."""
    lengths = np.diff(s.ends, prepend=0)
    starts, lengths = LONG[long](s, lengths, seq)
    if not len(starts):
        raise ValueError(
            f"No document has at most {seq} tokens, so packing `rows` with long: drop leaves nothing. Raise data.seq, or use long: split."
        )
    return Stream(s.store, starts, np.cumsum(lengths)), len(starts)


def row_pieces(s: Stream, index: np.ndarray, seq: int) -> Pieces:
    """One piece a row."""
    return Pieces(np.arange(len(index)), s.starts[index], s.ends[index] - np.where(index > 0, s.ends[index - 1], 0))


def long_error(s: Stream, lengths: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """Refuses documents of more than seq tokens."""
    if (lengths > seq).any():
        worst = int(np.argmax(lengths > seq))
        raise ValueError(
            f"Document {worst} of {s.store.prefix} has {lengths[worst]} tokens, more than seq = {seq} ({int((lengths > seq).sum())} documents do). "
            f"Raise data.seq, or set data.long to drop, truncate or split."
        )
    return s.starts, lengths


def long_drop(s: Stream, lengths: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """Leaves documents of more than seq tokens out."""
    return s.starts[lengths <= seq], lengths[lengths <= seq]


def long_truncate(s: Stream, lengths: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """Keeps the first seq tokens; a document that is cut loses its end token."""
    return s.starts, np.minimum(lengths, seq)


def long_split(s: Stream, lengths: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of seq tokens, each with the token after it as its last target, so that every token but a document's first is a target once."""
    rows = np.maximum(1, -(-(lengths - 1) // seq))
    part = np.arange(int(rows.sum())) - np.repeat(np.cumsum(rows) - rows, rows)
    left = np.repeat(lengths, rows) - part * seq
    return np.repeat(s.starts, rows) + part * seq, np.minimum(left, seq + 1)


LONG = {"error": long_error, "drop": long_drop, "truncate": long_truncate, "split": long_split}
PACKINGS = {
    "documents": Packing(plan_windows, window_pieces, True),
    "stream": Packing(plan_windows, window_pieces, False),
    "rows": Packing(plan_rows, row_pieces, True),
}
