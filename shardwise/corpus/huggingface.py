"""Rows of a Hugging Face dataset, by name or from local files, read as a stream."""

import glob
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.corpus.config import DataConfig
from shardwise.corpus.errors import CorpusError
from shardwise.corpus.reading import Meter, Part, Piece, row_field, row_pieces

SAVED = ("state.json", "dataset_dict.json")  # what `save_to_disk` leaves in a folder


def read_rows(name: str, config: DataConfig, meter: Meter) -> Iterator[Piece]:
    """Pieces of every row's `data.field`, in the dataset's order."""
    rows = iter(_load(name, config))
    number = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # the library, its file systems and its parsers raise errors of many kinds
            raise _failed(name, error) from error
        number += 1
        where = f"huggingface:{name} row {number}"
        yield from row_pieces(row_field(row, where, config), where, config, meter)


def local_parts(name: str, config: DataConfig) -> list[Part]:
    """The local files the dataset is read from, as far as they can be seen without loading it."""
    patterns = (config.files,) if isinstance(config.files, str) else config.files
    paths = {Path(path) for pattern in patterns for path in glob.glob(pattern, recursive=True)}
    if Path(name).is_dir():
        paths |= set(Path(name).rglob("*"))
    return [Part(str(path), path, path.stat().st_size) for path in sorted(paths) if path.is_file()]


def _load(name: str, config: DataConfig) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise CorpusError(
            f"data.source = 'huggingface:{name}' needs the package datasets; pip install 'shardwise[hf]'"
        ) from None
    try:
        if any((Path(name) / saved).is_file() for saved in SAVED):
            loaded = datasets.load_from_disk(name)
            return loaded[config.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        files = [config.files] if isinstance(config.files, str) else list(config.files)
        return datasets.load_dataset(
            name,
            config.subset or None,
            split=config.split,
            revision=config.revision or None,
            data_files=files or None,
            streaming=config.streaming,
        )
    except Exception as error:
        raise _failed(name, error) from error


def _failed(name: str, error: Exception) -> CorpusError:
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    return CorpusError(
        f"data.source = 'huggingface:{name}': {reason}; check the name, data.subset, data.split and data.files"
    )
