"""`data.source` -> pieces of text, and what identifies the files behind them."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.corpus.config import HUGGINGFACE, DataConfig
from shardwise.corpus.errors import CorpusError
from shardwise.corpus.huggingface import local_parts, read_rows
from shardwise.corpus.reading import Meter, Part, Piece, read_files, whole_characters

# Other people's packages, tests, and generated tables: not the language's own prose of code.
# Folders of compiled code, which programs leave beside what was written.
CACHES = {"__pycache__"}
NOT_LIBRARY = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """One entry of `data.source`.

    `size` is its bytes on disk (0: unknown), `identity` changes whenever its text may have changed, and
    `read(meter, share)` gives its pieces, or only about that share of every file.
    """

    name: str
    size: int
    identity: str
    read: Callable[[Meter, float], Iterator[Piece]]


def resolve(config: DataConfig) -> tuple[Source, ...]:
    """The sources of a config, found but not yet read. Raises CorpusError for one that is not there."""
    try:
        return tuple(_resolve(name, config) for name in config.sources)
    except OSError as error:
        raise CorpusError(
            f"cannot read {error.filename}: {error.strerror}; mend its permissions or take it out of data.source"
        ) from None


def read(sources: Sequence[Source], config: DataConfig, meter: Meter, share: float = 1.0) -> Iterator[Piece]:
    """All pieces in order, up to `data.limit_bytes`, without documents of nothing but white space."""
    pieces = (piece for source in sources for piece in source.read(meter, share))
    inside = False
    for piece in _limited(pieces, config.limit_bytes) if config.limit_bytes else pieces:
        if inside or not piece.last or piece.text.strip():
            yield piece
            inside = not piece.last


def total_bytes(sources: Sequence[Source]) -> int:
    """Bytes on disk of all sources, 0 where one is unknown."""
    sizes = [source.size for source in sources]
    return sum(sizes) if all(sizes) else 0


def _limited(pieces: Iterable[Piece], left: int) -> Iterator[Piece]:
    for piece in pieces:
        if len(piece.text) > left:
            yield Piece(piece.text[: whole_characters(piece.text, left)], True)
            return
        left -= len(piece.text)
        yield piece


def _resolve(name: str, config: DataConfig) -> Source:
    if name == "python":
        return _standard_library(config)
    if name.startswith(HUGGINGFACE):
        dataset = name.removeprefix(HUGGINGFACE)
        return Source(
            name=name,
            size=0,
            identity=_identity(local_parts(dataset, config)),
            read=lambda meter, share: read_rows(dataset, config, meter),
        )
    parts = _find(name)
    return Source(
        name=name,
        size=sum(part.size for part in parts),
        identity=_identity(parts),
        read=lambda meter, share: read_files(parts, config, meter, share),
    )


def _standard_library(config: DataConfig) -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = [
        part for part in _below(root, NOT_LIBRARY) if part.path.suffix == ".py" and not part.name.startswith("config-")
    ]
    if not parts:
        raise CorpusError(
            f"data.source = 'python': {root} holds no source of the standard library; give files or a folder instead"
        )
    # A fixed random order, so that a beginning cut off by data.limit_bytes is a fair sample of the whole.
    parts.sort(key=lambda part: hashlib.sha256(part.name.encode()).digest())
    own = config.model_copy(update={"format": "text", "separator": "", "undecodable": "skip"})
    return Source(
        name="python",
        size=sum(part.size for part in parts),
        identity=_identity(parts),
        read=lambda meter, share: read_files(parts, own, meter, share),
    )


def _find(name: str) -> list[Part]:
    path = Path(name).expanduser()
    if path.is_dir():
        parts = _below(path, CACHES)
        if not parts:
            raise CorpusError(f"data.source = {name!r}: the folder holds no files; give a folder or glob that does")
        return parts
    found = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))
    parts = [_part(file, Path(file)) for file in found if Path(file).is_file()]
    if not parts:
        raise CorpusError(
            f"data.source = {name!r}: no such file or folder, and no file matches it as a glob; "
            "give a path, a glob, 'python' or 'huggingface:NAME'"
        )
    return parts


def _below(root: Path, without: set[str]) -> list[Part]:
    """Every file below a folder in sorted order, hidden ones left out."""

    def stop(error: OSError) -> None:
        raise error

    parts = []
    for folder, folders, files in os.walk(root, onerror=stop):
        folders[:] = sorted(name for name in folders if name not in without and not name.startswith("."))
        for file in sorted(files):
            path = Path(folder) / file
            if not file.startswith(".") and path.is_file():
                parts.append(_part(path.relative_to(root).as_posix(), path))
    return parts


def _part(name: str, path: Path) -> Part:
    return Part(name, path, path.stat().st_size)


def _identity(parts: Iterable[Part]) -> str:
    """Names, sizes and times of change, digested one by one: a folder may hold millions of files."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part.name}\0{part.size}\0{part.path.stat().st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
