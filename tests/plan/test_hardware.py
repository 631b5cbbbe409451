"""Hardware as data: what ships is complete, shapes mean what they say, and each bad input is a sentence."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from meshloom.core import yamls
from meshloom.core.config import load
from meshloom.plan import hardware
from meshloom.plan.hardware import Cluster, Link, OwnEntry, cluster, entries, kind_of, own, present, read

MINE = {
    "name": "mine", "platform": "gpu", "memory": 10**9, "bandwidth": 1e11, "flops": {"bfloat16": 1e13}, "efficiency": 0.5, "node": 4,
    "inside": {"rate": 1e10, "latency": 1e-6, "reach": 0.5}, "between": {"rate": 1e9, "latency": 1e-5}, "shape": "2x4",
}  # fmt: skip


CPU = {**MINE, "name": "cpu", "platform": "cpu", "shared": True, "node": 1, "flops": {"float32": 8e9}, "op": 1e-6}


def file(folder: Path, **change) -> Path:
    """MINE as a file, with changes; None leaves a key out."""
    path = folder / "mine.yaml"
    path.write_text(yamls.text({key: value for key, value in {**MINE, **change}.items() if value is not None}))
    return path


def test_what_the_issue_names_is_there_and_each_figure_has_a_source():
    assert {"a100", "a100-40", "h100", "h200", "b200", "mi300x", "l40s", "rtx4090", "v4", "v5e", "v5p", "v6e"} <= set(entries())
    for name, h in entries().items():
        assert h.sources and h.title and h.kinds, name
        assert h.flops["bfloat16"] > 1e14 and h.platform in ("gpu", "tpu"), name
        assert 1e10 < h.memory < 1e12 and h.memory < h.bandwidth, f"{name}: its memory can be read once a second at least"
        assert h.inside.rate > h.between.rate and h.inside.latency < h.between.latency, name
        assert (h.torus > 0) == (h.platform == "tpu") == (h.wrap > 0), name


@pytest.mark.parametrize(
    "on, shape, devices, slices",
    [
        ("h100:8x8", (8, 8), 64, 8),
        ("h100", (1, 1), 1, 1),
        ("h100:8", (1, 8), 8, 1),
        ("h100:2", (1, 2), 2, 1),
        ("h100:64", (8, 8), 64, 8),
        ("h100:3x4", (3, 4), 12, 3),
        ("a100:1x8", (1, 8), 8, 1),
        ("v5p:8x8x8", (8, 8, 8), 512, 1),
        ("v5p:2x8x8x8", (2, 8, 8, 8), 1024, 2),
        ("v5p", (1, 1, 1), 1, 1),
        ("v5e:16x16", (16, 16), 256, 1),
        ("v5e:4", (1, 4), 4, 1),
        ("cpu:8", (1, 8), 8, 1),
        ("cpu", (1, 1), 1, 1),
    ],
)
def test_a_shape_says_what_is_joined(on, shape, devices, slices, monkeypatch):
    monkeypatch.setattr(hardware, "of_cpu", lambda kept: load(OwnEntry, CPU))
    found = read(on)
    assert (found.shape, found.devices, found.slices) == (shape, devices, slices)
    assert read(found.label) == found


def test_simulated_devices_share_a_machine(tmp_path):
    one, eight = (own(file(tmp_path, **{**CPU, "shape": str(n)})).hardware for n in (1, 8))
    assert (one.flops["float32"], one.bandwidth, one.memory, one.op, one.inside) == (8e9, 1e11, 10**9, 1e-6, Link(5e9, 1e-6))
    assert (eight.flops["float32"], eight.bandwidth, eight.memory, eight.op) == (1e9, 1e11 / 8, 10**9 // 8, 8e-6)
    assert eight.inside == Link(5e9 / 8, 1e-6)


def test_a_cpu_is_measured_once_and_kept(tmp_path, monkeypatch):
    """By `meshloom calibrate` in another process, whose result the next call finds."""
    calls = []

    def stand_in(command, **_):
        calls.append(command)
        Path(command[-1].split("'--out', '")[1].split("'")[0]).parent.mkdir(parents=True, exist_ok=True)
        Path(command[-1].split("'--out', '")[1].split("'")[0]).write_text(yamls.text(CPU))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(hardware.subprocess, "run", stand_in)
    for _ in range(2):
        assert read("cpu:4", tmp_path).hardware.flops == {"float32": 2e9}
    assert present(tmp_path).label == "cpu:1x8", "the devices that the tests simulate"
    (command,) = calls
    assert "calibrate" in command[-1] and "XLA_FLAGS" in command, "not with the flags of this process"


def test_a_cpu_that_cannot_be_measured_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1, stderr="Traceback\nno space\n"))
    with pytest.raises(ValueError, match="CPU could not be measured: no space. Run: meshloom calibrate --devices 8"):
        read("cpu:8", tmp_path)


def test_a_file_is_a_cluster(tmp_path):
    path = file(tmp_path)
    found = read(str(path))
    assert (found.shape, found.label, found.hardware.flops) == ((2, 4), "mine:2x4", {"bfloat16": 1e13})
    assert found.hardware.inside == Link(5e9, 1e-6), "what collectives reach"
    assert read(f"{path}:3x2").shape == (3, 2)
    assert read(str(file(tmp_path, shape=None))).devices == 1


@pytest.mark.parametrize(
    "on, said",
    [
        ("h10:8x8", r"There is no hardware 'h10'. Did you mean 'h100'\? There is: .*b200, cpu, h100.*Write something like h100:8x8"),
        ("quantum:4", "There is no hardware 'quantum'. There is: a100"),
        ("h100:", "'h100:' lacks a shape behind the colon"),
        ("h100:8by8", "'8by8' in 'h100:8by8' is no shape of a cluster"),
        ("h100:-1", "'-1' in 'h100:-1' is no shape"),
        ("h100:0x8", "'0x8' in 'h100:0x8' has a side of 0"),
        ("h100:2x2x2", "'h100:2x2x2' gives 3 numbers. h100 has nodes of 8 devices: write nodes x devices of a node, like h100:2x8"),
        ("h100:2x16", "asks for nodes of 16 devices, and h100 has nodes of 8 devices. Write something like h100:2x8"),
        ("h100:12", "asks for 12 devices, and h100 has nodes of 8 devices: 12 do not fill them. Use a multiple of 8, or 8 or fewer"),
        ("v5e:2x2x2x2", "gives 4 numbers, and v5e is a torus of 2 dimensions. Write its 2 sides, like v5e:4x4, with the number of slices"),
    ],
)
def test_refusals(on, said):
    with pytest.raises(ValueError, match=said):
        read(on)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"bandwidth": None}, r"mine.yaml: bandwidth is missing and has no default"),
        ({"inside": None, "memory": None}, r"2 settings are wrong:\n.*(memory|inside) is missing"),
        ({"bandwith": 3}, r"bandwith is not a setting. Did you mean bandwidth\?"),
        ({"flops": {}}, "'mine' needs `flops`, like {bfloat16: 989e12}"),
        ({"flops": {"bfloat16": 0}}, "'mine' needs `flops`.*each more than 0"),
        ({"efficiency": 75}, "efficiency must be at most 1"),
        ({"platform": "abacus"}, "platform"),
        ({"shape": "2x5"}, "asks for nodes of 5 devices, and mine has nodes of 4"),
        ({"shape": "2y4"}, "'2y4' in '.*mine.yaml' is no shape"),
        ({"inside": {"rate": 1e9}}, "inside.latency is missing"),
        ({"torus": 4}, "torus must be at most 3"),
    ],
)
def test_a_wrong_file_is_told(tmp_path, change, said):
    with pytest.raises(ValueError, match=said):
        own(file(tmp_path, **change))


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(str(tmp_path / "none.yaml"))
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ValueError, match="must hold keys and values"):
        read(str(tmp_path / "empty.yaml"))


@pytest.mark.parametrize(
    "kind, name",
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5p", "v5p"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Some other chip", None),
    ],
)
def test_the_longest_name_of_a_device_counts(kind, name):
    found = kind_of(SimpleNamespace(device_kind=kind))
    assert (found.name if found else None) == name


def device(kind: str, platform: str, *coords: int, part: int = 0) -> SimpleNamespace:
    return SimpleNamespace(device_kind=kind, platform=platform, coords=coords, slice_index=part)


def stand_in(monkeypatch, devices, local=None, processes=1):
    monkeypatch.setattr(
        hardware, "jax",
        SimpleNamespace(devices=lambda: devices, local_devices=lambda: local or devices, process_count=lambda: processes),
    )  # fmt: skip


def test_the_devices_at_hand(monkeypatch):
    h100 = [device("NVIDIA H100 80GB HBM3", "gpu")] * 16
    stand_in(monkeypatch, h100, h100[:8], 2)
    assert present().label == "h100:2x8"
    cube = [device("TPU v5", "tpu", x, y, z) for x in range(2) for y in range(2) for z in range(4)]
    stand_in(monkeypatch, cube)
    assert present().label == "v5p:2x2x4"
    flat = [device("TPU v5 lite", "tpu", x, y, 0, part=part) for part in range(2) for x in range(4) for y in range(2)]
    stand_in(monkeypatch, flat)
    assert present().label == "v5e:2x4x2"
    stand_in(monkeypatch, [device("Abacus 3", "gpu")])
    with pytest.raises(ValueError, match="call themselves 'Abacus 3', and no hardware of the table does.*meshloom calibrate"):
        present()


def test_one_device_of_everything_has_a_cluster():
    for name, h in entries().items():
        assert isinstance(cluster(h, (), name), Cluster) and cluster(h, (), name).devices == 1
