"""Any module, and what must be refused at once."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.given import refuse
from shardwise.mesh import Mesh
from shardwise.optimizers import SGD, AdamW
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from shardwise.verify import Report, verify
from tests import user_models
from tests.pool import run_ranks

ZB = {"pipeline": 2, "schedule": "zb-h1", "microbatches": 3}
ZBV = {"pipeline": 2, "chunks": 2, "schedule": "zbv", "microbatches": 3}
F1B = {"pipeline": 2, "schedule": "1f1b", "microbatches": 3}


def check(name: str, plan: dict[str, Any]) -> Report:
    full = Plan(precision="fp64", **plan)
    return verify(
        user_models.make(name),
        full,
        user_models.batches(2, 4 * full.data_parallel, by_name=name == "named"),
        loss=user_models.squares,
        optimizer=SGD(lr=0.02, momentum=0.5),
        clip=1.0,
        bucket_bytes=100,
    )


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("plain", {"replicate": 2}),
        ("plain", F1B),
        ("in_place", F1B | {"cut": (1, 4)}),
        (
            "in_place",
            ZBV | {"cut": (1, 2, 1, 1)},
        ),  # stages that begin with an operation in place, on other ranks and on the same
        ("repeated", F1B),
        ("repeated", ZBV),
        ("repeated", {"replicate": 2, "microbatches": 2}),
        ("repeated_convolution", ZBV | {"cut": (2, 1, 1, 2)}),  # the same module in two stages of one rank
        ("recurrent", ZB),
        ("positioned", ZB),
        ("nested", F1B),
        ("stray", ZB),
        ("twice", ZB),
        ("twice", {"replicate": 2, "microbatches": 2}),
        ("parametrized", ZB),
        *(("functional", plan) for plan in (ZB, F1B | {"schedule": "pipedream"}, {"shard": 2, "zero": 3})),
        *(("rotated", plan) for plan in ({}, F1B, {**ZB, "recompute": "full"}, {"shard": 2, "zero": 3})),
        ("partly_frozen", ZB),
        ("partly_frozen", {"replicate": 2}),
        ("frozen", F1B),
        ("named", F1B),
        ("named", F1B | {"schedule": "pipedream"}),
        *(
            (f"checkpointed{how}", plan)
            for how in ("", "_reentrant")
            for plan in (ZB, {"shard": 2, "zero": 3}, {"replicate": 2})
        ),
        *(("sparse", plan) for plan in (F1B, {"replicate": 2, "microbatches": 2}, {"shard": 2, "zero": 2})),
        ("channels_last", F1B),
        *(
            (name, {"shard": 2, "zero": zero, "microbatches": 2})
            for name in ("repeated", "twice")
            for zero in (1, 2, 3)
        ),
        *((name, {"shard": 2, "zero": 3}) for name in ("in_place", "nested", "recurrent", "stray", "parametrized")),
        *((name, {"shard": 2, "zero": 3}) for name in ("partly_frozen", "frozen", "positioned", "named")),
        *(
            (name, plan | {"recompute": "sqrt"})
            for name in ("plain", "in_place", "repeated", "nested", "twice", "partly_frozen", "checkpointed", "named")
            for plan in (F1B, {"shard": 2, "zero": 3})
        ),
        *((name, {**ZB, "recompute": "full"}) for name in ("recurrent", "twice", "parametrized", "checkpointed")),
    ],
)
def test_modules_as_users_write_them_equal_one_device(name: str, plan: dict[str, Any]) -> None:
    report = run_ranks(check, Plan(**plan).num_ranks, name, plan)[0]
    assert report.agrees, report.describe()


def one(model: nn.Module, **settings: Any) -> Any:
    settings = {"loss": user_models.squares, "optimizer": SGD(lr=0.1), **settings}
    return parallelize(model, settings.pop("plan", Plan()), **settings)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_weight_that_is_computed_from_others_gets_its_gradient() -> None:
    """Weight normalisation in its old form leaves an `nn.Linear` whose weight is not a parameter."""
    model, plain = (nn.utils.weight_norm(nn.Linear(4, 4, bias=False)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    (batch,) = user_models.batches(1, 3)
    parallel = one(model)
    parallel.step(batch)
    (user_models.squares.sum(plain(batch[0]), batch[1]) / 3).backward()
    for name, gradient in parallel.full_gradients().items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


def test_gradients_left_from_before_do_not_count() -> None:
    (batch,) = user_models.batches(1, 3)
    fresh, used = user_models.make("plain"), user_models.make("plain")
    used(torch.ones(5, 4)).sum().backward()
    found = [one(model) for model in (fresh, used)]
    for parallel in found:
        parallel.step(batch)
    for name, gradient in found[0].full_gradients().items():
        assert torch.equal(gradient, found[1].full_gradients()[name]), name


def test_a_backward_of_ones_own_before_or_between_steps_does_not_count() -> None:
    batches = user_models.batches(2, 3)
    quiet, curious = one(user_models.make("plain")), one(user_models.make("plain"))
    for batch in batches:
        curious.model(torch.ones(5, 4)).sum().backward()
        for parallel in (quiet, curious):
            parallel.step(batch)
    for name, value in quiet.full_parameters().items():
        assert torch.equal(value, curious.full_parameters()[name]), name


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan")])
def test_a_clip_that_stops_everything_is_refused(clip: float) -> None:
    with pytest.raises(ValueError, match=f"clip = {clip} .*; choose more than 0, or None"):
        one(user_models.make("plain"), clip=clip)


def test_complex_parameters_are_refused_and_not_cut_in_half() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="parameter '0' is complex; keep its real and imaginary parts"):
        one(model)


def test_parameters_without_a_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="'0.weight' has no shape before the model is first called"):
        one(nn.Sequential(nn.LazyLinear(4)))


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        ({"tensor": 2}, "a gradient hook, and plan.tensor = 2 divides it"),
        ({"pipeline": 2, "schedule": "pipedream"}, "a gradient hook, and pipedream keeps versions of it"),
    ],
)
def test_gradient_hooks_that_would_not_be_called_are_refused(plan: dict[str, Any], line: str) -> None:
    model = user_models.make("plain")
    model[0].weight.register_hook(lambda gradient: gradient)
    refuse(model, Plan(), None)
    with pytest.raises(ValueError, match=f"parameter '0.weight' has {line}"):
        refuse(model, Plan(**plan), None)
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(
        ValueError, match=r"a hook for accumulated gradients, which are kept in buckets and never in \.grad"
    ):
        refuse(model, Plan(), None)
    model = nn.Sequential(nn.Linear(2, 2, device="meta"))
    model[0].bias.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match="'0.bias' has a gradient hook and is on the meta device"):
        refuse(model, Plan(), None)


@pytest.mark.parametrize(
    ("settings", "plan", "line"),
    [
        ({"scale_grad_by_freq": True}, {"microbatches": 2}, "scales gradients by frequency"),
        ({"scale_grad_by_freq": True}, {"replicate": 2}, "scales gradients by frequency"),
        ({"max_norm": 1.0}, {"shard": 2}, "renormalises its rows"),
        ({"max_norm": 1.0}, {"precision": "bf16"}, "renormalises its rows"),
        ({"max_norm": 1.0}, {"zero": 3, "offload": {"parameters": "cpu"}}, "renormalises its rows"),
        ({"max_norm": 1.0}, {"pipeline": 2, "schedule": "pipedream"}, "renormalises its rows"),
        ({"max_norm": 1.0}, {"pipeline": 2, "microbatches": 2}, None),
        ({"scale_grad_by_freq": True}, {"zero": 3, "offload": {"parameters": "cpu"}}, None),
    ],
    ids=str,
)
def test_tables_whose_rows_depend_on_the_batch_are_refused_where_it_is_divided(
    settings: dict[str, Any], plan: dict[str, Any], line: str | None
) -> None:
    for table in (nn.Embedding(3, 2, **settings), nn.EmbeddingBag(3, 2, **settings)):
        if line is None:
            refuse(nn.Sequential(table), Plan(**plan), None)
            continue
        with pytest.raises(ValueError, match=f"module '0' {line}"):
            refuse(nn.Sequential(table), Plan(**plan), None)


def test_a_copy_of_a_parallel_model_computes_with_its_own_weights() -> None:
    parallel = one(user_models.make("plain"))
    twin = copy.deepcopy(parallel.model)
    (batch,) = user_models.batches(1, 3)
    before = twin(batch[0]).detach()
    parallel.step(batch)
    assert torch.equal(twin(batch[0]), before)
    assert not torch.equal(parallel.model(batch[0]), before)


def test_values_of_a_model_that_has_them_are_kept_and_moved_in_place() -> None:
    model = user_models.make("plain")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    parallel = one(model)
    assert all(torch.equal(value, before[name]) for name, value in parallel.full_parameters().items())
    assert dict(parallel.model.named_parameters()).keys() == parameters.keys()
    assert all(own is parameters[name] for name, own in parallel.model.named_parameters())


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("cache", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def test_buffers_take_the_precision_and_persistent_ones_belong_to_the_state() -> None:
    parallel = one(Buffered(), plan=Plan(precision="fp64"))
    assert {key for key in parallel.state_dict() if key.startswith("model/")} == {
        "model/linear.weight",
        "model/linear.bias",
        "model/scale",
    }
    assert parallel.state_dict()["model/scale"].dtype == torch.float64
    with torch.device("meta"):
        meta = Buffered()
    with pytest.raises(ValueError, match="buffer 'scale' is on the meta device .* build the model on a real device"):
        one(meta)


def refused(plan: dict[str, Any]) -> str:
    try:
        one(user_models.make("normalised"), plan=Plan(**plan))
    except ValueError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("plan", [{"replicate": 2}, {"microbatches": 2}])
def test_batch_statistics_are_refused_where_no_pass_sees_the_whole_batch(plan: dict[str, int]) -> None:
    for text in run_ranks(refused, Plan(**plan).num_ranks, plan):
        assert text.startswith("module '1' is a BatchNorm1d: ")
        assert "; use GroupNorm or LayerNorm" in text
    one(user_models.make("normalised"))  # one device, the whole batch at once


def mistaken(odd: dict[str, Any]) -> str:
    """The error of a job whose rank 1 was given `odd` settings."""
    odd = dict(odd) if torch.distributed.get_rank() == 1 else {}
    model = user_models.make(odd.pop("model", "plain"))
    with torch.no_grad():
        for name in odd.pop("other_values", ()):
            model.get_parameter(name).add_(1e-7)
    try:
        one(model, plan=Plan(replicate=2, **odd.pop("plan", {})), **odd)
    except ValueError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("odd", "line"),
    [
        ({"seed": 7}, "same seed: rank 0 has 0, rank 1 has 7; give all ranks the same"),
        ({"clip": 2.0}, "same clip: rank 0 has None, rank 1 has 2.0"),
        ({"optimizer": AdamW()}, "same optimizer: rank 0 has SGD"),
        ({"plan": {"microbatches": 2}}, "same plan.microbatches: rank 0 has 1, rank 1 has 2"),
        (
            {"model": "repeated"},
            "same parameter '2.weight': rank 0 has float32 [4, 4] trained, with weight decay, rank 1 has none",
        ),
        ({"model": "partly_frozen"}, "same parameter '0.weight'"),
        ({"other_values": ["2.bias"]}, "same value of parameter '2.bias'"),
        (
            {"other_values": ["2.bias"]},
            "; build the model after torch.manual_seed on every rank",
        ),
        ({"bucket_bytes": 5}, "same bucket_bytes"),
    ],
)
def test_ranks_given_different_things_each_say_which_differs(odd: dict[str, Any], line: str) -> None:
    for text in run_ranks(mistaken, 2, odd):
        assert line in text
        assert "\n" not in text


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"model": 3}, "the model is a int; give an nn.Module"),
        ({"plan": {"replicate": 2}}, "the plan is a dict; give shardwise.Plan"),
        ({"optimizer": torch.optim.AdamW([torch.ones(1)])}, "the optimizer is torch's AdamW, .* give settings"),
        ({"optimizer": "adamw"}, "the optimizer is a str; give settings, as shardwise.AdamW"),
        ({"optimizer": AdamW}, "the optimizer is the class AdamW; give settings, as shardwise.AdamW"),
        ({"mesh": "cpu"}, "the mesh is a str; give shardwise.Mesh"),
    ],
    ids=str,
)
def test_what_is_of_another_kind_is_one_line(given: dict[str, Any], line: str) -> None:
    everything = {"model": user_models.make("plain"), "plan": Plan(), "optimizer": AdamW()} | given
    with pytest.raises(ValueError, match=line):
        parallelize(everything.pop("model"), everything.pop("plan"), **everything)


def mismatched_meshes() -> str:
    axis = ("replicate", "shard")[torch.distributed.get_rank()]
    try:
        Mesh({axis: 2})
    except ValueError as error:
        return str(error)
    return "not refused"


def test_ranks_with_other_axes_are_told_before_they_wait_for_each_other() -> None:
    line = (
        "the ranks do not hold the same plan: rank 0 has replicate 2, rank 1 has shard 2; start all ranks with one plan"
    )
    assert run_ranks(mismatched_meshes, 2) == [line, line]


def test_a_model_is_not_spread_twice() -> None:
    model = user_models.make("plain")
    one(model)
    with pytest.raises(ValueError, match="already: build it anew"):
        one(model)
    with pytest.raises(ValueError, match="already"):
        one(copy.deepcopy(model))


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_parallel_model_is_neither_copied_nor_pickled(take: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="belongs to its ranks.*: take parallel.full_parameters"):
        take(one(user_models.make("plain")))


def test_a_mesh_of_another_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 2 ranks"):
        one(user_models.make("plain"), plan=Plan(replicate=2))


def too_many_stages() -> str:
    try:
        one(user_models.make("plain"), plan=Plan(pipeline=2, cut="flops"))
    except ValueError as error:
        return str(error)
    return "not refused"


def test_what_the_first_rank_finds_wrong_with_a_cut_every_rank_says() -> None:
    texts = run_ranks(too_many_stages, 2)
    assert texts[0] == texts[1]
    assert 'plan.cut = "flops" looks at a microbatch: pass parallelize(..., example=' in texts[0]
