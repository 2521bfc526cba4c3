import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shardwise.models import ModelConfig, build, count_parameters, flops_per_token
from tests.models.cases import CONFIGS, VOCABULARY, random_model, random_tokens


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_model(name: str, tied: bool) -> None:
    config = CONFIGS[name].model_copy(update={"tied": tied})
    assert count_parameters(config, VOCABULARY) == sum(p.numel() for p in build(config, VOCABULARY).parameters())


def test_published_sizes() -> None:
    gpt2 = ModelConfig(family="gpt2", layers=12, hidden=768, heads=12)
    assert count_parameters(gpt2, 50257) == 124_439_808
    llama = ModelConfig(family="llama", layers=32, hidden=4096, heads=32, sequence=4096)
    assert count_parameters(llama, 32000) == 6_738_415_616
    mistral = ModelConfig(family="mistral", layers=32, hidden=4096, heads=32, kv_heads=8, intermediate=14336)
    assert count_parameters(mistral, 32000) == 7_241_732_096


def test_parameters_follow_megatrons_formula() -> None:
    # arXiv 2104.04473: 12 L h^2 (1 + 13/(12h) + (V+s)/(12 L h)), which leaves out the last norm.
    layers, hidden, sequence, vocabulary = 7, 64, 96, 1000
    config = ModelConfig(family="gpt2", layers=layers, hidden=hidden, heads=4, sequence=sequence)
    formula = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocabulary + sequence) / (12 * layers * hidden))
    assert count_parameters(config, vocabulary) == pytest.approx(formula + 2 * hidden, rel=1e-12)


def test_flops_follow_megatrons_formula() -> None:
    # arXiv 2104.04473 without recomputation: 72 B s L h^2 (1 + s/(6h) + V/(12 L h)).
    layers, hidden, sequence, vocabulary = 7, 64, 96, 1000
    config = ModelConfig(family="gpt2", layers=layers, hidden=hidden, heads=4, sequence=sequence)
    formula = 72 * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (12 * layers * hidden))
    assert flops_per_token(config, vocabulary, sequence) == pytest.approx(formula, rel=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    config = CONFIGS[name].model_copy(update={"window": 0})
    model = random_model(config)
    tokens = random_tokens(3, 16)
    # The plain kernel computes all scores, which is the convention of "full".
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens).sum().backward()
    # torch also counts the gradient of the first layer's input, as we do: an embedding below needs it.
    assert counter.get_total_flops() == tokens.numel() * flops_per_token(config, VOCABULARY, 16)


@pytest.mark.parametrize("window", [0, 1, 5, 16, 40])
def test_causal_flops_count_the_keys_a_token_sees(window: int) -> None:
    config = CONFIGS["llama"].model_copy(update={"window": window})
    sequence = 16
    seen = sum(min(i + 1, window or sequence) for i in range(sequence))
    for attention, num_keys in (("causal", seen), ("full", sequence * min(window or sequence, sequence))):
        without = (
            flops_per_token(config, VOCABULARY, 1, attention) - 12 * config.layers * config.heads * config.head_size
        )
        expected = without + 12 * config.layers * config.heads * config.head_size * num_keys / sequence
        assert flops_per_token(config, VOCABULARY, sequence, attention) == pytest.approx(expected, abs=1)


def test_counts_need_no_memory() -> None:
    config = ModelConfig(family="gpt2", layers=128, hidden=25600, heads=160, sequence=2048)
    assert count_parameters(config, 51200) == pytest.approx(1.008e12, rel=1e-3)  # the 1T row of arXiv 2104.04473
    assert torch.tensor(flops_per_token(config, 51200, 2048)).item() > 6 * 1e12
