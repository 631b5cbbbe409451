"""What a plan says: its collectives are those of the compiled program, its text names every input, large operation and move."""

import jax
import pytest

from auto.cases import SLOW, on_a_cpu, sizes, step
from meshloom.auto.explain import Line, Plan, notes_of, shaped
from meshloom.auto.graph import Graph, Node
from meshloom.auto.parallelize import parallelize
from meshloom.auto.price import Move
from meshloom.auto.program import Value
from meshloom.auto.solve import Solved
from meshloom.plan.hlo import collectives, total


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("machine") / "slow.yaml"
    path.write_text(SLOW)
    return str(path)


def compiled(made, args, mesh: dict) -> dict:
    return total(collectives(made.lower(*args).compile().as_text(), mesh))


@pytest.mark.parametrize("mesh", [{"x": 8}, {"x": 2, "y": 4}])
def test_what_it_says_moves_is_what_moves(slow: str, mesh: dict) -> None:
    args = sizes(16, 64, 512)
    made = parallelize(step, args, mesh=mesh, batch_argnums=2, on=slow)
    assert made.plan.total and on_a_cpu(made.plan.total) == compiled(made, args, mesh)
    assert made.plan.bytes == sum(n for _, n in made.plan.total.values())


def test_the_text_names_inputs_operations_and_moves(slow: str) -> None:
    made = parallelize(step, sizes(512, 64, 128), mesh="x=8", batch_argnums=2, on=slow)
    text = str(made.plan)
    for said in ("mesh x=8 on slow:1x64", "  x            f32[512/x, 64]", "p.up", "s.0.mu.down", "dot_general"):
        assert said in text, text
    assert "proven best" in text and "all together" in text and f"of {4 * 10**9:,} B on a device" in text
    assert len(made.explain().splitlines()) >= len(text.splitlines())


def test_lines_are_cut_and_columns_stand_under_each_other() -> None:
    lines = tuple(Line(f"dot_general {i}", "whole", 2, (Move("all-gather", (0,), 1000),)) for i in range(50))
    plan = Plan(
        "x=2", "m", {"a": "f32[2]"}, lines, (), {("all-gather", ("x",)): (100, 100000)}, 1e-3, 10, 20, 0.0, 0.1, ("a note",), ("x",)
    )
    text = str(plan)
    assert "and 10 more: print(step.explain())" in text and text.endswith("a note") and "2 x dot_general 0" in text
    assert "dot_general 49" in plan.explain() and plan.bytes == 100000
    assert len({row.index("whole") for row in text.splitlines() if "whole" in row}) == 1
    assert "at most 2.00% from the best" in str(plan._replace(gap=0.02)) and "nothing moves" in str(plan._replace(total={}))


def test_shapes_show_their_splits() -> None:
    assert shaped(Value((8, 16), "bfloat16", 256), (1, 1), ("x", "y")) == "bf16[8, 16/x/y]"
    assert shaped(Value((), "key<fry>", 8), (), ()) == "key<fry>[]"


def test_what_a_reader_should_know_is_noted(slow: str) -> None:
    table = jax.numpy.ones((8, 8))
    made = parallelize(lambda x: jax.numpy.linalg.cholesky(x @ x.T + table), (sizes(8, 8, 8)[2],), mesh="x=8", on=slow)
    assert "Without strategies, so whole on every device: cholesky" in str(made.plan)
    assert "closes over arrays of 256 B" in str(made.plan)


def test_a_search_that_stopped_early_is_said() -> None:
    nodes = [Node("", "", [], [], [], {}, 1.0, 0)] * 3
    graph = Graph(nodes, [], [], 0, {"fft": 2, "while (its costs counted once)": 1}, {})
    told = notes_of(graph, 0, Solved([], 1.0, 0.05, 0.0, 60.0, 0), 1e-3, 2)
    assert told[0] == "The search stopped early: this choice may cost up to 5.0% more than the best."
    assert "fft (2 x), while" in told[1] and told[2].startswith("3 operations and inputs in 2 decisions") and len(told) == 3
    assert notes_of(graph._replace(replicated={}), 0, Solved([], 1.0, 5e-4, 0.0, 60.0, 0), 1e-3, 3) == ()
