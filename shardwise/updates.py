"""Updates of a model whose gradients are summed: their norm, clipping, the loss scale, what is skipped."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shardwise import collectives
from shardwise.data_parallel.buckets import Buckets, Scale
from shardwise.exchange import Totals
from shardwise.memory.block_scale import BlockScales
from shardwise.memory.precision import LossScale
from shardwise.mesh import Mesh
from shardwise.optimizers.optimizer import Optimizer
from shardwise.pipeline_parallel.schedule import Action, Schedule
from shardwise.state import Assembly


class Updates:
    """The updates of an assembled model.

    Args:
        assembly: whose parameters to update.
        mesh: the job's mesh.
        schedule: of which every U is an update.
        optimizer: None for a model that is evaluated only.
        clip: the largest norm of the gradients; None for any.
        loss_scale: of fp16; None in other precisions.
        sums: by axis, totals over its ranks.

    Attributes:
        step_count: (), int64, for checkpoints.
        norm: of the last update's gradients; None if updates do not need it.
        skipped: whether the step at hand was left out, or part of it.
        skipped_blocks: left out of the last step, with a loss scale for every block.
    """

    def __init__(
        self,
        assembly: Assembly,
        mesh: Mesh,
        schedule: Schedule,
        optimizer: Optimizer | None,
        clip: float | None,
        loss_scale: LossScale | BlockScales | None,
        sums: Mapping[str, Totals],
    ) -> None:
        self.clip = clip
        self.loss_scale = loss_scale
        self.step_count = torch.zeros((), dtype=torch.int64)
        self.norm: float | None = None
        self.skipped = self._skipped_in_drain = False
        self.skipped_blocks = 0
        self._assembly = assembly
        self._mesh = mesh
        self._schedule = schedule
        self._optimizer = optimizer
        self._sums = sums
        self._units = [*(chunk.buckets for chunk in assembly.chunks), *assembly.shared]
        self._divided = any(chunk.buckets.stage for chunk in assembly.chunks)
        self._lr = 0.0
        self._left = 0  # of the step's actions U, those to come
        self._fault = 0  # 1 + the place of the first parameter whose gradient this rank has found not finite
        # Of asynchronous schedules: by step since the pipeline was empty, what its loss was multiplied by; the largest
        # of those factors whose gradients this rank has found not finite since the last step; and what all ranks found
        # in the last step, which is read when it is there anyway.
        self._scales: dict[int, float] = {}
        self._overflowed = 0.0
        self._reported: Callable[[], Tensor] | None = None

    def begin(self, lr: float, rounds_run: int) -> float:
        """A step begins.

        Args:
            lr: learning rate of its updates.
            rounds_run: steps since the pipeline was empty.

        Returns:
            what to multiply the loss by.
        """
        self._lr = lr
        # What a drain has found is told by the step that follows.
        self.skipped, self._skipped_in_drain = self._skipped_in_drain, False
        self._left = len(self._assembly.chunks)
        if self.loss_scale is None:
            return 1.0
        self._scales[rounds_run] = self.loss_scale.value
        self._scales.pop(rounds_run - 2 - 2 * self._schedule.total_stages // self._schedule.num_microbatches, None)
        return self._scales[rounds_run]

    def end(self, totals: Tensor) -> Callable[[], Tensor]:
        """A step ends: what this rank has found is added to `totals`, and these are summed over ranks.

        Args:
            totals: (1 + 3 * ranks,): the loss, by rank whether its own loss was not finite, and by rank two numbers
                that are filled in here.

        Returns:
            the sum, once it is there.
        """
        rank, num_ranks = self._mesh.rank, self._mesh.num_ranks
        totals[1 + num_ranks + rank] = self._overflowed
        totals[1 + 2 * num_ranks + rank], self._fault = self._fault, 0
        everyone = self._sums["world"].start(totals)
        if self._schedule.asynchronous:
            self._overflowed = 0.0
            self.skipped |= self._told_of_overflow()
            self._reported = everyone
        return everyone

    def drained(self) -> None:
        """Nothing is in flight any more, with an asynchronous schedule."""
        self._scales.clear()
        self._skipped_in_drain = self._told_of_overflow()
        largest = torch.zeros(1 + self._mesh.num_ranks + 1, dtype=torch.float64)
        largest[-1], self._overflowed = self._overflowed, 0.0
        collectives.all_reduce(largest, self._mesh.axis("world"), "max")
        if largest.any():
            self._reported = lambda: largest
            self._skipped_in_drain |= self._told_of_overflow()
        self._reported = None

    def _told_of_overflow(self) -> bool:
        """Whether any rank skipped an update of an asynchronous schedule in the step whose report is there.

        Stages skip each by itself, at times of their own. What they found travels with the step's loss and is read a
        step later, when it is there without waiting; the loss scale changes then, on all ranks at once. Overflows of
        gradients that were under way with a factor that has fallen since do not lower it again.
        """
        if self._reported is None:
            return False
        largest = float(self._reported()[1 + self._mesh.num_ranks : 1 + 2 * self._mesh.num_ranks].max())
        if isinstance(self.loss_scale, LossScale) and largest <= self.loss_scale.value:
            self.loss_scale.count(overflowed=largest > 0)
        return largest > 0

    def apply(self, action: Action) -> None:
        """Run an action U: update one chunk with an asynchronous schedule, else all of them once the last chunk has
        come to it."""
        if self._schedule.asynchronous:
            self._update_chunk(action)
            return
        self._left -= 1
        if not self._left:
            self._update_all()

    def _update_chunk(self, action: Action) -> None:
        assert self._optimizer is not None
        chunk = self._assembly.chunks[action.chunk]
        chunk.buckets.wait()
        of_loss = self._scales.get(action.microbatch // self._schedule.num_microbatches, 1.0)
        scale = self._scale(chunk.buckets.squares() if self._looks else 0.0, "stage", of_loss)
        if scale is None or not self._looks:
            self._fault = self._fault or self._faulty([chunk.buckets])
        if self._divided:
            self._assembly.reducer.meet()  # as below
        chunk.update(self._optimizer, self._lr, int(self.step_count) + 1, scale or Scale(), apply=scale is not None)
        if self._divided:
            self._assembly.reducer.meet()
        if self._divided and scale is not None:
            chunk.buckets.refresh()
        if scale is None:
            self._overflowed = max(self._overflowed, of_loss)
        # Updates that were skipped count: stages skip each by itself, and all ranks must come to the same number.
        if action.chunk == len(self._assembly.chunks) - 1:
            self.step_count += 1

    def _update_all(self) -> None:
        assert self._optimizer is not None
        shared = self._assembly.shared
        for buckets in shared:
            buckets.last(backward=True, weights=True)
            buckets.flush(overlap=False)
        for buckets in self._units:
            buckets.wait()
        if isinstance(self.loss_scale, BlockScales):
            scale = self._scale_blocks(self.loss_scale)
        else:
            of_loss = self.loss_scale.value if self.loss_scale is not None else 1.0
            squares = math.fsum(buckets.squares() for buckets in self._units) if self._looks else 0.0
            scale = self._scale(squares, "world", of_loss)
        self.skipped = scale is None
        if scale is None or not self._looks:
            self._fault = self._faulty(self._units)
        step = int(self.step_count) + 1
        if self._divided and scale is not None:
            # A rank whose gradients are all summed may still read the parameters, for the gradient of its input.
            self._assembly.reducer.meet()
        for chunk in self._assembly.chunks:
            chunk.update(self._optimizer, self._lr, step, scale or Scale(), apply=scale is not None)
        for buckets in shared:
            if scale is not None:
                buckets.update(self._optimizer, self._lr, step, scale, self._assembly.splits)
            buckets.spent = True
        if isinstance(self.loss_scale, LossScale):
            self.loss_scale.count(overflowed=scale is None)
        if self._divided and scale is not None:
            self._assembly.reducer.meet()
            for buckets in self._units:
                buckets.refresh()
        if scale is not None:
            self.step_count += 1

    def _faulty(self, units: Sequence[Buckets]) -> int:
        """1 + the place, in the model's order, of the first parameter whose summed gradient is not finite in this
        rank's part of it; 0 if there is none. Reads the gradients once."""
        names = {name for buckets in units for bucket in buckets.buckets for name in bucket.faulty()}
        return next((place for place, name in enumerate(self._assembly.order, 1) if name in names), 0)

    def _scale_blocks(self, scales: BlockScales) -> Scale | None:
        """What an update multiplies each block's gradients by; blocks whose gradients are not finite are left out, and
        all ranks agree on which. None if that is all of them."""
        squares = torch.zeros(len(scales.state), dtype=torch.float64)
        for buckets in self._units:
            for bucket in buckets.buckets:
                squares[bucket.block] += bucket.squares() / scales[bucket.block] ** 2
        total = self._sums["world"].start(squares)()
        finite = total.isfinite()
        self.skipped_blocks = int((~finite).sum())
        self.norm = math.sqrt(float(total[finite].sum())) if finite.any() else math.nan
        blocks = tuple(scales[number] if good else None for number, good in enumerate(finite.tolist()))
        scales.count(~finite)
        if not finite.any():
            return None
        return Scale(self._clipping(self.norm), blocks=blocks)

    @property
    def _looks(self) -> bool:
        """Whether updates need the gradients' norm."""
        return self.clip is not None or self.loss_scale is not None

    def _scale(self, square: float, axis: str, of_loss: float) -> Scale | None:
        """What an update multiplies gradients by whose squared norm has the parts `square` on the ranks of `axis`, and
        whose loss was multiplied by `of_loss`; None if they are not finite."""
        if not self._looks:
            return Scale()
        total = float(self._sums[axis].start(torch.tensor([square], dtype=torch.float64))())
        self.norm = math.sqrt(total) / of_loss if math.isfinite(total) else total
        if not math.isfinite(self.norm):
            return None
        return Scale(self._clipping(self.norm), of_loss)

    def _clipping(self, norm: float) -> float:
        return min(1.0, self.clip / norm) if self.clip is not None and norm > 0 else 1.0
