"""A prepared corpus on disk, read through memory maps.

A folder holds, for each split, shards of token ids (`train-00000.tokens`: little-endian uint16, or uint32 for a
vocabulary above 65 536; every shard but the last has the same number of tokens) and `train.ends` (little-endian int64:
for each document, the place in the split just after the token that ends it); the tokenizer's two files; and
`index.json` with the sizes and SHA-256 of all of them and of itself. The folder gets its name when it is whole.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from shardwise.corpus import tokenizer as tokenizers
from shardwise.corpus.encoding import num_cores
from shardwise.corpus.errors import CorpusError

FORMAT = 1
INDEX = "index.json"
SPLITS = ("train", "held_out")
OPEN_MAPS = 256  # each map holds a file descriptor


@dataclass(frozen=True)
class Tokens:
    """One split: a stream of token ids with document ends.

    `num_bytes` counts the UTF-8 text behind the tokens. `compression` holds the bits per byte that gzip and xz make of
    the held-out text (of its first 8 MiB where it is longer); it is empty for the train split.
    """

    name: str
    shards: tuple[Path, ...]
    shard_tokens: int
    dtype: np.dtype[Any]
    num_tokens: int
    num_documents: int
    num_bytes: int
    compression: Mapping[str, float]
    _maps: dict[Path, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token, ends counted as tokens: what turns a loss per token into bits per byte."""
        return self.num_bytes / max(1, self.num_tokens)

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        """Token ids [start, stop) of the stream, into `out` (int64, stop - start) or a new array."""
        assert 0 <= start <= stop <= self.num_tokens
        out = np.empty(stop - start, np.int64) if out is None else out
        place = start
        while place < stop:
            shard, offset = divmod(place, self.shard_tokens)
            length = min(stop - place, self.shard_tokens - offset)
            source = self._map(self.shards[shard], self.dtype)
            out[place - start : place - start + length] = source[offset : offset + length]
            place += length
        return out

    def ends(self, start: int, stop: int) -> np.ndarray:
        """The document ends (places just after an end token) in (start, stop], int64."""
        if not self.num_documents:
            return np.empty(0, np.int64)
        ends = self._map(_ends_file(self.shards[0].parent, self.name), np.dtype("<i8"))
        first, last = np.searchsorted(ends, (start, stop), side="right")
        return np.array(ends[first:last], np.int64)

    def _map(self, path: Path, dtype: np.dtype[Any]) -> np.ndarray:
        found = self._maps.get(path)
        if found is not None:
            return found
        if len(self._maps) >= OPEN_MAPS:
            del self._maps[next(iter(self._maps))]
        # A plain array over the map: slices of np.memmap itself cost several times as much.
        return self._maps.setdefault(path, np.asarray(np.memmap(path, dtype, mode="r")))


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus. `fingerprint` is of its content: equal on machines that prepared the same tokens."""

    folder: Path
    index: Mapping[str, Any]
    train: Tokens
    held_out: Tokens

    @classmethod
    def open(cls, folder: str | Path, checksums: bool = True) -> Self:
        """Opens a prepared folder.

        Arguments: `checksums`, also compare every file's checksum (about 1 s per GB); sizes are always compared.
        Raises CorpusError where the folder is not a prepared corpus, or names the file that is damaged.
        """
        folder = Path(folder)
        index = _read_index(folder)
        _check_files(folder, index["files"], checksums)
        train, held_out = (_tokens(folder, name, index) for name in SPLITS)
        return cls(folder, index, train, held_out)

    @cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer the corpus was prepared with."""
        return tokenizers.from_folder(self.folder)

    @property
    def vocabulary(self) -> int:
        """Size of the tokenizer's vocabulary: one more than its largest id."""
        return int(self.index["vocabulary"])

    @property
    def end(self) -> int:
        """The id that ends a document."""
        return int(self.index["end"])

    @property
    def fingerprint(self) -> str:
        """Digest of all tokens, ends and the tokenizer, hexadecimal."""
        return str(self.index["fingerprint"])

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raises CorpusError where a model of `vocabulary` ids lacks one that this corpus holds; 0 is always right."""
        largest = int(self.index["largest"])
        if 0 < vocabulary <= largest:
            raise CorpusError(
                f"model.vocabulary = {vocabulary} leaves out token id {largest} of the corpus {self.folder}; "
                f"set model.vocabulary = 0 (taken from the tokenizer) or at least {self.vocabulary}"
            )

    def split(self, name: str) -> Tokens:
        """The split of a name, 'train' or 'held_out'."""
        if name not in SPLITS:
            raise CorpusError(f"split {name!r} is not known; give one of {', '.join(SPLITS)}")
        return self.train if name == "train" else self.held_out

    def summary(self) -> str:
        """One line for a person."""
        train, held_out = self.train, self.held_out
        line = (
            f"{train.num_tokens:,} tokens of {train.num_bytes / 1e6:,.1f} MB in {train.num_documents:,} documents "
            f"({train.bytes_per_token:.2f} bytes per token, vocabulary {self.vocabulary:,})"
        )
        if not held_out.num_tokens:
            return line + ", nothing held out"
        others = ", ".join(f"{name} {bits:.2f}" for name, bits in held_out.compression.items())
        line += f"; held out {held_out.num_tokens:,} tokens in {held_out.num_documents:,} documents"
        return line + f" (bits per byte: {others})"


def is_finished(folder: Path) -> bool:
    """Whether a preparation of this folder ran to its end."""
    return (folder / INDEX).is_file()


def sealed(index: dict[str, Any]) -> str:
    """The text of index.json: the index and its own checksum."""
    return json.dumps(index | {"checksum": _digest(index)}, indent=1) + "\n"


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        checksum = index.pop("checksum")
    except (FileNotFoundError, NotADirectoryError):
        raise CorpusError(f"{folder} is not a prepared corpus (it has no {INDEX}); prepare it first") from None
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise _damaged(path, "it does not parse", folder) from None
    if checksum != _digest(index):
        raise _damaged(path, "its checksum differs", folder)
    if index["format"] != FORMAT:
        raise CorpusError(
            f"{folder} has format {index['format']}, this version reads {FORMAT}; delete the folder and prepare again"
        )
    return dict(index)


def _check_files(folder: Path, files: Mapping[str, Any], checksums: bool) -> None:
    for name, known in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise _damaged(folder / name, "it is missing", folder) from None
        if size != known["size"]:
            raise _damaged(folder / name, f"{size} bytes instead of {known['size']}", folder)
    if not checksums:
        return
    with ThreadPoolExecutor(min(8, num_cores())) as threads:
        for name, digest in zip(files, threads.map(lambda name: _file_digest(folder / name), files), strict=True):
            if digest != files[name]["sha256"]:
                raise _damaged(folder / name, "its checksum differs", folder)


def _tokens(folder: Path, name: str, index: Mapping[str, Any]) -> Tokens:
    split = index["splits"][name]
    return Tokens(
        name=name,
        shards=tuple(folder / shard for shard in split["shards"]),
        shard_tokens=index["shard_tokens"],
        dtype=np.dtype(index["dtype"]),
        num_tokens=split["tokens"],
        num_documents=split["documents"],
        num_bytes=split["bytes"],
        compression=split.get("compression", {}),
    )


def _ends_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.ends"


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _damaged(path: Path, how: str, folder: Path) -> CorpusError:
    return CorpusError(f"{path} is damaged ({how}); delete {folder} and prepare again")
