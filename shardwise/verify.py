"""The oracle: any plan against one device, in one process, in float64, with no technique.

A synchronous plan must compute the same loss, gradients and parameters as a plain training loop. An asynchronous
schedule is compared with an emulation in one process that uses, for every microbatch and stage, the weight version the
schedule's rows say.
"""

import copy
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import batch as batches
from shardwise import collectives
from shardwise.batch import Batch
from shardwise.initial import initial_of
from shardwise.layout import Layout, draw, share
from shardwise.loss import Loss, as_loss, cross_entropy
from shardwise.mesh import Mesh
from shardwise.optimizers.optimizer import Optimizer
from shardwise.parallel import Parallel, update_groups, version_table
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from shardwise.plan_values import Offload

# Largest relative error by precision: rounding in float64; in float32 rounding grows through a few steps. In 16 bits an
# element of a gradient is off by up to 0.07 of the largest (bf16, mostly 0.03) after cancellation over tokens: that is
# the rounding of activations and their gradients; sums in float64 would change the third digit.
# In fp8 it is, in torchao's emulation, up to 0.6, while losses are off by 0.002.
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 0.1, "bf16-pure": 0.1, "fp16": 0.02, "fp8": 1.0}
# In 16 bits and less the reference computes every step's gradients from the plan's own parameters, and an update with
# the plan's own gradients, so that an update is compared for itself: AdamW's first steps are as long for a gradient of
# rounding alone, the keys' bias for instance, as for any other, and two runs soon differ in whole steps. What is left
# is rounding in float32, or the unit of the last place of what has no masters.
UPDATE_TOLERANCES = {"bf16": 1e-3, "bf16-pure": 0.01, "fp16": 1e-3, "fp8": 1e-3}
# Stages that update at times of their own cannot be followed like that. There errors are told relative to the largest
# value of all parameters, and this much of it is allowed.
ASYNCHRONOUS_TOLERANCE = 0.2
# Of gradients, at least this much by the format that they travel in. A part is rounded by half a unit of its last
# place, 2^-9 in bf16, which after cancellation between ranks is up to 0.007 of a gradient's largest value. Updates are
# followed as in 16 bits.
SENT_TOLERANCES = {"master": 0.0, "fp32": 1e-3, "bf16": 0.03, "fp16": 0.01}
# Values below this fraction of the largest of their kind are compared with that fraction: what is zero but for rounding
# has no relative error. (The bias of the keys is such: softmax does not see it, and Adam makes steps of its rounding.)
FLOOR = 1e-4


@dataclass(frozen=True)
class Difference:
    """One comparison: the largest absolute difference over the reference's largest value."""

    step: int
    kind: str  # "loss", "norm" (of all gradients), "gradient", "parameter" or "replicas"
    name: str
    error: float


@dataclass
class Report:
    """What `verify` found.

    Attributes:
        plan: what was verified, as one line.
        tolerance: the largest relative error that agrees.
        update_tolerance: that of parameters, where it is another one.
        differences: every comparison, in the order in which a step makes the values.
    """

    plan: str
    tolerance: float
    num_steps: int
    differences: list[Difference] = field(default_factory=list)
    update_tolerance: float | None = None

    def allowed(self, kind: str) -> float:
        """The largest error of a kind of comparison that agrees."""
        return self.update_tolerance if kind == "parameter" and self.update_tolerance is not None else self.tolerance

    def _wrong(self) -> list[Difference]:
        return [d for d in self.differences if not d.error <= self.allowed(d.kind)]

    @property
    def agrees(self) -> bool:
        return self.first is None

    @property
    def first(self) -> Difference | None:
        """The first comparison that fails, None if all hold."""
        return next(iter(self._wrong()), None)

    @property
    def worst(self) -> dict[str, Difference]:
        """By kind, the comparison with the largest error."""
        found: dict[str, Difference] = {}
        for difference in self.differences:
            if difference.kind not in found or not difference.error <= found[difference.kind].error:
                found[difference.kind] = difference
        return found

    def describe(self) -> str:
        """The verdict in one line."""
        if self.first is None:
            largest = max((d.error for d in self.differences), default=0.0)
            return f"agrees with one device: largest relative error {largest:.1e}, allowed {self.tolerance:.0e}"
        first = self.first
        if first.kind == "replicas":
            return f"step {first.step}: the copies of parameter {first.name!r} differ between ranks"
        wrong = self._wrong()
        named = next((d for d in wrong if d.name), first)
        text = (
            f"step {named.step}: {named.kind} {named.name!r}" if named.name else f"step {first.step}: the {first.kind}"
        )
        worst = max((d for d in wrong if d.kind == named.kind), key=lambda d: d.error)
        most = f", {worst.name!r} most, by {worst.error:.1e}" if worst.name != named.name else ""
        return (
            f"{text} differs first, by {named.error:.1e} relative (allowed {self.allowed(named.kind):.0e}){most}; "
            f"{len(wrong)} of {len(self.differences)} comparisons fail"
        )

    def to_json(self) -> str:
        """Everything, for programs; the error of what is missing or not a number is null."""
        first = _as_json(self.first) if self.first else None
        return json.dumps(
            {
                "agrees": self.agrees,
                "plan": self.plan,
                "tolerance": self.tolerance,
                "steps": self.num_steps,
                "first": first,
                "worst": {kind: _as_json(d) for kind, d in self.worst.items()},
                "differences": [_as_json(d) for d in self.differences],
            },
            allow_nan=False,
        )


