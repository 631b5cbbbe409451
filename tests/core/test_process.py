"""Which process this is, simulated devices, the compile cache; two real processes meet over loopback."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshloom.core import process

PLACES = {
    "nothing": ((None, None, None), {}, None),
    "flags": (("a:1", 1, 2), {"MESHLOOM_RANK": "7"}, ("a:1", 1, 2, "flags")),
    "ours": ((None,) * 3, {"MESHLOOM_COORDINATOR": "h:9", "MESHLOOM_RANK": "0", "MESHLOOM_WORLD": "2"}, ("h:9", 0, 2, "environment")),
    "torchrun": ((None,) * 3, {"MASTER_ADDR": "h", "MASTER_PORT": "9", "RANK": "3", "WORLD_SIZE": "4"}, ("h:9", 3, 4, "environment")),
    "torchrun of one": ((None,) * 3, {"MASTER_ADDR": "h", "MASTER_PORT": "9", "RANK": "0", "WORLD_SIZE": "1"}, None),
    "slurm": (
        (None,) * 3,
        {"SLURM_STEP_NODELIST": "gpu[007-009]", "SLURM_PROCID": "2", "SLURM_JOB_ID": "4005", "SLURM_NTASKS": "3"},
        ("gpu007:61445", 2, 3, "SLURM"),
    ),
    "slurm batch script": ((None,) * 3, {"SLURM_PROCID": "0", "SLURM_JOB_ID": "4005", "SLURM_NTASKS": "3"}, None),
}


@pytest.mark.parametrize("case", PLACES)
def test_place(case: str) -> None:
    flags, environ, expected = PLACES[case]
    assert process.place(*flags, environ) == expected


REFUSED = {
    "part of the flags": (
        ("a:1", None, 2),
        {},
        r"--coordinator, --rank, --world together \(flags\); there is --coordinator=a:1, --world=2. Give --rank too",
    ),
    "part of ours": ((None,) * 3, {"MESHLOOM_RANK": "1"}, "Give MESHLOOM_COORDINATOR and MESHLOOM_WORLD too"),
    "part of torchrun": ((None,) * 3, {"RANK": "1", "WORLD_SIZE": "2"}, "Give MASTER_ADDR and MASTER_PORT too"),
    "rank past the end": (("a:1", 2, 2), {}, "--rank 2 does not exist among 2 processes; they count from 0 to 1"),
    "no port": (("a", 0, 2), {}, "--coordinator must be host:port of rank 0, like node1:9911; it is 'a'"),
    "not a number": (
        (None,) * 3,
        {"MESHLOOM_COORDINATOR": "h:9", "MESHLOOM_RANK": "x", "MESHLOOM_WORLD": "2"},
        "MESHLOOM_RANK must be a whole number",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_partial_places_are_refused(case: str) -> None:
    flags, environ, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        process.place(*flags, environ)


@pytest.mark.parametrize("nodes, first", [("a", "a"), ("a1,a2", "a1"), ("n[001-004,007],z", "n001"), ("n[3,5]-ib", "n3-ib")])
def test_first_host(nodes: str, first: str) -> None:
    assert process.first_host(nodes) == first


def test_simulate_replaces_an_earlier_count_and_keeps_other_flags() -> None:
    environ = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_foo=1"}
    process.simulate(4, environ)
    assert environ == {"XLA_FLAGS": "--xla_foo=1 --xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    with pytest.raises(ValueError, match="at least 1"):
        process.simulate(0, environ)


def test_cache_folder_follows_the_users_setting(tmp_path: Path) -> None:
    assert process.cache_folder({"XDG_CACHE_HOME": str(tmp_path)}).parent == tmp_path / "meshloom" / "xla"
    assert process.cache_folder({}).is_relative_to(Path.home() / ".cache")


PROGRAM = """
import os, sys
from meshloom.core import process
process.simulate(2, os.environ)
process.start(process.place(sys.argv[1], int(sys.argv[2]), 2, {}))
process.keep_compiled(process.cache_folder({"XDG_CACHE_HOME": sys.argv[3]}))
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
print(jax.process_count(), jax.device_count(), multihost_utils.process_allgather(jnp.array([jax.process_index()])).tolist())
"""


def test_two_processes_meet(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, address, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        for rank in range(2)
    ]
    try:
        out = [run.communicate(timeout=60)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert all("2 4 [[0], [1]]" in o.splitlines() for o in out), out
