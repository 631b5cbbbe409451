"""Allocator settings: they hold where they can, change nothing elsewhere, and do not take memory by themselves."""

import platform
import subprocess
import sys

import pytest

from meshloom.core import malloc

PROGRAM = """
import resource, sys
from meshloom.core import malloc
done = malloc.tune()
resident = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20  # (ru_maxrss counts the parent before exec)
blocks = [bytearray(64 << 20) for _ in range(2)]; del blocks
middle = resource.getrusage(resource.RUSAGE_SELF)
for _ in range(4):
    blocks = [bytearray(64 << 20) for _ in range(2)]; del blocks
last = resource.getrusage(resource.RUSAGE_SELF)
print(done, resident, last.ru_minflt - middle.ru_minflt)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc only")
def test_freed_memory_is_kept_and_nothing_is_taken_ahead() -> None:
    done, resident, faults = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.split()
    assert done == "True"
    assert int(resident) < 200  # MiB: the reserve is address space only
    assert int(faults) < 1000  # 4 x 2 blocks of 64 MiB are 131,072 pages when each is faulted in again


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert malloc.tune() is False
