"""Files and rows -> pieces of UTF-8 text, in memory that does not grow with the file."""

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from shardwise.corpus.config import DataConfig
from shardwise.corpus.errors import CorpusError

WHOLE = 1 << 20  # bytes of a piece when documents are not held out by sections
CHUNK = 1 << 17
BOM = b"\xef\xbb\xbf"
OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
}


class Piece(NamedTuple):
    """A stretch of one document: valid UTF-8, and whether the document ends with it."""

    text: bytes
    last: bool


class Part(NamedTuple):
    """One file of a source: its name inside the source, its path, its bytes on disk."""

    name: str
    path: Path
    size: int


@dataclass
class Meter:
    """How far reading has come: bytes of the files as stored, and what was left out as not UTF-8."""

    stored: int = 0
    skipped: int = 0


def read_files(parts: Iterable[Part], config: DataConfig, meter: Meter, share: float = 1.0) -> Iterator[Piece]:
    """Pieces of the files in order; with `share` < 1 only about that much of every file, in whole pieces."""
    left = 0.0
    for part in parts:
        before = meter.stored
        left += part.size * share
        # What one file had too much is taken from the next, so that many small files are not all read.
        for piece, stored in _read_file(part, config, meter) if share == 1.0 or left > 0 else ():
            meter.stored = before + stored
            yield piece
            left -= len(piece.text)
            if share < 1.0 and left <= 0:
                if not piece.last:
                    yield Piece(b"", True)
                break
        meter.stored = before + part.size


def row_pieces(value: object, where: str, config: DataConfig, meter: Meter) -> Iterator[Piece]:
    """Pieces of one row's text: a string, or None for an empty row."""
    if value is None:
        return
    if not isinstance(value, str):
        raise CorpusError(
            f"{where}: the field {config.field!r} holds {type(value).__name__}, not text; set data.field to another"
        )
    try:
        raw = value.encode()
    except UnicodeEncodeError:
        # JSON can spell half a surrogate pair, which no UTF-8 text holds.
        if config.undecodable == "error":
            raise _not_utf8(where, "a lone surrogate") from None
        if config.undecodable == "skip":
            meter.skipped += 1
            return
        raw = value.encode(errors="replace")
    yield from cut(io.BytesIO(raw).read, b"", config.section or WHOLE)


def row_field(row: object, where: str, config: DataConfig) -> object:
    """The value of `data.field` in a row."""
    if not isinstance(row, Mapping):
        raise CorpusError(f"{where}: a row must be an object with the field {config.field!r}")
    if config.field not in row:
        known = ", ".join(map(str, list(row)[:8])) or "none"
        raise CorpusError(f"{where}: no field {config.field!r}; set data.field to one of: {known}")
    return row[config.field]


def cut(read: Callable[[int], bytes], separator: bytes, section: int) -> Iterator[Piece]:
    """Parts a stream at `separator` into documents, and documents into pieces of at most `section` bytes."""
    window = section + len(separator)
    buffer, start, more = b"", 0, True
    while True:
        if more and len(buffer) - start <= window:
            chunk = read(max(window, CHUNK))
            more = bool(chunk)
            buffer, start = buffer[start:] + chunk, 0
            continue
        at = buffer.find(separator, start, start + window) if separator else -1
        if at >= 0:
            yield Piece(buffer[start:at], True)
            start = at + len(separator)
            if start == len(buffer) and not more:
                return
        elif len(buffer) - start <= section:
            yield Piece(buffer[start:], True)
            return
        else:
            stop = start + boundary(buffer[start : start + section + 1])
            yield Piece(buffer[start:stop], False)
            start = stop


def boundary(text: bytes) -> int:
    """Where to cut `text` short by at least one byte, changing as little as can be.

    Best after a lone newline between two visible characters: a byte-level BPE splits there in any case, so the tokens
    on both sides are those of the uncut text. Else after any newline, else between two characters.
    """
    at = len(text) - 1
    while (at := text.rfind(b"\n", len(text) // 2, at)) > 0:
        if not text[at - 1 : at].isspace() and not text[at + 1 : at + 2].isspace():
            return at + 1
    at = text.rfind(b"\n", 0, len(text) - 1)
    if at > 0:
        return at + 1
    return whole_characters(text, len(text) - 1)


def whole_characters(text: bytes, stop: int) -> int:
    """The largest place <= `stop` that does not split a UTF-8 character."""
    for back in range(min(4, stop)):
        if stop - back >= len(text) or text[stop - back] & 0xC0 != 0x80:
            return stop - back
    return stop


def _read_file(part: Part, config: DataConfig, meter: Meter) -> Iterator[tuple[Piece, int]]:
    rows = config.format == "jsonl" or (config.format == "auto" and _is_jsonl(part.path))
    try:
        if not rows and config.undecodable == "skip" and not _is_utf8(part.path):
            meter.skipped += 1
            return
        with _opened(part.path) as (raw, stream):
            if rows:
                for number, line in enumerate(stream, start=1):
                    for piece in _line_pieces(line, f"{part.path} line {number}", config, meter):
                        yield piece, raw.tell()
                return
            separator = config.separator.encode()
            offset = stream.tell()
            for text, last in cut(stream.read, separator, config.section or WHOLE):
                yield Piece(_utf8(text, f"{part.path}", config, offset), last), raw.tell()
                offset += len(text) + (len(separator) if last else 0)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CorpusError(f"cannot read {part.path}: {reason}; mend the file or take it out of data.source") from None


def _line_pieces(line: bytes, where: str, config: DataConfig, meter: Meter) -> Iterator[Piece]:
    if not line.strip():
        return
    if config.undecodable == "skip":
        try:
            line.decode()
        except UnicodeDecodeError:
            meter.skipped += 1
            return
    try:
        row = json.loads(_utf8(line, where, config))
    except (json.JSONDecodeError, RecursionError):
        raise CorpusError(f"{where} is not JSON; mend the line, or set data.format = 'text'") from None
    yield from row_pieces(row_field(row, where, config), where, config, meter)


def _utf8(text: bytes, where: str, config: DataConfig, offset: int = 0) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        if config.undecodable != "replace":
            raise _not_utf8(where, f"byte 0x{text[error.start]:02x} at {offset + error.start}") from None
        return text.decode(errors="replace").encode()
    return text


def _not_utf8(where: str, what: str) -> CorpusError:
    return CorpusError(
        f"{where} is not UTF-8 ({what}); set data.undecodable = 'replace' or 'skip', or take it out of data.source"
    )


def _is_jsonl(path: Path) -> bool:
    inner = Path(path.stem) if path.suffix in OPENERS else path
    return inner.suffix in (".jsonl", ".ndjson")


def _is_utf8(path: Path) -> bool:
    with _opened(path) as (_, stream), io.TextIOWrapper(stream, encoding="utf-8") as text:
        try:
            while text.read(CHUNK):
                pass
        except UnicodeDecodeError:
            return False
    return True


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], Any]]:
    opener = OPENERS.get(path.suffix)
    with path.open("rb") as raw, opener(raw) if opener else nullcontext(raw) as stream:
        if stream.peek(len(BOM))[: len(BOM)] == BOM:
            stream.read(len(BOM))
        yield raw, stream
