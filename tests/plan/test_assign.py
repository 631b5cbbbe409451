"""Stages and their submeshes: the assignment is the best of all, and what does not fit is refused."""

import itertools
import time

import numpy as np
import pytest

from meshloom.parallel.schedules import make
from meshloom.parallel.slots import compile
from meshloom.plan.assign import FLYING, Profile, Submesh, Task, assign, submeshes


def cuts(layers: int):
    """All ways to cut layers into consecutive stages, as (first, last)."""
    for count in range(layers):
        for inner in itertools.combinations(range(1, layers), count):
            starts = (0, *inner)
            yield list(zip(starts, [k - 1 for k in (*inner, layers)]))


def packs(task: Task, meshes: list[Submesh]) -> bool:
    """Whether the machine has room for submeshes, by trying: powers of two anywhere in a node; other sizes one behind the other."""
    if task.ordered:
        at = 0
        for mesh in meshes:
            inside = at % task.each
            if (inside and mesh.nodes > 1) or (mesh.nodes == 1 and inside + mesh.each > task.each):
                return False
            at += mesh.devices
        return True
    free = [task.each] * task.nodes

    def put(left: list[Submesh]) -> bool:
        if not left:
            return True
        mesh = left[0]
        empty = [i for i, n in enumerate(free) if n == task.each]
        homes = [empty[: mesh.nodes]] if mesh.nodes > 1 else [[i] for i, n in enumerate(free) if n >= mesh.each]
        for home in homes:
            if len(home) == mesh.nodes:
                for i in home:
                    free[i] -= mesh.each
                if put(left[1:]):
                    return True
                for i in home:
                    free[i] += mesh.each
        return False

    return put(sorted(meshes, key=lambda mesh: -mesh.devices))


def brute(task: Task) -> tuple[float, float] | None:
    """(objective, sum of times) of the best of all assignments; None where none fits."""
    found, cost = [], task.profile
    for stages in cuts(task.layers):
        for chosen in itertools.product(range(len(task.meshes)), repeat=len(stages)):
            meshes = [task.meshes[m] for m in chosen]
            if sum(mesh.devices for mesh in meshes) != task.devices or not packs(task, meshes):
                continue
            at = [(i, k, m) for (i, k), m in zip(stages, chosen)]
            used = [cost.held[x] + cost.flight[x] * FLYING[task.schedule](len(at) - 1 - s, task.micro) for s, x in enumerate(at)]
            times = [cost.seconds[x] for x in at]
            if max(used) <= task.memory and np.isfinite(times).all():
                slowest = max(times)
                found.append((slowest if task.schedule == "forward" else sum(times) + (task.micro - 1) * slowest, sum(times)))
    return min(found, default=None)


