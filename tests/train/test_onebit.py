"""The exchange by one bit: packing, the mean and the errors against one server in NumPy, and what moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import workers
from meshloom.core.layout import Layout
from meshloom.core.spec import is_spec, spec
from meshloom.core.tree import named_leaves
from meshloom.plan.cost import compare, wire_bytes
from meshloom.plan.hlo import collectives
from meshloom.recipes.verify import QUICK
from meshloom.train import onebit
from meshloom.train.onebit import Errors, apart, check, error_specs, exchange_cost, make_exchange, pack, piece, together, unpack


def test_eight_signs_a_byte_and_back():
    signs = np.random.default_rng(0).random((3, 13)) > 0.5
    bits = pack(jnp.asarray(signs))
    assert bits.dtype == jnp.uint8 and bits.shape == (3, 2)
    assert np.array_equal(np.asarray(unpack(bits, 13)), np.where(signs, 1.0, -1.0))
    assert np.array_equal(np.asarray(bits), np.packbits(signs, axis=1))


def test_parts_of_an_array_and_back():
    a = jnp.arange(48).reshape(3, 8, 2)
    assert np.array_equal(together(apart(a, 1, 4), 1), a)
    assert np.array_equal(apart(a, 1, 4)[2], a[:, 4:6])


@pytest.mark.parametrize("replicas", [2, 4])
def test_exchange_is_that_of_workers_and_one_server(replicas):
    """Five exchanges, each with the errors of the one before; whole and split inside the replicas; the traffic is the formula's."""
    p, rng, server = workers.plan(replicas), np.random.default_rng(1), workers.Server(replicas)
    like = workers.specs()
    errors = error_specs(p.layout, like)
    where = tuple(workers.shardings(p, t) for t in (errors.worker, like, errors))
    run = jax.jit(make_exchange(p, like), in_shardings=where, out_shardings=(where[1], where[2]))
    live = {name: np.zeros(s.shape, bool) for name, s in named_leaves(like, is_spec).items()}
    for name, s in named_leaves(like, is_spec).items():
        live[name][tuple(slice(n) for n in s.used)] = True
    live["embed"][3] = False  # a row that has never had a gradient
    have = jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape), errors, is_leaf=is_spec), out_shardings=where[2])()
    values = workers.draw(rng, (replicas,))
    program = run.lower(workers.tree(values), workers.tree(live), have).compile(compiler_options=QUICK)
    for _ in range(5):
        mean, have = program(*jax.device_put((workers.tree(values), workers.tree(live)), where[:2]), have)
        want = server.mean([{n: a[i] for n, a in values.items()} for i in range(replicas)], live)
        workers.near(workers.host(mean), want)
        workers.near(workers.host(have.server), server.server)
        workers.near({n: a for n, a in workers.host(have.worker).items()}, {n: np.stack([w[n] for w in server.worker]) for n in live})
        values = workers.draw(rng, (replicas,))
    lines = compare(collectives(program.as_text(), p.layout.sizes), exchange_cost(workers.shapes(p.layout)))
    assert lines and all(line.equal for line in lines), lines


def test_the_scales_do_not_depend_on_the_split():
    """The same values give the same result bit for bit in signs, whatever splits a replica."""
    by = {}
    for lay in (workers.LAYOUTS[4], Layout({"data": 4}, acts={"batch": ("data",)})):
        p = workers.plan(4)._replace(layout=lay, mesh=workers.make_mesh(lay))
        like, errors = workers.specs(), error_specs(lay, workers.specs())
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape), errors, is_leaf=is_spec)
        live = jax.tree.map(lambda s: jnp.ones(s.shape, bool), like, is_leaf=is_spec)
        mean, _ = jax.jit(make_exchange(p, like))(workers.tree(workers.draw(np.random.default_rng(3), (4,))), live, zero)
        by[lay.devices] = workers.host(mean)
    workers.near(by[8], by[4], 1e-6)


def test_a_bit_each_way():
    """Of a large matrix, 2 n / 8 bytes and a few scales, on the wire (n-1)/n of that; 32 bits twice for the plain mean."""
    lay = Layout({"data": 4}, acts={"batch": ("data",)})
    big = {"w": spec({"embed": 1024, "ffn": 4096}, "embed ffn")}
    found = exchange_cost(workers.shapes(lay, big))
    elements = 1024 * 4096
    assert sum(c.bytes for c in found if c.kind == "all-to-all") == elements // 8
    assert sum(wire_bytes(c, lay) for c in found) == pytest.approx(2 * elements / 8 * 3 / 4, rel=1e-4)


def test_one_replica_exchanges_nothing():
    p, values = workers.plan(1), workers.draw(np.random.default_rng(0), (1,))
    errors = Errors(1, 2)
    live = jax.tree.map(lambda s: np.ones(s.shape, bool), workers.specs(), is_leaf=is_spec)
    mean, same = make_exchange(p, workers.specs())(workers.tree(values), live, errors)
    assert same is errors
    assert all(np.array_equal(a, values[name][0]) for name, a in workers.host(mean).items())
    assert exchange_cost(workers.shapes(p.layout)) == ()


def test_a_matrix_that_cannot_be_shared_out_is_refused():
    lay = Layout({"data": 3}, acts={"batch": ("data",)})
    with pytest.raises(ValueError, match=r"embed \(vocab embed, 25 x 8 on a device\) has no axis that 3 replicas divide"):
        check(lay, {"embed": spec({"vocab": 25, "embed": 8}, "vocab embed")}, "onebit_adam")
    check(lay, {"gain": spec({"embed": 8}, "embed")}, "onebit_adam")
    assert piece(lay, spec({"embed": 8}, "embed")).at is None
    assert onebit.sign(jnp.zeros(1))[0] == 1
