"""A sample of the matrix of pairs; `make matrix` proves all of it."""

import pytest

from layouts import matrix
from meshloom.parallel.table import STRATEGIES, build, devices
from meshloom.recipes.launch import model_of
from meshloom.recipes.load import load_recipe

EVERY = 6
"""One pair in so many is proven here."""
SAMPLE = [(model, spelling) for model, spellings in matrix.sample(EVERY).items() for spelling in spellings]


def test_every_strategy_is_in_the_matrix() -> None:
    assert set(matrix.SIZES) == set(STRATEGIES)


def test_every_pair_is_there_once() -> None:
    found = [(p.first, p.second) for p in matrix.pairs()]
    n = len(STRATEGIES)
    assert len(set(found)) == len(found) == n * (n + 1) // 2
    assert all(1 < devices(p.spelling) <= matrix.DEVICES if p.spelling else p.why for p in matrix.pairs())


@pytest.mark.parametrize("model", matrix.MODELS)
def test_models_stay_odd(model) -> None:
    _, c, _ = model_of(load_recipe(matrix.MODELS[model][0], matrix.MODELS[model][1:]))
    assert c.vocab % 2 == 1 and c.vocab_padded > c.vocab


@pytest.mark.parametrize("model, spelling", SAMPLE, ids=lambda x: str(x))
def test_pair_equals_one_device(model, spelling) -> None:
    (result,) = matrix.prove(model, [spelling], steps=2)
    assert result.said == "equal" and result.moved > 0


def test_every_pair_is_proven_on_a_dense_model_and_on_one_with_experts() -> None:
    found = matrix.cells()
    assert len(set(found)) == len(found)
    for spelling in (p.spelling for p in matrix.pairs() if p.spelling):
        on = {name in matrix.SPARSE for name, other in found if other == spelling}
        assert on == ({True} if "expert" in spelling else {True, False}), spelling
    scheduled = {spelling for _, spelling in found if any(f":{s} " in spelling for s in matrix.SCHEDULES)}
    assert len(scheduled) >= len(matrix.SCHEDULES) * len(matrix.INSIDE)


def test_large_products_are_legal() -> None:
    _, c, _ = model_of(load_recipe("quickstart"))
    assert {build(spelling, c, 256).devices for spelling in matrix.LARGE} == {16, 32}
