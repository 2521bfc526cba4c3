import json
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.training import checkpoints, metrics
from shardwise.training.config import CheckpointConfig, LogConfig, TrainConfig
from shardwise.training.evaluation import HeldOut
from shardwise.training.faults import JobStopped
from shardwise.training.trainer import Trainer
from tests.pool import run_ranks
from tests.training.fake import FakeParallel, FakeSamples, StepMetrics, world


class Stopping(FakeSamples):
    """Data whose reader gets a signal while it is at a sample."""

    def __init__(self, at: int, number: signal.Signals = signal.SIGTERM, rank: int = 0) -> None:
        super().__init__()
        self.stop_at, self.number, self.rank = at, number, rank

    def at(self, position: int, batch: int) -> tuple[Tensor, Tensor]:
        if position == self.stop_at and world()[0] == self.rank:
            os.kill(os.getpid(), self.number)
        return super().at(position, batch)


def trainer(run: Path | str, samples: FakeSamples | None = None, **settings: Any) -> Trainer:
    sections: dict[str, dict[str, Any]] = {"train": {"steps": 12}, "checkpoint": {"every": 5}, "log": {"every": 1}}
    given = {name: settings.pop(name) for name in list(settings) if "_" in name and name.split("_")[0] in sections}
    for name, value in given.items():
        section, _, key = name.partition("_")
        sections[section][key] = value
    sections["log"].setdefault("tensorboard", False)
    return Trainer(
        settings.pop("parallel", None) or FakeParallel(),
        samples or FakeSamples(),
        run=run,
        lr=0.05,
        train=TrainConfig(**sections["train"]),
        checkpoint=CheckpointConfig(**sections["checkpoint"]),
        log=LogConfig(**sections["log"]),
        **settings,
    )


def result(made: Trainer) -> dict[str, Any]:
    """Everything a run ends with, bit by bit, without times."""
    parallel = made.parallel
    assert isinstance(parallel, FakeParallel)
    rows = [
        {name: value for name, value in row.items() if not name.startswith(("seconds", "tokens_per", "utilisation"))}
        for row in metrics.read(made.folder.metrics)
    ]
    return {
        "weight": parallel.weight.tolist(),
        "momentum": parallel.momentum.tolist(),
        "steps": int(parallel.steps),
        "next draw": torch.randn(3).tolist(),
        "rows": rows if made.ranks.rank == 0 else [],
    }


def run_whole(run: str, **settings: Any) -> dict[str, Any]:
    made = trainer(run, **settings)
    outcome = made.fit()
    assert outcome.finished
    assert outcome.step == 12
    return result(made)


def run_in_pieces(run: str, asynchronous: bool, rank: int) -> tuple[dict[str, Any], list[int]]:
    """Stopped by a signal at one rank in step 4, again in step 8, with a checkpoint every 5 steps."""
    ends = []
    for position in (3 * 8, 7 * 8, -1):
        made = trainer(run, Stopping(position, rank=rank), checkpoint_asynchronous=asynchronous)
        outcome = made.fit()
        ends.append(outcome.step)
    assert outcome.finished
    return result(made), ends


@pytest.mark.parametrize("asynchronous", [False, True])
def test_resumed_and_uninterrupted_runs_are_bitwise_equal(tmp_path: Path, asynchronous: bool) -> None:
    whole = run_whole(str(tmp_path / "whole"))
    pieces, ends = run_in_pieces(str(tmp_path / "pieces"), asynchronous, 0)
    assert ends == [4, 8, 12]
    assert pieces == whole
    assert [row["step"] for row in whole["rows"]] == list(range(1, 13))


def test_ranks_stop_at_the_same_step_and_resume_bitwise(tmp_path: Path) -> None:
    """A signal at one rank alone stops all of them, at most one step later."""
    whole = run_ranks(run_whole, 2, str(tmp_path / "whole"))
    pieces = run_ranks(run_in_pieces, 2, str(tmp_path / "pieces"), True, 1)
    for rank in range(2):
        found, ends = pieces[rank]
        assert ends == [5, 9, 12]
        assert found == whole[rank]


class Watched(FakeSamples):
    """Data that note which samples this rank has read."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__(batch_size)
        self.read: list[int] = []

    def rows(self, numbers: range) -> tuple[Tensor, Tensor]:
        self.read += numbers
        return super().rows(numbers)


def read_in_two_parts(run: str, batch: int) -> list[int]:
    samples = Watched()
    trainer(run, samples, train_steps=3).fit()
    first = list(samples.read)
    samples = Watched(batch)
    trainer(run, samples, train_steps=5).fit()
    return first + samples.read


def test_the_next_sample_after_a_resume_is_exactly_the_next(tmp_path: Path) -> None:
    """CASES 20: ranks' samples are disjoint, none is read twice or left out, also where the batch changes."""
    alone = read_in_two_parts(str(tmp_path / "one"), 8)
    assert alone == list(range(5 * 8))
    ranks = run_ranks(read_in_two_parts, 2, str(tmp_path / "two"), 6)
    assert sorted(ranks[0] + ranks[1]) == list(range(3 * 8 + 2 * 6))


