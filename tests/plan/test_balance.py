"""Layers of a pipeline's stages where layers differ: against all splits of small models, and what they save in large ones."""

import itertools
import time

import numpy as np
import pytest

from meshloom.models.base import Kind
from meshloom.models.table import MODELS
from meshloom.plan.balance import balanced, cheapest, heaviest, kind_costs, lightest, tick
from meshloom.plan.flops import forward_flops
from meshloom.runner.place import place
from programs import config

D, S, NEAR = Kind(stack="dense"), Kind(stack="sparse"), Kind(window=4)


def splits(layers: int, parts: int):
    """All numbers of layers of each part."""
    for inner in itertools.combinations(range(1, layers), parts - 1):
        ends = (0, *inner, layers)
        yield tuple(b - a for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize("seed", range(50))
def test_the_slots_are_the_cheapest_of_all_splits(seed: int) -> None:
    """Dense layers first, or a pattern; costs that differ up to nine times."""
    rng = np.random.default_rng(seed)
    layers, parts = int(rng.integers(4, 11)), int(rng.integers(2, 5))
    first = int(rng.integers(0, 4))
    kinds = (D,) * first + (S,) * (layers - first) if seed % 2 else tuple((Kind(), NEAR)[i % 3 > 0] for i in range(layers))
    costs = dict(zip(dict.fromkeys(kinds), rng.integers(1, 10, 2).astype(float)))
    best = min(tick(place(kinds, parts, 1, sizes), costs) for sizes in splits(layers, parts))
    found = cheapest(kinds, costs, parts)
    assert sum(found) == layers and len(found) == parts and 0 not in found
    assert tick(place(kinds, parts, 1, found), costs) == best


@pytest.mark.parametrize("seed", range(20))
def test_the_heaviest_part_is_as_light_as_it_can_be(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = list(rng.integers(1, 20, 9).astype(float))
    heaviest = lambda sizes: max(sum(weights[end - n : end]) for n, end in zip(sizes, itertools.accumulate(sizes)))
    assert heaviest(lightest(weights, 4)) == min(heaviest(sizes) for sizes in splits(9, 4))


def test_costs_of_kinds_add_up_to_the_model() -> None:
    for name in ("llama", "deepseek", "moe_mixed"):
        model, c = config(name, layers=4)
        costs = kind_costs(model, c, 16)
        assert sum(costs[kind] for kind in model.kinds(c)) + 2 * c.vocab_padded * c.embed == pytest.approx(forward_flops(model, c, 16))


def test_layers_alike_need_no_numbers() -> None:
    model, c = config("llama", layers=8)
    assert balanced(model, c, 16, 4) == () and balanced(model, c, 16, 3) == ()


def test_a_few_heavy_layers_take_fewer_slots() -> None:
    """Three dense layers, five times as wide, before nine sparse ones: by fewest slots two dense ones in every part, by cost one."""
    c = MODELS["deepseek"].Config(
        layers=12, embed=64, heads=4, ffn=4000, vocab=256, experts=8, top=2, expert_ffn=64, first_dense=3, shared=1, groups=2, top_groups=1,
        key_rank=16, query_rank=16, nope_head=8, rope_head=8, value_head=8,
    )  # fmt: skip
    model = MODELS["deepseek"]
    sizes, costs = balanced(model, c, 64, 4), kind_costs(model, c, 64)
    kinds = model.kinds(c)
    before, after = place(kinds, 4, 1), place(kinds, 4, 1, sizes)
    dense = lambda where: sum(kind.stack == kinds[0].stack for kind in where.kinds)
    assert (dense(before), dense(after)) == (2, 1) and tick(after, costs) < 0.7 * tick(before, costs)
    light = balanced(model, c, 64, 4, skip=True)
    assert light == lightest([costs[kind] for kind in kinds], 4)
    assert heaviest(place(kinds, 4, 1, light), costs) < heaviest(before, costs) < tick(before, costs)


def test_large_models_take_no_time() -> None:
    """A window in five of six layers; dense layers first; 16 stages and 4 of 96 layers with every other alike."""
    kinds = tuple((Kind(), NEAR)[i % 6 > 0] for i in range(62))
    start = time.process_time()
    assert sum(cheapest(kinds, {Kind(): 1.4, NEAR: 1.0}, 8)) == 62
    assert sum(cheapest((D,) * 3 + (S,) * 58, {D: 1.0, S: 1.1}, 16)) == 61
    assert sum(cheapest(tuple((D, S)[i % 2] for i in range(96)), {D: 1.0, S: 3.0}, 4)) == 96
    assert time.process_time() - start < 20


def test_refuses_more_parts_than_layers() -> None:
    model, c = config("llama", layers=3)
    with pytest.raises(ValueError, match="The model has 3 layers, and 4 stages take 4"):
        balanced(model, c, 16, 4)
    with pytest.raises(ValueError, match="3 layers do not make 4 parts of one layer at least. Use 3 parts"):
        lightest([1.0] * 3, 4)
