import gzip
import io
import json
import lzma
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from shardwise.corpus import Corpus, CorpusError, PrepareProgress, cache_folder, encoding, prepare, progress_bar
from shardwise.corpus.held_out import draw
from tests.corpus.made import config, corpus_of, document, write_documents


def run_script(function: str, *arguments: object) -> str:
    """Runs a function of `tests.corpus.scripts` in a process of its own; its output."""
    code = f"import sys; from tests.corpus import scripts; scripts.{function}(*sys.argv[1:])"
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout


def split_texts(corpus: Corpus, name: str) -> list[str]:
    tokens = corpus.split(name)
    ids = tokens.read(0, tokens.num_tokens)
    ends = tokens.ends(0, tokens.num_tokens)
    assert (ids[ends - 1] == corpus.end).all()
    assert (ids == corpus.end).sum() == ends.size == tokens.num_documents
    return [corpus.tokenizer.decode(part.tolist()) for part in np.split(ids, ends)[:-1]]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("shard_tokens", [100, 1 << 20])
def test_every_document_is_in_its_split_whole_and_once(tmp_path: Path, tokenizer: str, shard_tokens: int) -> None:
    texts = [document(number) for number in range(60)]
    corpus = corpus_of(tmp_path, texts, shard_tokens, tokenizer=tokenizer, vocabulary=300, held_out=0.2)
    held_out = [text for text in texts if draw(text.encode()) < 0.2]
    assert 2 < len(held_out) < 30
    assert split_texts(corpus, "held_out") == held_out
    assert split_texts(corpus, "train") == [text for text in texts if text not in held_out]
    assert corpus.held_out.num_bytes == sum(len(text.encode()) for text in held_out)
    assert corpus.train.bytes_per_token == corpus.train.num_bytes / corpus.train.num_tokens
    assert (corpus.train.num_tokens > shard_tokens) == (len(corpus.train.shards) > 1)


def test_the_tokenizer_is_trained_on_the_train_split_alone(tmp_path: Path) -> None:
    texts = [f"{chr(0x4E00 + number) * 2}" * 50 for number in range(40)]
    corpus = corpus_of(tmp_path, texts, tokenizer="bpe", vocabulary=300, held_out=0.3)
    merged = {corpus.tokenizer.decode([token]) for token in range(corpus.vocabulary)}
    held_out = {text[0] for text in texts if draw(text.encode()) < 0.3}
    train = {text[0] for text in texts} - held_out
    assert any(character in token for token in merged for character in train)
    assert not any(character in token for token in merged for character in held_out)


def test_the_tokenizer_reads_no_more_than_it_may(tmp_path: Path) -> None:
    write_documents(tmp_path / "data", 50)
    reports: list[PrepareProgress] = []
    settings = config(tmp_path, source=str(tmp_path / "data"), tokenizer="bpe", vocabulary=300, tokenizer_bytes=2000)
    corpus = prepare(settings, progress=reports.append)
    assert corpus.vocabulary == 300
    assert {report.total for report in reports if report.phase == "training the tokenizer"} == {2000}


def test_the_tokens_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data", 80, num_words=1500)
    (data / "end.txt").write_text("text that spells <|endoftext|> does not end")
    made = []
    for processes in (1, 3):
        values = {"tokenizer": "bpe", "vocabulary": 400, "section": 2048}
        settings = config(tmp_path, source=str(tmp_path / "data"), processes=processes, **values)
        made.append(prepare(settings, tmp_path / str(processes)))
    assert made[0].fingerprint == made[1].fingerprint
    assert made[0].index["files"] == made[1].index["files"]


def test_a_finished_corpus_is_reused_until_settings_or_files_change(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data", 20)
    settings = config(tmp_path, source=str(data))
    first = prepare(settings)
    assert first.folder == cache_folder(settings)

    seen = {first.folder}

    def fresh(**values: object) -> bool:
        reports: list[PrepareProgress] = []
        corpus = prepare(config(tmp_path, source=str(data), **values), progress=reports.append)
        assert bool(reports) == (corpus.folder not in seen)
        seen.add(corpus.folder)
        return bool(reports)

    assert not fresh()
    assert not fresh(seed=3, batch=4, sequence=9, document_mask=True, processes=2, vocabulary=999)
    assert fresh(held_out=0.3)
    assert not fresh(held_out=0.3)
    os.utime(data / "0003.txt", ns=(5, 5))
    assert fresh()
    assert fresh(tokenizer="bpe", vocabulary=300)
    assert fresh(tokenizer="bpe", vocabulary=301)


def test_an_edited_tokenizer_file_is_another_corpus(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data", 20)
    trained = prepare(config(tmp_path, source=str(data), tokenizer="bpe", vocabulary=280)).folder / "tokenizer.json"
    path = tmp_path / "tokenizer.json"
    path.write_text(trained.read_text())
    settings = config(tmp_path, source=str(data), tokenizer=str(path))
    first = cache_folder(settings)
    assert prepare(settings).tokenizer.vocabulary == 280
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2))
    assert cache_folder(settings) != first


def test_another_corpus_or_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data", 20)
    folder = tmp_path / "here"
    prepare(config(tmp_path, source=str(data)), folder)
    with pytest.raises(CorpusError, match=r"prepared with other settings \(data.held_out\); give another folder"):
        prepare(config(tmp_path, source=str(data), held_out=0.3), folder)
    os.utime(data / "0003.txt", ns=(5, 5))
    with pytest.raises(CorpusError, match=r"other settings \(the source's files\)"):
        prepare(config(tmp_path, source=str(data)), folder)
    with pytest.raises(CorpusError, match="exists and is not a prepared corpus; give another folder, or empty it"):
        prepare(config(tmp_path, source=str(data)), data)
    (tmp_path / "empty").mkdir()
    assert prepare(config(tmp_path, source=str(data)), tmp_path / "empty").folder == tmp_path / "empty"


