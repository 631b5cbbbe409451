"""Tensors outside and inside programs: what they hold, how they say what they are, and what they refuse."""

import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshloom as ml
from meshloom.named.tensor import Tensor
from named.held import floats

X = floats("a b", 8, 16)


def test_what_it_says_of_itself() -> None:
    assert X.sizes == {"a": 8, "b": 16} and X.dtype == jnp.float32 and repr(X) == "Tensor(a=8 b=16: float32)"
    assert X.spec.shape == (8, 16) and X.spec.axes == ("a", "b") and repr(ml.sum(X)) == "Tensor(one number: float32)"
    np.testing.assert_array_equal(X.array("b a"), np.asarray(X.array("a b")).T)
    assert ml.sum(X).item() == pytest.approx(float(np.sum(X.part)), rel=1e-5)


def test_is_a_tree_of_jax() -> None:
    doubled = jax.tree.map(lambda x: 2 * x, {"x": X})
    np.testing.assert_array_equal((doubled["x"] - X).array("a b"), X.array("a b"))
    assert jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path({"x": X})[0][0]) == "['x'].part"
    assert jax.eval_shape(lambda x: ml.sum(x, "a"), X).sizes == {"b": 16}
    jitted = jax.jit(lambda x: ml.rename(x, a="c"))(X)
    assert isinstance(jitted, Tensor) and jitted.names == ("c", "b")
    opt = optax.sgd(1.0)
    moved = optax.apply_updates({"x": X}, opt.update({"x": X}, opt.init({"x": X}))[0])
    assert not np.any(moved["x"].array("a b"))


def test_sizes_inside_a_program_are_those_of_the_whole() -> None:
    seen = []

    def fn(x):
        seen.append((x.sizes, x.part.shape, ml.rename(x, b="c").sizes))
        return x

    ml.explain(fn, X, mesh="rows=2 cols=4", rules="a:rows b:cols")
    assert seen[0] == ({"a": 8, "b": 16}, (4, 4), {"a": 8, "c": 16})


def test_specs_are_made_by_path() -> None:
    specs = {"w": ml.spec("embed ffn", std=0.5, embed=64, ffn=256), "g": ml.spec("embed", mean=1.0, embed=64)}
    made = ml.init(specs, jax.random.key(0))
    assert made["w"].sizes == {"embed": 64, "ffn": 256} and float(jnp.std(made["w"].part)) == pytest.approx(0.5, rel=0.02)
    assert np.all(made["g"].array("embed") == 1) and np.array_equal(ml.init({"w": specs["w"]}, jax.random.key(0))["w"].part, made["w"].part)


@pytest.mark.parametrize(
    "fn, sentence",
    [
        (lambda: ml.tensor("a", np.ones((2, 3))), "An array of shape (2, 3) has 2 axes, and 'a' names 1."),
        (
            lambda: ml.tensor("a a", np.ones((2, 2))),
            "'a' stands twice in 'a a'. Axes of one tensor have different names; call one of them 'a_2'",
        ),
        (lambda: X.array("a"), "This tensor has the axes 'a b', and 'a' was asked for"),
        (lambda: ml.spec("a b", a=1), "'b' needs to be in both"),
        (lambda: ml.spec("a", a=1, c=2), "'c' needs to be in both"),
    ],
)
def test_refuses(fn, sentence: str) -> None:
    with pytest.raises(ValueError) as told:
        fn()
    assert sentence in str(told.value)


def test_the_array_of_a_part_is_refused_inside_a_program() -> None:
    with pytest.raises(ValueError, match="a tensor .a b. is one device's part, and 'a b' of it is no whole array"):
        ml.program(lambda x: x.array("a b"), "rows=2", "a:rows")(X)
    with pytest.raises(ValueError, match="A plain array of shape .4, 16. is returned that differs between the devices along rows"):
        ml.program(lambda x: x.part, "rows=2", "a:rows")(X)


def test_tensors_of_two_layouts_do_not_meet() -> None:
    kept = []
    ml.program(lambda x: kept.append(x) or x, "rows=2", "a:rows")(X)
    with pytest.raises(ValueError, match="Tensors of two programs with different layouts meet"):
        ml.program(lambda x: x + kept[0], "rows=2", "b:rows")(X)


def test_package_names_are_lazy_and_unknown_ones_refused() -> None:
    with pytest.raises(AttributeError, match="There is no name in meshloom, 'einsun'. Did you mean 'einsum'"):
        _ = ml.einsun
    assert "einsum" in dir(ml) and ml.exp is ml.exp and pickle.loads(pickle.dumps(ml.legal)) is ml.legal


def test_importing_the_package_and_its_modules_imports_no_jax() -> None:
    program = (
        "import sys, meshloom; from meshloom import cli; assert 'jax' not in sys.modules; meshloom.einsum; assert 'jax' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"})
