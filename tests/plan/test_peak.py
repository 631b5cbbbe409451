"""Peaks: measured on a CPU and shared by its simulated devices, of others from hardware.yaml."""

from types import SimpleNamespace

import jax
import pytest

from meshloom.plan import peak as module
from meshloom.plan.peak import measured, peak


def test_measured_is_a_rate():
    """More than a billion and less than a hundred thousand billion operations a second."""
    assert 1e9 < measured(size=256, tries=2) < 1e14


def test_simulated_devices_share_the_machine():
    whole = peak("fp32")
    assert whole is not None and whole < 1e14 / len(jax.local_devices())
    assert peak("fp32") == whole, "measured once"


@pytest.mark.parametrize(
    "kind, precision, rate",
    [("TPU v5 lite", "bf16", 197e12), ("TPU v5", "bf16", 459e12), ("TPU v5", "fp32", None), ("NVIDIA H100 80GB HBM3", "fp32", 67e12), ("Abacus", "bf16", None)],
)  # fmt: skip
def test_others_are_in_the_table(kind, precision, rate, monkeypatch):
    """A v5 lite is no v5, whatever the order of the table."""
    monkeypatch.setattr(module, "jax", SimpleNamespace(devices=lambda: [SimpleNamespace(device_kind=kind, platform="other")]))
    assert peak.__wrapped__(precision) == rate
