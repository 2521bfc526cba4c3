import os
from pathlib import Path

import pytest

from shardwise.corpus import CorpusError, DataConfig, sources
from shardwise.corpus.reading import Meter
from tests.corpus.made import write_documents


def texts(**values: object) -> list[str]:
    config = DataConfig(**values)
    found, now = [], b""
    for piece in sources.read(sources.resolve(config), config, Meter()):
        now += piece.text
        if piece.last:
            found.append(now.decode())
            now = b""
    assert not now
    return found


def identity(**values: object) -> list[str]:
    return [source.identity for source in sources.resolve(DataConfig(**values))]


def test_the_standard_library_is_there_without_a_download() -> None:
    config = DataConfig(limit_bytes=2_000_000)
    found = sources.resolve(config)
    assert sources.total_bytes(found) > 4_000_000
    pieces = list(sources.read(found, config, Meter()))
    assert sum(len(piece.text) for piece in pieces) == 2_000_000
    text = b"".join(piece.text for piece in pieces)
    assert text.count(b"def ") > 1000
    assert b"unittest.main()" not in text[-100:]


def test_files_folders_globs_and_lists(tmp_path: Path) -> None:
    folder = write_documents(tmp_path / "data" / "deep", 3)
    (folder / ".hidden").write_text("not this")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "module.pyc").write_text("nor this")
    (folder / "note.md").write_text("a note")
    every = texts(source=str(tmp_path / "data"))
    assert len(every) == 4
    assert "a note" in every
    assert texts(source=str(folder / "0001.txt")) == [every[1]]
    assert texts(source=str(tmp_path / "**" / "*.txt")) == every[:3]
    assert texts(source=(str(folder / "note.md"), str(folder / "0000.txt"))) == ["a note", every[0]]


def test_documents_of_white_space_are_no_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one|  \n|two||three|")
    assert texts(source=str(tmp_path), separator="|") == ["one", "two", "three"]


def test_blank_text_inside_a_document_stays(tmp_path: Path) -> None:
    text = "head" + " " * 1000 + "tail"
    (tmp_path / "a.txt").write_text(text)
    assert texts(source=str(tmp_path), section=256) == [text]


@pytest.mark.parametrize("limit", [1, 5, 6, 7, 11, 12, 500])
def test_a_limit_reads_so_many_bytes_and_ends_its_last_document(tmp_path: Path, limit: int) -> None:
    (tmp_path / "a.txt").write_text("abcλ")
    (tmp_path / "b.txt").write_text("efgλij")
    found = "".join(texts(source=str(tmp_path), limit_bytes=limit)).encode()
    whole = "abcλefgλij".encode()
    assert whole.startswith(found)
    assert min(limit, len(whole)) - 1 <= len(found) <= limit


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing-here.txt", r"data.source = 'nothing-here.txt': no such file or folder.*; give a path"),
        ("*.nothing", r"no file matches it as a glob"),
        ("pithon", r"give a path, a glob, 'python' or 'huggingface:NAME'"),
    ],
)
def test_a_source_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        texts(source=name)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="the folder holds no files; give a folder or glob that does"):
        texts(source=str(tmp_path))


def test_a_missing_standard_library_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(CorpusError, match="holds no source of the standard library; give files or a folder instead"):
        texts()


def test_identity_changes_with_names_sizes_and_times(tmp_path: Path) -> None:
    write_documents(tmp_path, 2)
    before = identity(source=str(tmp_path))
    assert identity(source=str(tmp_path)) == before
    os.utime(tmp_path / "0000.txt", ns=(1, 1))
    touched = identity(source=str(tmp_path))
    (tmp_path / "0000.txt").rename(tmp_path / "0009.txt")
    renamed = identity(source=str(tmp_path))
    assert len({*before, *touched, *renamed}) == 3
