import copy
import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.initial import Initial
from shardwise.models import ModelConfig, Transformer, build, count_parameters
from shardwise.models import attention as attention_module
from shardwise.models import rotary as rotary_module
from tests.models import naive
from tests.models.cases import CONFIGS, SCALINGS, VOCABULARY, random_model, random_tokens, scaled

ALL = CONFIGS | {kind: scaled(kind) for kind in SCALINGS}
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5, 9, 9, 9, 9, 7]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3], [3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 20]])


def worst(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).abs().max() / expected.abs().max()).detach())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("packed", [False, True])
def test_logits_equal_the_naive_model(name: str, packed: bool) -> None:
    config = ALL[name]
    model = random_model(config)
    tokens = random_tokens(2, 11)
    where = {"positions": POSITIONS, "documents": DOCUMENTS} if packed else {}
    state = {key: value.detach() for key, value in model.named_parameters()}
    expected = naive.logits(state, config, tokens, **where)
    assert worst(model(tokens, **where), expected) < 1e-12


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mistral", "yarn"])
def test_gradients_equal_the_naive_model(name: str) -> None:
    config = ALL[name]
    model = random_model(config)
    tokens = random_tokens(2, 11)
    naive_state = {key: value.detach().clone().requires_grad_() for key, value in model.named_parameters()}
    naive.logits(naive_state, config, tokens, POSITIONS, DOCUMENTS).square().sum().backward()
    model(tokens, POSITIONS, DOCUMENTS).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        expected = naive_state[key].grad
        assert expected is not None, key
        # A key's bias shifts all scores of a query alike, so its gradient is zero without rotation.
        if expected.abs().max() > 1e-10:
            assert worst(parameter.grad, expected) < 1e-11, key


@pytest.mark.parametrize("name", ALL)
def test_forward_is_embedding_blocks_head(name: str) -> None:
    model = random_model(ALL[name])
    tokens = random_tokens(2, 11)
    x = model.embedding(tokens, POSITIONS)
    for block in model.blocks:
        x = block(x, POSITIONS, DOCUMENTS)
    assert torch.equal(model.head(x), model(tokens, positions=POSITIONS, documents=DOCUMENTS))
    assert model.stages == ("embedding", "blocks.*", "head")


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_a_document_is_read_as_if_alone(name: str) -> None:
    model = random_model(ALL[name])
    tokens = random_tokens(2, 11)
    packed = model(tokens, positions=POSITIONS, documents=DOCUMENTS)
    alone = model(tokens[:1, 3:7])
    torch.testing.assert_close(packed[:1, 3:7], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "qwen3", "dynamic", "llama3"])
def test_given_and_implied_positions_agree(name: str) -> None:
    model = random_model(ALL[name])
    tokens = random_tokens(2, 11)
    assert worst(model(tokens, positions=torch.arange(11).expand(2, 11)), model(tokens)) < 1e-13


def test_a_window_as_long_as_the_sequence_changes_nothing() -> None:
    config = CONFIGS["mistral"]
    tokens = random_tokens(1, 9)
    model = random_model(config)
    whole = random_model(config.model_copy(update={"window": 0}))
    wide = random_model(config.model_copy(update={"window": 9}))
    assert torch.equal(wide(tokens), whole(tokens))
    assert not torch.allclose(model(tokens), whole(tokens))


