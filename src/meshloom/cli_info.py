"""`meshloom info`: what this machine is, and what ships."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("meshloom", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "tokenizers", "safetensors", "pydantic")
EXTRAS = ("pyarrow", "gguf", "torch", "transformers")


def rows() -> list[tuple[str, str]]:
    """What there is to show, as pairs of a name and text. Starts JAX's backend."""
    import jax

    from meshloom.core.process import cache_folder
    from meshloom.models import known
    from meshloom.models.table import MODELS
    from meshloom.recipes.load import names

    kinds: dict[str, int] = {}
    for device in jax.devices():
        kinds[device.device_kind] = kinds.get(device.device_kind, 0) + 1
    cache = cache_folder(os.environ)
    return [
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("packages", ", ".join(f"{p} {v}" for p in PACKAGES if (v := _version(p)))),
        ("optional packages", ", ".join(f"{p} {_version(p) or '(not installed)'}" for p in EXTRAS)),
        ("devices", ", ".join(f"{n} x {kind} ({jax.default_backend()})" for kind, n in kinds.items())),
        ("device memory", _device_memory(jax.local_devices()[0])),
        ("processes", f"this is {jax.process_index()} of {jax.process_count()}"),
        ("cores", f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} usable of {os.cpu_count()}"),
        ("memory", _gib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if hasattr(os, "sysconf") else "unknown"),
        ("compile cache", f"{cache} ({_gib(_size(cache))})"),
        ("recipes", ", ".join(names())),
        ("model families", ", ".join(sorted(MODELS))),
        ("known models", ", ".join(known.names())),
    ]


def show() -> None:
    """Prints the rows as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows():
        table.add_row(*row)
    Console().print(table, highlight=False)


def _version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_memory(device: object) -> str:
    """The memory of one device where it tells, in GiB."""
    stats = device.memory_stats() if hasattr(device, "memory_stats") else None  # type: ignore[attr-defined]
    return f"{_gib(stats['bytes_limit'])} each" if stats and "bytes_limit" in stats else "the machine's own"


def _gib(size: int) -> str:
    """Bytes as people read them: GiB."""
    return f"{size / 2**30:.2f} GiB"


def _size(folder: Path) -> int:
    """Bytes of the files in a folder; 0 where there is none."""
    return sum(file.stat().st_size for file in folder.glob("*") if file.is_file()) if folder.is_dir() else 0
