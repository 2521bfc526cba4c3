"""What a plan is compared with: plain training on one device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import batch as batches
from shardwise.batch import Batch
from shardwise.initial import initial_of
from shardwise.layout import Layout, draw, share
from shardwise.loss import Loss
from shardwise.optimizers.optimizer import Optimizer
from shardwise.parallel import Parallel
from shardwise.pipeline_parallel.versions import update_groups, version_table
from shardwise.values import as_exact


class Reference:
    """A plain training loop over the whole model in float64, or, for asynchronous schedules, its emulation with stale
    weights."""

    def __init__(
        self,
        model: nn.Module,
        parallel: Parallel,
        loss: Loss,
        optimizer: Optimizer,
        seed: int,
        clip: float | None,
        decay: Callable[[str, nn.Parameter], bool] | None,
    ) -> None:
        self.model = _materialize(model, seed)
        self.loss = loss
        self.clip = clip
        self.named = dict(self.model.named_parameters())
        self.trained = {name: p for name, p in self.named.items() if p.requires_grad}
        decays = decay or (lambda name, parameter: parameter.ndim >= 2)
        decayed = [(name, p) for name, p in self.trained.items() if decays(name, p)]
        others = [(name, p) for name, p in self.trained.items() if not decays(name, p)]
        self.optimizer = optimizer.reference(decayed, others) if self.trained else None
        self.num_data_ranks = parallel.num_data_ranks
        self.schedule = parallel.schedule
        self.stage_of = {name: stage for stage, names in enumerate(parallel.stage_parameters) for name in names}
        self.table = version_table(self.schedule)
        self.groups = update_groups(self.schedule)
        self.number = 0  # microbatches since the pipeline was empty
        self.versions = [self._snapshot()]
        self.last: dict[str, Tensor] = {}
        self.norm = 0.0
        self.follows = False  # updates wait for gradients that are given

    def step(self, batch: Batch) -> float:
        batch = batches.in_precision(batch, torch.float64)
        return self._plain(batch) if self.table is None else self._stale(batch)

    def _plain(self, batch: Batch) -> float:
        """The whole batch at once."""
        inputs, targets = batch
        count = int(self.loss.count(targets))
        total = self.loss.sum(_call(self.model, inputs), targets)
        self._zero()
        if total.requires_grad:
            torch.autograd.backward(total / max(1, count))
        self._update([list(self.trained.values())])
        return float(total.detach()) / max(1, count)

    def _stale(self, batch: Batch) -> float:
        """Microbatch by microbatch, each with the versions its passes saw."""
        assert self.table is not None
        num = self.schedule.num_microbatches
        parts = [self._microbatch(batch, number, num) for number in range(num)]
        counts = [sum(int(self.loss.count(t)) for _, t in part) for part in parts]
        summed = 0.0
        self._zero()
        for number, part in enumerate(parts):
            newest = self._snapshot()
            seen = {name: self.table(self.number, self.stage_of[name]) for name in self.trained}
            with torch.no_grad():
                for name, parameter in self.trained.items():
                    parameter.copy_(self.versions[seen[name]][name])
            group = self.groups[number]
            divisor = sum(c for c, g in zip(counts, self.groups, strict=True) if g == group)
            for inputs, targets in part:
                total = self.loss.sum(_call(self.model, inputs), targets)
                torch.autograd.backward(total / max(1, divisor))
                summed += float(total.detach())
            with torch.no_grad():
                for name, parameter in self.trained.items():
                    parameter.copy_(newest[name])
            self.number += 1
            if number + 1 == num or self.groups[number + 1] != group:
                stages = range(self.schedule.total_stages)
                self._update([[p for n, p in self.trained.items() if self.stage_of[n] == s] for s in stages])
                self.versions.append(self._snapshot())
                if number + 1 < num:
                    self._zero()
        return summed / max(1, sum(counts))

    def _microbatch(self, batch: Batch, number: int, num: int) -> list[Batch]:
        """What microbatch `number` is on every data rank."""
        total = batches.num_rows(batch)
        shares = (share(total, rank, self.num_data_ranks) for rank in range(self.num_data_ranks))
        return [batches.microbatch(batches.rows(batch, *part), number, num) for part in shares]

    def drain(self) -> None:
        self.number = 0
        self.versions = [self._snapshot()]

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.trained.items()} if self.table is not None else {}

    def _zero(self) -> None:
        for parameter in self.trained.values():
            parameter.grad = torch.zeros_like(parameter)

    def _update(self, together: list[list[nn.Parameter]]) -> None:
        """Clip each list of parameters by its own norm, and apply the optimizer."""
        self.last = {name: p.grad.clone() for name, p in self.trained.items() if p.grad is not None}
        for parameters in together:
            found = [p.grad for p in parameters if p.grad is not None]
            self.norm = float(torch.stack([g.square().sum() for g in found]).sum().sqrt()) if found else 0.0
            if self.follows:
                return
            if self.clip is not None and self.norm > self.clip:
                for gradient in found:
                    gradient.mul_(self.clip / self.norm)
        if self.optimizer is not None:
            self.optimizer.step()

    def update_with(self, gradients: dict[str, Tensor]) -> None:
        """Clip gradients, and update with them."""
        own, norm = self.last, self.norm
        for name, parameter in self.trained.items():
            parameter.grad = gradients[name].to("cpu", torch.float64).clone()
        self.follows = False
        self._update([list(self.trained.values())])
        self.follows, self.last, self.norm = True, own, norm

    def adopt(self, parameters: dict[str, Tensor]) -> None:
        """Go on from other parameters, the frozen ones too: those are rounded once, in the plan's precision."""
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(parameters[name])

    def gradients(self) -> dict[str, Tensor]:
        return self.last

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.named.items()}


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _materialize(model: nn.Module, seed: int) -> nn.Module:
    """The whole model on the CPU in float64, with the values every layout starts from."""
    drawn = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            drawn[name] = torch.empty(parameter.shape, dtype=torch.float64)
            draw(name, Layout(tuple(parameter.shape)), initial_of(model, name), seed, {}, drawn[name])
    values = {id(p): drawn[name] for name, p in model.named_parameters() if p.is_meta}
    fresh: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for attribute, own in module._parameters.items():
            if own is not None and id(own) in values:
                key = id(own)
                fresh.setdefault(key, nn.Parameter(values[key], requires_grad=own.requires_grad))
                module._parameters[attribute] = fresh[key]
    # Not `model.to`, which would drop what is imaginary.
    exact: nn.Module = model._apply(lambda tensor: as_exact(tensor.to("cpu"), torch.float64))
    return exact
