"""Gradients land where they are kept, without a copy; and apart from input gradients when a schedule asks."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardwise.gradient import Slot, Tape, attach, attach_apart, can_put_off, hook, is_direct


class Ground:
    """A module's slots over one flat tensor, as a bucket has them."""

    def __init__(self, module: nn.Module, put_off: bool = False) -> None:
        self.landed: list[str] = []
        self.tape = Tape()
        self.module = module
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.flat = torch.full((sum(p.numel() for _, p in trained),), float("nan"), dtype=torch.float64)
        self.slots: dict[str, Slot] = {}
        start = 0
        for name, p in trained:
            view = self.flat[start : start + p.numel()].view(p.shape)
            owner = module.get_submodule(name.rpartition(".")[0])
            direct = is_direct(owner) or (put_off and can_put_off(owner))
            self.slots[name] = Slot(name, direct, lambda slot: self.landed.append(slot.name), view)
            start += p.numel()
        for path, part in module.named_modules():
            own = {n.rpartition(".")[2]: s for n, s in self.slots.items() if n.rpartition(".")[0] == path}
            if own and is_direct(part):
                attach(part, own, self.tape)
            elif own and put_off and can_put_off(part):
                attach_apart(part, own, self.tape)
        for name, p in trained:
            hook(p, self.slots[name])
        self.begin()

    def begin(self) -> None:
        for slot in self.slots.values():
            slot.begin()

    def complete(self) -> dict[str, Tensor]:
        for slot in self.slots.values():
            slot.complete()
        return {name: slot.view.clone() for name, slot in self.slots.items() if slot.view is not None}


