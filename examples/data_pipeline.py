"""From raw JSONL with broken lines to packed batches: what is skipped, how sources mix, where documents end, how a run goes on.

    python examples/data_pipeline.py [--out FOLDER]

Input: the modules of Python's standard library, written as JSONL, one of them to a line, with seven lines broken on purpose; and the corpus that
ships. Nothing here imports JAX: batches are NumPy arrays, and any framework may read them.

About 8 s on two CPU cores. It prints, beside others,

    1. stop: OUT/python.jsonl:7: broken JSON: the line is not valid JSON (Unterminated string starting at, column 10). Mend it, or set ...
       skip: 80 documents, 2,256,446 characters; 6 skipped as bad
       the first 1,000 samples: {0: 750, 1: 250}; the first twelve: [0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1]
    5. resume at sample 24 with batches of 16: the same rows as the 4th and the 5th batch of 8
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np

from meshloom.data.config import Data, Source
from meshloom.data.sets import describe, open_sets
from meshloom.data.tokenizer import load

BROKEN = (b'{"text": "no end', b'["a list"]', b'{"body": "another field"}', b'{"text": 7}', b'{"text": "  "}', b'{"text": "\xff"}', b"")


def write_jsonl(path: Path) -> int:
    """Writes some modules of the standard library, a broken line after each tenth.  Returns how many good lines there are."""
    modules = sorted(Path(argparse.__file__).parent.glob("*.py"))[:80]
    with path.open("wb") as out:
        for i, module in enumerate(modules):
            out.write(json.dumps({"text": module.read_text(encoding="utf-8"), "name": module.name}).encode() + b"\n")
            if i % 10 == 5 and i // 10 < len(BROKEN):
                out.write(BROKEN[i // 10] + b"\n")
    return len(modules)


def main() -> None:
    """The pipeline, a stage at a time."""
    asked = argparse.ArgumentParser(description="From raw JSONL to packed batches.")
    asked.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "meshloom-pipeline")
    out = asked.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    good = write_jsonl(out / "python.jsonl")
    tokenizer = load("shipped")

    # 1. Bad lines end a run at once, unless it says that they may be skipped.
    sources = (Source(path=str(out / "python.jsonl"), weight=3), Source(path="corpus", weight=1))
    try:
        open_sets(Data(train=sources, seq=256, cache=str(out / "cache")), tokenizer, seed=0)
    except ValueError as error:
        print(f"1. stop: {str(error).replace(str(out), 'OUT')}")
    data = Data(train=sources, seq=256, on_bad="skip", cache=str(out / "cache"))
    train, valid, report = open_sets(data, tokenizer, seed=0)
    print("   skip: " + "\n         ".join(line.replace(str(out), "OUT") for line in report))
    assert report[0].startswith(f"{good} documents")

    # 2. A store is Megatron's .bin and .idx, read through memory: a document is a slice of it.
    store = train.parts[0].stream.store
    print(f"2. store: {len(store)} documents, {len(store.tokens):,} tokens of {store.tokens.dtype} in {Path(store.prefix).name}.bin")
    print(f"   document 3 begins {tokenizer.decode(store.document(3)[:12])!r}")

    # 3. Sample n is a pure function of n and the seed; weights are shares of the samples, exact at every moment.
    print("3. " + "\n   ".join(describe(train, valid, samples=1000)).replace(str(out), "OUT"))
    source, _ = train.mixture.draw(np.arange(1000))
    print(f"   the first 1,000 samples: {dict(sorted(Counter(source.tolist()).items()))}; the first twelve: {source[:12].tolist()}")

    # 4. A row is a window over documents. Segments number them, positions restart, and no target crosses a border.
    batch = next(train.batches(start=0, size=8))
    row = int(np.argmax(batch.segments[:, -1]))
    border = int(np.flatnonzero(np.diff(batch.segments[row]))[0])
    cut = slice(border - 2, border + 4)
    print(f"4. batch: tokens {batch.tokens.shape}, {int(batch.weights.sum()):,} targets scored of {batch.weights.size:,}")
    print(f"   row {row} holds {int(batch.segments[row].max())} documents; around the first border, at {border}:")
    for name in ("tokens", "targets", "weights", "segments", "positions"):
        print(f"   {name:9} {getattr(batch, name)[row, cut].astype(int).tolist()}")
    assert batch.weights[row, border] == 0 and batch.positions[row, border + 1] == 0

    # 5. A checkpoint keeps one number. From there on, with another batch size and other weights, every sample still comes once.
    seen = [b.tokens for b in islice(train.batches(start=0, size=8), 5)]
    resumed, start = train.resume(train.state(sample=24))
    again = next(resumed.batches(start, size=16)).tokens
    assert (again == np.concatenate(seen[3:])).all()
    print(f"5. resume at sample {start} with batches of 16: the same rows as the 4th and the 5th batch of 8")
    assert "jax" not in sys.modules


if __name__ == "__main__":
    main()
