"""Hardware as data: what the devices of a cluster can do.  `hardware.yaml` holds one entry a device, with sources; a user's file holds one entry and the
shape of the cluster.  Nothing here needs a device but `present`."""

import functools
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from pydantic import Field

from meshloom.core import yamls
from meshloom.core.config import Section, load, unknown
from meshloom.core.process import cache_folder

SHAPE = re.compile(r"\d+(x\d+)*")
FILE = re.compile(r"(?P<path>.+\.ya?ml)(:(?P<shape>.*))?")
"""A file and, after a colon, another shape than the one that it gives."""
EXAMPLES = "h100:8x8 (8 nodes of 8), v5p:8x8x8 (a torus), cpu:8, my-cluster.yaml"


class Link(NamedTuple):
    """A way between devices. rate: bytes a second that one device can send, one direction. latency: seconds of one hop or step."""

    rate: float
    latency: float


class Hardware(NamedTuple):
    """A device and what joins it to others.

    memory: bytes usable. bandwidth: of the memory, bytes a second. flops: type -> dense peak of products, operations a second.
    efficiency: the part of that peak that large products reach; stream: the part of the bandwidth that large reads and writes reach.
    node: devices joined by `inside`, beyond which there is `between`. torus: its dimensions, 0 for a switch; a dimension is a ring where its length is a
    multiple of `wrap`. start: seconds before a collective moves anything. op: seconds that an operation takes beside its work.
    shared: simulated devices of one machine: rates and `op` are one device's share where all work at once. kinds: how JAX's name of the device begins.
    host: bytes a second between the device's memory and its host's, one direction; 0: not known, so nothing is kept there.
    between_products: bytes a second at which norms, activations and the like go, where that was measured and is less than the memory's; they then wait for
    products and these for them, as cores do both; 0: not measured.
    slower: kind of collective -> how many times as long as a gather's its bytes take, where that was measured.
    """

    name: str
    platform: str
    memory: int
    bandwidth: float
    flops: Mapping[str, float]
    efficiency: float
    node: int
    inside: Link
    between: Link
    torus: int
    sources: tuple[str, ...]
    title: str = ""
    kinds: tuple[str, ...] = ()
    stream: float = 1.0
    wrap: int = 0
    start: float = 0.0
    op: float = 0.0
    shared: bool = False
    slower: Mapping[str, float] = {}
    host: float = 0.0
    between_products: float = 0.0


class Cluster(NamedTuple):
    """hardware: of each device. shape: nodes x devices of a node where a switch joins them, else slices x the sides of a torus, or these alone."""

    hardware: Hardware
    shape: tuple[int, ...]

    @property
    def devices(self) -> int:
        """Devices of the cluster."""
        return math.prod(self.shape)

    @property
    def label(self) -> str:
        """How a person asks for it: h100:8x8."""
        return f"{self.hardware.name}:{'x'.join(str(n) for n in self.shape)}"

    @property
    def slices(self) -> int:
        """Parts that only `between` joins: nodes, or slices of TPUs."""
        h = self.hardware
        return math.prod(self.shape[: -h.torus]) if h.torus else math.prod(self.shape[:-1])


class Way(Section):
    """A kind of link in a file."""

    rate: float = Field(gt=0)
    """Bytes a second that one device can send, one direction."""
    latency: float = Field(ge=0)
    """Seconds of one hop or step."""
    reach: float = Field(1.0, gt=0, le=1)
    """Part of the rate that collectives reach."""


class Entry(Section):
    """A device in a file. `Hardware` says what its numbers are."""

    title: str = ""
    kinds: tuple[str, ...] = ()
    platform: Literal["gpu", "tpu", "cpu"]
    memory: int = Field(gt=0)
    bandwidth: float = Field(gt=0)
    stream: float = Field(1.0, gt=0, le=1)
    flops: dict[str, float]
    efficiency: float = Field(gt=0, le=1)
    node: int = Field(1, ge=1)
    start: float = Field(0.0, ge=0)
    op: float = Field(0.0, ge=0)
    inside: Way
    between: Way
    torus: int = Field(0, ge=0, le=3)
    wrap: int = Field(0, ge=0)
    shared: bool = False
    slower: dict[str, float] = Field(default_factory=dict)
    host: float = Field(0.0, ge=0)
    between_products: float = Field(0.0, ge=0)
    sources: tuple[str, ...] = ()


