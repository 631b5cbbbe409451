"""Peaks: measured on a CPU and shared by its simulated devices."""

import jax

from meshloom.plan.peak import PEAKS, measured, peak


def test_measured_is_a_rate():
    """More than a billion and less than a hundred thousand billion operations a second."""
    assert 1e9 < measured(size=256, tries=2) < 1e14


def test_simulated_devices_share_the_machine():
    whole = peak("fp32")
    assert whole is not None and whole < 1e14 / len(jax.local_devices())
    assert peak("fp32") == whole, "measured once"


def test_longest_kind_wins():
    """A v5 lite is no v5, whatever the order of the table."""
    device = "TPU v5 lite"
    assert PEAKS[max((k for k in PEAKS if device.startswith(k)), key=len)]["bf16"] == 197e12
