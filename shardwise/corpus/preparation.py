"""Text -> a prepared corpus, in constant memory, whole or not at all, once."""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import filelock
import numpy as np

from shardwise.corpus import sources as reading
from shardwise.corpus import tokenizer as tokenizers
from shardwise.corpus.compression import Compression
from shardwise.corpus.config import DataConfig
from shardwise.corpus.encoding import Encoded, Encoder, num_cores
from shardwise.corpus.errors import CorpusError
from shardwise.corpus.held_out import Section, assign, choose_bound
from shardwise.corpus.progress import PrepareProgress, ProgressCallback
from shardwise.corpus.reading import Meter
from shardwise.corpus.sources import Source
from shardwise.corpus.store import FORMAT, INDEX, SPLITS, Corpus, is_finished, sealed
from shardwise.corpus.writing import SplitWriter

SHARD_TOKENS = 1 << 27
GROUP = 1 << 18  # bytes of text a worker gets at a time
SMALL = 2 << 20  # below this many bytes, starting processes costs more than it saves

# What the tokens depend on. The rest of the section (seed, batch, ...) may change without a new preparation.
REQUEST = (
    "source", "format", "field", "separator", "undecodable", "subset", "split", "revision", "files", "limit_bytes",
    "tokenizer", "vocabulary", "tokenizer_bytes", "end_token", "held_out", "section",
)  # fmt: skip


