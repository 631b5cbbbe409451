"""From the steps of a program to the graph: what is chosen for itself, what follows an operand, what costs nothing, loops and branches."""

from typing import Any

from meshloom.auto.choices import WHOLE, Letters, letters
from meshloom.auto.graph import Edge, Graph, Held, Node, follow, strategies
from meshloom.auto.price import Rates, Spec, parts, reshard, specs
from meshloom.auto.program import Literal, Program, Ref, Step, Value
from meshloom.auto.share import share

BARRIERS = {"barrier", "optimization_barrier"}
LARGE = 2**20
"""Bytes of a sum from which on it has strategies of its own (a scattered sum among them); smaller ones follow and are added up everywhere."""
ANYWHERE = {"iota", "random_bits", "rng_uniform", "rng_bit_generator", "random_seed", "random_wrap", "random_unwrap", "random_fold_in"}


def grow(
    program: Program, rates: Rates, inputs: dict[int, list[Spec]], ties: dict[int, int], donated: set[int], names: dict[int, str]
) -> Graph:
    """The graph of a program.  inputs: value -> the layouts that it may have.  ties: number of a result -> the input value whose layout it has to
    have.  donated: inputs whose memory the results may take.  names: of inputs."""
    g = Grower(program.values, rates)
    for v in program.block.ins:
        if program.values[v].shape:
            g.placed(v, names[v], "input", inputs[v], 1.0, 0)
    g.steps(program.block.steps, 1.0)
    for j, ref in enumerate(program.block.outs):
        if isinstance(ref, int):
            g.used(ref, g.clock + 1, False)
            if j in ties and g.imposes(ref) and program.values[ref].shape:
                into = g.home[ties[j]]
                g.edge(into, ref, list(g.nodes[into].gives[ties[j]]), 1.0, ("out", j))
    held = g.lives(set(program.block.ins), donated)
    edges, again = share(g.nodes, g.edges)
    return Graph(g.nodes, edges, held, g.clock, g.replicated, again)


