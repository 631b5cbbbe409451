"""A training step of a Flax model with optax, laid out by ml.parallelize: nothing in the model or the step speaks of devices.

    pip install "meshloom[test]"
    python examples/parallelize_flax.py [--steps 20]

About 15 s on two CPU cores. It prints how the step of a 1.2B model would be laid out on 8 H100s, with no H100 at hand; then trains a small model on 8
simulated devices, planned for this machine, beside plain jax.jit on one device, and the largest difference of their parameters:

    step  20: loss 0.1194, plain jit 0.1194; parameters differ by 1e-05
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import meshloom as ml


class Mlp(nn.Module):
    """Residual MLPs."""

    embed: int
    hidden: int
    layers: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = x + nn.Dense(self.embed)(nn.gelu(nn.Dense(self.hidden)(nn.LayerNorm()(x))))
        return nn.Dense(self.embed)(x)


def training(model: nn.Module, optimizer):
    """One step: (params, state, batch) -> (params, state, loss)."""

    def step(params, state, batch):
        def loss(params):
            x, y = batch
            return jnp.mean((model.apply(params, x) - y) ** 2)

        value, slopes = jax.value_and_grad(loss)(params)
        change, state = optimizer.update(slopes, state, params)
        return optax.apply_updates(params, change), state, value

    return step


def shapes(model: Mlp, optimizer, rows: int):
    """The step's arguments without arrays."""
    x = jax.ShapeDtypeStruct((rows, model.embed), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return params, jax.eval_shape(optimizer.init, params), (x, x)


def main() -> None:
    """A plan for machines elsewhere, then training here."""
    asked = argparse.ArgumentParser(description="A Flax model over 8 devices.")
    asked.add_argument("--steps", type=int, default=20)
    steps = asked.parse_args().steps
    jax.config.update("jax_num_cpu_devices", 8)
    optimizer = optax.adam(3e-3)

    large = Mlp(embed=4096, hidden=16384, layers=9)
    args = shapes(large, optimizer, rows=8192)
    print(ml.parallelize(training(large, optimizer), args, mesh="data=8", batch_argnums=2, donate_argnums=(0, 1), on="h100:1x8").plan)

    small = Mlp(embed=64, hidden=1024, layers=2)
    keys = jax.random.split(jax.random.key(0), 3)
    x, turn = jax.random.normal(keys[0], (64, 64)), jax.random.normal(keys[1], (64, 64)) / 8
    batch = (x, jnp.tanh(x @ turn))
    params = small.init(keys[2], x)
    step = training(small, optimizer)
    split = ml.parallelize(step, (params, optimizer.init(params), batch), mesh="rows=2 cols=4", batch_argnums=2)
    print(f"\n{split.plan}\n")

    plain = jax.jit(step)
    one = two = (params, optimizer.init(params))
    for n in range(steps):
        *one, want = plain(*one, batch)
        *two, loss = split(*two, batch)
        if n + 1 == steps:
            apart = max(float(abs(a - b).max()) for a, b in zip(jax.tree.leaves(one[0]), jax.tree.leaves(two[0])))
            print(f"step {n + 1:3}: loss {loss:.4f}, plain jit {want:.4f}; parameters differ by {apart:.0e}")


if __name__ == "__main__":
    main()
