"""What is said where nothing fits: changes that are tried, and do fit."""

import re

from meshloom.plan.explain import size
from meshloom.plan.search import leanest, search
from meshloom.plan.space import Allowed
from meshloom.plan.unfit import changes, fitting, unfit
from plan.questions import CPU, GPU, question

NAMES = ("zero3", "zero1", "tensor")


def test_it_says_by_how_much_and_what_would_fit() -> None:
    free = question("llama", GPU, 4, Allowed(strategies=NAMES))
    least = leanest(free)
    assert least
    limit = int(least.memory.total * 1.01)
    q = free._replace(
        cluster=free.cluster._replace(hardware=GPU._replace(memory=limit)), allowed=Allowed(("none",), strategies=NAMES, micro=1)
    )
    found = search(q)
    said = unfit(q, found)
    assert found.best is None and found.least
    over = found.least.memory.total - limit
    assert f"{size(over)} more than the {size(limit)} there are" in said[0]
    assert any("leave --remat, --micro and --layout out" in line for line in said)
    relaxed = q._replace(allowed=Allowed(strategies=NAMES))
    again = leanest(relaxed)
    assert again and again.memory.total <= limit


def test_every_change_that_is_named_fits_and_the_one_before_does_not() -> None:
    free = question("llama", GPU, 2, Allowed(("full",), strategies=NAMES), sequences=64)
    least = leanest(free)
    assert least
    q = free._replace(cluster=free.cluster._replace(hardware=GPU._replace(memory=int(least.memory.total * 0.6))))
    assert search(q).best is None
    kinds = {said: list(tries) for said, tries in changes(q)}
    lines = list(fitting(q))
    more = next(line for line in lines if line.startswith("more devices"))
    label = re.search(r"devices, (\S+):", more)[1]
    tried = kinds["more devices, {}"]
    at = [name for name, _ in tried].index(label)
    fits = [(one := leanest(changed)) is not None and one.memory.total <= q.cluster.hardware.memory for _, changed in tried[: at + 1]]
    assert fits == [False] * at + [True]


def test_what_the_checks_refuse_is_told_with_their_sentence() -> None:
    q = question("llama", GPU, 4, Allowed(words="tensor=3"))
    assert "cannot be split over tensor=3 devices" in unfit(q, search(q))[0]
    q = question("llama", CPU, 7, Allowed(strategies=NAMES), sequences=8)
    found = search(q)
    assert found.best is None and "8 sequences and the sizes of this model cannot be shared evenly by the 7 devices" in unfit(q, found)[0]
