"""The collectives of programs compiled for a TPU topology, beside the formula: true reduce-scatters and asynchronous forms, which CPUs do not have.

pip install "jax[tpu]" && python benchmarks/tpu_traffic.py [--topology v5e:2x4] [--layouts zero3=8,tensor=4]
"""

import argparse

from tpu import Job, devices, traffic

MODEL = {"family": "llama", "layers": 4, "embed": 1024, "heads": 16, "kv_heads": 16, "ffn": 2816, "vocab": 8192, "max_seq": 512}
LAYOUTS = ("data=8", "zero1=8", "zero2=8", "zero3=8", "zero1=2 zero3=4", "zero3=8:qw8,qg4", "tensor=8", "tensor=8 sequence")
SEQ, SEQUENCES, MICRO = 256, 16, 2
HEAD = ("layout", "kind", "over", "arrays", "formula", "bytes", "formula")


def rows(layout: str, there: list) -> list[tuple]:
    """The lines of one layout, and their sum."""
    lines = traffic(Job(MODEL, layout, SEQ, SEQUENCES, MICRO), there)
    cells = [(x.kind, " x ".join(x.axes), x.found[0], x.formula[0], x.found[1], x.formula[1]) for x in lines]
    sums = ("all", "", *(sum(cell[i] for cell in cells) for i in range(2, 6)))
    return [(layout, *cell) for cell in [*cells, sums]]


def main() -> None:
    """Prints the table of docs/layouts/zero.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--layouts", default=";".join(LAYOUTS), help="separated by semicolons")
    given = parser.parse_args()
    there = devices(given.topology)
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
    for layout in given.layouts.split(";"):
        for name, kind, over, *numbers in rows(layout, there):
            print("| " + " | ".join((f"`{name}`" if kind != "all" else "", kind, over, *(f"{n:,}" for n in numbers))) + " |", flush=True)


if __name__ == "__main__":
    main()
