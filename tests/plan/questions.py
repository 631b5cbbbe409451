"""Small questions for the planner, and every candidate of one, priced: what the tests of its bounds and of its search share."""

import itertools
import random
from collections.abc import Iterator

from meshloom.models.table import MODELS
from meshloom.parallel.table import STRATEGIES
from meshloom.plan.hardware import Cluster, Hardware, Link
from meshloom.plan.memory import stored
from meshloom.plan.search import Candidate, Question, price
from meshloom.plan.space import Allowed

SIZES = {"layers": 4, "embed": 48, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 480, "vocab_multiple": 96, "max_seq": 64}
FAMILIES = {
    "llama": SIZES,
    "gpt2": {**SIZES, "kv_heads": 4},
    "neox": {**SIZES, "kv_heads": 4, "tied": False},
    "moe": {**SIZES, "experts": 4, "top": 2, "expert_ffn": 48, "moe_layers": (False, True, True, True)},
}
GPU = Hardware(
    "g", "gpu", 2**60, 1e11, {"bfloat16": 1e12, "float32": 2e11}, 0.7, 4, Link(3e9, 2e-6), Link(4e8, 1e-5), 0, (), start=3e-6, host=2e9
)
TPU = Hardware("t", "tpu", 2**60, 1e11, {"bfloat16": 1e12}, 0.8, 1, Link(1e9, 1e-6), Link(2e8, 1e-5), 3, (), wrap=4)
CPU = Hardware(
    "c",
    "cpu",
    2**60,
    2e10,
    {"float32": 1e11, "bfloat16": 2e10},
    1.0,
    64,
    Link(1e10, 5e-5),
    Link(1e10, 5e-5),
    0,
    (),
    shared=True,
    op=2e-6,
    slower={"reduce-scatter": 0.5, "all-reduce": 1.1, "all-to-all": 3.0, "collective-permute": 1.7},
)
SHAPES = {"g": {1: (1, 1), 2: (1, 2), 4: (1, 4), 6: (3, 2), 8: (2, 4), 12: (3, 4), 16: (4, 4)}, "c": {n: (1, n) for n in range(1, 17)},
          "t": {1: (1, 1, 1), 2: (1, 1, 2), 4: (1, 2, 2), 6: (1, 2, 3), 8: (2, 2, 2), 12: (1, 3, 4), 16: (2, 2, 4)}}  # fmt: skip


def question(
    family: str, h: Hardware, devices: int, allowed: Allowed = Allowed(), sequences: int = 16, seq: int = 32, packed: bool = False
) -> Question:
    """A small model on a small cluster; the optimizer keeps two numbers for each of the model's."""
    model = MODELS[family]
    c = model.Config(**FAMILIES[family])
    cluster = Cluster(h, SHAPES[h.name][devices])
    twice = lambda lay: {"optimizer": 2 * stored(lay, model.specs(c))}
    return Question(model, c, cluster, seq, sequences, "bfloat16", packed, twice, allowed)


def anything(pick: random.Random) -> Question:
    """A question by chance: a family, a machine, some of the strategies, some of the remats."""
    names = pick.sample([name for name in STRATEGIES if name != "sequence"], pick.choice((2, 3, 4)))
    names += ["sequence"] * ("tensor" in names)
    schedules = tuple(pick.sample(("gpipe", "1f1b", "interleaved2", "zb"), 2))
    remats = tuple(r for r in ("none", "selective", "full") if r in pick.sample(("none", "selective", "full"), 2)) + ("offload",) * (
        pick.random() < 0.3
    )
    allowed = Allowed(remats, schedules, tuple(names), stash=pick.choice(((False,), (True,), (False, True))))
    devices = pick.choice((2, 4, 6, 8))
    q = question(
        pick.choice(list(FAMILIES)), pick.choice((GPU, TPU, CPU)), devices, allowed, pick.choice((8, 12, 16)), 32, pick.random() < 0.5
    )
    return q


def answerable(seed: int) -> tuple[Question, list[Candidate]]:
    """The first question by chance that has a candidate, and all of these."""
    for number in itertools.count():
        q = anything(random.Random(f"{seed} {number}"))
        if every := everything(q):
            return q, every
    raise AssertionError


def spellings(devices: int, allowed: Allowed) -> Iterator[str]:
    """Every spelling of a layout over so many devices, by trying all numbers for all words: an enumeration of its own."""
    numbers = [n for n in range(1, devices + 1) if devices % n == 0]
    ways = {"tensor2d": 2, "tensor25d": 3, "tensor3d": 3}
    words: dict[str, list[tuple[int, str]]] = {}
    for name in (name for name in STRATEGIES if name in allowed.strategies):
        if name == "sequence":
            continue
        words[name] = [(1, "")]
        for sizes in itertools.product(numbers, repeat=ways.get(name, 1)):
            n = 1
            for size in sizes:
                n *= size
            if n == 1 or devices % n or 1 in sizes:
                continue
            said, more = f"{name}={'x'.join(map(str, sizes))}", [""]
            if name == "pipe":
                more = [f":{s}{',stash' * stash}" for s in allowed.schedules for stash in allowed.stash]
            elif name in ("tensor2d", "tensor25d"):
                more = ["", ":stream"]
            elif name == "expert":
                more = ["", ":folded"]
            elif name == "tensor" and "sequence" in allowed.strategies:
                more = ["", " sequence"]
            words[name] += [(n, said + option) for option in more]
    for chosen in itertools.product(*words.values()):
        total = 1
        for n, _ in chosen:
            total *= n
        replicas = sum(1 for name, (n, _) in zip(words, chosen) if n > 1 and name in ("data", "zero1", "zero2", "zero3"))
        if total == devices and replicas <= 2:
            yield " ".join(word for _, word in chosen if word)


def everything(q: Question) -> list[Candidate]:
    """Every candidate that the checks admit, priced, whatever its memory."""
    found = []
    for spelling in spellings(q.cluster.devices, q.allowed):
        for micro in range(1, q.sequences + 1):
            for remat in q.allowed.remats:
                try:
                    one = price(q, spelling, micro, remat)
                except ValueError:
                    continue
                assert isinstance(one, Candidate)
                found.append(one)
    return found
