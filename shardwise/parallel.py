"""A model spread over ranks, as `parallelize` makes it: steps, evaluation, and its state by name."""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwise import batch as batches
from shardwise import collectives
from shardwise.batch import Batch
from shardwise.exchange import Totals
from shardwise.given import refuse_changed, refuse_different_batches, require_lr
from shardwise.layout import share
from shardwise.loss import Loss
from shardwise.memory.block_scale import BlockScales
from shardwise.memory.precision import LossScale, Precision
from shardwise.memory.recompute import moments_of
from shardwise.memory.report import Report
from shardwise.mesh import Mesh
from shardwise.optimizers.optimizer import Optimizer
from shardwise.pipeline_parallel.runner import Microbatch
from shardwise.pipeline_parallel.schedule import (
    Action,
    Kind,
    Schedule,
    Step,
    drain_rows,
    round_rows,
    transfers,
)
from shardwise.pipeline_parallel.timeline import Event, Timeline
from shardwise.pipeline_parallel.versions import update_groups
from shardwise.plan import Plan
from shardwise.randomness import generators, restore
from shardwise.state import Assembly, State
from shardwise.step_metrics import StepMetrics
from shardwise.updates import Updates


class Parallel:
    """A model spread over ranks. Made by `parallelize`; every method but the properties is collective over the job."""

    def __init__(
        self,
        assembly: Assembly,
        plan: Plan,
        mesh: Mesh,
        schedule: Schedule,
        loss: Loss,
        optimizer: Optimizer | None,
        *,
        clip: float | None,
        precision: Precision,
        scales: BlockScales | None = None,
    ) -> None:
        self.plan = plan
        self.mesh = mesh
        self.schedule = schedule
        self.model = assembly.model
        self.stage_parameters = assembly.stage_parameters
        self._assembly = assembly
        self._state = State(assembly, mesh, optimizer)
        self.chunks = assembly.chunks
        self._runner = assembly.runner
        self._loss = loss
        self._optimizer = optimizer
        self._dtype = precision.compute
        self._device = mesh.device()
        self._rank = mesh.axis("pipeline").rank
        self._steps_taken = 0
        self._rounds_run = 0  # steps since the pipeline was last empty
        self._broken = self._closed = False  # whether an error has left a step half done; whether the job is over
        self._chain = assembly.chain  # until the first batch has been seen
        self._compared = False  # whether ranks that read the same rows have been found to do so
        self._group_of = update_groups(schedule)
        self._rows: dict[str, tuple[Step, ...]] = {}
        self._events: list[Event] = []
        names = ("world", "data", "stage") if schedule.asynchronous else ("world", "data")
        self._sums = {name: Totals(mesh.axis(name)) for name in names}
        loss_scale = LossScale() if scales is None and precision.compute == torch.float16 else scales
        self._updates = Updates(assembly, mesh, schedule, optimizer, clip, loss_scale, self._sums)
        self._runner.update = self._updates.apply
        self.step_count = self._updates.step_count
        self.loss_scale = loss_scale

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a parallel model belongs to its ranks and is neither copied nor pickled: take parallel.full_parameters(), "
            "or save it with shardwise.CheckpointFolder"
        )

    # Shares of a batch

    @property
    def data_rank(self) -> int:
        """Which share of a global batch this rank reads."""
        return self.mesh.axis("data").rank

    @property
    def num_data_ranks(self) -> int:
        """How many shares a global batch has."""
        return self.mesh.axis("data").size

    def share(self, batch: Batch) -> Batch:
        """This rank's rows of a global batch of B rows: r*B//R to (r+1)*B//R for data rank r of R."""
        return batches.rows(batch, *share(batches.num_rows(batch), self.data_rank, self.num_data_ranks))

    # Steps

    def step(self, batch: Batch, lr: float | None = None) -> StepMetrics:
        """One training step.

        Args:
            batch: (inputs, targets), this data rank's rows of the global batch, whole sequences; the same on all ranks
                of a data rank.
            lr: learning rate of this step; by default the optimizer's.

        Returns:
            the step's metrics. With an asynchronous schedule the backwards and updates of its last microbatches belong
            to the next call, or to `drain`.

        Raises:
            ValueError: the model was built without an optimizer, the batch has fewer rows than there are microbatches,
                or, in the first step, ranks of a data rank were given different batches, or a model that is cut is not
                the chain of the parts that it lists.
            RuntimeError: a peer is gone, or an earlier step has failed.
        """
        if self._optimizer is None:
            raise ValueError("this model has no optimizer: pass parallelize(..., optimizer=shardwise.AdamW())")
        self._require_whole()
        lr = require_lr(self._optimizer.lr if lr is None else lr)
        batches.require(batch)
        refuse_changed(self.chunks, self._assembly.frozen)
        if not self._compared:
            refuse_different_batches(batch, self.mesh)
            self._compared = True
        first = self._rounds_run * self.schedule.num_microbatches
        traffic = self._assembly.traffic
        before = traffic.copy() if traffic is not None else None
        counts = self._feed(batch, first, training=True)
        updates = self._updates
        self._runner.loss_scale = updates.begin(lr, self._rounds_run)
        self._run(self._steps("next" if self._rounds_run else "first"), first)
        self._note(first)
        if self.schedule.asynchronous:
            self._rounds_run += 1
        else:
            self._runner.finish()
        if self._assembly.recomputation is not None:
            self._assembly.recomputation.after_step()
        losses = self._runner.losses
        totals = torch.zeros(1 + 3 * self.mesh.num_ranks, dtype=torch.float64)
        if losses:
            totals[0] = torch.stack(losses).sum().to("cpu", torch.float64)
            totals[1 + self.mesh.rank] = 0.0 if math.isfinite(float(totals[0])) else 1.0
            # Every tensor rank of the last stage has the same loss; context ranks have parts of it.
            totals[0] /= self.mesh.sizes["tensor"]
            losses.clear()
        everyone = updates.end(totals)
        scale = self.loss_scale.value if self.loss_scale is not None else None
        moved = traffic.copy() - before if traffic is not None and before is not None else None
        self._steps_taken += 1
        return StepMetrics(
            self._steps_taken,
            everyone,
            lambda: int(counts().sum()),
            updates.norm,
            updates.skipped,
            scale,
            moved,
            self._assembly.order,
        )

    @property
    def skipped_blocks(self) -> int:
        """Blocks that the last step left out, with a loss scale for every block."""
        return self._updates.skipped_blocks

    @property
    def recomputed(self) -> Report | None:
        """What this rank computes again in backward, and what that saves and costs; None before it has been measured in
        the first two steps, and if nothing is."""
        recomputation = self._assembly.recomputation
        return recomputation.report if recomputation is not None else None

    def drain(self) -> None:
        """Finish what an asynchronous schedule has in flight; does nothing for a synchronous one, or twice."""
        if not self.schedule.asynchronous or self._rounds_run == 0:
            return
        first = self._rounds_run * self.schedule.num_microbatches
        rows = drain_rows(self.schedule, self._rounds_run)
        self._run(transfers(self.schedule, self._rank, rows), first)
        self._runner.finish()
        self._rounds_run = 0
        self._updates.drained()
        for chunk in self.chunks:
            chunk.settle()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[float, int]:
        """The loss summed over all data ranks' targets, and how many targets there are; changes nothing.

        Args:
            batch: (inputs, targets), this data rank's rows; may have no rows.
        """
        self._require_whole()
        batches.require(batch)
        count = batches.as_count(self._loss.count(batch[1]))
        self.drain()
        modes = [(module, module.training) for chunk in self.chunks for module in chunk.module.modules()]
        self._feed(batch, 0, training=False)
        try:
            for chunk in self.chunks:
                chunk.module.eval()
            with self._whole():
                self._runner.run(self._steps("evaluate"), 0, training=False)
                self._runner.finish()
        finally:
            for module, mode in modes:
                module.training = mode
        for number in range(self.schedule.num_microbatches):
            self._runner.forget(number)
        totals = torch.zeros(2, dtype=torch.float64)
        if self._runner.losses:
            totals[0] = torch.stack(self._runner.losses).sum().to("cpu", torch.float64)
            self._runner.losses.clear()
        totals[1] = float(count)
        # The last stage alone has a loss, whose parts are on the context ranks; all ranks of a data rank count the same
        # targets.
        totals[0] /= self.mesh.sizes["tensor"]
        totals[1] /= self.mesh.num_ranks / self.num_data_ranks
        collectives.all_reduce(totals, self.mesh.axis("world"))
        return float(totals[0]), round(float(totals[1]))

    def _run(self, steps: tuple[Step, ...], first: int) -> None:
        """Run a row of training; the program's own random numbers go on as if it had not been."""
        state = generators()
        with self._whole():
            self._runner.run(steps, first)
        restore(state)

    def _require_whole(self) -> None:
        if self._closed:
            raise RuntimeError("this model was closed, so its ranks no longer hear each other: build it anew")
        if self._broken:
            raise RuntimeError(
                "an earlier step has failed midway and left gradients of a part of its batch: build the model anew "
                "and load a checkpoint"
            )

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """What is inside is done as a whole, or this rank takes part in nothing more, which others are told: they
        would wait for as long as a program lives that has caught the error."""
        self._broken = True
        try:
            yield
        except BaseException:
            self._runner.wire.leave()
            self._assembly.reducer.leave()
            for division in self._assembly.closes:
                division.leave()
            for sums in self._sums.values():
                sums.leave()
            raise
        self._broken = False

    def _feed(self, batch: Batch, first: int, training: bool) -> Callable[[], Tensor]:
        """Give the runner the batch's microbatches, numbered from `first`. Returns the global counts by update, once
        they are there."""
        num = self.plan.microbatches
        if training and batches.num_rows(batch) < num:
            raise ValueError(
                f"a batch of {batches.num_rows(batch)} rows cannot make plan.microbatches = {num}; use fewer "
                "microbatches or more rows a data rank"
            )
        if self._chain is not None:
            self._chain.require(batch[0])
            self._chain = None
        batch = batches.in_precision(batches.to_device(batch, self._device), self._dtype)
        parts = [batches.microbatch(batch, number, num) for number in range(num)]
        counts = torch.zeros(max(self._group_of) + 1, dtype=torch.int64)
        if training:
            for number, (_, targets) in enumerate(parts):
                group = self._group_of[number * self.schedule.slices]
                counts[group] += batches.as_count(self._loss.count(targets))
        wait = self._sums["data"].start(counts) if training else lambda: counts

        def count_of(group: int) -> Tensor:
            return wait()[group]

        runs = [run for number, part in enumerate(parts) for run in self._assembly.local(part, number)]
        for number, (inputs, targets) in enumerate(runs):
            group = self._group_of[number]
            self._runner.feed(
                first + number,
                Microbatch(inputs, targets, (training, *batches.signature(inputs)), partial(count_of, group)),
            )
        return wait

    def _steps(self, which: str) -> tuple[Step, ...]:
        if which not in self._rows:
            if which == "evaluate":
                # In order of microbatch, then stage: nothing waits for something later.
                rows = tuple(
                    tuple(
                        Action(Kind.F, number, chunk)
                        for number in range(self.schedule.num_microbatches)
                        for chunk in range(self.schedule.num_chunks)
                    )
                    for _ in range(self.schedule.num_stages)
                )
            else:
                rows = round_rows(self.schedule, 0 if which == "first" else 1)
            self._rows[which] = transfers(self.schedule, self._rank, rows)
        return self._rows[which]

    # State by name

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the job's state, for torch.distributed.checkpoint to save, or to load in place:
        "model/<name>" for parameters and buffers, "optimizer/<parameter>/<moment>", and "step". A value is a tensor, or
        `Pieces` of one, with which nothing else can be done. Drains first."""
        self.drain()
        state: dict[str, Any] = {"step": self.step_count}
        if self.loss_scale is not None:
            state["loss_scale"] = self.loss_scale.state
        return state | self._state.by_name()

    def loaded(self) -> None:
        """Call after tensors of `state_dict()` were overwritten in place."""
        self._state.loaded()

    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter (in mixed precision its master), whole, on every rank, in the model's own order."""
        self.drain()
        return self._state.full_parameters()

    def full_gradients(self) -> dict[str, Tensor]:
        """Every trained parameter's summed gradient of the last update, before clipping, whole, on every rank."""
        return self._state.full_gradients()

    def replicas_agree(self) -> str | None:
        """The name of the first parameter whose bits differ between ranks that hold the same piece, None if there is
        none."""
        self.drain()
        return self._state.replicas_agree()

    def memory(self) -> dict[str, int]:
        """Bytes this rank holds between steps for trained parameters: "parameters", "gradients" and "optimizer" state;
        and "buffers", what whole gradients land in during backward from ZeRO stage 2 on. Padding of buckets is counted,
        other ranks' memory that this one maps is not."""
        return self._state.memory()

    # The recorded timeline

    def measure(self, example: Batch, repeats: int = 3) -> Timeline | None:
        """Run the schedule's passes without its updates on an example in every microbatch; what ran when, on all ranks.
        Changes nothing."""
        num = self.plan.microbatches
        example = batches.in_precision(batches.to_device(example, self._device), self._dtype)
        count = torch.as_tensor(self._loss.count(example[1]))
        rows = tuple(tuple(action for action in row if action.kind is not Kind.U) for row in self.schedule.rows)
        steps = transfers(self.schedule, self._rank, rows)
        state = generators()
        for repeat in range(repeats):
            if repeat == 1:  # the first run negotiates shapes and warms caches
                self.record()
            runs = [run for number in range(num) for run in self._assembly.local(example, number)]
            for number, (inputs, targets) in enumerate(runs):
                signature = (True, *batches.signature(inputs))
                self._runner.feed(number, Microbatch(inputs, targets, signature, lambda: count))
            self._runner.run(steps, 0)
            self._runner.finish()
            self._note(0)
        restore(state)
        self._runner.losses.clear()
        for chunk in self.chunks:
            chunk.buckets.abandon()
        for buckets in self._assembly.shared:
            buckets.abandon()
        return self.timeline()

    def adopt(self, schedule: Schedule) -> None:
        """Go on with another synchronous schedule for the same stages and microbatches."""
        assert schedule.placement == self.schedule.placement, schedule.placement
        assert not schedule.asynchronous, schedule.name
        self.schedule = self._runner.schedule = schedule
        self._rows.clear()
        if self._assembly.recomputation is not None:
            self._assembly.recomputation.moments = moments_of(schedule, self._rank)

    def record(self) -> None:
        """Begin to note when each action runs; `timeline` gives what was noted."""
        self._events = []
        self._runner.stamps = []

    def timeline(self) -> Timeline | None:
        """Stop noting, and put together what the pipeline ranks of the first data rank noted; None if nothing was."""
        mine = (
            self._events
            if self.data_rank == 0 and self.mesh.axis("context").rank == self.mesh.axis("tensor").rank == 0
            else []
        )
        self._events, self._runner.stamps = [], None
        everyone = collectives.all_gather_object(mine, self.mesh.axis("world"))
        events = tuple(event for part in everyone for event in part)
        found = Timeline(self.schedule.name, "measured", "s", events, self.schedule.slices)
        return found.from_zero() if events else None

    def _note(self, first: int) -> None:
        """Take what the runner noted of one step, whose microbatches are numbered from `first`."""
        stamps = self._runner.stamps
        if stamps is None:
            return
        step = 1 + self._events[-1].step if self._events else 0
        for action, start, end in stamps:
            stage = self.schedule.stage(self._rank, action.chunk)
            self._events.append(
                Event(self._rank, action._replace(microbatch=action.microbatch - first), stage, start, end, step)
            )
        stamps.clear()

    def close(self) -> None:
        """Stop background threads and close connections; the model stays usable, the job does not go on."""
        self._closed = True
        self._assembly.reducer.close()
        for division in self._assembly.closes:
            division.close()
        self._runner.wire.close()
        for sums in self._sums.values():
            sums.close()
