"""Programs under every legal layout: losses and gradients are those of one device. Gradients are taken inside a program and through it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshloom as ml
from meshloom.named.rules import Place, layout
from meshloom.plan.hlo import collectives, total
from named.held import floats, held, leaves, whole

MESH = "rows=2 cols=4"


def mlp(p, x, labels):
    """Two layers and a cross entropy."""
    hidden = ml.relu(ml.einsum(x, p["up"], out="batch hidden") + p["bias"])
    logits = ml.einsum(hidden, p["down"], out="batch class")
    return -ml.mean(ml.sum(ml.log_softmax(logits, "class") * ml.one_hot(labels, "class", 8), "class"))


def attention(p, x):
    """Causal attention of several heads; keys have a name of their own for the sequence."""
    q, k, v = (ml.einsum(x, p[n], out="batch seq heads head") for n in "qkv")
    k, v = ml.rename(k, seq="key"), ml.rename(v, seq="key")
    scores = ml.einsum(q, k, out="batch heads seq key") * 0.5
    scores = ml.where(ml.range("seq", 8) >= ml.range("key", 8), scores, -1e9)
    mixed = ml.einsum(ml.softmax(scores, "key"), v, out="batch seq heads head")
    return ml.mean(ml.square(ml.einsum(mixed, p["o"], out="batch seq embed") - x))


def experts(p, x):
    """Each token's best expert, weighed by its gate; tokens come to the experts by a one-hot product, and a table of biases is read by number."""
    gates = ml.softmax(ml.einsum(x, p["gate"], out="token expert"), "expert")
    best = ml.argmax(gates, "expert")
    chosen = ml.one_hot(best, "expert", 8) * gates
    hidden = ml.tanh(ml.einsum(x, ml.stop_gradient(ml.one_hot(best, "expert", 8)), p["up"], out="token expert ffn"))
    y = ml.einsum(hidden, p["down"], chosen, out="token embed") + ml.take(p["bias"], best, "expert")
    return ml.mean(ml.square(y))


PROGRAMS = {
    "mlp": (
        mlp,
        ({"up": floats("feature hidden", 8, 16), "bias": floats("hidden", 16), "down": floats("hidden class", 16, 8)},
         floats("batch feature", 8, 8), whole("batch", 7, 8)),
        "batch feature hidden class",
    ),
    "attention": (
        attention,
        ({**{n: floats("embed heads head", 8, 4, 4) for n in "qkv"}, "o": floats("heads head embed", 4, 4, 8)}, floats("batch seq embed", 4, 8, 8)),
        "batch seq key heads head embed",
    ),
    "experts": (
        experts,
        ({"gate": floats("embed expert", 8, 8), "up": floats("expert embed ffn", 8, 8, 8), "down": floats("expert ffn embed", 8, 8, 8),
          "bias": floats("expert embed", 8, 8)}, floats("token embed", 8, 8)),
        "token embed expert ffn",
    ),
}  # fmt: skip
TENSORS = {
    "mlp": ("batch feature", "feature hidden", "batch hidden", "hidden class", "batch class"),
    "attention": ("batch seq embed", "embed heads head", "batch seq heads head", "batch key heads head", "batch heads seq key"),
    "experts": ("token embed", "embed expert", "token expert", "expert embed ffn", "token expert ffn"),
}
"""The names of every tensor of each program, read off its text."""
SAMPLE = 6
"""Legal layouts of each program that the suite compiles, evenly spaced among all of them."""


def by_hand(name: str) -> tuple[list[dict], list[dict]]:
    """The tables that send each name to one of two mesh axes or to none: those with no two names of one tensor on one mesh axis, and the others."""
    good, bad, names = [], [], PROGRAMS[name][2].split()
    for axes in itertools.product(("", "rows", "cols"), repeat=len(names)):
        of = dict(zip(names, axes))
        used = [[of[n] for n in tensor.split() if of[n]] for tensor in TENSORS[name]]
        clash = any(len(set(u)) < len(u) for u in used)
        (bad if clash else good).append({n: (a,) for n, a in of.items() if a})
    return good, bad


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_legal_layout_changes_loss_or_gradients(name: str) -> None:
    fn, args, _ = PROGRAMS[name]
    tables = ml.legal(fn, *args, mesh=MESH)
    assert {frozenset(t.items()) for t in tables} == {frozenset(t.items()) for t in by_hand(name)[0]}
    loss, grads = ml.value_and_grad(fn)(*args)
    for table in tables[1 :: len(tables) // SAMPLE]:
        program = ml.program(ml.value_and_grad(fn), MESH, table)
        got, slopes = program(*args)
        np.testing.assert_allclose(got, loss, rtol=1e-5, err_msg=str(table))
        for a, b in zip(leaves(slopes), leaves(grads), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max(), err_msg=str(table))


@pytest.mark.parametrize("name", PROGRAMS)
def test_illegal_layouts_are_refused_naming_both(name: str) -> None:
    fn, args, _ = PROGRAMS[name]
    bad = by_hand(name)[1]
    for table in bad[:: len(bad) // 8]:
        with pytest.raises(ValueError, match="The rules split both '(.*)' and '(.*)' over mesh axis"):
            ml.explain(fn, *args, mesh=MESH, rules=table)


@pytest.mark.parametrize(
    "name, rules", [("mlp", "batch:rows hidden:cols"), ("attention", "batch:rows heads:cols"), ("experts", "token:rows expert:cols")]
)
def test_jax_grad_goes_through_a_program_and_counts_are_exact(name: str, rules: str) -> None:
    fn, args, _ = PROGRAMS[name]
    through = jax.value_and_grad(ml.program(fn, MESH, rules))(*args)
    inside = ml.program(ml.value_and_grad(fn), MESH, rules)(*args)
    for a, b in zip(leaves(through), leaves(inside), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    program = ml.program(ml.value_and_grad(fn), MESH, rules)
    found = total(collectives(program.lower(*args).compile().as_text(), program.layout.sizes))
    assert ml.explain(program, *args).total == found


def test_equal_to_plain_jax() -> None:
    """The tensor program's loss and gradients against the same in jnp, without names."""
    fn, (p, x, labels), _ = PROGRAMS["mlp"]

    def plain(up, bias, down):
        logits = jax.nn.relu(x.part @ up + bias) @ down
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels.part, 8), -1))

    loss, grads = jax.value_and_grad(plain, (0, 1, 2))(p["up"].part, p["bias"].part, p["down"].part)
    got, named = ml.program(ml.value_and_grad(fn), MESH, "batch:rows hidden:cols")(p, x, labels)
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    for key, want in zip(("up", "bias", "down"), grads):
        np.testing.assert_allclose(named[key].part, want, rtol=1e-4, atol=1e-6)


