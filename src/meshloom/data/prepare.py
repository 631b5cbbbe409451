"""From sources to token stores: in several processes, with progress, in parts that survive a kill, cached by content, tokenizer and options.

Documents are read in one process and cut, by their text alone, in parts of PART characters; each part becomes a small store of its own, whole or absent.
A run that was killed reads the text again and tokenizes only the parts that are missing. At the end the parts are joined, in order, and deleted."""

import contextlib
import fcntl
import hashlib
import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from meshloom.data.config import Data, Source
from meshloom.data.config import Tokenizer as TokenizerSection
from meshloom.data.pool import Pool, make_part
from meshloom.data.report import Report
from meshloom.data.sources import documents, files_of
from meshloom.data.store import Store, Writer, file_of, prefix_of, saying_where, token_dtype
from meshloom.data.tokenizer import Tokenizer, load, train

PART = 2_000_000  # characters of text
SMALL = 16_000_000  # bytes of source below which starting processes costs more than it saves: one then tokenizes on all cores
VERSION = 1  # of the meaning of the options; a new one makes every store anew


class Prepared(NamedTuple):
    """A token store and how it came to be."""

    store: Store
    report: list[str]
    cached: bool


def prepare(data: Data, tokenizer: TokenizerSection, out: str | Path, progress: bool = True) -> Prepared:
    """What `meshloom data prepare` does: all of data.train in one token store with the prefix `out`. Made anew only where something changed."""
    return store_of(data.train, load(tokenizer.path, tokenizer), data, out=out, progress=progress)


def train_tokenizer(data: Data, vocab: int, out: str | Path) -> Tokenizer:
    """What `meshloom data tokenizer` does: byte-level BPE trained on data.train, saved in the folder `out`."""
    report = Report()
    trained = train((d.text for d in documents(data.train, data.on_bad, data.max_bytes, report)), vocab, out, progress=True)
    print("\n".join(report.lines()))
    print(f"{trained.size:,} tokens in {out}")
    return trained


def show(prepared: Prepared) -> None:
    """Prints what was read and written."""
    made = "Found, and nothing changed since" if prepared.cached else "Written"
    tokens = len(prepared.store.tokens)
    print(
        "\n".join([*prepared.report, f"{made}: {prepared.store.prefix}.bin and .idx, {len(prepared.store):,} documents, {tokens:,} tokens"])
    )


def store_of(
    sources: Sequence[Source], tokenizer: Tokenizer, data: Data, out: str | Path | None = None, progress: bool = False
) -> Prepared:
    """The token store of these sources: made now, or found in the cache if documents, tokenizer and options are the same.

    data: for on_bad, max_bytes, cache and workers.  out: its prefix; without it, a name in the cache folder.
    Raises ValueError for bad or no documents, OSError where it cannot be written; then no half store is left."""
    if any(is_store(s) for s in sources):
        if len(sources) > 1 or out:
            raise ValueError(
                f"'{next(s.path for s in sources if is_store(s))}' is a token store already; it needs no preparing. Name it in data.train as it is."
            )
        return Prepared(open_store(sources[0].path, tokenizer), [f"{sources[0].path} is a token store already"], True)
    cache = Path(data.cache).expanduser()
    made_with = recipe(sources, tokenizer, data, cache)
    key = hashlib.sha256(json.dumps(made_with, sort_keys=True).encode()).hexdigest()[:16]
    prefix = Path(out).expanduser() if out else cache / f"{Path(sources[0].path).name.split('.')[0] or 'data'}-{key}"
    with locked(prefix):
        found = _found(prefix)
        if found and found.meta.get("made_with") == made_with:
            return Prepared(found, found.meta["report"], True)
        if out and not (found and "made_with" in found.meta) and (file_of(prefix, "bin").exists() or file_of(prefix, "idx").exists()):
            raise ValueError(
                f"{prefix}.bin or .idx is there already and was not made by `meshloom data prepare`. Choose another prefix, or move them away."
            )
        clean(prefix)
        return tokenize(sources, tokenizer, data, Work(prefix, Path(f"{prefix}.{key}.parts"), made_with), progress)


def _found(prefix: Path) -> Store | None:
    """The store of this prefix, or None where there is none, or a damaged one: then it is made anew."""
    try:
        store = Store(prefix)
        return store if store.meta is not None else None
    except ValueError:
        return None


def recipe(sources: Sequence[Source], tokenizer: Tokenizer, data: Data, cache: Path) -> dict[str, Any]:
    """All that the tokens of some sources depend on, as plain JSON: the cache's key, kept beside the store."""
    return {
        "version": VERSION,
        "documents": fingerprints([f for s in sources for f in files_of(s)], cache),
        **tokenizer_facts(tokenizer),
        "sources": [[len(files_of(s)), s.field, s.format, s.split] for s in sources],
        "on_bad": data.on_bad,
        "max_bytes": data.max_bytes,
    }


def tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    """What ids depend on, by name, so that a difference can be named."""
    return {
        "tokenizer": hashlib.sha256(tokenizer.files["tokenizer.json"]).hexdigest()[:16],
        "tokenizer.bos": tokenizer.bos if tokenizer.config.bos else None,
        "tokenizer.end": tokenizer.end,
        "tokenizer.control_text": tokenizer.config.control_text,
    }


