import json
from pathlib import Path

import pytest
import tokenizers as library
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from shardwise.corpus import CorpusError, DataConfig, Tokenizer, tokenizer
from shardwise.corpus.reading import boundary
from tests.corpus.made import document

TEXT = "def größer(日本):\n    return '<|endoftext|>'\n\n\tλ 🙂"


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return tokenizer.train(([document(n)] for n in range(200)), 300)


@pytest.fixture(params=["bytes", "bpe"])
def each(request: pytest.FixtureRequest, bpe: Tokenizer) -> Tokenizer:
    return bpe if request.param == "bpe" else tokenizer.load(DataConfig(tokenizer="bytes"))


def word_level(folder: Path, *extra: str) -> Path:
    inner = library.Tokenizer(models.WordLevel({word: n for n, word in enumerate(["a", "b", *extra])}))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@given(text=st.text())
def test_any_text_comes_back(text: str, bpe: Tokenizer) -> None:
    for each in (bpe, tokenizer.Bytes()):
        ids = each.encode(text)
        assert each.decode(ids) == text
        assert "".join(each.decode_stream(ids)) == text
        assert all(0 <= token < each.vocabulary for token in ids)
        assert each.end not in ids


def test_text_never_spells_the_end(each: Tokenizer) -> None:
    assert each.end not in each.encode("<|endoftext|>")
    assert each.decode(each.encode("<|endoftext|>")) == "<|endoftext|>"


def test_the_end_and_ids_outside_the_vocabulary_decode_to_nothing(each: Tokenizer) -> None:
    ids = [*each.encode("ab"), each.end, 10**6, -1, *each.encode("c")]
    assert each.decode(ids) == "abc"
    assert "".join(each.decode_stream(ids)) == "abc"


def test_a_stream_gives_a_character_when_it_is_complete(each: Tokenizer) -> None:
    ids = each.encode("🙂!")
    assert len(ids) == 5
    assert list(each.decode_stream(ids)) == ["🙂", "!"]
    assert "".join(each.decode_stream(ids[:2])) == each.decode(ids[:2])


def test_a_batch_is_its_texts(each: Tokenizer) -> None:
    texts = [TEXT, "", "b", document(3)]
    ids, lengths = each.encode_batch([text.encode() for text in texts])
    assert ids.dtype == "uint32"
    assert lengths.tolist() == [len(each.encode(text)) for text in texts]
    assert ids.tolist() == [token for text in texts for token in each.encode(text)]
    assert each.encode_batch([])[0].size == 0


def test_saved_and_read_back_it_is_the_same(each: Tokenizer, tmp_path: Path) -> None:
    each.save(tmp_path)
    again = tokenizer.from_folder(tmp_path)
    assert type(again) is type(each)
    assert (again.vocabulary, again.end, again.encode(TEXT)) == (each.vocabulary, each.end, each.encode(TEXT))
    for source in (tmp_path, tmp_path / "tokenizer.json"):
        named = tokenizer.load(DataConfig(tokenizer=str(source)))
        assert named.encode(TEXT) == each.encode(TEXT)


def test_the_saved_files_serve_other_libraries(each: Tokenizer, tmp_path: Path) -> None:
    each.save(tmp_path)
    plain = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain.encode_special_tokens = True
    assert plain.encode(TEXT, add_special_tokens=False).ids == each.encode(TEXT)
    assert plain.decode(each.encode(TEXT)) == TEXT
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"


def test_training_is_deterministic_and_as_large_as_asked(bpe: Tokenizer) -> None:
    again = tokenizer.train([[document(n) for n in range(200)]], 300)
    assert bpe.vocabulary == again.vocabulary == 300
    assert again.encode(TEXT) == bpe.encode(TEXT)


def test_too_little_text_gives_a_smaller_vocabulary() -> None:
    assert tokenizer.train([["abab"]], 4096).vocabulary < 270


def test_a_cut_at_a_lone_newline_does_not_change_the_tokens(bpe: Tokenizer) -> None:
    text = "".join(document(n) for n in range(20)).encode()
    at = boundary(text)
    assert text[at - 1 : at] == b"\n"
    ids, _ = bpe.encode_batch([text[:at], text[at:]])
    assert ids.tolist() == bpe.encode(text.decode())


def test_the_end_is_found_by_its_usual_names_by_the_config_beside_it_or_by_key(tmp_path: Path) -> None:
    path = word_level(tmp_path, "</s>", "stop", "halt")
    assert tokenizer.load(DataConfig(tokenizer=str(path))).end == 2
    assert tokenizer.load(DataConfig(tokenizer=str(path), end_token="halt")).end == 4
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "stop"}}')
    assert tokenizer.load(DataConfig(tokenizer=str(path))).end == 3
    assert tokenizer.load(DataConfig(tokenizer=str(path), end_token="halt")).end == 4


def test_truncation_in_a_tokenizer_file_does_not_cut_text(tmp_path: Path, bpe: Tokenizer) -> None:
    bpe.save(tmp_path)
    inner = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer.from_folder(tmp_path).encode(TEXT) == bpe.encode(TEXT)


def test_faults_of_a_tokenizer_file_are_one_line_with_the_mend(tmp_path: Path) -> None:
    def message(**values: str) -> str:
        with pytest.raises(CorpusError) as caught:
            tokenizer.load(DataConfig(**({"tokenizer": str(tmp_path / "tokenizer.json")} | values)))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no such file; give 'bytes', 'bpe' or a tokenizer.json" in message()
    assert "trained when the corpus is prepared" in message(tokenizer="bpe")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is no tokenizer of the tokenizers library" in message()
    word_level(tmp_path)
    assert "to end a document with; set data.end_token" in message()
    assert "has no token halt to end" in message(end_token="halt")
    (tmp_path / "tokenizer_config.json").write_text("[")
    assert "tokenizer_config.json beside it is damaged" in message()


def test_text_a_tokenizer_file_cannot_encode_is_said(tmp_path: Path) -> None:
    named = tokenizer.load(DataConfig(tokenizer=str(word_level(tmp_path, "</s>"))))
    assert named.encode_batch([b"a b"])[0].tolist() == [0, 1]
    with pytest.raises(CorpusError, match=r"data.tokenizer cannot encode the text \(.*UNK.*\); give"):
        named.encode_batch([b"a c"])
