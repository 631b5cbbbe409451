"""The collectives of a compiled program, counted exactly from its text: kind, mesh axes, how often (loops multiplied out), bytes."""

import itertools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
WIDTH = {"pred": 1, "c64": 8, "c128": 16, "token": 0, "opaque": 0}
"""Bytes of the types whose name does not end in its bits."""
WHOLE = {"all-gather-start": 1, "collective-permute-start": 1}
"""Asynchronous forms whose type is (operands, results, ...) -> where the results are. Others have the type of their result."""

_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s+(?:\([^\n]*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-]+)\s+=\s+")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_SOMETIMES = re.compile(r"ticks_(\d+)_of_(\d+)")
"""What a loop of a pipeline says of work that only some of its ticks do (runner/stage.py)."""
_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":\s*"(\d+)"\}')


class Found(NamedTuple):
    """The collectives of one kind over the same mesh axes in one part of a program.

    count: arrays moved, each as often as it runs (an operation that moves ten arrays at once counts ten). operations: the same, with such an
    operation counted once.  bytes: all of them together, each by the larger of what goes in and what comes out on one device (of a
    permutation in which some devices keep theirs, the mean over devices).
    name: the program's own name of the place.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    operations: int
    bytes: int
    name: str


class Op(NamedTuple):
    """One instruction: its type's text, its name, the rest of its line."""

    type: str
    name: str
    rest: str


def collectives(text: str, sizes: Mapping[str, int]) -> list[Found]:
    """Every collective that a compiled program runs, loops multiplied out.  text: `compiled.as_text()`.  sizes: the mesh, outermost first.
    Raises ValueError where a loop that moves bytes has no known trip count, or a group of devices is not a set of mesh axes."""
    bodies, entry = computations(text)
    found: list[Found] = []
    groups = axis_groups(sizes)
    _walk(entry, 1, bodies, groups, sizes, found, {})
    return found


