"""Data replicas as NumPy sees them: a loop over workers, one server for each weight, nothing sharded. What the compressed optimizers and the outer
loops are replayed against."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from meshloom.core import mesh
from meshloom.core.layout import Layout
from meshloom.core.mesh import make_mesh
from meshloom.core.spec import Init, is_spec, spec
from meshloom.core.tree import named_leaves
from meshloom.models.base import Sizes
from meshloom.parallel.base import Shapes
from meshloom.plan.plan import Plan
from meshloom.runner.run import How
from meshloom.train.replicas import placing
from meshloom.train.rule import Gradient

SIZES = dict(layer=3, embed=8, heads=4, head=6, ffn=16, vocab=24)
LAYOUTS = {
    1: Layout(),
    2: Layout({"pipe": 2, "data": 2, "zero3": 2}, acts={"batch": ("data", "zero3")}, rest={"embed": ("zero3", "pipe"), "vocab": ("pipe",)}),
    4: Layout({"data": 4, "tensor": 2}, acts={"batch": ("data",)}, rest={name: ("tensor",) for name in ("ffn", "heads", "vocab")}),
}
"""Replicas -> a layout that has something beside them."""


def specs():
    """Matrices alone and in a stack, gains, a bias that no layout above shares out evenly, rows of padding."""
    new = functools.partial(spec, SIZES, init=Init(std=0.3))
    return {
        "embed": new("vocab embed", used={"vocab": 21}),
        "layers": {"q": new("layer embed heads head"), "up": new("layer embed ffn"), "gain": new("layer embed")},
        "odd": spec({"position": 7}, "position", Init(std=0.3)),
    }


def plan(replicas: int) -> Plan:
    lay = LAYOUTS[replicas]
    return Plan(make_mesh(lay), lay, How("scan"), 1, "float32")


def shapes(lay: Layout, like=None) -> Shapes:
    """What the traffic of arrays like the parameters depends on."""
    return Shapes(like or specs(), None, lay, 1, 8, 1, "none", "float32", (), 4, False, 0, (), False, Sizes(), (), None)


def draw(rng: np.random.Generator, lead: tuple[int, ...] = (), scale: float = 0.3) -> dict[str, np.ndarray]:
    """Normal deviates like the parameters, by path; zero in the padding."""

    def one(s):
        value = np.zeros((*lead, *s.shape), np.float32)
        value[(slice(None),) * len(lead) + tuple(slice(n) for n in s.used)] = scale * rng.standard_normal((*lead, *s.used))
        return value

    return {name: one(s) for name, s in named_leaves(specs(), is_spec).items()}


def tree(by_path: dict[str, np.ndarray]):
    """Arrays by path as a tree like the parameters'."""
    return jax.tree.unflatten(jax.tree.structure(specs(), is_leaf=is_spec), [by_path[name] for name in named_leaves(specs(), is_spec)])


def host(tree_) -> dict[str, np.ndarray]:
    return {name: np.asarray(a) for name, a in named_leaves(tree_).items()}


def run(p: Plan, rule, start: dict[str, np.ndarray], gradients: list[dict[str, np.ndarray]], lrs: list[float]):
    """A rule's updates on given gradients [replica, ...] of every step -> after each: (phase, params, opt, passed, told). Compiled once a phase."""
    where = shardings(p, rule.state)
    home = shardings(p, specs())
    params = jax.tree.map(jax.device_put, tree(start), home)
    opt = jax.jit(rule.begin, out_shardings=where)(params)
    programs = {}
    for done, (grads, lr) in enumerate(zip(gradients, lrs)):
        name = rule.phase(done)
        phase = rule.phases[name]
        given = tree(grads if phase.apart else {n: g.mean(0, dtype=np.float32) for n, g in grads.items()})
        norms = np.sqrt([sum(np.square(g[i]).sum() for g in grads.values()) for i in range(len(next(iter(grads.values()))))])
        norm = np.sqrt(np.mean(norms**2)) if phase.apart else np.sqrt(sum(np.square(g.mean(0)).sum() for g in grads.values()))
        if name not in programs:
            one = lambda g, o, x, phase=phase: phase.update(g, o, x)
            programs[name] = jax.jit(one, out_shardings=(home, where, None, None))
        args = Gradient(given, jnp.float32(norm), jnp.int32(done + 1), jnp.float32(lr), jnp.isfinite(norm))
        params, opt, passed, told = programs[name](args, opt, params)
        yield name, host(params), jax.tree.map(np.asarray, opt), int(passed), told


def shardings(p: Plan, like):
    """The shardings of a tree of specs."""
    return mesh.shardings(p.mesh, placing(p.layout), "rest", like)


class Server:
    """The exchange by one bit, for one worker each and one server, in float64: errors by path."""

    def __init__(self, replicas: int):
        zero = {name: np.zeros(s.shape) for name, s in named_leaves(specs(), is_spec).items()}
        self.n = replicas
        self.worker = [{name: a.copy() for name, a in zero.items()} for _ in range(replicas)]
        self.server = {name: a.copy() for name, a in zero.items()}

    def squeeze(self, a: np.ndarray, name: str) -> np.ndarray:
        """Signs times the root mean square of each weight; 0 in the padding."""
        s = named_leaves(specs(), is_spec)[name]
        used = tuple(slice(n) for n in s.used)
        out = np.zeros_like(a)
        part = a[used]
        axes = tuple(range(int(s.axes[0] in ("layer", "vocab")), a.ndim))
        out[used] = np.where(part >= 0, 1.0, -1.0) * np.sqrt((part**2).mean(axes, keepdims=True))
        return out

    def mean(self, values: list[dict[str, np.ndarray]], alive: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What all workers have after the exchange."""
        out = {}
        for name, live in alive.items():
            if self.n == 1 or name == "odd":
                out[name] = np.mean([v[name] for v in values], 0) * live
                continue
            sent = []
            for value, error in zip(values, self.worker):
                whole = (value[name] + error[name]) * live
                sent.append(self.squeeze(whole, name))
                error[name] = (whole - sent[-1]) * live
            whole = (np.mean(sent, 0) + self.server[name]) * live
            out[name] = self.squeeze(whole, name) * live
            self.server[name] = (whole - out[name]) * live
        return out


def near(got, want, limit: float = 2e-6) -> None:
    """Asserts that arrays by path are equal but for rounding, against the largest element of each."""
    for name, a in want.items():
        top = max(float(np.abs(a).max()), 1e-3)
        apart = float(np.abs(np.asarray(got[name], np.float64) - a).max()) / top
        assert apart < limit, f"{name} differs by {apart:.1e}"


__all__ = ["LAYOUTS", "Server", "draw", "host", "near", "plan", "run", "shapes", "shardings", "specs", "tree"]
