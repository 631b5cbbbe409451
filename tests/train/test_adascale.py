"""AdaScale against its formulas in NumPy, and its gain at both ends: noise alone, and no noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import workers
from meshloom.train.adascale import adascale, gain, memory, parts
from meshloom.train.config import OptimizerConfig

STEPS = 5
MATRICES = ("embed", "layers.q", "layers.up")


def schedule(done):
    """A rate that tells which count it was asked for."""
    return 0.02 + 0.001 * jnp.asarray(done, jnp.float32)


def simulate(c: OptimizerConfig, shards: int, x: dict[str, np.ndarray], gradients: list[dict[str, np.ndarray]], clip: float):
    """The published algorithm with running means: after every step (parameters, gain, scaled count, learning rate)."""
    x, scaled, noise, signal, keep = {n: a.astype(np.float64) for n, a in x.items()}, 0.0, 0.0, 0.0, max(0, 1 - shards / 1000)
    m, v = {n: 0 * a for n, a in x.items()}, {n: 0 * a for n, a in x.items()}
    for t, grads in enumerate(gradients, 1):
        own = [sum((g[i].astype(np.float64) ** 2).sum() for g in grads.values()) for i in range(shards)]
        g = {n: a.astype(np.float64).mean(0) for n, a in grads.items()}
        whole = sum((a**2).sum() for a in g.values())
        r = 1.0
        if shards > 1:
            variance = (sum(own) - shards * whole) / (shards - 1)
            noise = keep * noise + (1 - keep) * max(variance, 0)
            signal = keep * signal + (1 - keep) * max(whole - variance / shards, 0)
            bias = 1 - keep**t
            r = (noise / bias + signal / bias) / (noise / bias / shards + signal / bias)
        scaled += r
        lr = r * (0.02 + 0.001 * scaled * 3)
        factor = min(1, clip / np.sqrt(whole))
        for n in x:
            if c.kind == "sgd":
                m[n] = 0.9 * m[n] + factor * g[n]
                d = m[n]
            else:
                m[n], v[n] = 0.8 * m[n] + 0.2 * factor * g[n], 0.9 * v[n] + 0.1 * (factor * g[n]) ** 2
                d = m[n] / (1 - 0.8**t) / (np.sqrt(v[n] / (1 - 0.9**t)) + 1e-6)
            x[n] = x[n] - lr * (d + (0.1 * x[n] if n in MATRICES else 0))
        yield dict(x), r, scaled, lr


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_adascale_is_that_of_its_paper(kind, replicas):
    how = {"momentum": 0.9, "nesterov": False} if kind == "sgd" else {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
    c = OptimizerConfig(kind=kind, weight_decay=0.1, adascale=True, **how)
    p, rng = workers.plan(replicas), np.random.default_rng(replicas)
    common = [workers.draw(rng) for _ in range(STEPS)]
    grads = [{n: a + 0.5 * workers.draw(rng, (replicas,))[n] for n, a in g.items()} for g in common]
    start = workers.draw(rng)
    rule, gains = adascale(c, p, workers.specs(), schedule, 3, 4.0), []
    sim = simulate(c, replicas, start, grads, 4.0)
    for (_, params, _opt, _, told), (x, r, scaled, lr) in zip(workers.run(p, rule, start, grads, [0.0] * STEPS), sim):
        workers.near(params, x, 1e-5)
        for name, want in (("adascale_gain", r), ("scaled_steps", scaled), ("lr", lr)):
            assert float(told[name]) == pytest.approx(want, rel=1e-5), name
        gains.append(r)
    assert all(1 < r < replicas for r in gains) if replicas > 1 else gains == [1.0] * STEPS


def test_gain_at_both_ends():
    """Shards that agree: 1. Gradients of noise alone: as many as shards. No gradient at all: 1."""
    assert float(gain(*parts(jnp.float32(2.0), jnp.float32(2.0), 8), 8)) == pytest.approx(1)
    assert float(gain(jnp.float32(5.0), jnp.float32(0.0), 8)) == pytest.approx(8)
    assert float(gain(jnp.float32(0), jnp.float32(0), 8)) == 1
    noise, signal = parts(jnp.float32(10.0), jnp.float32(4.0), 4)
    assert float(noise) == pytest.approx(8) and float(signal) == pytest.approx(2)
    assert [memory(n) for n in (4, 1000, 4000)] == [0.996, 0.0, 0.0]


def test_many_shards_of_noise_gain_as_many_steps():
    """Unbiased: over many draws of pure noise the mean square of the signal is near 0 and the gain near the number of shards."""
    rng = np.random.default_rng(0)
    noise, signal = [], []
    for _ in range(200):
        g = rng.standard_normal((4, 1000))
        got = jax.device_get(parts(jnp.float32((g**2).sum(1).mean()), jnp.float32((g.mean(0) ** 2).sum()), 4))
        noise.append(got[0])
        signal.append(got[1])
    assert np.mean(noise) == pytest.approx(1000, rel=0.02) and np.mean(signal) < 15
    assert float(gain(jnp.float32(np.mean(noise)), jnp.float32(np.mean(signal)), 4)) > 3.7
