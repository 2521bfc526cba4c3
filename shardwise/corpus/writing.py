"""Token streams -> shards, ends and checksums, written once from front to back."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

BUFFER = 1 << 20


class _File:
    """A file that knows its size and SHA-256."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] = path.open("wb", buffering=BUFFER)
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, values: np.ndarray) -> None:
        data = values.tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._size += len(data)

    def close(self, files: dict[str, Any]) -> None:
        """Brings the content to the disk and enters size and checksum under the file's name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        files[self.path.name] = {"size": self._size, "sha256": self._digest.hexdigest()}

    def abandon(self) -> None:
        with suppress(OSError):  # a full disk fails the last flush once more
            self._file.close()


class SplitWriter:
    """Writes one split: `add` tokens, `end` documents, `close`."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], shard_tokens: int, end: int) -> None:
        self.name = name
        self.num_tokens = self.num_documents = self.num_bytes = 0
        self.shards: list[str] = []
        self.files: dict[str, Any] = {}
        self._folder, self._dtype, self._shard_tokens = folder, dtype, shard_tokens
        self._end = np.array([end], np.uint32)
        self._ends = _File(folder / f"{name}.ends")
        self._shard: _File | None = None
        self._room = 0

    def add(self, ids: np.ndarray, num_bytes: int) -> None:
        """The next tokens of the current document, uint32 (N,), and how many bytes of text they are."""
        self.num_bytes += num_bytes
        while ids.size:
            if not self._room:
                self._next_shard()
            assert self._shard is not None
            now = ids[: self._room]
            self._shard.write(now.astype(self._dtype))
            self.num_tokens += now.size
            self._room -= now.size
            ids = ids[now.size :]

    def end(self) -> None:
        """Ends the current document."""
        self.add(self._end, 0)
        self._ends.write(np.array([self.num_tokens], "<i8"))
        self.num_documents += 1

    def close(self) -> dict[str, Any]:
        """Closes the files; returns the split's entry in the index."""
        if self._shard is not None:
            self._shard.close(self.files)
        self._ends.close(self.files)
        return {
            "shards": self.shards,
            "tokens": self.num_tokens,
            "documents": self.num_documents,
            "bytes": self.num_bytes,
        }

    def abandon(self) -> None:
        """Closes the files of a preparation that failed."""
        if self._shard is not None:
            self._shard.abandon()
        self._ends.abandon()

    def _next_shard(self) -> None:
        if self._shard is not None:
            self._shard.close(self.files)
        self.shards.append(f"{self.name}-{len(self.shards):05d}.tokens")
        self._shard = _File(self._folder / self.shards[-1])
        self._room = self._shard_tokens