def _as_json(difference: Difference) -> dict[str, Any]:
    found = asdict(difference)
    return found if math.isfinite(difference.error) else found | {"error": None}


def verify(
    model: nn.Module,
    plan: Plan,
    batches: Sequence[Batch],
    *,
    loss: Loss | Callable[[Any, Any], Tensor] = cross_entropy,
    optimizer: Optimizer,
    mesh: Mesh | None = None,
    seed: int = 0,
    clip: float | None = None,
    decay: Callable[[str, nn.Parameter], bool] | None = None,
    tolerance: float | None = None,
    sabotage: Callable[[Parallel], None] | None = None,
    **settings: Any,
) -> Report:
    """Compare a plan with one device over some training steps. Collective over the job; the reference runs on its first
    rank.

    Dropout is off on both sides (evaluation mode), since the masks of a layout are not those of one device.

    Args:
        model: any module, on the meta device or with values; it is left alone.
        plan: what to verify; its precision says in which numbers the plan is run. The reference is always float64.
        batches: the *global* batch of every step, the same on all ranks.
        loss, optimizer, mesh, seed, clip, decay, settings: as for `parallelize`.
        tolerance: the largest relative error that agrees; by default 1e-9 in fp64, 1e-3 in fp32, and what
            `TOLERANCES` and its neighbours say of others.
        sabotage: called with the parallel model before the first step; tests plant bugs with it.

    Returns:
        the same report on every rank.

    Raises:
        ValueError: what `parallelize` raises.
    """
    reference_model = copy.deepcopy(model).eval()
    spread = copy.deepcopy(model).eval()
    loss = as_loss(loss)
    parallel = parallelize(
        spread, plan, loss=loss, optimizer=optimizer, mesh=mesh, seed=seed, clip=clip, decay=decay, **settings
    )
    if sabotage is not None:
        sabotage(parallel)
    own, sent = TOLERANCES[plan.precision], SENT_TOLERANCES[plan.reduce_dtype]
    rounds = plan.precision in UPDATE_TOLERANCES or sent > own
    follows = rounds and not parallel.schedule.asynchronous
    update_tolerance = UPDATE_TOLERANCES.get(plan.precision, own) if follows and tolerance is None else None
    if tolerance is None:
        tolerance = max(own, sent)
        tolerance = tolerance if follows or not rounds else max(tolerance, ASYNCHRONOUS_TOLERANCE)
    floor = FLOOR if follows or not rounds else 1.0
    report = Report(describe_plan(plan), tolerance, len(batches), update_tolerance=update_tolerance)
    main = parallel.mesh.rank == 0
    reference = _Reference(reference_model, parallel, loss, optimizer, seed, clip, decay) if main else None
    if follows:
        start = parallel.full_parameters()
        if reference is not None:
            reference.adopt(start)
            reference.follows = True
    # An asynchronous schedule is drained half-way, so that starting over is verified too.
    drains = {len(batches) - 1, (len(batches) - 1) // 2} if parallel.schedule.asynchronous else set(range(len(batches)))
    for number, batch in enumerate(batches):
        metrics = parallel.step(parallel.share(batch))
        value = metrics.loss
        expected = reference.step(batch) if reference is not None else 0.0
        report.differences.append(Difference(number, "loss", "", _relative(value, expected)))
        if metrics.gradient_norm is not None and not parallel.schedule.asynchronous:
            norm = reference.norm if reference is not None else 0.0
            report.differences.append(Difference(number, "norm", "", _relative(metrics.gradient_norm, norm)))
        if number not in drains:
            continue
        parallel.drain()
        gradients, parameters = parallel.full_gradients(), parallel.full_parameters()
        odd = parallel.replicas_agree()
        if reference is not None:
            reference.drain()
            report.differences += _compare(number, "gradient", gradients, reference.gradients(), floor)
            if follows:
                reference.update_with(gradients)
            report.differences += _compare(number, "parameter", parameters, reference.parameters(), floor)
            if follows:
                reference.adopt(parameters)
            if odd is not None:
                report.differences.append(Difference(number, "replicas", odd, float("inf")))
    parallel.close()
    found = collectives.broadcast_object(report, parallel.mesh.axis("world"))
    assert isinstance(found, Report)
    return found


def describe_plan(plan: Plan) -> str:
    """What differs from the plan of one device, in one line."""
    changed = plan.diff(Plan())
    return ", ".join(f"{name}={_describe_value(value[0])}" for name, value in changed.items()) or "one device"


def _describe_value(value: Any) -> str:
    if not isinstance(value, Offload):
        return str(value)
    return "{" + ", ".join(f"{kind}={place}" for kind, place in value.model_dump(exclude_none=True).items()) + "}"


def _relative(value: float, expected: float) -> float:
    error = abs(value - expected) / max(abs(expected), 1e-30)
    return error if error == error else float("inf")


def _compare(
    step: int, kind: str, found: dict[str, Tensor], expected: dict[str, Tensor], floor: float
) -> Iterable[Difference]:
    largest = max((float(t.abs().max()) for t in expected.values() if t.numel()), default=0.0)
    for name, right in expected.items():
        if name not in found or found[name].shape != right.shape:
            yield Difference(step, kind, name, float("inf"))
            continue
        if not right.numel():
            continue
        left = found[name].to("cpu", torch.float64)
        scale = max(float(right.abs().max()), floor * largest, 1e-300)
        error = float((left - right).abs().max()) / scale
        yield Difference(step, kind, name, error if error == error else float("inf"))


class _Reference:
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
    return model.to("cpu", torch.float64)
