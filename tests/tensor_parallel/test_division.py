"""Layers divided over the tensor axis against one device, and what the rules say to a mistake."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwise import head
from shardwise.exchange import Exchange
from shardwise.layout import share
from shardwise.loss import Loss, cross_entropy_with
from shardwise.mesh import Mesh
from shardwise.models import build
from shardwise.models.config import ModelConfig
from shardwise.optimizers import SGD, AdamW
from shardwise.parallel import Parallel
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from shardwise.tensor_parallel.region import Region
from shardwise.tensor_parallel.rules import Style
from shardwise.verify import Report, verify
from tests.pool import run_ranks

VOCABULARY = 37
GPT2 = {"family": "gpt2", "hidden": 18, "heads": 3, "intermediate": 31}
GPT2_SIX = {**GPT2, "hidden": 24, "heads": 6}
LLAMA = {"family": "llama", "hidden": 24, "heads": 6, "kv_heads": 2, "intermediate": 21}
QWEN = {**LLAMA, "family": "qwen", "query_key_norm": True, "tied": True}
SHARED = {**LLAMA, "heads": 4, "kv_heads": 2}


def make_batches(num: int, rows: int, length: int, vocabulary: int = VOCABULARY) -> list[Any]:
    """Global batches with ignored targets, whose lengths change from step to step."""
    generator = torch.Generator().manual_seed(length)
    found = []
    for step in range(num):
        tokens, targets = torch.randint(0, vocabulary, (2, rows, length + step), generator=generator)
        targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
        found.append(({"tokens": tokens}, targets))
    return found


def sum_of_squares(output: Tensor, targets: Tensor) -> Tensor:
    """A loss that is not known to be a cross-entropy."""
    return (output.logsumexp(-1).square() * (targets != -100)).sum()


LOSSES = {"plain": cross_entropy_with(), "smooth": cross_entropy_with(0.1, 1e-2), "own": Loss(sum_of_squares)}


def in_parts(most: int) -> Any:
    """Rows divided as an accelerator divides many of them, so that a part travels while the next is computed."""

    def parts(region: Region, x: Tensor) -> list[slice]:
        num = max(1, min(most, x.shape[0]))
        return [slice(*share(x.shape[0], number, num)) for number in range(num)]

    return parts


def check(plan: dict[str, Any], model: dict[str, Any], job: dict[str, Any]) -> Report:
    vocabulary = job.get("vocabulary", VOCABULARY)
    config = ModelConfig(**{"layers": 2, "sequence": 16, **model})
    full = Plan(precision="fp64", **plan)
    rows = full.data_parallel * full.microbatches + job.get("more", 1)
    torch.manual_seed(3)
    parts = in_parts(job.get("parts", 1))
    with patch.object(head, "CHUNK_TOKENS", job.get("chunk", 1)), patch.object(Region, "parts", parts):
        return verify(
            build(config, vocabulary, device=job.get("device", "meta")),
            full,
            make_batches(2, rows, job.get("length", 7), vocabulary),
            optimizer=SGD(lr=0.3, momentum=0.9) if job.get("sgd") else AdamW(lr=1e-2, weight_decay=0.3),
            clip=job.get("clip", 0.5),
            loss=LOSSES[job.get("loss", "plain")],
            bucket_bytes=600,
        )


def assert_agrees(plan: dict[str, Any], model: dict[str, Any], job: dict[str, Any]) -> None:
    reports = run_ranks(check, Plan(**plan).num_ranks, plan, model, job)
    assert all(report.agrees for report in reports), reports[0].describe()
    assert {difference.kind for difference in reports[0].differences} >= {"loss", "gradient", "parameter"}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("plan", "model", "job"),
    [
        ({"tensor": 2}, GPT2_SIX, {}),
        ({"tensor": 3}, GPT2, {"loss": "smooth"}),
        ({"tensor": 2}, {**GPT2_SIX, "tied": False}, {"loss": "own"}),
        ({"tensor": 2}, LLAMA, {"clip": None}),
        ({"tensor": 2}, QWEN, {}),
        ({"tensor": 4}, SHARED, {}),
        ({"tensor": 4}, {**SHARED, "kv_heads": 1, "family": "qwen"}, {"vocabulary": 3, "length": 2}),
        ({"tensor": 2, "replicate": 2}, GPT2_SIX, {"more": 0}),
        ({"tensor": 4}, SHARED, {"parts": 3, "more": 4}),
        ({"tensor": 2, "pipeline": 2, "replicate": 2, "microbatches": 3}, GPT2_SIX, {}),
        ({"tensor": 2, "pipeline": 2, "replicate": 2, "microbatches": 2}, LLAMA, {"sgd": True}),
        ({"tensor": 2, "pipeline": 2, "chunks": 2, "schedule": "interleaved", "microbatches": 4}, LLAMA, {}),
        ({"tensor": 2, "pipeline": 2, "schedule": "zb-h1", "microbatches": 3}, QWEN, {}),
        ({"tensor": 2, "pipeline": 2, "schedule": "pipedream", "microbatches": 3}, LLAMA, {}),
        ({"tensor": 2, "context": 2}, LLAMA, {"length": 9}),
        ({"tensor": 2, "context": 2, "context_method": "ulysses"}, {**SHARED, "tied": True}, {"length": 9}),
        ({"tensor": 2, "shard": 2, "zero": 1}, QWEN, {}),
        ({"tensor": 2, "shard": 2, "zero": 2, "microbatches": 2}, GPT2_SIX, {}),
        ({"tensor": 2, "shard": 2, "zero": 3, "microbatches": 2}, LLAMA, {"loss": "smooth"}),
    ],
    ids=str,
)
def test_equals_one_device(plan: dict[str, Any], model: dict[str, Any], job: dict[str, Any], sequence: bool) -> None:
    assert_agrees({**plan, "sequence": sequence}, model, job)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    tensor = draw(st.sampled_from([2, 3, 4]))
    kv_heads = draw(st.sampled_from([count for count in range(1, tensor + 1) if tensor % count == 0]))
    heads = tensor * draw(st.integers(1, 2))
    family = draw(st.sampled_from(["gpt2", "llama", "qwen"]))
    model = {
        "family": family,
        "heads": heads,
        "kv_heads": heads if family == "gpt2" else kv_heads,
        "head_size": 2 * draw(st.integers(1, 3)),
        "hidden": draw(st.integers(3, 13)),
        "intermediate": draw(st.integers(1, 9)),
        "tied": draw(st.booleans()),
        "query_key_norm": family == "qwen" and draw(st.booleans()),
    }
    if model["hidden"] % heads and model["head_size"] == model["hidden"] // heads:
        model["head_size"] += 2  # the config takes this for a size that was left out
    plan = {"tensor": tensor, "sequence": draw(st.booleans()), "microbatches": draw(st.integers(1, 2))}
    job = {
        "vocabulary": draw(st.integers(2, 19)),
        "length": draw(st.integers(1, 6)),
        "loss": draw(st.sampled_from(list(LOSSES))),
        "clip": draw(st.sampled_from([None, 0.05])),
        "device": draw(st.sampled_from(["meta", "cpu"])),
        "sgd": draw(st.booleans()),
        "chunk": draw(st.sampled_from([1, 256])),
        "parts": draw(st.integers(1, 3)),
        "more": draw(st.integers(0, 2)),
    }
    return plan, model, job


@settings(max_examples=11, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(jobs())
def test_odd_sizes_equal_one_device(job: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> None:
    assert_agrees(*job)


# A user's own module


class Mixer(nn.Module):
    """Fused matrices, layers with one input of which one is called twice, and attention that reads its input's
    length."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.gate_up = nn.Linear(10, 14)
        self.down = nn.Linear(7, 10)
        self.one = nn.Linear(10, 6)
        self.two = nn.Linear(10, 6, bias=False)
        self.back = nn.Linear(6, 10)
        self.reader = Reader()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.reader(y)
        gate, up = self.gate_up(y).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        return x + self.back(self.one(x) * self.two(y) + self.one(y))


