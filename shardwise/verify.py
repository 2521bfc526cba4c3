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

from shardwise import collectives
from shardwise.batch import Batch
from shardwise.loss import Loss, as_loss, cross_entropy
from shardwise.mesh import Mesh
from shardwise.optimizers.optimizer import Optimizer
from shardwise.parallel import Parallel
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from shardwise.reference import Reference

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
    report = Report(plan.describe(), tolerance, len(batches), update_tolerance=update_tolerance)
    main = parallel.mesh.rank == 0
    reference = Reference(reference_model, parallel, loss, optimizer, seed, clip, decay) if main else None
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
