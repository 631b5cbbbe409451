"""Why one candidate stands behind another."""

from meshloom.plan.memory import Memory
from meshloom.plan.search import Candidate
from meshloom.plan.time import Part, Time
from meshloom.plan.why import seconds, terms, why
from meshloom.runner.run import How


def one(memory: int = 100, **parts: float) -> Candidate:
    """A candidate whose step has these parts."""
    return Candidate(
        "data=2", 1, How(), Memory({"all": memory}), Time(tuple(Part(n.replace("_", " "), "", t) for n, t in parts.items()), "float32")
    )


def test_the_term_that_differs_most_is_named_with_its_seconds() -> None:
    best, other = one(compute=1.0, bubble=0.5), one(compute=1.0, bubble=0.2, all_gather=0.9)
    assert why(best, other) == "all gather: 900 ms more (the best has none), for 300 ms less bubble"
    assert why(one(compute=1.0), one(compute=1.25)) == "compute: 250 ms more (1.25 s for 1 s)"


def test_where_times_are_equal_memory_decides() -> None:
    assert why(one(100, compute=1.0), one(1124, compute=1.0)) == "as fast, with 1.0 KiB more memory"
    assert why(one(compute=1.0), one(compute=1.0)).startswith("as fast, with a longer spelling")


def test_terms_add_up_by_kind() -> None:
    t = Time((Part("compute", "a", 1.0), Part("compute", "b", 2.0), Part("bubble", "", 0.5)), "float32")
    assert terms(t) == {"compute": 3.0, "bubble": 0.5}


def test_times_for_people() -> None:
    assert [seconds(t) for t in (12.345, 0.0123, 4.5e-5, 0.0, 2e-7, 1234.0)] == ["12.3 s", "12.3 ms", "45 us", "0 s", "0.2 us", "1,234 s"]
