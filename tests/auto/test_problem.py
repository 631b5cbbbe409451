"""The problem in numbers: the cost of a choice is that of the graph, memory at one time is that of the sweep over all."""

import itertools

import jax
import numpy as np

from auto.cases import rates, sizes, step
from meshloom.auto.grow import grow
from meshloom.auto.price import parts, reshard, specs
from meshloom.auto.problem import cost, memory, pose
from meshloom.auto.program import trace
from meshloom.auto.repeat import alone


def posed():
    r = rates(x=2, y=2)
    program, *_ = trace(step, *jax.tree.flatten(sizes(32, 8, 64)))
    ins = program.block.ins
    ties = {j: ins[j] for j in range(len(ins) - 1)}
    g = grow(program, r, {v: specs(program.values[v].shape, r.mesh) for v in ins}, ties, set(), dict.fromkeys(ins, ""))
    return g, r, *pose(g, alone(g), r)


def choices(problem, count=20):
    rng = np.random.default_rng(0)
    return [[int(rng.integers(len(s))) for s in problem.seconds] for _ in range(count)]


def test_the_cost_of_a_choice_is_that_of_its_moves() -> None:
    g, r, problem, _ = posed()
    for choice in choices(problem):
        seconds = sum(n.seconds[k] for n, k in zip(g.nodes, choice))
        for e in g.edges:
            seconds += e.times * sum(map(r.moved, reshard(e.have[choice[e.source]], e.want[choice[e.target]], e.bytes, r.mesh)))
        assert np.isclose(cost(problem, choice), seconds)


def test_memory_at_a_time_is_that_of_the_sweep() -> None:
    g, r, problem, times = posed()
    for choice in choices(problem, 5):
        over = times.over(choice, problem.links)
        for when in range(times.clock + 2):
            held = sum(h.bytes / parts(g.nodes[h.node].gives[h.value][choice[h.node]], r.mesh) for h in g.held if h.born <= when < h.end)
            for e in g.edges:
                have, want = e.have[choice[e.source]], e.want[choice[e.target]]
                if e.span[0] <= when < e.span[1] and reshard(have, want, e.bytes, r.mesh):
                    held += e.bytes / parts(want, r.mesh)
            assert np.isclose(over[when], held)
            assert np.isclose(memory(problem._replace(rows=[times.row(when)]), choice), held)


def test_no_rows_no_memory() -> None:
    *_, problem, _ = posed()
    assert memory(problem, [0] * len(problem.seconds)) == 0
    assert len({len(s) for s in problem.seconds}) > 1 and list(itertools.islice(problem.links, 1))
