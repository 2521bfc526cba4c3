"""From a plain model, a plan and a mesh to a `Parallel` model: the order of application, in one place.

1. The schedule of the plan, and which parts of the model each of its stages holds.
2. A layout for every parameter, and flat buckets that hold this rank's pieces.
3. Values: drawn piece by piece if the model is on the meta device, else taken from it.
4. Modules that write their weight gradients into the buckets, and hooks for all other parameters.
5. The runner.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from shardwise import collectives
from shardwise.batch import Batch
from shardwise.chunk import ModelChunk, Owner
from shardwise.data_parallel.bucket import Storage
from shardwise.data_parallel.buckets import BUCKET_BYTES, Buckets
from shardwise.data_parallel.entry import Entry
from shardwise.data_parallel.further import FurtherSums
from shardwise.data_parallel.reducer import Reducer
from shardwise.data_parallel.units import mark_units
from shardwise.direct import attach, is_direct
from shardwise.given import facts_of, refuse, refuse_lazy
from shardwise.gradient import Slot, Tape, hook
from shardwise.head import Alone, Head
from shardwise.initial import initial_of, seed_of
from shardwise.layout import Layout, Place
from shardwise.loss import Loss, as_loss, cross_entropy
from shardwise.memory import block_scale, fp8, norms, recompute
from shardwise.memory.offload import Traffic, tiers_of
from shardwise.memory.offload_activations import Activations
from shardwise.memory.precision import PRECISIONS
from shardwise.mesh import Mesh
from shardwise.optimizers.optimizer import Optimizer
from shardwise.parallel import Parallel
from shardwise.pipeline_parallel.holders import Holders
from shardwise.pipeline_parallel.planned import build_schedule, build_stages, search_schedule, takes_losses_back
from shardwise.pipeline_parallel.runner import Runner
from shardwise.pipeline_parallel.schedule import Kind
from shardwise.pipeline_parallel.versions import version_table
from shardwise.pipeline_parallel.wire import Wire
from shardwise.plan import Plan
from shardwise.state import Assembly
from shardwise.tensor_parallel.context import divide
from shardwise.tensor_parallel.division import divide as divide_layers
from shardwise.tensor_parallel.rules import Rules, output_matrix
from shardwise.tensor_parallel.slices import divide as divide_in_time
from shardwise.values import move_buffers, place, settle_frozen


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
    precision = PRECISIONS[plan.precision]
    dtype = precision.compute
    device = mesh.device()
    if plan.precision == "fp8":
        fp8.require(device)
        fp8.convert(model)
    axis = mesh.axis("pipeline")
    loss = as_loss(loss)
    terms = loss.terms
    decays = decay or (lambda name, parameter: parameter.ndim >= 2)
    given: dict[str, object] = {
        "seed": seed,
        "clip": clip,
        "optimizer": optimizer,
        "overlap": overlap,
        "negotiate": negotiate,
        "bucket_bytes": bucket_bytes,
    }
    collectives.agree(mesh.axis("world"), facts_of(model, plan, decays, given))
    refuse(model, plan, clip)

    # Of a slice everything is computed again, its head and loss too: no block of it need be.
    whole_slices = plan.slices > 1 and plan.recompute == "full"
    by_blocks = "none" if whole_slices else plan.recompute
    recompute.require(model, by_blocks)

    # 1. Stages
    schedule = build_schedule(plan)
    stages = build_stages(model, plan, schedule, example, loss, mesh)
    holders = Holders(model, stages, schedule)
    names = holders.names
    if schedule.asynchronous:
        holders.refuse_shared(plan.schedule)
    mine = [stages[stage] for stage in schedule.placement[axis.rank]]
    scales, block_of = None, dict[int, int]()
    if plan.loss_scaling == "per-block":
        scales, block_of = block_scale.apply(model, dtype, mesh.axis("gradient").size)
    if precision.converts and device.type == "cpu":
        for module in mine:
            norms.widen(module)
    division = divide_layers(model, plan, mesh, rules) if plan.tensor > 1 else None
    if division is not None:
        loss = division.loss(loss)
        for module in mine:
            division.region.attend(module)
    context = divide(model, mine, mesh, plan.context_method) if plan.context > 1 else None
    slices = divide_in_time(model, plan.slices) if plan.slices > 1 else None
    stage_parameters = [[names[id(parameter)] for parameter in stage.parameters()] for stage in stages]

    # 2. Layouts and buckets
    reducer = Reducer(mesh, sent=PRECISIONS[plan.reduce_dtype].compute if plan.reduce_dtype != "master" else None)
    traffic = Traffic()
    tiers = tiers_of(plan.offload, device, traffic)
    layouts = {
        name: division.layout(parameter) if division is not None else Layout(tuple(parameter.shape))
        for name, parameter in model.named_parameters()
    }
    further = FurtherSums(mesh, holders, model, layouts)
    splits = {name: mesh.axis(name) for name in ("context", "tensor")}
    unit_of = mark_units(mine) if plan.zero == 3 else {}
    owners = _owners(mine)

    schedule_puts_off = any(action.kind is Kind.W for row in schedule.rows for action in row)
    # At stage 3 a module's weights are gone by the time of W.
    puts_off = schedule_puts_off and plan.zero < 3

    def entry(parameter: nn.Parameter) -> Entry:
        name, key = names[id(parameter)], id(parameter)
        layout = layouts[name]
        places: dict[str, Place] = dict(splits)
        own = owners[key]
        first = layout.counted_here(places, ("tensor",))
        return Entry(
            name,
            layout,
            layout.local_shape(places),
            decay=decays(name, parameter),
            direct=len(own) == 1 and not holders.shared(parameter) and is_direct(own[0][0], puts_off, division),
            counted=first and (not holders.shared(parameter) or axis.rank == holders.first[name]),
            first=first,
            largest=layout.largest(places),
            unit=unit_of.get(key, -1),
            block=block_of.get(key, 0),
            extra=further.name(parameter, layout),
        )

    def buckets_of(parameters: Iterable[nn.Parameter], stage: int) -> Buckets:
        entries = [entry(parameter) for parameter in parameters]
        storage = Storage(stage, precision, device, reducer, optimizer, tiers, seed)
        return Buckets(entries, storage, further.axes, bucket_bytes, schedule_puts_off)

    own_buckets = [
        buckets_of((p for p in stage.parameters() if p.requires_grad and not holders.shared(p)), plan.zero)
        for stage in mine
    ]
    # What several stages hold is summed when all are done, so it is kept whole; its optimizer state is divided all the
    # same.
    tied = {id(p): p for stage in mine for p in stage.parameters() if p.requires_grad and holders.shared(p)}
    shared_buckets = [buckets_of(tied.values(), min(plan.zero, 1))] if tied else []

    # 3. Values
    initial = {name: initial_of(model, name) for name, p in model.named_parameters() if p.is_meta and id(p) in owners}
    by_name = {names[key]: parameter for key, parameter in _unique(mine).items()}
    slots: dict[str, Slot] = {}
    live: dict[str, nn.Parameter] = {}
    for buckets in (*own_buckets, *shared_buckets):
        for bucket in buckets.buckets:
            bucket.acquire(fill=False)
            first = bucket.begin_values()
            for item in bucket.entries:
                slots[item.name] = item.slot
                where = bucket.view(first, item)
                live[item.name] = place(by_name[item.name], item, where, initial, seed, owners, mesh)
            bucket.keep_values(first)
            bucket.release()
    reducer.meet()
    frozen = {
        name: settle_frozen(name, parameter, layouts[name], initial, seed, owners, dtype, device, mesh)
        for name, parameter in by_name.items()
        if not parameter.requires_grad
    }
    persistent = move_buffers(model, mine, dtype, device)

    # 4. Gradients
    table = version_table(schedule)
    chunks: list[ModelChunk] = []
    steps_done: list[Callable[[], int]] = []
    slot_of = {id(live[name]): slot for name, slot in slots.items()}
    for number, (module, buckets) in enumerate(zip(mine, own_buckets, strict=True)):
        tape = Tape()
        own_names = [item.name for _, item in buckets]
        attach(module, slot_of, {id(live[name]) for name in own_names}, tape, puts_off, division)
        number_of_stage = schedule.placement[axis.rank][number]
        data_rank = mesh.axis("gradient").rank  # ranks whose positions or rows differ drop different ones

        def seeds(microbatch: int, stage: int = number_of_stage, data_rank: int = data_rank) -> int:
            return seed_of(seed, "forward", steps_done[0](), data_rank, microbatch, stage)

        def version_of(microbatch: int, stage: int = number_of_stage) -> int:
            assert table is not None
            return table(microbatch, stage)

        chunks.append(
            ModelChunk(
                module,
                buckets,
                shared_buckets,
                {name: _owners_of(module, live[name]) for name in own_names},
                {name: live[name] for name in own_names},
                tape,
                overlap,
                seeds,
                splits,
                None if table is None else version_of,
                slices,
                Activations(tiers["activations"]) if "activations" in tiers else None,
            )
        )

    notes = [part.note for part in ((division.region if division is not None else None), context) if part is not None]
    recomputation = None
    if by_blocks != "none":
        layer_of = division.layer if division is not None else lambda module: None
        recomputation = recompute.Recomputation(by_blocks, mesh.axis("stage"), mesh.axis("world"), layer_of)
        for chunk, most in zip(chunks, recompute.in_flight(schedule, axis.rank), strict=True):
            recomputation.apply(chunk.module, [chunk.note, *notes], most, schedule.num_microbatches)

    for name, slot in slots.items():
        hook(live[name], slot)

    # 5. The runner
    total = loss.sum
    last_rank, last_chunk = schedule.owner(schedule.total_stages - 1)
    if terms is not None and last_rank == axis.rank and takes_losses_back(schedule):
        head = division.head() if division is not None else _head_of(model, rules)
        if head is not None and head.module in mine[last_chunk].modules():
            total = head.loss(terms, loss).sum
            chunks[last_chunk].adopt(head)
    alike = division.region.exchange if division is not None and not plan.sequence else None
    wire = Wire(axis, device, schedule.total_stages - 1, negotiate, alike)
    runner = Runner(schedule, axis.rank, chunks, wire, total)
    if slices is not None:
        runner.recompute = whole_slices
        runner.finished = slices.finished

    def local(microbatch: Batch, number: int) -> list[Batch]:
        """What this rank computes of a microbatch, in order."""
        if slices is not None:
            return slices.cut(microbatch, number)
        return [context.local(microbatch) if context is not None else microbatch]

    assembly = Assembly(
        model if schedule.total_stages == 1 else nn.ModuleList(mine),
        chunks,
        shared_buckets,
        frozen,
        persistent,
        holders.first,
        reducer,
        splits,
        [division] if division is not None else [],
        runner,
        list(names.values()),
        layouts,
        stage_parameters,
        local,
        traffic if tiers else None,
        recomputation,
    )
    parallel = Parallel(assembly, plan, mesh, schedule, loss, optimizer, clip=clip, precision=precision, scales=scales)
    model._spread = True  # type: ignore[assignment]
    steps_done.append(lambda: int(parallel.step_count))
    if searched and example is not None:
        parallel.adopt(search_schedule(parallel.measure(example), plan, mesh, barrier=clip is not None))
    return parallel


def _unique(modules: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
    return {id(parameter): parameter for module in modules for parameter in module.parameters()}


def _owners(modules: Iterable[nn.Module]) -> dict[int, list[Owner]]:
    """By id of parameter, the modules that hold it and under which attribute."""
    found: dict[int, list[Owner]] = {}
    seen: set[int] = set()
    for root in modules:
        for module in root.modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    found.setdefault(id(parameter), []).append((module, attribute))
    return found


def _owners_of(root: nn.Module, parameter: nn.Parameter) -> list[Owner]:
    return [(module, name) for module in root.modules() for name, own in module._parameters.items() if own is parameter]


def _head_of(model: nn.Module, rules: Rules | None) -> Head | None:
    """The output matrix that this rank holds whole, to be computed with its loss."""
    module = output_matrix(model, rules)
    if module is None or module._parameters.keys() != {"weight", "bias"}:
        return None
    slots, *others = getattr(module, "_landing", ({}, Tape()))
    if len(others) != 1 or ("forward" in module.__dict__ and not slots):
        return None  # computes something else than a linear layer
    return Head(module, slots, others[0], Alone(module.out_features))
