"""A look into a token store: counts, lengths, decoded samples."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshloom.data.config import Tokenizer as TokenizerSection
from meshloom.data.prepare import open_store
from meshloom.data.sampler import order
from meshloom.data.store import Store, prefix_of
from meshloom.data.tokenizer import Tokenizer, load

POINTS = {"shortest": 0, "quarter": 25, "median": 50, "three quarters": 75, "95 %": 95, "longest": 100}
SHOWN = 64  # tokens of a document that are shown


class Inspection(NamedTuple):
    """What a token store holds."""

    documents: int
    tokens: int
    dtype: str
    lengths: dict[str, int]  # points of the distribution, in tokens
    sample: list[str]  # the beginnings of some documents: decoded, or ids where the tokenizer is not known
    report: list[str]  # what was read and skipped when the store was made

    def lines(self) -> list[str]:
        """The inspection as text."""
        lengths = ", ".join(f"{name} {n:,}" for name, n in self.lengths.items())
        counts = f"{self.documents:,} documents, {self.tokens:,} tokens ({self.dtype})"
        return [*self.report, counts, f"document lengths in tokens: {lengths}", *(f"> {s}" for s in self.sample)]


def inspect(store: Store, tokenizer: Tokenizer | None, sample: int = 1, seed: int = 0) -> Inspection:
    """Counts, lengths, and the beginnings of `sample` documents that the seed picks."""
    _, length = store.spans
    lengths = {name: int(np.percentile(length, q, method="nearest")) for name, q in POINTS.items()} if len(length) else {}
    chosen = order(seed, 0, np.arange(min(sample, len(length))), max(len(length), 1))
    ids = [store.document(int(i))[:SHOWN].tolist() for i in chosen]
    shown = [repr(tokenizer.decode(i)) if tokenizer else f"ids {i}" for i in ids]
    return Inspection(len(length), int(length.sum()), store.dtype.name, lengths, shown, store.meta.get("report", []))


def tokenizer_of(store: Store) -> Tokenizer | None:
    """The tokenizer that the store was made with, if the store tells and it is still what it was; else None."""
    if "tokenizer" not in store.meta:
        return None
    try:
        section = TokenizerSection(**store.meta["tokenizer"])
        tokenizer = load(section.path, section)
        open_store(store.prefix, tokenizer)
    except ValueError:
        return None
    return tokenizer


def show(prefix: str | Path, sample: int = 1, seed: int = 0) -> None:
    """What `meshloom data inspect` does: prints a store's counts, lengths, and `sample` documents."""
    store = Store(prefix_of(prefix))
    tokenizer = tokenizer_of(store)
    print("\n".join(inspect(store, tokenizer, sample, seed).lines()))
    if tokenizer is None:
        print("The tokenizer that made this store is not known or not there any more, so ids are shown in place of text.")