class OwnEntry(Entry):
    """A user's file: a device, its name and the cluster's shape."""

    name: str
    shape: str = ""


@functools.cache
def entries() -> dict[str, Hardware]:
    """The hardware that ships, by name.  Raises ConfigError where the file is wrong."""
    path = Path(__file__).with_name("hardware.yaml")
    return {name: _hardware(name, load(Entry, tree, f"{path.name}: {name}")) for name, tree in yamls.read(path).items()}


def read(on: str, kept: Path | None = None) -> Cluster:
    """The cluster that a person names: a name and a shape, or a file.  kept: folder of this machine's measurements, for `cpu`.

    A name alone is one device.  Raises ValueError for a name, a shape or a file that is none, OSError where there is no such file."""
    if found := FILE.fullmatch(on):
        return own(Path(found["path"]).expanduser(), found["shape"])
    name, colon, shape = on.partition(":")
    if colon and not shape:
        raise ValueError(f"'{on}' lacks a shape behind the colon. Write something like {EXAMPLES}; a name alone is one device.")
    sizes = _sizes(on, shape) if shape else ()
    if name == "cpu":
        return cluster(_hardware(name, of_cpu(kept)), sizes, on)
    if name not in entries():
        raise ValueError(unknown("hardware", name, [*entries(), "cpu"]) + f" Write something like {EXAMPLES}.")
    return cluster(entries()[name], sizes, on)


def own(path: Path, shape: str | None = None) -> Cluster:
    """The cluster of a user's file, as `meshloom calibrate` writes one.  shape: in place of the file's.  Raises as `read`."""
    return of_entry(load(OwnEntry, yamls.read(path), str(path)), shape, str(path))


def of_entry(entry: OwnEntry, shape: str | None = None, said: str = "") -> Cluster:
    """The cluster of a user's entry.  shape: in place of the entry's.  said: what to call it in errors."""
    sizes = entry.shape if shape is None else shape
    return cluster(_hardware(entry.name, entry), _sizes(said or entry.name, sizes) if sizes else (), said or entry.name)


def of_cpu(kept: Path | None = None) -> OwnEntry:
    """This machine's entry, measured at first use by `meshloom calibrate` in a process of its own, with 8 simulated devices and the compiler's usual
    options.  kept: where it lies; not given: in the user's cache.  Raises ValueError where measuring failed."""
    file = (kept or cache_folder({}).parent.parent / "hardware") / f"{cache_folder({}).name}.yaml"
    if not file.is_file():
        command = ["calibrate", "--quick", "--devices", "8", "--name", "cpu", "--out", str(file)]
        start = f"import sys; from meshloom.cli import main; sys.exit(main({command!r}))"
        clean = ["env", "-u", "XLA_FLAGS", "-u", "JAX_PLATFORMS", sys.executable, "-c", start]
        done = subprocess.run(clean, capture_output=True, text=True, timeout=600)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1].rstrip(".")
            raise ValueError(f"This machine's CPU could not be measured: {said}. Run: meshloom calibrate --devices 8")
    return load(OwnEntry, yamls.read(file), str(file))


def _hardware(name: str, e: Entry) -> Hardware:
    """What an entry says, as its devices reach it.  Raises ValueError where it has no rate of any product."""
    if not e.flops or min(e.flops.values()) <= 0:
        raise ValueError(
            f"'{name}' needs `flops`, like {{bfloat16: 989e12}}: the peak of products by type, operations a second, each more than 0."
        )
    inside, between = (Link(way.rate * way.reach, way.latency) for way in (e.inside, e.between))
    return Hardware(
        name, e.platform, e.memory, e.bandwidth, dict(e.flops), e.efficiency, e.node, inside, between, e.torus, e.sources,
        e.title or name, e.kinds, e.stream, e.wrap, e.start, e.op, e.shared, dict(e.slower), e.host, e.between_products,
    )  # fmt: skip


def _sizes(on: str, shape: str) -> tuple[int, ...]:
    """The numbers of a shape.  Raises ValueError for other text, and for a side of no device."""
    if not SHAPE.fullmatch(shape):
        raise ValueError(f"'{shape}' in '{on}' is no shape of a cluster. Write numbers with an x between them, like {EXAMPLES}.")
    sizes = tuple(int(n) for n in shape.split("x"))
    if 0 in sizes:
        raise ValueError(f"'{shape}' in '{on}' has a side of 0, so the cluster has no device. Give each side 1 or more.")
    return sizes


