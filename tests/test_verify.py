"""Random plans over odd models against one device, and the oracle's own ability to fail."""

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.optimizers import SGD, Adafactor, AdamW, Lion, Muon, Override
from shardwise.plan import Plan
from shardwise.verify import Report, verify
from tests.pool import run_ranks
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


def check(plan: dict[str, Any], model: dict[str, Any], job: dict[str, Any]) -> Report:
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
    if copies > 1 and shard and not asynchronous:
        plan["zero"] = draw(st.integers(0, 3))
        if copies == 4 and draw(st.booleans()):
            plan["shard"], plan["replicate"] = 2, 2
    plan["cut"] = draw(st.sampled_from(["parameters", "memory"]))
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
    }
    return plan, model, job


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(jobs())
def test_random_plans_equal_one_device(job: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> None:
    assert_agrees(*job)
