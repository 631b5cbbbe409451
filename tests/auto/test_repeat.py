"""Classes of nodes: a deep model has no more decisions than a shallow one, and sharing them costs nothing here."""

import jax

from auto.cases import rates, transformer, words
from meshloom.auto.grow import grow
from meshloom.auto.price import specs
from meshloom.auto.problem import pose
from meshloom.auto.program import trace
from meshloom.auto.repeat import alone, classes
from meshloom.auto.solve import search


def graph(layers: int):
    r = rates(x=4)
    args = words(layers, 8, 16, 32, 64)
    program, *_ = trace(transformer(), *jax.tree.flatten(args))
    ins = program.block.ins
    ties = {j: ins[j] for j in range(len(ins) - 1)}
    return grow(program, r, {v: specs(program.values[v].shape, r.mesh) for v in ins}, ties, set(), dict.fromkeys(ins, "")), r


def test_decisions_do_not_grow_with_depth() -> None:
    graphs = [graph(n)[0] for n in (6, 12)]
    assert len(graphs[1].nodes) > 1.8 * len(graphs[0].nodes)
    few, many = (max(classes(g)) + 1 for g in graphs)
    assert many <= few + 2 and few < len(graphs[0].nodes)


def test_those_of_one_class_have_the_same_strategies() -> None:
    g, _ = graph(4)
    first: dict = {}
    for c, n in zip(classes(g), g.nodes):
        other = first.setdefault(c, n)
        assert (n.signs, n.wants, n.times, list(n.gives.values())) == (other.signs, other.wants, other.times, list(other.gives.values()))


def test_sharing_decisions_costs_little() -> None:
    g, r = graph(3)
    one = search(*pose(g, alone(g), r), 1e9, 60, 1e-3)
    both = search(*pose(g, classes(g), r), 1e9, 60, 1e-3)
    assert one.seconds <= both.seconds * (1 + 1e-3) and both.seconds <= one.seconds * 1.02
    tight = search(*pose(g, classes(g), r), both.peak * 0.9, 60, 1e-3)
    assert tight.peak <= both.peak * 0.9 * (1 + 1e-5) and tight.seconds >= both.seconds * (1 - 1e-3)