def evaluate_once(run: str) -> tuple[float, int]:
    samples = Watched()
    held_out = HeldOut(samples, 2.0, {"gzip": 2.5})
    made = trainer(run, parallel=FakeParallel(noise=0.0), held_out=held_out, train_steps=1)
    outcome = made.fit()
    assert outcome.evaluation is not None
    assert outcome.evaluation.bits_per_byte == pytest.approx(outcome.evaluation.loss / math.log(2) / 2)
    assert outcome.evaluation.perplexity == pytest.approx(math.exp(outcome.evaluation.loss))
    assert outcome.evaluation.targets == 25
    if made.ranks.rank == 0:
        row = list(metrics.read(made.folder.metrics))[-1]
        assert (row["kind"], row["bits_per_byte_gzip"]) == ("eval", 2.5)
    return outcome.evaluation.loss, len(samples.read)


def test_evaluation_counts_each_sample_once(tmp_path: Path) -> None:
    loss, num_read = evaluate_once(str(tmp_path / "one"))
    assert num_read == 5
    results = run_ranks(evaluate_once, 2, str(tmp_path / "two"))
    assert sum(num for _, num in results) == 5
    assert results[0][0] == results[1][0] == pytest.approx(loss, rel=1e-5)


def poisoned(run: str, **settings: Any) -> tuple[str, int, list[Any]]:
    """Sample 29 is in the third row of the rows of rank 1 of 2, in step 4."""
    made = trainer(run, FakeSamples(poison=29), **settings)
    try:
        made.fit()
        message = ""
    except JobStopped as error:
        message = str(error)
    rows = metrics.read(made.folder.metrics) if made.ranks.rank == 0 else iter(())
    events = [row for row in rows if row["kind"] == "event"]
    return message, made.progress.updates, events


def test_a_loss_that_is_not_finite_stops_and_names_rank_and_step(tmp_path: Path) -> None:
    results = run_ranks(poisoned, 2, str(tmp_path))
    for message, updates, _ in results:
        assert message.startswith("step 4: the loss is nan, the gradient norm nan, first on rank 1; ")
        assert 'set train.on_nonfinite = "skip"' in message
        assert updates == 3
    assert results[0][2][0]["faulty_rank"] == 1


def test_a_skipped_step_does_not_advance_the_schedule(tmp_path: Path) -> None:
    message, updates, events = poisoned(str(tmp_path), train_on_nonfinite="skip")
    assert message == ""
    assert updates == 11
    assert [event["step"] for event in events] == [4]
    rows = {row["step"]: row for row in metrics.read(tmp_path / "metrics.jsonl") if row["kind"] == "train"}
    assert rows[5]["lr"] == rows[4]["lr"] == pytest.approx(rows[3]["lr"] * 4 / 3)
    assert rows[4]["loss"] is None


def test_too_many_skips_in_a_row_stop(tmp_path: Path) -> None:
    class Poison(FakeSamples):
        def rows(self, numbers: range) -> tuple[Tensor, Tensor]:
            inputs, targets = super().rows(numbers)
            return inputs, targets * (math.nan if numbers.start >= 16 else 1)

    made = trainer(tmp_path, Poison(), train_on_nonfinite="skip", train_max_skips=3)
    with pytest.raises(JobStopped, match=r"step 6: .*4 steps in a row were skipped, more than train.max_skips"):
        made.fit()


