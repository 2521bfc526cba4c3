"""Tokenizing in several processes, results in order.

The workers are plain scripts fed through pipes: they import neither torch nor the caller's main module, inherit no
threads or locks as a fork would, and end by themselves when the process that feeds them dies.
"""

import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from shardwise.corpus.errors import CorpusError
from shardwise.corpus.tokenizer import FILE, Tokenizer, cannot_encode

WORKER = Path(__file__).with_name("encode_worker.py")
Encoded = tuple[np.ndarray, np.ndarray]  # ids uint32 joined, number of ids per text int64


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Encoder:
    """Encodes groups of UTF-8 texts on `processes` worker processes, or in this one when that is 1.

    The workers read the tokenizer from `folder`, where it was saved. Use as a context manager.
    """

    def __init__(self, tokenizer: Tokenizer, folder: Path, processes: int) -> None:
        self._tokenizer = tokenizer
        self._workers = [_start(folder / FILE) for _ in range(processes)] if processes > 1 else []
        self._free: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(max(1, processes))

    def submit(self, texts: Sequence[bytes]) -> "Future[Encoded]":
        """Starts to encode a group."""
        return self._threads.submit(self._through_worker if self._workers else self._tokenizer.encode_batch, texts)

    def _through_worker(self, texts: Sequence[bytes]) -> Encoded:
        worker = self._free.get()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            pickle.dump(list(texts), worker.stdin, pickle.HIGHEST_PROTOCOL)
            worker.stdin.flush()
            answer = pickle.load(worker.stdout)
        except (OSError, EOFError) as error:
            raise CorpusError(
                f"a tokenizing process ended by itself (exit status {worker.poll()}), perhaps for lack of memory; "
                "lower data.processes"
            ) from error
        finally:
            self._free.put(worker)
        if isinstance(answer, str):
            raise cannot_encode(answer)
        ids, lengths = answer
        return np.frombuffer(ids, np.uint32), np.frombuffer(lengths, np.int64)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # On an error the workers are not waited for: killing them wakes the threads that wait for an answer.
        for worker in self._workers if error is not None else ():
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            assert worker.stdin is not None
            assert worker.stdout is not None
            try:
                worker.stdin.close()
            except BrokenPipeError:
                worker.kill()
            worker.wait()
            worker.stdout.close()


def _start(file: Path) -> "subprocess.Popen[bytes]":
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", str(WORKER), str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # an interrupt from the keyboard is the parent's to handle
    )
