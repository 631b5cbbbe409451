"""1-bit Adam and 0/1 Adam, replayed by workers and a server in NumPy, on gradients that are given."""

import numpy as np
import pytest

import workers
from meshloom.core.spec import is_spec
from meshloom.core.tree import named_leaves
from meshloom.train.compressed import interval, onebit_adam, refreshed, zero_one_adam, zero_one_phase
from meshloom.train.config import OptimizerConfig

STEPS = 9
LRS = [0.02, 0.03, 0.02, 0.025, 0.01, 0.02, 0.02, 0.03, 0.01, 0.02, 0.02, 0.01]
DECAYED = ("embed", "layers.q", "layers.up")


def config(kind: str, **more) -> OptimizerConfig:
    return OptimizerConfig(kind=kind, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, **more)


def gradients(replicas: int, steps: int = STEPS):
    """Every replica's gradient of every step; one row of the table is not seen before the freeze."""
    rng, out = np.random.default_rng(replicas), []
    for step in range(steps):
        grads = workers.draw(rng, (replicas,))
        if step < 5:
            grads["embed"][:, 3] = 0
        out.append(grads)
    return out


def used(v):
    """Elements that take part."""
    return {name: a > 0 for name, a in v.items()}


def decay(name: str, c: OptimizerConfig) -> float:
    return c.weight_decay if name in DECAYED else 0.0


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_onebit_adam_is_that_of_its_paper(replicas):
    """Four steps of Adam without bias correction, then five by one bit: parameters, moments, both errors, after every step."""
    c, p, grads = config("onebit_adam", freeze_step=4), workers.plan(replicas), gradients(replicas)
    x = {n: a.astype(np.float64) for n, a in workers.draw(np.random.default_rng(9)).items()}
    start = {n: a.astype(np.float32) for n, a in x.items()}
    m, v, server = {n: 0 * a for n, a in x.items()}, {n: 0 * a for n, a in x.items()}, workers.Server(replicas)
    for step, (name, params, opt, passed, _) in enumerate(workers.run(p, onebit_adam(c, p, workers.specs(), STEPS), start, grads, LRS)):
        assert name == ("warm-up" if step < 4 else "one bit") and passed == 1
        if step < 4:
            g = {n: a.astype(np.float64).mean(0) for n, a in grads[step].items()}
            m = {n: 0.8 * m[n] + 0.2 * g[n] for n in m}
            v = {n: 0.9 * v[n] + 0.1 * g[n] ** 2 for n in v}
        else:
            m = server.mean(
                [{n: 0.8 * m[n] + 0.2 * a[i].astype(np.float64) for n, a in grads[step].items()} for i in range(replicas)], used(v)
            )
        x = {n: x[n] - LRS[step] * (m[n] / (np.sqrt(v[n]) + 1e-6) + decay(n, c) * x[n]) for n in x}
        workers.near(params, x, 1e-5)
        workers.near(workers.host(opt.m), m, 1e-5)
        workers.near(workers.host(opt.v), v, 1e-5)
        workers.near(workers.host(opt.errors.server), server.server, 1e-5)
        workers.near(workers.host(opt.errors.worker), {n: np.stack([w[n] for w in server.worker]) for n in x}, 1e-5)
    assert not params["embed"][21:].any(), "padding moved"
    assert any(np.abs(a).max() > 0 for a in server.server.values()) == (replicas > 1)


