"""What to say where nothing fits: by how much, which kind of memory, and the smallest changes that fit, each tried."""

import itertools
from collections.abc import Iterator

from meshloom.parallel.table import build
from meshloom.plan.explain import size
from meshloom.plan.hardware import Cluster
from meshloom.plan.search import Found, Question, leanest
from meshloom.plan.space import Allowed

TIMES = (2, 4, 8, 16, 32, 64)
"""Factors that are tried of devices and, downwards, of sequences and their length."""


def unfit(q: Question, found: Found) -> list[str]:
    """Lines about what lacks, and what would do."""
    limit = q.cluster.hardware.memory
    if found.least is None:
        out = [f"No layout admits this: {_refusal(q)}"]
    else:
        m, one = found.least.memory, found.least
        kind = max(m.kinds, key=lambda k: m.kinds[k])
        out = [
            f"Nothing fits: the layout that needs least ({one.spelling or 'one device'}, {one.micro} micro-batch{'es' * (one.micro > 1)}, "
            f"remat {one.how.remat}) takes {size(m.total)} on each device, {size(m.total - limit)} more than the {size(limit)} there are. "
            f"Most of it is {kind}: {size(m.kinds[kind])}."
        ]
    changes = [f"  {said}" for said in itertools.islice(fitting(q), 4)]
    more = "" if q.cluster.hardware.shared else f": not {TIMES[-1]} times as many devices either"
    return [*out, *(["What would fit:", *changes] if changes else [f"No change that was tried fits{more}."])]


def fitting(q: Question) -> Iterator[str]:
    """Changes with which something fits, the smallest of each kind, in words."""
    for said, tries in changes(q):
        for amount, changed in tries:
            one = _fits(changed)
            if one:
                yield f"{said.format(amount)}: {one}"
                break


def changes(q: Question) -> Iterator[tuple[str, Iterator[tuple[str, Question]]]]:
    """Kinds of change: a sentence with a gap for how much, and the questions to try, smallest first."""
    free, allowed = Allowed(), q.allowed
    if allowed.remats != free.remats:
        yield "another remat (leave --remat out){}", iter([("", q._replace(allowed=allowed._replace(remats=free.remats)))])
    if allowed.micro is not None:
        yield "other micro-batches (leave --micro out){}", iter([("", q._replace(allowed=allowed._replace(micro=None)))])
    if allowed.words:
        yield "another layout (leave --layout out){}", iter([("", q._replace(allowed=allowed._replace(words="")))])
    if (allowed.remats != free.remats) + (allowed.micro is not None) + bool(allowed.words) > 1:
        both = allowed._replace(remats=free.remats, micro=None, words="")
        yield "leave --remat, --micro and --layout out{}", iter([("", q._replace(allowed=both))])
    yield "{} sequences in a step", ((f"{n:,}", q._replace(sequences=n)) for n in _fewer(q.sequences))
    yield "more devices, {}", ((c.label, q._replace(cluster=c)) for c in _larger(q.cluster))
    yield "sequences of {} tokens", ((f"{n:,}", q._replace(seq=n)) for n in _fewer(q.seq))


def _fewer(n: int) -> list[int]:
    """Smaller whole parts of a number, the largest first."""
    return [n // times for times in TIMES if n % times == 0 and n // times >= 1]


def _larger(c: Cluster) -> list[Cluster]:
    """More of the same: nodes or slices first, or the shortest side of a torus."""
    if c.hardware.shared:  # simulated devices share one machine's memory
        return []
    at = min(range(len(c.shape)), key=lambda i: (c.shape[i], i)) if c.hardware.torus else 0
    grown = [tuple(n * times if i == at else n for i, n in enumerate(c.shape)) for times in TIMES]
    if not c.hardware.torus and len(c.shape) == 2 and c.shape[0] == 1 and c.shape[1] < c.hardware.node:
        inside = [(1, c.shape[1] * times) for times in TIMES if c.shape[1] * times <= c.hardware.node]
        grown = [*inside, *((times, c.hardware.node) for times in TIMES)]
    return [Cluster(c.hardware, shape) for shape in grown]


def _fits(q: Question) -> str:
    """What fits, in words; empty where nothing does."""
    limit = q.cluster.hardware.memory
    try:
        one = leanest(q, enough=limit)
    except ValueError:
        return ""
    if one is None or one.memory.total > limit:
        return ""
    return f"{one.spelling or 'one device'} with remat {one.how.remat} takes {size(one.memory.total)}"


def _refusal(q: Question) -> str:
    """Why the checks refuse everything: the batch, or what they say of the plainest layout."""
    n, words = q.cluster.devices, q.allowed.words
    try:
        build(words or f"data={n}", q.config, q.seq, q.cluster.hardware.platform)
    except ValueError as error:
        return str(error)
    micro, other = (f" in {q.allowed.micro} micro-batches", "leave --micro out, ") if q.allowed.micro else ("", "")
    return (
        f"{q.sequences} sequence{'s' * (q.sequences > 1)}{micro} and the sizes of this model cannot be shared evenly by the {n} devices of "
        f"{q.cluster.label}. To mend it, {other}ask for a batch that is a multiple of them (--batch-tokens), or another number of devices."
    )
