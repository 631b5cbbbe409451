"""What a train step keeps on a TPU and on its host under each pattern of remat, by the compiler: steps for a topology that is not there.

pip install "jax[tpu]" && python benchmarks/remat_tpu.py [pattern ...]

Adds a line to remat_tpu.jsonl for each pattern that has none. Two cores take half a minute to some minutes each.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import tpu

MODEL = {"family": "llama", "layers": 8, "embed": 1024, "heads": 8, "kv_heads": 8, "ffn": 2816, "vocab": 8192, "max_seq": 1024}
TOPOLOGY, LAYOUT, SEQ, SEQUENCES = "v5e:2x4", "zero3=8", 1024, 64
PATTERNS = ("selective", "offload", "none", "full", "full 4, none 4", "full 4, offload 4", "full:2", "none 4, full 4")
OUT = Path(__file__).with_suffix(".jsonl")


def main() -> None:
    """Compiles what is asked for and is not there yet."""
    there = tpu.devices(TOPOLOGY)
    done = {json.loads(line)["remat"] for line in OUT.read_text().splitlines()} if OUT.exists() else set()
    for remat in sys.argv[1:] or PATTERNS:
        if remat in done:
            continue
        job = tpu.Job(MODEL, LAYOUT, SEQ, SEQUENCES, 1, remat)
        found = tpu.step(job, there).memory_analysis()
        row = {
            "jax": version("jax"),
            "libtpu": version("libtpu"),
            "topology": TOPOLOGY,
            "layout": LAYOUT,
            "seq": SEQ,
            "sequences": SEQUENCES,
            "remat": remat,
        }
        row |= {"temp": found.temp_size_in_bytes, "host": found.host_temp_size_in_bytes, "arguments": found.argument_size_in_bytes}
        with OUT.open("a") as file:
            print(json.dumps(row), file=file)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