def computations(text: str) -> tuple[dict[str, list[Op]], str]:
    """The instructions of every computation by its name, and the entry's name."""
    bodies: dict[str, list[Op]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = bodies.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif current is not None and (start := _INSTRUCTION.match(line)):
            end = _type_end(line, start.end())
            name = re.match(r"\s*([\w\-]+)\(", line[end:])
            if name:
                current.append(Op(line[start.end() : end], name[1], line[end:]))
    if not entry:
        raise ValueError("This text has no ENTRY computation. Give the text of a compiled program: jitted.lower(...).compile().as_text().")
    return bodies, entry


def _type_end(line: str, at: int) -> int:
    """Where the type that begins at `at` ends: after its matching bracket, or at the next space."""
    if line[at] != "(":
        return line.index(" ", at)
    depth = 0
    for i in range(at, len(line)):
        depth += (line[i] == "(") - (line[i] == ")")
        if depth == 0:
            return i + 1
    raise AssertionError("unbalanced type")


def _walk(
    name: str,
    times: int,
    bodies: Mapping[str, list[Op]],
    groups: Mapping[frozenset, tuple[str, ...]],
    sizes: Mapping[str, int],
    found: list[Found],
    moves: dict[str, bool],
) -> None:
    """Adds what one computation moves, `times` over, to `found`."""
    for op in bodies[name]:
        kind = op.name.removesuffix("-start")
        if kind in KINDS and op.name != kind + "-done":
            found.append(_count(op, kind, times, groups, sizes))
            continue
        called = _CALLED.findall(op.rest) + [c.strip().lstrip("%") for m in _BRANCHES.findall(op.rest) for c in m.split(",")]
        inside = [c for c in called if c in bodies and _moves(c, bodies, moves)]
        if not inside:
            continue
        if op.name == "conditional" and (said := _SOMETIMES.search(op.rest)):
            for other in inside:
                _walk(other, times * int(said[1]) // int(said[2]), bodies, groups, sizes, found, moves)
            continue
        if op.name == "conditional":
            raise ValueError(
                f"'{op.rest.strip()[:80]}' moves bytes on a condition, so how often is not known before it runs. Move them out of it."
            )
        often = _trips(op, bodies) if op.name == "while" else 1
        for other in inside:
            _walk(other, times * often, bodies, groups, sizes, found, moves)


def _trips(op: Op, bodies: Mapping[str, list[Op]]) -> int:
    """How often a loop runs: as its text says, or (a TPU's does not) the one constant that its condition compares its counter with, which JAX's
    scans count from 0 by 1."""
    if said := _TRIPS.search(op.rest):
        return int(said[1])
    names, ops = [c.strip("%") for c in re.findall(r"condition=(%?[\w.\-]+)", op.rest)], []
    while names:
        name = names.pop()
        ops += bodies.get(name, [])
        names += [c for o in bodies.get(name, []) for c in _CALLED.findall(o.rest)]
    bounds = [
        int(n[1])
        for o in ops
        if o.name == "constant" and o.type.startswith(("s32", "s64", "u32")) and (n := re.match(r"\s*constant\((\d+)\)", o.rest))
    ]
    if len(bounds) != 1 or not any(o.name == "compare" and "direction=LT" in o.rest for o in ops):
        raise ValueError("A loop with collectives has no known trip count. Use lax.scan, or lax.fori_loop with constant bounds.")
    return bounds[0]


def _moves(name: str, bodies: Mapping[str, list[Op]], known: dict[str, bool]) -> bool:
    """Whether a computation runs a collective, itself or in what it calls."""
    if name not in known:
        known[name] = False
        known[name] = any(
            op.name.removesuffix("-start") in KINDS
            or any(c in bodies and _moves(c, bodies, known) for c in _CALLED.findall(op.rest))
            or any(_moves(c.strip().lstrip("%"), bodies, known) for m in _BRANCHES.findall(op.rest) for c in m.split(","))
            for op in bodies[name]
        )
    return known[name]


def _count(op: Op, kind: str, times: int, groups: Mapping[frozenset, tuple[str, ...]], sizes: Mapping[str, int]) -> Found:
    """One collective, `times` over."""
    arrays = _arrays(op)
    axes = _axes(op.rest, kind, groups, sizes)
    devices = math.prod(sizes[a] for a in axes)
    size = sum(arrays) * (devices if kind == "reduce-scatter" else 1)
    if kind == "collective-permute":
        size = round(size * (1 - sum(a == b for a, b in _pairs(op.rest)) / math.prod(sizes.values())))
    # an all-to-all that lists one array for each device moves the parts of one array
    count = 1 if kind == "all-to-all" else len(arrays)
    name = re.search(r'op_name="([^"]*)"', op.rest)
    return Found(kind, axes, times * count, times, times * size, name[1] if name else "")


def _arrays(op: Op) -> list[int]:
    """Bytes of every array that an operation yields."""
    parts = _parts(op.type)
    if op.name in WHOLE:
        parts = _parts(parts[WHOLE[op.name]])
    return [nbytes(part) for part in parts]


def _parts(type: str) -> list[str]:
    """The members of a tuple's type; a type that is no tuple alone."""
    type = re.sub(r"/\*[^*]*\*/", "", type).strip()
    if not type.startswith("("):
        return [type]
    parts, depth, start = [], 0, 1
    for i, char in enumerate(type):
        depth += (char in "([{") - (char in ")]}")
        if (char == "," and depth == 1) or (char == ")" and depth == 0):
            parts.append(type[start:i].strip())
            start = i + 1
    return [part for part in parts if part]


def nbytes(type: str) -> int:
    """Bytes of an array type such as "f32[3,64]{1,0}" or "bf16[]"."""
    match = re.match(r"([a-z]+\d*)\w*\[([\d,<=]*)\]", type)
    if not match:
        raise ValueError(f"'{type}' is not the type of an array, such as f32[3,64].")
    bits = re.search(r"\d+", match[1])
    width = WIDTH[match[1]] if match[1] in WIDTH else int(bits[0]) / 8 if bits else 0
    return math.ceil(math.prod(int(n.lstrip("<=")) for n in match[2].split(",") if n) * width)


def axis_groups(sizes: Mapping[str, int]) -> dict[frozenset, tuple[str, ...]]:
    """Every set of mesh axes by the groups of devices that it makes; the smallest set where several make the same."""
    names = [name for name, size in sizes.items() if size > 1]
    subsets = [s for n in range(len(names) + 1) for s in itertools.combinations(names, n)]
    out: dict[frozenset, tuple[str, ...]] = {}
    for subset in subsets:
        out.setdefault(_groups_of(subset, sizes), subset)
    return out


def _groups_of(axes: tuple[str, ...], sizes: Mapping[str, int]) -> frozenset:
    """The sets of devices that differ along these mesh axes only."""
    groups: dict[tuple, set[int]] = {}
    for device, place in enumerate(itertools.product(*(range(n) for n in sizes.values()))):
        fixed = tuple(i for name, i in zip(sizes, place) if name not in axes)
        groups.setdefault(fixed, set()).add(device)
    return frozenset(frozenset(g) for g in groups.values())


def _axes(rest: str, kind: str, groups: Mapping[frozenset, tuple[str, ...]], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes over which an instruction communicates."""
    if kind == "collective-permute":
        places = list(itertools.product(*(range(n) for n in sizes.values())))
        moved: set[str] = set()
        for a, b in _pairs(rest):
            moved |= {name for name, x, y in zip(sizes, places[int(a)], places[int(b)]) if x != y}
        return tuple(name for name in sizes if name in moved)
    sets = replica_groups(rest, math.prod(sizes.values()))
    if sets not in groups:
        raise ValueError(
            f"A {kind} runs over devices {[sorted(g) for g in sets]}, which are not the devices along any axes of the mesh {dict(sizes)}."
        )
    return groups[sets]


def _pairs(rest: str) -> list[tuple[str, str]]:
    """Who sends to whom in a collective-permute."""
    listed = re.search(r"source_target_pairs=\{(\{[\d,{} ]*\})\}", rest)
    return re.findall(r"\{(\d+), ?(\d+)\}", listed[1]) if listed else []


def replica_groups(rest: str, devices: int) -> frozenset:
    """The groups of an instruction: {{0,1},{2,3}}, or [2,2]<=[4], or [2,2]<=[2,2]T(1,0), or mesh['a'=2,'b'=2] {'b'}, or {} for all devices."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", rest):
        mesh = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
        return _groups_of(tuple(re.findall(r"'([^']+)'", named[2])), mesh)
    if listed := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", rest):
        return frozenset(frozenset(int(i) for i in g.split(",") if i) for g in re.findall(r"\{([\d, ]*)\}", listed[1]))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        rows, columns = (int(n) for n in iota[1].split(","))
        shape = [int(n) for n in iota[2].split(",")]
        order = [int(n) for n in iota[3].split(",")] if iota[3] else list(range(len(shape)))
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        ids = [sum(i * strides[a] for i, a in zip(place, order)) for place in itertools.product(*(range(shape[a]) for a in order))]
        return frozenset(frozenset(ids[r * columns : (r + 1) * columns]) for r in range(rows))
    return frozenset({frozenset(range(devices))})


def total(found: list[Found]) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    """(kind, mesh axes) -> (count, bytes)."""
    out: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for f in found:
        count, size = out.get((f.kind, f.axes), (0, 0))
        out[f.kind, f.axes] = (count + f.count, size + f.bytes)
    return out
