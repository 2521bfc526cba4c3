"""Random plans over odd models against one device; users' and our own models; what is reported."""

import copy
import json
import os
import tempfile
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise import models
from shardwise.memory import offload_activations
from shardwise.optimizers import SGD, Adafactor, AdamW, Lion, Muon, Override
from shardwise.plan import Plan
from shardwise.verify import Difference, Report, verify
from tests import user_models
from tests.models.cases import CONFIGS, VOCABULARY
from tests.pool import apart, run_ranks
from tests.small_models import build, make_batches

OPTIMIZERS = {
    "adamw": AdamW(lr=1e-2, weight_decay=0.3),
    "sgd": SGD(lr=0.1),
    "momentum": SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adafactor": Adafactor(momentum=0.9),
    "lion": Lion(lr=1e-2, weight_decay=0.1),
    "muon": Muon(lr=1e-2, weight_decay=0.1),
    "overrides": AdamW(lr=1e-2, weight_decay=0.3, overrides={"*norm*": Override(lr_scale=0.5, weight_decay=0.2)}),
}


OFFLOADED = f"disk:{tempfile.gettempdir()}/shardwise-tests"


@patch("shardwise.head.CHUNK_TOKENS", 1)
@patch.object(offload_activations, "SMALLEST", 1)
def check(plan: dict[str, Any], model: dict[str, Any], job: dict[str, Any]) -> Report:
    with apart(job.get("apart", False)):
        return check_here(plan, model, job)


def check_here(plan: dict[str, Any], model: dict[str, Any], job: dict[str, Any]) -> Report:
    full = Plan(precision="fp64", **plan)
    rows = job.get("rows", full.data_parallel * full.microbatches + 1)
    return verify(
        build(model, job.get("device", "meta")),
        full,
        make_batches(job.get("steps", 3), rows, job.get("length", 4), offsets=job.get("offsets", False)),
        optimizer=OPTIMIZERS[job.get("optimizer", "adamw")],
        clip=job.get("clip"),
        bucket_bytes=job.get("bucket_bytes", 600),
        overlap=job.get("overlap", True),
        example=make_batches(1, 2, 4)[0],
    )


def assert_agrees(plan: dict[str, Any], model: dict[str, Any], job: dict[str, Any]) -> None:
    reports = run_ranks(check, Plan(**plan).num_ranks, plan, model, job)
    assert all(report.agrees for report in reports), reports[0].describe()
    kinds = {difference.kind for difference in reports[0].differences}
    assert kinds - {"norm"} == {"loss", "gradient", "parameter"}


SYNCHRONOUS = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zb-h1", 1),
    ("zb-h2", 1),
    ("zbv", 2),
    ("dualpipev", 2),
]
ASYNCHRONOUS = ["pipedream", "pipedream-2bw"]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    pipeline = draw(st.sampled_from([1, 1, 2, 3]))
    copies = draw(st.sampled_from([1, 2] if pipeline > 1 else [1, 2, 3, 4]))
    shard = draw(st.booleans())
    plan: dict[str, Any] = {"pipeline": pipeline, ("shard" if shard else "replicate"): copies}
    asynchronous = draw(st.integers(0, 4)) == 0
    if asynchronous:
        plan["schedule"] = draw(st.sampled_from(ASYNCHRONOUS))
        if plan["schedule"] == "pipedream":
            plan["vertical_sync"] = draw(st.booleans())
    else:
        plan["schedule"], plan["chunks"] = draw(st.sampled_from(SYNCHRONOUS))
    least = pipeline if plan["schedule"] == "pipedream-2bw" else 1
    plan["microbatches"] = draw(st.integers(least, least + 4))
    if copies > 1 and shard:
        plan["zero"] = draw(st.integers(0, 3))
        if copies == 4 and draw(st.booleans()):
            plan["shard"], plan["replicate"] = 2, 2
    if draw(st.booleans()):
        possible = ["optimizer", "activations"]
        if copies == 1 and not asynchronous and draw(st.booleans()):  # stage 3 on one rank is all offloading's
            plan |= {"shard": 1, "replicate": 1, "zero": 3}
            possible = ["parameters"]
        possible += ["parameters"] if plan.get("zero", 0) == 3 and not asynchronous and copies > 1 else []
        possible += ["gradients"] if plan.get("zero", 0) >= 2 else []
        kinds = draw(st.sets(st.sampled_from(possible), min_size=1))
        plan["offload"] = {kind: OFFLOADED for kind in sorted(kinds)}
    if copies > 1 and draw(st.integers(0, 7)) == 0:
        plan["reduce_dtype"] = draw(st.sampled_from(["bf16", "fp32"]))
    plan["cut"] = draw(st.sampled_from(["parameters", "memory"]))
    plan["recompute"] = draw(st.sampled_from(["none", "none", "full", "selective", 0.5, "every:2", "sqrt"]))
    model = {
        "num_blocks": draw(st.integers(max(2, plan.get("chunks", 1) * pipeline), 10)),
        "tied": draw(st.booleans()) and not asynchronous,
        "frozen": draw(st.booleans()),
        "pair": draw(st.booleans()),
    }
    job = {
        "optimizer": draw(st.sampled_from(list(OPTIMIZERS))),
        "clip": draw(st.sampled_from([None, 0.05, 100.0])),
        "device": draw(st.sampled_from(["meta", "cpu"])),
        "overlap": draw(st.booleans()),
        "bucket_bytes": draw(st.sampled_from([1, 600, 1 << 20])),
        "rows": plan["microbatches"] * copies + draw(st.integers(0, 3)),
        "steps": draw(st.integers(1, 4)),
        "length": draw(st.integers(1, 5)),
        "offsets": draw(st.booleans()) and not model["pair"],
        "apart": draw(st.integers(0, 2)) == 0,
    }
    return plan, model, job


