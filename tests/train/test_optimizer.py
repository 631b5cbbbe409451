"""Every optimizer against a NumPy simulation, against Optax, under skipping, padding, sharding, and by what it decays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding

from meshloom.core.layout import Layout
from meshloom.core.spec import Init, abstract, is_spec, spec
from meshloom.core.tree import named_leaves
from meshloom.train.config import LossScaleConfig, OptimizerConfig
from meshloom.train.optimizer import OPTIMIZERS, clip_factor, decayed, make_optimizer, role, roles, state_specs, update
from meshloom.train.scale import init_scale, next_scale
from meshloom.weights.checkpoint import Checkpoints, load

SIZES = dict(layer=3, embed=8, heads=4, kv_heads=2, head=6, ffn=10, vocab=12, position=5)
SMALL = Init(std=0.3)


def specs():
    new = functools.partial(spec, SIZES, init=SMALL)
    return {
        "embed": new("vocab embed", used={"vocab": 11}),
        "position": new("position embed"),
        "layers": {
            "q": new("layer embed heads head"),
            "k": new("layer embed kv_heads head"),
            "o": new("layer heads head embed"),
            "up": new("layer embed ffn"),
            "down": new("layer ffn embed"),
            "gain": new("layer embed"),
            "bias_q": new("layer heads head"),
            "bias_up": new("layer ffn"),
        },
        "final": new("embed"),
    }


MATRICES = {
    "embed": (1, 1),
    "position": (1, 1),
    "layers.q": (1, 2),
    "layers.k": (1, 2),
    "layers.o": (2, 1),
    "layers.up": (1, 1),
    "layers.down": (1, 1),
}
"""Path -> how many axes are rows and columns, after `layer`."""
CONFIGS = {
    "adamw": OptimizerConfig(lr=0.02, beta1=0.8, beta2=0.95, eps=1e-6),
    "adafactor": OptimizerConfig(kind="adafactor", lr=0.02, relative=True, update_clip=0.8),
    "lion": OptimizerConfig(kind="lion", lr=0.02, beta1=0.9, beta2=0.97),
    "muon": OptimizerConfig(kind="muon", lr=0.02, momentum=0.9),
    "sgd": OptimizerConfig(kind="sgd", lr=0.02, momentum=0.9),
    "sgd plain": OptimizerConfig(kind="sgd", lr=0.02, momentum=0.0),
    "sgd heavy ball": OptimizerConfig(kind="sgd", lr=0.02, momentum=0.9, nesterov=False),
    "muon plain": OptimizerConfig(kind="muon", lr=0.02, nesterov=False, weight_decay=0.0),
    "adafactor absolute": OptimizerConfig(kind="adafactor", lr=0.02, decay_rate=0.7),
}


def random_like(specs):
    """NumPy normal deviates, zero in the padding."""
    draw = np.random.default_rng(0).standard_normal

    def one(s):
        value = np.zeros(s.shape, np.float32)
        value[tuple(slice(n) for n in s.used)] = 0.3 * draw(s.used)
        return jnp.asarray(value)

    return jax.tree.map(one, specs, is_leaf=is_spec)


@functools.cache
def start():
    return random_like(specs())


@jax.jit
def gradient(params, i):
    """A gradient that depends on the parameters and on the step; padding has none."""
    return jax.tree.map(lambda p: jnp.where(p == 0, 0, jnp.sin(3 * p + i) * (1 + i % 3)), params)


@functools.cache
def stepper(name):
    """The optimizer of a config, and its step (grads, state, params, lr), compiled once for all tests."""
    tx = make_optimizer(CONFIGS[name], specs())
    step = jax.jit(lambda g, s, p, lr: update(tx, g, optax.tree.norm(g), s, p, lr=lr, clip=4.0))
    return tx._replace(init=jax.jit(tx.init)), step


# ---- NumPy: one 2-D matrix or one vector at a time, in float64, from the papers ----


def np_adam(c, g, s, t):
    s["m"] = c.beta1 * s.get("m", 0) + (1 - c.beta1) * g
    s["v"] = c.beta2 * s.get("v", 0) + (1 - c.beta2) * g**2
    return (s["m"] / (1 - c.beta1**t)) / (np.sqrt(s["v"] / (1 - c.beta2**t)) + c.eps)


def np_lion(c, g, s, t):
    m = s.get("m", 0)
    s["m"] = c.beta2 * m + (1 - c.beta2) * g
    return np.sign(c.beta1 * m + (1 - c.beta1) * g)


def np_sgd(c, g, s, t):
    s["m"] = g + c.momentum * s.get("m", 0)
    return g + c.momentum * s["m"] if c.nesterov else s["m"]


def np_muon(c, g, s, t):
    b = c.momentum
    s["m"] = b * s.get("m", 0) + (1 - b) * g
    x = b * s["m"] / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t) if c.nesterov else s["m"]
    x = x / np.sqrt((x**2).sum())
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T @ x) + 2.0315 * (x @ x.T @ x @ x.T @ x)
    return x * 0.2 * np.sqrt(max(x.shape))


def np_adafactor(c, g, s, t, p, matrix):
    keep = 1 - t**-c.decay_rate
    s["v"] = None
    if matrix:
        s["r"] = keep * s.get("r", 0) + (1 - keep) * (g**2 + 1e-30).sum(1)
        s["c"] = keep * s.get("c", 0) + (1 - keep) * (g**2 + 1e-30).sum(0)
        v = np.outer(s["r"], s["c"]) / s["r"].sum()
    else:
        s["full"] = v = keep * s.get("full", 0) + (1 - keep) * (g**2 + 1e-30)
    u = g / np.sqrt(v)
    u = u / max(1, np.sqrt((u**2).mean()) / c.update_clip)
    return u * max(1e-3, np.sqrt((p**2).mean())) if c.relative else u


def np_direction(c, name, g, s, t, p):
    matrix, table = name in MATRICES, name in ("embed", "position")
    if c.kind == "adafactor":
        return np_adafactor(c, g, s, t, p, matrix)
    rule = {"adamw": np_adam, "lion": np_lion, "sgd": np_sgd, "muon": np_muon if matrix and not table else np_adam}[c.kind]
    return rule(c, g, s, t)


def simulate(c, steps, lr, clip):
    """`steps` steps in NumPy: every layer's weight by itself, as a matrix where it is one, without padding."""
    params = {n: np.asarray(x, np.float64) for n, x in named_leaves(start()).items()}
    state = {}
    for t in range(1, steps + 1):
        as_tree = jax.tree.unflatten(jax.tree.structure(start()), [jnp.asarray(p, jnp.float32) for p in params.values()])
        grads = {n: np.asarray(x, np.float64) for n, x in named_leaves(gradient(as_tree, t)).items()}
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        for name, p in params.items():
            layered = name.startswith("layers.")
            for i in range(len(p) if layered else 1):
                pick = (i,) if layered else ((slice(0, 11),) if name == "embed" else ())
                own = p[pick].shape
                flat = (int(np.prod(own[: MATRICES[name][0]])), -1) if name in MATRICES else own
                g = grads[name][pick].reshape(flat) * min(1, clip / norm)
                d = np_direction(c, name, g, state.setdefault((name, i), {}), t, p[pick].reshape(flat))
                decay = c.weight_decay * p[pick] if name in MATRICES else 0
                p[pick] = p[pick] - lr(t) * (d.reshape(own) + decay)
    return params


