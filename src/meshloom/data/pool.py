"""Processes that tokenize. Each is a plain `python -c`, spoken to over its standard input and output in lines of JSON: nothing is
forked (safe beside JAX's threads), the caller's script is not imported again, and when the caller dies, even by kill -9, its input ends and so does it."""

import contextlib
import json
import queue
import subprocess
import sys
from typing import Self

import numpy as np

from meshloom.data.config import Tokenizer as TokenizerSection
from meshloom.data.store import Writer, token_dtype
from meshloom.data.tokenizer import Tokenizer


class Pool:
    """`count` processes with a copy of a tokenizer each. `run` may be called from as many threads."""

    def __init__(self, count: int, tokenizer: Tokenizer):
        text = {name: raw.decode() for name, raw in tokenizer.files.items()}
        self.hello = json.dumps({"files": text, "config": tokenizer.config.model_dump(), "name": tokenizer.name})
        self.count = count
        self.all: list[subprocess.Popen[str]] = []
        self.idle: queue.Queue[subprocess.Popen[str]] = queue.Queue()

    def __enter__(self) -> Self:
        start = f"import sys; sys.path[:] = {sys.path!r}; from meshloom.data.pool import main; main()"
        for _ in range(self.count):
            process = subprocess.Popen(
                [sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
            self.all.append(process)
            self.idle.put(process)
            self._send(process, self.hello)
        return self

    def run(self, prefix: str, texts: list[str]) -> None:
        """Has a process write the store of a part; waits for it.  Raises OSError as the writer does, RuntimeError if the process died."""
        process = self.idle.get()
        assert process.stdout is not None
        try:
            self._send(process, json.dumps({"prefix": prefix, "texts": texts}))
            line = process.stdout.readline()
        finally:
            self.idle.put(process)
        if not line:
            raise RuntimeError(
                f"A tokenizing process died (exit code {process.wait()}), perhaps for lack of memory. Lower data.workers; the finished parts are kept."
            )
        answer = json.loads(line)
        if "error" in answer:
            raise OSError(answer["errno"], answer["error"]) if answer["errno"] else RuntimeError(answer["error"])

    def _send(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a dead process shows as an empty answer
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def __exit__(self, *_: object) -> None:
        for process in self.all:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.all:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def make_part(tokenizer: Tokenizer, prefix: str, texts: list[str], cores: str = "all") -> None:
    """Writes the store of one part.  cores: `all` or `one`, which a process uses that has others beside it."""
    with Writer(prefix, token_dtype(tokenizer.size)) as out:
        for ids in tokenizer.encode_documents(texts, cores):
            out.add(np.array(ids, np.int64))
        out.finish({})


def main() -> None:
    """What a process of the pool does until its input ends."""
    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    hello = json.loads(sys.stdin.readline())
    files = {name: text.encode() for name, text in hello["files"].items()}
    tokenizer = Tokenizer(files, TokenizerSection(**hello["config"]), hello["name"])
    for line in sys.stdin:
        task = json.loads(line)
        try:
            make_part(tokenizer, task["prefix"], task["texts"], cores="one")
            answer = {}
        except OSError as e:
            answer = {"error": e.strerror or str(e), "errno": e.errno}
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}", "errno": None}
        print(json.dumps(answer), flush=True)
