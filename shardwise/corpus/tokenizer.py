"""Text <-> token ids: raw bytes, a BPE trained here, or an existing tokenizer.json.

Every tokenizer is kept as the two files Hugging Face knows, tokenizer.json and tokenizer_config.json, and has one
token that ends a document. Text never spells that token: special tokens inside a text are encoded as plain characters.
"""

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from shardwise.corpus.config import DataConfig
from shardwise.corpus.errors import CorpusError

END = "<|endoftext|>"
USUAL_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "[EOS]", "[SEP]")
FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"


class Tokenizer(Protocol):
    """What a tokenizer offers. `vocabulary`: one more than its largest id; `end`: the id that ends a document."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def end(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without an end."""
        ...

    def encode_batch(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of UTF-8 texts, joined, uint32, and how many each text has, int64 (number of texts,)."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; the end and ids outside the vocabulary give nothing."""
        ...

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Text as the ids come; a character of several tokens appears with its last one."""
        ...

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json."""
        ...


class Bytes:
    """One token per byte of UTF-8, ids 0 to 255; 256 ends a document."""

    vocabulary = 257
    end = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="replace"))

    def encode_batch(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        return np.frombuffer(b"".join(texts), np.uint8).astype(np.uint32), _lengths(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if 0 <= token < self.end).decode(errors="replace")

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in ids:
            if 0 <= token < self.end and (text := decoder.decode(bytes([token]))):
                yield text
        if text := decoder.decode(b"", final=True):
            yield text

    def save(self, folder: Path) -> None:
        _save(_bytes_as_library(), END, folder)


class Library:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, inner: tokenizers.Tokenizer, end_token: str) -> None:
        self.inner = inner
        self.end_token = end_token
        end = inner.token_to_id(end_token)
        assert end is not None
        self.end = end
        self.vocabulary: int = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        try:
            encoded = self.inner.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception
            raise cannot_encode(str(error)) from error
        ids = [np.array(one.ids, np.uint32) for one in encoded]
        return np.concatenate(ids) if ids else np.empty(0, np.uint32), _lengths(ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode([token for token in ids if 0 <= token < self.vocabulary]))

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        stream = decoders.DecodeStream(skip_special_tokens=True)
        waiting: list[int] = []
        for token in ids:
            if not 0 <= token < self.vocabulary:
                continue
            waiting.append(token)
            text = stream.step(self.inner, token)
            if text is not None:
                waiting.clear()
                yield text
        if waiting and (text := self.decode(waiting)):
            yield text

    def save(self, folder: Path) -> None:
        _save(self.inner, self.end_token, folder)


def load(config: DataConfig) -> Tokenizer:
    """The tokenizer a config names, 'bytes' or a tokenizer.json (or a folder with one).

    Raises CorpusError for a file that is missing or damaged, or has no token that ends a document.
    """
    if config.tokenizer == "bytes":
        return Bytes()
    if config.tokenizer == "bpe":
        raise CorpusError(
            "data.tokenizer = 'bpe' is trained when the corpus is prepared; take it from the prepared corpus"
        )
    path = tokenizer_file(config)
    return _read(path, config.end_token, f"data.tokenizer = {config.tokenizer!r}")


def from_folder(folder: str | Path) -> Tokenizer:
    """The tokenizer that `save` wrote into a folder."""
    return _read(Path(folder) / FILE, "", str(Path(folder) / FILE))


def train(texts: Iterable[list[str]], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of at most `vocabulary` ids (Sennrich et al. 2016; bytes as in GPT-2, Radford et al. 2019).

    `texts` gives lists of texts, which are read once. Less text than the vocabulary needs gives a smaller vocabulary.
    """
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(END, special=True, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return Library(inner, END)


def cannot_encode(reason: str) -> CorpusError:
    """The error for text that a tokenizer.json refuses, as one without a token for the unknown does."""
    return CorpusError(f"data.tokenizer cannot encode the text ({reason}); give a {FILE} that covers it, or 'bpe'")


def tokenizer_file(config: DataConfig) -> Path:
    """The file behind `data.tokenizer` when it is a path."""
    path = Path(config.tokenizer).expanduser()
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise CorpusError(f"data.tokenizer = {config.tokenizer!r}: no such file; give 'bytes', 'bpe' or a {FILE}")
    return path


def _read(path: Path, end_token: str, where: str) -> Tokenizer:
    try:
        inner = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorpusError(
            f"{where} is no tokenizer of the tokenizers library ({reason}); give another {FILE}"
        ) from None
    if _is_bytes(inner):
        return Bytes()
    end_token = end_token or _named_end(path.parent / CONFIG_FILE, where)
    candidates = [end_token] if end_token else list(USUAL_ENDS)
    for candidate in candidates:
        if inner.token_to_id(candidate) is not None:
            return Library(inner, candidate)
    raise CorpusError(
        f"{where} has no token {' or '.join(candidates)} to end a document with; set data.end_token to one it has"
    )


def _named_end(path: Path, where: str) -> str:
    if not path.is_file():
        return ""
    try:
        named = json.loads(path.read_text(encoding="utf-8")).get("eos_token") or ""
    except (ValueError, AttributeError, OSError):
        raise CorpusError(f"{where}: {path} beside it is damaged; mend it, or set data.end_token") from None
    return str(named["content"] if isinstance(named, dict) else named)


def _save(inner: tokenizers.Tokenizer, end_token: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(inner.to_str(pretty=False), encoding="utf-8")
    settings = {"eos_token": end_token, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _lengths(parts: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    return np.fromiter(map(len, parts), np.int64, len(parts))


def _byte_vocabulary() -> dict[str, int]:
    # GPT-2's spelling: a byte that prints is itself, the others are the characters from 256 on, in order.
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printing)
    spelled = {chr(byte): byte for byte in printing}
    return spelled | {chr(256 + place): byte for place, byte in enumerate(others)}


def _bytes_as_library() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return inner


def _is_bytes(inner: tokenizers.Tokenizer) -> bool:
    # A byte-level tokenizer of single bytes only is ours, whoever wrote the file: encoding it ourselves is quicker.
    return inner.get_vocab(with_added_tokens=True) == _byte_vocabulary() | {END: Bytes.end}
