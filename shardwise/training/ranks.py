"""What training itself says between ranks: small objects and flags, over gloo, beside the tensors of the step."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
# Seconds that ranks wait for the slowest to write its part of a checkpoint; one that has died is noticed at once.
DAY = 86400.0


class RanksFailed(ValueError):
    """Work that all ranks did together failed on some; `reasons` says on which and why, and every rank raises it."""

    def __init__(self, reasons: dict[int, str], num_ranks: int) -> None:
        self.reasons = reasons
        rank, reason = min(reasons.items())
        super().__init__(f"rank {rank}: {reason}" if num_ranks > 1 else reason)


class Ranks:
    """The ranks of the job, `rank` of `size`, on a group of their own, so that a thread may use it beside the step.

    Args:
        group: a gloo group over all ranks; None where the job has one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    @classmethod
    def world(cls, timeout: float = 1800.0) -> Ranks:
        """A new group over all ranks, with its timeout in seconds. Collective over the job."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        return cls(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank, on every rank."""
        if self.group is None:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value."""
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def first(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0 and returns its result on every rank.

        Raises:
            RanksFailed: on every rank, if the work raised an OSError or a ValueError.
        """
        result, reason = None, None
        if self.rank == 0:
            try:
                result = work()
            except (OSError, ValueError) as error:
                reason = reason_of(error)
        result, reason = self.broadcast((result, reason))
        if reason is not None:
            raise RanksFailed({0: reason}, num_ranks=1)
        return result  # type: ignore[return-value]

    def together(self, work: Callable[[], T]) -> list[T]:
        """Runs `work` on every rank and returns the results by rank.

        Raises:
            RanksFailed: on every rank, if any rank's work raised an OSError or a ValueError.
        """
        result, reason = None, None
        try:
            result = work()
        except (OSError, ValueError) as error:
            reason = reason_of(error)
        outcomes = self.gather((result, reason))
        reasons = {rank: why for rank, (_, why) in enumerate(outcomes) if why is not None}
        if reasons:
            raise RanksFailed(reasons, self.size)
        return [value for value, _ in outcomes]  # type: ignore[misc]


class Flag:
    """A flag that any rank can raise and that all ranks see at the same step.

    Each `poll` reads the vote cast at the poll before and casts the next, so the all-reduce runs beside the step and
    costs it nothing; a raised flag is seen one step later.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._vote = torch.zeros((), dtype=torch.int32)
        self._work: dist.Work | None = None

    def poll(self, raised: bool) -> bool:
        """Whether any rank had raised the flag by the poll before. Every rank must poll equally often."""
        if self._ranks.group is None:
            return raised
        seen = False
        if self._work is not None:
            self._work.wait()
            seen = bool(self._vote.item())
        self._vote = torch.tensor(int(raised), dtype=torch.int32)
        self._work = dist.all_reduce(self._vote, dist.ReduceOp.MAX, group=self._ranks.group, async_op=True)
        return seen

    def close(self) -> None:
        """Waits for the last vote."""
        if self._work is not None:
            self._work.wait()
            self._work = None


def reason_of(error: BaseException) -> str:
    """One line for an error of the operating system or of a user."""
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    return str(error) or type(error).__name__
