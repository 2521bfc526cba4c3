import math
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.corpus import Batch, Corpus, CorpusError, Loader
from shardwise.corpus.loader import IGNORED
from tests import emulator
from tests.corpus.made import corpus_of, document


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    texts = [document(number, num_words=number % 7) for number in range(60)]
    return corpus_of(tmp_path_factory.mktemp("corpus"), texts, shard_tokens=500, held_out=0.2)


def rows(batch: Batch) -> list[list[int]]:
    """Each row with its next token."""
    inputs, targets = batch
    assert inputs["tokens"].dtype == targets.dtype == torch.int64
    assert (inputs["tokens"][:, 1:] == targets[:, :-1]).logical_or(targets[:, :-1] == IGNORED).all()
    return torch.cat([inputs["tokens"], targets[:, -1:]], dim=1).tolist()


def joined(corpus: Corpus, num_ranks: int, position: int, batch: int, **values: object) -> list[list[int]]:
    """The global batch put together from all ranks' rows, each rank's also cut into microbatches of one or two rows."""
    found = []
    for rank in range(num_ranks):
        loader = Loader(corpus, sequence=16, batch=batch, rank=rank, num_ranks=num_ranks, **values)
        mine = rows(loader.at(position))
        assert len(mine) == (rank + 1) * batch // num_ranks - rank * batch // num_ranks
        found += [row for first in range(0, len(mine), 2) for row in mine[first : first + 2]]
    return found