class Mixed(nn.Module):
    """Direct layers, layers left to autograd, a bare parameter, one used twice, one unused and one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.convolution = nn.Conv1d(4, 4, 3, padding=1)
        self.gain = nn.Parameter(torch.rand(4))
        self.unused = nn.Linear(2, 2)
        self.still = nn.Linear(4, 4)
        self.still.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.linear(torch.tanh(self.linear(self.table(tokens)))) * self.gain
        x = x + self.convolution(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return self.still(x) + self.linear.weight.sum()


def mixed() -> tuple[Mixed, Tensor]:
    torch.manual_seed(0)
    return Mixed().double(), torch.randint(7, (3, 5))


def expected(module: nn.Module, *given: Tensor) -> dict[str, Tensor]:
    plain = copy.deepcopy(module)
    plain(*given).square().sum().backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in plain.named_parameters()
        if p.requires_grad
    }


@pytest.mark.parametrize("put_off", [False, True])
def test_gradients_are_autograds_and_land_in_the_flat_memory(put_off: bool) -> None:
    module, tokens = mixed()
    right = expected(module, tokens)
    ground = Ground(module, put_off)
    where = {name: slot.view.data_ptr() for name, slot in ground.slots.items() if slot.view is not None}
    for step in range(2):
        ground.begin()
        module(tokens).square().sum().backward()
        found = ground.complete()
        for name, gradient in right.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-14, msg=f"{name} in step {step}")
    assert not found["unused.weight"].any()  # zero, not missing: decay and momentum still apply
    assert torch.isfinite(ground.flat).all()
    for name, slot in ground.slots.items():
        parameter = module.get_parameter(name)
        assert slot.view is not None
        assert slot.view.data_ptr() == where[name]
        if slot.accumulates:
            assert parameter.grad is slot.view  # autograd adds in place, no copy
        else:
            assert parameter.grad is None  # the module writes by itself, autograd keeps nothing
    assert ground.slots["linear.weight"].direct
    assert ground.slots["convolution.weight"].direct == put_off


def test_a_matrix_product_writes_its_result_straight_into_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary the size of the weight is made: torch.mm is told where to write."""
    ground = Ground(nn.Linear(3, 2, bias=False).double())
    outs: list[int] = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, out: outs.append(out.data_ptr()) or mm(*args, out=out))
    ground.module(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
    assert outs == [ground.flat.data_ptr()]


def test_microbatches_accumulate_and_a_new_step_forgets() -> None:
    """CASES 3: gradients 1, 2, 3 over three microbatches make 6."""
    layer = nn.Linear(1, 1).double()
    ground = Ground(layer)
    for step in range(2):
        ground.begin()
        for value in (1.0, 2.0, 3.0):
            layer(torch.tensor([[value]], dtype=torch.float64)).sum().backward()
        found = ground.complete()
        assert found["weight"].item() == 6.0, step
        assert found["bias"].item() == 3.0, step


def test_every_contribution_is_reported() -> None:
    module, tokens = mixed()
    ground = Ground(module)
    module(tokens).sum().backward()
    # The linear layer is called twice, and its matrix used once by itself.
    assert [ground.landed.count(name) for name in ("linear.weight", "linear.bias", "gain", "table.weight")] == [
        3,
        2,
        1,
        1,
    ]
    assert "unused.weight" not in ground.landed


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(4, 4), lambda: nn.Conv1d(4, 4, 3, padding=1), lambda: nn.Bilinear(4, 4, 2)]
)
def test_weight_gradients_are_put_off_until_asked_for(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict({"part": make()}).double()
    part = module["part"]
    given = [torch.rand(2, 4, 4, dtype=torch.float64) for _ in range(2 if isinstance(part, nn.Bilinear) else 1)]
    right = expected(part, *given)
    ground = Ground(module, put_off=True)
    x = given[0].clone().requires_grad_()
    ground.tape.record = work = []
    part(x, *given[1:]).square().sum().backward()
    assert x.grad is not None  # what the stage before waits for is there
    if len(given) == 1:
        assert ground.landed == []
        assert work
    ground.tape.record = None
    with torch.no_grad():
        for piece in work:
            piece()
    for name, gradient in right.items():
        torch.testing.assert_close(ground.complete()[f"part.{name}"], gradient)


class Several(nn.Module):
    """A leaf that returns a tuple with what needs no gradient in it, and uses its input in place of a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, str]:
        return x @ self.weight, torch.ones(3), "text"


def test_a_leaf_that_returns_several_values_keeps_them() -> None:
    module = nn.ModuleDict({"part": Several()}).double()
    ground = Ground(module, put_off=True)
    x = torch.rand(2, 4, dtype=torch.float64, requires_grad=True)
    y, ones, text = module["part"](x)
    assert (text, ones.requires_grad) == ("text", False)
    y.sum().backward()
    torch.testing.assert_close(ground.complete()["part.weight"], x.detach().sum(0).unsqueeze(1).expand(4, 4))


def test_without_gradients_modules_compute_plainly() -> None:
    module, tokens = mixed()
    right = module(tokens).detach()
    ground = Ground(module, put_off=True)
    with torch.no_grad():
        assert torch.equal(module(tokens), right)
    assert ground.landed == []


def test_outputs_may_be_changed_in_place() -> None:
    layer = nn.Linear(4, 4).double()
    x = torch.rand(2, 3, 4, dtype=torch.float64)
    plain = copy.deepcopy(layer)
    plain(x).relu().sum().backward()
    ground = Ground(layer)
    layer(x).relu_().sum().backward()
    assert plain.weight.grad is not None
    torch.testing.assert_close(ground.complete()["weight"], plain.weight.grad)


def test_modules_that_only_look_like_linear_layers_are_left_to_autograd() -> None:
    class Mine(nn.Linear):
        pass

    assert is_direct(nn.Linear(2, 2))
    assert is_direct(nn.Linear(2, 2, bias=False))
    assert is_direct(nn.Embedding(3, 2))
    assert not is_direct(Mine(2, 2))
    assert not is_direct(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    assert not is_direct(nn.Embedding(3, 2, padding_idx=0))
    assert not is_direct(nn.Embedding(3, 2, max_norm=1.0))
    patched = nn.Linear(2, 2)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    assert not is_direct(patched)
    assert not can_put_off(nn.Linear(2, 2))
    assert can_put_off(nn.Conv1d(2, 2, 1))
    assert not can_put_off(nn.LayerNorm(4))  # vectors alone: not worth a graph of their own
    assert not can_put_off(nn.Conv1d(2, 2, 1).requires_grad_(False))


class Strange(nn.Module):
    """Layers whose gradients are not simply their parameters' own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 4)
        self.convolution = nn.Conv1d(4, 4, 1)
        self.nothing = nn.Linear(4, 0)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for layer in (self.table, self.linear, self.convolution):
            if self.how == "called with other values":
                twice = {name: value * 2 for name, value in layer.named_parameters()}
                x = torch.func.functional_call(layer, twice, (x,))
            elif self.how == "mapped":
                x = torch.vmap(layer)(x)
            else:
                x = layer(x)
        return x + self.nothing(x).sum()


@pytest.mark.parametrize("put_off", [False, True])
@pytest.mark.parametrize("how", ["called with other values", "mapped", "hooked before", "hooked behind"])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_what_stands_between_a_parameter_and_its_gradient_is_not_passed_by(how: str, put_off: bool) -> None:
    torch.manual_seed(0)
    module, tokens = Strange(how).double(), torch.randint(7, (3, 4))
    right = expected(module, tokens)
    matrices = [name for name, _ in module.named_parameters() if name.endswith("weight")]
    if "hooked" in how:
        right |= {name: right[name] / 2 for name in matrices}
    ground = None if how == "hooked before" else Ground(module, put_off)
    for name in matrices if "hooked" in how else ():
        module.get_parameter(name).register_hook(lambda gradient: gradient / 2)
    ground = ground or Ground(module, put_off)
    module(tokens).square().sum().backward()
    for name, found in ground.complete().items():
        torch.testing.assert_close(found, right[name], msg=name)


def test_a_copy_of_a_module_has_its_own_gradients() -> None:
    layer = nn.Linear(2, 2).double()
    ground = Ground(layer)
    twin = copy.deepcopy(layer)
    twin(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    assert twin.bias.grad.tolist() == [1.0, 1.0]
    assert ground.complete()["bias"].tolist() == [0.0, 0.0]


def test_a_gradient_that_somebody_removed_is_no_obstacle() -> None:
    module = nn.ModuleDict({"norm": nn.LayerNorm(3)}).double()
    ground = Ground(module)
    module.zero_grad()  # sets them to None
    module["norm"](torch.rand(2, 3, dtype=torch.float64)).sum().backward()
    assert ground.complete()["norm.bias"].tolist() == [2.0, 2.0, 2.0]
    assert module["norm"].bias.grad is ground.slots["norm.bias"].view
