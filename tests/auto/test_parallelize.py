"""`ml.parallelize`: it finds the layouts that people found, results are those of plain jit for three libraries, refusals are sentences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshloom as ml
from auto.cases import ADAM, SLOW, arrays, blocks, experts, f32, many, mixture, mlp, on_a_cpu, sizes, step, transformer, words
from meshloom.auto.parallelize import carried, sizes_of
from meshloom.plan.hlo import collectives, total


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("machine") / "slow.yaml"
    path.write_text(SLOW)
    return str(path)


def products(made) -> list[str]:
    return [l.split for l in made.plan.operations if l.name.startswith("dot_general") for _ in range(l.count)]


# layouts that people found


def test_a_small_mlp_on_a_wide_batch_is_data_parallel() -> None:
    made = ml.parallelize(step, sizes(65536, 512, 2048), mesh="x=8", batch_argnums=2, on="a100:1x8")
    assert made.plan.inputs["x"] == "f32[65536/x, 512]"
    assert all("0/x" in p for p in products(made))  # every product is split by rows of the batch
    kinds = {kind for kind, _ in made.plan.total}
    assert kinds <= {"all-reduce", "reduce-scatter", "all-gather"}
    assert made.plan.bytes < 6 * 4 * 512 * 2048  # gradients and parameters move, activations (34 times as large) do not


def test_a_wide_mlp_is_megatrons_and_moves_once() -> None:
    args = sizes(512, 4096, 16384)
    made = ml.parallelize(step, args, mesh="x=8", batch_argnums=2, on="a100:1x8")
    assert made.plan.inputs["p.up"] == "f32[4096, 16384/x]" and made.plan.inputs["p.down"] == "f32[16384/x, 4096]"
    assert made.plan.inputs["s.0.mu.up"] == "f32[4096, 16384/x]"
    found = total(collectives(made.lower(*args).compile().as_text(), {"x": 8}))
    assert found == made.plan.total == {("all-reduce", ("x",)): (1, 4 * 512 * 4096)}


def test_residual_mlps_move_once_forward_and_once_backward() -> None:
    args = many(2, 512, 4096, 16384)
    made = ml.parallelize(blocks, args, mesh="x=8", batch_argnums=2, on="a100:1x8")
    found = total(collectives(made.lower(*args).compile().as_text(), {"x": 8}))
    assert found == on_a_cpu(made.plan.total)
    sums = [n for (kind, _), n in made.plan.total.items() if kind in ("all-reduce", "reduce-scatter")]
    assert [sum(n) for n in zip(*sums)] == [3, 3 * 4 * 512 * 4096]  # two forward, and back one: x needs no gradient


def test_where_memory_binds_parameters_are_gathered_for_use(slow: str) -> None:
    """ZeRO: the optimizer's state is always split, for it saves work; parameters too as soon as they have to be, as many as have to be."""
    args, whole = many(6, 4096, 64, 512), 12 * 4 * 64 * 512
    gathers, split = [], []
    for memory in (None, 4_300_000, 3_700_000):
        made = ml.parallelize(blocks, args, mesh="x=8", batch_argnums=2, donate_argnums=(0, 1), memory=memory, on=slow)
        inputs = made.plan.inputs
        assert all("/x" in where for name, where in inputs.items() if name.startswith(("s.0.mu", "s.0.nu")))
        assert all("0/x" in p for p in products(made)) and made.plan.memory <= (memory or 10**9)
        assert made.plan.total["reduce-scatter", ("x",)] == (12, whole)
        gathers.append(made.plan.total["all-gather", ("x",)][0])
        split.append(sum("/x" in where for name, where in inputs.items() if name.startswith("p.")))
        if memory:
            assert on_a_cpu(made.plan.total) == total(collectives(made.lower(*args).compile().as_text(), {"x": 8}))
    assert gathers[0] == 12 and split[0] <= 1  # after the update: ZeRO-1
    assert split[0] < split[1] < split[2] == 12 and gathers[0] < gathers[1] < gathers[2]  # and where it is used: ZeRO-3


def test_a_mixture_of_experts_sends_tokens_to_experts(slow: str) -> None:
    made = ml.parallelize(mixture, experts(16, 64, 64, 512, 8), mesh="x=8", batch_argnums=2, on=slow)
    assert made.plan.inputs["p.up"] == "f32[8/x, 64, 512]" and made.plan.inputs["p.down"] == "f32[8/x, 512, 64]"
    wide = [l for l in made.plan.operations if "edf->egcf" in l.name or "efd->egcd" in l.name]
    assert len(wide) == 5 and all("0/x x 0/x -> f32[8/x" in l.split for l in wide)  # split by expert; x needs no gradient
    found = total(collectives(made.lower(*experts(16, 64, 64, 512, 8)).compile().as_text(), {"x": 8}))
    assert found["all-to-all", ("x",)] == made.plan.total["all-to-all", ("x",)] == (3, 3 * 4 * 16 * 16 * 64)  # there, back, gradients there


