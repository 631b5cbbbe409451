"""What layers keep for the backward pass, in words: "none", "full 20, none 12", "full:4 16, none 16"."""

import itertools
import re
from typing import NamedTuple

from meshloom.core.config import nearest

ROWS = {
    "none": "everything but gathered weights; nothing is computed again",
    "selective": "results of matrix products; the cheap parts are computed again",
    "full": "its input; the whole layer is computed again",
    "offload": "results of matrix products, in the host's memory; the cheap parts are computed again",
}
"""What a layer may keep, a row of runner.REMAT each -> what that is. `full:4`: four layers one after the other keep the first one's input alone."""
GROUPED = "full"
"""The row that several layers may share."""
AUTO = "auto"
"""The word of a pattern that is solved for when the run starts, under the device's memory or, `auto 40GB`, under so much."""
UNITS = {"": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIZE = re.compile(r"auto\s+([\d.]+)\s*([A-Za-z]*)")
PIECE = re.compile(r"([a-z]+)(?::(\d+))?(?:\s+(\d+))?")


class Piece(NamedTuple):
    """Layers one after the other that keep the same. row: of ROWS. layers: None for all. group: layers that share one input."""

    row: str
    layers: int | None = None
    group: int = 1

    @property
    def word(self) -> str:
        """What each of these layers keeps: a row, or `full:4`."""
        return self.row if self.group == 1 else f"{self.row}:{self.group}"


def pieces(remat: str) -> tuple[Piece, ...]:
    """The pieces of a pattern.  Raises ValueError with a sentence for one that cannot be read."""
    found = []
    for said in (part.strip() for part in remat.split(",")):
        match = PIECE.fullmatch(said)
        if not match:
            raise ValueError(f"'{said}' in remat '{remat}' cannot be read. Write one word for all layers, or such as \"full 20, none 12\".")
        row, group, layers = match[1], int(match[2] or 1), int(match[3]) if match[3] else None
        if row not in ROWS:
            near = nearest(row, (*ROWS, AUTO))
            known = sorted((*ROWS, AUTO), key=lambda name: name != near)
            raise ValueError(f"There is no remat '{row}'. There are {', '.join(known)}.")
        if group < 1 or layers == 0 or (group > 1 and row != GROUPED):
            raise ValueError(
                f"'{said}' in remat '{remat}' is not possible: counts are 1 or more, and layers share an input under '{GROUPED}' alone ({GROUPED}:4)."
            )
        found.append(Piece(row, layers, group))
    if len(found) > 1 and any(piece.layers is None for piece in found):
        raise ValueError(f"In remat '{remat}' each part needs its number of layers, such as \"full 20, none 12\".")
    return tuple(found)


def automatic(remat: str) -> bool:
    """Whether a pattern is left to the planner."""
    return remat.split(maxsplit=1)[:1] == [AUTO]


def limit_of(remat: str) -> int | None:
    """Bytes of a device that an automatic pattern may fill; None: those of the device.  Raises ValueError for a size that cannot be read."""
    if remat.strip() == AUTO:
        return None
    match = SIZE.fullmatch(remat.strip())
    if not match or match[2] not in UNITS or match[1].count(".") > 1:
        raise ValueError(f'remat \'{remat}\' cannot be read: behind auto stands a device\'s memory, such as "auto 40GB" or "auto 512MiB".')
    return int(float(match[1]) * UNITS[match[2]])


def check(remat: str) -> str:
    """The same pattern.  Raises ValueError with a sentence for one that cannot be read."""
    limit_of(remat) if automatic(remat) else pieces(remat)
    return remat


def words_of(remat: str, layers: int, said: str = "layers") -> tuple[str, ...]:
    """The word of every layer.  said: what is counted (a pipeline's pattern is of a part's slots).  Raises ValueError for a pattern of other layers."""
    parts = [piece._replace(layers=layers) if piece.layers is None else piece for piece in pieces(remat)]
    count = sum(piece.layers or 0 for piece in parts)
    if count != layers:
        raise ValueError(
            f"remat '{remat}' is of {count} layers, and there are {layers} {said}. Change its numbers so that they add up to {layers}."
        )
    for piece in parts:
        if (piece.layers or 0) % piece.group:
            raise ValueError(
                f"remat '{remat}': {piece.layers} layers cannot be cut into groups of {piece.group}. Use a group that divides {piece.layers}."
            )
    return tuple(piece.word for piece in parts for _ in range(piece.layers or 0))


def spelled(words: tuple[str, ...]) -> str:
    """The pattern of a word for every layer, as short as it can be."""
    runs = [(word, len(list(same))) for word, same in itertools.groupby(words)]
    return runs[0][0] if len(runs) == 1 else ", ".join(f"{word} {count}" for word, count in runs)


def resized(remat: str, layers: int) -> str:
    """A pattern for another number of layers, with the same parts in about the same shares; those of a group keep its row."""
    parts = pieces(remat)
    if len(parts) == 1:
        return parts[0].word if layers % parts[0].group == 0 else parts[0].row
    words = [piece.row for piece in parts for _ in range(piece.layers or 0)]
    return spelled(tuple(words[i * len(words) // layers] for i in range(layers)))


def one(remat: str) -> str | None:
    """The word of all layers, or None for a pattern of several."""
    parts = pieces(remat)
    return parts[0].word if len({piece.word for piece in parts}) == 1 else None


def group_of(word: str) -> int:
    """Layers that share one input: 1 but for `full:4`."""
    return int(word.partition(":")[2] or 1)


def row_of(word: str) -> str:
    """The row of a word: `full` of `full:4`."""
    return word.partition(":")[0]
