"""Local SGD, SlowMo and DiLoCo, replayed by workers in NumPy, on gradients that are given."""

import numpy as np
import pytest

import workers
from meshloom.core.spec import is_spec
from meshloom.core.tree import named_leaves
from meshloom.train.config import OptimizerConfig, OuterConfig
from meshloom.train.outer import outer
from meshloom.train.replicas import count

LRS = [0.02, 0.03, 0.02, 0.025, 0.01, 0.02, 0.02, 0.03]
SGD = OptimizerConfig(kind="sgd", momentum=0.5, nesterov=False, weight_decay=0.1)
ADAM = OptimizerConfig(kind="adamw", beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1)
MATRICES = ("embed", "layers.q", "layers.up")


class Worker:
    """One replica with its own optimizer, in float64."""

    def __init__(self, c: OptimizerConfig, x: dict[str, np.ndarray]):
        self.c, self.x = c, dict(x)
        self.forget()

    def forget(self) -> None:
        self.t, self.m, self.v = 0, {n: 0 * a for n, a in self.x.items()}, {n: 0 * a for n, a in self.x.items()}

    def step(self, g: dict[str, np.ndarray], lr: float) -> None:
        self.t += 1
        for n, x in self.x.items():
            if self.c.kind == "sgd":
                self.m[n] = self.c.momentum * self.m[n] + g[n]
                d = self.m[n]
            else:
                self.m[n], self.v[n] = 0.8 * self.m[n] + 0.2 * g[n], 0.9 * self.v[n] + 0.1 * g[n] ** 2
                d = self.m[n] / (1 - 0.8**self.t) / (np.sqrt(self.v[n] / (1 - 0.9**self.t)) + 1e-6)
            self.x[n] = x - lr * (d + (0.1 * x if n in MATRICES else 0))


def meet(kind: OuterConfig, old: np.ndarray, mean: np.ndarray, m: np.ndarray, lr: float) -> tuple[np.ndarray, np.ndarray]:
    """One outer step as the papers write it."""
    if kind.kind == "local_sgd":
        return mean, m
    if kind.kind == "slowmo":
        m = kind.momentum * m + (old - mean) / lr
        return old - kind.lr * lr * m, m
    m = kind.momentum * m + (old - mean)
    return old - kind.lr * ((old - mean) + kind.momentum * m), m


CASES = [
    (OuterConfig(kind="local_sgd", every=3), SGD),
    (OuterConfig(kind="slowmo", every=2, lr=1.0, momentum=0.5), SGD),
    (OuterConfig(kind="slowmo", every=3, lr=0.8, momentum=0.6, buffers="reset"), ADAM),
    (OuterConfig(kind="diloco", every=3, lr=0.7, momentum=0.9), ADAM),
]


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("how, c", CASES, ids=lambda x: x.kind)
def test_outer_loop_is_that_of_its_paper(how, c, replicas):
    """Eight steps: several outer steps and a last one that comes early. Shared and own parameters, outer momentum."""
    p, rng = workers.plan(replicas), np.random.default_rng(replicas)
    grads, start = [workers.draw(rng, (replicas,)) for _ in LRS], workers.draw(rng)
    x = {n: a.astype(np.float64) for n, a in start.items()}
    m, team, moved = {n: 0 * a for n, a in x.items()}, [Worker(c, x) for _ in range(replicas)], []
    for step, (name, params, opt, passed, _) in enumerate(workers.run(p, outer(c, how, p, workers.specs(), len(LRS)), start, grads, LRS)):
        for i, worker in enumerate(team):
            worker.step({n: a[i].astype(np.float64) for n, a in grads[step].items()}, LRS[step])
        together = (step + 1) % how.every == 0 or step + 1 == len(LRS)
        assert name == ("together" if together else "alone")
        moved.append(passed)
        if together:
            for n in x:
                x[n], m[n] = meet(how, x[n], np.mean([w.x[n] for w in team], 0), m[n], LRS[step])
            for worker in team:
                worker.x = dict(x)
                if how.buffers == "reset":
                    worker.forget()
        workers.near(params, x, 1e-5)
        workers.near(workers.host(opt.local), {n: np.stack([w.x[n] for w in team]) for n in x}, 1e-5)
        if how.kind != "local_sgd":
            workers.near(workers.host(opt.momentum), m, 2e-5)
    assert sum(moved) == len(LRS) and moved[-1] == (len(LRS) - 1) % how.every + 1
    assert not params["embed"][21:].any(), "padding moved"


