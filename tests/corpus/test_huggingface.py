import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.corpus import CorpusError, cache_folder, prepare
from tests.corpus.made import config, document

datasets = pytest.importorskip("datasets")
TEXTS = [document(number) for number in range(12)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"body": text, "id": n}) + "\n" for n, text in enumerate(TEXTS)))
    return path


def train_text(tmp_path: Path, **values: Any) -> str:
    corpus = prepare(config(tmp_path, held_out=0.0, field="body", **values))
    return str(corpus.tokenizer.decode(corpus.train.read(0, corpus.train.num_tokens).tolist()))


def test_a_builder_with_local_files_is_streamed(tmp_path: Path, rows: Path) -> None:
    assert train_text(tmp_path, source="huggingface:json", files=str(rows)) == "".join(TEXTS)


def test_a_split_of_a_saved_dataset(tmp_path: Path) -> None:
    parts = {"train": TEXTS[:8], "test": TEXTS[8:]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_dict({"body": texts}) for name, texts in parts.items()})
    saved.save_to_disk(tmp_path / "saved")
    source = f"huggingface:{tmp_path / 'saved'}"
    assert train_text(tmp_path, source=source) == "".join(TEXTS[:8])
    assert train_text(tmp_path, source=source, split="test") == "".join(TEXTS[8:])
    with pytest.raises(CorpusError, match="check the name, data.subset, data.split and data.files"):
        train_text(tmp_path, source=source, split="dev")


def test_a_folder_of_data_files(tmp_path: Path, rows: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    rows.rename(folder / "train.jsonl")
    assert train_text(tmp_path, source=f"huggingface:{folder}") == "".join(TEXTS)


def test_changed_files_are_another_corpus(tmp_path: Path, rows: Path) -> None:
    settings = config(tmp_path, source="huggingface:json", files=str(rows))
    before = cache_folder(settings)
    assert cache_folder(settings) == before
    rows.write_text(rows.read_text() + '{"body": "more"}\n')
    assert cache_folder(settings) != before


def test_faults_are_one_line_with_the_mend(tmp_path: Path, rows: Path) -> None:
    def message(**values: Any) -> str:
        with pytest.raises(CorpusError) as caught:
            prepare(config(tmp_path, source="huggingface:json", **values))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no field 'text'; set data.field to one of: body, id" in message(files=str(rows))
    assert "the field 'id' holds int" in message(files=str(rows), field="id")
    assert "check the name" in message(files=str(tmp_path / "missing.jsonl"))
    rows.write_text("{{{\n")
    assert "check the name" in message(files=str(rows))


def test_a_missing_package_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(CorpusError, match=r"needs the package datasets; pip install 'shardwise\[hf\]'"):
        prepare(config(tmp_path, source="huggingface:json"))
