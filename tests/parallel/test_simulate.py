"""Times of schedules."""

import pytest

from meshloom.parallel.schedules import make
from meshloom.parallel.simulate import simulate
from meshloom.parallel.slots import compile


def test_1f1b() -> None:
    assert simulate(compile(make("1f1b", 4, 16))).bubble["uniform"] == pytest.approx(3 / 19)
