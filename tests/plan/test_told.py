"""A plan in words and as JSON: its numbers against each other."""

import json

import pytest

from meshloom.plan.flops import train_flops
from meshloom.plan.search import search
from meshloom.plan.space import Allowed
from meshloom.plan.told import Budget, cut, lines, speed, tree
from plan.questions import GPU, question

Q = question("llama", GPU, 4, Allowed(strategies=("zero3", "tensor", "pipe"), schedules=("1f1b",)))


@pytest.fixture(scope="module")
def found():
    """A plan with alternatives."""
    return search(Q)


def test_speed_follows_from_the_step(found) -> None:
    s = speed(Q, found.best, Budget(10**9, 2.5))
    tokens = Q.sequences * Q.seq / found.best.time.total
    assert (s.tokens, s.day) == pytest.approx((tokens, tokens * 86400))
    assert s.days and s.hours and s.dollars
    assert (s.days, s.hours, s.dollars) == pytest.approx((1e9 / tokens / 86400, 1e9 / tokens / 3600 * 4, 2.5 * 1e9 / tokens / 3600 * 4))
    assert s.mfu == pytest.approx(train_flops(Q.model, Q.config, Q.seq) * tokens / 4 / GPU.flops["bfloat16"])
    assert speed(Q, found.best, Budget()).days is None


def test_the_text_has_layout_memory_time_and_alternatives(found) -> None:
    text = "\n".join(lines("tiny", Q, found, Budget(10**9, 2.5), "--batch-tokens 512 = 512"))
    for said in (
        found.best.spelling or "one device",
        cut(Q, found.best),
        "parameters",
        "optimizer",
        "compute",
        "MFU",
        "device-hours",
        "dollars at 2.5 each",
        "Next best",
        found.said,
    ):
        assert said in text
    assert f"1,000,000,000 tokens: {speed(Q, found.best, Budget(10**9)).days:,.1f} days" in text


def test_json_adds_up(found) -> None:
    t = json.loads(json.dumps(tree("tiny", Q, found, Budget(10**9, 2.5))))
    assert t["best"]["bytes"] == sum(t["best"]["memory"].values())
    assert t["best"]["seconds"] == pytest.approx(sum(part["seconds"] for part in t["best"]["parts"]))
    assert len(t["others"]) == len(found.others) and all(other["why"] for other in t["others"])
    assert t["candidates"] == found.space and t["others"][0]["seconds"] >= t["best"]["seconds"]
