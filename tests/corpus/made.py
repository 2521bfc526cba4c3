"""Small corpora for the tests of this room."""

import random
from pathlib import Path
from typing import Any

from shardwise.corpus import Corpus, DataConfig, prepare

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "théta", "日本", "λ"]


def document(number: int, num_words: int = 40) -> str:
    """Text that differs from every other number's."""
    choose = random.Random(number)
    return f"document {number}\n" + " ".join(choose.choices(WORDS, k=num_words)) + "\n"


def write_documents(folder: Path, num_documents: int, num_words: int = 40) -> Path:
    """A folder of text files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_documents):
        (folder / f"{number:04d}.txt").write_text(document(number, num_words), encoding="utf-8")
    return folder


def config(tmp_path: Path, **values: Any) -> DataConfig:
    """A byte-level config whose cache is the test's own."""
    return DataConfig(**({"cache": str(tmp_path / "cache"), "tokenizer": "bytes"} | values))


def corpus_of(tmp_path: Path, texts: list[str], shard_tokens: int = 1 << 20, **values: Any) -> Corpus:
    """A prepared corpus with one document per text."""
    folder = tmp_path / "texts"
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:04d}.txt").write_text(text, encoding="utf-8")
    return prepare(config(tmp_path, source=str(folder), **values), shard_tokens=shard_tokens)
