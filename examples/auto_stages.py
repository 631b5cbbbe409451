"""A convolutional network on a pipeline that nobody cut by hand: layers found in its equations, then stages of any size on the devices that are there.

    python examples/auto_stages.py [--steps 60] [--micro 8] [--layers 8] [--on cpu:8]

Its images shrink and its channels grow, so no two layers weigh the same. `cut` makes layers of the function, `staged` finds which of them make a stage
on how many of 8 simulated devices; `--on` is what they are taken for: by default this machine, measured at first use (about 20 s, then kept). It prints
the assignment, how far the first gradients are from those of one device, and what was learned; about 30 s on two CPU cores.
"""

import argparse
from itertools import pairwise

import jax
import numpy as np
import optax

from meshloom.plan.cut import cut
from meshloom.plan.hardware import read
from meshloom.plan.staged import staged

ROWS, SIDE, CLASSES, CHANNELS = 64, 16, 4, (16, 32, 64, 128)


def conv(x, w, stride=1):
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def loss(w, data):
    """Of a batch of images [batch, side, side, 3], a sum."""
    x = conv(data["image"], w["first"])
    for one in w["blocks"]:
        x = jax.nn.relu(conv(x, one["down"], 2))
        x = x + conv(jax.nn.relu(conv(x, one["a"])), one["b"])
    return optax.softmax_cross_entropy_with_integer_labels(x.mean((1, 2)) @ w["head"], data["label"]).sum()


def parameters(rng):
    of = lambda *shape: (rng.normal(size=shape) * (2 / np.prod(shape[:-1])) ** 0.5 / 1.4).astype(np.float32)
    wide = [CHANNELS[0], *CHANNELS]
    blocks = [{"down": of(3, 3, i, o), "a": of(3, 3, o, o), "b": of(3, 3, o, o)} for i, o in pairwise(wide)]
    return {"first": of(3, 3, 3, CHANNELS[0]), "blocks": blocks, "head": of(CHANNELS[-1], CLASSES)}


def images(rng):
    """Stripes in one of four directions, under noise."""
    label = rng.integers(0, CLASSES, ROWS).astype(np.int32)
    y, x = np.mgrid[:SIDE, :SIDE]
    angle = label[:, None, None] * np.pi / CLASSES
    wave = np.sin(2.0 * (np.cos(angle) * x + np.sin(angle) * y) + rng.uniform(0, 6, (ROWS, 1, 1)))
    return {"image": (wave[..., None] + rng.normal(size=(ROWS, SIDE, SIDE, 3))).astype(np.float32), "label": label}


def main() -> None:
    """The assignment, one step beside one device, then training."""
    asked = argparse.ArgumentParser(description="A pipeline that is found.")
    asked.add_argument("--steps", type=int, default=60)
    asked.add_argument("--micro", type=int, default=8)
    asked.add_argument("--layers", type=int, default=8)
    asked.add_argument("--on", default="cpu:8")
    asked = asked.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    rng = np.random.default_rng(0)
    start, batch = parameters(rng), images(rng)
    layers = cut(loss, start, {name: a[: ROWS // asked.micro] for name, a in batch.items()}, asked.layers)
    found = staged(layers, batch, read(asked.on), asked.micro)
    for part in found.assigned.parts:
        names = sorted({path for layer in layers[part.first : part.last + 1] for path in layer.params})
        print(
            f"layers {part.first}-{part.last} on {part.mesh.devices} devices, {part.seconds * 1e3:.2f} ms a micro-batch: {', '.join(names)}"
        )
    step, params = found.step(), found.params
    _, grads = step(params, batch)
    held = {
        path: g for stage in grads for key, tree in stage.items() for path, g in (tree.items() if isinstance(tree, dict) else [(key, tree)])
    }
    want = jax.grad(loss)(start, batch)
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): g for path, g in jax.tree_util.tree_leaves_with_path(want)}
    far = max(np.abs(np.asarray(held[path]) - g).max() / np.abs(g).max() for path, g in flat.items())
    print(f"gradients differ from one device's by {far:.0e} of the largest")
    adam, states = optax.adam(2e-3), [optax.adam(2e-3).init(w) for w in params]
    update, apply, losses = jax.jit(adam.update), jax.jit(optax.apply_updates), []
    for _ in range(asked.steps):
        total, grads = step(params, images(rng))
        changes, states = zip(*map(update, grads, states))
        params = list(map(apply, params, changes))
        losses.append(float(total) / ROWS)
    print(f"loss of an image: {losses[0]:.3f} at first, {np.mean(losses[-5:]):.3f} after {asked.steps} steps")


if __name__ == "__main__":
    main()
