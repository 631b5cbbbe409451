"""How long the planner searches, in seconds of the cores that work for it: python benchmarks/plan_speed.py"""

import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from meshloom.plan.search import search
from meshloom.recipes.plan import Wish, ask

CASES = (
    ("llama3-8b", "h100:1x8", "4M", 8192),
    ("llama3-70b", "h100:8x8", "4M", 8192),
    ("llama3-70b", "h100:128x8", "4M", 8192),
    ("llama3-70b", "v5p:8x8x8", "4M", 8192),
    ("mixtral-8x7b", "h100:16x8", "4M", 8192),
    ("deepseek-v3", "h100:256x8", "16M", 4096),
    ("llama3-405b", "h100:2048x8", "16M", 8192),
    ("gpt2-xl", "h100:2048x8", "16M", 1024),
)
"""Model, cluster, tokens of a step, of a sequence."""


def main() -> None:
    """Prints the table of docs/plan.md."""
    print("| model | cluster | devices | candidates | priced exactly | best | seconds |\n|---|---|---|---|---|---|---|", flush=True)
    for model, on, batch, seq in CASES:
        q = ask(Wish(model, on, batch, seq)).question
        begin = time.process_time()
        found = search(q)
        took, best = time.process_time() - begin, found.best.spelling if found.best else "nothing fits"
        print(f"| {model} | {on} | {q.cluster.devices:,} | {found.space:,} | {found.priced:,} | `{best}` | {took:.1f} |", flush=True)


if __name__ == "__main__":
    main()
