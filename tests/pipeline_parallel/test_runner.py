"""What the runner does with a schedule: which weights every pass sees, what is held until when, where errors were."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.loss import Loss
from shardwise.optimizers import SGD
from shardwise.parallel import Parallel
from shardwise.parallelize import parallelize
from shardwise.pipeline_parallel import post, wire
from shardwise.pipeline_parallel.planned import build_schedule
from shardwise.pipeline_parallel.schedule import Kind, check, unroll, versions
from shardwise.plan import Plan
from shardwise.verify import Report, verify
from tests import small_models, user_models
from tests.pool import run_ranks

summed = Loss(lambda output, targets: output.sum(), lambda targets: torch.tensor(targets.shape[0]))


class _Seen(torch.autograd.Function):
    """Notes the weight at forward and, as it was saved, at backward; its gradient is always -1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, notes: list[tuple[str, int, int]], microbatch: int) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.notes, ctx.microbatch = notes, microbatch
        notes.append(("forward", microbatch, int(weight)))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        ctx.notes.append(("backward", ctx.microbatch, int(weight)))
        return gradient, torch.full_like(weight, -1.0), None, None


class Version(nn.Module):
    """Its weight is the number of gradients it has been updated with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.notes: list[tuple[str, int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        done = sum(kind == "forward" for kind, _, _ in self.notes)
        y: Tensor = _Seen.apply(x, self.weight, self.notes, done)
        return y


def spread(plan: dict[str, Any], model: nn.Module, **settings: Any) -> Parallel:
    return parallelize(model, Plan(**plan), **{"loss": summed, "optimizer": SGD(lr=1.0), **settings})


def track(plan: dict[str, Any], num_steps: int) -> tuple[list[tuple[str, int, int]], list[int], int]:
    """What the passes of this rank's stage saw, how many versions it held after each action, its weight at the end."""
    stages = [Version() for _ in range(plan["pipeline"])]
    parallel = spread(plan, nn.Sequential(*stages), seed=1)
    rank = parallel.mesh.axis("pipeline").rank
    held = []
    chunk = parallel.chunks[0]
    for name in ("forward", "end_backward", "update"):
        method = getattr(chunk, name)

        def watched(*given: Any, method: Any = method, **named: Any) -> Any:
            value = method(*given, **named)
            held.append(chunk.num_versions)
            return value

        setattr(chunk, name, watched)
    rows = plan["microbatches"]
    for _ in range(num_steps):
        parallel.step((torch.ones(rows, 2), torch.ones(rows)))
    parallel.drain()
    return stages[rank].notes, held, int(parallel.full_parameters()[f"{rank}.weight"])


@pytest.mark.parametrize("p", [2, 3, 4])
def test_pipedream_uses_the_version_of_the_paper_for_both_passes(p: int) -> None:
    """1806.03377 section 3.3: microbatch t on stage i of p, counted from 1, uses w(t - p + i)."""
    m, steps = 3, 4
    plan = {"pipeline": p, "schedule": "pipedream", "microbatches": m}
    for rank, (notes, held, final) in enumerate(run_ranks(track, p, plan, steps)):
        right = {number: max(0, number - (p - 1 - rank)) for number in range(m * steps)}
        assert {number: seen for kind, number, seen in notes if kind == "forward"} == right
        assert {number: seen for kind, number, seen in notes if kind == "backward"} == right
        assert max(held) == p - rank  # versions in memory, as many as microbatches in flight
        assert final == m * steps


def test_vertical_sync_uses_the_first_stages_version_everywhere() -> None:
    p, m, steps = 3, 2, 5
    plan = {"pipeline": p, "schedule": "pipedream", "microbatches": m, "vertical_sync": True}
    for notes, held, final in run_ranks(track, p, plan, steps):
        right = {number: max(0, number - (p - 1)) for number in range(m * steps)}
        assert {number: seen for _, number, seen in notes} == right
        assert max(held) <= p
        assert final == m * steps


