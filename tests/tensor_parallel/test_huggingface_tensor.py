"""Unmodified Hugging Face models, divided by their own tensor-parallel plans."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.loss import Loss
from shardwise.optimizers import SGD
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from shardwise.verify import Report, verify
from tests.pool import run_ranks

VOCABULARY = 37


def model_of(kind: str, settings: dict[str, Any]) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        hidden_size=24,
        intermediate_size=22,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        head_dim=6,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
        **settings,
    )
    torch.manual_seed(4)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


def tokens_of(rows: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, 9), generator=torch.Generator().manual_seed(1))


def logits(kind: str, settings: dict[str, Any], plan: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """One device's logits, and the divided model's."""
    tokens = tokens_of(3)
    with torch.no_grad():
        expected = model_of(kind, settings).double().eval()(input_ids=tokens).logits
    found: list[Tensor] = []

    def watch(output: Any, targets: Tensor) -> Tensor:
        found.append(output.logits)
        return output.logits.sum()

    parallel = parallelize(model_of(kind, settings), Plan(precision="fp64", **plan), loss=Loss(watch))
    parallel.evaluate(({"input_ids": tokens}, tokens))
    parallel.close()
    return expected, found[0]


def check(kind: str, settings: dict[str, Any], plan: dict[str, Any]) -> Report:
    tokens = tokens_of(4)
    # The models compute norms and rotations in float32 whatever the precision.
    full = Plan(precision="fp64", **plan)
    batches = [({"input_ids": tokens}, tokens.roll(-1, 1))] * 2
    return verify(model_of(kind, settings), full, batches, optimizer=SGD(lr=0.1), clip=1.0, tolerance=1e-5)


KINDS = [
    ("Llama", {"num_key_value_heads": 2}),
    ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("Mistral", {"num_key_value_heads": 2}),
    ("Qwen2", {"num_key_value_heads": 4}),
    ("Qwen3", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
]


@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=str)
def test_logits_are_those_of_one_device(kind: str, settings: dict[str, Any]) -> None:
    for expected, found in run_ranks(logits, 2, kind, settings, {"tensor": 2}):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("kind", "settings"), [KINDS[0], KINDS[1], KINDS[4]], ids=str)
@pytest.mark.parametrize(
    "plan", [{"tensor": 2}, {"tensor": 2, "replicate": 2, "microbatches": 2}, {"tensor": 4}], ids=str
)
def test_training_equals_one_device(kind: str, settings: dict[str, Any], plan: dict[str, Any]) -> None:
    reports = run_ranks(check, Plan(**plan).num_ranks, kind, settings, plan)
    assert all(report.agrees for report in reports), reports[0].describe()


@pytest.mark.parametrize(
    ("kind", "settings", "plan"),
    [(*KINDS[0], {"tensor": 2, "microbatches": 2}), (*KINDS[2], {"tensor": 4}), (*KINDS[4], {"tensor": 2})],
    ids=str,
)
def test_a_split_sequence_equals_one_device(kind: str, settings: dict[str, Any], plan: dict[str, Any]) -> None:
    plan = {**plan, "sequence": True}
    reports = run_ranks(check, Plan(**plan).num_ranks, kind, settings, plan)
    assert all(report.agrees for report in reports), reports[0].describe()


def gpt2(dropout: float = 0.0) -> nn.Module:
    import transformers

    torch.manual_seed(4)
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": dropout}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=24, n_layer=2, n_head=4, **rates)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)  # biases that are not zero
    return model


def check_gpt2(plan: dict[str, Any]) -> Report:
    tokens = tokens_of(4)
    batches = [({"input_ids": tokens}, tokens.roll(-1, 1))] * 2
    return verify(gpt2(), Plan(precision="fp64", **plan), batches, optimizer=SGD(lr=0.1), clip=1.0)


@pytest.mark.parametrize(
    "plan", [{"tensor": 2}, {"tensor": 4, "microbatches": 2}, {"tensor": 2, "shard": 2, "zero": 2}]
)
def test_gpt2_of_transposed_weights_equals_one_device(plan: dict[str, Any]) -> None:
    reports = run_ranks(check_gpt2, Plan(**plan).num_ranks, plan)
    assert all(report.agrees for report in reports), reports[0].describe()


def refused_gpt2(sequence: bool, dropout: float) -> str:
    try:
        parallelize(gpt2(dropout), Plan(tensor=2, sequence=sequence))
    except ValueError as error:
        return str(error)
    return ""


def test_what_gpt2_cannot_do_is_refused() -> None:
    assert all("set plan.sequence to false" in text for text in run_ranks(refused_gpt2, 2, True, 0.0))
    assert all("set attn_pdrop to 0" in text for text in run_ranks(refused_gpt2, 2, False, 0.1))


def phi() -> str:
    import transformers

    config = transformers.Phi3Config(
        hidden_size=24,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        pad_token_id=0,
    )
    try:
        parallelize(transformers.Phi3ForCausalLM(config), Plan(tensor=2))
    except ValueError as error:
        return str(error)
    return ""


def test_a_style_without_counterpart_is_named() -> None:
    for text in run_ranks(phi, 2):
        assert "layers.*.self_attn.qkv_proj' as 'colwise_gather_output'" in text
