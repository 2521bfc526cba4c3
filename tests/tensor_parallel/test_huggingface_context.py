"""Unmodified Hugging Face models, their sequences divided, against one device."""

from typing import Any

import pytest
import torch
import transformers

from shardwise.optimizers import SGD
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from shardwise.tensor_parallel.context import check as check_model
from shardwise.verify import Report, verify
from tests.pool import run_ranks

SIZES = {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 4}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"num_key_value_heads": 2}),
    "mistral": (
        transformers.MistralConfig,
        transformers.MistralForCausalLM,
        {"num_key_value_heads": 3, "sliding_window": 3},
    ),
    "qwen2": (
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        {"num_key_value_heads": 6, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
}


def model(kind: str, **more: Any) -> Any:
    config, build, own = KINDS[kind]
    torch.manual_seed(0)
    return build(config(**SIZES, intermediate_size=20, initializer_range=0.2, **own, **more))


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for length in (13, 6):
        tokens = torch.randint(0, 31, (2, length + 1), generator=generator)
        found.append(({"input_ids": tokens[:, :-1]}, tokens[:, 1:]))
    return found


def check(kind: str, method: str) -> Report:
    plan = Plan(context=2, context_method=method, precision="fp64")
    return verify(model(kind), plan, batches(), optimizer=SGD(lr=0.1), clip=1.0)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_equals_one_device(kind: str, method: str) -> None:
    for report in run_ranks(check, 2, kind, method):
        assert report.agrees, report.describe()


def refused() -> list[str]:
    parallel = parallelize(model("llama"), Plan(context=2), optimizer=SGD(lr=0.1))
    (inputs, targets), _ = batches()
    found = []
    for name in ("attention_mask", "position_ids"):
        try:
            parallel.step(({**inputs, name: torch.ones_like(targets)}, targets))
        except ValueError as error:
            found.append(str(error))
    parallel.close()
    return found


def test_inputs_that_would_mean_something_else_are_refused() -> None:
    for mask, positions in run_ranks(refused, 2):
        assert "'attention_mask'" in mask
        assert "'position_ids'" in positions


def test_models_that_cannot_be_divided_are_refused() -> None:
    stretched = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="length of the whole sequence"):
        check_model(model("llama", rope_parameters=stretched), "ring")
    with pytest.raises(ValueError, match="drops attention weights"):
        check_model(model("llama", attention_dropout=0.1), "ring")
    check_model(model("llama", attention_dropout=0.1), "ulysses")
    bert = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=31, hidden_size=24, num_hidden_layers=1, num_attention_heads=6, intermediate_size=20
        )
    )
    with pytest.raises(ValueError, match="set plan.context = 1"):
        check_model(bert, "ring")