def test_a_sample_is_a_stretch_of_the_stream_and_its_targets_follow(corpus: Corpus) -> None:
    stream = corpus.train.read(0, corpus.train.num_tokens).tolist()
    loader = Loader(corpus, sequence=16, batch=5)
    assert loader.num_samples == (len(stream) - 1) // 16
    starts = loader.starts(np.arange(loader.num_samples)).tolist()
    assert sorted(starts) == [16 * number for number in range(loader.num_samples)]
    assert starts != sorted(starts)
    for step in range(loader.num_samples // 5):
        expected = [stream[start : start + 17] for start in starts[step * 5 : step * 5 + 5]]
        assert rows(loader.batch(step)) == expected


def test_every_epoch_has_each_target_once_in_an_order_of_its_own(corpus: Corpus) -> None:
    loader = Loader(corpus, sequence=16, batch=loader_samples(corpus))
    stream = corpus.train.read(0, corpus.train.num_tokens)
    orders = []
    for epoch in range(3):
        starts = loader.starts(np.arange(loader.num_samples) + epoch * loader.num_samples)
        places = (starts[:, None] + np.arange(1, 17)) % stream.size
        assert np.unique(places).size == places.size
        assert loader.batch(epoch)[1].numpy().tolist() == stream[places].tolist()
        orders.append(starts.tolist())
    assert orders[0] != orders[1] != orders[2]
    assert {start % 16 for start in orders[0]} == {0}
    assert any(start % 16 for start in orders[1])


def loader_samples(corpus: Corpus) -> int:
    return Loader(corpus, sequence=16).num_samples


def test_seeds_give_other_orders_of_the_same_samples(corpus: Corpus) -> None:
    size = loader_samples(corpus)
    first, second = (rows(Loader(corpus, sequence=16, batch=size, seed=seed).batch(0)) for seed in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)


def test_resumed_with_accumulation_under_other_ranks_the_next_sample_is_exactly_the_next(corpus: Corpus) -> None:
    # CASES.md 20: the order of one rank that reads one sample a step is what any layout must follow.
    order = [rows(Loader(corpus, sequence=16, batch=1).batch(step))[0] for step in range(200)]
    assert 2 * loader_samples(corpus) < 200  # passes the ends of epochs
    position, seen = 0, []
    for num_ranks, batch in [(2, 6), (2, 6), (3, 5), (1, 40), (4, 3), (5, 17), (2, 6), (7, 64)]:
        seen += joined(corpus, num_ranks, position, batch)
        position += batch
    assert seen == order[:position]


def test_ranks_have_disjoint_samples_that_together_are_the_batch(corpus: Corpus) -> None:
    size = loader_samples(corpus)
    loaders = [Loader(corpus, sequence=16, batch=size, rank=rank, num_ranks=4) for rank in range(4)]
    stream_places = [tuple(row) for loader in loaders for row in rows(loader.batch(0))]
    assert len(set(stream_places)) == len(stream_places) == size


def test_batches_are_a_pure_function_of_the_step(corpus: Corpus) -> None:
    loader = Loader(corpus, sequence=16, batch=4)
    first = rows(loader.batch(7))
    rows(loader.batch(2))
    assert rows(loader.batch(7)) == first == rows(loader.at(28))


def test_ranks_without_rows_get_empty_batches(corpus: Corpus) -> None:
    loader = Loader(corpus, sequence=16, batch=1, rank=0, num_ranks=3, document_mask=True)
    inputs, targets = loader.batch(0)
    assert [tuple(tensor.shape) for tensor in (*inputs.values(), targets)] == [(0, 16)] * 4
    assert {tensor.dtype for tensor in (*inputs.values(), targets)} == {torch.int64}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("batch", [1, 4, 7, 1000])
@pytest.mark.parametrize("sequence", [16, 33, 100_000])
def test_evaluation_counts_each_token_once(corpus: Corpus, num_ranks: int, batch: int, sequence: int) -> None:
    # CASES.md 20. Every token but the first, which nothing predicts, is a target once, with its own past as input.
    stream = corpus.held_out.read(0, corpus.held_out.num_tokens).tolist()
    found: list[tuple[int, int]] = []
    calls = set()
    for rank in range(num_ranks):
        loader = Loader(corpus, "held_out", sequence, batch, rank, num_ranks)
        batches = list(loader.once())
        calls.add(len(batches))
        for inputs, targets in batches:
            assert inputs["tokens"].shape == targets.shape == (len(targets), sequence)
            counted = targets != IGNORED
            found += zip(inputs["tokens"][counted].tolist(), targets[counted].tolist(), strict=True)
    assert calls == {math.ceil(loader.num_samples / batch)} == {loader.num_batches}
    assert sorted(found) == sorted(zip(stream[:-1], stream[1:], strict=True))


def test_part_of_an_evaluation_is_the_same_fair_draw_every_time(corpus: Corpus) -> None:
    parts = [
        [rows(batch) for batch in Loader(corpus, "held_out", 16, 2, seed=seed).once(num_batches=3)] for seed in (0, 9)
    ]
    assert parts[0] == parts[1]
    assert len(parts[0]) == 3
    stream = corpus.held_out.read(0, corpus.held_out.num_tokens).tolist()
    assert [row for batch in parts[0] for row in batch] != [stream[16 * n : 16 * n + 17] for n in range(6)]
    loader = Loader(corpus, "held_out", 16, 2)
    passes = [rows(loader.at(loader.num_samples * number, loader.num_samples)) for number in range(2)]
    assert sorted(passes[0]) == sorted(passes[1])
    assert len(list(loader.once(10**6))) == loader.num_batches


@given(position=st.integers(0, 400), sequence=st.integers(1, 60), split=st.sampled_from(["train", "held_out"]))
def test_documents_and_positions_follow_the_ends(corpus: Corpus, position: int, sequence: int, split: str) -> None:
    masked = Loader(corpus, split, sequence, batch=3, document_mask=True)
    inputs, targets = masked.at(position)
    plain_inputs, plain_targets = Loader(corpus, split, sequence, batch=3).at(position)
    assert torch.equal(inputs["tokens"], plain_inputs["tokens"])
    assert torch.equal(targets, plain_targets)  # the mask takes no target away
    assert plain_inputs.keys() == {"tokens"}
    columns = (inputs["tokens"], inputs["positions"], inputs["documents"], targets)
    for tokens, positions, documents, known in zip(*(column.tolist() for column in columns), strict=True):
        document = place = 0
        for index, token in enumerate(tokens):
            if index and known[index] == IGNORED:
                break  # beyond the held-out text
            if index and token == corpus.end:
                document, place = document + 1, 0
            assert (documents[index], positions[index]) == (document, place)
            place += 1


def test_a_stream_is_the_batches_in_order_with_and_without_a_thread(corpus: Corpus) -> None:
    loader = Loader(corpus, sequence=16, batch=4)
    expected = [rows(loader.at(10 + 4 * step)) for step in range(40)]
    for prefetch in (0, 1, 3):
        assert [rows(batch) for batch in islice(loader.stream(10, prefetch), 40)] == expected


def test_a_stream_that_is_closed_leaves_no_thread(corpus: Corpus) -> None:
    before = threading.active_count()
    stream = Loader(corpus, sequence=16, batch=4).stream(0, prefetch=2)
    next(stream)
    assert threading.active_count() == before + 1
    stream.close()
    assert threading.active_count() == before


def test_what_fails_in_the_thread_fails_in_the_reader(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader(corpus, sequence=16, batch=4)
    stream = loader.stream(0, prefetch=2)
    next(stream)
    monkeypatch.setattr(loader, "at", lambda position: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(islice(stream, 9))


def test_a_corpus_shorter_than_one_sequence_is_one_line(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, ["short text"], held_out=0.0)
    assert corpus.train.num_tokens == 11
    with pytest.raises(CorpusError, match=r"has 11 tokens, fewer than one sequence of 11 .*; set data.sequence <= 10"):
        Loader(corpus, sequence=11)
    inputs, targets = Loader(corpus, sequence=10, batch=2).batch(0)  # the only sample, then the next epoch's
    assert inputs["tokens"].shape == (2, 10)
    assert sorted(targets[0].tolist()) == sorted([*b"hort text", 256])


def test_nothing_held_out_cannot_be_evaluated_on(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, ["short text"], held_out=0.0)
    with pytest.raises(CorpusError, match="holds nothing out; set data.held_out above 0"):
        Loader(corpus, "held_out")


def pinned(folder: str) -> list[bool]:
    """Whether the tensors of batches are, where an accelerator is there."""
    emulator.install()
    loader = Loader(corpus_of(Path(folder), [document(number) for number in range(20)]), sequence=16, batch=2)
    batches = [next(loader.stream(prefetch=ahead)) for ahead in (0, 2)]
    return [tensor.is_pinned() for inputs, targets in batches for tensor in (*inputs.values(), targets)]


@emulator.needed
def test_batches_for_any_accelerator_are_pinned(tmp_path: Path) -> None:
    assert emulator.apart(__name__, "pinned", str(tmp_path)) == [True] * 4