def test_megatron_traffic_of_a_multi_layer_perceptron() -> None:
    """One all-reduce of the activations forward, one backward, over the axis of `hidden`; the gradients of weights once, over that of the batch.
    x has [4, 8] on a device and is no parameter, so nothing flows back into it: backward needs no all-reduce over cols."""

    def fn(p, x):
        return ml.mean(ml.square(ml.einsum(ml.gelu(ml.einsum(x, p["up"], out="batch hidden")), p["down"], out="batch embed")))

    p, x = {"up": floats("embed hidden", 8, 16), "down": floats("hidden embed", 16, 8)}, floats("batch embed", 8, 8)
    told = ml.explain(ml.value_and_grad(fn), p, x, mesh=MESH, rules="batch:rows hidden:cols")
    assert told.total == {("all-reduce", ("cols",)): (1, 4 * 8 * 4), ("all-reduce", ("rows",)): (3, 4 + 2 * 8 * 4 * 4)}
    into = ml.explain(ml.value_and_grad(fn, (0, 1)), p, x, mesh=MESH, rules="batch:rows hidden:cols")
    assert into.total[("all-reduce", ("cols",))] == (2, 2 * 4 * 8 * 4)
    assert told.flops * 8 == told.whole


def test_results_lie_where_the_rules_say_and_shapes_come_from_specs() -> None:
    program = ml.program(lambda x: (ml.exp(x), ml.sum(x), 3), MESH, "a:rows b:cols")
    y, total, three = program(floats("a b", 8, 16))
    assert y.part.sharding.shard_shape((8, 16)) == (4, 4) and total.shape == () and three == 3
    assert program.lower(ml.spec("a b", a=8, b=16)).compile() is not None


def test_a_program_inside_jit_and_scan() -> None:
    """A loop of lax over named tensors; its collectives are multiplied out."""

    def fn(w, x):
        def layer(x, _):
            return ml.tanh(ml.einsum(ml.einsum(x, w, out="b c"), ml.rename(w, a="d"), out="b d")), None

        y = jax.lax.scan(lambda x, i: (ml.rename(layer(x, i)[0], d="a"), None), x, None, length=3)[0]
        return ml.sum(y)

    args = (floats("a c", 8, 16), floats("b a", 4, 8))
    (told,) = held(fn, args, "c:cols b:rows")
    assert told.total[("all-reduce", ("cols",))] == (3, 3 * 2 * 8 * 4)
    want = jax.jit(lambda w, x: fn(w, x).array())(*args)
    np.testing.assert_allclose(jax.jit(ml.program(fn, MESH, "c:cols"))(*args), want, rtol=1e-5)


def test_more_devices_than_there_are_is_refused_but_explained() -> None:
    x = ml.spec("batch", batch=4096)
    assert ml.explain(ml.sum, x, mesh="rows=64 cols=64", rules="batch:rows,cols").total == {("all-reduce", ("rows", "cols")): (1, 4)}
    with pytest.raises(ValueError, match="The layout needs 4096 devices"):
        ml.program(ml.sum, "rows=64 cols=64", "batch:rows,cols")(ml.zeros("batch", batch=4096))


def test_arguments_that_the_rules_cannot_split_are_refused() -> None:
    with pytest.raises(ValueError, match="Axis 'a' of size 6 cannot be split over 4 devices"):
        ml.program(ml.sum, MESH, "a:cols")(floats("a", 6))
    assert Place(layout(MESH, "a:cols")).parts("a") == 4
