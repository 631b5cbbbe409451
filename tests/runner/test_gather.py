"""Which axis is gathered, and over which mesh axes."""

from meshloom.core.spec import spec
from meshloom.parallel.zero import strategy
from meshloom.runner.gather import gathered

S = spec({"embed": 8, "ffn": 4}, "ffn embed")


def test_gathered():
    for stage, tables in ((1, ("step", "grad", "live")), (2, ("step", "live")), (3, ("live",))):
        lay = strategy(stage).layout(2)
        assert [t for t in ("step", "grad", "live") if gathered(lay, "rest", t, S) == (1, ("zero",))] == list(tables)
        assert gathered(lay, "rest", "rest", S) == (0, ())