class ZeroOne:
    """0/1 Adam: every worker its own momentum and parameters, a server for the exchange."""

    def __init__(self, c: OptimizerConfig, replicas: int, x: dict[str, np.ndarray]):
        self.c, self.n, self.x, self.server = c, replicas, x, workers.Server(replicas)
        nothing = lambda: {n: np.zeros_like(a) for n, a in x.items()}
        self.v, self.m, self.u, self.gone = nothing(), [nothing() for _ in range(replicas)], [nothing() for _ in range(replicas)], 0.0

    def own(self, i: int) -> dict[str, np.ndarray]:
        """Where a worker is."""
        return {n: x - self.u[i][n] / (np.sqrt(self.v[n]) + self.c.eps) - self.gone * decay(n, self.c) * x for n, x in self.x.items()}

    def step(self, phase: str, grads: list[dict[str, np.ndarray]], lr: float) -> None:
        b1, b2 = self.c.beta1, self.c.beta2
        if phase == "full":
            g = {n: np.mean([w[n] for w in grads], 0) for n in self.x}
            self.m = [{n: b1 * m[n] + (1 - b1) * g[n] for n in g} for m in self.m]
            self.v = {n: b2 * self.v[n] + (1 - b2) * g[n] ** 2 for n in g}
            self.x = {n: x - lr * (self.m[0][n] / (np.sqrt(self.v[n]) + self.c.eps) + decay(n, self.c) * x) for n, x in self.x.items()}
            return
        live = used(self.v)
        self.m = [{n: b1 * m[n] + (1 - b1) * g[n] for n in m} for m, g in zip(self.m, grads)]
        self.u = [{n: (u[n] + lr * m[n]) * live[n] for n in u} for u, m in zip(self.u, self.m)]
        self.gone += lr
        if phase == "one bit":
            u = self.server.mean(self.u, live)
            self.x = {n: x - u[n] / (np.sqrt(self.v[n]) + self.c.eps) - self.gone * decay(n, self.c) * x for n, x in self.x.items()}
            self.m = [{n: u[n] / self.gone for n in u} for _ in self.m]
            self.u = [{n: 0 * a for n, a in u.items()} for _ in self.u]
            self.gone = 0.0


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_zero_one_adam_is_that_of_its_paper(replicas):
    """Renewals of the variance, exchanges, and steps without any: shared and own parameters, momenta, errors, after every step."""
    c, steps = config("zero_one_adam", freeze_step=6, variance_scaler=3, local_scaler=1, local_clip=4), 12
    p, grads = workers.plan(replicas), gradients(replicas, steps)
    start = workers.draw(np.random.default_rng(9))
    sim, seen = ZeroOne(c, replicas, {n: a.astype(np.float64) for n, a in start.items()}), []
    rule = zero_one_adam(c, p, workers.specs(), steps)
    for step, (name, params, opt, passed, _) in enumerate(workers.run(p, rule, start, grads, LRS)):
        seen.append((name, passed))
        sim.step(name, [{n: a[i].astype(np.float64) for n, a in grads[step].items()} for i in range(replicas)], LRS[step])
        workers.near(params, sim.x, 1e-5)
        workers.near(workers.host(opt.m), {n: np.stack([m[n] for m in sim.m]) for n in sim.x}, 1e-5)
        workers.near(workers.host(opt.v), sim.v, 1e-5)
        workers.near(workers.host(opt.u), {n: np.stack([u[n] for u in sim.u]) for n in sim.x}, 1e-5)
        workers.near(workers.host(opt.errors.server), sim.server.server, 1e-5)
        assert float(opt.gone) == pytest.approx(sim.gone, rel=1e-6)
        own = rule.own(opt, workers.tree({n: a for n, a in params.items()}))
        workers.near(workers.host(own), {n: np.stack([sim.own(i)[n] for i in range(replicas)]) for n in sim.x}, 1e-5)
    names, moved = zip(*seen)
    assert names == (*["full"] * 4, "one bit", "full", "one bit", "one bit", *["local"] * 3, "one bit")
    assert moved == (1,) * 8 + (0, 0, 0, 4)


def test_variance_is_renewed_at_exponentially_spaced_steps():
    """Every step three times, every second step three times, every fourth ...; none after the freeze."""
    assert sorted(refreshed(30, 3)) == [1, 2, 3, 4, 6, 8, 12, 16, 20, 24]
    assert sorted(refreshed(5, 3)) == [1, 2, 3, 4]


def test_exchanges_grow_apart_up_to_the_clip():
    c = OptimizerConfig(kind="zero_one_adam", freeze_step=10, variance_scaler=2, local_scaler=8, local_clip=4)
    assert [interval(c, step) for step in (1, 10, 11, 18, 19, 26, 27, 100)] == [1, 1, 1, 1, 2, 2, 4, 4]
    phases = [zero_one_phase(c, 41, done) for done in range(41)]
    exchanged = [done + 1 for done, name in enumerate(phases) if name == "one bit"]
    assert exchanged == [3, 5, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 22, 24, 26, 28, 32, 36, 40, 41]
    assert [done + 1 for done, name in enumerate(phases) if name == "full"] == sorted(refreshed(10, 2))


def test_a_step_that_is_not_finite_changes_nothing():
    p = workers.plan(2)
    for rule in (
        onebit_adam(config("onebit_adam", freeze_step=1), p, workers.specs(), 9),
        zero_one_adam(config("zero_one_adam", freeze_step=1, local_scaler=1), p, workers.specs(), 9),
    ):
        grads = gradients(2, 4)
        grads[2]["layers.up"][1, 0, 0, 0] = np.nan
        out = list(workers.run(p, rule, workers.draw(np.random.default_rng(0)), grads, LRS))
        before, after = out[1], out[2]
        for a, b in zip(before[1].values(), after[1].values()):
            assert np.array_equal(a, b)
        for a, b in zip(named_leaves(before[2]).values(), named_leaves(after[2]).values()):
            assert np.array_equal(a, b)
        assert after[3] == 0 and all(np.isfinite(a).all() for a in out[3][1].values())


def test_errors_and_replicas_are_counted():
    """1-bit Adam keeps one copy more than Adam on every device, and a share of another; its Specs say so."""
    p = workers.plan(4)
    rule = onebit_adam(config("onebit_adam", freeze_step=1), p, workers.specs(), 9)
    leaves = named_leaves(rule.state.errors.worker, is_spec)
    assert {s.axes[0] for s in leaves.values()} == {"replica"} and {s.shape[0] for s in leaves.values()} == {4}
