"""Meshloom's programs for the benchmarks: `python benchmarks/ours.py {export,train,decode} SHAPE [FOLDER]`.

They are the product's own step and engine, started as the command line starts them (allocator settings first).
"""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from shapes import BETAS, CLIP, DECAY, LEARNING_RATE, SHAPES, Shape, tokens
from turns import Turns


def build(shape: Shape) -> tuple[Any, Any]:
    """(model, configuration)."""
    from meshloom.models.table import MODELS

    model = MODELS[shape.model["family"]]
    return model, model.Config(**shape.model)


def export(shape: Shape, folder: str) -> None:
    """Starting weights as a Hugging Face folder, for every program to begin with."""
    import jax

    from meshloom.core.spec import init
    from meshloom.weights import hf

    model, c = build(shape)
    hf.save(folder, model, c, init(model.specs(c), jax.random.key(0)), overwrite=True)


def loaded(folder: str) -> Any:
    """The weights of a Hugging Face folder."""
    from meshloom.weights.hf import open_folder
    from meshloom.weights.load import load

    return load(open_folder(folder)).weights


def make_step(shape: Shape) -> Any:
    """The product's train step on one device for one stream of tokens (no documents to keep apart, as the peers have none), and a function that
    gives the batch of a step."""
    import jax.numpy as jnp
    import numpy as np

    from meshloom.core.batch import Batch
    from meshloom.core.layout import ONE_DEVICE
    from meshloom.core.mesh import make_mesh
    from meshloom.objectives.lm import lm
    from meshloom.plan.plan import Plan
    from meshloom.runner.run import How
    from meshloom.train.config import OptimizerConfig, TrainConfig
    from meshloom.train.step import make_step

    model, c = build(shape)
    plan = Plan(make_mesh(ONE_DEVICE), ONE_DEVICE, How("unroll"), 1, "float32", False)
    optimizer = OptimizerConfig(lr=LEARNING_RATE, weight_decay=DECAY, beta1=BETAS[0], beta2=BETAS[1])
    train = TrainConfig(steps=1000, clip=CLIP)
    step = make_step(model, c, plan, lm(), optimizer, lambda done: jnp.float32(LEARNING_RATE), train, 0, 1)
    size = (1, shape.batch, shape.seq)

    def batch(i: int) -> Batch:
        ids = tokens(shape, i).astype(np.int32)[None]
        where = np.broadcast_to(np.arange(shape.seq, dtype=np.int32), size)
        rows = np.arange(shape.batch, dtype=np.int32)[None]
        return Batch(ids[..., :-1], ids[..., 1:], np.ones(size, np.float32), None, where, rows)

    return step, batch


def train(turns: Turns, shape: Shape, folder: str) -> None:
    """One optimizer step a turn."""
    step, batch = make_step(shape)
    held = {"state": step.start(loaded(folder)), "i": 0}

    def work() -> dict[str, Any]:
        held["state"], told = step.run(held["state"], batch(held["i"]))
        held["i"] += 1
        return {"loss": float(told["loss"]) / float(told["tokens"])}

    turns.loop(work)


def decode(turns: Turns, shape: Shape, folder: str, new: int = 128, prompt: int = 32) -> None:
    """One greedy continuation of one prompt a turn, by the product's engine."""
    import numpy as np

    from meshloom.core.layout import ONE_DEVICE
    from meshloom.core.mesh import make_mesh
    from meshloom.serve.engine import make_engine
    from meshloom.serve.sampling import Sampling, uses, wants

    model, c = build(shape)
    new, prompt = min(new, c.max_seq // 2), min(prompt, c.max_seq // 4)
    engine = make_engine(model, c, make_mesh(ONE_DEVICE), ONE_DEVICE)
    w = engine.prepare(loaded(folder))
    asked = [Sampling(tokens=new, ignore_end=True)]
    want, use = wants(asked, (), c.vocab), uses(asked)
    ids = tokens(shape, 0)[:1, :prompt].astype(np.int32)

    def work() -> dict[str, Any]:
        lengths, until = np.array([prompt], np.int32), np.int32(prompt + new - 1)
        held, _ = engine.start(w, ids, lengths, want, length=prompt + new, use=use, chunk=prompt)
        _, report = engine.more(w, held, want, np.zeros(1, bool), until, use=use)
        return {"ids": np.asarray(report.tokens)[0, prompt:].tolist()}

    turns.loop(work, new=new)


WORK = {"train": train, "decode": decode}


def main(job: str, name: str, folder: str) -> None:
    """Runs one program."""
    turns = Turns()
    from meshloom.core import malloc

    malloc.tune()
    if job == "export":
        return export(SHAPES[name], folder)
    return WORK[job](turns, SHAPES[name], folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
