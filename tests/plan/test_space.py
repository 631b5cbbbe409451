"""The space of layouts: what it holds, and that it throws out nothing that the checks admit."""

import itertools
import math
import random

import numpy as np
import pytest

from meshloom.parallel.table import STRATEGIES, build, devices, parse
from meshloom.plan.cost import shapes
from meshloom.plan.memory import device_memory
from meshloom.plan.space import Allowed, Pattern, chunks_of, divisors, factors, meshes, patterns, schedules, sieve
from meshloom.runner.run import How
from plan.questions import FAMILIES, GPU, question, spellings


@pytest.mark.parametrize("n, parts", [(1, 0), (12, 2), (64, 3), (30, 3), (7, 1), (8, 4)])
def test_factors_are_all_products(n: int, parts: int) -> None:
    want = {row for row in itertools.product(range(2, n + 1), repeat=parts) if math.prod(row) == n}
    assert {tuple(row) for row in factors(n, parts).tolist()} == want and len(factors(n, parts)) == len(want)


def test_divisors() -> None:
    assert divisors(360) == tuple(d for d in range(1, 361) if 360 % d == 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_that_the_checks_admit_is_thrown_out(family: str) -> None:
    """Spellings over eight devices, found in another way: those that a model's checks, its batch and its shapes admit are in the space."""
    pick, admitted = random.Random(family), 0
    names = [name for name in STRATEGIES if name != "sequence"]
    for _ in range(5):
        allowed = Allowed(schedules=("1f1b",), stash=(False,), strategies=(*pick.sample(names, 4), "tensor", "sequence"))
        admitted += _admitted(question(family, GPU, 8, allowed), pick)
    assert admitted > 20


def _admitted(q, pick: random.Random) -> int:
    """Spellings that the checks admit, each of which is in the space; how many."""
    there, admitted = set(), 0
    for p in patterns(q.config, q.allowed):
        sizes = meshes(p, 8)
        ok = sieve(q.config, q.seq, q.sequences, p, sizes)
        for i in np.flatnonzero(ok):
            there.add(p.spell({axis: int(n[i]) for axis, n in sizes.items()}, ("1f1b",)))
    every = list(dict.fromkeys(spellings(8, q.allowed)))
    for spelling in pick.sample(every, min(40, len(every))):
        try:
            layout = build(spelling, q.config, q.seq, "gpu")
            micro = 4 if "pipe" in layout.sizes else 1
            x = shapes(q.model, q.config, layout, q.seq, q.sequences * micro, micro, How("scan", "full"), "bfloat16")
            device_memory(q.model, x, {}, None)
        except ValueError:
            continue
        words = parse(spelling)
        own = " ".join(
            part
            for part in (Pattern(tuple(words), {n: a.options[0] for n, a in words.items() if a.options}).spell(layout.sizes, ("1f1b",)),)
            if part
        )
        assert own in there, spelling
        admitted += 1
    return admitted


def test_a_pattern_spells_what_parse_reads() -> None:
    p = Pattern(("pipe", "zero1", "tensor2d"), {"tensor2d": "stream"})
    said = p.spell({"pipe": 2, "zero1": 4, "rows": 2, "cols": 2}, ("zb", "stash"))
    assert said == "pipe=2:zb,stash zero1=4 tensor2d=2x2:stream" and devices(said) == 32 and p.axes == ("pipe", "zero1", "rows", "cols")
    assert p.kind == ("pipe", "tensor2dstream") and Pattern(()).spell({}) == ""


def test_fixed_words_are_in_every_pattern() -> None:
    q = question("llama", GPU, 8)
    found = list(patterns(q.config, Allowed(words="pipe=2:zb tensor=2")))
    assert found and all({"pipe", "tensor"} <= set(p.words) for p in found)
    assert schedules(found[0], 4, 2, Allowed(words="pipe=2:zb tensor=2")) == [("zb",)]
    assert (meshes(found[0], 8, "pipe=2")["pipe"] == 2).all()


def test_a_mixture_may_have_experts_and_others_not() -> None:
    words = lambda family: {word for p in patterns(question(family, GPU, 8).config) for word in p.words}
    assert "expert" in words("moe") and "expert" not in words("llama")


def test_options_that_change_results_are_never_tried() -> None:
    assert {option for p in patterns(question("moe", GPU, 8).config) for option in p.options.values()} <= {"", "folded", "stream"}


def test_more_chunks_than_layers_are_not_tried() -> None:
    p = Pattern(("pipe",))
    assert {o[0] for o in schedules(p, 4, 2)} == {"gpipe", "1f1b", "interleaved2", "zb"} and schedules(Pattern(()), 4, 1) == [()]
    assert chunks_of(("interleaved4", "stash")) == 4 and chunks_of(()) == 1