class Reader(nn.Module):
    """Attention that reads the length of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.head_size = 3
        self.qkv = nn.Linear(10, 18)
        self.output = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (t.view(rows, length, -1, 3).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.output(y.transpose(1, 2).reshape(rows, length, -1))
        return out


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(10, 10, 3, padding=1)
        self.gain = nn.Parameter(torch.empty(10))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2) * self.gain


class Own(nn.Module):
    stages = ("tokens", "blocks.*", "out")

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 10, padding_idx=2)
        self.blocks = nn.ModuleList([Mixer(), Positions(), Mixer()])
        self.blocks[2].down.requires_grad_(False)
        self.out = nn.Linear(10, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


OWN_RULES: dict[str, Any] = {
    "tokens": "vocabulary",
    "blocks.*.gate_up": Style("column", sections=2),
    "blocks.*.down": "row",
    "blocks.*.one|two": "column",
    "blocks.*.back": "row",
    "blocks.*.reader": "entrance",
    "blocks.*.reader.qkv": Style("column", unit="head_size", sections=3),
    "blocks.*.reader.output": "row",
    "blocks.1": "replicated",
    "out": "vocabulary",
}


def own_model() -> nn.Module:
    torch.manual_seed(11)
    model = Own()
    nn.init.ones_(model.blocks[1].gain)
    return model


def check_own(plan: dict[str, Any]) -> Report:
    full = Plan(precision="fp64", **plan)
    batches = make_batches(2, full.data_parallel * full.microbatches, 5)
    return verify(own_model(), full, batches, optimizer=SGD(lr=0.2), clip=1.0, rules=OWN_RULES)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    "plan",
    [{"tensor": 2, "microbatches": 2}, {"tensor": 2, "pipeline": 2, "schedule": "zb-h1", "microbatches": 3}],
    ids=str,
)
def test_a_users_own_module_is_divided_by_the_users_rules(plan: dict[str, Any], sequence: bool) -> None:
    reports = run_ranks(check_own, Plan(**plan).num_ranks, {**plan, "sequence": sequence})
    assert all(report.agrees for report in reports), reports[0].describe()


def refusal(kind: str, rules: dict[str, Any] | None, sequence: bool = False) -> str:
    models: dict[str, Any] = {
        "own": own_model,
        "gpt2": lambda: build(ModelConfig(**{**GPT2, "layers": 1}), VOCABULARY),
        "six": lambda: build(ModelConfig(**{**GPT2_SIX, "layers": 1}), VOCABULARY),
        "shared": lambda: build(ModelConfig(**{**LLAMA, "kv_heads": 3, "layers": 1}), VOCABULARY),
    }
    try:
        parallelize(models[kind](), Plan(tensor=2, sequence=sequence), optimizer=SGD(), rules=rules)
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("kind", "rules", "sequence", "expected"),
    [
        ("own", None, False, "no rule says how Embedding with parameter 'weight', 'tokens' is divided"),
        ("own", {"tokens": "replicated"}, False, "no rule says how linear layer 'blocks.0.gate_up' is divided"),
        ("own", {**OWN_RULES, "blocks.1": "column"}, False, "'blocks.1' is a Positions, and 'column' divides a Linear"),
        ("own", {**OWN_RULES, "block.*.up": "column"}, False, "'block.*.up' names no module of Own"),
        ("own", {**OWN_RULES, "out": "colum"}, False, "rules['out'] = 'colum' is not a style"),
        ("own", {**OWN_RULES, "out": "replicated"}, True, "no rule divides the output matrix over the vocabulary"),
        ("own", {**OWN_RULES, "blocks.*.gate_up": Style("column", sections=(3, 4))}, False, "do not make up the 14"),
        ("own", {**OWN_RULES, "blocks.*.gate_up": Style("column", unit="size")}, False, "which Mixer does not have"),
        ("gpt2", None, False, "plan.tensor = 2 does not divide the 3 heads of 'blocks.0.attention.query'"),
        ("six", {"head.output": "replicated"}, False, "'head.output.weight' is shared with another module"),
        ("shared", None, False, "does not divide the 3 heads of 'blocks.0.attention.key'"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(kind: str, rules: Any, sequence: bool, expected: str) -> None:
    for text in run_ranks(refusal, 2, kind, rules, sequence):
        assert expected in text


# Memory, norms, evaluation


def largest_allocation() -> tuple[int, int, int]:
    """Elements of the model, of this rank's parameters, and of the largest tensor that drawing them made."""
    model = build(ModelConfig(family="gpt2", layers=1, hidden=64, heads=4, sequence=8, tied=False), 4096)
    total = sum(parameter.numel() for parameter in model.parameters())
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.device.type != "meta":
                sizes.append(result.untyped_storage().nbytes() // result.element_size())
            return result

    with Watch():
        parallel = parallelize(model, Plan(tensor=2), bucket_bytes=1)
    held = sum(parameter.numel() for parameter in model.parameters())
    parallel.close()
    return total, held, max(sizes)


def test_no_rank_ever_holds_a_whole_divided_weight() -> None:
    for total, held, largest in run_ranks(largest_allocation, 2):
        assert held < 0.51 * total + 64 * 8
        assert largest <= 4096 * 64 // 2


def clipped(plan: dict[str, Any]) -> tuple[float, float]:
    """A replicated gradient of 3, a divided one of (4, 0), clip 1."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(2, 1)
            self.whole = nn.Parameter(torch.zeros(1))

        def forward(self, tokens: Tensor) -> Tensor:
            return 4 * self.table(tokens) + 3 * self.whole

    torch.manual_seed(3)
    model = Two()
    rules: dict[str, Any] = {"table": "vocabulary"}
    loss = Loss(lambda output, targets: output.sum(), lambda targets: torch.ones((), dtype=torch.int64))
    parallel = parallelize(
        model, Plan(tensor=2, precision="fp64", **plan), loss=loss, optimizer=SGD(lr=1.0), clip=1.0, rules=rules
    )
    before = parallel.full_parameters()["whole"].clone()
    metrics = parallel.step(({"tokens": torch.zeros(1, 1, dtype=torch.int64)}, torch.zeros(1, 1)))
    moved = float(before - parallel.full_parameters()["whole"])
    parallel.close()
    assert metrics.gradient_norm is not None
    return metrics.gradient_norm, moved


@pytest.mark.parametrize("plan", [{}, *({"shard": 2, "zero": stage} for stage in (1, 2, 3))], ids=str)
def test_the_norm_counts_each_piece_once(plan: dict[str, Any]) -> None:
    """CASES 11 and 12, with every ZeRO stage."""
    for norm, moved in run_ranks(clipped, 2 * plan.get("shard", 1), plan):
        assert norm == pytest.approx(5.0, rel=1e-12)
        assert moved == pytest.approx(3 * 0.2, rel=1e-12)


def evaluated(plan: dict[str, Any]) -> tuple[float, int, float]:
    torch.manual_seed(2)
    model = build(ModelConfig(**{**LLAMA, "layers": 1}), VOCABULARY)
    parallel = parallelize(model, Plan(precision="fp64", **plan), optimizer=SGD(lr=0.1))
    batch = make_batches(1, 4, 6)[0]
    loss, count = parallel.evaluate(parallel.share(batch))
    empty = parallel.evaluate(parallel.share((({"tokens": batch[0]["tokens"][:1]}), batch[1][:1])))
    parallel.close()
    return loss, count, empty[0]


def test_evaluation_counts_each_target_once_and_takes_a_share_without_rows() -> None:
    expected = run_ranks(evaluated, 1, {})[0]
    for plan in ({"tensor": 2}, {"tensor": 2, "replicate": 2, "sequence": True}):
        for loss, count, empty in run_ranks(evaluated, Plan(**plan).num_ranks, plan):
            assert loss == pytest.approx(expected[0], rel=1e-12)
            assert count == expected[1]
            assert empty == pytest.approx(expected[2], rel=1e-12)


# verify can fail


def forget_the_bias_once(parallel: Parallel) -> None:
    """Every rank but the first adds nothing: what a row layer's sum would be if a rank's product were lost."""
    for module in parallel.model.modules():
        if isinstance(module, nn.Linear) and parallel.mesh.axis("tensor").rank == 1:
            with torch.no_grad():
                module.weight.mul_(1 + 1e-7)


def check_sabotaged() -> Report:
    model = build(ModelConfig(**{**LLAMA, "layers": 1}), VOCABULARY)
    plan = Plan(tensor=2, precision="fp64")
    return verify(model, plan, make_batches(1, 2, 4), optimizer=SGD(lr=0.1), sabotage=forget_the_bias_once)


def test_a_piece_that_is_off_by_little_is_found() -> None:
    assert not run_ranks(check_sabotaged, 2)[0].agrees


def exchanged(link: bool) -> list[Any]:
    """Sums and gathers of tensors whose shares differ in length, of sizes that grow."""
    axis = Mesh({"tensor": 3}).axis("tensor")
    exchange = Exchange(axis, torch.device("cpu"))
    if not link:
        assert exchange._link is not None
        exchange._link.close()
        exchange._link = None
    found: list[Any] = []
    for size in (1, 4, 7):
        base = torch.arange(2.0 * size * 3).view(2, size, 3)
        for dim in (None, 1):
            buffer = exchange.buffer((2, size, 3), base)
            buffer.copy_(base * (axis.rank + 1))
            found.append(exchange.start_sum(buffer, dim)().clone())
        start, stop = axis.rank * size // 3, (axis.rank + 1) * size // 3
        found.append(exchange.gather(base[:, start:stop], 1, size))
    exchange.close()
    return [*found, exchange.elements]


@pytest.mark.parametrize("link", [True, False])
def test_exchanges_sum_and_gather_uneven_shares(link: bool) -> None:
    for rank, found in enumerate(run_ranks(exchanged, 3, link)):
        for number, size in enumerate((1, 4, 7)):
            base = torch.arange(2.0 * size * 3).view(2, size, 3)
            whole, part, gathered = found[3 * number : 3 * number + 3]
            assert torch.equal(whole, base * 6)
            assert torch.equal(part, base[:, rank * size // 3 : (rank + 1) * size // 3] * 6)
            assert torch.equal(gathered, base)
        assert found[-1] == pytest.approx(4 * (2 / 3) * 6 * (1 + 4 + 7))
