"""Operators into layers: the cut is the best of all cuts."""

import itertools

import numpy as np
import pytest

from meshloom.plan.cluster import cluster


def every(n: int, layers: int):
    """All cuts, as the first operators of their layers."""
    return [(0, *inner) for inner in itertools.combinations(range(1, n), layers - 1)]


def judged(flops, received, starts, epsilon):
    """(largest, sum, variance) of a cut; None for one with a layer that is too heavy."""
    ends = [*starts[1:], len(flops)]
    work = [sum(flops[i:k]) for i, k in zip(starts, ends)]
    if max(work) > (1 + epsilon) * sum(flops) / len(starts):
        return None
    taken = [received[i][k - 1] for i, k in zip(starts, ends)]
    return max(taken), sum(taken), sum((w - sum(work) / len(work)) ** 2 for w in work)


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_is_the_best_of_all(seed) -> None:
    rng = np.random.default_rng(seed)
    n, few = int(rng.integers(2, 11)), seed % 2
    layers = int(rng.integers(1, n + 1))
    flops = rng.integers(0, 4 if few else 30, n)
    flops[rng.integers(n)] += 1
    received = rng.integers(0, 3 if few else 50, (n, n)).astype(float)  # few values: many ties
    epsilon = float(rng.choice([0.25, 0.5, 1.0]))
    cuts = {starts: judged(flops, received, starts, epsilon) for starts in every(n, layers)}
    allowed = {starts: value for starts, value in cuts.items() if value}
    if not allowed:
        with pytest.raises(ValueError, match="No cut of .* Allow epsilon"):
            cluster(flops, received, layers, epsilon)
        return
    found = cluster(flops, received, layers, epsilon)
    assert cuts[found.starts] == pytest.approx(min(allowed.values()))
    assert sum(found.flops) == flops.sum() and max(found.flops) <= found.limit
    assert [found.layer(at) for at in found.starts] == list(range(layers))


def test_most_of_the_random_cases_have_a_cut() -> None:
    """So that the test above compares, and does not only refuse."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(20):
        try:
            cluster(rng.integers(1, 30, 9), rng.integers(0, 50, (9, 9)), 3)
            found += 1
        except ValueError:
            pass
    assert found > 10


def test_bytes_in_front_of_an_operator_are_those_of_any_layer_that_begins_there() -> None:
    front = np.array([0, 9, 1, 9, 9, 2, 9, 9])
    found = cluster([1] * 8, front, 3)
    assert found.starts == (0, 2, 5) and found.received == (0, 1, 2)
    assert cluster([1] * 8, np.broadcast_to(front[:, None], (8, 8)), 3).starts == found.starts


def test_epsilon_that_is_named_is_enough() -> None:
    flops = [1, 1, 10, 1]
    with pytest.raises(ValueError, match=r"operator 2 alone 2.308 x\). Allow epsilon 1.308") as refused:
        cluster(flops, np.zeros(4), 3)
    epsilon = float(str(refused.value).split("epsilon ")[1].split(",")[0])
    assert max(cluster(flops, np.zeros(4), 3, epsilon).flops) == 10


@pytest.mark.parametrize(
    "flops, layers, said",
    [
        ([], 2, "the function is empty"),
        ([1, 2], 3, "2 operators cannot be cut into 3 layers, each of one at least. Use 1 to 2"),
        ([0, 0], 1, "None of the 2 operators has any work"),
    ],
)
def test_refused(flops, layers, said) -> None:
    with pytest.raises(ValueError, match=said):
        cluster(flops, np.zeros(len(flops)), layers)


def test_thousands_of_operators() -> None:
    rng = np.random.default_rng(1)
    flops, front = rng.integers(1, 100, 2000), rng.integers(1, 10**6, 2000)
    found = cluster(flops, front, 16)
    assert len(found.starts) == 16 and found.starts[0] == 0
    at, layers = 0, 0  # jumps as far as the limit allows, to where it is cheaper to cut: 16 layers do not reach the end
    while at < 2000:
        ends = np.flatnonzero(np.cumsum(flops[at:]) <= found.limit) + at + 1
        cheap = [end for end in ends if end == 2000 or front[end] < max(found.received)]
        if not cheap:
            return
        at, layers = max(cheap), layers + 1
    assert layers > 16
