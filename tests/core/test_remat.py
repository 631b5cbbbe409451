"""The language of what layers keep."""

import pytest

from meshloom.core.remat import Piece, automatic, check, group_of, limit_of, one, pieces, resized, row_of, spelled, words_of


def test_words_and_patterns() -> None:
    assert words_of("full", 3) == ("full",) * 3
    assert words_of("full:2 4, none 1", 5) == ("full:2",) * 4 + ("none",)
    assert pieces("offload 2, full:4 8") == (Piece("offload", 2), Piece("full", 8, 4))
    assert spelled(("full", "full", "none")) == "full 2, none 1" and spelled(("none",) * 7) == "none"
    assert [one(said) for said in ("none", "full 3", "full 1, full 2", "full 1, none 2")] == ["none", "full", "full", None]
    assert (group_of("full:4"), group_of("none"), row_of("full:4"), row_of("none")) == (4, 1, "full", "none")


@pytest.mark.parametrize(
    "remat, layers, want",
    [
        ("none", 3, "none"),
        ("full 20, none 12", 8, "full 5, none 3"),
        ("full:4", 8, "full:4"),
        ("full:4", 6, "full"),
        ("full:4 16, none 16", 4, "full 2, none 2"),
    ],
)
def test_a_pattern_for_other_layers(remat, layers, want) -> None:
    assert resized(remat, layers) == want


@pytest.mark.parametrize(
    "remat, why",
    [
        ("ful", r"There is no remat 'ful'. There are full, none, selective, offload, auto"),
        ("full 20, none", r"each part needs its number of layers"),
        ("full 20; none 12", r"cannot be read. Write one word for all layers"),
        ("none:2", r"layers share an input under 'full' alone \(full:4\)"),
        ("full 0, none 2", r"counts are 1 or more"),
    ],
)
def test_refuses_what_it_cannot_read(remat, why) -> None:
    with pytest.raises(ValueError, match=why):
        pieces(remat)


def test_refuses_a_pattern_of_other_layers() -> None:
    with pytest.raises(ValueError, match=r"remat 'full 20, none 10' is of 30 layers, and there are 32 layers. Change its numbers"):
        words_of("full 20, none 10", 32)
    with pytest.raises(ValueError, match=r"there are 4 slots of a part"):
        words_of("full 3, none 2", 4, "slots of a part")
    with pytest.raises(ValueError, match=r"6 layers cannot be cut into groups of 4. Use a group that divides 6"):
        words_of("full:4 6, none 2", 8)


def test_automatic_patterns() -> None:
    assert automatic("auto") and automatic("auto 40GB") and not automatic("full 2, none 2")
    assert [limit_of(said) for said in ("auto", "auto 40GB", "auto 1.5 GiB", "auto 4096")] == [None, 40 * 10**9, 3 * 2**29, 4096]
    assert check("auto 2GiB") == "auto 2GiB"
    with pytest.raises(ValueError, match=r"behind auto stands a device's memory, such as \"auto 40GB\""):
        check("auto 40 gigs")
