"""Starting a process of a run: which of how many it is, how many devices it simulates, and where compiled programs are kept."""

import hashlib
import platform
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

FLAGS = ("--coordinator", "--rank", "--world")
OURS = ("MESHLOOM_COORDINATOR", "MESHLOOM_RANK", "MESHLOOM_WORLD")
TORCH = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
SLURM = ("SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_JOB_ID")


class Place(NamedTuple):
    """One process among several."""

    coordinator: str
    """host:port of rank 0."""
    rank: int
    world: int
    """How many processes there are."""
    source: str
    """Where this was read, for people."""


def place(coordinator: str | None, rank: int | None, world: int | None, environ: Mapping[str, str]) -> Place | None:
    """This process's place by flags, else the environment (ours, then torchrun's names, then SLURM's), or None for a single process.
    Raises ValueError where some but not all of one source is given, or where the numbers cannot be."""
    flags = dict(zip(FLAGS, (coordinator, rank, world)))
    if any(v is not None for v in flags.values()):
        given = {k: str(v) for k, v in flags.items() if v is not None}
        return _checked(given, FLAGS, "flags")
    if any(k in environ for k in OURS):
        return _checked(environ, OURS, "environment")
    if "WORLD_SIZE" in environ and "RANK" in environ and environ["WORLD_SIZE"] != "1":
        _complete(environ, TORCH, "environment")
        address = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        return _checked(
            {"MASTER_ADDR": address, **{k: environ[k] for k in TORCH[2:]}}, ("MASTER_ADDR", "RANK", "WORLD_SIZE"), "environment"
        )
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    if all(k in environ for k in SLURM) and tasks != "1":
        port = 61440 + int(environ["SLURM_JOB_ID"]) % 4000
        address = f"{first_host(environ['SLURM_STEP_NODELIST'])}:{port}"
        return _checked(
            {"c": address, "SLURM_PROCID": environ["SLURM_PROCID"], "SLURM_NTASKS": tasks}, ("c", "SLURM_PROCID", "SLURM_NTASKS"), "SLURM"
        )
    return None


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list: "gpu[007-009,12],login" -> "gpu007"."""
    bracket = re.match(r"([^,\[]*)\[([^\],-]+)[^\]]*\]([^,\[]*)", nodes)
    return "".join(bracket.groups()) if bracket else nodes.split(",")[0]


def _complete(given: Mapping[str, str], names: tuple[str, ...], source: str) -> None:
    """Raises ValueError that says which of the names are missing."""
    missing = [n for n in names if not given.get(n)]
    if missing:
        have = ", ".join(f"{n}={given[n]}" for n in names if given.get(n)) or "none"
        raise ValueError(
            f"Several processes need {', '.join(names)} together ({source}); there is {have}. Give {' and '.join(missing)} too."
        )


def _checked(given: Mapping[str, str], names: tuple[str, str, str], source: str) -> Place:
    """The place that three named texts spell.  Raises ValueError."""
    _complete(given, names, source)
    address, rank, world = (given[n] for n in names)
    for name, text in ((names[1], rank), (names[2], world)):
        if not re.fullmatch(r"\d+", text):
            raise ValueError(f"{name} must be a whole number of at least 0; it is {text!r}.")
    if not re.fullmatch(r"(\[[^\]]+\]|[^:]+):\d+", address):
        raise ValueError(f"{names[0]} must be host:port of rank 0, like node1:9911; it is {address!r}.")
    if int(rank) >= int(world):
        raise ValueError(f"{names[1]} {rank} does not exist among {world} processes; they count from 0 to {int(world) - 1}.")
    return Place(address, int(rank), int(world), source)


def simulate(count: int, environ: MutableMapping[str, str]) -> None:
    """Makes JAX show `count` CPU devices in this process. Must run before JAX is imported.  Raises ValueError if count < 1."""
    if count < 1:
        raise ValueError(f"--devices must be at least 1; you gave {count}.")
    environ["JAX_PLATFORMS"] = "cpu"
    flags = [f for f in environ.get("XLA_FLAGS", "").split() if not f.startswith("--xla_force_host_platform_device_count")]
    environ["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={count}"])


def start(where: Place | None) -> None:
    """Joins the other processes of the run; nothing for a single one.  Raises ValueError where rank 0 cannot be reached."""
    if where is None:
        return
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(where.coordinator, num_processes=where.world, process_id=where.rank)
    except RuntimeError as error:
        raise ValueError(
            f"Process {where.rank} of {where.world} could not meet the others at {where.coordinator} (read from the {where.source}): {error}. "
            "Check that rank 0 runs there, that the port is free, and that every rank is started once."
        ) from error


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where compiled programs are kept between runs: one folder for each kind of CPU, since compiled code is no use on another."""
    base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "meshloom" / "xla" / _cpu_name()


def keep_compiled(folder: Path) -> None:
    """Turns JAX's compile cache on, in `folder`."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _cpu_name() -> str:
    """A short name of this CPU's instruction set: the architecture and a hash of the features that Linux lists."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "".join(lines[:1]))
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