class Overflowing(FakeParallel):
    """Gradients that fp16 cannot hold, in the steps from `first` to `last`."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__(noise=0.0)
        self.first_overflow, self.last_overflow = first, last
        self.scale, self.calls = 8.0, 0

    def step(self, batch: tuple[Tensor, Tensor], lr: float | None = None) -> StepMetrics:
        self.calls += 1
        if not self.first_overflow <= self.calls <= self.last_overflow:
            return replace(super().step(batch, lr), loss_scale=self.scale)
        self.scale = max(1.0, self.scale / 2)
        return StepMetrics(2.0, math.inf, 24, True, loss_scale=self.scale)


def test_fp16_overflows_are_skipped_whatever_a_nonfinite_loss_does(tmp_path: Path) -> None:
    made = trainer(tmp_path, parallel=Overflowing(3, 4), train_on_nonfinite="stop")
    made.fit()
    assert made.progress.step == 12
    assert made.progress.updates == 10
    events = [row for row in metrics.read(tmp_path / "metrics.jsonl") if row["kind"] == "event"]
    assert [(event["step"], event["loss_scale"]) for event in events] == [(3, 4.0), (4, 2.0)]


def test_fp16_overflows_that_do_not_end_stop_with_the_cause(tmp_path: Path) -> None:
    made = trainer(tmp_path, parallel=Overflowing(2, 100))
    with pytest.raises(JobStopped, match=r"step 4: gradients overflow fp16 even with a loss scale of 1.*bf16.*lr"):
        made.fit()
    assert made.progress.updates == 1


def differing(run: str, what: str) -> str:
    lr = 0.1 if what == "config" and world()[0] == 1 else 0.2
    settings = {"train": {"steps": 1}, "optimizer": {"lr": lr}}
    fingerprint = "b" if what == "data" and world()[0] == 1 else "a"
    made = trainer(run, settings=settings, facts={"data": {"fingerprint": fingerprint}})
    try:
        made.fit()
    except JobStopped as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("config", "the ranks do not hold the same config: optimizer.lr is 0.2 on rank 0, 0.1 on rank 1"),
        ("data", "the ranks do not hold the same data: fingerprint is a on rank 0, b on rank 1"),
    ],
)
def test_ranks_that_differ_are_told_in_what(tmp_path: Path, what: str, said: str) -> None:
    assert run_ranks(differing, 2, str(tmp_path), what) == [said, said]


def test_two_jobs_cannot_have_one_folder(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.folder.create()
    with pytest.raises(ValueError, match=rf"train.run: .* is in use by process {os.getpid()} on .*; stop that job"):
        trainer(tmp_path).fit()
    first.folder.release()
    assert trainer(tmp_path).fit().finished


def test_a_run_cannot_change_its_model_or_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {
        "model": {"hidden": 8, "dropout": 0.0},
        "data": {"seed": 1, "batch": 8},
        "train": {"seed": 0},
        "optimizer": {"name": "adamw"},
    }
    facts = {"data": {"fingerprint": "one"}}
    trainer(tmp_path, settings=settings, facts=facts, train_steps=2).fit()
    changed = {
        "model": {"hidden": 9, "dropout": 0.1},
        "data": {"seed": 2, "batch": 4},
        "train": {"seed": 3},
        "optimizer": {"name": "lion"},
    }
    with pytest.raises(ValueError, match="model.hidden") as caught:
        trainer(tmp_path, settings=changed, train_steps=2).fit()
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["data.seed", "model.hidden", "optimizer.name", "train.seed"]
    assert lines[1].startswith("model.hidden: 9 is not 8, which the run in ")
    assert lines[2].endswith(f", from its parameters with checkpoint.initial={tmp_path}")
    capsys.readouterr()
    trainer(tmp_path, settings={**settings, "data": {"seed": 1, "batch": 4}}, facts=facts, train_steps=3).fit()
    assert f"continuing {tmp_path} from step 2, with data.batch=4 (it was 8)" in capsys.readouterr().out
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [start["step"] for start in starts] == [0, 2]
    assert starts[1]["changes"] == {"data.batch": [8, 4]}
    with pytest.raises(ValueError, match="the data is not what .* was trained on"):
        trainer(tmp_path, facts={"data": {"fingerprint": "other"}}, settings=settings, train_steps=4).fit()


def test_a_start_leaves_what_is_needed_to_do_it_again(tmp_path: Path) -> None:
    settings = {"train": {"seed": 7, "steps": 1}, "optimizer": {"betas": [0.9, 0.95]}}
    trainer(tmp_path, settings=settings, train_steps=1, train_seed=7).fit()
    (start,) = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert start["seed"] == 7
    assert start["torch"] == torch.__version__
    assert start["packages"]["pydantic"]
    assert len(start["git"]["commit"]) == 40
    assert isinstance(start["git"]["untracked"], int)
    assert "betas = [0.9, 0.95]" in (tmp_path / "config.toml").read_text()


def test_a_checkpoint_that_cannot_be_written_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_step(monkeypatch, 5)
    assert trainer(tmp_path).fit().finished
    assert checkpoints.steps_in(tmp_path / "checkpoints") == [10, 12]
    printed = capsys.readouterr().out
    assert printed.count("warning: the checkpoint of step 5 was not written: ") == 1
    assert "No space left on device" in printed


def test_a_checkpoint_that_cannot_be_written_stops_training_where_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_step(monkeypatch, 5)
    outcome = trainer(tmp_path, checkpoint_on_failure="stop", checkpoint_asynchronous=False).fit()
    assert not outcome.finished
    assert checkpoints.steps_in(tmp_path / "checkpoints") == [outcome.step] == [6]


def refuse_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    def refuse(part: Path, needed: int) -> None:
        if part.stem == f"step-{step:08d}":
            raise OSError(28, "No space left on device", str(part))
        part.mkdir(parents=True)

    monkeypatch.setattr(checkpoints, "_make_room", refuse)


def test_a_finished_run_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held_out = HeldOut(FakeSamples())
    first = trainer(tmp_path, held_out=held_out, train_eval_every=8)
    assert first.fit().evaluation is not None
    rows = list(metrics.read(first.folder.metrics))
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [8, 12]
    written = checkpoints.path_of(tmp_path / "checkpoints", 12).stat().st_mtime_ns
    outcome = trainer(tmp_path, held_out=held_out).fit()
    assert outcome.finished
    assert outcome.loss is None
    assert list(metrics.read(first.folder.metrics)) == rows
    assert checkpoints.path_of(tmp_path / "checkpoints", 12).stat().st_mtime_ns == written
    assert "finished step 12 of 12; the run is in" in (printed := capsys.readouterr().out)
    assert printed.endswith("to train on, raise train.steps\n")


def test_a_run_may_start_from_the_parameters_of_another(tmp_path: Path) -> None:
    first = trainer(tmp_path / "first")
    first.fit()
    second = trainer(tmp_path / "second", train_steps=1, checkpoint_initial=str(tmp_path / "first"))
    started: list[list[float]] = []

    class Spy(FakeSamples):
        def at(self, position: int, batch: int) -> tuple[Tensor, Tensor]:
            parallel = second.parallel
            assert isinstance(parallel, FakeParallel)
            started.append([*parallel.weight.flatten().tolist(), float(parallel.steps)])
            return super().at(position, batch)

    second.samples = Spy()
    second.fit()
    assert isinstance(first.parallel, FakeParallel)
    assert started == [[*first.parallel.weight.flatten().tolist(), 0.0]]


def test_metrics_that_cannot_be_written_cost_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").mkdir(parents=True)
    assert trainer(tmp_path).fit().finished
    assert capsys.readouterr().out.count("metrics cannot be written") == 1


def test_rows_of_a_part_of_a_run_that_was_lost_are_dropped(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    path = made.folder.metrics
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n{"kind": "train", "st')
    sink = metrics.Metrics(made.folder, LogConfig(tensorboard=False), 1, {}, print)
    sink.write("train", 2, {"loss": math.inf, "lr": 0.5})
    assert list(metrics.read(path)) == [
        {"kind": "train", "step": 1},
        {"kind": "train", "step": 2, "loss": None, "lr": 0.5},
    ]


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    class Twice(FakeSamples):
        def at(self, position: int, batch: int) -> tuple[Tensor, Tensor]:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            return super().at(position, batch)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, Twice()).fit()
    assert signal.getsignal(signal.SIGINT) is before


def test_the_sinks_that_are_asked_for_are_written(tmp_path: Path) -> None:
    trainer(tmp_path, log_tensorboard=True, log_profile="2:3", train_steps=4).fit()
    trace = json.loads((tmp_path / "timeline" / "rank-0.json").read_text())
    assert trace["traceEvents"]
    assert list((tmp_path / "tensorboard").iterdir())
    with pytest.raises(ValueError, match=r"log.wandb: wandb is not installed; pip install 'shardwise\[tracking\]'"):
        trainer(tmp_path / "other", log_wandb="project").fit()


def steps_and_utilisation(run: Path) -> Iterator[tuple[int, float]]:
    for row in metrics.read(run / "metrics.jsonl"):
        yield row["step"], row["utilisation"]


def test_utilisation_is_of_the_peak_that_is_given_or_measured_and_the_first_line_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trainer(tmp_path, flops_per_target=1e6, log_peak_tflops=0.5, about="one device; 7 parameters")
    made.fit()
    first = "1 rank: one device; 7 parameters; MFU against 0.5 TFLOP/s (log.peak_tflops of every rank)"
    assert capsys.readouterr().out.splitlines()[0] == first
    for row in metrics.read(made.folder.metrics):
        assert row["utilisation"] == pytest.approx(1e6 * row["tokens_per_second"] / 0.5e12)
    made = trainer(tmp_path / "measured", flops_per_target=1.0)
    made.fit()
    assert 1e9 < made._peak < 1e15
    first = f"1 rank; MFU against {made._peak / 1e12:.3g} TFLOP/s (all ranks' matrix products, measured now)"
    assert capsys.readouterr().out.splitlines()[0] == first
