"""The token store: `<prefix>.bin` (token ids, nothing else) and `<prefix>.idx` (where each document lies), as Megatron-LM writes them.

.idx, little-endian: b"MMIDIDX\\0\\0", u64 version 1, u8 type code, u64 sequences, u64 n, sequences x int32 lengths, sequences x int64 byte offsets,
n x int64 document indices (the first sequence of each document, then the number of sequences). Here every document is one sequence.
`<prefix>.json` beside them is ours: tokenizer, options and counts. Stores without it are read too."""

import contextlib
import errno
import json
import os
import struct
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from meshloom.core.files import sync_folder

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
CODES = {np.dtype(t): code for code, t in DTYPES.items()}
SMALL_VOCAB = 65500  # below it Megatron writes uint16


def token_dtype(vocab: int) -> np.dtype:
    """The type that Megatron gives tokens of a vocabulary of this size."""
    return np.dtype("<u2") if vocab < SMALL_VOCAB else np.dtype("<i4")


def file_of(prefix: str | Path, ending: str) -> Path:
    """`<prefix>.bin` and so on; the prefix may have dots of its own."""
    return Path(f"{prefix}.{ending}")


def prefix_of(path: str | Path) -> Path:
    """The prefix of a token store that a user names by its prefix or by one of its two files."""
    path = Path(path).expanduser()
    return path.with_suffix("") if path.suffix in (".idx", ".bin") else path


class Store:
    """A token store, memory-mapped. Nothing is read but the index's header until it is asked for.

    Raises ValueError for a file that is not a store, or whose two files do not agree."""

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        index = file_of(prefix, "idx")
        for path in (index, file_of(prefix, "bin")):
            if not path.exists():
                raise ValueError(
                    f"Token store '{prefix}' has no file {path}. Give the path without its ending, or run `meshloom data prepare` to make it."
                )
        with index.open("rb") as file:
            head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise ValueError(f"{index} is not a token index: it does not begin with {MAGIC!r}. Prepare the data again.")
        _, version, code, sequences, n = HEADER.unpack(head)
        if version != 1 or code not in DTYPES:
            raise ValueError(f"{index} has version {version} and type code {code}; known are version 1 and codes {sorted(DTYPES)}.")
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        raw = np.memmap(index, np.uint8, "r")
        if len(raw) < HEADER.size + 12 * sequences + 8 * n:
            raise ValueError(f"{index} is cut off: {len(raw)} bytes for {sequences} sequences. Prepare the data again.")
        at = HEADER.size
        self.lengths = np.ndarray(sequences, "<i4", raw, at)
        self.offsets = np.ndarray(sequences, "<i8", raw, at + 4 * sequences)
        self.documents = np.ndarray(n, "<i8", raw, at + 12 * sequences)
        self._check_bytes()

    def _check_bytes(self) -> None:
        data = file_of(self.prefix, "bin")
        need = int(self.offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if len(self.offsets) else 0
        if data.stat().st_size < need:
            raise ValueError(f"{data} is cut off: its index speaks of {need} bytes, it has {data.stat().st_size}. Prepare the data again.")

    @cached_property
    def tokens(self) -> np.ndarray:
        """All token ids, (tokens,), mapped from disk; a plain array, since NumPy's memmap class costs more at every index."""
        path = file_of(self.prefix, "bin")
        return np.asarray(np.memmap(path, self.dtype, "r")) if path.stat().st_size else np.empty(0, self.dtype)

    @cached_property
    def spans(self) -> tuple[np.ndarray, np.ndarray]:
        """First token and length in tokens of every document, in reading order: two int64 arrays of (documents,)."""
        ends = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        first, last = self.documents[:-1], self.documents[1:]
        length = ends[last] - ends[first]
        keep = length > 0
        starts = (
            self.offsets[np.minimum(first, max(len(self.offsets) - 1, 0))] // self.dtype.itemsize
            if len(self.offsets)
            else np.zeros(0, np.int64)
        )
        return starts[keep].astype(np.int64), length[keep]

    def document(self, number: int) -> np.ndarray:
        """Token ids of one document, its end token included."""
        start, length = self.spans
        return self.tokens[start[number] : start[number] + length[number]]

    def __len__(self) -> int:
        return len(self.spans[0])

    @cached_property
    def meta(self) -> dict[str, Any]:
        """What was written beside the store, empty for a store from elsewhere."""
        path = file_of(self.prefix, "json")
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged ({error}). Prepare the data again, or remove that file if the store is another program's."
            ) from None


