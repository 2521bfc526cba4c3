"""What stays in float32 while passes run in 16 bits: norms, softmax, loss, sums of gradients, optimizer state."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import models
from shardwise.memory import norms
from shardwise.optimizers import AdamW
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from tests.models.cases import CONFIGS, VOCABULARY
from tests.test_verify import packed

# By operation, which of its tensors must be float32. Attention's kernel adds up and takes its softmax in float32; what
# it keeps of that for backward, the logarithm of the denominator, is the sixth argument there.
WIDE: dict[str, slice] = {
    "aten.native_layer_norm": slice(None),
    "aten.native_layer_norm_backward": slice(None),
    "aten.pow": slice(None),
    "aten.mean": slice(None),
    "aten.rsqrt": slice(None),
    "aten._softmax": slice(None),
    "aten._log_softmax": slice(None),
    "aten.exp": slice(None),
    "aten.exp_": slice(None),
    "aten.log": slice(None),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": slice(5, 6),
    "aten.index_add_": slice(0, 1),
    "aten.add_": slice(0, 1),
}


class Spy(TorchDispatchMode):
    """The dtypes of all floating-point operands, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[tuple[torch.dtype, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = tuple(arg.dtype for arg in args if isinstance(arg, Tensor) and arg.is_floating_point())
        self.seen.setdefault(str(func).rpartition(".")[0], set()).add(operands)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-pure"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_norms_softmax_loss_and_sums_of_gradients_are_in_float32(name: str, precision: str) -> None:
    model = models.build(CONFIGS[name], VOCABULARY)
    plan = Plan(precision=precision, microbatches=2)
    parallel = parallelize(model, plan, optimizer=AdamW(lr=1e-2), clip=1.0)
    with Spy() as spy:
        parallel.step(packed(4, 9, 1))
    sixteen = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-pure": torch.bfloat16}[precision]
    assert {parameter.dtype for parameter in model.parameters()} == {sixteen}
    for operation, which in WIDE.items():
        for operands in spy.seen.get(operation, set()):
            assert set(operands[which]) <= {torch.float32, torch.float64}, (operation, operands)
    wanted = {"aten.native_layer_norm_backward"} if name == "gpt2" else {"aten.rsqrt", "aten.mean"}
    wanted |= {"aten.exp_", "aten.log", "aten._scaled_dot_product_flash_attention_for_cpu_backward", "aten.add_"}
    assert wanted <= spy.seen.keys()
    for buckets in (chunk.buckets for chunk in parallel.chunks):
        for bucket in buckets.buckets:
            assert bucket.own_gradient.dtype == torch.float32
            assert {m.dtype for fragment in bucket.fragments for m in fragment.state.values()} == {torch.float32}


@pytest.mark.parametrize("shape", [(24,), (3, 8)], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_is_torchs_rounded_once(shape: tuple[int, ...], affine: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    # With a mean far from zero, which 16 bits hold badly.
    x = (torch.randn((5, *shape), generator=generator) + 30).bfloat16()
    norm = nn.LayerNorm(shape, elementwise_affine=affine).bfloat16()
    exact = nn.LayerNorm(shape, elementwise_affine=affine).double()
    grad = torch.randn(x.shape, generator=generator).bfloat16()

    def run(module: nn.Module, given: Tensor) -> list[Tensor]:
        given = given.clone().requires_grad_()
        y = module(given)
        found = torch.autograd.grad(y, [given, *module.parameters()], grad.to(y.dtype))
        return [y.detach(), *found]

    right = run(exact, x.double())
    theirs = run(norm, x)
    norms.widen(norm)
    ours = run(norm, x)
    for mine, other, value in zip(ours, theirs, right, strict=True):
        error = float((mine.double() - value).abs().max() / value.abs().max())
        assert error < 2**-8  # half a unit of the last place of the largest, and of the 16-bit result before it
        assert error <= float((other.double() - value).abs().max() / value.abs().max()) + 1e-9
    assert float((theirs[1].double() - right[1]).abs().max() / right[1].abs().max()) > 2**-8
    with torch.no_grad():
        assert torch.equal(norm(x), ours[0])
