"""How a run shows itself while it goes: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import NamedTuple, Self

from meshloom.train.metrics import Line


class Rate(NamedTuple):
    """Speed since the last line. tokens: scored ones a second. mfu: part of the devices' peak, or None where it is unknown. waiting: part of
    the time spent on waiting for data."""

    seconds: float
    tokens: float
    mfu: float | None
    waiting: float


class Progress:
    """The display of a run of `steps` steps. share: the part of a second that one position takes at the devices' peak, or None."""

    def __init__(self, steps: int, start: int, share: float | None, positions: int, show: bool = True):
        self.steps, self.done, self.share, self.positions, self.show = steps, start, share, positions, show
        self.begun = self.since = time.perf_counter()
        self.first, self.marked, self.waited = start, start, 0.0
        self.last = Rate(0.0, 0.0, None, 0.0)
        self.bar = _bar(steps, start) if show and sys.stdout.isatty() else None

    def __enter__(self) -> Self:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()

    def restart(self, done: int | None = None) -> None:
        """Starts the clock anew: after compiling, evaluating or saving, which are not the step's time.  done: steps that are over by now;
        by default all that were sent."""
        self.since, self.marked, self.waited = time.perf_counter(), self.done if done is None else done, 0.0

    def step(self, done: int, waited: float) -> None:
        """A step has been sent. waited: seconds that its data took."""
        self.done, self.waited = done, self.waited + waited
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=done)

    def rate(self, tokens: int, step: int, steps: int) -> Rate:
        """The speed since the last call or restart. tokens: scored in an interval of so many steps that ended with `step`. The step after it may
        have been sent already, and the clock may have been started anew inside the interval: only the steps since then count. Where there are none
        (the last save came first), the speed before."""
        seconds, timed = max(time.perf_counter() - self.since, 1e-9), step - self.marked
        if timed <= 0:
            return self.last
        mfu = None if self.share is None else self.share * timed * self.positions / seconds
        self.last = Rate(seconds, tokens * timed / steps / seconds, mfu, self.waited / seconds)
        self.restart(step)
        return self.last

    def line(self, line: Line, rate: Rate) -> None:
        """Shows an interval."""
        mfu = "" if rate.mfu is None else f"  MFU {rate.mfu:.0%}"
        r = line.routers
        routers = f"  busiest expert {r.busiest:.2f}x" + (f"  dropped {r.dropped:.1%}" if r.dropped else "") if r else ""
        more = "".join(f"  {name.replace('_', ' ')} {value:.2f}" for name, value in line.more.items())
        text = f"loss {line.loss:.4f}  lr {line.lr:.2e}  norm {line.norm:.2f}  {rate.tokens:,.0f} tok/s{mfu}{routers}{more}"
        if self.bar:
            self.bar.update(self.bar.task_ids[0], told=text)
        elif self.show:
            left = (time.perf_counter() - self.begun) / max(1, self.done - self.first) * (self.steps - self.done)
            print(f"step {line.step:>6,}/{self.steps:,}  {text}  left {duration(left)}", flush=True)

    def say(self, text: str) -> None:
        """A sentence above the bar."""
        if self.bar:
            self.bar.console.print(text, markup=False, highlight=False)
        elif self.show:
            print(text, flush=True)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _bar(steps: int, start: int):
    """A bar with step, loss, speed and time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Rich

    columns = (
        MofNCompleteColumn(),
        BarColumn(24),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[told]}"),
    )
    bar = Rich(*columns, refresh_per_second=4)
    bar.add_task("", total=steps, completed=start, told="compiling")
    return bar
