"""Number formats go together."""

from __future__ import annotations

from shardwise.plan import Plan
from tests.plan_rules.objections import keys


def test_compression_needs_something_to_compress() -> None:
    assert keys(Plan(pipeline=2, compress_gradients="int8")) == {"plan.compress_gradients"}
    assert keys(Plan(shard=2, compress_gradients="int8")) == set()
    assert keys(Plan(precision="bf16", compress_activations="fp16")) == {"plan.compress_activations"}
    assert keys(Plan(precision="fp32", compress_activations="fp16")) == set()
