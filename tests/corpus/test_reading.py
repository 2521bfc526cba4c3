import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.corpus import CorpusError, DataConfig
from shardwise.corpus.reading import Meter, Part, Piece, boundary, cut, read_files


def read(path: Path, share: float = 1.0, meter: Meter | None = None, **values: object) -> list[Piece]:
    config = DataConfig(**values)
    return list(read_files([Part(path.name, path, path.stat().st_size)], config, meter or Meter(), share))


def documents(pieces: list[Piece]) -> list[bytes]:
    found, now = [], b""
    for piece in pieces:
        now += piece.text
        if piece.last:
            found.append(now)
            now = b""
    assert now == b""
    return found


@given(
    text=st.text(alphabet="a \nλ日|", max_size=400).map(str.encode),
    separator=st.sampled_from([b"", b"\n\n", b"|", b"a|a"]),
    section=st.integers(8, 64),
    chunk=st.integers(1, 40),
)
@example(text=b"\n\n\n", separator=b"\n\n", section=8, chunk=1)  # ends like a separator, which began before
def test_cutting_loses_nothing_and_respects_separators_and_characters(
    text: bytes, separator: bytes, section: int, chunk: int
) -> None:
    source = io.BytesIO(text)
    pieces = list(cut(lambda size: source.read(min(size, chunk)), separator, section))
    expected = text.split(separator) if separator else [text]
    if len(expected) > 1 and not expected[-1]:
        expected = expected[:-1]  # nothing follows the last separator
    assert documents(pieces) == expected
    for piece in pieces:
        assert len(piece.text) <= section
        piece.text.decode()


def test_a_cut_prefers_a_lone_newline_between_visible_characters() -> None:
    assert boundary(b"first line\nsecond\n\n    third\nf") == len(b"first line\nsecond\n\n    third\n")
    assert boundary(b"first line\nsecond\n\n  third li") == len(b"first line\nsecond\n\n")
    assert boundary("日日日".encode()) == 6
    assert boundary(b"no newline at all") == 16


@pytest.mark.parametrize(
    ("suffix", "packed"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
def test_compressed_files_read_as_their_content(tmp_path: Path, suffix: str, packed: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(packed("größer\r\n".encode()))
    meter = Meter()
    assert documents(read(path, meter=meter)) == ["größer\r\n".encode()]
    assert meter.stored == path.stat().st_size


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_jsonl_gives_the_field_of_each_row(tmp_path: Path, suffix: str) -> None:
    rows = [{"body": "one"}, {"body": None, "n": 1}, {"body": "two\nlines λ"}]
    text = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix else text.encode())
    assert documents(read(path, field="body")) == [b"one", "two\nlines λ".encode()]


def test_a_long_row_is_cut_into_pieces_of_one_document(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "line\n" * 200}))
    pieces = read(path, section=256)
    assert len(pieces) == 4
    assert documents(pieces) == [b"line\n" * 200]


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfhello")
    assert documents(read(path)) == [b"hello"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"abc\xffdef", r"a\.txt is not UTF-8 \(byte 0xff at 3\); set data.undecodable = 'replace' or 'skip'"),
        ("a.txt", b"x" * 400 + b"\xe9", r"byte 0xe9 at 400"),
        ("a.txt", b"\xef\xbb\xbfone||two\xe9", r"byte 0xe9 at 11"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "\xff"}\n', r"a\.jsonl line 2 is not UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl line 1 is not UTF-8 \(a lone surrogate\)"),
        ("a.jsonl", b'{"text": "ok"}\nplain\n', r"a\.jsonl line 2 is not JSON; mend the line"),
        ("a.jsonl", b'{"body": "x", "id": 1}\n', r"line 1: no field 'text'; set data.field to one of: body, id"),
        ("a.jsonl", b'{"text": 7}\n', r"the field 'text' holds int, not text"),
        ("a.jsonl", b"[1]\n", r"line 1: a row must be an object with the field 'text'"),
        ("a.txt.gz", b"not gzip", r"cannot read .*a\.txt\.gz: .*; mend the file"),
        ("a.txt.gz", gzip.compress(b"words " * 99)[:-9], r"cannot read .*a\.txt\.gz: .*; mend the file"),
        ("a.txt.xz", lzma.compress(b"words " * 99)[:20], r"cannot read .*a\.txt\.xz: .*; mend the file"),
    ],
)
def test_unreadable_text_is_one_line_that_names_the_place(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        read(path, section=256, separator="||")
    assert "\n" not in str(caught.value)


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"cannot read .*gone\.txt: No such file"):
        list(read_files([Part("gone.txt", tmp_path / "gone.txt", 3)], DataConfig(), Meter()))


def test_what_is_not_utf8_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xffdef")
    assert documents(read(path, undecodable="replace")) == ["abc\ufffddef".encode()]
    rows = tmp_path / "a.jsonl"
    rows.write_bytes(b'{"text": "a\xff"}\n{"text": "\\ud800b"}\n')
    assert documents(read(rows, undecodable="replace")) == ["a\ufffd".encode(), b"?b"]


def test_what_is_not_utf8_can_be_skipped_a_whole_file_or_one_row(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 1000 + b"\xff")
    meter = Meter()
    assert read(path, meter=meter, undecodable="skip", section=256) == []
    assert meter.skipped == 1
    rows = tmp_path / "a.jsonl"
    rows.write_bytes(b'{"text": "a\xff"}\n{"text": "kept"}\n{"text": "\\ud800"}\n')
    assert documents(read(rows, meter=meter, undecodable="skip")) == [b"kept"]
    assert meter.skipped == 3


def test_a_share_is_drawn_from_every_large_file_and_from_some_small_ones(tmp_path: Path) -> None:
    parts = []
    for number in range(40):
        path = tmp_path / f"{number}.txt"
        path.write_text(f"{number:02d}" * (50 if number else 20_000))
        parts.append(Part(path.name, path, path.stat().st_size))
    pieces = list(read_files(parts, DataConfig(section=512), Meter(), share=0.25))
    taken = sum(len(piece.text) for piece in pieces)
    assert 0.2 < taken / sum(part.size for part in parts) < 0.3
    heads = {piece.text[:2] for piece in pieces if piece.text}
    assert b"00" in heads
    assert 5 <= len(heads) <= 20
    assert sum(map(len, documents(pieces))) == taken
