"""A transformer over names in 40 lines, trained on the bytes of Python's own argparse.py under several layouts.

    python examples/named_transformer.py [--steps 20]

Keys have a name of their own for the sequence, `key`: rules that split `seq` alone give context parallelism with gathered keys; `heads` and `ffn` give
Megatron's tensor parallelism, two all-reduces a layer each way; a weight's `embed` is called `rest` between steps, and splitting that is ZeRO-3: weights are
gathered when they are used, their gradients scattered. About 30 s on two CPU cores. It prints what a step will move, then a line for each layout:

    batch:rows seq:cols  loss 3.2284  differs 7e-08  all-gather over cols 65,536 B, reduce-scatter over cols 65,536 B, all-reduce ...
"""

import argparse
from pathlib import Path

import jax
import numpy as np

import meshloom as ml

MESH, ROWS, SEQ, LAYERS = "rows=2 cols=4", 8, 32, 2
SIZES = dict(rest=32, heads=4, head=8, ffn=128, vocab=256, seq=SEQ)
LAYOUTS = (
    "batch:rows heads:cols ffn:cols",
    "batch:rows,cols rest:rows,cols",
    "batch:rows seq:cols",
    "batch:cols heads:rows ffn:rows vocab:rows",
)
RATE = 0.5


def specs() -> dict:
    """All parameters; the width of the residual stream is `rest` while they rest and `embed` when they are used."""
    make = lambda names, std: ml.spec(names, std=std, **{n: SIZES[n] for n in names.split()})
    layer = {n: make("rest heads head", 0.18) for n in "qkv"} | {"o": make("heads head rest", 0.18), "up": make("rest ffn", 0.18)}
    layer["down"] = make("ffn rest", 0.09)
    return {"tokens": make("vocab rest", 1.0), "places": make("seq rest", 0.3), "out": make("rest vocab", 0.18), "layers": [layer] * LAYERS}


def normed(x):
    """x over its root mean square."""
    return x * ml.rsqrt(ml.mean(ml.square(x), "embed") + 1e-6)


def block(w, x):
    """x + attention, then + MLP."""
    w = {name: ml.rename(a, rest="embed") for name, a in w.items()}
    y = normed(x)
    q, k, v = (ml.einsum(y, w[n], out="batch seq heads head") for n in "qkv")
    k, v = ml.rename(k, seq="key"), ml.rename(v, seq="key")
    scores = ml.einsum(q, k, out="batch heads seq key") / SIZES["head"] ** 0.5
    scores = ml.where(ml.range("seq", SEQ) >= ml.range("key", SEQ), scores, -1e9)
    x = x + ml.einsum(ml.einsum(ml.softmax(scores, "key"), v, out="batch seq heads head"), w["o"], out="batch seq embed")
    return x + ml.einsum(ml.gelu(ml.einsum(normed(x), w["up"], out="batch seq ffn")), w["down"], out="batch seq embed")


def loss(w, tokens, labels):
    """The mean cross entropy of the next byte."""
    x = ml.take(ml.rename(w["tokens"], rest="embed"), tokens, "vocab") + ml.rename(w["places"], rest="embed")
    for layer in w["layers"]:
        x = block(layer, x)
    logits = ml.einsum(normed(x), ml.rename(w["out"], rest="embed"), out="batch seq vocab")
    right = ml.sum(logits * ml.one_hot(labels, "vocab", SIZES["vocab"]), "vocab")
    return ml.mean(ml.logsumexp(logits, "vocab") - right)


def step(w, tokens, labels):
    """New parameters, and the loss of the old ones."""
    value, slopes = ml.value_and_grad(loss)(w, tokens, labels)
    return jax.tree.map(lambda p, g: p - RATE * g, w, slopes), value


def train(rules: str, steps: int) -> tuple[float, ml.explain]:
    """The last loss, and what a step moves."""
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int32)
    one = ml.program(step, MESH if rules else "", rules)
    w, value = one.place(ml.init(specs(), jax.random.key(0))), 0.0
    batch = ml.spec("batch seq", batch=ROWS, seq=SEQ, dtype="int32")
    for at in range(steps):
        rows = text[at * ROWS * (SEQ + 1) :][: ROWS * (SEQ + 1)].reshape(ROWS, SEQ + 1)
        w, value = one(w, ml.tensor("batch seq", rows[:, :-1]), ml.tensor("batch seq", rows[:, 1:]))
    return float(value), ml.explain(one, specs(), batch, batch)


def main() -> None:
    """One device, then every layout."""
    asked = argparse.ArgumentParser(description="A transformer under several layouts.")
    asked.add_argument("--steps", type=int, default=20)
    jax.config.update("jax_num_cpu_devices", 8)
    one = None
    for rules in ("", *LAYOUTS):
        value, told = train(rules, asked.parse_args().steps)
        one = one or value
        assert abs(value / one - 1) < 1e-4
        moves = ", ".join(f"{kind} over {' x '.join(axes)} {n:,} B" for (kind, axes), (_, n) in told.total.items()) or "nothing"
        print(f"\n{told}\n\n" if rules == LAYOUTS[0] else "", end="")
        print(f"{rules or 'one device':42} loss {value:.4f}  differs {abs(value / one - 1):.0e}  {moves}")


if __name__ == "__main__":
    main()
