"""Bounds are never above what they bound: random candidates of all families and machines, priced."""

import random

import numpy as np
import pytest

from meshloom.models.known import known
from meshloom.parallel.schedules import make
from meshloom.parallel.slots import compile
from meshloom.plan.bounds import Bounds, places
from meshloom.plan.hardware import read
from meshloom.plan.memory import stored
from meshloom.plan.search import Candidate, Question, price
from meshloom.plan.space import Allowed, meshes, patterns, sieve
from plan.questions import CPU, FAMILIES, GPU, TPU, question

NEAR = 1e-9
"""Sums of the same numbers in another order."""


def sample(q, pick: random.Random, most: int) -> int:
    """Holds some candidates of a question against their bounds.  Returns how many were priced."""
    bounds, done = Bounds(q), 0
    every = list(patterns(q.config, q.allowed))
    pick.shuffle(every)
    for p in every:
        sizes = meshes(p, q.cluster.devices)
        ok = sieve(q.config, q.seq, q.sequences, p, sizes)
        if not ok.any():
            continue
        sizes = {axis: n[ok] for axis, n in sizes.items()}
        floor = bounds.meshes(p, sizes)
        at = pick.randrange(len(floor.time))
        mesh = {axis: int(n[at]) for axis, n in sizes.items()}
        choices = bounds.choices(p, mesh)
        assert len(choices) == floor.choices[at]
        for choice in pick.sample(choices, min(2, len(choices))):
            spelling = p.spell(mesh, choice.pipe)
            try:
                one = price(q, spelling, choice.micro, choice.remat)
            except ValueError:
                continue
            assert isinstance(one, Candidate)
            said = f"{spelling} in {choice.micro}, {choice.remat}"
            assert choice.time <= one.time.total * (1 + NEAR), f"{said}: {choice.time} > {one.time.total}"
            assert choice.memory <= one.memory.total * (1 + NEAR), f"{said}: {choice.memory} > {one.memory.total}"
            assert floor.time[at] <= choice.time * (1 + NEAR), f"{said}: mesh {floor.time[at]} > {choice.time}"
            assert floor.memory[at] <= choice.memory * (1 + NEAR), f"{said}: mesh {floor.memory[at]} > {choice.memory}"
            done += 1
        if done >= most:
            break
    return done


@pytest.mark.parametrize("h", [GPU, TPU, CPU], ids=lambda h: h.platform)
@pytest.mark.parametrize("family", FAMILIES)
def test_small_models(family: str, h) -> None:
    q = question(family, h, 16, sequences=32)
    assert sample(q, random.Random(f"{family} {h.name}"), 60) >= 50


@pytest.mark.parametrize("name, on, sequences", [
    ("llama3-70b", "h100:128x8", 512), ("deepseek-v3", "h100:64x8", 1024), ("mixtral-8x7b", "v5p:8x8x8", 1024), ("pythia-12b", "a100:8x8", 512),
    ("mistral-7b", "v5e:16x16", 512),
])  # fmt: skip
def test_large_models(name: str, on: str, sequences: int) -> None:
    model, c = known(name)
    specs = model.specs(c)
    twice = lambda lay: {"optimizer": 2 * stored(lay, specs)}
    q = Question(
        model, c, read(on), min(4096, c.max_seq), sequences, "bfloat16", False, twice, Allowed(schedules=("1f1b", "interleaved2", "zb"))
    )
    assert sample(q, random.Random(name), 15) >= 15


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved2", "interleaved4", "zb"])
def test_a_stage_keeps_at_least_so_many_inputs(name: str) -> None:
    for stages in (2, 3, 4, 8):
        for micro in (stages, 2 * stages, 4 * stages):
            table = compile(make(name, stages, micro))
            assert places(name, stages, micro, table.schedule.chunks) <= table.sizes["kept"]


def test_the_bound_is_near() -> None:
    """A bound that is far below would be true and of no use: for a large model it is within a fifth of the truth for half of the candidates."""
    model, c = known("llama3-70b")
    q = Question(
        model, c, read("h100:128x8"), 8192, 512, "bfloat16", False, lambda lay: {}, Allowed(strategies=("zero3", "tensor", "sequence"))
    )
    bounds, ratios = Bounds(q), []
    for spelling, mesh in (
        ("zero3=512 tensor=2 sequence", {"zero3": 512, "tensor": 2}),
        ("zero3=128 tensor=8 sequence", {"zero3": 128, "tensor": 8}),
    ):
        p = next(p for p in patterns(c, q.allowed) if p.words == ("zero3", "tensor", "sequence"))
        for choice in bounds.choices(p, mesh):
            one = price(q, spelling, choice.micro, choice.remat)
            assert isinstance(one, Candidate)
            ratios.append(choice.time / one.time.total)
    assert np.median(ratios) > 0.8