def cluster(h: Hardware, sizes: tuple[int, ...], on: str) -> Cluster:
    """Hardware in a shape that it can have, with the parts that it lacks added; of simulated devices each has its share of the machine.  on: what was asked
    for.  Raises ValueError for a shape that this hardware cannot have."""
    if h.torus:
        return Cluster(h, _torus(h, sizes, on))
    n = math.prod(sizes)
    if h.shared:
        return Cluster(_share(h, n), (1, n))
    nodes = (f"{h.name} has nodes of {h.node} devices", f"{h.name}:2x{h.node}")
    if len(sizes) > 2:
        raise ValueError(f"'{on}' gives {len(sizes)} numbers. {nodes[0]}: write nodes x devices of a node, like {nodes[1]}.")
    if len(sizes) == 2 and sizes[1] > h.node:
        raise ValueError(f"'{on}' asks for nodes of {sizes[1]} devices, and {nodes[0]}. Write something like {nodes[1]}.")
    if len(sizes) < 2 and n > h.node and n % h.node:
        raise ValueError(
            f"'{on}' asks for {n} devices, and {nodes[0]}: {n} do not fill them. Use a multiple of {h.node}, or {h.node} or fewer."
        )
    return Cluster(h, sizes if len(sizes) == 2 else (1, n) if n <= h.node else (n // h.node, h.node))


def _torus(h: Hardware, sizes: tuple[int, ...], on: str) -> tuple[int, ...]:
    """The sides of a torus, with those of 1 that were left out, behind the number of slices if one was given."""
    if len(sizes) > h.torus + 1:
        sides = "x".join("4" * h.torus)
        raise ValueError(
            f"'{on}' gives {len(sizes)} numbers, and {h.name} is a torus of {h.torus} dimensions. "
            f"Write its {h.torus} sides, like {h.name}:{sides}, with the number of slices before them where there are several."
        )
    return (1,) * (h.torus - len(sizes)) + sizes


def _share(h: Hardware, n: int) -> Hardware:
    """What one of n simulated devices has of a machine."""
    part = lambda link: Link(link.rate / n, link.latency)
    flops = {dtype: rate / n for dtype, rate in h.flops.items()}
    return h._replace(
        memory=h.memory // n, bandwidth=h.bandwidth / n, flops=flops, node=n, op=h.op * n, between_products=h.between_products / n, inside=part(h.inside), between=part(h.between)
    )  # fmt: skip


def kind_of(device: Any) -> Hardware | None:
    """The hardware that a device of JAX is, or None where it is not in the table."""
    known = [(kind, h) for h in entries().values() for kind in h.kinds if device.device_kind.startswith(kind)]
    return max(known, key=lambda row: len(row[0]))[1] if known else None


def at_hand() -> Cluster | None:
    """The devices at hand where the table knows them, without measuring anything; None for others."""
    first = jax.devices()[0]
    return None if first.platform == "cpu" or kind_of(first) is None else present()


def present(kept: Path | None = None) -> Cluster:
    """The devices at hand.  A CPU is measured at first use.  kept: where the measurement lies.  Raises ValueError for a device that is not in the table."""
    devices = jax.devices()
    if devices[0].platform == "cpu":
        return read(f"cpu:{len(devices)}", kept)
    h = kind_of(devices[0])
    if h is None:
        raise ValueError(
            f"These devices call themselves '{devices[0].device_kind}', and no hardware of the table does ({', '.join(entries())}). "
            "Measure them with: meshloom calibrate --out mine.yaml, and give that file."
        )
    if not h.torus:
        return cluster(h, (jax.process_count(), len(jax.local_devices())), h.name)
    sides = [max(d.coords[i] for d in devices) + 1 for i in range(3)]  # type: ignore[attr-defined]
    slices = len({getattr(d, "slice_index", 0) for d in devices})
    sides = [n for n in sides if n > 1] or [1]
    return cluster(h, (slices,) * (slices > 1) + tuple([1] * (h.torus - len(sides)) * (slices > 1) + sides), h.name)
