"""Small models with everything odd, and their gradient under any layout; shared by the tests of layouts."""

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshloom.core.batch import Batch
from meshloom.core.mesh import make_mesh, shardings
from meshloom.core.order import arranged
from meshloom.core.spec import abstract, init, is_spec
from meshloom.core.tree import map_named, named_leaves
from meshloom.models.freeze import frozen
from meshloom.models.table import MODELS
from meshloom.objectives.lm import lm
from meshloom.parallel.table import build
from meshloom.plan.cost import compare, shapes, step_cost
from meshloom.plan.hlo import collectives
from meshloom.plan.plan import Plan
from meshloom.recipes.verify import QUICK, furthest
from meshloom.runner.run import How
from meshloom.train.gradient import batch_shardings, make_gradient

SEQ = 16
FAMILIES = {
    "llama": dict(variant="qwen3", kv_heads=2, head=8, qkv_bias=True, o_bias=True, qk_norm=True),
    "llama_untied": dict(variant="qwen3", kv_heads=2, head=8, qkv_bias=True, o_bias=True, qk_norm=True, tied=False),
    "llama_plain": dict(kv_heads=8),
    "gpt2": {},
    "neox": {},
    "moe": dict(kv_heads=2, head=8, qk_norm=True, experts=8, top=2, expert_ffn=24, balance_loss=0.02, router_z_loss=1e-3),
    "deepseek": dict(
        **dict(
            experts=8,
            top=2,
            expert_ffn=24,
            layers=2,
            first_dense=1,
            shared=2,
            groups=4,
            top_groups=2,
            key_rank=16,
            query_rank=12,
            nope_head=8,
        ),
        **dict(rope_head=4, value_head=8, attention_bias=True, balance="sequence", balance_loss=0.01, bias_rate=0.1, tied=False),
    ),
    "moe_mixed": dict(
        **dict(kv_heads=2, head=8, experts=8, top=2, expert_ffn=24, layers=4, moe_layers=(False, True, False, True), tied=False),
        **dict(balance="sequence", balance_loss=0.02, capacity=1.0, score="sigmoid", bias=True, bias_rate=0.1, shared=1),
    ),
}


class Gradient(NamedTuple):
    """grads: by path, on the host. temp: bytes that the compiler says a step adds. lines: traffic against the formula.
    load: assignments to each expert, where there are any."""

    grads: dict[str, np.ndarray]
    loss: float
    norm: float
    temp: int
    lines: list
    load: np.ndarray


def config(name: str, **more):
    """A model: 257 tokens, 8 query heads, sizes that 8 devices divide."""
    model = MODELS[name.split("_")[0]]
    given = {**dict(layers=2, embed=32, heads=8, ffn=48, vocab=257, max_seq=64), **FAMILIES[name], **more}
    pattern = {"moe_layers": (given["moe_layers"] * given["layers"])[: given["layers"]]} if "moe_layers" in given else {}
    return model, model.Config(**{**given, **pattern})


