"""Retrieval with two towers, as recommenders are trained: each user finds an item among all items of the batch. Written over names.

    python examples/two_tower.py [--steps 200]

Tables of 1,024 users and items, one MLP each, scores of every user of the batch with every item, softmax over items. Users buy items of their own
taste (made up, from a fixed seed). The items of a batch have an axis of their own, `item`; where the rules split `pair` but not `item`, their vectors
are gathered, and `ml.explain` says so. About 25 s on two CPU cores. It prints what a step will move, then a line for each layout (what differs is
rounding, which 200 steps of Adam enlarge; after 20 steps it is below 1e-6):

    pair:rows id:cols                        loss 2.4468  differs 3e-04  found 100.0%  a step moves 98,308 B
"""

import argparse

import jax
import numpy as np
import optax

import meshloom as ml

MESH, SIZES = "rows=2 cols=4", dict(id=1024, embed=16, hidden=64, out=16)
LAYOUTS = ("pair:rows id:cols", "pair:rows,cols", "id:rows,cols hidden:rows", "pair:cols item:rows hidden:rows id:cols")
PAIRS, TASTES, ADAM = 256, 32, optax.adam(0.05, eps=1e-5)


def specs() -> dict:
    """Both towers."""
    names = {"table": ("id embed", 1.0), "up": ("embed hidden", 0.25), "down": ("hidden out", 0.125)}
    of = lambda text: {n: SIZES[n] for n in text.split()}
    return {side: {key: ml.spec(text, std=std, **of(text)) for key, (text, std) in names.items()} for side in ("users", "items")}


def tower(w, ids):
    """A unit vector for each id."""
    hidden = ml.relu(ml.einsum(ml.take(w["table"], ids, "id"), w["up"], out="pair hidden"))
    y = ml.einsum(hidden, w["down"], out="pair out")
    return y * ml.rsqrt(ml.sum(ml.square(y), "out") + 1e-6)


def scores(w, users, items):
    """Every user with every item."""
    return 8 * ml.einsum(tower(w["users"], users), ml.rename(tower(w["items"], items), pair="item"), out="pair item")


def loss(w, users, items):
    """The mean over users of -log p(own item), and no reward for scoring everything alike."""
    own = ml.range("pair", PAIRS) == ml.range("item", PAIRS)
    return -ml.mean(ml.sum(ml.where(own, ml.log_softmax(scores(w, users, items), "item"), 0), "item"))


def step(w, state, users, items):
    """New parameters and optimizer's state, and the loss of the old ones. optax works on trees of tensors as on any."""
    value, slopes = ml.value_and_grad(loss)(w, users, items)
    updates, state = ADAM.update(slopes, state)
    return optax.apply_updates(w, updates), state, value


def found(w, users, items, tastes):
    """How many users' best item is one of their taste."""
    best = ml.argmax(scores(w, users, items), "item")
    return ml.sum(ml.astype(ml.take(ml.rename(tastes, pair="item"), best, "item") == tastes, "float32"))


def batches(steps: int):
    """Users, items and tastes. An id's taste is the rest of its division by TASTES."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        tastes = rng.integers(0, TASTES, PAIRS)
        ids = [rng.integers(0, SIZES["id"] // TASTES, PAIRS) * TASTES + tastes for _ in range(2)]
        yield tuple(ml.tensor("pair", a.astype(np.int32)) for a in (*ids, tastes))


def train(rules: str, steps: int) -> tuple[float, float, ml.explain]:
    """The last loss, the part of users who find an item of their taste, and what a step moves."""
    one = ml.program(step, MESH if rules else "", rules)
    w, value = ml.init(specs(), jax.random.key(0)), 0.0
    state = ADAM.init(w)
    for users, items, tastes in batches(steps):  # noqa: B007
        w, state, value = one(w, state, users, items)
    good = ml.program(found, one.layout)(w, users, items, tastes)
    return float(value), float(good) / PAIRS, ml.explain(one, w, state, users, items)


def main() -> None:
    """One device, then every layout."""
    asked = argparse.ArgumentParser(description="Two towers under several layouts.")
    asked.add_argument("--steps", type=int, default=200)
    jax.config.update("jax_num_cpu_devices", 8)
    one = None
    for rules in ("", *LAYOUTS):
        value, good, told = train(rules, asked.parse_args().steps)
        one = one or value
        differs = abs(value / one - 1)
        assert differs < 5e-3
        print(f"\n{told}\n\n" if rules == LAYOUTS[0] else "", end="")
        print(f"{rules or 'one device':40} loss {value:.4f}  differs {differs:.0e}  found {good:.1%}  a step moves {told.bytes:,} B")


if __name__ == "__main__":
    main()
