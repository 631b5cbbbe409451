"""How long `ml.parallelize` takes to plan a training step of Adam on a transformer of 7B's widths, nothing compiled or run.

    PYTHONPATH=src JAX_PLATFORMS=cpu python benchmarks/plan_ilp.py [--layers 2 32] [--mesh "x=8" "x=2 y=4"] [--memory 1000GB]

Prints a row of docs/parallelize.md for each: equations, decisions, seconds by the clock and of CPU, the gap, predicted memory and time."""

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import optax

import meshloom as ml
from meshloom.auto.program import trace, walk

EMBED, HEADS, FFN, VOCAB = 4096, 32, 11008, 32000
SEQ, BATCH = 2048, 32
ADAM = optax.adam(1e-3)


def norm(x, scale):
    """Root mean square norm."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def block(p, x):
    """A layer: attention, then a gated MLP."""
    b, s, d = x.shape
    q, k, v = ((norm(x, p["norm"]) @ p[n]).reshape(b, s, HEADS, d // HEADS) for n in "qkv")
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) * (d // HEADS) ** -0.5
    scores = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -1e9), -1)
    x = x + jnp.einsum("bhqs,bshk->bqhk", scores, v).reshape(b, s, d) @ p["o"]
    h = norm(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def loss(p, tokens, remat: bool):
    """Mean cross entropy of the next token."""
    x = p["table"][tokens]
    for q in p["layers"]:
        x = (jax.checkpoint(block) if remat else block)(q, x)
    logits = (norm(x, p["norm"]) @ p["head"])[:, :-1]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0])


def step(p, s, tokens, remat: bool):
    """New parameters and state, and the loss."""
    value, grad = jax.value_and_grad(partial(loss, remat=remat))(p, tokens)
    change, s = ADAM.update(grad, s, p)
    return optax.apply_updates(p, change), s, value


def shapes(layers: int) -> tuple:
    """The step's arguments without arrays."""
    f = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    square = {n: f(EMBED, EMBED) for n in "qkvo"}
    layer = {**square, "norm": f(EMBED), "norm2": f(EMBED), "gate": f(EMBED, FFN), "up": f(EMBED, FFN), "down": f(FFN, EMBED)}
    p = {"table": f(VOCAB, EMBED), "head": f(EMBED, VOCAB), "norm": f(EMBED), "layers": [layer] * layers}
    return p, jax.eval_shape(ADAM.init, p), jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)


def row(layers: int, mesh: str, memory: str, on: str) -> str:
    """One line of the table."""
    fn, args = partial(step, remat=layers > 2), shapes(layers)
    begun, cpu = time.perf_counter(), time.process_time()
    made = ml.parallelize(fn, args, mesh=mesh, batch_argnums=2, memory=memory, donate_argnums=(0, 1), on=on)
    clock, cpu = time.perf_counter() - begun, time.process_time() - cpu
    count = sum(1 for _ in walk(trace(fn, *jax.tree.flatten(args))[0].block))
    plan = made.plan
    words = [
        layers,
        mesh,
        memory,
        f"{count:,}",
        f"{clock:.1f}",
        f"{cpu:.1f}",
        f"{plan.gap:.2%}",
        f"{plan.memory / 1e9:.1f}",
        f"{plan.seconds:.2f}",
    ]
    return f"| {' | '.join(map(str, words))} |"


def main() -> None:
    """The table."""
    asked = argparse.ArgumentParser(description="Seconds of ml.parallelize.")
    asked.add_argument("--layers", type=int, nargs="+", default=[2, 32])
    asked.add_argument("--mesh", nargs="+", default=["x=8", "x=2 y=4"])
    asked.add_argument("--memory", nargs="+", default=["1000GB"])
    asked.add_argument("--on", default="a100:1x8")
    a = asked.parse_args()
    print("| layers | mesh | memory | equations | seconds | CPU seconds | gap | GB a device | s a step |\n|" + "--:|" * 9)
    for layers in a.layers:
        for mesh in a.mesh:
            for memory in a.memory:
                print(row(layers, mesh, memory, a.on), flush=True)


if __name__ == "__main__":
    main()