@pytest.mark.parametrize("kind", ["local_sgd", "slowmo"])
def test_an_outer_step_after_every_step_is_the_plain_step(kind):
    """H = 1 with plain SGD (SlowMo: no momentum, factor 1) is SGD on the mean gradient; so are replicas that see the same."""
    more = {} if kind == "local_sgd" else {"momentum": 0.0, "lr": 1.0}
    c = OptimizerConfig(kind="sgd", momentum=0.0, weight_decay=0.0)
    p, rng = workers.plan(4), np.random.default_rng(5)
    grads, start = [workers.draw(rng, (4,)) for _ in range(4)], workers.draw(rng)
    x = {n: a.astype(np.float64) for n, a in start.items()}
    rule = outer(c, OuterConfig(kind=kind, every=1, **more), p, workers.specs(), 4)
    for step, (_, params, *_) in enumerate(workers.run(p, rule, start, grads, LRS)):
        x = {n: a - LRS[step] * grads[step][n].astype(np.float64).mean(0) for n, a in x.items()}
        workers.near(params, x, 1e-5)


def test_a_step_that_is_not_finite_moves_no_replica_but_outer_steps_go_on():
    p, rng = workers.plan(2), np.random.default_rng(0)
    grads = [workers.draw(rng, (2,)) for _ in range(4)]
    grads[1]["layers.q"][0, 0, 0, 0, 0] = np.inf
    out = list(workers.run(p, outer(ADAM, OuterConfig(kind="diloco", every=2), p, workers.specs(), 9), workers.draw(rng), grads, LRS))
    assert out[1][0] == "together" and out[1][3] == 2
    assert all(np.isfinite(a).all() for a in out[3][1].values())
    assert any(np.abs(a - out[0][1][n]).max() > 0 for n, a in out[1][1].items()), "the outer step of the first step's way was lost"


@pytest.mark.parametrize("kind", ["adamw", "muon", "lion", "adafactor", "sgd"])
def test_every_inner_optimizer_works_replica_by_replica(kind):
    """Its state has the replicas' axis, and each replica moves as it would alone."""
    c = OptimizerConfig(kind=kind, **({"momentum": 0.9} if kind in ("sgd", "muon") else {}))
    four, one = workers.plan(4), workers.plan(1)
    rng = np.random.default_rng(0)
    grads, start = [workers.draw(rng, (4,)) for _ in range(2)], workers.draw(rng)
    how = OuterConfig(kind="local_sgd", every=100)
    got = list(workers.run(four, outer(c, how, four, workers.specs(), 100), start, grads, LRS))
    for i in (0, 3):
        mine = [{n: a[i : i + 1] for n, a in g.items()} for g in grads]
        alone = list(workers.run(one, outer(c, how, one, workers.specs(), 100), start, mine, LRS))
        workers.near(
            {n: a[i] for n, a in workers.host(got[-1][2].local).items()},
            {n: a[0] for n, a in workers.host(alone[-1][2].local).items()},
            1e-4,
        )
    assert count(four.layout) == 4


def test_the_state_is_counted():
    p = workers.plan(4)
    rule = outer(ADAM, OuterConfig(kind="diloco"), p, workers.specs(), 9)
    assert set(rule.kinds) == {"replicas", "optimizer", "outer momentum"}
    assert {s.axes[0] for s in named_leaves(rule.kinds["replicas"], is_spec).values()} == {"replica"}