def test_two_versions_are_enough_for_2bw() -> None:
    """2006.09503 section 3.1: the microbatches of batch k use W(k - 1)."""
    p, m, steps = 3, 4, 4
    plan = {"pipeline": p, "schedule": "pipedream-2bw", "microbatches": m}
    for notes, held, final in run_ranks(track, p, plan, steps):
        right = {number: m * max(0, number // m - 1) for number in range(m * steps)}
        assert {number: seen for kind, number, seen in notes if kind == "forward"} == right
        assert {number: seen for kind, number, seen in notes if kind == "backward"} == right
        assert max(held) == 2
        assert final == m * steps


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_synchronous_schedules_see_one_version_a_step(schedule: str) -> None:
    plan = {"pipeline": 2, "schedule": schedule, "microbatches": 3}
    for notes, held, final in run_ranks(track, 2, plan, 2):
        assert {number: seen for _, number, seen in notes} == {number: number // 3 * 3 for number in range(6)}
        assert set(held) == {1}
        assert final == 6


class Kept(nn.Module):
    """Two linear layers; what the second saves for its backward is watched."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.saved: list[StorageWeakRef] = []
        self.peak = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.saved.append(StorageWeakRef(y.untyped_storage()))
        self.peak = max(self.peak, self.live())
        return self.second(y)

    def live(self) -> int:
        return sum(not reference.expired() for reference in self.saved)


def keep(plan: dict[str, Any], num_steps: int) -> tuple[int, int, int]:
    """Most activations held at once on this rank over all its chunks, and what is left after a step and at the end."""
    plan = {"cut": (1,) * (plan["pipeline"] * plan.get("chunks", 1)), **plan}
    parts = [Kept() for _ in range(plan["pipeline"] * plan.get("chunks", 1))]
    for part in parts:
        part.load_state_dict(parts[0].state_dict())
    torch.manual_seed(0)
    model = nn.Sequential(*parts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    parallel = spread(plan, model, optimizer=SGD(lr=0.01))
    mine = [parts[stage] for stage in parallel.schedule.placement[parallel.mesh.axis("pipeline").rank]]
    most = 0

    def measure(module: nn.Module, given: Any, output: Any) -> None:
        nonlocal most
        most = max(most, sum(part.live() for part in mine))

    for part in mine:
        part.second.register_forward_hook(measure)
    rows = plan["microbatches"]
    for _ in range(num_steps):
        parallel.step((torch.ones(rows, 4), torch.ones(rows)))
    left = sum(part.live() for part in mine)
    parallel.drain()
    runner = parallel._runner
    assert not runner._held
    assert not runner._local
    assert not runner._microbatches
    return most, left, sum(part.live() for part in mine)


@pytest.mark.parametrize(
    ("name", "p", "v", "m"),
    [
        ("gpipe", 3, 1, 5),
        ("1f1b", 3, 1, 5),
        ("1f1b", 3, 1, 2),
        ("interleaved", 2, 2, 4),
        ("zb-h1", 3, 1, 6),
        ("zb-h2", 3, 1, 7),
        ("zbv", 2, 2, 5),
        ("dualpipev", 2, 2, 5),
        ("pipedream", 3, 1, 4),
        ("pipedream-2bw", 3, 1, 4),
    ],
)
def test_activations_are_let_go_of_when_the_schedule_says(name: str, p: int, v: int, m: int) -> None:
    """The most that a rank's memory ever holds is the checker's number: until the weight gradient has been computed."""
    plan = {"pipeline": p, "chunks": v, "microbatches": m, "schedule": name}
    schedule = build_schedule(Plan(**plan))
    right = check(unroll(schedule, 3) if schedule.asynchronous else schedule).peak_activations
    found = run_ranks(keep, p, plan, 3)
    assert tuple(most for most, _, _ in found) == right
    for rank, (_, left, end) in enumerate(found):
        assert left == (p - 1 - rank if schedule.asynchronous else 0)
        assert end == 0


def test_versions_of_the_checker_are_those_of_the_run() -> None:
    schedule = unroll(build_schedule(Plan(pipeline=3, schedule="pipedream", microbatches=3)), 4)
    assert check(schedule).peak_versions == (3, 2, 1)
    assert versions(schedule)[5] == (3, 4, 5)


# What passes between stages


class Measures(nn.Module):
    """Passes on a number that depends on values, as a mask's longest row would."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, float, Tensor]:
        columns = x[..., : 1 + int(x.detach().sum() * 1000) % 4]  # and a tensor whose shape does
        return self.linear(x), round(float(x.detach().sum()), 6), columns


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, number: float, columns: Tensor) -> Tensor:
        return self.linear(x) * number + columns.sum() * columns.shape[-1]


class Pair(nn.Module):
    stages = ("measures", "uses")

    def __init__(self) -> None:
        super().__init__()
        self.measures, self.uses = Measures(), Uses()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.uses(*self.measures(x))
        return y


def changing() -> list[bool]:
    """Gradients of rows that each pass on other values, as microbatches and one by one."""
    torch.manual_seed(0)
    model, plain = Pair(), Pair()
    plain.load_state_dict(model.state_dict())
    parallel = spread(
        {"pipeline": 2, "microbatches": 5}, model, loss=user_models.squares, negotiate="always", optimizer=SGD(lr=0.0)
    )
    agree = []
    for x, y in user_models.batches(2, 5):
        plain.zero_grad()
        for row in range(5):
            torch.autograd.backward(user_models.squares.sum(plain(x[row : row + 1]), y[row : row + 1]) / 5)
        parallel.step((x, y))
        for name, gradient in parallel.full_gradients().items():
            agree.append(torch.allclose(gradient, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-4))
    return agree


def test_values_and_shapes_that_change_are_sent_each_time_if_asked() -> None:
    assert run_ranks(changing, 2) == [[True] * 8] * 2


def unasked() -> str:
    torch.manual_seed(0)
    parallel = spread({"pipeline": 2, "microbatches": 3}, Pair(), loss=user_models.squares)
    (batch,) = user_models.batches(1, 6)
    try:
        parallel.step(batch)
    except (ValueError, RuntimeError) as error:
        parallel.close()
        return str(error)
    return "no error"


def test_values_that_change_unasked_are_named() -> None:
    sender, receiver = run_ranks(unasked, 2)
    assert "what passes from stage 0 to stage 1 changed from float32 [2, 4, 4]" in sender
    assert sender.endswith('for inputs of the same shapes; pass parallelize(..., negotiate="always")')
    assert "rank 0 is gone" in receiver


def elsewhere(plan: dict[str, Any]) -> Report:
    """As between two machines: messages through torch.distributed, sums too."""
    connect = post.connect
    post.connect = lambda axis, device: post.GroupPost(axis)
    try:
        return verify(
            small_models.build({"pair": True, "tied": True}),
            Plan(precision="fp64", **plan),
            small_models.make_batches(3, 9, 3),
            optimizer=SGD(lr=0.1),
        )
    finally:
        post.connect = connect


@pytest.mark.parametrize(
    "plan",
    [
        {"pipeline": 3, "microbatches": 4},
        {"pipeline": 2, "chunks": 2, "schedule": "zbv", "microbatches": 3},
        {"pipeline": 2, "replicate": 2, "schedule": "gpipe", "microbatches": 3},
    ],
    ids=str,
)
def test_messages_through_torch_distributed_do_the_same(plan: dict[str, Any]) -> None:
    report = run_ranks(elsewhere, Plan(**plan).num_ranks, plan)[0]
    assert report.agrees, report.describe()


def too_many(num: int) -> str:
    class Many(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return tuple(x[:, :1] for _ in range(num))

    class Back(nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return torch.cat(given, 1)[:, :4]

    class Model(nn.Module):
        stages = ("many", "back")

        def __init__(self) -> None:
            super().__init__()
            self.many, self.back = Many(), Back()

    parallel = spread({"pipeline": 2}, Model(), loss=user_models.squares)
    try:
        parallel.step((torch.ones(2, 4), torch.ones(2, 4)))
    except (ValueError, RuntimeError) as error:
        parallel.close()
        return str(error)
    return "fits"


def test_more_tensors_than_a_message_has_room_for_are_refused() -> None:
    assert run_ranks(too_many, 2, 62) == ["fits", "fits"]
    assert "passes on 63 tensors; at most 62 can be sent" in run_ranks(too_many, 2, 63)[0]


def test_an_error_says_in_which_action_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 4))
    parallel = spread({"microbatches": 2}, model)
    with pytest.raises(RuntimeError) as caught:
        parallel.step((torch.ones(2, 4), torch.ones(2)))
    assert caught.value.__notes__ == ["in F of microbatch 0 on stage 0 (pipeline rank 0)"]


def test_what_was_measured_is_told_action_by_action() -> None:
    parallel = spread({"microbatches": 2}, user_models.make("plain"), loss=user_models.squares)
    (batch,) = user_models.batches(1, 4)
    parallel.record()
    for _ in range(2):
        parallel.step(batch)
    timeline = parallel.timeline()
    assert timeline is not None
    one_step = [(Kind.F, 0), (Kind.BW, 0), (Kind.F, 1), (Kind.BW, 1), (Kind.U, 1)]
    assert [(event.action.kind, event.action.microbatch) for event in timeline.events] == one_step * 2
    starts = [event.start for event in timeline.events]
    assert starts == sorted(starts)
    assert all(event.end >= event.start for event in timeline.events)
    assert math.isclose(timeline.events[0].start, 0.0)
    parallel.step(batch)
    assert parallel.timeline() is None  # nothing is noted unless asked


def test_headers_fit_beside_the_tensors_of_a_message() -> None:
    assert wire._HEADER_LENGTH < wire._HEADER < wire._ITEMS
