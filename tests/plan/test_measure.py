"""Measurements of this machine are rates that a machine can have."""

from meshloom.plan.measure import of_cpu


def test_this_machine_is_measured():
    h = of_cpu(8, None)
    assert 1e9 < h.flops["float32"] < 1e14 and 1e8 < h.bandwidth < 1e13 and h.shared
