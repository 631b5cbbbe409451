"""Batches by sample number. The position in the data is one number, the samples drawn so far; nothing else is needed to go on from it.

The stream of samples has no end and no epoch border: a batch that begins in one epoch ends in the next, so none is ever partial and all processes always
have the same number of batches. A set that is read once (`once`: evaluation) fills its last batch up with empty rows of weight 0."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from meshloom.data.mixing import Mixture, Phase, constant
from meshloom.data.packing import PACKINGS, Rows, Stream, read, tokens_of
from meshloom.data.sampler import order


class Drawn(NamedTuple):
    """A batch on the host: what becomes a `core.batch.Batch`, without JAX. All [batch, seq] but samples [batch].

    See packing.Rows; samples int32 are the rows' numbers in the whole run.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    samples: np.ndarray


class Part(NamedTuple):
    """One source, packed."""

    name: str
    stream: Stream
    rows: int  # samples of an epoch
    print: str  # a hash of its tokens and split, to notice at a resume that the data changed


class How(NamedTuple):
    """How rows are cut, ordered and fetched: fields of the data section, and the seed of the order."""

    seq: int
    packing: str = "documents"
    seed: int = 0
    shuffle: bool = True
    prefetch: int = 2
    vocab: int = 2**31
    """Token ids that there are; a row with others is refused."""


class Epochs(NamedTuple):
    """How much of a source so many samples use."""

    name: str
    weight: float
    samples: int
    epochs: float


