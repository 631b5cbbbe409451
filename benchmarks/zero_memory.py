"""What each stage of ZeRO keeps in memory, by the compiler's own number: train steps compiled for a TPU topology, which needs no TPU.

pip install "jax[tpu]" && python benchmarks/zero_memory.py [--topology v5e:2x4] [--layouts zero1=8,zero2=8] [--micro 1,4]
"""

import argparse

from tpu import Job, devices, step

MODEL = {"family": "llama", "layers": 8, "embed": 1024, "heads": 16, "kv_heads": 16, "ffn": 2816, "vocab": 16384, "max_seq": 512}
SEQ, ROWS = 256, 1
"""Tokens of a row; rows of a micro-batch on one device: few, so that weights and gradients are what fills the memory."""
HEAD = ("layout", "micro-batches", "state, MiB", "in a step, MiB", "all, MiB")


def measured(layout: str, micro: int, there: list) -> tuple[int, int]:
    """(bytes of the state on a device, bytes that a step adds to it)."""
    sequences = ROWS * len(there) * micro
    memory = step(Job(MODEL, layout, SEQ, sequences, micro), there).memory_analysis()
    return memory.argument_size_in_bytes, memory.temp_size_in_bytes


def main() -> None:
    """Prints the table of docs/layouts/zero.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--layouts", default="data=8,zero1=8,zero2=8,zero3=8,zero1=2 zero3=4")
    parser.add_argument("--micro", default="1,4")
    given = parser.parse_args()
    there = devices(given.topology)
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
    for layout in given.layouts.split(","):
        for micro in map(int, given.micro.split(",")):
            kept, more = (n / 2**20 for n in measured(layout, micro, there))
            print(f"| `{layout}` | {micro} | {kept:,.1f} | {more:,.1f} | {kept + more:,.1f} |", flush=True)


if __name__ == "__main__":
    main()