class Writer:
    """Writes a store under temporary names; `finish` makes it appear whole. Left without `finish`, it leaves nothing behind.

    with Writer(prefix, dtype) as out: out.add(ids); out.finish(meta)"""

    def __init__(self, prefix: str | Path, dtype: np.dtype):
        self.prefix, self.dtype, self.lengths, self.done = str(prefix), np.dtype(dtype), [], False
        self.temporary = {e: Path(f"{prefix}.{e}.tmp-{os.getpid()}") for e in ("bin", "idx", "json")}

    def __enter__(self) -> Self:
        with saying_where(self.prefix):
            Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
            self.file = self.temporary["bin"].open("wb")
        return self

    def add(self, ids: Iterable[int] | np.ndarray) -> None:
        """Appends one document. Raises ValueError for an id that the type cannot hold."""
        ids = np.asarray(ids)
        limit = np.iinfo(self.dtype)
        if ids.size and (ids.min() < limit.min or ids.max() > limit.max):
            raise ValueError(f"Token id {ids.max()} does not fit {self.dtype}; give the vocabulary's size to `token_dtype`.")
        with saying_where(self.prefix):
            self.file.write(ids.astype(self.dtype.newbyteorder("<")).tobytes())
        self.lengths.append(ids.size)

    def append(self, other: Store) -> None:
        """Appends all documents of a store of the same type that this writer wrote."""
        assert np.dtype(other.dtype) == self.dtype and len(other.documents) == len(other.lengths) + 1
        with saying_where(self.prefix), file_of(other.prefix, "bin").open("rb") as part:
            while block := part.read(1 << 22):
                self.file.write(block)
        self.lengths.extend(other.lengths.tolist())

    def finish(self, meta: dict[str, Any]) -> Store:
        """Writes index and facts, syncs to disk and renames, the index last: a store that can be opened is whole."""
        with saying_where(self.prefix):
            sync(self.file)
            with self.temporary["idx"].open("wb") as out:
                out.write(index_bytes(np.array(self.lengths, np.int64), self.dtype))
                sync(out)
            with self.temporary["json"].open("wb") as out:
                out.write(json.dumps(meta, indent=1, ensure_ascii=False).encode())
                sync(out)
            file_of(self.prefix, "idx").unlink(missing_ok=True)  # of a store that this one replaces
            for ending in ("bin", "json", "idx"):
                self.temporary[ending].rename(file_of(self.prefix, ending))
            sync_folder(Path(self.prefix).parent)
        self.done = True
        return Store(self.prefix)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what is still buffered may not fit either; the first error is the one to tell
            self.file.close()
        for path in self.temporary.values():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def index_bytes(lengths: np.ndarray, dtype: np.dtype) -> bytes:
    """The .idx of documents of these lengths, one sequence each."""
    n = len(lengths)
    offsets = np.zeros(n, np.int64)
    if n:
        np.cumsum(lengths[:-1] * dtype.itemsize, out=offsets[1:])
    head = HEADER.pack(MAGIC, 1, CODES[np.dtype(dtype)], n, n + 1)
    return head + lengths.astype("<i4").tobytes() + offsets.astype("<i8").tobytes() + np.arange(n + 1, dtype="<i8").tobytes()


def sync(file: BinaryIO) -> None:
    """Flushes a file to the disk, and closes it."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


TROUBLE = {
    errno.ENOSPC: "there is no space left on the disk. Free some, or set data.cache to a folder with more",
    errno.EDQUOT: "the disk quota is used up. Free some, or set data.cache to another disk",
    errno.EACCES: "you may not write there. Set data.cache to a folder of yours",
    errno.EPERM: "you may not write there. Set data.cache to a folder of yours",
    errno.EROFS: "that disk is read-only. Set data.cache to another folder",
    errno.ENOTDIR: "a part of that path is a file, not a folder. Set data.cache to another folder",
    errno.EEXIST: "a part of that path is a file, not a folder. Set data.cache to another folder",
}


@contextlib.contextmanager
def saying_where(path: str | Path):
    """Turns a failure to write into a sentence with the path and what to do; it stays an OSError with its errno."""
    try:
        yield
    except OSError as e:
        why = TROUBLE.get(e.errno or 0, e.strerror or str(e))
        raise OSError(e.errno, f"Cannot write the token store {path}: {why}. Nothing half-written is left") from e
