"""What a step leaves alone and what it tells: skipped steps, evaluation, errors, random numbers."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.loss import IGNORED, Loss
from shardwise.optimizers import SGD, AdamW
from shardwise.parallel import Parallel
from shardwise.parallelize import parallelize
from shardwise.pieces import Pieces
from shardwise.plan import Plan
from shardwise.step_metrics import StepMetrics
from tests import small_models, user_models
from tests.pool import run_ranks

summed = Loss(lambda output, targets: output.sum(), lambda targets: torch.tensor(targets.shape[0]))


def make(plan: dict[str, Any], model: nn.Module | None = None, **settings: Any) -> Parallel:
    settings = {"loss": user_models.squares, "optimizer": AdamW(lr=0.01), "bucket_bytes": 1, **settings}
    return parallelize(model or user_models.make("plain"), Plan(**plan), **settings)


def state_bits(parallel: Parallel) -> dict[str, bytes]:
    found = {}
    for name, value in parallel.state_dict().items():
        tensors = [tensor for _, tensor in value.boxes] if isinstance(value, Pieces) else [value]
        found[name] = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)
    return found


# Skipped steps


def overflow(plan: dict[str, Any], where: int) -> tuple[bool, bool, int, list[str], int | None, float]:
    parallel = make(plan, clip=1.0)
    good, bad = ((inputs.clone(), targets) for inputs, targets in user_models.batches(2, 4))
    parallel.step(parallel.share(good))
    before = state_bits(parallel)
    bad[0][where] = float("inf")
    metrics = parallel.step(parallel.share(bad))
    faulty = metrics.faulty_rank
    after = state_bits(parallel)
    changed = [name for name, bits in before.items() if after[name] != bits]
    again = parallel.step(parallel.share(good))
    return metrics.skipped, again.skipped, int(parallel.step_count), changed, faulty, again.loss


@pytest.mark.parametrize(
    ("plan", "faulty"),
    [
        ({"replicate": 2}, 1),
        ({"shard": 2, "zero": 2}, 1),
        ({"shard": 2, "zero": 3}, 1),
        ({"pipeline": 2, "microbatches": 2}, 1),
        ({"pipeline": 2, "replicate": 2, "microbatches": 2}, 3),
    ],
    ids=str,
)
def test_a_step_that_is_not_finite_anywhere_changes_nothing_anywhere(plan: dict[str, int], faulty: int) -> None:
    for skipped, again, steps, changed, rank, loss in run_ranks(overflow, Plan(**plan).num_ranks, plan, 3):
        assert skipped
        assert changed == []
        assert rank == faulty  # the last stage of the data rank that read it
        assert not again
        assert steps == 2  # the schedule of learning rates and Adam's bias correction do not advance over a skip
        assert loss == loss


def asynchronous_overflow() -> tuple[bool, int, bool]:
    """Stages skip by themselves, and one bad microbatch does not stop the updates of those that follow."""
    parallel = make({"pipeline": 2, "schedule": "pipedream", "microbatches": 4}, optimizer=SGD(lr=0.1), clip=1.0)
    (good,) = user_models.batches(1, 4)
    bad = good[0].clone()
    bad[1] = float("inf")
    before = parallel.full_parameters()
    parallel.step((bad, good[1]))
    skipped = parallel.step(good).skipped  # what the step before skipped: no stage waits for the others
    after = parallel.full_parameters()
    finite = all(bool(value.isfinite().all()) for value in after.values())
    moved = all(not torch.equal(before[name], value) for name, value in after.items())
    return skipped, int(parallel.step_count), finite and moved


def test_an_asynchronous_stage_skips_the_bad_update_alone() -> None:
    found = run_ranks(asynchronous_overflow, 2)
    assert found == [(True, 8, True)] * 2  # both ranks count the same updates


# Evaluation


def evaluated(plan: dict[str, Any], rows: int) -> tuple[float, int, bool]:
    model = small_models.build({"tied": True}, "cpu")
    model.blocks[0].eval()  # as somebody left it
    parallel = parallelize(model, Plan(**plan), optimizer=SGD(lr=0.1))
    train, held_out = small_models.make_batches(2, 8, 4)
    inputs, targets = held_out
    held_out = ({"tokens": inputs["tokens"][:rows]}, targets[:rows])
    parallel.step(parallel.share(train))
    parallel.drain()
    before = state_bits(parallel)
    modes = [module.training for module in parallel.model.modules()]
    random = torch.get_rng_state()
    loss, count = parallel.evaluate(parallel.share(held_out))
    assert [module.training for module in parallel.model.modules()] == modes
    assert state_bits(parallel) == before
    assert torch.equal(torch.get_rng_state(), random)
    again = parallel.evaluate(parallel.share(held_out))
    parallel.step(parallel.share(train))  # and training goes on
    return loss, count, again == (loss, count)


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"replicate": 2},
        {"shard": 2, "zero": 3},
        {"pipeline": 2, "microbatches": 3},
        {"pipeline": 2, "chunks": 2, "schedule": "zbv", "microbatches": 4},
        {"pipeline": 2, "replicate": 2, "microbatches": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_evaluation_counts_every_row_once_also_where_a_rank_has_none(plan: dict[str, Any], rows: int) -> None:
    train, (inputs, targets) = small_models.make_batches(2, 8, 4)
    found = run_ranks(evaluated, Plan(**plan).num_ranks, plan, rows)
    right = alone(train, inputs["tokens"][:rows], targets[:rows])
    for loss, count, same in found:
        assert count == int((targets[:rows] != IGNORED).sum())
        assert loss == pytest.approx(right, rel=1e-4, abs=1e-5)
        assert same


def alone(train: Any, tokens: Tensor, targets: Tensor) -> float:
    """One step and the evaluation, plainly."""
    model = small_models.build({"tied": True}, "cpu")
    count = int((train[1] != IGNORED).sum())
    total = F.cross_entropy(model(**train[0]).flatten(0, 1), train[1].flatten(), reduction="sum")
    (total / count).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
        if not len(tokens):
            return 0.0
        return float(F.cross_entropy(model(tokens=tokens).flatten(0, 1), targets.flatten(), reduction="sum"))


def test_what_a_model_without_an_optimizer_cannot_do_is_said() -> None:
    parallel = make({}, optimizer=None)
    (batch,) = user_models.batches(1, 4)
    assert parallel.evaluate(batch)[1] == 4
    with pytest.raises(ValueError, match=r"no optimizer: pass parallelize\(\.\.\., optimizer="):
        parallel.step(batch)
    with pytest.raises(ValueError, match="a batch of 4 rows cannot make plan.microbatches = 5; use fewer"):
        make({"microbatches": 5}).step(batch)


def test_a_count_may_be_a_plain_number() -> None:
    parallel = make({"microbatches": 2}, loss=Loss(user_models.squares.sum, lambda targets: targets.shape[0]))  # type: ignore[arg-type, return-value]
    (batch,) = user_models.batches(1, 4)
    assert parallel.step(batch).tokens == 4
    assert parallel.evaluate(batch)[1] == 4


def test_after_an_error_within_a_step_there_is_no_next_one() -> None:
    """Half of its gradients would be in the next step's."""
    parallel = parallelize(small_models.build({}), Plan(microbatches=2), optimizer=SGD(lr=0.1))
    good, bad = small_models.make_batches(2, 4, 3)
    bad[1][3] = small_models.VOCABULARY  # in the second microbatch
    parallel.step(good)
    before = state_bits(parallel)
    with pytest.raises(IndexError, match="outside the 13 tokens"):
        parallel.step(bad)
    with pytest.raises(RuntimeError, match="an earlier step has failed midway .*: build the model anew"):
        parallel.step(good)
    assert state_bits(parallel) == before  # what there is can be saved