def test_where_both_bind_it_is_data_across_nodes_and_tensor_inside() -> None:
    made = ml.parallelize(
        blocks, many(4, 65536, 8192, 32768), mesh="x=2 y=4", batch_argnums=2, donate_argnums=(0, 1), memory="16GB", on="a100:2x4"
    )  # fmt: skip
    for i in range(4):
        assert made.plan.inputs[f"p.{i}.up"] == "f32[8192, 32768/y]" and made.plan.inputs[f"p.{i}.down"] == "f32[32768/y, 8192]"
    assert made.plan.inputs["x"] == "f32[65536/x, 8192]" and all("0/x" in p and "/y" in p for p in products(made))
    kinds = {key: count for key, (count, _) in made.plan.total.items()}
    assert (
        kinds["all-reduce", ("y",)] + kinds.get(("reduce-scatter", ("y",)), 0) == 7
        and kinds["reduce-scatter", ("x",)] == kinds["all-gather", ("x",)] == 8
    )


# results


def plain():
    """Parameters as a dictionary."""
    return mlp, arrays(sizes(16, 8, 32)[0]), arrays(f32(16, 8), 1)


def linen():
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(nn.LayerNorm()(nn.relu(nn.Dense(32)(x))))

    x = arrays(f32(16, 8), 1)
    return Net().apply, Net().init(jax.random.key(0), x), x


def nnx():
    try:
        from flax import nnx
    except ImportError as reason:
        pytest.skip(f"flax.nnx: {reason}")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.gelu(self.up(x)))

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    return lambda p, x: nnx.merge(graph, p)(x), state, arrays(f32(16, 8), 1)


def equinox():
    eqx = pytest.importorskip("equinox")
    net, rest = eqx.partition(eqx.nn.MLP(8, 8, 32, 2, key=jax.random.key(0)), eqx.is_array)
    return lambda p, x: jax.vmap(eqx.combine(p, rest))(x), net, arrays(f32(16, 8), 1)


@pytest.mark.parametrize("library", [plain, linen, nnx, equinox])
def test_three_steps_are_those_of_plain_jit(library, slow: str) -> None:
    apply, p, x = library()

    def step(p, s, x):
        value, grad = jax.value_and_grad(lambda p: jnp.mean((apply(p, x) - x) ** 2))(p)
        change, s = ADAM.update(grad, s, p)
        return optax.apply_updates(p, change), s, value

    one, made = jax.jit(step), ml.parallelize(step, (p, ADAM.init(p), x), mesh="x=2 y=4", batch_argnums=2, on=slow)
    assert made.plan.total  # something is split
    a = b = (p, ADAM.init(p))
    for _ in range(3):
        *a, want = one(*a, x)
        *b, got = made(*b, x)
        np.testing.assert_allclose(got, want, rtol=1e-5)
    for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        np.testing.assert_allclose(u, v, rtol=1e-4, atol=1e-6)
    placed = made.shard(*b, x)
    for u, v in zip(jax.tree.leaves(b), jax.tree.leaves(placed[:2])):
        assert u.sharding.is_equivalent_to(v.sharding, u.ndim)  # results lie where the next call takes them


def test_a_scanned_transformer_with_remat_and_donation(slow: str) -> None:
    p, s, t = arrays(words(2, 8, 16, 32, 64, scan=True))
    fn = transformer(remat=True, scan=True)
    s = ADAM.init(p)
    want = jax.jit(fn)(p, s, t)
    made = ml.parallelize(fn, (p, s, t), mesh="x=8", batch_argnums=2, donate_argnums=(0, 1), on=slow)
    got = made(*made.shard(p, s, t))
    for u, v in zip(jax.tree.leaves(want), jax.tree.leaves(got)):
        np.testing.assert_allclose(u, v, rtol=1e-3, atol=1e-5)
    assert made.plan.total and any("/x" in p for p in products(made))


def test_a_decorator_plans_at_the_first_call_and_for_new_shapes(slow: str) -> None:
    @ml.parallelize(mesh="x=8", batch_argnums=1, on=slow)
    def score(p, x):
        return jnp.sum(mlp(p, x) ** 2)

    with pytest.raises(ValueError, match="Nothing is planned yet"):
        print(score.plan)
    p, _, x = arrays(sizes(16, 8, 32))
    np.testing.assert_allclose(score(p, x), jnp.sum(mlp(p, x) ** 2), rtol=1e-5)
    first = score.plan
    np.testing.assert_allclose(score(p, x[:8]), jnp.sum(mlp(p, x[:8]) ** 2), rtol=1e-5)
    assert "f32[16" in first.inputs["x"] and "f32[8" in score.plan.inputs["x"]


