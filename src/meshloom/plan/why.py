"""Why one candidate is slower than another: the term of the step's time that differs most, in words and seconds; what it gains elsewhere; its memory."""

from meshloom.plan.explain import size
from meshloom.plan.search import Candidate
from meshloom.plan.time import Time

SMALL = 0.02
"""Part of the difference in total time under which a gain elsewhere is not worth a word."""


def terms(t: Time) -> dict[str, float]:
    """Seconds of a step by kind: work, idle time, and each collective as far as nothing hides it."""
    found: dict[str, float] = {}
    for part in t.parts:
        found[part.what] = found.get(part.what, 0.0) + part.seconds
    return found


def why(best: Candidate, other: Candidate) -> str:
    """Why `other` stands behind `best`, in a phrase."""
    have, want = terms(other.time), terms(best.time)
    more = {what: have.get(what, 0.0) - want.get(what, 0.0) for what in {**want, **have}}
    slower = other.time.total - best.time.total
    worst, gain = max(more, key=lambda what: (more[what], what)), min(more, key=lambda what: (more[what], what))
    if slower <= 0 or more[worst] <= 0:
        apart = other.memory.total - best.memory.total
        return f"as fast, with {size(apart)} more memory" if apart > 0 else "as fast, with a longer spelling or more micro-batches"
    said = f"{worst}: {seconds(more[worst])} more"
    said += f" ({seconds(have[worst])} for {seconds(want[worst])})" if want.get(worst) else " (the best has none)"
    if -more[gain] > SMALL * slower:
        said += f", for {seconds(-more[gain])} less {gain}"
    return said


def seconds(t: float) -> str:
    """A time for people: 0.0123 -> "12.3 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if t >= scale:
            return f"{t / scale:.3g} {unit}" if t / scale < 1000 else f"{t / scale:,.0f} {unit}"
    return f"{t * 1e6:.2g} us" if t else "0 s"