class Grower:
    """The graph as it grows.  home: value -> its node.  free: values that cost nothing in any layout.  views: value -> (what it is a broadcast of,
    for each axis of that its own axis)."""

    def __init__(self, values: tuple[Value, ...], rates: Rates) -> None:
        self.values, self.rates, self.mesh = values, rates, rates.mesh
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.home: dict[int, int] = {}
        self.free: set[int] = set()
        self.views: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.replicated: dict[str, int] = {}
        self.clock = 0
        self.born: dict[int, int] = {}
        self.end: dict[int, int] = {}
        self.kept: set[int] = set()
        self.made: dict[int, list[int]] = {}
        self.whole: set[int] = set()

    # what values are

    def imposes(self, ref: Ref) -> bool:
        """Whether the layout of an operand matters: an array that depends on inputs."""
        return isinstance(ref, int) and bool(self.values[ref].shape) and (self.base(ref) in self.home)

    def base(self, ref: int) -> int:
        """The value that lies in memory for this one."""
        return self.views[ref][0] if ref in self.views else ref

    def layouts(self, ref: int) -> list[Spec]:
        """A value's layout under every strategy of its node."""
        base = self.base(ref)
        found = self.nodes[self.home[base]].gives[base]
        if ref not in self.views:
            return list(found)
        to = self.views[ref][1]
        return [tuple(to[d] if d != WHOLE else WHOLE for d in s) for s in found]

    def used(self, ref: int, when: int, fused: bool, stays: bool = True) -> None:
        """A value is read.  fused: by an operation that runs together with the one that made it.  stays: its memory is not taken by the result."""
        base = self.base(ref)
        self.end[base] = max(self.end.get(base, 0), when + stays)
        if not fused:
            self.kept.add(base)

    # nodes and edges

    def placed(self, value: int, name: str, kind: str, found: list[Spec], times: float, depth: int) -> int:
        """A node that is a value in one of some layouts."""
        n = len(found)
        node = Node(name, kind, [0.0] * n, [()] * n, [()] * n, {value: tuple(found)}, times, depth)
        node.signs.append(f"{kind} {self.values[value]} {len(found)} {times}")
        self.nodes.append(node)
        self.home[value] = len(self.nodes) - 1
        self.born[value] = self.clock if kind != "input" else 0
        self.kept.add(value)
        return len(self.nodes) - 1

    def edge(self, target: int, ref: int, want: list[Spec], times: float, at: tuple, since: int | None = None) -> None:
        """A node takes a value; inside one node the change of layout is a cost of its strategies."""
        base, taken = self.base(ref), tuple(want)
        if ref in self.views:
            to = self.views[ref][1]
            want = [tuple(to.index(d) if d != WHOLE and d in to else WHOLE for d in s) for s in want]
        source, node = self.home[base], self.nodes[target]
        have, size = self.nodes[source].gives[base], self.values[base].bytes
        if source == target:
            for choice, (h, w) in enumerate(zip(have, want)):
                moves = reshard(h, w, size, self.mesh)
                node.add(choice, sum(map(self.rates.moved, moves)) * times / node.times, moves)
            return
        node.depth = max(node.depth, self.nodes[source].depth)
        span = (self.clock if since is None else since, self.clock + 1)
        self.edges.append(Edge(base, ref, source, have, target, tuple(want), size, times, at, taken, span))

    # steps

    def steps(self, steps: tuple[Step, ...], times: float) -> None:
        """Adds steps, each run `times`."""
        for step in steps:
            self.clock += 1
            for ref in step.ins:
                if isinstance(ref, int):
                    self.end[self.base(ref)] = max(self.end.get(self.base(ref), 0), self.clock)
            if step.kind in LOOPS:
                LOOPS[step.kind](self, step, times)
            elif step.kind in BARRIERS:
                for old, new in zip(step.ins, step.outs):
                    self.alias(old, new)
            else:
                self.operation(step, times)

    def alias(self, old: Ref, new: int) -> None:
        """Another name for a value."""
        if not isinstance(old, int):
            self.free.add(new)
        elif old in self.views:
            self.views[new] = self.views[old]
        elif old in self.home:
            self.views[new] = (old, tuple(range(len(self.values[old].shape))))
        else:
            self.free.add(new)

    def operation(self, step: Step, times: float) -> None:
        """Adds one equation: nothing where no operand matters, a node of its own, or more work for an operand's node."""
        real = [i for i, r in enumerate(step.ins) if self.imposes(r)]
        if not real or step.kind in ANYWHERE:
            self.free.update(step.outs)
            return
        rule, known = letters(step.eqn)
        if not known:
            self.replicated[step.kind] = self.replicated.get(step.kind, 0) + 1
        if step.kind == "broadcast_in_dim" and WHOLE not in rule.ins[0] and self.views.get(step.ins[0]) is None:
            self.views[step.outs[0]] = (step.ins[0], rule.ins[0])
            return
        for v in step.outs:
            self.born[v] = self.clock
            self.made[v] = [self.base(step.ins[i]) for i in real]
        large = bool(rule.summed) and sum(self.values[v].bytes for v in step.outs) >= LARGE
        if rule.heavy or large or (len(real) > 1 and all(step.ins[i] in self.views for i in real)):
            self.heavy(step, rule, real, times)
        else:
            self.follower(step, rule, real, times)

    def heavy(self, step: Step, rule: Letters, real: list[int], times: float) -> None:
        """A node with strategies of its own."""
        values = [self.values[v] for v in step.outs]
        given = [self.values[step.ins[i]] for i in real]
        found = strategies(rule, [v.bytes for v in values], [v.shape for v in values], self.rates)
        node = Node(
            _named(step), step.kind, [0.0] * len(found), [()] * len(found), [s.wants for s in found],
            {v: tuple(s.gives[i] for s in found) for i, v in enumerate(step.outs) if values[i].shape}, times, 0, step.number,
        )  # fmt: skip
        for choice, s in enumerate(found):
            read = sum(v.bytes / parts(s.wants[i], self.mesh) for i, v in zip(real, given))
            work = self.rates.computed(rule.flops / s.shared, given[0].dtype) if rule.flops else 0.0
            node.add(choice, max(work, self.rates.touched(read)) + sum(map(self.rates.moved, s.moves)), s.moves)
        node.signs.append(f"{step.kind} {rule} {[v.dtype for v in given]} {times}")
        self.nodes.append(node)
        self.home |= dict.fromkeys(node.gives, len(self.nodes) - 1)
        self.kept |= set(node.gives)
        for i in real:
            self.edge(len(self.nodes) - 1, step.ins[i], [s.wants[i] for s in found], times, (step.number, i))
            self.used(step.ins[i], self.clock, False)
        node.depth += 1

    def follower(self, step: Step, rule: Letters, real: list[int], times: float) -> None:
        """More work for the node of the operand that lies deepest; the other operands come to where that one is."""
        rank = lambda i: (
            step.ins[i] not in self.views,
            self.nodes[self.home[self.base(step.ins[i])]].depth,
            self.values[step.ins[i]].bytes,
            -i,
        )
        lead = max(real, key=rank)
        at = self.home[self.base(step.ins[lead])]
        node, size = self.nodes[at], self.values[step.ins[lead]].bytes
        sizes = [self.values[v].bytes for v in step.outs]
        known: dict[Spec, Any] = {}
        done = [
            known[s] if s in known else known.setdefault(s, follow(rule, lead, s, size, sizes, self.mesh))
            for s in self.layouts(step.ins[lead])
        ]
        for choice, f in enumerate(done):
            if f.moves:
                node.add(choice, sum(map(self.rates.moved, f.moves)) * times / node.times, f.moves)
        for j, v in enumerate(step.outs):
            if self.values[v].shape:
                node.gives[v] = tuple(f.gives[j] for f in done)
                self.home[v] = at
        node.signs.append(f"{step.kind} {rule.ins} {rule.outs} {rule.sizes} {times}")
        for i in real:
            fused = self.home[self.base(step.ins[i])] == at
            self.used(step.ins[i], self.clock, fused, stays=False)
            if i != lead:
                self.edge(at, step.ins[i], [f.wants[i] for f in done], times, (step.number, i))

    # loops and branches

    def scan(self, step: Step, times: float) -> None:
        """A loop: constants, what is carried, slices; its body once, `length` times as dear; what it stacks up."""
        p, body = step.eqn.params, step.blocks[0]
        consts, carried, length = p["num_consts"], p["num_carry"], p["length"]
        begun, deepest = self.clock, max((n.depth for n in self.nodes), default=0)
        into: list[tuple[int, Ref, list[Spec], int]] = []
        for i, (outer, inner) in enumerate(zip(step.ins, body.ins)):
            shape = self.values[inner].shape
            slices = i >= consts + carried
            if not shape or (not self.imposes(outer) and not consts <= i < consts + carried):
                self.free.add(inner)
                continue
            found = specs(shape, self.mesh)
            at = self.placed(inner, _named(step), "carry" if i < consts + carried and i >= consts else "loop", found, times, deepest)
            want = [tuple(d + 1 if d != WHOLE else WHOLE for d in s) for s in found] if slices else found
            if self.imposes(outer):
                into.append((at, outer, want, i))
        self.steps(body.steps, times * length)
        for at, outer, want, i in into:
            self.edge(at, outer, want, times, (step.number, i), begun)
            self.used(outer, self.clock, False)
        self.back(step, list(zip(body.ins[consts:], body.outs[:carried])), times * length)
        for j in range(carried):
            if self.values[step.outs[j]].shape:
                self.same(body.ins[consts + j], step.outs[j])
        for j in range(carried, len(step.outs)):
            self.stack(body.outs[j], step.outs[j], begun)

    def back(self, step: Step, pairs: list[tuple[int, Ref]], times: float) -> None:
        """What a body gives back has the layout of what it took in."""
        for j, (inner, out) in enumerate(pairs):
            if inner in self.home and self.imposes(out):
                at = self.home[inner]
                self.edge(at, out, list(self.nodes[at].gives[inner]), times, (step.number, "back", j))
                self.used(out, self.clock, False)
            elif isinstance(out, int):
                self.used(out, self.clock, False)

    def same(self, inner: int, outer: int) -> None:
        """A result of a loop lies as what it carries."""
        at = self.home[inner]
        self.nodes[at].gives[outer] = self.nodes[at].gives[inner]
        self.home[outer] = at
        self.born[outer] = self.clock
        self.kept.add(outer)
        self.whole.add(outer)

    def stack(self, inner: Ref, outer: int, begun: int) -> None:
        """A value of every round, stacked along a new first axis."""
        if isinstance(inner, Literal) or not self.imposes(inner):
            self.free.add(outer)
            return
        at = self.home[self.base(inner)]
        self.nodes[at].gives[outer] = tuple(tuple(d + 1 if d != WHOLE else WHOLE for d in s) for s in self.layouts(inner))
        self.home[outer] = at
        self.born[outer] = begun
        self.kept.add(outer)
        self.whole.add(outer)
        self.used(inner, self.clock, True)

    def whiles(self, step: Step, times: float) -> None:
        """A loop of unknown length: counted once."""
        test, body = step.blocks
        skip = len(step.ins) - len(step.outs)
        depth = max((n.depth for n in self.nodes), default=0)
        for i, (inner, other) in enumerate(zip(body.ins, test.ins)):
            if self.values[inner].shape:
                found = specs(self.values[inner].shape, self.mesh)
                at = self.placed(inner, _named(step), "carry", found, times, depth)
                self.nodes[at].gives[other] = tuple(found)
                self.home[other] = at
                if self.imposes(step.ins[skip + i]):
                    self.edge(at, step.ins[skip + i], found, times, (step.number, skip + i))
                    self.used(step.ins[skip + i], self.clock, False)
        self.steps(test.steps, times)
        self.steps(body.steps, times)
        self.back(step, list(zip(body.ins, body.outs)), times)
        for inner, outer in zip(body.ins, step.outs):
            if inner in self.home:
                self.same(inner, outer)
        self.replicated["while (its costs counted once)"] = self.replicated.get("while (its costs counted once)", 0) + 1

    def cond(self, step: Step, times: float) -> None:
        """Branches: all counted, their results in one layout."""
        for block in step.blocks:
            self.steps(block.steps, times)
        for j, out in enumerate(step.outs):
            if not self.values[out].shape:
                continue
            found = specs(self.values[out].shape, self.mesh)
            at = self.placed(out, _named(step), "branches", found, times, max((n.depth for n in self.nodes), default=0))
            for k, block in enumerate(step.blocks):
                if self.imposes(block.outs[j]):
                    self.edge(at, block.outs[j], found, times, (step.number, "branch", k, j))
                    self.used(block.outs[j], self.clock, False)

    # lifetimes

    def lives(self, inputs: set[int], donated: set[int]) -> list[Held]:
        """What lies in memory, and when. An operation that runs together with its only readers keeps nothing; what it read lives as long as they do."""
        for v in sorted(self.made, key=lambda v: self.born[v], reverse=True):
            if v not in self.kept:
                for source in self.made[v]:
                    self.end[source] = max(self.end.get(source, 0), self.end.get(v, 0))
        held = []
        for v in self.home:
            if v in self.kept:
                end = self.clock + 2 if v in inputs and v not in donated else self.end.get(v, self.born[v] + 1)
                size = self.values[v].bytes
                held.append(Held(v, self.home[v], size, self.born[v], max(end, self.born[v] + 1)))
                node = self.nodes[self.home[v]]
                often = (1 if v in inputs else 2) / (node.times if v in self.whole else 1)
                for choice, s in enumerate(node.gives[v]):
                    node.add(choice, self.rates.touched(often * size / parts(s, self.mesh)), ())
        return held


LOOPS = {"scan": Grower.scan, "while": Grower.whiles, "cond": Grower.cond}


def _named(step: Step) -> str:
    """The operation and its shapes."""
    stack = str(step.eqn.source_info.name_stack)
    return f"{step.kind}{' in ' + stack if stack else ''}"
