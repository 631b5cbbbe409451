"""Tables as a program reads them."""

from meshloom.parallel.schedules import make
from meshloom.parallel.slots import compile, segments


def test_segments_of_1f1b() -> None:
    assert segments(compile(make("1f1b", 4, 8))) == [
        (0, 3, (True, False, False)),
        (3, 11, (True, True, False)),
        (11, 14, (False, True, False)),
    ]