def fingerprints(files: list[Path], cache: Path) -> list[str]:
    """A hash of each file's bytes, remembered in the cache folder by path, size and time so that large files are not read again."""
    memory_file = cache / "fingerprints.json"
    memory: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        memory = json.loads(memory_file.read_text())
    names = {f: f"{f.resolve()} {(s := f.stat()).st_size} {s.st_mtime_ns}" for f in files}
    new = [f for f in files if names[f] not in memory]
    with ThreadPoolExecutor(4) as pool:
        memory |= {names[f]: digest for f, digest in zip(new, pool.map(digest_of, new))}
    settled = {
        names[f]: memory[names[f]] for f in new if time.time() - f.stat().st_mtime > 5
    }  # a file just written may change within its time stamp
    if settled:
        with contextlib.suppress(OSError):  # a cache that cannot be written is reported where the store is written
            cache.mkdir(parents=True, exist_ok=True)
            temporary = cache / f"fingerprints.json.tmp-{time.time_ns()}"
            temporary.write_text(json.dumps({**memory, **settled}))
            temporary.rename(memory_file)
    return [memory[names[f]] for f in files]


def digest_of(file: Path) -> str:
    """A hash of a file's bytes."""
    with file.open("rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def is_store(source: Source) -> bool:
    """Whether a source's path is the prefix of a token store."""
    return source.format == "store" or (source.format == "auto" and file_of(prefix_of(source.path), "idx").exists())


def open_store(prefix: str, tokenizer: Tokenizer) -> Store:
    """A token store made by an earlier `prepare`, or by Megatron.  Raises ValueError, naming what differs, if it was made with another tokenizer."""
    store = Store(prefix_of(prefix))
    made_with = store.meta.get("made_with", {})
    for name, now in tokenizer_facts(tokenizer).items():
        if name in made_with and made_with[name] != now:
            raise ValueError(
                f"Token store {prefix} was made with another {name} ({made_with[name]!r}; now {now!r}), so its ids would mean other text. "
                f"Give the tokenizer that made it, or prepare the data again."
            )
    return store


@contextlib.contextmanager
def locked(prefix: Path) -> Iterator[None]:
    """Holds a lock on a store's name, so that processes that want the same one make it once."""
    with saying_where(prefix):
        prefix.parent.mkdir(parents=True, exist_ok=True)
        file = file_of(prefix, "lock").open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def clean(prefix: Path) -> None:
    """Removes what killed runs left under temporary names. Only under the lock."""
    for left in prefix.parent.glob(f"{prefix.name}.*.tmp-*"):
        left.unlink(missing_ok=True)


class Work(NamedTuple):
    """Where a store and its parts go, and what it is made with."""

    prefix: Path
    parts: Path
    made_with: dict[str, Any]

    def part(self, number: int) -> Path:
        """Prefix of one part's store."""
        return self.parts / f"{number:06d}"


def tokenize(sources: Sequence[Source], tokenizer: Tokenizer, data: Data, work: Work, progress: bool) -> Prepared:
    """Makes the parts that are missing, and joins them."""
    report = Report()
    found = documents(sources, data.on_bad, data.max_bytes, report)
    size = sum(f.stat().st_size for s in sources for f in files_of(s))
    workers = data.workers if size > SMALL else 1
    with saying_where(work.prefix):
        work.parts.mkdir(parents=True, exist_ok=True)
    with bar(sources[0].path, size, progress) as show:
        number = make_parts((d.text for d in found), tokenizer, work, workers, lambda: show(report.position(), report.documents))
    facts = {
        "made_with": work.made_with,
        "report": report.lines(),
        "found": report.facts(),
        "vocab": tokenizer.size,
        "tokenizer": tokenizer.config.model_dump(),
    }
    with Writer(work.prefix, token_dtype(tokenizer.size)) as out:
        for k in range(number):
            out.append(Store(work.part(k)))
        store = out.finish(facts)
    shutil.rmtree(work.parts, ignore_errors=True)
    return Prepared(store, report.lines(), False)


def parts_of(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    """Documents in lists of at least `size` characters; where they are cut depends on the texts alone."""
    part: list[str] = []
    length = 0
    for text in texts:
        part.append(text)
        length += len(text)
        if length >= size:
            yield part
            part, length = [], 0
    if part:
        yield part


def make_parts(texts: Iterator[str], tokenizer: Tokenizer, work: Work, workers: int, show: Callable[[], None]) -> int:
    """Tokenizes what has no store yet, `workers` processes at a time.  Returns the number of parts."""
    number = 0
    waiting: deque[Future[None]] = deque()
    with contextlib.ExitStack() as stack:
        run = partial(make_part, tokenizer) if workers == 1 else stack.enter_context(Pool(workers, tokenizer)).run
        threads = stack.enter_context(ThreadPoolExecutor(workers))
        stack.callback(lambda: threads.shutdown(cancel_futures=True))
        for part in parts_of(texts, PART):
            if not file_of(work.part(number), "idx").exists():
                waiting.append(threads.submit(run, str(work.part(number)), part))
            number += 1
            while len(waiting) > 2 * workers:
                waiting.popleft().result()
            show()
        for future in waiting:
            future.result()
    return number


@contextlib.contextmanager
def bar(name: str, size: int, progress: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar over the bytes of the files; nothing without `progress`."""
    if not progress:
        yield lambda done, count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("Tokenizing {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[count]:,} documents"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(name, total=size, count=0)
        yield lambda done, count: shown.update(task, completed=min(done, size), count=count)