def misled(plan: dict[str, Any]) -> str:
    """Every rank reads rows by its own number, though only data ranks read different ones."""
    parallel = make(plan)
    (batch,) = user_models.batches(1, 8)
    rank = parallel.mesh.rank
    try:
        parallel.step((batch[0][2 * rank : 2 * rank + 2], batch[1][2 * rank : 2 * rank + 2]))
    except ValueError as error:
        return str(error)
    return "not refused"


def test_ranks_that_should_have_the_same_rows_and_do_not_are_told() -> None:
    line = "ranks 0 and 1 are both data rank 0 and were given different batches: give every rank the rows of"
    assert all(text.startswith(line) for text in run_ranks(misled, 2, {"pipeline": 2}))
    line = line.replace("and 1", "and 2")
    assert all(text.startswith(line) for text in run_ranks(misled, 4, {"pipeline": 2, "replicate": 2}))
    assert run_ranks(misled, 2, {"replicate": 2}) == ["not refused"] * 2


def late() -> tuple[float, int]:
    parallel = make({"replicate": 2})
    (batch,) = user_models.batches(1, 4)
    metrics = parallel.step(parallel.share(batch))
    parallel.close()
    return metrics.loss, metrics.tokens


def test_metrics_may_be_read_when_all_is_over() -> None:
    left, right = run_ranks(late, 2)
    assert left == right
    assert left[0] > 0
    assert left[1] == 4


