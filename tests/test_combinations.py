"""Everything composes: plans drawn from all keys at once, over our model families, against one device."""

import os
import tempfile
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardwise.memory import offload_activations
from shardwise.models import ModelConfig, build
from shardwise.optimizers import SGD, Adafactor, AdamW, AdamW8bit, Lion, Muon
from shardwise.plan import Plan
from shardwise.plan_rules.built import BUILT
from shardwise.verify import Report, verify
from tests.pool import apart, run_ranks
from tests.tensor_parallel.test_context import VOCABULARY, make_batches

OPTIMIZERS = {
    "adamw": AdamW(lr=1e-2, eps=1e-3, weight_decay=0.3),
    "adamw-8bit": AdamW8bit(lr=1e-2, eps=1e-3),
    "adafactor": Adafactor(momentum=0.9),
    "muon": Muon(lr=1e-2, weight_decay=0.1),
    "lion": Lion(lr=1e-3),
    "sgd": SGD(lr=0.1, momentum=0.9),
}
DISK = f"disk:{tempfile.gettempdir()}/shardwise-tests"
MOST_RANKS = 8


# What recomputation keeps is chosen behind the first step: the second is already computed so.
@patch("shardwise.memory.recompute.MEASURED_STEPS", 1)
@patch("shardwise.head.CHUNK_TOKENS", 3)
@patch.object(offload_activations, "SMALLEST", 1)
def check(plan: dict[str, Any], model: dict[str, Any], job: dict[str, Any]) -> Report:
    with apart(job["apart"]):
        full = Plan(**plan)
        rows = full.data_parallel * full.microbatches + job["more"]
        return verify(
            build(ModelConfig(**model), VOCABULARY),
            full,
            make_batches(job["lengths"], rows, job["documents"]),
            optimizer=OPTIMIZERS[job["optimizer"]],
            clip=job["clip"],
            bucket_bytes=job["bucket_bytes"],
            overlap=job["overlap"],
            example=make_batches([8], 2, documents=False)[0],
        )


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A plan, a model and a job that the rules of `Plan` allow together."""

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    schedule, chunks = one(
        ("1f1b", 1),
        ("gpipe", 1),
        ("zb-h1", 1),
        ("auto", 1),
        ("interleaved", 2),
        ("zbv", 2),
        ("pipedream", 1),
        ("pipedream-2bw", 1),
    )
    plan: dict[str, Any] = {
        "pipeline": one(1, 1, 2, 3),
        "replicate": one(1, 1, 2),
        "shard": one(1, 2, 3),
        "context": one(1, 1, 2),
        "tensor": one(1, 1, 2, 3),
        "microbatches": draw(st.integers(1, 4)),
        "slices": one(1, 1, 1, 3),
        "zero": one(0, 1, 2, 3),
        "context_method": one("ring", "ulysses"),
        "recompute": one("none", *(value for value in ("full", "selective", 0.5, "every:2") if _built(value))),
        "precision": one("fp64", "fp64", "fp64", "bf16", "fp16"),
        "reduce_dtype": one("master", "master", "master", "bf16"),
        "offload": {kind: DISK for kind in sorted(draw(st.sets(st.sampled_from(BUILT["offload"]), max_size=2)))},
    }
    if plan["pipeline"] > 1:
        plan |= {"schedule": schedule, "chunks": chunks}
    plan["sequence"] = plan["tensor"] > 1 and draw(st.booleans())
    heads = one(3, 6)
    optimizer = one(*OPTIMIZERS)
    model = {
        "family": one("gpt2", "llama", "qwen", "mistral"),
        "layers": one(2, 3, 5),
        "hidden": 24,
        "heads": heads,
        "kv_heads": one(*(number for number in (1, 3, 6) if heads % number == 0)),
        "intermediate": 20,
        "sequence": 64,
        "window": one(0, 0, 5),
        "tied": draw(st.booleans()),
        # The gradient of a key's bias is zero but for rounding, of which optimizers that look at signs make steps.
        "bias": optimizer in ("adamw", "sgd"),
    }
    job = {
        "optimizer": optimizer,
        "clip": one(None, 0.05, 100.0),
        "lengths": draw(st.lists(st.integers(6, 17), min_size=1, max_size=3)),
        "documents": draw(st.booleans()),
        "bucket_bytes": one(600, 1 << 20),
        "overlap": draw(st.booleans()),
        "apart": one(False, False, True),
        "more": draw(st.integers(0, 2)),
    }
    full = Plan(**plan)
    assume(full.num_ranks <= MOST_RANKS)
    assume(not full.check(model=ModelConfig(**model)))
    return plan, model, job


def _built(value: str | float) -> bool:
    return not [problem for problem in Plan(recompute=value).check() if "not built yet" in problem.reason]


@settings(
    max_examples=int(os.environ.get("SHARDWISE_EXAMPLES", "12")),
    deadline=None,
    derandomize="SHARDWISE_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(jobs())
def test_random_plans_of_all_keys_equal_one_device(job: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> None:
    plan, model, settings_of_job = job
    reports = run_ranks(check, Plan(**plan).num_ranks, plan, model, settings_of_job)
    assert all(report.agrees for report in reports), reports[0].describe()


SMALL = {"layers": 3, "hidden": 24, "heads": 3, "intermediate": 20, "sequence": 16}
JOB = {
    "optimizer": "adamw",
    "clip": 1.0,
    "lengths": [7, 9],
    "documents": False,
    "bucket_bytes": 600,
    "overlap": True,
    "apart": False,
    "more": 1,
}


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        # Measuring costs leaves no gradient behind.
        ({"pipeline": 2, "shard": 2, "zero": 2, "schedule": "auto", "microbatches": 2}, {"family": "llama"}),
        # A stage whose parameters are all held by another one too.
        ({"pipeline": 2, "cut": (0, 3), "offload": {"optimizer": DISK}}, {"family": "llama", "tied": True}),
    ],
    ids=str,
)
def test_what_once_was_wrong_equals_one_device(plan: dict[str, Any], model: dict[str, Any]) -> None:
    full = {"precision": "fp64", **plan}
    reports = run_ranks(check, Plan(**full).num_ranks, full, {**SMALL, **model}, JOB)
    assert all(report.agrees for report in reports), reports[0].describe()
