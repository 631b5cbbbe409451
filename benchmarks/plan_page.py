"""Runs the `meshloom` commands of docs/plan.md again and writes what they print under each.

python benchmarks/plan_page.py [--only WORD]        from the repository's root; commands with --compile need libtpu
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "plan.md"
BLOCK = re.compile(r"```console\n\$ (?P<command>meshloom [^\n]*)\n.*?```", re.DOTALL)


def output(command: str) -> str:
    """What a command prints."""
    words = ["-m", "meshloom.cli", *shlex.split(command)[1:]]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "160"}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{command}: {done.stderr[-2000:]}")
    return done.stdout


def renewed(text: str, only: str = "") -> str:
    """The page with the outputs of its commands."""

    def one(found: re.Match) -> str:
        command = found["command"]
        return f"```console\n$ {command}\n{output(command).rstrip()}\n```" if only in command else found[0]

    return BLOCK.sub(one, text)


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="commands that hold this")
    given = parser.parse_args()
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), given.only), encoding="utf-8")


if __name__ == "__main__":
    main()