@pytest.mark.parametrize("name", CONFIGS)
def test_gold(name):
    c = CONFIGS[name]

    def lr(t):
        return c.lr * (1 - t / 20)

    (tx, step), params = stepper(name), start()
    state = tx.init(params)
    for t in range(1, 11):
        params, state, finite = step(gradient(params, t), state, params, lr(t))
        assert bool(finite)
    want = simulate(c, 10, lr, clip=4.0)
    for path, got in named_leaves(params).items():
        np.testing.assert_allclose(got, want[path], rtol=2e-4, atol=5e-6, err_msg=path)
    assert {c.kind for c in CONFIGS.values()} == set(OPTIMIZERS)


OPTAX = {
    "adamw": lambda c, mask: optax.adamw(c.lr, c.beta1, c.beta2, c.eps, weight_decay=c.weight_decay, mask=mask),
    "lion": lambda c, mask: optax.lion(c.lr, c.beta1, c.beta2, weight_decay=c.weight_decay, mask=mask),
    "sgd": lambda c, mask: optax.chain(
        optax.trace(c.momentum, c.nesterov), optax.add_decayed_weights(c.weight_decay, mask), optax.scale(-c.lr)
    ),
}


@pytest.mark.parametrize("name", OPTAX)
def test_equals_optax(name):
    c, params = CONFIGS[name], start()
    mask = jax.tree.map(lambda r: r.matrix, roles(specs()), is_leaf=lambda x: hasattr(x, "matrix"))
    theirs, (ours, step) = optax.chain(optax.clip_by_global_norm(4.0), OPTAX[name](c, mask)), stepper(name)
    a, b, sa, sb = params, params, theirs.init(params), ours.init(params)
    optax_step = jax.jit(theirs.update)
    for t in range(10):
        ua, sa = optax_step(gradient(a, t), sa, a)
        a, (b, sb, _) = optax.apply_updates(a, ua), step(gradient(b, t), sb, b, c.lr)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), a, b)


