"""Two or more programs that take turns: each waits for "go" on its standard input, works once, and answers with what it cost.

So samples interleave (A B C A B C ...) and nothing else runs meanwhile. The driver's half is `Program`; the other half, in the program, is `Turns`.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Turns:
    """The program's half. Make it before anything prints: it keeps standard output for answers and sends all other printing to standard error."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def tell(self, **facts: Any) -> None:
        """One line to the driver."""
        print(json.dumps(facts), file=self.out, flush=True)

    def wait(self) -> bool:
        """Blocks until it is this program's turn; False when there are no more turns. Starts the clocks."""
        going = sys.stdin.readline().strip() == "go"
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        return going

    def done(self, **facts: Any) -> None:
        """Answers a turn with its wall and CPU seconds (of all threads)."""
        self.tell(wall=time.perf_counter() - self.wall, cpu=time.process_time() - self.cpu, **facts)

    def loop(self, work: Callable[[], dict[str, Any]], **facts: Any) -> None:
        """Says that it is ready, then does `work` once a turn."""
        self.tell(ready=True, **facts)
        while self.wait():
            self.done(**work())


class Program:
    """The driver's half: one running program."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], log: Path) -> None:
        self.name, self.log = name, log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **env}
            )

    def hear(self, limit: float = 900.0) -> dict[str, Any]:
        """Its next line.  Raises RuntimeError with the end of its log if it ended or said nothing for `limit` seconds."""
        assert self.process.stdout is not None
        timer = threading.Timer(limit, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            self.process.wait()
            end = self.log.read_text(errors="replace")[-2000:]
            raise RuntimeError(
                f"{self.name} ended with code {self.process.returncode}, or was silent for {limit:g} s. The end of its log:\n{end}"
            )
        return json.loads(line)

    def turn(self) -> dict[str, Any]:
        """One turn's answer."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.hear()

    def close(self) -> None:
        """Ends the program: no more turns, and a kill if it does not leave."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(20)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


def interleave(programs: list[Program], rounds: int, warm: int, rest: float = 0.3) -> dict[str, list[dict[str, Any]]]:
    """Each program's answers.  warm: turns before the first that counts.  rest: seconds between turns, until idle threads have stopped spinning.
    The order turns with the round, so that nobody always follows the same neighbour."""
    answers: dict[str, list[dict[str, Any]]] = {p.name: [] for p in programs}
    for i in range(warm + rounds):
        first = i % len(programs)
        for p in programs[first:] + programs[:first]:
            time.sleep(rest)
            answers[p.name].append({**p.turn(), "warm": i < warm})
    return answers