def prepare(
    config: DataConfig,
    folder: str | Path | None = None,
    vocabulary: int = 0,
    progress: ProgressCallback | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> Corpus:
    """The prepared corpus of a config: opened where it is finished, else made first.

    Any number of processes may call this at once: one prepares, the others wait for it and open the same folder. A
    process that is killed leaves nothing that is taken for finished. The tokens do not depend on `data.processes`.

    Arguments:
        folder: where the corpus lies; None: `cache_folder(config)`.
        vocabulary: the model's number of ids, checked against the tokens; 0: taken from the tokenizer.
        progress: called every quarter of a megabyte or so.
        shard_tokens: tokens per shard file.
    Raises CorpusError, one line that names the file or key and the mend.
    """
    sources = reading.resolve(config)
    request = _request(config, sources)
    folder = _default_folder(config, request) if folder is None else Path(folder).expanduser()
    corpus = _finished(folder, request, config)
    if corpus is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(folder, progress):
                corpus = _finished(folder, request, config)
                if corpus is None:
                    _make(config, sources, request, folder, progress, shard_tokens)
                    corpus = Corpus.open(folder, checksums=False)
        except OSError as error:
            raise CorpusError(
                f"cannot write {error.filename or folder}: {error.strerror or error}; make room, or set data.cache"
            ) from error
    corpus.check_vocabulary(vocabulary)
    return corpus


def cache_folder(config: DataConfig) -> Path:
    """The folder below `data.cache` that belongs to a config and the present state of its files."""
    return _default_folder(config, _request(config, reading.resolve(config)))


def _request(config: DataConfig, sources: Sequence[Source]) -> dict[str, Any]:
    request = json.loads(config.model_dump_json(include=set(REQUEST)))
    if config.tokenizer != "bpe":
        del request["vocabulary"], request["tokenizer_bytes"]
    if config.tokenizer not in ("bytes", "bpe"):
        content = tokenizers.tokenizer_file(config).read_bytes()
        request["tokenizer"] = f"sha256:{hashlib.sha256(content).hexdigest()}"
    request["identity"] = [source.identity for source in sources]
    request["format_number"] = FORMAT
    return dict(request)


def _default_folder(config: DataConfig, request: dict[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    name = re.sub(r"[^A-Za-z0-9]+", "-", Path(config.sources[0]).stem).strip("-")[:40] or "corpus"
    return Path(config.cache).expanduser() / f"{name}-{key[:16]}"


def _finished(folder: Path, request: dict[str, Any], config: DataConfig) -> Corpus | None:
    if not is_finished(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CorpusError(f"{folder} exists and is not a prepared corpus; give another folder, or empty it")
        return None
    corpus = Corpus.open(folder, checksums=config.checksums)
    made = corpus.index["request"]
    differing = sorted(key for key in request.keys() | made.keys() if request.get(key) != made.get(key))
    if differing:
        names = ", ".join("the source's files" if key == "identity" else f"data.{key}" for key in differing)
        raise CorpusError(f"{folder} was prepared with other settings ({names}); give another folder, or delete it")
    return corpus


@contextmanager
def _locked(folder: Path, progress: ProgressCallback | None) -> Iterator[None]:
    # The system lets go of the lock when its holder dies, so none is left behind.
    lock = filelock.FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        if progress is not None:
            progress(PrepareProgress("waiting", 0, 0))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(
    config: DataConfig,
    sources: Sequence[Source],
    request: dict[str, Any],
    folder: Path,
    progress: ProgressCallback | None,
    shard_tokens: int,
) -> None:
    partial = folder.parent / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        bound = choose_bound(reading.read(sources, config, Meter()), config)
        tokenizer = _tokenizer(config, sources, bound, progress)
        tokenizer.save(partial)
        index = _tokenize(config, sources, bound, tokenizer, partial, progress, shard_tokens)
        index |= {"request": request, "tokenizers": importlib.metadata.version("tokenizers")}
        _write(partial / INDEX, sealed(index))
        _sync(partial)
        os.rename(partial, folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _tokenizer(
    config: DataConfig, sources: Sequence[Source], bound: float, progress: ProgressCallback | None
) -> tokenizers.Tokenizer:
    if config.tokenizer != "bpe":
        return tokenizers.load(config)
    total = _total(config, sources)
    share = min(1.0, config.tokenizer_bytes / total) if total and not config.limit_bytes else 1.0
    meter = Meter()
    report = _Report("training the tokenizer", min(total, config.tokenizer_bytes), progress)

    def texts() -> Iterator[list[str]]:
        taken = 0
        for group in _grouped(assign(reading.read(sources, config, meter, share), bound, config)):
            kept = [section.text for section in group if not section.held_out]
            yield [text.decode() for text in kept]
            taken += sum(map(len, kept))
            report.at(taken)
            if taken >= config.tokenizer_bytes:
                return

    return tokenizers.train(texts(), config.vocabulary)


def _tokenize(
    config: DataConfig,
    sources: Sequence[Source],
    bound: float,
    tokenizer: tokenizers.Tokenizer,
    folder: Path,
    progress: ProgressCallback | None,
    shard_tokens: int,
) -> dict[str, Any]:
    """Writes both splits; returns the index."""
    dtype = np.dtype("<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")
    writers = [SplitWriter(folder, name, dtype, shard_tokens, tokenizer.end) for name in SPLITS]
    compression = Compression()
    total = _total(config, sources)
    processes = _processes(config, tokenizer, total)
    meter = Meter()
    report = _Report("tokenizing", total, progress)
    largest = tokenizer.end
    done = 0

    def write(group: list[Section], future: "Future[Encoded]") -> None:
        nonlocal largest, done
        ids, lengths = future.result()
        largest = max(largest, int(ids.max(initial=0)))
        start = 0
        for section, length in zip(group, lengths.tolist(), strict=True):
            writer = writers[section.held_out]
            writer.add(ids[start : start + length], len(section.text))
            start += length
            if section.ends:
                writer.end()
            if section.held_out:
                compression.add(section.text)
            done += len(section.text)
        report.at(done if config.limit_bytes or not total else meter.stored)

    try:
        with Encoder(tokenizer, folder, processes) as encoder:
            waiting: deque[tuple[list[Section], Future[Encoded]]] = deque()
            for group in _grouped(assign(reading.read(sources, config, meter), bound, config)):
                waiting.append((group, encoder.submit([section.text for section in group])))
                if len(waiting) > 2 * processes:
                    write(*waiting.popleft())
            while waiting:
                write(*waiting.popleft())
        assert largest < tokenizer.vocabulary
        splits = {writer.name: writer.close() for writer in writers}
    except BaseException:
        for writer in writers:
            writer.abandon()
        raise
    if compression.num_bytes:
        splits["held_out"]["compression"] = compression.finish()
    files = {name: known for writer in writers for name, known in writer.files.items()}
    files |= {name: _known(folder / name) for name in (tokenizers.FILE, tokenizers.CONFIG_FILE)}
    return {
        "format": FORMAT,
        "dtype": dtype.str,
        "vocabulary": tokenizer.vocabulary,
        "end": tokenizer.end,
        "largest": largest,
        "shard_tokens": shard_tokens,
        "skipped": meter.skipped,
        "splits": splits,
        "files": files,
        "fingerprint": hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest(),
    }


class _Report:
    """Passes progress on, never backwards and never beyond the total."""

    def __init__(
        self, phase: Literal["training the tokenizer", "tokenizing"], total: int, progress: ProgressCallback | None
    ) -> None:
        self._phase, self._total, self._progress, self._done = phase, total, progress, 0
        self.at(0)

    def at(self, done: int) -> None:
        if self._progress is None:
            return
        self._done = max(self._done, min(done, self._total) if self._total else done)
        self._progress(PrepareProgress(self._phase, self._done, self._total))


def _total(config: DataConfig, sources: Sequence[Source]) -> int:
    total = reading.total_bytes(sources)
    if not config.limit_bytes:
        return total
    return min(total, config.limit_bytes) if total else config.limit_bytes


def _processes(config: DataConfig, tokenizer: tokenizers.Tokenizer, total: int) -> int:
    if isinstance(tokenizer, tokenizers.Bytes):
        return 1  # a copy of the text: sending it to another process would cost more
    return config.processes or (1 if 0 < total < SMALL else num_cores())


def _grouped(sections: Iterable[Section]) -> Iterator[list[Section]]:
    group: list[Section] = []
    size = 0
    for section in sections:
        group.append(section)
        size += len(section.text) + 64  # an empty or tiny section is not free
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _known(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
