"""The choice of what layers keep, against every pattern there is; its order, its speed, its refusal."""

import time

import numpy as np
import pytest

from meshloom.plan.chain import Choice, arranged, fewest, peak, sized, solve


def patterns(chain, at=0):
    """Every way to cut a chain into pieces with a choice each."""
    if at == len(chain):
        yield ()
        return
    for choice in chain[at]:
        if at + choice.layers <= len(chain):
            for rest in patterns(chain, at + choice.layers):
                yield (choice, *rest)


def simulated(pieces, end) -> int:
    """The peak by walking through both passes, piece by piece."""
    held, most = [], 0
    for piece in pieces:
        held.append(piece.saved)
        most = max(most, sum(held))
    most = max(most, sum(held) + end)
    for piece in reversed(pieces):
        most = max(most, sum(held) + piece.beside)
        held.pop()
    return most


def random_chain(rng: np.random.Generator):
    """Layers of one or two sorts, or all different, two to four choices each, with groups in every other chain."""
    n, sorts, groups = int(rng.integers(1, 7)), int(rng.integers(1, 3)), bool(rng.integers(2))

    def choices() -> tuple[Choice, ...]:
        made = [
            Choice(f"row{i}", 1, int(rng.integers(0, 9)), float(rng.integers(0, 6)), int(rng.integers(0, 12)))
            for i in range(int(rng.integers(2, 5)))
        ]
        return (
            (*made, Choice("two", 2, int(rng.integers(0, 5)), float(rng.integers(0, 12)), int(rng.integers(0, 20))))
            if groups
            else tuple(made)
        )

    kinds = [choices() for _ in range(sorts if rng.integers(2) else n)]
    return [kinds[i % len(kinds)] if len(kinds) == n else kinds[i * len(kinds) // n] for i in range(n)]


@pytest.mark.parametrize("seed", range(120))
def test_equals_the_best_of_all_patterns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chain, end = random_chain(rng), int(rng.integers(0, 10))
    found = [(sum(c.seconds for c in pieces), simulated(pieces, end), pieces) for pieces in patterns(chain)]
    least = min(p for _, p, _ in found)
    assert fewest(chain, end).peak == least
    limit = least + int(rng.integers(0, 12))
    got = solve(chain, limit, end)
    assert got.seconds == min(s for s, p, _ in found if p <= limit)
    assert got.peak == simulated(got.pieces, end) <= limit and len(got.words) == len(chain)
    if least:
        with pytest.raises(ValueError, match=rf"fits {least + 6} bytes: .* takes {least + 7} bytes, 1 bytes more. Use smaller"):
            solve(chain, least - 1, end, 7)


def test_what_needs_most_beside_comes_first() -> None:
    keep, again = Choice("none", 1, 10, 0.0, 1), Choice("full", 1, 1, 5.0, 10)
    got = solve([(keep, again)] * 6, 40, 0)
    assert got.words == ("full",) * 3 + ("none",) * 3 and got.peak == 34
    assert peak(tuple(reversed(got.pieces))) == 43  # the other way round it would not fit
    assert arranged([(keep, again)] * 6, got) == got


def test_groups_of_layers_where_inputs_alone_are_too_much() -> None:
    alone = (Choice("none", 1, 100, 0.0, 5), Choice("full", 1, 10, 1.0, 100))
    with pytest.raises(ValueError, match="needs least, full and none, takes 735 bytes, 135 bytes more"):
        solve([alone] * 64, 600)
    got = solve([(*alone, Choice("full:4", 4, 10, 4.0, 400))] * 64, 600)
    assert "full:4" in got.words and got.peak <= 600
    assert got.words.count("none") == 4 and got.seconds == 60  # what is beside a group leaves room for them at the end


@pytest.mark.parametrize("layers", [128, 126])
def test_is_quick(layers: int) -> None:
    """128 layers of five choices, sizes of a real model that share no divisor; the fastest of three runs."""
    row = (
        Choice("none", 1, 1_347_420_161, 0.0, 210_000_007),
        Choice("selective", 1, 604_110_011, 0.0011, 700_000_003),
        Choice("offload", 1, 33_554_467, 0.0042, 705_000_003),
        Choice("full", 1, 67_108_879, 0.0123, 1_300_000_003),
        Choice("full:2", 2, 67_108_879, 0.0247, 2_600_000_003),
    )
    took = []
    for _ in range(3):
        start = time.process_time()
        got = solve([row] * layers, 41_234_567_891, 900_000_000)
        took.append(time.process_time() - start)
    assert min(took) < 0.1, took
    assert got.peak <= 41_234_567_891 and len(got.words) == layers and len({*got.words}) > 1


def test_says_bytes() -> None:
    assert [sized(n) for n in (12, 3400, 2_500_000, 7.25e9)] == ["12 bytes", "3.4 kB", "2.5 MB", "7.25 GB"]
