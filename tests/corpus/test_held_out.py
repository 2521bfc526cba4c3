from collections import defaultdict

import pytest

from shardwise.corpus import CorpusError, DataConfig
from shardwise.corpus.held_out import assign, choose_bound, draw
from shardwise.corpus.reading import Piece


def whole(*texts: str) -> list[Piece]:
    return [Piece(text.encode(), True) for text in texts]


def many(number: int) -> list[Piece]:
    return whole(*(f"text {n}" for n in range(number)))


def test_about_the_asked_share_is_held_out_and_no_document_is_in_both() -> None:
    config = DataConfig(held_out=0.1)
    pieces = many(5000)
    bound = choose_bound(pieces, config)
    assert bound == 0.1
    sections = list(assign(pieces, bound, config))
    held_out = {section.text for section in sections if section.held_out}
    assert 420 < len(held_out) < 580
    assert all(section.ends for section in sections)
    assert [section.text for section in sections] == [piece.text for piece in pieces]


def test_the_split_depends_on_the_text_alone() -> None:
    config = DataConfig(held_out=0.3)
    forward = {s.text: s.held_out for s in assign(many(200), 0.3, config)}
    backward = {s.text: s.held_out for s in assign(reversed(many(200) + many(100)), 0.3, config)}
    assert forward == backward


def test_a_large_corpus_is_not_read_to_choose_the_bound() -> None:
    read = 0

    def pieces():
        nonlocal read
        for piece in many(100_000):
            read += 1
            yield piece

    assert choose_bound(pieces(), DataConfig(held_out=0.1)) == 0.1
    assert read < 200


@pytest.mark.parametrize("number", [2, 3, 10])
@pytest.mark.parametrize("held_out", [1e-9, 0.01, 0.5])
def test_a_small_corpus_has_both_splits(number: int, held_out: float) -> None:
    config = DataConfig(held_out=held_out)
    for shift in range(20):
        pieces = whole(*(f"{shift} {n}" for n in range(number)))
        sections = list(assign(pieces, choose_bound(pieces, config), config))
        assert {section.held_out for section in sections} == {True, False}


def test_nothing_is_held_out_when_none_is_asked_for() -> None:
    config = DataConfig(held_out=0.0)
    assert choose_bound(many(3), config) == 0.0
    assert not any(section.held_out for section in assign(many(300), 0.0, config))


def test_long_documents_part_by_sections_with_an_end_at_each_change() -> None:
    config = DataConfig(held_out=0.5)
    texts = [f"section {n}".encode() for n in range(60)]
    pieces = [Piece(text, False) for text in texts] + [Piece(b"", True)]
    runs: dict[bool, list[list[bytes]]] = defaultdict(lambda: [[]])
    for section in assign(pieces, 0.5, config):
        if section.text:
            runs[section.held_out][-1].append(section.text)
        if section.ends:
            runs[section.held_out].append([])
    for held_out, documents in runs.items():
        assert documents.pop() == []
        assert [text for run in documents for text in run] == [t for t in texts if (draw(t) < 0.5) == held_out]
        for run in documents:
            first = texts.index(run[0])
            assert run == texts[first : first + len(run)]
    assert len(runs[True]) > 5


def test_documents_stay_whole_when_sections_are_off() -> None:
    config = DataConfig(held_out=0.5, section=0)
    pieces = [piece for n in range(50) for piece in (Piece(f"a{n}".encode(), False), Piece(b"same", True))]
    sections = list(assign(pieces, choose_bound(pieces, config), config))
    pairs = list(zip(sections[::2], sections[1::2], strict=True))
    assert all(first.held_out == second.held_out for first, second in pairs)
    assert {first.held_out for first, _ in pairs} == {True, False}


@pytest.mark.parametrize("held_out", [0.0, 0.1])
def test_no_text_is_one_clear_line(held_out: float) -> None:
    with pytest.raises(CorpusError, match=r"data.source = 'python' holds no text .*; give files with text"):
        choose_bound([], DataConfig(held_out=held_out))


def test_one_document_cannot_be_in_both_splits() -> None:
    with pytest.raises(CorpusError, match=r"holds one document or section only.*; give more text, lower data.section"):
        choose_bound(whole("same", "same"), DataConfig())
