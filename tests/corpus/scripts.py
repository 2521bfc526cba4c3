"""What the tests of preparation run in processes of their own: peak memory, kills, several at once."""

import multiprocessing
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from shardwise.corpus import Corpus, DataConfig, PrepareProgress, prepare


def peak_growth(folder: str, small: str, large: str) -> None:
    """Prints by how many KB large generated files take peak memory beyond that of small ones; sizes in MB."""

    def peak(megabytes: int) -> int:
        for kind in ("txt", "jsonl"):
            path = Path(folder) / f"{megabytes}.{kind}"
            line = b"the quick brown fox jumps over the lazy dog %07d\n"
            with path.open("wb") as file:
                for number in range(megabytes * (1 << 20) // (len(line) * 64)):
                    text = line % number * 64
                    file.write(b'{"text": "%s"}\n' % text.replace(b"\n", b" ") if kind == "jsonl" else text)
            config = DataConfig(source=str(path), tokenizer="bytes", cache=str(Path(folder) / "cache"), held_out=0.001)
            prepare(config, shard_tokens=1 << 22)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)

    before = peak(int(small))
    print(peak(int(large)) - before)


def killed_everywhere(data: str, cache: str) -> None:
    """Kills a preparation at every report and every write to disk; prints moments, kills that left nothing, "same"."""
    config = DataConfig(source=data, tokenizer="bpe", vocabulary=300, cache=cache, processes=1)

    def run(moment: int) -> tuple[str, int]:
        calls = 0

        def count() -> None:
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        def sync(descriptor: int, sync: Callable[[int], None] = os.fsync) -> None:
            count()
            sync(descriptor)

        os.fsync = sync
        corpus = prepare(config, progress=lambda report: count(), shard_tokens=100_000)
        return corpus.fingerprint, calls

    fingerprint, moments = _in_child(run, 0)
    folder = next(path for path in Path(cache).iterdir() if path.is_dir())
    left_nothing = 0
    for moment in range(1, moments + 1):
        shutil.rmtree(folder, ignore_errors=True)
        killed = os.fork()
        if not killed:
            run(moment)
            os._exit(1)
        assert os.WIFSIGNALED(os.waitpid(killed, 0)[1])
        # The next one starts with a dead holder of the lock, and with what this one left half done.
        if folder.exists():
            assert Corpus.open(folder).fingerprint == fingerprint
        else:
            left_nothing += 1
    assert _in_child(run, 0)[0] == fingerprint
    assert {path.suffix for path in Path(cache).iterdir()} == {".lock", ""}
    print(moments, left_nothing, "same")


def at_once(data: str, cache: str, num_processes: str) -> None:
    """Starts several preparations at the same moment; prints how many prepared and how many results there were."""
    config = DataConfig(source=data, tokenizer="bpe", vocabulary=300, cache=cache, processes=1)
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(int(num_processes)), context.SimpleQueue()

    def work() -> None:
        reports: list[PrepareProgress] = []
        start.wait()
        corpus = prepare(config, progress=reports.append)
        results.put((any(report.phase == "tokenizing" for report in reports), corpus.fingerprint))

    workers = [context.Process(target=work) for _ in range(int(num_processes))]
    for worker in workers:
        worker.start()
    found = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    print("prepared", sum(prepared for prepared, _ in found), "fingerprints", len({print_ for _, print_ in found}))


def _in_child(run: Callable[[int], tuple[str, int]], moment: int) -> tuple[str, int]:
    results = multiprocessing.get_context("fork").SimpleQueue()
    child = os.fork()
    if not child:
        results.put(run(moment))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    found: tuple[str, int] = results.get()
    return found