class Loader:
    """Rows of a weighted mixture of sources in a global random order."""

    def __init__(self, parts: Sequence[Part], mixture: Mixture, how: How):
        self.parts, self.mixture, self.how = tuple(parts), mixture, how

    @property
    def rows(self) -> int:
        """Samples of all sources together."""
        return sum(p.rows for p in self.parts)

    @property
    def tokens(self) -> int:
        """Tokens of all sources together."""
        return sum(tokens_of(p.stream) for p in self.parts)

    def read(self, samples: np.ndarray) -> Drawn:
        """The rows with these numbers: pure, and any numbers in any order.  samples: (batch,)."""
        samples = np.asarray(samples, np.int64)
        source, number = self.mixture.draw(samples)
        out = self._empty(len(samples))
        for s, part in enumerate(self.parts):
            at = np.flatnonzero(source == s)
            if at.size:
                index = order(self.how.seed, s, number[at], part.rows, self.how.shuffle)
                rows = self._rows(part, index)
                self._check(part.name, rows)
                for whole, some in zip(out, rows):
                    whole[at] = some
        return Drawn(*out, samples=samples.astype(np.int32))

    def _check(self, name: str, rows: Rows) -> None:
        """Raises ValueError for ids that the tokenizer does not have: a store from elsewhere is known by its ids alone."""
        low, high = min(rows.tokens.min(), rows.targets.min()), max(rows.tokens.max(), rows.targets.max())
        if low < 0 or high >= self.how.vocab:
            raise ValueError(
                f"Source '{name}' holds token id {low if low < 0 else high}, and the tokenizer has ids 0 to {self.how.vocab - 1}. "
                "It was made with another tokenizer, or is damaged: give the tokenizer that made it, or prepare the data again."
            )

    def _empty(self, rows: int) -> Rows:
        return Rows(*(np.zeros((rows, self.how.seq), t) for t in (np.int32, np.int32, np.float32, np.int32, np.int32)))

    def _rows(self, part: Part, index: np.ndarray) -> Rows:
        packing = PACKINGS[self.how.packing]
        return read(part.stream, packing.pieces(part.stream, index, self.how.seq), len(index), self.how.seq, packing.borders)

    def batches(self, start: int, size: int, rows: slice | np.ndarray = slice(None)) -> Iterator[Drawn]:
        """Batches without end: samples start .. start+size-1, then the next size, and so on, made ready in a thread.

        start counts samples, not steps: after a change of the batch size the next sample is still the next.
        rows: this process's share of each batch, as a slice or an array of places."""
        numbers = np.arange(size)[rows]

        def at(first: int) -> Drawn:
            return self.read(first + numbers)

        with ThreadPoolExecutor(1, "meshloom-loader") as pool:
            ready = deque(pool.submit(at, start + i * size) for i in range(self.how.prefetch))
            following = start + self.how.prefetch * size
            try:
                while True:
                    batch = ready.popleft().result()
                    ready.append(pool.submit(at, following))
                    following += size
                    yield batch
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def once(self, size: int, rows: slice | np.ndarray = slice(None), limit: int = 0) -> Iterator[Drawn]:
        """Every row of every source once, in order, or the first `limit` of them; the last batch is filled up with empty rows (segment 0, weight 0)."""
        count = min(limit or self.rows, self.rows)
        for first in range(0, count, size):
            numbers = np.arange(first, first + size)[rows]
            yield self._placed(np.where(numbers < count, numbers, self.rows))

    def _placed(self, numbers: np.ndarray) -> Drawn:
        """The rows with these numbers, counted over all sources in order; those past the end are empty."""
        ends = np.cumsum([p.rows for p in self.parts])
        source = np.searchsorted(ends, numbers, side="right")
        out = self._empty(len(numbers))
        for s, part in enumerate(self.parts):
            at = np.flatnonzero(source == s)
            if at.size:
                for whole, some in zip(out, self._rows(part, numbers[at] - ends[s] + part.rows)):
                    whole[at] = some
        return Drawn(*out, samples=numbers.astype(np.int32))

    def epochs(self, samples: int) -> tuple[Epochs, ...]:
        """For each source, how often the first `samples` samples go through it."""
        drawn = self.mixture.counts(samples)
        total = sum(self.mixture.phases[-1].weights)
        return tuple(Epochs(p.name, w / total, int(n), n / p.rows) for p, w, n in zip(self.parts, self.mixture.phases[-1].weights, drawn))

    def state(self, sample: int) -> dict[str, Any]:
        """What a checkpoint stores: the position, and what the meaning of a position depends on. Plain JSON."""
        return {
            "sample": sample,
            **{field: getattr(self.how, field) for field in ("seed", "seq", "packing", "shuffle")},
            "sources": [p.print for p in self.parts],
            "phases": [[p.start, list(p.weights)] for p in self.mixture.phases],
        }

    def resume(self, state: dict[str, Any]) -> tuple["Loader", int]:
        """The loader and the sample number to go on with. Weights may have changed: then the new ones hold from that sample on.

        Raises ValueError, naming the field, where samples would be repeated or lost."""
        now = self.state(0)
        for field in ("seed", "seq", "packing", "shuffle", "sources"):
            if now[field] != state[field]:
                raise ValueError(
                    f"The run was started with data {field} = {state[field]!r} and now has {now[field]!r}; sample numbers would mean other rows, "
                    f"so some would be repeated and others lost. Set it back, or start a new run."
                )
        old = Mixture(tuple(Phase(start, tuple(weights)) for start, weights in state["phases"]))
        mixture = old.change(state["sample"], self.mixture.phases[-1].weights)
        return Loader(self.parts, mixture, self.how), state["sample"]


def pack(name: str, s: Stream, *, seq: int, packing: str, long: str = "error", short: bool = False, mark: str = "") -> Part:
    """A source ready for a Loader.  short: less than one row of tokens is enough.

    Raises ValueError where it has less, or the rule for long documents refuses one."""
    if not tokens_of(s):
        raise ValueError(f"Source '{name}' has no documents. Check its path and field, and how many documents were skipped as bad.")
    if not short and packing != "rows" and tokens_of(s) < seq + 1:
        raise ValueError(
            f"Source '{name}' has {tokens_of(s)} tokens, fewer than one row of seq + 1 = {seq + 1}. "
            f"Give more text, or lower data.seq to at most {max(tokens_of(s) - 1, 1)}."
        )
    packed, rows = PACKINGS[packing].plan(s, seq, long)
    return Part(name, packed, rows, mark or f"{len(s.ends)} documents, {tokens_of(s)} tokens")


def loader(parts: Sequence[Part], weights: Sequence[float], how: How) -> Loader:
    """A Loader over packed sources with constant weights."""
    return Loader(parts, constant(tuple(float(w) for w in weights)), how)
