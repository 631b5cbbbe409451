"""A plan told to a person: lines of text, or one JSON object.  All numbers are the cost model's."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from meshloom.plan.explain import number, size
from meshloom.plan.flops import train_flops
from meshloom.plan.search import Candidate, Found, Question
from meshloom.plan.why import seconds, why

DAY = 86400.0


class Budget(NamedTuple):
    """What a run is to be. tokens: in all, or None. price: dollars a device-hour, or None."""

    tokens: int | None = None
    price: float | None = None


class Speed(NamedTuple):
    """What a step's time makes of a run. mfu: model FLOPs over the peak. days, hours (of devices), dollars: of the budget, None where none was given."""

    mfu: float
    tokens: float
    day: float
    days: float | None
    hours: float | None
    dollars: float | None


def speed(q: Question, one: Candidate, budget: Budget) -> Speed:
    """Tokens a second and a day, and what a budget takes."""
    flops = train_flops(q.model, q.config, q.seq)
    rate = q.sequences * q.seq / one.time.total
    days = budget.tokens / rate / DAY if budget.tokens else None
    hours = days * 24 * q.cluster.devices if days is not None else None
    dollars = hours * budget.price if hours is not None and budget.price is not None else None
    return Speed(one.time.mfu(flops * q.sequences * q.seq, q.cluster), rate, rate * DAY, days, hours, dollars)


def lines(title: str, q: Question, found: Found, budget: Budget, batch: str = "") -> list[str]:
    """The plan as text.  title: of the model.  batch: how the batch was asked for."""
    tokens = q.sequences * q.seq
    said = f" ({batch})" if batch else ""
    head = [
        f"{title} on {q.cluster.label}: {q.cluster.devices:,} device{'s' * (q.cluster.devices > 1)}, {size(q.cluster.hardware.memory)} each"
    ]
    head += [f"a step of {tokens:,} tokens{said}: {q.sequences:,} sequences of {q.seq:,}, {q.dtype}"]
    if found.best is None:
        return head
    best = found.best
    out = [*head, "", f"Layout       {spelled(best)}", f"             {cut(q, best)}", ""]
    out += _memory(q, best) + [""] + _time(best) + [""] + _speed(q, best, budget)
    if found.others:
        out += ["", "Next best"] + _others(q, best, found.others)
    return [*out, "", found.said]


def spelled(one: Candidate) -> str:
    """The layout in the compact spelling."""
    return one.spelling or "one device"


def cut(q: Question, one: Candidate) -> str:
    """How a candidate's step runs."""
    each = q.sequences // one.micro
    return f"{one.micro} micro-batch{'es' * (one.micro > 1)} of {each} sequence{'s' * (each > 1)}, remat {one.how.remat}, runner {one.how.runner}"


def _memory(q: Question, one: Candidate) -> list[str]:
    """Memory of a device by kind, largest first."""
    limit = q.cluster.hardware.memory
    rows = [(kind, n) for kind, n in sorted(one.memory.kinds.items(), key=lambda row: -row[1]) if n]
    wide = max(len(kind) for kind, _ in rows)
    out = [f"Memory       {size(one.memory.total)} of {size(limit)} on each device ({one.memory.total / limit:.0%})"]
    return out + [f"             {kind:{wide}}  {size(n):>10}  {n / one.memory.total:4.0%}" for kind, n in rows]


SMALL = 0.004
"""Part of a step below which a line of it is told with all the others like it."""
WORK = ("compute", "recompute", "memory", "optimizer", "bubble")
"""Parts of a step that are no collective."""


def _time(one: Candidate) -> list[str]:
    """The step by what takes time: in all, then each part, exposed, and what is hidden behind other work."""
    total = one.time.total
    moved = [p for p in one.time.parts if p.what not in WORK]
    sums = [f"{what} {seconds(one.time.of(what))}" for what in WORK if one.time.of(what)]
    away, hidden = sum(p.seconds for p in moved), sum(p.hidden for p in moved)
    sums += [f"waiting for what moves {seconds(away)}" + (f" ({seconds(hidden)} more hidden)" if hidden else "")] if moved else []
    parts = sorted((p for p in one.time.parts if p.seconds or p.hidden), key=lambda p: (-p.seconds, -p.hidden, p.what))
    told = [p for p in parts if max(p.seconds, p.hidden) >= SMALL * total]
    rows = [(f"{p.what}{f' ({p.why})' * bool(p.why)}", p.seconds, p.hidden) for p in told]
    rest = [p for p in parts if p not in told]
    rows += [(f"{len(rest)} smaller parts", sum(p.seconds for p in rest), sum(p.hidden for p in rest))] if rest else []
    wide = max(len(name) for name, _, _ in rows)
    out = [f"Step         {seconds(total)}: {', '.join(sums)}"]
    for name, shown, behind in rows:
        more = f"  and {seconds(behind)} hidden" if behind else ""
        out.append(f"             {name:{wide}}  {seconds(shown):>8}  {shown / total:4.0%}{more}")
    return out


def _speed(q: Question, one: Candidate, budget: Budget) -> list[str]:
    """MFU, tokens, days and dollars."""
    s = speed(q, one, budget)
    out = [f"Speed        MFU {s.mfu:.1%}, {s.tokens:,.0f} tokens/s, {number(s.day).strip()} tokens a day"]
    if s.days is not None:
        cost = f", {s.dollars:,.0f} dollars at {budget.price:g} each" if s.dollars is not None else ""
        out.append(f"Budget       {budget.tokens:,} tokens: {s.days:,.1f} days, {s.hours:,.0f} device-hours{cost}")
    return out


def _others(q: Question, best: Candidate, others: tuple[Candidate, ...]) -> list[str]:
    """The next best, each with what is slower in it."""
    out = []
    for i, one in enumerate(others, 1):
        slower = one.time.total / best.time.total - 1
        out.append(f"  {i}. {spelled(one)}")
        out.append(f"     {cut(q, one)}; {seconds(one.time.total)} (+{slower:.1%}), {size(one.memory.total)}")
        out.append(f"     {why(best, one)}")
    return out


def tree(title: str, q: Question, found: Found, budget: Budget) -> dict[str, Any]:
    """The plan as one JSON object: bytes, seconds, tokens a second."""
    return {
        "model": title,
        "cluster": q.cluster.label,
        "devices": q.cluster.devices,
        "memory": q.cluster.hardware.memory,
        "seq": q.seq,
        "sequences": q.sequences,
        "dtype": q.dtype,
        "best": None if found.best is None else _one(q, found.best, budget),
        "others": [{**_one(q, one, budget), "why": why(found.best, one)} for one in found.others if found.best],
        "candidates": found.space,
        "priced": found.priced,
        "pruned": dict(found.pruned),
        "gap": found.gap,
    }


def _one(q: Question, one: Candidate, budget: Budget) -> Mapping[str, Any]:
    """A candidate as an object."""
    s = speed(q, one, budget)
    return {
        "layout": one.spelling,
        "micro_batches": one.micro,
        "remat": one.how.remat,
        "runner": one.how.runner,
        "memory": dict(one.memory.kinds),
        "bytes": one.memory.total,
        "seconds": one.time.total,
        "parts": [p._asdict() for p in one.time.parts],
        **{name: value for name, value in s._asdict().items() if value is not None},
    }
