"""Which text is held out: by a hash of the text, so duplicates stay together and names and order do not matter."""

import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shardwise.corpus.config import DataConfig
from shardwise.corpus.errors import CorpusError
from shardwise.corpus.reading import Piece


class Section(NamedTuple):
    """Text of one split; `ends`: what follows it in that split is another document."""

    text: bytes
    held_out: bool
    ends: bool


def draw(text: bytes) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"held-out").digest()) / 2.0**64


def choose_bound(pieces: Iterable[Piece], config: DataConfig) -> float:
    """The bound below which a draw is held out: `data.held_out`, moved where a small corpus would leave a split empty.

    Reads until both splits are seen to have text: for a large corpus about 1 / held_out sections.
    Raises CorpusError where there is no text, or too little to have both splits.
    """
    if config.held_out == 0.0:
        if not any(piece.text for piece in pieces):
            raise _empty(config)
        return 0.0
    smallest, largest = math.inf, -math.inf
    for piece in _deciding(pieces, config):
        drawn = draw(piece.text)
        smallest, largest = min(smallest, drawn), max(largest, drawn)
        if smallest < config.held_out <= largest:
            return config.held_out
    if smallest == math.inf:
        raise _empty(config)
    if smallest == largest:
        raise CorpusError(
            f"data.source = {config.source!r} holds one document or section only, too little to hold some of it out; "
            "give more text, lower data.section, or set data.held_out = 0"
        )
    return largest if largest < config.held_out else math.nextafter(smallest, 1.0)


def assign(pieces: Iterable[Piece], bound: float, config: DataConfig) -> Iterator[Section]:
    """Every piece with its split; a document ends in a split where its next section goes to the other."""
    held_out, inside = False, False
    for piece in pieces:
        before = held_out
        if not inside or (config.section and piece.text):
            held_out = draw(piece.text) < bound
        if inside and held_out != before:
            yield Section(b"", before, True)
        yield Section(piece.text, held_out, piece.last)
        inside = not piece.last


def _deciding(pieces: Iterable[Piece], config: DataConfig) -> Iterator[Piece]:
    inside = False
    for piece in pieces:
        if piece.text and (config.section or not inside):
            yield piece
        inside = not piece.last


def _empty(config: DataConfig) -> CorpusError:
    return CorpusError(
        f"data.source = {config.source!r} holds no text (every document is empty or white space); "
        "give files with text, or check data.field and data.limit_bytes"
    )
