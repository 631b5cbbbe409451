"""What a compiled program does: floating-point operations of its matrix products, and arrays that it copies in its loops.  From its text alone."""

import math
import re
from typing import NamedTuple

_HEAD = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s+(?:\([^\n]*)?\{\s*$")
_LINE = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-]+)\s+=\s+(\(.*?\)|\S+)\s+([\w\-]+)\((.*)$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":\s*"(\d+)"\}')
_SOMETIMES = re.compile(r'ticks_(\d+)_of_(\d+)/cond"')


class Op(NamedTuple):
    """One instruction: its name, its type's text, what it does, and the rest of its line."""

    name: str
    type: str
    kind: str
    rest: str

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs."""
        return [name.strip().lstrip("%") for one, more in _CALLED.findall(self.rest) for name in (more.split(",") if more else [one])]


def parsed(text: str) -> tuple[dict[str, list[Op]], str]:
    """The instructions of every computation, and the entry's name.  text: `compiled.as_text()`."""
    bodies: dict[str, list[Op]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = bodies.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif found := _LINE.match(line):
            current.append(Op(*found.groups()))
    return bodies, entry


def products(text: str) -> int:
    """Floating-point operations of all matrix products of a program for a CPU, loops multiplied out; of other conditions than a pipeline's, the branch
    with most."""
    bodies, entry = parsed(text)
    known: dict[str, int] = {}

    def inside(name: str) -> int:
        if name not in known:
            types = {op.name: op.type for op in bodies[name]}
            known[name] = sum(one(op, types) for op in bodies[name])
        return known[name]

    def one(op: Op, types: dict[str, str]) -> int:
        if op.kind == "dot":
            first = types[re.match(r"%?([\w.\-]+)", op.rest)[1]]  # type: ignore[index]
            axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.rest)
            inner = [_shape(first)[int(i)] for i in axes[1].split(",") if i] if axes else []
            return 2 * math.prod(_shape(op.type)) * math.prod(inner)
        of = [inside(name) for name in op.called if name in bodies]
        if op.kind == "conditional":
            said = _SOMETIMES.search(op.rest)
            return max(of) * int(said[1]) // int(said[2]) if said else max(of)  # times the loop around, which is a multiple
        trips = _TRIPS.search(op.rest) if op.kind == "while" and any(of) else None
        assert trips or op.kind != "while" or not any(of), f"a loop with products has no known trip count: {op.rest[:200]}"
        return sum(of) * (int(trips[1]) if trips else 1)

    return inside(entry)


def copies(text: str, least: int) -> list[tuple[str, int]]:
    """Types of arrays of `least` bytes and more that are copied inside loops, and in how many places each; a buffer's first filling (a copy of what is
    the same everywhere) is none, nor is a TPU's way from one memory to another (what is read or written in a loop passes its small memory)."""
    bodies, _ = parsed(text)
    looped = {name for ops in bodies.values() for op in ops if op.kind == "while" for name in op.called}
    while more := {name for body in looped for op in bodies.get(body, []) for name in op.called if name in bodies} - looped:
        looped |= more
    found: dict[str, int] = {}
    for body in looped:
        made = {op.name: op.kind for op in bodies.get(body, [])}
        for op in bodies.get(body, []):
            source = re.match(r"%?([\w.\-]+)", op.rest)
            filled = source and ("broadcast" in source[1] or made.get(source[1]) == "broadcast")
            kind = re.match(r"\(?([a-z]+\d*\[[\d,]*\])", op.type)
            spaces = re.findall(r"\[[\d,]+\]\{[^}]*\}", op.type)[:2]
            moved = op.kind == "copy-start" and len({"S(1)" in layout for layout in spaces}) == 2
            if op.kind in ("copy", "copy-start") and not moved and kind and not filled and _bytes(kind[1]) >= least:
                found[kind[1]] = found.get(kind[1], 0) + 1
    return sorted(found.items())


def _shape(type: str) -> list[int]:
    """The sizes of an array type such as f32[3,64]{1,0}."""
    return [int(n) for n in type[type.index("[") + 1 : type.index("]")].split(",") if n]


def _bytes(type: str) -> int:
    bits = re.search(r"\d+", type[: type.index("[")])
    return math.prod(_shape(type)) * (int(bits[0]) // 8 if bits else 1)
