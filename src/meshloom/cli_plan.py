"""The planner's commands. Thin, like those of cli.py, which takes them in."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from meshloom import cli_base
from meshloom.cli_base import OK, Machine

Flag = Annotated[bool, Parameter(negative="")]


def calibrate(*, out: Path = Path("hardware.yaml"), name: str = "mine", quick: Flag = False, machine: Machine = Machine()) -> int:
    """Measure the present devices (products, memory, collectives) and write them as hardware that the planner takes: --on hardware.yaml.

    Parameters
    ----------
    out
        The file to write.
    name
        What to call this hardware.
    quick
        Fewer sizes, on a CPU: some ten seconds.
    """
    cli_base.start(machine)
    from meshloom.recipes import calibrate as worker

    worker.calibrate(name, out, quick)
    return OK
