"""The shares of a step's collectives add up to the formulas that the compiled program is held to."""

import pytest

from meshloom.parallel.base import merge
from meshloom.parallel.table import STRATEGIES, build
from meshloom.plan.cost import shapes, step_cost, wire_bytes
from meshloom.plan.traffic import ALIKE, AT, traffic
from meshloom.runner.run import How
from plan.drawn import SPELLINGS, example
from programs import FAMILIES, config


def of(spelling: str, family: str = "llama", micro: int = 2, how: How = How(), platform: str = "gpu", **more):
    """The model, the shapes of a step of 64 sequences a micro-batch, its traffic in parts."""
    model, c = config(family, **{"layers": 3, **more})
    lay = build(spelling, c, 16, platform)
    x = shapes(model, c, lay, 16, 64 * micro, micro, how, "bfloat16")
    return model, x, traffic(model, spelling, x)


CASES = dict.fromkeys([*((spelling, family) for spelling in SPELLINGS for family in FAMILIES), *(example(name) for name in STRATEGIES)])


def _known(cost) -> dict[tuple, list[int]]:
    """Count and bytes as a reader knows them: what ends a layer is part of it."""
    return {
        (c.kind, c.axes, c.place, c.why): [c.count, c.bytes] for c in merge(c._replace(place=ALIKE.get(c.place, c.place)) for c in cost)
    }


@pytest.mark.parametrize("spelling, family", CASES)
def test_shares_add_up(spelling: str, family: str) -> None:
    for micro, how, platform in ((1, How(), "gpu"), (4, How("scan", "full"), "cpu"), (2, How("unroll", "selective"), "cpu")):
        _, x, t = of(spelling, family, micro, how, platform)
        total: dict[tuple, list[int]] = {}
        for share in t.shares:
            for m in share.moves:
                have = total.setdefault((m.kind, m.axes, m.place, m.why), [0, 0])
                have[0] += share.times * m.count
                have[1] += share.times * m.bytes
        assert total == _known(step_cost(spelling, x))
        assert t.sent == pytest.approx(sum(wire_bytes(c, x.layout) for c in step_cost(spelling, x)))
        assert t.sent == pytest.approx(sum(sum(shares) for shares in t.totals.values()))
        assert all(m.count > 0 and m.bytes > 0 for share in t.shares for m in share.moves)


def test_a_layer_of_tensor_parallelism_by_hand() -> None:
    """Megatron: two all-reduces of [batch, seq, embed] forward, two backward."""
    _, _, t = of("tensor=4", micro=2)
    size = 64 * 16 * 32 * 2
    assert [(m.kind, m.axes, m.count, m.bytes, m.back) for m in t.layer] == [
        ("all-reduce", ("tensor",), 2, 2 * size, False),
        ("all-reduce", ("tensor",), 2, 2 * size, True),
    ]
    assert t.shares[0].times == 6 and t.layer[0].sent == 2 * size * 2 * 3 / 4


def test_a_layer_of_zero3_by_hand() -> None:
    """One layer's parameters gathered forward and backward, their gradients scattered; the rest once a micro-batch."""
    _, _, t = of("zero3=4", "llama_plain", micro=2)
    layer = 4 * 32 * 8 * 4 + 3 * 32 * 48 + 2 * 32  # q k v o of 8 heads of 4, three matrices, two norms
    assert [(m.kind, m.count, m.bytes) for m in t.layer] == [
        ("all-gather", 9, 2 * layer),
        ("all-gather", 9, 2 * layer),
        ("reduce-scatter", 9, 2 * layer),
    ]
    assert [m.back for m in t.layer] == [False, True, True]
    assert [(m.kind, m.bytes) for m in t.micro] == [("all-gather", 2 * (384 + 1) * 32), ("reduce-scatter", 2 * (384 + 1) * 32)]


def test_layers_that_differ_are_shown_as_their_pattern() -> None:
    """Two layers that repeat are one unit; where nothing repeats, all layers are."""
    _, x, t = of("tensor=4", layers=4, window=8, windowed_layers=(True, False) * 2)
    size = 64 * 16 * 32 * 2
    assert (t.repeats, t.layer[0].count, t.layer[0].bytes) == (2, 4, 4 * size)
    assert t.shares[0].title == "2 layers together, in one micro-batch (x 2 of 4 layers, x 2 micro-batches)" and t.shares[0].times == 4
    _, x, t = of("tensor=4", layers=9, window=8, windowed_layers=(True,) * 4 + (False,) * 5)
    assert (t.repeats, t.layer[0].count) == (1, 18) and t.sent == pytest.approx(
        sum(wire_bytes(c, x.layout) for c in step_cost("tensor=4", x))
    )


def test_an_array_of_all_layers_moves_once_a_step() -> None:
    _, _, t = of("data=8")
    assert not t.layer and not t.micro and [m.why for m in t.once] == ["gradients, once a step", "sums for the log"]


def test_order_of_a_step() -> None:
    _, _, t = of("zero3=4 tensor=2 sequence", how=How("scan", "full"))
    assert [m.why.split(",")[0] for m in t.layer if not m.back] == ["parameters", "into a layer's halves", "out of a layer's halves"]
    back = [m.why for m in t.layer if m.back]
    assert back[0].startswith("parameters") and "recomputed" in back[1] and back[-1].startswith("gradients")
    assert back[3:-1] == ["out of a layer's halves, backward", "into a layer's halves, backward"]
    for share in t.shares:
        assert [AT[m.place] for m in share.moves] == sorted(AT[m.place] for m in share.moves)
    assert [m.back for m in t.layer] == sorted(m.back for m in t.layer)


def test_one_device_moves_nothing() -> None:
    _, _, t = of("")
    assert t.sent == 0 and not t.totals
