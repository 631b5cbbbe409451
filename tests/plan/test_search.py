"""The search against all candidates priced one by one."""

import random

import pytest

from meshloom.plan.bounds import Bounds
from meshloom.plan.memory import Memory
from meshloom.plan.search import HEAVY, INDIVISIBLE, Candidate, how_of, leanest, price, runner_of, search
from meshloom.plan.space import Allowed
from plan.questions import CPU, GPU, answerable, everything, question

QUESTIONS = 24


def kind(spelling: str) -> tuple[str, ...]:
    """What kind of layout a spelling is: its words without numbers and schedules, but for data and ZeRO."""
    words = [word.partition(":") for word in spelling.split() if not word.startswith(("data", "zero"))]
    return tuple(w[0].partition("=")[0] + (w[2] if not w[0].startswith("pipe") else "") for w in words)


@pytest.mark.parametrize("seed", range(QUESTIONS))
def test_the_optimum_is_that_of_all_candidates(seed: int) -> None:
    """Also the best of every other kind, and with so little memory that a part of them fits."""
    pick, (q, every) = random.Random(seed), answerable(seed)
    sizes = sorted(one.memory.total for one in every)
    limit = sizes[min(len(sizes) - 1, int(len(sizes) * pick.choice((0.1, 0.5, 1.0))))]
    h = q.cluster.hardware._replace(memory=limit)
    q = q._replace(cluster=q.cluster._replace(hardware=h))
    found = search(q)
    best: dict[tuple[str, ...], Candidate] = {}
    for one in every:
        if one.memory.total <= limit and (kind(one.spelling) not in best or one.rank < best[kind(one.spelling)].rank):
            best[kind(one.spelling)] = one
    want = sorted(best.values(), key=lambda one: one.rank)[:6]
    assert found.best is not None
    assert [one.time.total for one in (found.best, *found.others)] == pytest.approx([one.time.total for one in want], rel=1e-12)
    assert found.best.rank[:2] == want[0].rank[:2]
    assert found.space >= len(every) >= found.priced
    assert found.space == found.priced + sum(n for why, n in found.pruned.items() if why not in (INDIVISIBLE, HEAVY))  # each has one fate


@pytest.mark.parametrize("seed", range(6))
def test_the_leanest_is_that_of_all_candidates(seed: int) -> None:
    q, every = answerable(100 + seed)
    found = leanest(q, Bounds(q))
    assert found and found.memory.total == min(one.memory.total for one in every)


def test_where_nothing_fits_the_leanest_is_told() -> None:
    q = question("llama", GPU._replace(memory=1000), 4, Allowed(strategies=("zero3", "tensor")))
    found = search(q)
    assert found.best is None and found.least is not None and found.least.memory.total == min(one.memory.total for one in everything(q))


def test_one_device_is_a_mesh_too() -> None:
    found = search(question("llama", GPU, 1))
    assert found.best and found.best.spelling == "" and not found.others


def test_fixed_words_stay() -> None:
    found = search(question("llama", GPU, 8, Allowed(words="tensor=2 sequence", micro=2, remats=("full",))))
    for one in (found.best, *found.others):
        assert one and "tensor=2 sequence" in one.spelling and one.micro == 2 and one.how.remat == "full"


def test_what_is_too_large_is_told_by_its_memory() -> None:
    q = question("llama", GPU, 2)
    assert isinstance(price(q, "zero3=2", 1, "none", 10.0), Memory) and isinstance(price(q, "zero3=2", 1, "none"), Candidate)


def test_what_training_refuses_is_no_candidate() -> None:
    def refuse(lay) -> None:
        if "zero3" in lay.sizes:
            raise ValueError("no")

    found = search(question("llama", GPU, 4)._replace(refuse=refuse))
    assert found.best and all("zero3" not in one.spelling for one in (found.best, *found.others))


def test_how_layers_run() -> None:
    assert (runner_of("auto", "cpu", 4, "none"), runner_of("auto", "cpu", 33, "none"), runner_of("auto", "cpu", 4, "full")) == (
        "unroll",
        "scan",
        "scan",
    )
    assert runner_of("unroll", "gpu", 4, "full") == "unroll" and how_of(question("llama", CPU, 2), "none") == ("unroll", "none")


def test_the_same_question_has_the_same_answer() -> None:
    q = question("moe", GPU, 8, Allowed(strategies=("zero1", "zero3", "tensor", "expert")))
    one, two = search(q), search(q)
    assert one.best == two.best and one.others == two.others and "priced exactly" in one.said
