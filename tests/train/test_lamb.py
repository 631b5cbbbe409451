"""LAMB and 1-bit LAMB, replayed by workers and a server in NumPy, on gradients that are given."""

import numpy as np
import pytest

import workers
from meshloom.train.config import OptimizerConfig
from meshloom.train.lamb import lamb, onebit_lamb

LRS = [0.02, 0.03, 0.02, 0.025, 0.01, 0.02, 0.02, 0.03, 0.01]
MATRICES = ("embed", "layers.q", "layers.up")
MORE = dict(beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, max_coeff=1.2, min_coeff=0.3)


def each(a: np.ndarray, name: str):
    """The separate weights of a parameter."""
    return list(a) if name.startswith("layers") else [a]


def joined(parts: list[np.ndarray], name: str) -> np.ndarray:
    return np.stack(parts) if name.startswith("layers") else parts[0]


class Lamb:
    """LAMB weight by weight, and what 1-bit LAMB makes of it after the freeze."""

    def __init__(self, c: OptimizerConfig, replicas: int, x: dict[str, np.ndarray]):
        self.c, self.x, self.server = c, x, workers.Server(replicas)
        self.m, self.v, self.fresh = ({n: np.zeros_like(a) for n, a in x.items()} for _ in range(3))
        self.scale = {n: np.zeros(len(each(a, n))) for n, a in x.items()}
        self.factor = {n: np.ones(len(each(a, n))) for n, a in x.items()}

    def direction(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        bare = self.m[name] / (np.sqrt(self.v[name]) + self.c.eps)
        return bare, bare + (self.c.weight_decay * self.x[name] if name in MATRICES else 0)

    def move(self, name: str, towards: np.ndarray, scale: list[float], lr: float) -> None:
        self.x[name] = joined([x - lr * s * d for x, s, d in zip(each(self.x[name], name), scale, each(towards, name))], name)

    def warm_up(self, grads: list[dict[str, np.ndarray]], lr: float) -> None:
        for n in self.x:
            g = np.mean([w[n] for w in grads], 0)
            self.m[n] = 0.8 * self.m[n] + 0.2 * g
            self.v[n] = 0.9 * self.v[n] + 0.1 * g**2
            self.fresh[n] = self.v[n].copy()
            towards, scale = self.direction(n)[1], []
            for x, d in zip(each(self.x[n], n), each(towards, n)):
                norms = np.linalg.norm(x), np.linalg.norm(d)
                scale.append(min(max(norms[0] / norms[1], self.c.min_coeff), self.c.max_coeff) if all(norms) else 1.0)
            self.scale[n] = self.c.coeff_beta * self.scale[n] + (1 - self.c.coeff_beta) * np.array(scale)
            self.move(n, towards, scale, lr)

    def onebit(self, grads: list[dict[str, np.ndarray]], lr: float) -> None:
        c, live, old = self.c, {n: v > 0 for n, v in self.v.items()}, self.m
        self.m = self.server.mean([{n: 0.8 * old[n] + 0.2 * w[n] for n in old} for w in grads], live)
        for n in self.x:
            rebuilt = (self.m[n] - 0.8 * old[n]) / 0.2
            self.fresh[n] = 0.9 * self.fresh[n] + 0.1 * rebuilt**2
            bare, towards = self.direction(n)
            ratios = np.where(live[n], (np.sqrt(self.v[n]) + c.eps) / (np.sqrt(self.fresh[n]) + c.eps), 0)
            for i, (r, b, d) in enumerate(zip(each(ratios, n), each(bare, n), each(towards, n))):
                f = r.max()
                if n in MATRICES:
                    part = min(1.0, np.linalg.norm(b) / np.linalg.norm(d))
                    f = f * part + 1 - part
                f = min(max(f, c.factor_min), c.factor_max)
                last = self.factor[n][i]
                self.factor[n][i] = min(max(f, last * (1 - c.factor_threshold)), last * (1 + c.factor_threshold))
            self.move(n, towards, list(self.scale[n] * self.factor[n]), lr)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_onebit_lamb_is_that_of_its_paper(replicas):
    """Four steps of LAMB, then five by one bit: parameters, momenta, both variances, scales, factors, errors, after every step."""
    c = OptimizerConfig(kind="onebit_lamb", freeze_step=4, factor_max=1.15, factor_min=0.7, factor_threshold=0.08, coeff_beta=0.7, **MORE)
    p, rng = workers.plan(replicas), np.random.default_rng(replicas)
    grads = [workers.draw(rng, (replicas,)) for _ in LRS]
    start = workers.draw(np.random.default_rng(9))
    sim, bounded = Lamb(c, replicas, {n: a.astype(np.float64) for n, a in start.items()}), []
    for step, (_name, params, opt, _, _) in enumerate(workers.run(p, onebit_lamb(c, p, workers.specs(), 9), start, grads, LRS)):
        own = [{n: a[i].astype(np.float64) for n, a in grads[step].items()} for i in range(replicas)]
        (sim.warm_up if step < 4 else sim.onebit)(own, LRS[step])
        workers.near(params, sim.x, 1e-5)
        for got, want in ((opt.m, sim.m), (opt.v, sim.v), (opt.fresh, sim.fresh), (opt.errors.server, sim.server.server)):
            workers.near(workers.host(got), want, 1e-5)
        workers.near({n: a.reshape(-1) for n, a in workers.host(opt.scale).items()}, sim.scale, 1e-5)
        workers.near({n: a.reshape(-1) for n, a in workers.host(opt.factor).items()}, sim.factor, 1e-5)
        bounded += [*sim.factor["layers.up"], *sim.factor["odd"]]
    assert max(bounded) > 1.05 or min(bounded) < 0.95, "no factor moved"
    assert not params["embed"][21:].any(), "padding moved"


def test_the_factor_keeps_its_bounds():
    """Gradients that grow tenfold after the freeze: the factor falls by the threshold each step, down to its least."""
    c = OptimizerConfig(kind="onebit_lamb", freeze_step=3, factor_threshold=0.2, factor_min=0.5, weight_decay=0.0, beta1=0.5, beta2=0.5)
    p, rng = workers.plan(2), np.random.default_rng(0)
    grads = [workers.draw(rng, (2,), 0.3 if step < 3 else 30.0) for step in range(8)]
    out = [opt for *_, opt, _, _ in workers.run(p, onebit_lamb(c, p, workers.specs(), 8), workers.draw(rng), grads, [0.001] * 8)]
    assert [float(opt.factor["odd"]) for opt in out] == pytest.approx([1, 1, 1, 0.8, 0.64, 0.512, 0.5, 0.5])


def test_lamb_alone_is_the_warm_up_for_ever():
    c = OptimizerConfig(kind="lamb", **MORE)
    p, rng = workers.plan(4), np.random.default_rng(2)
    grads, start = [workers.draw(rng, (4,)) for _ in range(5)], workers.draw(rng)
    sim = Lamb(c, 4, {n: a.astype(np.float64) for n, a in start.items()})
    for step, (name, params, opt, _, _) in enumerate(workers.run(p, lamb(c, p, workers.specs(), 5), start, grads, LRS)):
        sim.warm_up([{n: a[i].astype(np.float64) for n, a in grads[step].items()} for i in range(4)], LRS[step])
        workers.near(params, sim.x, 1e-5)
        assert name == "warm-up" and opt.errors is None


def test_a_weight_of_nothing_is_not_scaled():
    """Where a weight or its step is 0, the scale is 1."""
    c = OptimizerConfig(kind="lamb", weight_decay=0.0, beta1=0.0, beta2=0.0)
    p, grads = workers.plan(1), workers.draw(np.random.default_rng(0), (1,))
    start = {n: a * 0 for n, a in workers.draw(np.random.default_rng(1)).items()}
    ((_, params, *_),) = workers.run(p, lamb(c, p, workers.specs(), 1), start, [grads], [0.5])
    assert np.allclose(params["odd"], -0.5 * np.sign(grads["odd"][0]), atol=1e-5)
