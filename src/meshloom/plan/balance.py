"""How many layers each stage of a layout's pipeline should have, where layers differ: the numbers of `pipe=4:1f1b,3+5+5+4`.

All stages run one program in lockstep (runner/pipeline.py): a tick costs the slots of a part, those that a stage leaves empty included, so that what counts is
the cheapest row of slots in which every part finds its layers, and not the fewest slots. With `skip`, which leaves empty slots out, it costs the heaviest part.
Ends weigh nothing here: all stages share embedding and head.
"""

import heapq
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshloom.core.spec import is_spec
from meshloom.core.tree import named_leaves
from meshloom.models.base import Kind, Model
from meshloom.parallel.base import in_stack
from meshloom.parallel.pipe import fits
from meshloom.plan.assign import Profile, Submesh, Task, assign
from meshloom.plan.flops import attention_flops, is_matrix
from meshloom.runner.place import Place, place

MOST = 50_000
"""Rows of slots that are looked at."""
BETTER = 1e-9
"""Relative; what is cheaper by less is rounding."""


def kind_costs(model: Model, c: Any, seq: int) -> dict[Kind, float]:
    """Operations a token, forward, of one layer of each kind: its share of its stack's matrices, and attention over the keys it sees."""
    kinds, found = model.kinds(c), {}
    specs = named_leaves(model.specs(c), is_spec)
    for kind in dict.fromkeys(kinds):
        mine = [s for path, s in specs.items() if in_stack(path, kind.stack) and is_matrix(s)]
        matrices = sum(s.size * model.active(c, s) for s in mine) / sum(other.stack == kind.stack for other in kinds)
        found[kind] = 2 * matrices + attention_flops(c, seq, kind)
    return found


def balanced(model: Model, c: Any, seq: int, stages: int, chunks: int = 1, skip: bool = False) -> tuple[int, ...]:
    """Layers of each part, in the order of the model, with which a tick costs least; () where the default split costs no more.
    skip: whether slots that no layer fills are left out, so that a tick costs the heaviest part.  Raises ValueError for more parts than layers."""
    fits(c.layers, stages, chunks)
    kinds, costs = model.kinds(c), kind_costs(model, c, seq)
    of = heaviest if skip else tick
    sizes = lightest([costs[kind] for kind in kinds], stages * chunks) if skip else cheapest(kinds, costs, stages, chunks)
    return sizes if of(place(kinds, stages, chunks, sizes), costs) < of(place(kinds, stages, chunks), costs) * (1 - BETTER) else ()


def heaviest(where: Place, costs: Mapping[Kind, float]) -> float:
    """What the layers of the heaviest part cost."""
    rows = where.layers.reshape(-1, len(where.kinds)) >= 0
    return max(sum(costs[kind] for kind, filled in zip(where.kinds, row) if filled) for row in rows)


def tick(where: Place, costs: Mapping[Kind, float]) -> float:
    """What a tick costs: every slot, whether a layer fills it or not."""
    return sum(costs[kind] for kind in where.kinds)


def cheapest(kinds: tuple[Kind, ...], costs: Mapping[Kind, float], stages: int, chunks: int = 1) -> tuple[int, ...]:
    """Layers of each part with the cheapest slots.

    What a row of slots can do is a vector: how far it comes from every layer; one slot more moves those forward that stand before its kind. So rows are
    grown slot by slot, the cheapest first (Dijkstra), and of two rows that reach the same only one is; the first with which all parts come through the
    model is the answer. Where that looks at more than MOST rows, the default split is."""
    parts, numbers = stages * chunks, {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
    order, prices = np.array([*(numbers[kind] for kind in kinds), -1]), [costs[kind] for kind in numbers]
    start = np.arange(len(kinds) + 1)
    heap, seen = [(0.0, 0, start)], {start.tobytes()}
    while heap and len(seen) <= MOST:
        cost, _, reach = heapq.heappop(heap)
        ends = [0]
        for _ in range(parts):
            ends.append(int(reach[ends[-1]]))
        if ends[-1] == len(kinds):
            return _none_empty([b - a for a, b in itertools.pairwise(ends)])
        for kind, price in enumerate(prices):
            further = reach + (order[reach] == kind)
            if (key := further.tobytes()) not in seen:
                seen.add(key)
                heapq.heappush(heap, (cost + price, len(seen), further))
    default = place(kinds, stages, chunks).layers.swapaxes(0, 1).reshape(parts, -1)
    return _none_empty([int(n) for n in (default >= 0).sum(1)])


def _none_empty(sizes: list[int]) -> tuple[int, ...]:
    """The same slots do for parts that are cut in two, so that none is empty."""
    while 0 in sizes:
        sizes.remove(0)
        at = int(np.argmax(sizes))
        sizes[at : at + 1] = [(sizes[at] + 1) // 2, sizes[at] // 2]
    return tuple(sizes)


def lightest(weights: list[float], parts: int) -> tuple[int, ...]:
    """Consecutive layers on equal devices, so that the heaviest part is as light as it can be: the numbers for stages that do not wait for each other's
    slots, as those of runner/stages.py.  weights: of each layer.  Raises ValueError for more parts than layers."""
    if parts > len(weights):
        raise ValueError(f"{len(weights)} layers do not make {parts} parts of one layer at least. Use {len(weights)} parts or fewer.")
    total = np.concatenate([[0.0], np.cumsum(weights)])
    seconds = np.triu(total[None, 1:] - total[:-1, None])[..., None]
    free = np.zeros_like(seconds, np.int64)
    found = assign(Task(Profile(seconds, free, free), (Submesh(1, 1),), 1, parts, 1, "forward", 1))
    return tuple(part.last - part.first + 1 for part in found.parts)