def test_killed_at_any_moment_nothing_is_taken_for_finished(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data", 30, num_words=3000)
    lines = run_script("killed_everywhere", data, tmp_path / "cache").split()
    assert lines[-1] == "same"
    assert int(lines[0]) >= 10  # moments
    assert 0 < int(lines[1]) < int(lines[0])  # kills that left nothing


def test_of_several_that_start_at_once_one_prepares(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data", 40, num_words=3000)
    lines = run_script("at_once", data, tmp_path / "cache", 3).split()
    assert lines == ["prepared", "1", "fingerprints", "1"]


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    growth = int(run_script("peak_growth", tmp_path, 4, 40))
    assert growth < 8_000  # KB, for 36 MB more of text


def test_workers_that_die_or_fail_end_the_preparation_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_documents(tmp_path / "data", 20, num_words=1000)
    settings = config(tmp_path, source=str(data), tokenizer="bpe", vocabulary=300, processes=2)
    start = encoding._start

    def start_and_kill(file: Path) -> "subprocess.Popen[bytes]":
        worker = start(file)
        os.kill(worker.pid, signal.SIGKILL)
        return worker

    monkeypatch.setattr(encoding, "_start", start_and_kill)
    with pytest.raises(CorpusError, match=r"ended by itself .*; lower data.processes"):
        prepare(settings)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    monkeypatch.undo()
    tokenizer = tmp_path / "tokenizer.json"
    words = '{"a": 0, "</s>": 1}'
    model = f'{{"type": "WordLevel", "vocab": {words}, "unk_token": "?"}}'
    tokenizer.write_text(f'{{"version": "1.0", "added_tokens": [], "model": {model}}}')
    with pytest.raises(CorpusError, match="data.tokenizer cannot encode the text"):
        prepare(settings.model_copy(update={"tokenizer": str(tokenizer)}))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_fault_deep_in_the_text_stops_the_preparation_and_leaves_nothing(tmp_path: Path, tokenizer: str) -> None:
    data = write_documents(tmp_path / "data", 200, num_words=400)
    (data / "0190.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(CorpusError, match=r"0190\.txt is not UTF-8"):
        prepare(config(tmp_path, source=str(data), tokenizer=tokenizer, vocabulary=300))
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_documents(tmp_path / "data", 20)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CorpusError, match="No space left on device; make room, or set data.cache"):
        prepare(config(tmp_path, source=str(data)))
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data", 5)
    (tmp_path / "file").write_text("")
    with pytest.raises(CorpusError, match="cannot write .*; make room, or set data.cache"):
        prepare(config(tmp_path, source=str(data), cache=str(tmp_path / "file" / "cache")))


def test_an_empty_corpus_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("  \n")
    with pytest.raises(CorpusError, match=r"data.source = '.*' holds no text"):
        prepare(config(tmp_path, source=str(tmp_path / "data")))


def test_what_was_skipped_is_counted(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data", 5)
    (data / "bad.txt").write_bytes(b"\xff")
    assert prepare(config(tmp_path, source=str(data), undecodable="skip")).index["skipped"] == 1


def test_a_model_with_too_few_ids_is_refused_and_one_with_more_is_not(tmp_path: Path) -> None:
    settings = config(tmp_path, source=str(write_documents(tmp_path / "data", 5)))
    with pytest.raises(CorpusError, match="model.vocabulary = 256 leaves out .*; set model.vocabulary = 0"):
        prepare(settings, vocabulary=256)
    for vocabulary in (0, 257, 512):
        prepare(settings, vocabulary=vocabulary)


def test_compressors_measure_the_held_out_text(tmp_path: Path) -> None:
    texts = [document(number, 200) for number in range(40)]
    corpus = corpus_of(tmp_path, texts, held_out=0.3)
    text = "".join(split_texts(corpus, "held_out")).encode()
    expected = {"gzip": len(gzip.compress(text, 9)), "xz": len(lzma.compress(text))}
    assert corpus.held_out.compression == pytest.approx({k: 8 * v / len(text) for k, v in expected.items()}, rel=1e-3)
    assert corpus.train.compression == {}
    assert "gzip" in corpus.summary()


def test_nothing_held_out_when_none_is_asked_for(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [document(1)], held_out=0.0)
    assert corpus.held_out.num_tokens == corpus.held_out.num_documents == 0
    assert corpus.held_out.compression == {}
    assert corpus.summary().endswith("nothing held out")


def test_progress_runs_from_nothing_to_the_whole(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data", 50, num_words=2000)
    reports: list[PrepareProgress] = []
    prepare(config(tmp_path, source=str(data), tokenizer="bpe", vocabulary=300), progress=reports.append)
    total = sum(path.stat().st_size for path in data.iterdir())
    for phase in ("training the tokenizer", "tokenizing"):
        done = [report.done for report in reports if report.phase == phase]
        assert done[0] == 0
        assert done == sorted(done)
        assert len(done) >= 3
    assert reports[-1] == PrepareProgress("tokenizing", total, total)


def test_the_bar_shows_each_phase(tmp_path: Path) -> None:
    screen = io.StringIO()
    with progress_bar(Console(file=screen, force_terminal=True, width=120)) as progress:
        prepare(config(tmp_path, source=str(write_documents(tmp_path / "data", 9))), progress=progress)
    assert "tokenizing" in screen.getvalue()
