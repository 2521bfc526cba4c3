import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardwise.corpus import Corpus, CorpusError, Loader, store
from tests.corpus.made import corpus_of, document


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return corpus_of(tmp_path, [document(number) for number in range(30)], shard_tokens=1000, held_out=0.2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_reads_cross_shards(corpus: Corpus) -> None:
    assert len(corpus.train.shards) >= 4
    whole = corpus.train.read(0, corpus.train.num_tokens)
    assert whole.dtype == np.int64
    for start, stop in [(0, 0), (999, 1001), (1000, 2000), (500, 3500), (corpus.train.num_tokens - 1,) * 2]:
        assert corpus.train.read(start, stop).tolist() == whole[start:stop].tolist()
        out = np.zeros(stop - start, np.int64)
        assert corpus.train.read(start, stop, out) is out
        assert out.tolist() == whole[start:stop].tolist()


def test_ends_are_those_after_the_start_up_to_the_stop(corpus: Corpus) -> None:
    ends = corpus.train.ends(0, corpus.train.num_tokens)
    assert ends[-1] == corpus.train.num_tokens
    first, second = ends[:2].tolist()
    assert corpus.train.ends(0, first - 1).tolist() == []
    assert corpus.train.ends(0, first).tolist() == [first]
    assert corpus.train.ends(first, second).tolist() == [second]


def test_few_maps_stay_open(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "OPEN_MAPS", 2)
    whole = corpus.train.read(0, corpus.train.num_tokens)
    assert len(corpus.train._maps) <= 2
    assert corpus.train.read(0, corpus.train.num_tokens).tolist() == whole.tolist()


@pytest.mark.parametrize("pattern", ["train-00001.tokens", "held_out-00000.tokens", "train.ends", "tokenizer.json"])
@pytest.mark.parametrize(
    ("harm", "how"), [(flip, "its checksum differs"), (truncate, "instead of"), (Path.unlink, "it is missing")]
)
def test_damage_is_one_line_that_names_the_file(
    corpus: Corpus, pattern: str, harm: Callable[[Path], None], how: str
) -> None:
    harm(corpus.folder / pattern)
    with pytest.raises(
        CorpusError, match=rf"{pattern} is damaged \(.*{how}.*\); delete .* and prepare again"
    ) as caught:
        Corpus.open(corpus.folder)
    assert "\n" not in str(caught.value)


def test_without_checksums_sizes_are_still_checked(corpus: Corpus) -> None:
    flip(corpus.folder / "train-00001.tokens")
    Corpus.open(corpus.folder, checksums=False)
    truncate(corpus.folder / "train-00001.tokens")
    with pytest.raises(CorpusError, match=r"train-00001\.tokens is damaged"):
        Corpus.open(corpus.folder, checksums=False)


def test_a_token_outside_the_vocabulary_is_one_line(corpus: Corpus) -> None:
    path = corpus.folder / "train-00000.tokens"
    path.write_bytes(b"\xff" * path.stat().st_size)
    loader = Loader(Corpus.open(corpus.folder, checksums=False), sequence=50, batch=1000)
    with pytest.raises(CorpusError, match="token id 65535 in the train split is outside the vocabulary of 257"):
        loader.batch(0)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "null", '{"checksum": 1}'])
def test_a_damaged_index_is_one_line(corpus: Corpus, content: str) -> None:
    (corpus.folder / "index.json").write_text(content)
    with pytest.raises(CorpusError, match=r"index\.json is damaged \(.*\); delete .* and prepare again"):
        Corpus.open(corpus.folder)


def test_an_edited_index_is_noticed(corpus: Corpus) -> None:
    path = corpus.folder / "index.json"
    path.write_text(path.read_text().replace('"dtype": "<u2"', '"dtype": "<u4"'))
    with pytest.raises(CorpusError, match=r"index\.json is damaged \(its checksum differs\)"):
        Corpus.open(corpus.folder)


def test_another_format_is_said(corpus: Corpus) -> None:
    path = corpus.folder / "index.json"
    index = json.loads(path.read_text())
    del index["checksum"]
    path.write_text(store.sealed(index | {"format": 99}))
    with pytest.raises(CorpusError, match="has format 99, this version reads 1; delete the folder and prepare again"):
        Corpus.open(corpus.folder)


def test_a_folder_that_is_no_corpus_is_said(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CorpusError, match=r"is not a prepared corpus \(it has no index.json\); prepare it first"):
            Corpus.open(folder)


def test_the_fingerprint_is_of_the_content(corpus: Corpus, tmp_path: Path) -> None:
    texts = [document(number) for number in range(30)]
    same = corpus_of(tmp_path / "again", texts, shard_tokens=1000, held_out=0.2)
    other = corpus_of(tmp_path / "other", [*texts, "more"], shard_tokens=1000, held_out=0.2)
    assert same.fingerprint == corpus.fingerprint != other.fingerprint
    assert same.folder != corpus.folder


def test_a_large_vocabulary_takes_wider_tokens(tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(70_000)} | {"</s>": 70_000}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    pre_tokenizer = {"type": "WhitespaceSplit"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": pre_tokenizer}))
    corpus = corpus_of(tmp_path, ["w69999 w3", "w65536"], tokenizer=str(path), held_out=0.0)
    assert corpus.train.dtype.itemsize == 4
    assert corpus.train.read(0, 5).tolist() == [69_999, 3, 70_000, 65_536, 70_000]
    assert corpus.vocabulary == 70_001


def test_an_unknown_split_is_said(corpus: Corpus) -> None:
    with pytest.raises(CorpusError, match="split 'test' is not known; give one of train, held_out"):
        corpus.split("test")
