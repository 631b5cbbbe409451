"""Small stores and readings of rows in plain Python."""

import numpy as np

from meshloom.data.loader import How, loader, pack
from meshloom.data.packing import stream
from meshloom.data.store import Writer


def make_store(prefix, documents):
    with Writer(prefix, np.dtype("<u2")) as out:
        for d in documents:
            out.add(d)
        return out.finish({})


def numbered(lengths):
    """Documents whose tokens are all different: 1, 2, 3 ..."""
    ends = np.cumsum(lengths)
    return [list(range(e - n + 1, e + 1)) for n, e in zip(lengths, ends)]


def odd_documents(count, seed=0, longest=40):
    return numbered(np.random.default_rng(seed).integers(1, longest, count).tolist())


def load(tmp_path, *sets, seq=16, packing="documents", weights=None, long="error", **how):
    parts = [
        pack(f"s{i}", stream(make_store(tmp_path / f"s{i}", docs)), seq=seq, packing=packing, long=long) for i, docs in enumerate(sets)
    ]
    return loader(parts, weights or [1.0] * len(parts), How(seq, packing, **how))
