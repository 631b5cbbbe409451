"""What every command shares: its common flags, the start of its process, and how mistakes are told. Imports nothing heavy."""

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

OK, DISAGREES, MISTAKE, BUG, INTERRUPTED = 0, 1, 2, 70, 130
"""Exit codes: done; `verify` or `--check` found a difference; the user's mistake or the machine's; ours; Ctrl-C."""


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    """Flags that every command takes."""

    debug: Annotated[bool, Parameter(negative="")] = False
    """Show the whole traceback of an error."""


@Parameter(name="*")
@dataclass(frozen=True)
class Machine(Common):
    """Flags of the commands that compute."""

    devices: int | None = None
    """Simulate this many devices on the CPU."""
    coordinator: str | None = None
    """host:port of rank 0, for a run of several processes (or MESHLOOM_COORDINATOR, torchrun's variables, SLURM)."""
    rank: int | None = None
    """This process's number, from 0 (or MESHLOOM_RANK)."""
    world: int | None = None
    """How many processes there are (or MESHLOOM_WORLD)."""


def start(machine: Machine, devices: int | None = None) -> int:
    """Prepares this process to compute, before JAX is imported: allocator, simulated devices, compile cache, meeting the other processes.
    devices: how many to simulate where --devices is not given.  Returns the number of processes."""
    from meshloom.core import malloc, process

    where = process.place(machine.coordinator, machine.rank, machine.world, os.environ)
    if os.environ.get("MESHLOOM_MALLOC") != "0":
        malloc.tune()
    count = machine.devices if machine.devices is not None else devices
    if count is not None:
        process.simulate(count, os.environ)
    if os.environ.get("MESHLOOM_COMPILE_CACHE") != "0":
        process.keep_compiled(process.cache_folder(os.environ))
    process.start(where)
    return where.world if where else 1


def guarded(command: Callable[[], int | None], debug: bool) -> int:
    """The exit code of a command; its errors are told in one sentence on standard error, or with the traceback if `debug`."""
    try:
        return command() or OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more to say to a closed pipe, at exit either
        return MISTAKE
    except Exception as error:
        if debug:
            traceback.print_exc()
        ours = _told(error)
        if ours:
            red(_sentence(error))
            return MISTAKE
        red(f"Unexpected {type(error).__name__}: {error}")
        if not debug:
            print("Run again with --debug for the traceback.", file=sys.stderr)
        return BUG


def red(text: str) -> None:
    """Prints an error to standard error, in red on a terminal."""
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    print(f"\033[31m{text}\033[0m" if colour else text, file=sys.stderr)


def _told(error: Exception) -> bool:
    """Whether an error is a sentence for the user: an OSError, a missing package, or a ValueError or FloatingPointError that our own code raised."""
    if isinstance(error, (OSError, ModuleNotFoundError)):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1].filename if error.__traceback__ else ""
    return isinstance(error, (ValueError, FloatingPointError)) and os.path.dirname(__file__) in last


def _sentence(error: Exception) -> str:
    """The error as one sentence; bare system errors and missing packages are given words."""
    if isinstance(error, ModuleNotFoundError) and str(error).startswith("No module named"):
        return f"This needs the Python package {error.name!r}, which is not installed here. Install it, or the extra of meshloom that holds it."
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}."
    return str(error)
