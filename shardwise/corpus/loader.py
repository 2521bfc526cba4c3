"""A prepared split -> batches of token ids, as a pure function of the position."""

import queue
import threading
from collections.abc import Iterator

import numpy as np
import torch

from shardwise.corpus.errors import CorpusError
from shardwise.corpus.shuffle import derive, permute
from shardwise.corpus.store import Corpus

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
IGNORED = -100


class Loader:
    """Batches of one data rank.

    The split is one stream of tokens cut into samples of `sequence` tokens; a position counts samples of the endless
    global order. Each epoch passes through all samples once, in a random order of its own that depends on `seed` and
    the epoch alone, not on the number of ranks or the batch: a run resumes at its position under any others. Later
    epochs cut the stream at other places. Rank r of R reads rows r*B//R to (r+1)*B//R of a batch of B.

    The held-out split is cut always the same, to its last token: targets beyond it are -100, so each token counts once.

    With `document_mask`, `documents` numbers the documents of a sample from 0 and `positions` starts again at 0 in
    each. A document's end token, as an input, belongs to the next document: it is what that document's first token is
    predicted from. So every target counts, with the mask as without.
    """

    def __init__(
        self,
        corpus: Corpus,
        split: str = "train",
        sequence: int = 128,
        batch: int = 8,
        rank: int = 0,
        num_ranks: int = 1,
        seed: int = 0,
        document_mask: bool = False,
    ) -> None:
        """Arguments: `sequence` tokens per sample; `batch` samples per step over all `num_ranks` data ranks.

        Raises CorpusError where the split has no text, or the train split is shorter than one sample.
        """
        assert 0 <= rank < num_ranks
        assert min(sequence, batch) > 0
        self.tokens = corpus.split(split)
        self.sequence, self.batch_size = sequence, batch
        self.rank, self.num_ranks = rank, num_ranks
        self.seed, self.document_mask = seed, document_mask
        self._vocabulary, self._end = corpus.vocabulary, corpus.end
        self._whole = split == "held_out"
        num_targets = self.tokens.num_tokens - 1
        if self._whole and num_targets < 1:
            raise CorpusError(f"the corpus {corpus.folder} holds nothing out; set data.held_out above 0")
        if not self._whole and num_targets < sequence:
            raise CorpusError(
                f"the train split of {corpus.folder} has {self.tokens.num_tokens} tokens, fewer than one sequence of "
                f"{sequence} and the token after it; set data.sequence <= {max(1, num_targets)}, or give more text"
            )
        self.num_samples = -(-num_targets // sequence) if self._whole else num_targets // sequence

    @property
    def num_batches(self) -> int:
        """Batches of one pass, the last one smaller where the samples do not divide."""
        return -(-self.num_samples // self.batch_size)

    def batch(self, step: int) -> Batch:
        """This rank's rows of the batch of a step, counted from 0, when every step has the same batch."""
        return self.at(step * self.batch_size)

    def at(self, position: int, batch: int | None = None) -> Batch:
        """This rank's rows of the global batch that begins at a position.

        Arguments: `position`, samples consumed before; `batch`, its samples over all ranks where not `batch_size`.
        Returns: ({"tokens": (B, S), with document_mask also "positions" and "documents": (B, S)}, targets (B, S)), all
        int64; B is 0 on a rank that a small batch leaves without rows.
        """
        batch = self.batch_size if batch is None else batch
        first = position + self.rank * batch // self.num_ranks
        last = position + (self.rank + 1) * batch // self.num_ranks
        starts = self.starts(np.arange(first, last))
        window = np.full((starts.size, self.sequence + 1), self._end, np.int64)  # (B, S + 1)
        for row, start in enumerate(starts.tolist()):
            self._read(start, window[row])
        if window.size and (largest := int(window.max())) >= self._vocabulary:
            raise CorpusError(
                f"token id {largest} in the {self.tokens.name} split is outside the vocabulary of {self._vocabulary}, "
                "so a shard is damaged; set data.checksums = true to see which"
            )
        targets = window[:, 1:].copy()
        if self._whole:
            targets[starts[:, None] + np.arange(1, self.sequence + 1) >= self.tokens.num_tokens] = IGNORED
        inputs = {"tokens": torch.from_numpy(window[:, :-1].copy())}
        if self.document_mask:
            inputs["positions"], inputs["documents"] = map(torch.from_numpy, self._documents(starts))
        return inputs, torch.from_numpy(targets)

    def once(self, num_batches: int | None = None) -> Iterator[Batch]:
        """Each sample once, or the first `num_batches` batches of that: always the same ones, a fair draw of the split.

        Every rank gets the same number of batches; in a last, partial one some may have no rows.
        """
        for step in range(self.num_batches if num_batches is None else min(num_batches, self.num_batches)):
            position = step * self.batch_size
            yield self.at(position, min(self.batch_size, self.num_samples - position))

    def stream(self, position: int = 0, prefetch: int = 2) -> Iterator[Batch]:
        """The endless batches from a position on, read `prefetch` ahead in a thread, pinned for an accelerator."""
        if prefetch == 0:
            while True:
                yield _pinned(self.at(position))
                position += self.batch_size
        ready: queue.Queue[Batch | Exception] = queue.Queue(prefetch)
        stop = threading.Event()
        thread = threading.Thread(target=self._fill, args=(position, ready, stop), name="prefetch", daemon=True)
        thread.start()
        try:
            while True:
                item = ready.get()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            stop.set()
            while not ready.empty():  # makes room for a thread that waits to put
                ready.get_nowait()
            thread.join()

    def starts(self, positions: np.ndarray) -> np.ndarray:
        """Where in the stream the samples of these positions begin, int64 (N,)."""
        starts = np.empty_like(positions)
        seed = 0 if self._whole else self.seed
        epochs, samples = np.divmod(positions, self.num_samples)
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            order = permute(samples[now], self.num_samples, derive(seed, epoch))
            shift = 0 if self._whole or epoch == 0 else derive(seed, epoch, 1) % self.tokens.num_tokens
            starts[now] = (order * self.sequence + shift) % self.tokens.num_tokens
        return starts

    def _fill(self, position: int, ready: "queue.Queue[Batch | Exception]", stop: threading.Event) -> None:
        while not stop.is_set():
            item: Batch | Exception
            try:
                item = _pinned(self.at(position))
            except Exception as error:
                item = error
            ready.put(item)
            if isinstance(item, Exception):
                return
            position += self.batch_size

    def _read(self, start: int, out: np.ndarray) -> None:
        """Fills `out` from a place on; at the end of the stream, train goes on at its beginning and held-out stops."""
        stop = min(start + out.size, self.tokens.num_tokens)
        self.tokens.read(start, stop, out[: stop - start])
        rest = out.size - (stop - start)
        if rest and not self._whole:
            self.tokens.read(0, rest, out[stop - start :])

    def _documents(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions and document numbers, each (B, S), of samples that begin at `starts` (B,)."""
        begins = np.zeros((starts.size, self.sequence), np.int64)
        for row, start in enumerate(starts.tolist()):
            stop = min(start + self.sequence, self.tokens.num_tokens)
            begins[row, self.tokens.ends(start, stop) - 1 - start] = 1
            rest = start + self.sequence - stop
            if rest and not self._whole:
                begins[row, self.tokens.ends(0, rest) - 1 + stop - start] = 1
        begins[:, :1] = 0  # the sample's first document is number 0 even where it begins with its end token
        documents = begins.cumsum(axis=1)
        places = np.arange(self.sequence)
        positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
        return positions, documents


def _pinned(batch: Batch) -> Batch:
    if not torch.accelerator.is_available():
        return batch
    inputs, targets = batch
    return {name: tensor.pin_memory() for name, tensor in inputs.items()}, targets.pin_memory()