def test_muon_equals_optax():
    c = OptimizerConfig(kind="muon", lr=0.02, momentum=0.9, weight_decay=0.0)
    two = {"a": spec(SIZES, "embed ffn", SMALL), "b": spec(SIZES, "ffn embed", SMALL), "n": spec(SIZES, "embed", SMALL)}
    theirs = optax.contrib.muon(c.lr, beta=0.9, eps=c.eps, consistent_rms=0.2, adam_b1=c.beta1, adam_b2=c.beta2)
    ours, a = make_optimizer(c, two), random_like(two)
    b, sa, sb = a, theirs.init(a), ours.init(a)
    step_a, step_b = jax.jit(theirs.update), jax.jit(ours.update)
    for t in range(5):
        ua, sa = step_a({**gradient(a, t), "n": np.zeros(8, np.float32)}, sa, a)
        ub, sb = step_b({**gradient(b, t), "n": np.zeros(8, np.float32)}, sb, b, lr=c.lr)
        a, b = optax.apply_updates(a, ua), optax.apply_updates(b, ub)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), a, b)


def test_roles():
    for name, s in named_leaves(specs(), is_spec).items():
        r = role(s)
        assert (len(r.rows), len(r.columns)) == MATRICES.get(name, (0, 0)), name
    assert role(spec(SIZES, "vocab embed")).table and not role(spec(SIZES, "layer embed ffn")).table
    assert role(spec({}, "")) == role(spec({}, "")) and not role(spec({}, "")).matrix


def test_decay_by_hand():
    """C05: no gradient, decay 0.1, lr 0.1: matrices shrink by exactly 1 - 0.01; gains and biases stay bit for bit."""
    tx, params = make_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.1), specs()), start()
    zero = jax.tree.map(np.zeros_like, params)
    after, _, _ = jax.jit(lambda p: update(tx, zero, jnp.float32(0), tx.init(p), p, lr=jnp.float32(0.1), clip=1.0))(params)
    assert set(decayed(specs())) == set(MATRICES)
    for name, p in named_leaves(params).items():
        got = np.asarray(named_leaves(after)[name])
        if name in MATRICES:
            np.testing.assert_allclose(got, np.asarray(p) * 0.99, rtol=2e-7)
        else:
            assert got.tobytes() == np.asarray(p).tobytes(), name


@pytest.mark.parametrize("name", CONFIGS)
def test_skip_changes_no_bit(name):
    (tx, step), params = stepper(name), start()
    params, state, _ = step(gradient(params, 1), tx.init(params), params, 0.1)
    bad = gradient(params, 2)
    bad["layers"]["up"] = bad["layers"]["up"].at[0, 0, 0].set(jnp.nan)
    after = step(bad, state, params, 0.1)
    assert not bool(after[2])
    before, now = named_leaves((params, state)), named_leaves(after[:2])
    assert all(np.asarray(now[k]).tobytes() == np.asarray(before[k]).tobytes() for k in before)


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_stays_zero(name):
    (tx, step), params = stepper(name), start()
    state = tx.init(params)
    for t in range(3):
        params, state, _ = step(gradient(params, t), state, params, 0.1)
    assert not np.any(params["embed"][11:]) and np.all(np.isfinite(params["embed"]))


