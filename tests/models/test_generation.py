import itertools

import pytest
import torch

from shardwise.models import generate
from shardwise.models.attention import KeyValueCache
from shardwise.models.generation import draw
from shardwise.models.transformer import Transformer
from tests.models.cases import CONFIGS, SCALINGS, VOCABULARY, random_model, scaled

ALL = CONFIGS | {kind: scaled(kind) for kind in SCALINGS}
PROMPT = [3, 1, 4, 1, 5]


def uncached(model: Transformer, prompt: list[int], count: int, temperature: float, seed: int) -> list[int]:
    """What `generate` promises, with a full forward for every token."""
    generator = torch.Generator().manual_seed(seed)
    longest = model.config.sequence
    context, out = prompt[-longest:], []
    for _ in range(count):
        if len(context) > longest:
            context = context[-(longest // 2) :]
        with torch.no_grad():
            logits = model(torch.tensor([context]))[0, -1]
        token = draw(logits, temperature, 0, 1.0, generator)
        context.append(token)
        out.append(token)
    return out


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_to_the_uncached_model_also_past_the_context(name: str, temperature: float) -> None:
    model = random_model(ALL[name])
    count = 2 * model.config.sequence + 3
    got = list(generate(model, PROMPT, max_tokens=count, temperature=temperature, seed=7))
    assert got == uncached(model, PROMPT, count, temperature, seed=7)


def test_a_prompt_longer_than_the_context_keeps_its_newest_tokens() -> None:
    model = random_model(CONFIGS["gpt2"])
    prompt = [i % VOCABULARY for i in range(60)]
    got = list(generate(model, prompt, max_tokens=5, temperature=0))
    assert got == uncached(model, prompt, 5, 0, 0)
    assert got == list(generate(model, prompt[-24:], max_tokens=5, temperature=0))


def test_cached_logits_are_the_uncached_ones() -> None:
    for config in ALL.values():
        model = random_model(config)
        tokens = torch.tensor([PROMPT + [2, 7]])
        if config.rope_scaling.kind == "dynamic":
            tokens = tokens[:, : config.rope_scaling.original_sequence]
        shape = (1, config.kv_heads, 7, config.head_size)
        caches = [KeyValueCache(shape, torch.device("cpu"), torch.float64) for _ in model.blocks]
        parts = []
        for start, stop in ((0, 3), (3, 6), (6, 7)):  # a prompt, a piece after it, a single token
            x = model.embedding(tokens[:, start:stop], torch.arange(start, stop)[None])
            for block, cache in zip(model.blocks, caches, strict=True):
                x = block(x, cache=cache)
            parts.append(model.head(x))
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-11, atol=1e-11)


def test_a_seed_repeats_and_another_differs() -> None:
    model = random_model(CONFIGS["llama"])
    runs = [list(generate(model, PROMPT, max_tokens=20, temperature=2.0, seed=seed)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_streams_and_leaves_the_model_and_the_mode_as_they_were() -> None:
    model = random_model(CONFIGS["llama"]).train()
    stream = generate(model, PROMPT, max_tokens=1000)
    first = list(itertools.islice(stream, 3))
    assert len(first) == 3
    assert not model.training
    assert not torch.is_inference_mode_enabled()
    stream.close()
    assert model.training
    model(torch.tensor([PROMPT])).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_stops_before_the_end_token() -> None:
    model = random_model(CONFIGS["gpt2"])
    tokens = list(generate(model, PROMPT, max_tokens=30, seed=3))
    end = tokens[10]
    assert list(generate(model, PROMPT, max_tokens=30, seed=3, end=end)) == tokens[: tokens.index(end)]
    assert list(generate(model, PROMPT, max_tokens=0)) == []


def counts(**options: float) -> torch.Tensor:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]).log()
    arguments = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | options
    generator = torch.Generator().manual_seed(0)
    drawn = [draw(logits, generator=generator, **arguments) for _ in range(4000)]
    return torch.bincount(torch.tensor(drawn), minlength=5) / 4000


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05, 0]),
        ({"temperature": 0.0}, [1, 0, 0, 0, 0]),
        ({"temperature": 0.5}, [0.6849, 0.2466, 0.0616, 0.0068, 0]),
        ({"temperature": 1e-320}, [1, 0, 0, 0, 0]),
        ({"top_k": 2}, [0.625, 0.375, 0, 0, 0]),
        ({"top_k": 50}, [0.5, 0.3, 0.15, 0.05, 0]),
        ({"top_p": 0.79}, [0.625, 0.375, 0, 0, 0]),
        ({"top_p": 0.81}, [0.5263, 0.3158, 0.1579, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.6}, [0.625, 0.375, 0, 0, 0]),
    ],
)
def test_draws_follow_the_asked_distribution(options: dict[str, float], expected: list[float]) -> None:
    got = counts(**options)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=got.dtype), rtol=0, atol=0.03)
    assert ((torch.tensor(expected) > 0) | (got == 0)).all()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"prompt": []}, "the prompt has no tokens"),
        ({"prompt": [29]}, "the prompt has token 29 and the model knows 0 to 28"),
        ({"temperature": -1.0}, "temperature = -1.0 is not possible"),
        ({"temperature": float("nan")}, "temperature = nan is not possible"),
        ({"top_k": -1}, "top_k = -1 is negative"),
        ({"top_p": 0.0}, "top_p = 0.0 is not a probability"),
        ({"max_tokens": -1}, "max_tokens = -1 is negative"),
    ],
)
def test_arguments_out_of_range_are_refused_at_once(arguments: dict[str, object], line: str) -> None:
    model = random_model(CONFIGS["gpt2"])
    with pytest.raises(ValueError, match=line):
        generate(model, **({"prompt": PROMPT} | arguments))


def test_a_diverged_model_is_a_clear_line() -> None:
    model = random_model(CONFIGS["gpt2"])
    with torch.no_grad():
        model.head.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="logits are not finite"):
        list(generate(model, PROMPT))
