"""fp8: refused where it cannot be, with the reason; which layers it takes. No GPU is at hand: its products are tried in
torchao's emulation alone, where torchao is installed."""

import importlib.util

import pytest
import torch

from shardwise import models
from shardwise.memory import fp8
from shardwise.models import ModelConfig
from shardwise.optimizers import AdamW
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from tests.small_models import build, make_batches

CONFIG = ModelConfig(family="llama", layers=2, hidden=32, heads=4, kv_heads=2, intermediate=64, sequence=24)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine may have it")
def test_it_is_refused_on_what_has_no_such_products() -> None:
    with pytest.raises(ValueError, match=r"needs an NVIDIA GPU of compute capability 8.9 .* computes on the cpu; set"):
        parallelize(build({}), Plan(precision="fp8"), optimizer=AdamW())


def test_layers_that_tensor_divides_are_refused_in_the_plan() -> None:
    (problem,) = Plan(precision="fp8", tensor=2).check()
    assert problem.key == "plan.precision"
    assert "plan.tensor divides" in problem.reason


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
def test_it_takes_layers_that_16_divides_but_the_one_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = fp8.convert
    monkeypatch.setattr(fp8, "require", lambda device: None)
    monkeypatch.setattr(fp8, "convert", lambda model: convert(model, emulate=True))
    model = models.build(CONFIG, 29)
    losses = {}
    for precision in ("fp8", "fp32"):
        model = models.build(CONFIG, 29)
        parallel = parallelize(model, Plan(precision=precision), optimizer=AdamW(lr=1e-2), clip=1.0)
        kinds = [type(module).__name__ for module in model.modules()]
        assert kinds.count("Float8Linear") == (14 if precision == "fp8" else 0)
        losses[precision] = [parallel.step(batch).loss for batch in make_batches(3, 12, 8)]
    assert losses["fp8"] == pytest.approx(losses["fp32"], rel=5e-3)
    assert losses["fp8"] != losses["fp32"]
    with pytest.raises(ValueError, match="the model has none"):
        convert(build({}, "cpu"), emulate=True)