def test_fp32_master_moves():
    """C57: weight 1.0, update -1e-3, 150 times: the bf16 view is 0.8515625; weights kept in bf16 would have stayed 1.0."""
    one = {"w": spec({"embed": 1}, "embed", Init(mean=1.0))}
    tx = make_optimizer(OptimizerConfig(kind="sgd", lr=1e-3, momentum=0.0), one)
    params = {"w": jnp.ones(1)}
    state = tx.init(params)
    step = jax.jit(lambda s, p: update(tx, {"w": jnp.ones(1)}, jnp.float32(1), s, p, lr=jnp.float32(1e-3), clip=1.0))
    for _ in range(150):
        params, state, _ = step(state, params)
    assert float(params["w"].astype(jnp.bfloat16)[0]) == 0.8515625


def test_clip_factor():
    assert float(clip_factor(jnp.float32(4.0), 1.0)) == 0.25
    assert float(clip_factor(jnp.float32(0.5), 1.0)) == 1.0 and float(clip_factor(jnp.float32(0.0), 1.0)) == 1.0
    assert float(clip_factor(jnp.float32(9.0), 0.0)) == 1.0


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "muon", "sgd"])
def test_state_specs_and_sharded_update(name):
    """The state's shardings follow from names, and a sharded update equals the update on one device."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("zero", "tensor"))
    layout = Layout({"zero": 2, "tensor": 2}, rest={"embed": ("zero",), "heads": ("tensor",), "kv_heads": ("tensor",), "ffn": ("tensor",)})
    tx, params = make_optimizer(CONFIGS[name], specs()), start()
    state = tx.init(params)
    described = state_specs(tx, specs())
    given, true = ({n: (x.shape, str(x.dtype)) for n, x in named_leaves(t, is_spec).items()} for t in (described, state))
    assert given == true

    def place(tree):
        return jax.tree.map(lambda s: NamedSharding(mesh, layout.partition("rest", s.axes)), tree, is_leaf=is_spec)

    where = (place(specs()), place(described))
    (_, step), grads = stepper(name), gradient(params, 1)
    again = jax.jit(lambda g, s, p: step(g, s, p, 0.1)[:2], out_shardings=where)
    sharded = again(jax.device_put(grads, where[0]), *jax.device_put((state, params), where[::-1]))
    got = named_leaves(jax.device_get(sharded))
    for path, want in named_leaves(step(grads, state, params, 0.1)[:2]).items():
        np.testing.assert_allclose(got[path], want, rtol=1e-4, atol=1e-5, err_msg=path)
    if name == "adafactor":
        rows = described.rows["layers"]["o"], described.columns["layers"]["o"]
        assert [s.axes for s in rows] == [("layer", "heads", "head"), ("layer", "embed")]


def test_state_survives_a_checkpoint(tmp_path):
    """C27: counts, moments, factored moments and the loss scale come back bit for bit, and none may be missing."""
    scale = next_scale(LossScaleConfig(), "fp16", init_scale(LossScaleConfig(), "fp16"), jnp.asarray(False))
    tree = {"params": start(), "scale": scale}
    for name in ("muon", "adafactor", "lion", "sgd"):
        tx, step = stepper(name)
        tree[name] = step(gradient(start(), 1), tx.init(start()), start(), 0.1)[1]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, tree, {})
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    back = checkpoints.restore(shapes)
    checkpoints.close()
    assert jax.tree.structure(back) == jax.tree.structure(tree) and int(back["muon"].count) == 1
    assert all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(tree)))
    with pytest.raises(ValueError, match="it lacks adamw.count, adamw.mu.embed"):
        load(tmp_path / "1", {"adamw": jax.eval_shape(stepper("adamw")[0].init, start())}, part=True)


def test_unknown_state_is_refused():
    odd = optax.GradientTransformation(lambda p: {"blocks": jnp.zeros((4, 4))}, None)
    with pytest.raises(ValueError, match=r"Optimizer state blocks of shape \(4, 4\) mirrors no parameter"):
        state_specs(odd, specs())


def test_abstract_init_allocates_nothing():
    for c in CONFIGS.values():
        jax.eval_shape(make_optimizer(c, specs()).init, abstract(specs()))
