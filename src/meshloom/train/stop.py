"""Ending a run in order: a signal asks for a last checkpoint, a second one, or the end of the grace time, does not wait for it."""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Self

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Catches SIGTERM and SIGINT while it is entered.  grace: seconds from the first signal until the process ends whatever it is doing.

    signal: what was caught, or None. With several processes a signal to any of them stops all at the same step, which JAX's preemption
    service agrees on; there SIGINT counts as SIGTERM.
    """

    def __init__(self, grace: float):
        self.grace, self.signal = grace, None
        self._many = jax.process_count() > 1
        self._timer: threading.Timer | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            caught = {signal.SIGINT: _as_term} if self._many else dict.fromkeys(SIGNALS, self._catch)
            self._before = {number: signal.signal(number, handler) for number, handler in caught.items()}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._timer:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            _leave(number, "A second signal: ending at once. The newest whole checkpoint stays.")
        self._begin(number)

    def _begin(self, number: int) -> None:
        self.signal = number
        print(f"{signal.Signals(number).name}: saving a checkpoint after this step, then ending (within {self.grace:g} s).", file=sys.stderr, flush=True)
        late = f"The {self.grace:g} s of checkpoint.grace are over before the last checkpoint was whole. The newest whole one stays."
        self._timer = threading.Timer(self.grace, _leave, (number, late))
        self._timer.daemon = True
        self._timer.start()

    def due(self, step: int) -> bool:
        """Whether the run ends now.  step: steps done, the same on every process; call it at every step."""
        if self._many and self.signal is None and multihost_utils.reached_preemption_sync_point(step):
            self._begin(signal.SIGTERM)
        return self.signal is not None


def _as_term(number: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _leave(number: int, why: str) -> None:
    """Ends the process now, saying why."""
    print(why, file=sys.stderr, flush=True)
    os._exit(128 + number)
