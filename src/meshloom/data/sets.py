"""The training and the held-out set that a recipe's data section means."""

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshloom.data.config import Data, Source
from meshloom.data.loader import How, Loader, Part, loader, pack
from meshloom.data.packing import Stream, stream
from meshloom.data.prepare import store_of
from meshloom.data.sampler import held_out
from meshloom.data.store import Store
from meshloom.data.tokenizer import Tokenizer


class Sets(NamedTuple):
    """What a run reads."""

    train: Loader
    valid: Loader | None  # None where data.valid is 0
    report: tuple[str, ...]  # what was read, and skipped


def open_sets(data: Data, tokenizer: Tokenizer, seed: int, progress: bool = False) -> Sets:
    """Prepares what is not prepared yet, splits by document, packs.  seed: of the order of samples.

    Raises ValueError for missing, empty or too short sources, and where the held-out set would be empty."""
    stores = [store_of((s,), tokenizer, data, progress=progress) for s in data.train]
    report = [line for p in stores for line in p.report]
    fraction = 0.0 if isinstance(data.valid, tuple) else data.valid
    masks = [held_out(data.split_seed, len(p.store), fraction) for p in stores]
    train = [part(data, s, p.store, ~m) for s, p, m in zip(data.train, stores, masks)]
    how = How(data.seq, data.packing, seed, data.shuffle, data.prefetch, tokenizer.size)
    main = loader(train, [s.weight for s in data.train], how)
    valid = valid_parts(data, tokenizer, [p.store for p in stores], masks, progress, report)
    return Sets(main, loader(valid, [1.0] * len(valid), how._replace(shuffle=False)) if valid else None, tuple(report))


def open_held_out(data: Data, tokenizer: Tokenizer, progress: bool = False) -> Loader | None:
    """The held-out set alone, None where data.valid is 0: what a finished model is scored on, which may be shorter than a row."""
    if isinstance(data.valid, tuple):
        parts = valid_parts(data, tokenizer, (), (), progress, [])
        return loader(parts, [1.0] * len(parts), How(data.seq, data.packing, 0, False, data.prefetch, tokenizer.size))
    return open_sets(data, tokenizer, 0, progress).valid


def valid_parts(
    data: Data, tokenizer: Tokenizer, stores: Sequence[Store], masks: Sequence[np.ndarray], progress: bool, report: list[str]
) -> list[Part]:
    """The parts of the held-out set, none where data.valid is 0."""
    if isinstance(data.valid, tuple):
        made = [store_of((s,), tokenizer, data, progress=progress) for s in data.valid]
        report.extend(line for p in made for line in p.report)
        return [part(data, s, p.store, None, short=True) for s, p in zip(data.valid, made)]
    if data.valid == 0:
        return []
    chosen = [(s, store, m) for s, store, m in zip(data.train, stores, masks) if m.any()]
    if not chosen:
        total = sum(len(m) for m in masks)
        raise ValueError(
            f"The held-out set is empty: data.valid = {data.valid} of {total} documents chose none. Raise data.valid, "
            f"cut plain text in more documents (the source's split: paragraph), give data.valid a path, or set it to 0 for none."
        )
    return [part(data, s, store, m, short=True) for s, store, m in chosen]


def part(data: Data, source: Source, store: Store, keep: np.ndarray | None, short: bool = False) -> Part:
    """A source's documents, packed.  short: less than one row is enough (a held-out set is padded)."""
    s = stream(store, keep)
    if keep is not None and len(keep) and not len(s.ends):
        raise ValueError(
            f"All {len(keep)} documents of '{source.path}' are held out (data.valid = {data.valid}), none is left to train on. "
            "Lower data.valid, or cut the text in more documents."
        )
    return pack(source.path, s, seq=data.seq, packing=data.packing, long=data.long, short=short, mark=mark(data, store, s))


def mark(data: Data, store: Store, s: Stream) -> str:
    """A hash that changes when a source's rows do: a resume compares it."""
    made_with = store.meta.get("made_with") or [len(store.tokens), store.lengths[:1000].tolist()]
    what = [made_with, data.valid if isinstance(data.valid, float) else 0, data.split_seed, data.long, len(s.ends)]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def describe(train: Loader, valid: Loader | None, samples: int) -> list[str]:
    """What a run of so many samples reads, as sentences: rows and tokens, and epochs of every source."""
    out = [f"train: {train.tokens:,} tokens in {train.rows:,} rows of {train.how.seq} ({train.how.packing})"]
    out += [f"valid: {valid.tokens:,} tokens in {valid.rows:,} rows"] if valid else ["valid: none"]
    return out + [f"  {e.name}: {e.weight:.4g} of the samples, {e.samples:,} rows, {e.epochs:.2f} epochs" for e in train.epochs(samples)]
