"""The main job: takes steps, evaluates, records, writes checkpoints, and continues where it was."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shardwise.memory.precision import SMALLEST
from shardwise.training import evaluation, random_state, storage
from shardwise.training.checkpoints import LOSS_SCALE, Checkpoints, facts_of, find, without_other_scale
from shardwise.training.config import CheckpointConfig, LogConfig, TrainConfig
from shardwise.training.display import Display, Row, start_line
from shardwise.training.evaluation import Evaluation, HeldOut
from shardwise.training.faults import JobStopped, require_agreement
from shardwise.training.metrics import Metrics
from shardwise.training.profiling import Profiler
from shardwise.training.progress import Outcome, Progress, Timing
from shardwise.training.protocols import Samples, StepMetrics, Trainable
from shardwise.training.ranks import DAY, Flag, Ranks
from shardwise.training.run_folder import RunFolder, flattened
from shardwise.training.schedules import learning_rate
from shardwise.training.signals import STOP, StopSignals
from shardwise.training.utilisation import measured_peak

# Of `log.timeline`: steps before it begins, and how many it covers.
WARM_UP_STEPS, RECORDED_STEPS = 3, 20


class Trainer:
    """Trains a parallel model in a run folder; a folder that holds a checkpoint is continued. Collective over the job.

    Args:
        parallel: the model, as `shardwise.parallelize` returns it.
        samples: the training data, as `corpus.Loader`.
        run: the run folder; by default `train.run`.
        lr: the peak of the learning rate schedule.
        train: the section [train] of a configuration.
        checkpoint: the section [checkpoint].
        log: the section [log].
        held_out: what to evaluate on.
        flops_per_target: forward and backward, for model-FLOP utilisation; 0 shows none.
        dtype: of the model's matrix products, for the same.
        device: this rank's.
        prefetch: batches to read ahead.
        about: what is trained and how, shown at the start.
        settings: the whole configuration by section, to be recorded, and compared between ranks.
        facts: subject -> name -> value that all ranks must hold alike.
        on_start: called on rank 0 once the run folder is there, to leave in it what belongs to the run.
        stop_signals: ask to stop after the step.
    """

    def __init__(
        self,
        parallel: Trainable,
        samples: Samples,
        *,
        run: str | Path = "",
        lr: float = 3e-4,
        train: TrainConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        log: LogConfig | None = None,
        held_out: HeldOut | None = None,
        flops_per_target: float = 0.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prefetch: int = 2,
        about: str = "",
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        facts: Mapping[str, Mapping[str, object]] | None = None,
        on_start: Callable[[RunFolder], None] | None = None,
        stop_signals: Iterable[signal.Signals] = STOP,
    ) -> None:
        self.parallel = parallel
        self.samples = samples
        self.train = train or TrainConfig()
        self.checkpoint = checkpoint or CheckpointConfig()
        self.log = log or LogConfig()
        self.lr = lr
        self.held_out = held_out
        self.flops_per_target = flops_per_target
        self.dtype = dtype
        self.device = torch.device(device)
        self.prefetch = prefetch
        self.about = about
        sections = {"train": self.train, "checkpoint": self.checkpoint, "log": self.log}
        self.settings = settings or {
            name: section.model_dump(mode="json", exclude_none=True) for name, section in sections.items()
        }
        self.ranks = Ranks.world(self.train.timeout)
        self.folder = RunFolder(self.ranks.broadcast(Path(run or self.train.run or RunFolder.new_path())))
        self.progress = Progress()
        self.evaluation: Evaluation | None = None
        self._evaluated = 0  # the step it is of
        self.display = Display(self.train.steps, shown=self.ranks.rank == 0)
        self.signals = StopSignals(stop_signals)
        self._facts = dict(facts or {})
        self._on_start = on_start
        self._flag = Flag(self.ranks)
        self._checkpoints = Checkpoints(
            self.folder.checkpoints, self.checkpoint, self.ranks, Ranks.world(DAY), self.display.warn
        )
        self._profiler = Profiler(self.log.profile, self.folder.timeline, self.ranks.rank, self.display.warn)
        self._metrics: Metrics | None = None
        self._timing = Timing()
        self._peak = 0.0
        self._told_recomputed = False
        self._loss: float | None = None
        self._unread: list[tuple[int, StepMetrics]] = []
        self._skips = 0
        self._recorded: int | None = 0  # steps seen by the timeline; None once it is written

    def fit(self) -> Outcome:
        """Trains to the last step, or until a signal asks to stop; either way the state is on disk then.

        Raises:
            JobStopped: the loss is not finite, or the ranks do not hold the same.
            ValueError: the run folder cannot be used so, or a checkpoint does not fit or cannot be written.
        """
        require_agreement(self.ranks, {"config": flattened(self.settings), **self._facts})
        self.ranks.first(self.folder.create)
        try:
            with self.signals, self.display:
                self._begin()
                stopped = self._take_steps()
                self._save(last=True)
                self._checkpoints.close()
                if not stopped and self._loss is not None and self._evaluated != self.progress.step:
                    self._evaluate()
                self._flag.close()
                self._tell_end(stopped)
        except JobStopped:
            self._checkpoints.close()  # all ranks are well: what is being written is worth waiting for
            raise
        finally:
            self._profiler.close()
            if self._metrics is not None:
                self._metrics.close()
            self.folder.release()
        return Outcome(self.folder.path, self.progress.step, not stopped, self._loss, self.evaluation)

    def _begin(self) -> None:
        self._checkpoints.prepare()
        found = self._checkpoints.latest()
        if found is not None:
            # Refuses another model or other data before anything is loaded.
            self.ranks.first(lambda: self.folder.check(self.settings))
            changes = {key: pair for key, pair in self.folder.changes(self.settings).items() if key != "train.run"}
            self._restore(found, changes)
        else:
            random_state.seed(self.train.seed, 0, self.parallel.data_rank)
            if self.checkpoint.initial:
                self._take_parameters(Path(self.checkpoint.initial))
        step = self.progress.step
        start = {"step": step, "seed": self.train.seed, "ranks": self.ranks.size, "device": str(self.device)}
        self.ranks.first(lambda: self._leave_in_folder(start))
        if self.ranks.rank == 0:
            self._metrics = Metrics(self.folder, self.log, step, self.settings, self.display.warn)
        if self.flops_per_target and step < self.train.steps:
            peak = 1e12 * self.log.peak_tflops * self.ranks.size
            self._peak = peak or measured_peak(self.device, self.dtype, self.ranks)
        self.display.line(start_line(self.ranks.size, self.about, self._peak, given=self.log.peak_tflops > 0))

    def _leave_in_folder(self, start: Mapping[str, Any]) -> None:
        self.folder.record(self.settings, start)
        if self._on_start is not None:
            self._on_start(self.folder)

    def _restore(self, path: Path, changes: Mapping[str, tuple[Any, Any]]) -> None:
        facts = facts_of(path)
        for subject, values in self._facts.items():
            if values != facts["facts"].get(subject, values):
                raise ValueError(
                    f"the {subject} is not what {path} was trained on; start a new run with another train.run"
                )
        rng: dict[str, torch.Tensor] = {}
        if facts["ranks"] == self.ranks.size:
            there = storage.metadata_of(path).state_dict_metadata
            rng = random_state.empty(there, self.ranks.rank)
        state = dict(self.parallel.state_dict())
        kept = without_other_scale(state, path)
        if len(kept) < len(state):
            self.display.line(f"{path} has no loss scale of this kind: it starts anew")
        storage.load({**kept, **rng}, path, self.ranks, spare=(random_state.PREFIX, LOSS_SCALE))
        self.parallel.loaded()
        self.progress = Progress(**facts["progress"])
        if rng:
            random_state.restore(rng, self.ranks.rank, self.device)
        else:
            # The generators of another number of ranks mean nothing here: each rank draws anew.
            random_state.seed(self.train.seed, self.progress.step, self.parallel.data_rank)
        told = ", ".join(f"{key}={new} (it was {old})" for key, (old, new) in changes.items())
        self.display.line(
            f"continuing {self.folder.path} from step {self.progress.step}" + (f", with {told}" if told else "")
        )

    def _take_parameters(self, place: Path) -> None:
        path = find(place, self.display.warn, self.ranks)
        state = {key: value for key, value in self.parallel.state_dict().items() if key.startswith("model/")}
        storage.load(state, path, self.ranks, spare=("optimizer/", "step", random_state.PREFIX, LOSS_SCALE))
        self.parallel.loaded()
        self.display.line(f"starting from the parameters of {path}")

    def _take_steps(self) -> bool:
        """Takes steps until the last one, or until a stop is asked for; returns whether it was."""
        progress, train = self.progress, self.train
        batches = self.samples.stream(progress.samples, self.prefetch)
        try:
            while progress.step < train.steps:
                self._profiler.before(progress.step)
                self._record_timeline()
                lr = learning_rate(progress.updates, train, self.lr)
                start = time.perf_counter()
                metrics = self.parallel.step(next(batches), lr=lr)
                self._count(metrics, time.perf_counter() - start)
                self._tell_recomputed()
                if progress.step % self.log.every == 0:
                    self._write_row(metrics, lr)
                stop = self._flag.poll(self._stop_wanted())
                if not stop and train.eval_every and progress.step % train.eval_every == 0:
                    stop = self._evaluate()
                if stop and progress.step < train.steps:
                    break
                if self.checkpoint.every and progress.step % self.checkpoint.every == 0:
                    self._save()
        finally:
            if isinstance(batches, Generator):
                batches.close()
        self._write_timeline()
        return progress.step < train.steps

    def _tell_recomputed(self) -> None:
        """Shows once what is computed again in backward, when it has been measured and chosen."""
        report = self.parallel.recomputed
        if report is None or self._told_recomputed:
            return
        self._told_recomputed = True
        self.display.line(report.table())
        seconds = {"recompute_seconds": report.seconds}
        kept = {"activation_bytes": report.kept_bytes, "recomputed_bytes": report.recomputed_bytes}
        self._write("event", {**kept, **seconds})

    def _record_timeline(self) -> None:
        """Notes when actions run, once shapes are known and caches warm, until there are enough; then writes them."""
        if not self.log.timeline or self._recorded is None:
            return
        if self._recorded == WARM_UP_STEPS:
            self.parallel.record()
        if self._recorded == WARM_UP_STEPS + RECORDED_STEPS:
            self._write_timeline()
            return
        self._recorded += 1

    def _write_timeline(self) -> None:
        if not self.log.timeline or self._recorded is None:
            return
        self._recorded = None
        timeline = self.parallel.timeline()
        if timeline is None:
            return

        def write() -> None:
            self.folder.timeline.mkdir(parents=True, exist_ok=True)
            (self.folder.timeline / "pipeline.json").write_text(json.dumps(timeline.to_json()))

        self.ranks.first(write)

    def _stop_wanted(self) -> bool:
        failed = self._checkpoints.failure is not None and self.checkpoint.on_failure == "stop"
        return failed or self.signals.received is not None

    def _count(self, metrics: StepMetrics, seconds: float) -> None:
        progress, timing = self.progress, self._timing
        progress.step += 1
        progress.samples += self.samples.batch_size
        progress.updates += not metrics.skipped
        progress.tokens += metrics.tokens
        progress.seconds += seconds
        timing.steps += 1
        timing.tokens += metrics.tokens
        timing.seconds += seconds
        self.display.at(progress.step)
        self._unread.append((progress.step, metrics))
        self._skips = self._skips + 1 if metrics.skipped else 0
        if metrics.skipped:
            self._read_losses()

    def _read_losses(self) -> None:
        """Adds up the losses of the steps since it was called last; until then the steps need not wait for them."""
        unread, self._unread = self._unread, []
        for step, metrics in unread:
            self._loss = metrics.loss
            if metrics.skipped and metrics.loss_scale is not None and math.isfinite(metrics.loss):
                self._on_overflow(step, metrics.loss_scale)
            elif metrics.skipped or not math.isfinite(metrics.loss):
                self._on_nonfinite(step, metrics)
            else:
                self.progress.row_loss += metrics.loss * metrics.tokens
                self.progress.row_tokens += metrics.tokens

    def _on_overflow(self, step: int, loss_scale: float) -> None:
        """Gradients that fp16 could not hold: the loss is scaled up less from now on, unless it is not scaled up at
        all."""
        self._write("event", {"skipped": 1, "loss_scale": loss_scale})
        if loss_scale <= SMALLEST and self._skips > 1:
            raise JobStopped(
                f"step {step}: gradients overflow fp16 even with a loss scale of {loss_scale:g}, so every step is "
                'skipped; set plan.precision = "bf16" or "fp32", or lower optimizer.lr'
            )
        self.display.warn(
            f"step {step}: gradients overflowed fp16; the step is skipped, the loss scale is {loss_scale:g}"
        )

    def _on_nonfinite(self, step: int, metrics: StepMetrics) -> None:
        values = {"loss": metrics.loss, "gradient_norm": metrics.gradient_norm, "faulty_rank": metrics.faulty_rank}
        self._write("event", {"skipped": int(metrics.skipped), **values})
        what = f"step {step}: the loss is {metrics.loss}, the gradient norm {metrics.gradient_norm}"
        if metrics.faulty_rank is not None:
            what += f", first on rank {metrics.faulty_rank}"
        if metrics.faulty_parameter is not None:
            what += f", the gradient of {metrics.faulty_parameter!r} is not finite"
        if self.train.on_nonfinite == "stop":
            raise JobStopped(f'{what}; lower optimizer.lr, or set train.on_nonfinite = "skip"')
        if not metrics.skipped:
            raise JobStopped(f"{what}; the update is applied already, so the step cannot be skipped")
        if self._skips > self.train.max_skips:
            raise JobStopped(f"{what}; {self._skips} steps in a row were skipped, more than train.max_skips")
        self.display.warn(f"{what}; the step is skipped")

    def _write_row(self, metrics: StepMetrics, lr: float) -> None:
        self._read_losses()
        progress, timing = self.progress, self._timing
        speed = timing.tokens / timing.seconds
        row = Row(
            step=progress.step,
            loss=progress.row_loss / progress.row_tokens if progress.row_tokens else math.nan,
            lr=lr,
            gradient_norm=metrics.gradient_norm,
            tokens_per_second=speed,
            utilisation=self.flops_per_target * speed / self._peak if self._peak else None,
            seconds_left=(self.train.steps - progress.step) * timing.seconds / timing.steps,
        )
        progress.row_loss, progress.row_tokens = 0.0, 0
        self._timing = Timing()
        self.display.row(row)
        totals = {"tokens": progress.tokens, "samples": progress.samples, "seconds": progress.seconds}
        moved = asdict(metrics.offload) if metrics.offload is not None else {}
        totals |= {f"offload_{name}": value for name, value in moved.items()}
        self._write("train", {**asdict(row), **totals})

    def _evaluate(self) -> bool:
        """Evaluates; returns whether a stop was asked for meanwhile, which gives the evaluation up."""
        if self.held_out is None:
            return False
        stop = False

        def stopped() -> bool:
            nonlocal stop
            stop = self._flag.poll(self._stop_wanted())
            return stop

        self.parallel.drain()
        found = evaluation.evaluate(self.parallel, self.held_out, self.train.eval_batches, stopped)
        if found is not None:
            self.evaluation, self._evaluated = found, self.progress.step
            compression = self.held_out.compression
            others = {f"bits_per_byte_{name}": bits for name, bits in compression.items()}
            self._write("eval", {**asdict(found), **others})
            self.display.line(f"step {self.progress.step}   {evaluation.described(found, compression)}")
        return stop

    def _save(self, last: bool = False) -> None:
        self._read_losses()
        self.parallel.drain()
        state = {**self.parallel.state_dict(), **random_state.capture(self.ranks.rank, self.device)}
        facts = {
            "progress": asdict(self.progress),
            "ranks": self.ranks.size,
            "settings": self.settings,
            "facts": self._facts,
        }
        save = self._checkpoints.save_last if last else self._checkpoints.save
        save(self.progress.step, state, facts)

    def _write(self, kind: str, values: Mapping[str, float | int | None]) -> None:
        if self._metrics is not None:
            self._metrics.write(kind, self.progress.step, values)

    def _tell_end(self, stopped: bool) -> None:
        at = f"step {self.progress.step} of {self.train.steps}"
        if not stopped:
            more = "" if self._loss is not None else "; to train on, raise train.steps"
            self.display.line(f"finished {at}; the run is in {self.folder.path}{more}")
            return
        self.display.line(f"stopped at {at}, as asked; it continues with train.run={self.folder.path}")
