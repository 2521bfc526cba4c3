"""Text -> tokens -> batches, resumable to the sample.

`prepare(config)` makes or finds a prepared corpus, `Loader` reads batches from it.
"""

from shardwise.corpus import tokenizer
from shardwise.corpus.config import DataConfig
from shardwise.corpus.errors import CorpusError
from shardwise.corpus.loader import Batch, Loader
from shardwise.corpus.preparation import cache_folder, prepare
from shardwise.corpus.progress import PrepareProgress, ProgressCallback, progress_bar
from shardwise.corpus.store import Corpus, Tokens
from shardwise.corpus.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "Corpus",
    "CorpusError",
    "DataConfig",
    "Loader",
    "PrepareProgress",
    "ProgressCallback",
    "Tokenizer",
    "Tokens",
    "cache_folder",
    "prepare",
    "progress_bar",
    "tokenizer",
]