def drawn(rng: np.random.Generator, shapes, every: bool = False) -> Task:
    """A random task: stages of a few layers, with times that do not always fall with devices, some that cannot run, and memory that often binds."""
    nodes, each = shapes[int(rng.integers(len(shapes)))]
    layers, meshes = int(rng.integers(2, 7)), submeshes(nodes, each, every)
    shape = (layers, layers, len(meshes))
    work, size = rng.integers(1, 20, layers).astype(float), rng.integers(1, 20, layers)
    run = lambda a: np.array([[a[i : k + 1].sum() for k in range(layers)] for i in range(layers)])
    share = np.array([mesh.devices for mesh in meshes])
    seconds = run(work)[..., None] / share ** rng.uniform(0.3, 0.9) + rng.uniform(0, 3, shape)
    seconds[rng.random(shape) < 0.15] = np.inf
    held, flight = -(-run(size)[..., None] // share), rng.integers(0, 12, shape)
    memory = int(rng.integers(size.sum() // 3, 3 * size.sum() + 30))
    name = ("1f1b", "gpipe", "forward")[int(rng.integers(3))]
    return Task(Profile(seconds, held, flight), meshes, nodes, each, memory, name, int(rng.integers(1, 12)))


POWERS = [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 1), (3, 2)]
OTHERS = [(1, 3), (1, 5), (1, 6), (2, 3), (3, 3), (1, 7)]


@pytest.mark.parametrize("seed", range(110))
def test_the_assignment_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    task = drawn(rng, POWERS if seed % 2 else OTHERS, every=seed % 3 == 0)
    best = brute(task)
    if best is None:
        with pytest.raises(ValueError, match="fits|covers|can run"):
            assign(task)
        return
    found = assign(task)
    assert found.seconds == pytest.approx(best[0], rel=1e-12)
    if task.schedule == "forward":
        assert sum(part.seconds for part in found.parts) == pytest.approx(best[1], rel=1e-12)
    assert [part.first for part in found.parts] == [0, *(part.last + 1 for part in found.parts[:-1])]
    taken = [d for p in found.parts for d in range(p.device, p.device + p.mesh.devices)]
    assert sorted(taken) == list(range(task.devices)), "every device belongs to one stage"
    assert all(task.fits(part.mesh, part.device) for part in found.parts), "no stage is cut by the border of a node"
    assert all(part.bytes <= task.memory for part in found.parts)


def test_what_the_cases_hold() -> None:
    """Enough of the cases above have an answer, several stages, uneven ones, and memory that decides."""
    many = uneven = binds = refused = 0
    for seed in range(110):
        task = drawn(np.random.default_rng(seed), POWERS if seed % 2 else OTHERS, every=seed % 3 == 0)
        try:
            found = assign(task)
        except ValueError:
            refused += 1
            continue
        many += len(found.parts) > 1
        uneven += len({part.mesh for part in found.parts}) > 1
        binds += assign(task._replace(memory=10**9)).seconds < found.seconds
    assert many > 40 and uneven > 30 and binds >= 10 and 10 < refused < 50, (many, uneven, binds, refused)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_what_is_in_flight_is_what_the_schedule_keeps(name: str) -> None:
    for stages, micro in ((1, 4), (3, 2), (4, 8), (6, 6)):
        kept = compile(make(name, stages, micro)).used["kept"]
        assert tuple(FLYING[name](behind, micro) for behind in reversed(range(stages))) == tuple(kept)


def test_a_gap_misses_no_more_than_it_says() -> None:
    for seed in range(12):
        task = drawn(np.random.default_rng(seed), [(2, 4)])._replace(memory=10**6)
        exact, near = assign(task), assign(task, gap=0.1)
        assert near.tried <= exact.tried and near.seconds * 0.9 <= exact.seconds <= near.seconds


def uniform(layers: int, nodes: int, each: int, memory: int, heavy: float = 1.0) -> Task:
    """Layers alike, the last `heavy` times as heavy; 85 % of the speed is kept with each doubling of devices."""
    meshes, work = submeshes(nodes, each), np.ones(layers)
    work[-1] = heavy
    total = np.concatenate([[0], np.cumsum(work)])
    run, n = total[None, 1:] - total[:-1, None], np.array([mesh.devices for mesh in meshes])
    seconds = run[..., None] / n**0.766
    count = np.arange(layers)[None] - np.arange(layers)[:, None] + 1
    held = np.maximum(count, 0)[..., None] * 1000 // n
    flight = np.broadcast_to(-(-64 // n), seconds.shape)
    return Task(Profile(seconds, held, flight), meshes, nodes, each, memory, "1f1b", 64)


def test_96_layers_on_64_devices_in_seconds() -> None:
    """Where memory does not bind and where it does; and a heavy last layer gets fewer beside it."""
    start = time.perf_counter()
    free, bound = assign(uniform(96, 8, 8, 10**6, 1.37)), assign(uniform(96, 8, 8, 1800, 1.37))
    assert time.perf_counter() - start < 30  # measured: 1 and 4 s, docs/stages.md
    assert bound.seconds > free.seconds and max(part.bytes for part in bound.parts) <= 1800
    counts = [part.last - part.first + 1 for part in free.parts]
    assert counts[-1] <= min(counts[:-1])


FEW = uniform(2, 1, 4, 10**6)


@pytest.mark.parametrize(
    "task, said",
    [
        (FEW._replace(schedule="zb"), "'zb' is no schedule for which stages are assigned.*Choose one of 1f1b, gpipe, forward"),
        (FEW._replace(profile=Profile(*[np.zeros((0, 0, 3))] * 3)), "There are no layers to assign"),
        (
            uniform(2, 1, 5, 10**6)._replace(meshes=(Submesh(1, 1), Submesh(1, 2))),
            "2 layers make at most 2 stages, .*1x1, 1x2 covers the machine's 1x5",
        ),
        (FEW._replace(memory=100), r"2 layers to 4 devices fits: .* takes 516 B on a device, which has 100 B: 416 B too little"),
        (FEW._replace(profile=FEW.profile._replace(seconds=np.full((2, 2, 3), np.inf))), "No submesh that is offered can run"),
    ],
)
def test_refused(task: Task, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        assign(task)


def test_memory_that_is_named_is_just_enough() -> None:
    """By how much nothing fits: with that much more the same task has an answer, with a byte less it has none."""
    for seed in range(8):
        task = drawn(np.random.default_rng(seed), [(2, 2)])._replace(memory=0, schedule="1f1b")
        task = task._replace(
            profile=task.profile._replace(seconds=np.nan_to_num(task.profile.seconds, posinf=1.0), held=task.profile.held * 2**30)
        )
        with pytest.raises(ValueError, match="too little") as refused:
            assign(task)
        least = round(float(str(refused.value).split("takes ")[1].split(" GiB")[0]) * 2**30)
        slack = 2**30 // 15  # one digit is said
        assign(task._replace(memory=least + slack))
        with pytest.raises(ValueError, match="too little"):
            assign(task._replace(memory=least - slack))
