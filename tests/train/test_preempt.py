"""A signal ends a run in order: once sets a flag, twice ends at once, grace has an end, and several processes agree on the step."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from meshloom.train.preempt import EXIT_CODE, Preemption, exit_code

LOOP = """
import sys, time
from meshloom.train.preempt import EXIT_CODE, Preemption
with Preemption(float(sys.argv[1])) as preemption:
    print("ready", flush=True)
    for step in range(1000):
        time.sleep(0.02)
        if preemption.stop(step) and sys.argv[2] == "obey":
            print("saved", flush=True)
            sys.exit(EXIT_CODE)
"""


def start(grace, manner):
    process = subprocess.Popen([sys.executable, "-c", LOOP, str(grace), manner], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def end(process):
    try:
        return process.communicate(timeout=20)
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_saves(number):
    process = start(30, "obey")
    process.send_signal(number)
    out, err = end(process)
    assert out == "saved\n" and process.returncode == EXIT_CODE == 75
    assert f"{signal.Signals(number).name}: saving after this step, within 30 s. Send it again to end at once." in err


def test_second_signal_ends_at_once():
    process = start(30, "ignore")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert "SIGINT again: ending at once" in end(process)[1] and process.returncode == 130


def test_grace_ends():
    process = start(0.2, "ignore")
    process.send_signal(signal.SIGTERM)
    assert "The 0.2 s of grace (checkpoint.grace) are over" in end(process)[1] and process.returncode == 143


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Preemption(1, say=lambda text: None) as preemption:
        assert not preemption.stop(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.stop(1)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_two_processes_agree(number):
    """A signal to one of two: both stop at the same step."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    code = textwrap.dedent("""
        import sys, time, jax
        jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
        from meshloom.train.preempt import Preemption
        with Preemption(30) as preemption:
            for step in range(3000):
                if step == 3:
                    print("ready", flush=True)
                time.sleep(0.02)
                if preemption.stop(step):
                    print("stopped", step, flush=True)
                    break
    """)
    pair = [
        subprocess.Popen([sys.executable, "-c", code, str(port), str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in (0, 1)
    ]
    try:
        for p in pair:
            assert p.stdout.readline() == "ready\n"
        pair[1].send_signal(number)
        said = [p.communicate(timeout=60) for p in pair]
    finally:
        for p in pair:
            p.kill()
    assert said[0][0] == said[1][0] and said[0][0].startswith("stopped "), said


def test_exit_codes() -> None:
    """75 promises a checkpoint, so a run that was stopped before its first step does not end with it."""
    assert [exit_code(None, 5), exit_code(signal.SIGTERM, 5), exit_code(signal.SIGTERM, 0), exit_code(signal.SIGINT, 0)] == [
        0,
        75,
        143,
        130,
    ]