def printed() -> tuple[list[str], float, float | None]:
    parallel = make({"replicate": 2}, clip=1.0)
    good, bad = ((inputs.clone(), targets) for inputs, targets in user_models.batches(2, 4))
    bad[0][1] = float("nan")
    first, second = (parallel.step(parallel.share(batch)) for batch in (good, bad))
    lines = [repr(first), str(second)] if parallel.mesh.rank == 0 else []  # one rank may print alone
    third = parallel.step(parallel.share(good))
    return [*lines, repr(third)], first.loss, first.gradient_norm


def test_metrics_print_as_one_line() -> None:
    (lines, loss, norm), _ = run_ranks(printed, 2)
    assert lines[0] == f"step 1: loss {loss:.4f}, norm {norm:.3g}, 4 tokens"
    assert lines[1] == "step 2: loss nan, norm nan, 4 tokens, skipped"
    assert lines[2].startswith("step 3: loss ")


def test_metrics_compute_nothing_until_they_are_asked() -> None:
    asked: list[str] = []

    def totals() -> Tensor:
        asked.append("totals")
        return torch.tensor([5000.0, 0.0, 0.0, 0.0])

    def tokens() -> int:
        asked.append("tokens")
        return 4096

    metrics = StepMetrics(3, totals, tokens, None, False)
    assert asked == []
    assert repr(metrics) == "step 3: loss 1.2207, 4,096 tokens"


# Random numbers


class Noise(nn.Module):
    """Drops, and keeps the masks it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.masks: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        kept = F.dropout(torch.ones_like(x), 0.5, self.training)
        self.masks.append(tuple(kept.flatten().int().tolist()))
        return x * self.scale * kept


def drawn(plan: dict[str, Any], start: int = 0, steps: int = 2, seed: int = 0) -> list[list[tuple[int, ...]]]:
    """The masks of every layer of this rank, in the order of microbatches and steps."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    model = nn.Sequential(*(Noise() for _ in range(4)))
    noises = list(model)
    parallel = make(plan, model, loss=summed, seed=seed)
    parallel.step_count += start  # as loading a checkpoint does
    before = torch.get_rng_state()
    for _ in range(steps):
        parallel.step(parallel.share((torch.ones(4, 16), torch.ones(4, 16))))
    parallel.drain()
    assert torch.equal(torch.get_rng_state(), before)  # the program's own random numbers are left alone
    return [noise.masks for noise in noises if noise.masks]


def test_dropout_is_reproduced_after_a_resume_and_new_in_every_step_microbatch_layer_and_seed() -> None:
    plan = {"microbatches": 2}
    first = drawn(plan)
    assert first == drawn(plan)
    assert [masks[2:] for masks in first] == drawn(plan, start=1, steps=1)
    everything = [mask for masks in first for mask in masks]
    assert len(set(everything)) == len(everything) == 16
    assert not set(everything) & {mask for masks in drawn(plan, seed=1) for mask in masks}


def test_data_ranks_drop_differently() -> None:
    left, right = run_ranks(drawn, 2, {"replicate": 2, "microbatches": 2})
    assert not {mask for masks in left for mask in masks} & {mask for masks in right for mask in masks}


def test_dropout_is_the_same_in_any_order_of_microbatches() -> None:
    """The stages are the same, the schedules are not: a mask belongs to (step, data rank, microbatch, stage)."""
    gpipe, *others = (
        run_ranks(drawn, 2, {"pipeline": 2, "microbatches": 4, "schedule": name})
        for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")
    )
    assert all(other == gpipe for other in others)
    interleaved, straight = (
        run_ranks(drawn, 2, {"pipeline": 2, "chunks": 2, "microbatches": 4, "schedule": name})
        for name in ("interleaved", "zbv")
    )
    masks = [{mask for rank in found for masks in rank for mask in masks} for found in (interleaved, straight)]
    assert masks[0] == masks[1]  # though the stages are on other ranks


