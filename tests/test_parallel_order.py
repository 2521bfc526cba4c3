"""The order of events, where gradients lie, weight versions, and what others do when a rank is gone."""

import copy
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.layout import share
from shardwise.optimizers import SGD, AdamW
from shardwise.parallel import Parallel
from shardwise.parallelize import parallelize
from shardwise.pipeline_parallel.planned import build_schedule
from shardwise.pipeline_parallel.schedule import unroll, versions
from shardwise.pipeline_parallel.versions import update_groups, version_table
from shardwise.plan import Plan
from tests import user_models
from tests.pool import RankFailed, run_ranks


def make(plan: dict[str, Any], model: nn.Module | None = None, **settings: Any) -> Parallel:
    settings = {"loss": user_models.squares, "optimizer": AdamW(lr=0.01), "bucket_bytes": 1, **settings}
    return parallelize(model or user_models.make("plain"), Plan(**plan), **settings)


# The order of events


def events(plan: dict[str, Any], overlap: bool = True) -> list[str]:
    """What happens in the second step: gradients that land, sums that begin."""
    parallel = make(plan, user_models.make("linears"), overlap=overlap)
    (batch,) = user_models.batches(1, 8)
    parallel.step(parallel.share(batch))
    seen: list[str] = []
    for _, entry in parallel.chunks[0].buckets:
        landing = entry.slot.on_landing

        def landed(slot: Any, landing: Any = landing) -> None:
            seen.append(f"landed {slot.name[0]}")
            landing(slot)

        entry.slot.on_landing = landed
    reducer = parallel.chunks[0].buckets.reducer
    for name in ("all_reduce", "reduce_scatter"):
        begin = getattr(reducer, name)

        def start(*given: Any, begin: Any = begin) -> Any:
            seen.append("sum")
            return begin(*given)

        setattr(reducer, name, start)
    parallel.step(parallel.share(batch))
    return seen


@pytest.mark.parametrize("plan", [{"replicate": 2}, {"shard": 2, "zero": 1}], ids=str)
def test_sums_begin_while_backward_still_runs(plan: dict[str, Any]) -> None:
    alternating = [event for layer in "3210" for event in (f"landed {layer}", "sum")]
    assert run_ranks(events, 2, plan) == [alternating] * 2
    late = [f"landed {layer}" for layer in "3210"] + ["sum"] * 4
    assert run_ranks(events, 2, plan, False) == [late] * 2


def test_nothing_is_summed_while_microbatches_accumulate() -> None:
    quiet = [f"landed {layer}" for _ in range(2) for layer in "3210"]
    for found in run_ranks(events, 2, {"replicate": 2, "microbatches": 3}):
        assert found[:8] == quiet
        assert found.count("sum") == 4
        assert found[8:] == [event for layer in "3210" for event in (f"landed {layer}", "sum")]


def growing() -> str:
    """A layer that is used more often than in the first step, whose sum has begun by then."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.times = 1

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                x = self.linear(x)
            return x

    torch.manual_seed(0)
    again = Again()
    parallel = make({"replicate": 2}, nn.Sequential(again, nn.Linear(4, 4)))
    (batch,) = user_models.batches(1, 4)
    parallel.step(parallel.share(batch))
    again.times = 3
    try:
        parallel.step(parallel.share(batch))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_parameter_used_more_often_than_before_is_an_error_and_not_a_wrong_sum() -> None:
    for text in run_ranks(growing, 2):
        assert "parameter '0.linear." in text
        assert "parallelize(..., overlap=False)" in text


class Routed(nn.Module):
    """Takes a way through its layers that depends on the values it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        way = int(x.detach().sum() * 1000) % 3
        x = (self.a, nn.Sequential(self.b, self.c), nn.Sequential(self.b, self.a))[way](x)
        y: Tensor = self.last(x)
        return y


def routed(plan: dict[str, Any], overlap: bool) -> list[str]:
    """The gradients that differ from those of the same microbatches on one device, in some steps."""
    torch.manual_seed(0)
    model = Routed()
    plain = copy.deepcopy(model)
    parallel = make(plan, model, optimizer=SGD(lr=0.0), overlap=overlap)
    odd = []
    for number, (x, y) in enumerate(user_models.batches(5, 6)):
        plain.zero_grad()
        for rank in range(parallel.num_data_ranks):
            low, high = share(6, rank, parallel.num_data_ranks)
            for part in range(plan["microbatches"]):
                start, stop = share(high - low, part, plan["microbatches"])
                rows = slice(low + start, low + stop)
                torch.autograd.backward(user_models.squares.sum(plain(x[rows]), y[rows]) / 6)
        parallel.step(parallel.share((x, y)))
        for name, gradient in parallel.full_gradients().items():
            right = plain.get_parameter(name).grad
            right = torch.zeros_like(gradient) if right is None else right
            if not torch.allclose(gradient, right, atol=1e-5):
                odd.append(f"{name} in step {number}")
    return odd


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "plan",
    [{"replicate": 3, "microbatches": 2}] + [{"shard": 2, "zero": zero, "microbatches": 3} for zero in (0, 1, 2, 3)],
    ids=str,
)
def test_parameters_that_some_ranks_use_in_some_microbatches(plan: dict[str, Any], overlap: bool) -> None:
    assert run_ranks(routed, Plan(**plan).num_ranks, plan, overlap)[0] == []


