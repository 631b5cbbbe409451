"""Our reader against the library's files, the library against ours, and damaged files."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from meshloom.weights.safetensors import index, write


def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=(3, 5)).astype(np.float32),
        "half": rng.normal(size=(7,)).astype(ml_dtypes.bfloat16),
        "scalar": np.array(3, np.float32),
        "none": np.zeros((0, 4), np.float16),
    }


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors = values()
    write(tmp_path / "x", {k: (v.shape, v.dtype) for k, v in tensors.items()}, iter(tensors.values()))
    read = safetensors.numpy.load_file(tmp_path / "x")
    assert read.keys() == tensors.keys()
    assert all(read[k].tobytes() == v.tobytes() and read[k].shape == v.shape for k, v in tensors.items())


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    tensors = values()
    safetensors.numpy.save_file(tensors, tmp_path / "x")
    read = {k: t.view() for k, t in index(tmp_path / "x").items()}
    assert read.keys() == tensors.keys()
    assert all(read[k].tobytes() == v.tobytes() and read[k].dtype == v.dtype for k, v in tensors.items())


def test_values_are_cast_as_they_are_written(tmp_path: Path) -> None:
    x = np.float32([1.00390625, 3.0])
    write(tmp_path / "x", {"x": (x.shape, np.dtype(ml_dtypes.bfloat16))}, [x])
    assert (index(tmp_path / "x")["x"].view() == x.astype(ml_dtypes.bfloat16)).all()


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda b: b[:-1], "damaged or cut: tensor"),
        (lambda b: b[:20], "not a whole safetensors file"),
        (lambda b: b"", "not a whole safetensors file"),
        (lambda b: b[:8] + b"x" + b[9:], "header is not JSON"),
        (lambda b: b.replace(b'"F32"', b'"F99"'), "element type F99"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage, message: str) -> None:
    safetensors.numpy.save_file({"a": np.ones(3, np.float32)}, tmp_path / "x")
    (tmp_path / "x").write_bytes(damage((tmp_path / "x").read_bytes()))
    with pytest.raises(ValueError, match=message) as error:
        index(tmp_path / "x")
    assert str(tmp_path / "x") in str(error.value)