def rows(sequences: int, micro: int, vocab: int = 257, seq: int = SEQ) -> Batch:
    """Random tokens, two documents a row, padding in every other row; micro-batches cut the same rows."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab, (sequences, seq + 1)).astype(np.int32)
    segments = np.ones((sequences, seq), np.int32)
    segments[:, 5:] = 2
    segments[::2, -2:] = 0
    positions = np.where(segments == 1, np.arange(seq), np.arange(seq) - 5).astype(np.int32)
    weights = (segments > 0).astype(np.float32)
    weights[:, 4] = 0
    flat = (tokens[:, :-1], tokens[:, 1:], weights, segments, positions, np.arange(sequences, dtype=np.int32))
    return Batch(*(a.reshape(micro, sequences // micro, *a.shape[1:]) for a in flat))


@functools.cache
def weights(name: str, more: tuple = ()):
    """Parameters on the host: biases not 0, gains not 1, padding 0."""
    model, c = config(name, **dict(more))
    specs = model.specs(c)
    start = init(specs, jax.random.key(0), None, QUICK)

    def one(path, s, a):
        noise = np.zeros(s.shape, np.float32)
        noise[tuple(slice(n) for n in s.used)] = 0.05 * np.random.default_rng(list(path.encode())).standard_normal(s.used, np.float32)
        return np.asarray(a) + noise

    return map_named(one, specs, start, is_leaf=is_spec)


@functools.cache
def gradient(
    name: str,
    spelling: str,
    micro: int = 2,
    runner: str = "scan",
    remat: str = "none",
    sequences: int = 8,
    more: tuple = (),
    seq: int = SEQ,
    packed: bool = True,
    freeze: tuple = (),
) -> Gradient:
    """Gradient, traffic and memory of one small model under one layout; compiled once in a session.  freeze: patterns of what does not train."""
    model, c = config(name, **dict(more))
    model = frozen(model, c, freeze)
    lay, how = build(spelling, c, seq), How(runner, remat)
    plan = Plan(make_mesh(lay), lay, how, micro, "float32", packed)
    given = rows(sequences, micro, seq=seq)
    given = given if packed else replace(given, segments=None)
    batch = jax.tree.map(jax.device_put, arranged(lay, given), batch_shardings(plan))
    params = jax.tree.map(jax.device_put, weights(name, more), shardings(plan.mesh, lay, "rest", model.specs(c)))
    key = jax.random.key(1) if c.dropout or c.attention_dropout else None
    args = params, batch, key, jnp.float32(1)
    program = jax.jit(make_gradient(model, c, plan, lm(1e-3))).lower(*args).compile(compiler_options=QUICK)
    grads, sums, norm = program(*args)
    found = collectives(program.as_text(), lay.sizes)
    lines = compare(found, step_cost(spelling, shapes(model, c, lay, seq, sequences, micro, how, "float32", packed)))
    host = {path: np.asarray(a) for path, a in named_leaves(grads).items()}
    return Gradient(
        host,
        float(sums["loss"] / sums["tokens"]),
        float(norm),
        program.memory_analysis().temp_size_in_bytes,
        lines,
        np.asarray(sums.get("load", 0)),
    )


def tree_of(by_path: dict[str, np.ndarray], like):
    """Arrays by path as a tree of the same structure as another."""
    return map_named(lambda path, _: by_path[path], like)


def compiled(fn, mesh, specs, out, *shapes):
    """The text of a shard_map program on abstract inputs."""
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out)
    return jax.jit(mapped).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile(compiler_options=QUICK).as_text()


def same(got: Gradient, one: Gradient, limit: float = 1e-5) -> None:
    """Asserts that two programs computed the same loss, gradients and norm."""
    name, apart = furthest(got.grads, one.grads)
    assert apart < limit, f"gradient of {name} differs by {apart:.1e}"
    assert abs(got.loss / one.loss - 1) < limit and abs(got.norm / one.norm - 1) < limit
    np.testing.assert_array_equal(got.load, one.load)


def same_trained(got: Gradient, one: Gradient, limit: float = 1e-5) -> None:
    """Asserts that a program with frozen parameters computed the gradients of the others as one without did, and their norm."""
    assert got.grads.keys() < one.grads.keys()
    rest = {name: one.grads[name] for name in got.grads}
    norm = float(np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in rest.values())))
    same(got, one._replace(grads=rest, norm=norm), limit)


def equals_one_device(name: str, spelling: str, micro: int, runner: str, remat: str) -> None:
    """Asserts that a layout computes what one device does, moves something, and moves what its formula says."""
    got = gradient(name, spelling, micro, runner, remat)
    same(got, gradient(name, "", 1))
    assert [line for line in got.lines if not line.equal] == []
    assert got.lines


__all__ = [
    "FAMILIES",
    "SEQ",
    "Gradient",
    "abstract",
    "compiled",
    "config",
    "equals_one_device",
    "gradient",
    "rows",
    "same",
    "same_trained",
    "tree_of",
    "weights",
]
