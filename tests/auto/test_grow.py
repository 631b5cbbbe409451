"""Programs as graphs: what becomes a node, what follows, what costs nothing, what lies in memory when."""

import jax
import jax.numpy as jnp

from auto.cases import f32, rates, sizes, step, transformer, words
from meshloom.auto.choices import WHOLE
from meshloom.auto.grow import grow
from meshloom.auto.price import specs
from meshloom.auto.program import trace


def graph(fn, *args, mesh=(("x", 4),), ties=None, donated=()):
    r = rates(**dict(mesh))
    program, *_ = trace(fn, *jax.tree.flatten(args))
    ins = program.block.ins
    ties = {j: ins[i] for j, i in (ties or {}).items()}
    allowed = {v: specs(program.values[v].shape, r.mesh) for v in ins}
    return grow(program, r, allowed, ties, {ins[i] for i in donated}, {v: f"in{i}" for i, v in enumerate(ins)}), program


def kinds(g) -> list[str]:
    return [n.kind for n in g.nodes]


def test_what_is_elementwise_follows() -> None:
    g, _ = graph(lambda x, w, b: jax.nn.softmax(jnp.tanh(x @ w) + b), f32(8, 16), f32(16, 32), f32(32))
    assert kinds(g) == ["input", "input", "input", "dot_general"]
    assert [(e.source, e.target) for e in g.edges] == [(0, 3), (1, 3), (2, 3)]
    bias = g.edges[-1]  # the bias is compared before it is broadcast, and taken after
    assert bias.bytes == 128 and {len(s) for s in bias.want} == {1} and set(bias.want) <= {(WHOLE,), (0,)} and (1,) in set(bias.taken)


def test_constants_and_random_numbers_cost_nothing() -> None:
    def fn(x, key):
        return x * jax.random.bernoulli(key, 0.5, x.shape) + jnp.arange(16.0) * 2 + jnp.tril(jnp.ones((8, 16)))

    g, _ = graph(fn, f32(8, 16), jax.eval_shape(lambda: jax.random.key(0)))
    assert kinds(g) == ["input"] and not g.edges and not g.replicated


def test_the_step_of_an_optimizer_ties_results_to_inputs() -> None:
    args = sizes(32, 8, 64)
    leaves = jax.tree.leaves(args)
    g, _ = graph(step, *args, ties={i: i for i in range(len(leaves) - 1)})
    back = [e for e in g.edges if e.at[0] == "out"]
    assert len(back) == 6 and {g.nodes[e.target].kind for e in back} == {"input"}  # the number of steps has no axis
    assert kinds(g).count("dot_general") == 5 and kinds(g).count("input") == 7 and not g.replicated


def test_a_scan_counts_its_body_as_often_as_it_runs() -> None:
    def fn(x, w):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c), x, w)

    g, _ = graph(fn, f32(8, 16), f32(5, 16, 16))
    assert kinds(g) == ["input", "input", "carry", "loop", "dot_general"]
    assert [n.times for n in g.nodes] == [1, 1, 1, 1, 5]
    slices = next(e for e in g.edges if e.source == 1)
    assert (WHOLE,) in slices.want and (0,) not in slices.want and (1,) in slices.want  # rounds cannot be split
    assert next(e for e in g.edges if e.target == 2 and e.source == 4).times == 5
    stacked = next(h for h in g.held if h.bytes == 5 * 8 * 16 * 4)
    assert g.nodes[stacked.node].kind == "carry"


def test_a_while_and_branches_are_counted_and_said() -> None:
    def fn(x, w, n):
        y = jax.lax.while_loop(lambda c: jnp.sum(c) < n, lambda c: c @ w, x)
        return jax.lax.cond(n > 0, lambda: y @ w, lambda: y)

    g, _ = graph(fn, f32(8, 16), f32(16, 16), f32())
    assert kinds(g).count("dot_general") == 2 and "branches" in kinds(g) and any("while" in k for k in g.replicated)
    branches = [e for e in g.edges if e.at[1:2] == ("branch",)]
    assert len(branches) == 2


def test_what_has_no_strategies_is_whole_and_said() -> None:
    g, _ = graph(lambda x: jnp.linalg.cholesky(x @ x.T), f32(16, 16))
    assert "cholesky" in g.replicated
    node = next(n for n in g.nodes if n.kind == "cholesky")
    assert len(node.seconds) == 1 and set(node.wants[0]) == {(WHOLE,)}


def test_memory_follows_from_lifetimes() -> None:
    g, program = graph(lambda x, w: jnp.tanh(x @ w) @ w, f32(16, 16), f32(16, 16))
    found = {h.value: (h.born, h.end) for h in g.held}
    x, w = program.block.ins
    assert found[x] == (0, 5) and found[w] == (0, 5)  # inputs that are not donated lie there to the end
    made = [v for v in found if v not in (x, w)]
    assert len(made) == 3  # the product, its tanh (read by another node), the result
    donated, _ = graph(lambda x, w: jnp.tanh(x @ w) @ w, f32(16, 16), f32(16, 16), donated=[0])
    assert {h.value: h.end for h in donated.held}[x] == 2


def test_a_fused_operation_keeps_nothing_but_what_it_read() -> None:
    g, program = graph(lambda x: jnp.sum(jnp.exp(jnp.sin(x))), f32(16, 16))
    assert [h.value for h in g.held] == [program.block.ins[0]]


def test_a_transformer_has_strategies_for_all() -> None:
    for remat, scan in ((False, False), (True, False), (False, True), (True, True)):
        args = words(2, 8, 16, 32, 64, scan)
        g, _ = graph(transformer(remat=remat, scan=scan), *args)
        assert not g.replicated, g.replicated
        assert kinds(g).count("gather") == 2
