"""From a plain model, a plan and a mesh to a `Parallel` model."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardwise import collectives
from shardwise.assembling import Assembling
from shardwise.batch import Batch
from shardwise.data_parallel.buckets import BUCKET_BYTES
from shardwise.given import MENDS, facts_of, refuse, refuse_kinds, refuse_lazy
from shardwise.loss import Loss, as_loss, cross_entropy
from shardwise.memory import fp8
from shardwise.memory.precision import PRECISIONS
from shardwise.mesh import Mesh
from shardwise.optimizers.optimizer import Optimizer
from shardwise.parallel import Parallel
from shardwise.pipeline_parallel.planned import search_schedule
from shardwise.plan import Plan
from shardwise.tensor_parallel.rules import Rules


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    loss: Loss | Callable[[Any, Any], Tensor] = cross_entropy,
    optimizer: Optimizer | None = None,
    mesh: Mesh | None = None,
    seed: int = 0,
    clip: float | None = None,
    decay: Callable[[str, nn.Parameter], bool] | None = None,
    example: Batch | None = None,
    overlap: bool = True,
    negotiate: str = "once",
    bucket_bytes: int = BUCKET_BYTES,
    rules: Rules | None = None,
) -> Parallel:
    """Spread a model over the job's ranks. Collective: every rank calls it with the same arguments.

    Args:
        model: any module. On the meta device, its parameters are drawn piece by piece from (seed, name, block), and no
            rank holds more than its own part; else its values are kept, moved into buckets in place.
        plan: how to spread it.
        loss: summed over targets; a `Loss`, or a plain function (output, targets) -> scalar sum.
        optimizer: settings of the optimizer; without one the model can be evaluated only.
        mesh: the job's mesh; made from the plan if left out.
        seed: of initial values, dropout and whatever else is random.
        clip: largest norm of all gradients together; larger ones are scaled down to it. None does not clip, nor agree
            on the norm: gradients that are not finite are then told of (`StepMetrics.faulty_parameter`), not skipped.
        decay: (name, parameter) -> whether weight decay applies; by default to everything with two dimensions or more.
        example: a microbatch (inputs, targets) of the sizes to come, for plans whose `cut` or `schedule` depends on
            costs.
        overlap: sum gradients while backward still runs.
        negotiate: "once" if what passes between stages depends on the inputs' shapes alone, "always" if it may change
            with their values.
        bucket_bytes: a bucket is closed once it holds so much.
        rules: module-name pattern -> style, for plans with `tensor`: how layers are divided that neither our families'
            table nor the model's own plan knows, or otherwise than these say; see `shardwise.tensor_parallel.rules`.

    Returns:
        the model's parallel form. The given model's modules become part of it; those of other pipeline ranks are let go
        of.

    Raises:
        ValueError: the plan does not fit the model or the job (`PlanError` lists everything), the model cannot be cut
            or has a module whose result depends on the layout, or the ranks were given different models.
    """
    refuse_kinds(model, plan, optimizer, mesh)
    refuse_lazy(model)
    plan.require(model=model)
    mesh = mesh or Mesh(plan)
    if mesh.sizes != plan.axes:
        raise ValueError(f"{mesh} is not the plan's, which has {plan.axes}: make it with shardwise.Mesh(plan)")
    if getattr(model, "_spread", False):
        raise ValueError("this model is part of a parallel model already: build it anew for another one")
    searched = plan.schedule == "auto" and plan.pipeline > 1
    if searched and example is None:
        raise ValueError(
            'plan.schedule = "auto" measures a microbatch: pass parallelize(..., example=(inputs, targets)), or name a '
            "schedule"
        )
    if plan.precision == "fp8":
        fp8.require(mesh.device())
        fp8.convert(model)
    decays = decay or (lambda name, parameter: parameter.ndim >= 2)
    given: dict[str, object] = {
        "seed": seed,
        "clip": clip,
        "optimizer": optimizer,
        "overlap": overlap,
        "negotiate": negotiate,
        "bucket_bytes": bucket_bytes,
    }
    collectives.agree(mesh.axis("world"), facts_of(model, plan, decays, given), MENDS)
    refuse(model, plan, clip)
    parts = Assembling(model, plan, mesh, as_loss(loss), optimizer, seed, rules, example)
    parts.make_buckets(decays, bucket_bytes)
    parts.give_values()
    parts.join_gradients(overlap)
    assembly = parts.finish(negotiate)
    parallel = Parallel(
        assembly,
        plan,
        mesh,
        parts.schedule,
        parts.loss,
        optimizer,
        clip=clip,
        precision=PRECISIONS[plan.precision],
        scales=parts.scales,
    )
    model._spread = True  # type: ignore[assignment]
    parts.count_steps(lambda: int(parallel.step_count))
    if searched and example is not None:
        parallel.adopt(search_schedule(parallel.measure(example), plan, mesh, barrier=clip is not None))
    return parallel