def test_no_token_sees_a_later_one() -> None:
    for config in CONFIGS.values():
        model = random_model(config)
        tokens = random_tokens(1, 10)
        changed = tokens.clone()
        changed[0, 6:] = (changed[0, 6:] + 1) % VOCABULARY
        before, after = model(tokens), model(changed)
        torch.testing.assert_close(before[:, :6], after[:, :6], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_too_long_for_learned_positions_is_a_clear_line() -> None:
    model = random_model(CONFIGS["gpt2"])
    with pytest.raises(ValueError, match="a sequence has 25 tokens and model.sequence = 24; raise model.sequence"):
        model(random_tokens(1, 25))
    assert random_model(CONFIGS["llama"])(random_tokens(1, 25)).isfinite().all()  # rotation has no table to run out of


@pytest.mark.parametrize("name", ALL)
def test_state_dict_holds_parameters_only_and_meta_models_come_alive(name: str) -> None:
    config = ALL[name]
    meta = build(config, VOCABULARY)
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert not list(meta.buffers())
    assert set(meta.state_dict()) == {key for key, _ in meta.named_parameters(remove_duplicate=False)}
    tokens = random_tokens(2, 11)
    assert meta(tokens.to("meta")).shape == (2, 11, VOCABULARY)

    reference = random_model(config)
    model = meta.to_empty(device="cpu").to(torch.float64)
    assert (model.head.output.weight is model.embedding.tokens.weight) is config.tied
    model.load_state_dict(reference.state_dict())
    assert torch.equal(model(tokens), reference(tokens))


def test_ties_survive_copies_and_moves() -> None:
    model = random_model(CONFIGS["gpt2"])
    for moved in (copy.deepcopy(model), model.to(torch.float32), model.to("meta")):
        assert moved.head.output.weight is moved.embedding.tokens.weight
    assert "head.output.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_has_an_initial_value(name: str) -> None:
    config = CONFIGS[name]
    model = build(config, VOCABULARY)
    residual = 0.02 / math.sqrt(2 * config.layers)
    for key, _ in model.named_parameters(remove_duplicate=False):
        if key.endswith("bias"):
            expected = Initial("constant", 0.0)
        elif "norm" in key:
            expected = Initial("constant", 1.0)
        elif key.endswith(("attention.output.weight", "down.weight")):
            expected = Initial("normal", residual)
        else:
            expected = Initial("normal", 0.02)
        assert model.initial_value(key) == expected, key


def test_a_model_built_on_a_device_starts_with_its_initial_values() -> None:
    torch.manual_seed(3)
    config = ModelConfig(family="gpt2", layers=8, hidden=64, heads=4, sequence=50)
    model = build(config, 500, "cpu")
    for key, parameter in model.named_parameters():
        initial = model.initial_value(key)
        if initial.kind == "constant":
            assert (parameter == initial.value).all(), key
        else:
            assert float(parameter.detach().std()) == pytest.approx(initial.value, rel=0.1), key
    loss = torch.nn.functional.cross_entropy(
        model(torch.randint(500, (4, 50))).flatten(0, 1), torch.randint(500, (200,))
    )
    assert float(loss.detach()) == pytest.approx(math.log(500), rel=0.05)
    torch.manual_seed(3)
    again = build(config, 500, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_model_needs_a_vocabulary() -> None:
    with pytest.raises(ValueError, match="vocabulary = 0"):
        build(CONFIGS["gpt2"], 0)


def test_norms_are_computed_in_at_least_float32() -> None:
    for config in (CONFIGS["gpt2"], CONFIGS["llama"]):
        norm = random_model(config).head.norm
        x = 300 * torch.randn(64, config.hidden, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        exact = norm(x)
        half = norm.to(torch.bfloat16)(x.to(torch.bfloat16))
        assert half.dtype is torch.bfloat16
        assert (
            worst(half.double(), exact) < 2**-6
        )  # three roundings to 8 bits; a sum in bfloat16 would be off by far more


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "mistral"])
def test_lower_precision_stays_near(name: str) -> None:
    tokens = random_tokens(2, 11)
    exact = random_model(ALL[name])(tokens, positions=POSITIONS, documents=DOCUMENTS)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        model = random_model(ALL[name]).to(dtype)
        logits = model(tokens, positions=POSITIONS, documents=DOCUMENTS)
        assert logits.dtype is dtype
        assert worst(logits.double(), exact) < bound


def test_far_positions_keep_their_angles() -> None:
    rope = CONFIGS["llama"].rope
    assert rope is not None
    far = torch.tensor([[1_000_003]])
    cos, sin = rotary_module.tables(rope, far, 0, 1, like=torch.zeros(1))
    assert cos.dtype is torch.float32
    for pair in range(rope.size // 2):
        angle = 1_000_003 * rope.theta ** (-2 * pair / rope.size)
        assert float(cos[0, 0, 0, pair]) == pytest.approx(math.cos(angle), abs=1e-6)
        assert float(sin[0, 0, 0, pair + rope.size // 2]) == pytest.approx(math.sin(angle), abs=1e-6)


def test_dropout_acts_in_training_only_and_everywhere() -> None:
    config = CONFIGS["llama"].model_copy(update={"dropout": 0.5})
    model = random_model(config)
    tokens = random_tokens(2, 11)
    assert torch.equal(model(tokens), random_model(CONFIGS["llama"])(tokens))
    model.train()
    torch.manual_seed(0)
    first = model(tokens)
    torch.manual_seed(0)
    assert torch.equal(model(tokens), first)
    assert not torch.equal(model(tokens), first)
    x = torch.ones(1, 50, config.hidden, dtype=torch.float64)
    assert (model.embedding(tokens) == 0).double().mean() == pytest.approx(0.5, abs=0.1)
    block = model.blocks[0]
    assert ((block.dropout(x)) == 0).double().mean() == pytest.approx(0.5, abs=0.1)
    core = block.attention.core
    q = torch.zeros(1, 1, 400, 4, dtype=torch.float64)
    kept = core(q, q, torch.ones_like(q))[0, 0, -1, 0]  # 400 equal weights, each kept doubled or dropped
    assert float(kept) != 1
    assert float(kept) == pytest.approx(1, abs=0.25)


def test_tables_made_without_gradients_serve_training() -> None:
    rotary_module._tables.clear()
    attention_module._last_mask = None
    for name in ("llama", "mistral"):
        model = random_model(CONFIGS[name])
        tokens = random_tokens(1, 9)
        with torch.inference_mode():
            model(tokens, documents=torch.zeros_like(tokens))
        model(tokens).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_tracing_shapes_leaves_no_trace() -> None:
    config = CONFIGS["mistral"]
    tokens = random_tokens(1, 9)
    model = random_model(config, torch.float32)
    expected = model(tokens)
    for warm in (False, True):
        if not warm:
            rotary_module._tables.clear()
        with FakeTensorMode():
            fake = Transformer(config, VOCABULARY)
            assert fake(torch.zeros(1, 9, dtype=torch.int64)).shape == (1, 9, VOCABULARY)
        assert torch.equal(model(tokens), expected)


def test_layers_share_a_mask_and_a_changed_one_is_seen() -> None:
    model = random_model(CONFIGS["llama"])
    tokens, documents = random_tokens(2, 11), DOCUMENTS.clone()
    first = model(tokens, documents=documents)
    memo = attention_module._last_mask
    assert memo is not None
    assert torch.equal(model(tokens, documents=documents), first)
    assert attention_module._last_mask is memo
    documents.zero_()
    assert worst(model(tokens, documents=documents), model(tokens)) < 1e-13
    assert worst(model(tokens, documents=DOCUMENTS), first) == 0


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_compiled_equals_eager(name: str) -> None:
    model = random_model(CONFIGS[name])
    tokens = random_tokens(2, 11)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    logits = compiled(tokens, documents=DOCUMENTS)
    assert worst(logits, model(tokens, documents=DOCUMENTS)) < 1e-12
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CONFIGS)
def test_some_of_the_heads_work_as_a_model_of_their_own(name: str) -> None:
    config = CONFIGS[name]
    attention = random_model(config).blocks[0].attention
    x = torch.randn(2, 7, config.hidden, dtype=torch.float64)
    whole = attention(x)
    group, size = config.heads // config.kv_heads, config.head_size
    total = torch.zeros_like(whole)
    for head in range(config.kv_heads):
        part = copy.deepcopy(attention)
        for module, width in ((part.query, group * size), (part.key, size), (part.value, size)):
            rows = slice(head * width, (head + 1) * width)
            module.weight = torch.nn.Parameter(module.weight[rows])
            if module.bias is not None:
                module.bias = torch.nn.Parameter(module.bias[rows])
        part.output.weight = torch.nn.Parameter(
            attention.output.weight[:, head * group * size : (head + 1) * group * size]
        )
        part.output.bias = None
        total = total + part(x)
    if config.bias:
        total = total + attention.output.bias
    assert worst(total, whole) < 1e-12


def test_count_matches_any_dtype_and_device() -> None:
    config = CONFIGS["gpt2"]
    assert sum(p.numel() for p in build(config, VOCABULARY, dtype=torch.bfloat16).parameters()) == count_parameters(
        config, VOCABULARY
    )