@settings(
    max_examples=int(os.environ.get("SHARDWISE_EXAMPLES", "14")),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(jobs())
def test_random_plans_equal_one_device(job: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> None:
    assert_agrees(*job)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    "plan",
    [{"schedule": name, "chunks": chunks} for name, chunks in SYNCHRONOUS] + [{"schedule": "pipedream"}],
    ids=str,
)
def test_fewer_microbatches_than_stages_and_sequences_of_5_then_7(plan: dict[str, Any], microbatches: int) -> None:
    """CASES 13: it runs, and every sequence keeps its length."""
    assert_agrees({**plan, "pipeline": 3, "microbatches": microbatches}, {"num_blocks": 8}, {"length": 5, "rows": 3})


def test_what_cannot_run_with_few_microbatches_is_refused_at_once_with_the_reason() -> None:
    with pytest.raises(ValueError, match="plan.microbatches: .* set it to 3 or more, or plan.schedule to pipedream"):
        Plan(pipeline=3, schedule="pipedream-2bw", microbatches=2).require()


@pytest.mark.parametrize("rows", [3, 4, 5])
def test_uneven_shares_of_a_batch(rows: int) -> None:
    assert_agrees({"replicate": 3}, {}, {"rows": rows})


# Our own models


def packed(rows: int, length: int, seed: int) -> Any:
    """Sequences of several documents each: positions begin anew, and attention stays within."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, length), generator=generator)
    documents = (torch.rand((rows, length), generator=generator) < 0.25).cumsum(1)
    positions = torch.zeros_like(tokens)
    for column in range(1, length):
        same = documents[:, column] == documents[:, column - 1]
        positions[:, column] = torch.where(same, positions[:, column - 1] + 1, 0)
    targets = torch.randint(VOCABULARY, (rows, length), generator=generator)
    targets[:, ::5] = -100
    return {"tokens": tokens, "positions": positions, "documents": documents}, targets


def shipped(name: str, plan: dict[str, Any], precision: str, tolerance: float | None) -> Report:
    config = CONFIGS[name]
    return verify(
        models.build(config, VOCABULARY),
        Plan(precision=precision, **plan),
        [packed(5, length, length) for length in (9, 12)],
        optimizer=OPTIMIZERS["adamw"],
        clip=1.0,
        tolerance=tolerance,
    )


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-tied", "qwen3", "mistral"])
@pytest.mark.parametrize(
    "plan",
    [{"replicate": 2, "microbatches": 2}, {"pipeline": 2, "microbatches": 3, "schedule": "zb-h1"}],
    ids=str,
)
def test_our_models_with_packed_documents_equal_one_device(name: str, plan: dict[str, Any]) -> None:
    report = run_ranks(shipped, 2, name, plan, "fp64", None)[0]
    assert report.agrees, report.describe()


def test_single_precision_agrees_to_its_own_rounding_and_no_further() -> None:
    plan = {"pipeline": 2, "microbatches": 2}
    report = run_ranks(shipped, 2, "llama", plan, "fp32", None)[0]
    assert report.agrees, report.describe()
    assert report.tolerance == 1e-3
    report = run_ranks(shipped, 2, "llama", plan, "fp32", 1e-9)[0]
    assert not report.agrees
    assert not run_ranks(shipped, 2, "llama", plan, "fp32", 0.0)[0].agrees  # asked for bitwise, not for the default


def shipped_apart(name: str, plan: dict[str, Any]) -> Report:
    with apart():
        return shipped(name, plan, "fp64", None)


@pytest.mark.parametrize(
    "plan",
    [
        {"replicate": 3},
        {"shard": 2, "zero": 1},
        {"shard": 2, "zero": 2, "microbatches": 2},
        {"shard": 2, "replicate": 2, "zero": 3},
        {"pipeline": 2, "replicate": 2, "microbatches": 2},
        {"pipeline": 2, "tensor": 2, "sequence": True, "microbatches": 2},
    ],
    ids=str,
)
def test_ranks_on_machines_of_their_own_compute_the_same(plan: dict[str, Any]) -> None:
    report = run_ranks(shipped_apart, Plan(**plan).num_ranks, "llama", plan)[0]
    assert report.agrees, report.describe()


# A user's own


def users() -> tuple[bool, bool, bool]:
    model = user_models.make("plain")
    values = copy.deepcopy(model.state_dict())
    report = verify(
        model,
        Plan(replicate=2, precision="fp64"),
        user_models.batches(2, 5),
        loss=user_models.squares.sum,  # a plain function
        optimizer=SGD(lr=0.1),
    )
    same = all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    untouched = model.training and all(p.grad is None for p in model.parameters())
    return report.agrees, same, untouched


def test_a_users_model_is_verified_with_its_values_and_left_alone() -> None:
    assert run_ranks(users, 2) == [(True, True, True)] * 2


def half_frozen() -> Report:
    model = user_models.make("plain")
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    matrices[0].requires_grad_(False)
    return verify(
        model,
        Plan(precision="bf16"),
        user_models.batches(2, 5),
        loss=user_models.squares,
        optimizer=SGD(lr=0.1),
    )


def test_frozen_values_rounded_to_16_bits_are_no_difference() -> None:
    report = half_frozen()
    assert report.agrees, report.describe()


# What is reported


def difference(kind: str, name: str, error: float, step: int = 0) -> Difference:
    return Difference(step, kind, name, error)


def test_a_plan_is_described_as_it_is_written() -> None:
    plan = Plan(zero=1, shard=2, offload={"optimizer": "disk:/tmp/x"})
    assert plan.describe() == "shard=2, zero=1, offload={optimizer=disk:/tmp/x}"


def test_a_report_that_agrees_says_how_closely() -> None:
    report = Report("replicate=2", 1e-9, 2, [difference("loss", "", 1e-15), difference("gradient", "w", 3e-12)])
    assert report.agrees
    assert report.first is None
    assert report.describe() == "agrees with one device: largest relative error 3.0e-12, allowed 1e-09"


def test_a_report_names_the_first_parameter_that_differs_and_the_worst() -> None:
    report = Report(
        "pipeline=2",
        1e-9,
        1,
        [
            difference("loss", "", 0.0),
            difference("norm", "", 0.5),
            difference("gradient", "a", 1e-3),
            difference("gradient", "b", 2e-1),
            difference("parameter", "a", float("nan")),
        ],
    )
    assert report.first == difference("norm", "", 0.5)
    assert report.worst["gradient"].name == "b"
    assert report.describe() == (
        "step 0: gradient 'a' differs first, by 1.0e-03 relative (allowed 1e-09), 'b' most, by 2.0e-01; "
        "4 of 5 comparisons fail"
    )
    found = json.loads(report.to_json(), parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert found["agrees"] is False
    assert found["first"] == {"step": 0, "kind": "norm", "name": "", "error": 0.5}
    assert found["worst"]["parameter"]["error"] is None  # not a number, and never taken for agreement
    assert len(found["differences"]) == 5
    assert (found["plan"], found["tolerance"], found["steps"]) == ("pipeline=2", 1e-9, 1)


def test_copies_that_differ_are_a_difference_of_their_own() -> None:
    report = Report("shard=2", 1e-9, 1, [difference("loss", "", 0.0), difference("replicas", "w", float("inf"))])
    assert report.describe() == "step 0: the copies of parameter 'w' differ between ranks"
