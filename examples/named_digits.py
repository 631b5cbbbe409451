"""An MLP on handwritten digits (real data: scikit-learn's 1,797 images of 8 x 8), written over names and trained under several layouts.

    pip install "meshloom[examples]"
    python examples/named_digits.py [--epochs 10]

The program names axes and never a device; a layout is a mesh shape and rules from names to mesh axes. About 10 s on two CPU cores. It prints what
one training step will move under one layout, before anything runs, then a line for each layout, all with the same numbers:

    batch:rows hidden:cols   loss 0.1084  differs 5e-07  held out 96.9%  a step moves 12,204 B
"""

import argparse

import jax
import numpy as np

import meshloom as ml

MESH = "rows=2 cols=4"
LAYOUTS = ("batch:rows hidden:cols", "batch:rows,cols", "hidden:rows,cols", "hidden:rows pixel:cols")
RATE, BATCH = 0.5, 128


def logits(p, images):
    """Two layers."""
    hidden = ml.relu(ml.einsum(images, p["up"], out="batch hidden") + p["up_bias"])
    return ml.einsum(hidden, p["down"], out="batch digit") + p["down_bias"]


def loss(p, images, labels):
    """The mean cross entropy."""
    chosen = ml.log_softmax(logits(p, images), "digit") * ml.one_hot(labels, "digit", 10)
    return -ml.sum(chosen) / BATCH


def step(p, images, labels):
    """New parameters, and the loss of the old ones."""
    value, slopes = ml.value_and_grad(loss)(p, images, labels)
    return jax.tree.map(lambda w, g: w - RATE * g, p, slopes), value


def right(p, images, labels):
    """How many images are told right."""
    return ml.sum(ml.astype(ml.argmax(logits(p, images), "digit") == labels, "float32"))


def data():
    """Images in 0 to 1 and labels: for training, and held out."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.data))
    images, labels = digits.data[order].astype(np.float32) / 16, digits.target[order].astype(np.int32)
    return (images[:1536], labels[:1536]), (images[1536:1792], labels[1536:1792])


def train(rules: str, epochs: int, train, held) -> tuple[float, float, ml.explain]:
    """The last loss, the part of held-out images told right, and what a step moves."""
    specs = {"up": ml.spec("pixel hidden", std=0.125, pixel=64, hidden=128), "up_bias": ml.spec("hidden", hidden=128)}
    specs |= {"down": ml.spec("hidden digit", std=0.1, hidden=128, digit=10), "down_bias": ml.spec("digit", digit=10)}
    one = ml.program(step, MESH if rules else "", rules)
    p, value = one.place(ml.init(specs, jax.random.key(0))), 0.0
    images, labels = train
    told = ml.explain(one, specs, ml.spec("batch pixel", batch=BATCH, pixel=64), ml.spec("batch", batch=BATCH, dtype="int32"))
    for _ in range(epochs):
        for at in range(0, len(images), BATCH):
            p, value = one(p, ml.tensor("batch pixel", images[at : at + BATCH]), ml.tensor("batch", labels[at : at + BATCH]))
    found = ml.program(right, one.layout)(p, ml.tensor("batch pixel", held[0]), ml.tensor("batch", held[1]))
    return float(value), float(found) / len(held[1]), told


def main() -> None:
    """One device, then every layout."""
    asked = argparse.ArgumentParser(description="Digits under several layouts.")
    asked.add_argument("--epochs", type=int, default=10)
    epochs = asked.parse_args().epochs
    jax.config.update("jax_num_cpu_devices", 8)
    one = None
    for rules in ("", *LAYOUTS):
        value, good, told = train(rules, epochs, *data())
        one = one or value
        assert abs(value / one - 1) < 1e-4
        print(f"\n{told}\n\n" if rules == LAYOUTS[0] else "", end="")
        print(
            f"{rules or 'one device':24} loss {value:.4f}  differs {abs(value / one - 1):.0e}  held out {good:.1%}  a step moves {told.bytes:,} B"
        )


if __name__ == "__main__":
    main()