def memory(plan: dict[str, Any]) -> None:
    model = user_models.make("plain")
    parallel = make(plan, model, bucket_bytes=1 << 20)
    (batch,) = user_models.batches(1, 4)
    for _ in range(2):
        parallel.step(parallel.share(batch))
        for bucket, entry in parallel.chunks[0].buckets:
            parameter = model.get_parameter(entry.name)
            assert bucket.landing is not None
            for tensor, flat in ((parameter, bucket.values), (entry.slot.view, bucket.landing.tensor)):
                offset = bucket.offsets[entry.name] * flat.element_size()
                assert tensor.data_ptr() == flat.data_ptr() + offset
                assert tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@pytest.mark.parametrize("plan", [{}, {"replicate": 2}, {"shard": 2, "zero": 1}], ids=str)
def test_parameters_and_gradients_lie_in_their_bucket(plan: dict[str, int]) -> None:
    run_ranks(memory, Plan(**plan).num_ranks, plan)


# Asynchronous schedules


@pytest.mark.parametrize(("name", "stages", "m"), [("pipedream", 3, 2), ("pipedream", 4, 1), ("pipedream-2bw", 3, 4)])
@pytest.mark.parametrize("sync", [False, True])
def test_versions_repeat_from_step_to_step(name: str, stages: int, m: int, sync: bool) -> None:
    if sync and name != "pipedream":
        return
    schedule = build_schedule(Plan(pipeline=stages, schedule=name, microbatches=m, vertical_sync=sync))
    look_up = version_table(schedule)
    assert look_up is not None
    steps = 25
    for number, row in enumerate(versions(unroll(schedule, steps))):
        assert tuple(look_up(number, stage) for stage in range(stages)) == row, number
    groups = update_groups(schedule)
    assert groups == (list(range(m)) if name == "pipedream" else [0] * m)


def test_a_synchronous_schedule_has_no_versions() -> None:
    assert version_table(build_schedule(Plan(pipeline=2, microbatches=2))) is None


# Ranks that are gone


def broken(folder: str, plan: dict[str, int]) -> None:
    """The last rank fails in the forward of microbatch 1 of the second step; the others note what they were told, and
    go too."""
    rank = dist.get_rank()
    parallel = make(plan, user_models.make("linears"))
    (batch,) = user_models.batches(1, 8)
    calls = 0

    def fail(module: nn.Module, given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise ArithmeticError("planted")

    if rank == parallel.mesh.num_ranks - 1:
        parallel.chunks[0].module.register_forward_pre_hook(fail)
    start = time.perf_counter()
    try:
        for _ in range(3):
            parallel.step(parallel.share(batch)).loss  # noqa: B018
            start = time.perf_counter()
    except Exception as error:
        text = "\n".join([repr(error), *getattr(error, "__notes__", [])])
        Path(folder, str(rank)).write_text(f"{time.perf_counter() - start:.3f}\n{text}")
    os._exit(1)


def test_a_rank_that_goes_takes_the_others_with_it_within_seconds_who_say_where(tmp_path: Path) -> None:
    plan = {"pipeline": 2, "replicate": 2, "microbatches": 2}
    with pytest.raises(RankFailed, match="the process died"):
        run_ranks(broken, 4, str(tmp_path), plan)
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert told.keys() == {"0", "1", "2", "3"}
    for rank, text in told.items():
        assert float(text.split("\n")[0]) < 30, text
        if rank == "3":
            assert "planted" in text
            assert "in F of microbatch 1 on stage 1 (pipeline rank 1)" in text
        else:
            stage = int(rank) // 2
            assert f"on stage {stage} (pipeline rank {stage})" in text, text
            assert "is gone" in text, text


def caught(plan: dict[str, Any]) -> list[str]:
    """What every rank's program catches when the last rank's loss fails, and when it then goes on."""
    fails = False

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        if fails:
            raise ArithmeticError("planted")
        return user_models.squares.sum(output, targets)

    parallel = make(plan, user_models.make("linears"), loss=loss)
    (batch,) = user_models.batches(1, 8)
    parallel.step(parallel.share(batch))
    parallel.drain()
    fails = parallel.mesh.rank == parallel.mesh.num_ranks - 1
    found = []
    for _ in range(2):
        try:
            for _ in range(3):
                parallel.step(parallel.share(batch)).loss  # noqa: B018
        except (ArithmeticError, RuntimeError) as error:
            found.append(str(error))
    parallel.close()
    time.sleep(1)  # the process lives on, as a program's would
    return found


@pytest.mark.parametrize(
    "plan",
    [
        {"pipeline": 2, "microbatches": 2},
        {"pipeline": 2, "microbatches": 2, "schedule": "pipedream"},
        {"replicate": 2},
        {"shard": 2, "zero": 2, "microbatches": 2},
        {"pipeline": 2, "replicate": 2, "microbatches": 2},
    ],
    ids=str,
)
def test_a_program_that_catches_a_ranks_error_leaves_no_other_rank_waiting(plan: dict[str, Any]) -> None:
    start = time.perf_counter()
    *others, last = run_ranks(caught, Plan(**plan).num_ranks, plan)
    assert time.perf_counter() - start < 30
    assert last[0] == "planted"
    for first, _ in others:
        assert "is gone" in first
    for _, then in [*others, last]:
        assert "an earlier step has failed midway" in then
