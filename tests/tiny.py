"""A recipe so small that a test can train it: its own text, the shipped tokenizer, two layers."""

import random
from pathlib import Path
from typing import Any

from meshloom.core.config import load, merge
from meshloom.recipes.run import RunConfig

WORDS = "the sea was calm and a ship came in from far away with salt on its sails while every man aboard sang of home".split()


def text(folder: Path, documents: int = 60) -> Path:
    """A file of paragraphs of odd lengths, the same every time."""
    path = folder / "text.txt"
    if not path.exists():
        pick = random.Random(7)
        path.write_text("\n\n".join(" ".join(pick.choices(WORDS, k=pick.randint(5, 70))) for _ in range(documents)))
    return path


def recipe(folder: Path, **over: Any) -> RunConfig:
    """A tiny run on a tiny text in `folder`. over: sections to merge in."""
    base = {
        "name": "tiny",
        "model": {"family": "llama", "layers": 2, "embed": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 4099, "max_seq": 32},
        "data": {
            "train": [{"path": str(text(folder)), "split": "paragraph"}],
            "valid": 0.1,
            "seq": 32,
            "cache": str(folder / "cache"),
            "workers": 1,
        },
        "batch": {"sequences": 4},
        "optimizer": {"lr": 1e-2},
        "schedule": {"kind": "constant"},
        "train": {"steps": 6, "runner": "scan"},
        "checkpoint": {"every": 2, "keep_last": 5},
        "log": {"every": 2, "tensorboard": False, "plot": False},
        "layout": "",
    }
    return load(RunConfig, merge(base, over))
