"""A model family of your own, as a value: 40 lines, trained by the same loop as any other and under any layout.

    python examples/own_model.py [--steps 8]

Attention and an MLP with squared ReLU, no biases and no gains. It names axes and never a device: `c.spec("embed ffn")` is what a weight is,
`dot(lay, "bTd,df->bTf", x, w)` what is multiplied; with `put(lay, "btd->bTd", x)` a layer's inside begins. Text: the paragraphs of Python's own
argparse.py. One device trains, then four simulated ones. About 20 s on two CPU cores. It prints both runs, and

    one device       loss 8.3097 8.2126 8.0904 8.0401 8.0258 8.0502 8.0129 7.8840
    zero3=2 tensor=2 loss 8.3097 8.2126 8.0904 8.0401 8.0258 8.0502 8.0129 7.8840
    largest relative difference: loss 1e-07, norm 1e-07
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax

from meshloom.core.layout import Layout
from meshloom.core.leaf import dot, put
from meshloom.core.spec import stack
from meshloom.core.tree import pytree
from meshloom.data.config import Data, Source
from meshloom.models.attention import Attention, attend
from meshloom.models.base import Ctx, Kind, Model, ModelConfig
from meshloom.models.parts import lookup
from meshloom.models.table import MODELS
from meshloom.ops import rope
from meshloom.ops.act import ACTIVATIONS
from meshloom.recipes import folder, launch
from meshloom.recipes.run import Family, RunConfig
from meshloom.train import metrics
from meshloom.train.config import LogConfig, TrainConfig


@pytree
class Block:  # one layer
    attn: Attention
    up: Any
    down: Any


@pytree
class Plain:  # `embed`, `layers` and `head` are names that the loop knows
    embed: Any
    layers: Block
    head: Any


def specs(c: ModelConfig) -> Plain:
    """The arrays that will exist."""
    return Plain(c.spec("vocab embed"), stack(Block(Attention.specs(c), c.spec("embed ffn"), c.spec("ffn embed")), c.layers), None)


def normed(c: ModelConfig, x: jax.Array) -> jax.Array:
    """x over its root mean square."""
    return x * jax.lax.rsqrt(jax.numpy.mean(x * x, -1, keepdims=True) + c.norm_eps)


def block(c: ModelConfig, lay: Layout, kind: Kind, w: Block, x: jax.Array, ctx: Ctx) -> tuple[jax.Array, Ctx]:
    """x + attention(norm x), then + down relu2(up norm x)."""
    y, cache = attend(c, lay, kind, w.attn, put(lay, "btd->bTd", normed(c, x)), ctx)
    x = x + y
    hidden = ACTIVATIONS["relu2"](dot(lay, "bTd,df->bTf", put(lay, "btd->bTd", normed(c, x)), w.up))
    return x + dot(lay, "bTf,fd->btd", hidden, w.down), dataclasses.replace(ctx, cache=cache)


EMBED = lambda c, lay, w, tokens, ctx: lookup(lay, w.embed, tokens)
ROTARY = lambda c, positions: rope.tables(rope.Rope(), c.head, positions)
MODEL = Model("plain", ModelConfig, specs, EMBED, ROTARY, block, lambda c, lay, w, x: normed(c, x), lambda c: (Kind(),) * c.layers)


def train(layout: str, steps: int, out: Path) -> list[dict]:
    """The lines that a run of the model under a layout wrote into metrics.jsonl."""
    sizes = ModelConfig(layers=2, embed=64, heads=4, kv_heads=2, ffn=256, vocab=4096, max_seq=64)
    data = Data(train=(Source(path=argparse.__file__, format="text", split="paragraph"),), valid=0.05, seq=64)
    run = {"model": Family(family="plain", config=sizes), "data": data, "train": TrainConfig(steps=steps), "log": LogConfig(every=1)}
    launch.train(RunConfig(name="own-model", layout=layout, **run), out)
    return metrics.read(out, "train")


def main() -> None:
    """One device, then four, then both beside each other."""
    asked = argparse.ArgumentParser(description="A model family of your own.")
    asked.add_argument("--steps", type=int, default=8)
    steps, layout, out = asked.parse_args().steps, "zero3=2 tensor=2", folder.fresh("own-model")
    jax.config.update("jax_num_cpu_devices", 4)
    MODELS["plain"] = MODEL
    one, many = train("", steps, out / "one"), train(layout, steps, out / "many")
    for name, lines in (("one device", one), (layout, many)):
        print(f"{name:16} loss " + " ".join(f"{line['loss']:.4f}" for line in lines))
    apart = {key: max(abs(a[key] / b[key] - 1) for a, b in zip(one, many)) for key in ("loss", "norm")}
    print("largest relative difference: " + ", ".join(f"{key} {value:.0e}" for key, value in apart.items()))


if __name__ == "__main__":
    main()
