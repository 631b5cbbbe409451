"""Ending in order on SIGTERM or SIGINT: the loop finishes its step, saves, and exits with a code of its own."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

import jax
from jax.experimental import multihost_utils

EXIT_CODE = 75
"""What a process that was told to end, and saved, exits with: EX_TEMPFAIL, 'try again'."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def exit_code(number: int | None, step: int) -> int:
    """What a run ends with that a signal may have stopped (None: it did not) after so many steps: at step 0 there is nothing to save."""
    if number is None:
        return 0
    return EXIT_CODE if step else 128 + number


def _say(text: str) -> None:
    """Writes to standard error without Python's buffers, which a signal may have interrupted."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{text}\n".encode())


class Preemption:
    """A context manager that turns the first signal into a flag for the loop to poll; a second signal ends the process at once.

    grace: seconds from the signal to the end of the process, whatever it is doing then. With several processes `jax.distributed` catches
    SIGTERM on any of them and `stop` says yes on all at the same step; SIGINT is passed on to it."""

    def __init__(self, grace: float, say: Callable[[str], None] = _say) -> None:
        self.grace, self.say = grace, say
        self.signal = 0
        self._old: dict[int, object] = {}
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        """Installs the handlers. Only a main thread can; elsewhere nothing is installed and `stop` is False."""
        if threading.current_thread() is threading.main_thread():
            catch = (signal.SIGINT,) if jax.process_count() > 1 else SIGNALS
            self._old = {number: signal.signal(number, self._handle) for number in catch}
        return self

    def __exit__(self, *_: object) -> None:
        """Puts the former handlers back and ends the grace timer."""
        if self._timer:
            self._timer.cancel()
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.signal:
            self.say(f"{name} again: ending at once, without a checkpoint of the last steps.")
            os._exit(128 + number)
        self.signal = number
        self.say(f"{name}: saving after this step, within {self.grace:g} s. Send it again to end at once.")
        self._start_timer()
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)  # jax.distributed passes it on to every process

    def _start_timer(self) -> None:
        self._timer = threading.Timer(self.grace, self._out_of_time)
        self._timer.daemon = True
        self._timer.start()

    def _out_of_time(self) -> None:
        self.say(f"The {self.grace:g} s of grace (checkpoint.grace) are over: ending now. The newest whole checkpoint is what is left.")
        os._exit(128 + (self.signal or signal.SIGTERM))

    def stop(self, step: int) -> bool:
        """Whether to save and end after this step. With several processes: call it at every step, with the same steps on all."""
        if jax.process_count() == 1:
            return self.signal != 0
        reached = multihost_utils.reached_preemption_sync_point(step)
        if reached and not self.signal:
            self.signal = signal.SIGTERM
            self.say(f"SIGTERM on one of the processes: saving after step {step}, within {self.grace:g} s.")
            self._start_timer()
        return reached