def test_one_device_is_enough(slow: str) -> None:
    p, _, x = arrays(sizes(16, 8, 32))
    for mesh in ("x=1", "x=1 y=1"):
        made = ml.parallelize(mlp, (p, x), mesh=mesh, batch_argnums=1, on=slow)
        np.testing.assert_allclose(made(p, x), mlp(p, x), rtol=1e-5)
        assert "nothing moves" in str(made.plan)


def test_a_mesh_of_jax_is_taken_as_it_is(slow: str) -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    p, _, x = arrays(sizes(16, 8, 32))
    made = ml.parallelize(mlp, (p, x), mesh=mesh, on=slow)
    np.testing.assert_allclose(made(p, x), mlp(p, x), rtol=1e-4, atol=1e-6)
    assert sizes_of(mesh) == {"a": 2, "b": 4} and sizes_of("") == {"devices": 8}


def test_results_take_the_place_of_the_arguments_they_look_like() -> None:
    p, s, x = sizes(16, 8, 32)
    out = (p, s, f32())
    leaves, tree = jax.tree.flatten(out)
    found = carried((p, s, x), (2,), tree, leaves)
    assert found == {i: i for i in range(7)}
    assert carried((p, x), (), jax.tree.structure(x), [f32(16, 8)]) == {0: 2}
    assert carried((p, x), (1,), jax.tree.structure(x), [f32(16, 8)]) == {}
    assert carried((p,), (), jax.tree.structure({"a": p}), jax.tree.leaves(p)) == {0: 0, 1: 1}


# refusals


def args():
    return sizes(16, 8, 32)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda on: ml.parallelize(step, args(), mesh="x=8", batch_argnums=3, on=on), "batch_argnums names argument 3, and there are 3"),
        (lambda on: ml.parallelize(step, args(), mesh="x=8", donate_argnums=-1, on=on), "donate_argnums names argument -1"),
        (lambda on: ml.parallelize(step, args(), mesh="x=8", batch_argnums="x", on=on), "'x' is no number of an argument"),
        (lambda on: ml.parallelize(step, sizes(6, 8, 32), mesh="x=4", batch_argnums=2, on=on), "The leading axis of x has 6 elements, and no axis"),
        (lambda on: ml.parallelize(step, args(), mesh="x=8", memory=1000, on=on), "No layout fits into 1,000 B on each of 8 devices: .* B more"),
        (lambda on: ml.parallelize(step, args(), mesh="x=2 y=2 z=2", on=on), "more than two axes"),
        (lambda on: ml.parallelize(step, args(), mesh="rows", on=on), "'rows' is no mesh axis"),
        (lambda on: ml.parallelize(step, args(), mesh="x=8", memory="lots", on=on), "no size of memory"),
        (lambda on: ml.parallelize(3, args(), mesh="x=8", on=on), "needs a function, and this is 3"),
        (lambda on: ml.parallelize(step, args()[0], mesh="x=8", on=on), "example_args is the tuple of all arguments"),
        (lambda on: ml.parallelize(mlp, (args()[0], "x"), mesh="x=8", on=on), "Argument x is no array: 'x'.*functools.partial"),
        (lambda on: ml.parallelize(lambda x: x[:3] if x.sum() > 0 else x, (f32(8),), mesh="x=8", on=on), "cannot be traced at .*test_parallelize.py"),
        (lambda on: jax.jit(ml.parallelize(mlp, args()[::2], mesh="x=8", on=on))(*arrays(args()[::2])), "was called inside jax.jit"),
        (lambda on: ml.parallelize(mlp, args()[::2], mesh="x=16", on=on)(*arrays(args()[::2])), "The layout needs 16 devices"),
        (lambda on: ml.parallelize(mlp, args()[::2], mesh="x=16", on="a100:1x8"), "The mesh x=16 has 16 devices, and a100:1x8 has 8"),
        (lambda on: ml.parallelize(mlp, args()[::2], mesh="x=8", on="h1000:1x8"), "h1000"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told(make, says: str, slow: str) -> None:
    with pytest.raises(ValueError, match=says):
        make(slow)


def test_a_bound_function_is_named_in_errors(slow: str) -> None:
    fn = functools.partial(mlp, arrays(args()[0]))
    made = ml.parallelize(fn, (args()[2],), mesh="x=8", on=slow)
    assert list(made.plan.inputs) == ["x"]