# What a step is given


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -1.0, "fast", None])
def test_a_learning_rate_that_would_ruin_every_parameter_is_refused(lr: Any) -> None:
    parallel = make({})
    (batch,) = user_models.batches(1, 2)
    before = state_bits(parallel)
    if lr is None:
        parallel._optimizer = SGD(lr=0.1)
        object.__setattr__(parallel._optimizer, "lr", float("nan"))
    with pytest.raises(ValueError, match="is no learning rate; give a finite number of 0 or more"):
        parallel.step(batch, lr=lr)
    assert state_bits(parallel) == before
    assert parallel.step(batch, lr=0).loss == parallel.step(batch, lr=torch.tensor(0.1)).loss  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "line"),
    [
        (None, r"a pair, \(inputs, targets\), and this is a NoneType"),
        (torch.ones(2, 4), r"a pair, \(inputs, targets\), and this is a Tensor"),
        ((torch.ones(2, 4),), "this is 1 values"),
        ((None, torch.ones(2, 4)), "the inputs of a batch hold no tensor; they are a NoneType"),
        (({}, torch.ones(2, 4)), "hold no tensor; they are a dict"),
        ((torch.ones(2, 4), None), "targets are a NoneType, of which nobody knows how many count"),
        ((torch.tensor(1.0), torch.tensor(1.0)), "has no dimension; give every tensor rows"),
    ],
)
def test_what_is_no_batch_is_one_line_and_changes_nothing(batch: Any, line: str) -> None:
    parallel = make({})
    for call in (parallel.step, parallel.evaluate):
        with pytest.raises(ValueError, match=line):
            call(batch)
    parallel.step(user_models.batches(1, 2)[0])


@pytest.mark.parametrize(
    ("returned", "what"), [(None, "a NoneType"), (1.0, "a float"), (torch.tensor(1), r"a tensor of torch\.int64")]
)
def test_a_loss_that_returns_no_real_tensor_is_named(returned: Any, what: str) -> None:
    parallel = make({}, loss=lambda output, targets: returned)
    with pytest.raises(ValueError, match=f"the loss has returned {what}; return the sum over targets"):
        parallel.step(user_models.batches(1, 2)[0])


@pytest.mark.parametrize("count", [None, 2.5, -1, torch.ones(2, dtype=torch.int64)])
def test_a_count_that_is_none_is_named(count: Any) -> None:
    parallel = make({}, loss=Loss(user_models.squares.sum, lambda targets: count))
    with pytest.raises(ValueError, match="count has returned .*; give how many targets count"):
        parallel.step(user_models.batches(1, 2)[0])


@pytest.mark.parametrize("plan", [{}, {"pipeline": 1, "schedule": "pipedream"}, {"zero": 3}], ids=str)
@pytest.mark.parametrize("how", ["thawed", "frozen", "replaced"])
def test_what_is_trained_is_settled_and_a_change_of_it_is_refused(plan: dict[str, Any], how: str) -> None:
    model = user_models.make("plain")
    model[0].requires_grad_(how != "thawed")
    parallel = make(plan | ({"offload": {"parameters": "cpu"}} if "zero" in plan else {}), model)
    (batch,) = user_models.batches(1, 2)
    parallel.step(batch)
    if how == "replaced":
        model[0].weight = nn.Parameter(torch.ones(4, 4))
    else:
        model[0].requires_grad_(how == "thawed")
    when = "now" if how == "thawed" else "no longer"
    with pytest.raises(ValueError, match=f"parameter '0.(weight|bias)' is {when} to be trained, which is settled"):
        parallel.step(batch)


def test_an_evaluation_that_fails_leaves_no_module_in_evaluation_mode() -> None:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise ArithmeticError("planted")
        return user_models.squares.sum(output, targets)

    parallel = make({}, loss=loss)
    (batch,) = user_models.batches(1, 2)
    parallel.step(batch)
    with pytest.raises(ArithmeticError, match="planted"):
        parallel.evaluate(batch)
    assert all(module.training for module in parallel.model.modules())
    with pytest.raises(RuntimeError, match="failed midway"):
        parallel.step(batch)


def test_a_closed_model_says_so() -> None:
    parallel = make({})
    parallel.close()
    for call in (parallel.step, parallel.evaluate):
        with pytest.raises(RuntimeError, match="this model was closed"):
            call(user_models.batches(1, 2)[0])
