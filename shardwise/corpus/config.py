"""`[data]`: where text comes from and how it becomes batches."""

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

HUGGINGFACE = "huggingface:"
SMALLEST_SECTION = 256
SMALLEST_BPE = 257  # 256 bytes and the end of a document


def _default_cache() -> str:
    return str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "shardwise")


class DataConfig(BaseModel):
    """The `[data]` section. Sizes in bytes are of UTF-8 text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str | tuple[str, ...] = Field(
        default="python",
        description="'python' (the interpreter's own standard library), files, folders or globs of text or JSONL "
        "(also .gz, .xz, .bz2), or 'huggingface:NAME'; a list joins several",
    )
    format: Literal["auto", "text", "jsonl"] = Field(
        default="auto", description="How files are read; 'auto' takes .jsonl and .ndjson as JSONL, the rest as text"
    )
    field: str = Field(default="text", min_length=1, description="The field of a JSONL or Hugging Face row")
    separator: str = Field(
        default="", description="What parts documents inside a text file; '' = one file, one document"
    )
    undecodable: Literal["error", "replace", "skip"] = Field(
        default="error",
        description="Text that is not UTF-8: stop, decode with U+FFFD, or leave the file (JSONL: the row) out",
    )
    subset: str = Field(default="", description="Hugging Face: the configuration's name")
    split: str = Field(default="train", description="Hugging Face: the split to read")
    revision: str = Field(default="", description="Hugging Face: the branch, tag or commit of the dataset")
    files: str | tuple[str, ...] = Field(
        default=(), description="Hugging Face: data files for a builder such as 'huggingface:parquet'"
    )
    streaming: bool = Field(default=True, description="Hugging Face: read as a stream instead of downloading first")
    limit_bytes: int = Field(default=0, ge=0, description="Read this much text only; 0 = all")

    tokenizer: str = Field(
        default="bpe", min_length=1, description="'bytes', 'bpe' (trained on the train split), or a tokenizer.json"
    )
    vocabulary: int = Field(default=4096, ge=SMALLEST_BPE, description="Size of the trained BPE vocabulary")
    tokenizer_bytes: int = Field(
        default=64 << 20, ge=1, description="The BPE is trained on about this much text, drawn from every file"
    )
    end_token: str = Field(
        default="", description="The token of a tokenizer.json that ends a document; '' = found by its usual names"
    )

    held_out: float = Field(default=0.02, ge=0.0, le=0.5, description="Share of the documents kept for evaluation")
    section: int = Field(
        default=64 << 10,
        ge=0,
        description="Longer documents are held out by sections of this many bytes; 0 = always whole",
    )

    sequence: int = Field(default=128, ge=1, description="Tokens of one sample")
    batch: int = Field(default=8, ge=1, description="Samples of one step over all ranks")
    seed: int = Field(default=0, ge=0, description="Order of the samples")
    document_mask: bool = Field(
        default=False, description="Give document numbers and positions, so attention stays inside a document"
    )

    cache: str = Field(default_factory=_default_cache, description="Where prepared corpora are kept")
    processes: int = Field(default=0, ge=0, description="Processes that tokenize; 0 = one per core")
    prefetch: int = Field(default=2, ge=0, description="Batches read ahead in a thread; 0 = none")
    checksums: bool = Field(
        default=True, description="Check every shard's checksum when a corpus is opened (about 1 s per GB)"
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources as a tuple."""
        return (self.source,) if isinstance(self.source, str) else self.source

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not self.sources or not all(self.sources):
            raise ValueError("data.source is empty; give 'python', a path, a glob or 'huggingface:NAME'")
        if 0 < self.section < SMALLEST_SECTION:
            raise ValueError(
                f"data.section = {self.section} is too small; give 0 (documents stay whole) or >= {SMALLEST_SECTION}"
            )
        if self.end_token and self.tokenizer in ("bytes", "bpe"):
            raise ValueError(
                f"data.end_token is for a tokenizer.json, and {self.tokenizer!r} has an end of its own; remove it"
            )
        if not any(source.startswith(HUGGINGFACE) for source in self.sources):
            for key in ("subset", "split", "revision", "files", "streaming"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(
                        f"data.{key} is for a source 'huggingface:NAME', not {self.source!r}; remove data.{key}"
                    )
        return self
