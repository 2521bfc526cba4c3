"""The parts of a `Parallel` model, put together in five steps, each from what those before it left."""

from collections.abc import Callable, Iterable

from torch import nn

from shardwise.batch import Batch
from shardwise.chunk import ModelChunk, Owner
from shardwise.data_parallel.bucket import Storage
from shardwise.data_parallel.buckets import Buckets
from shardwise.data_parallel.entry import Entry
from shardwise.data_parallel.further import FurtherSums
from shardwise.data_parallel.reducer import Reducer
from shardwise.data_parallel.units import mark_units
from shardwise.direct import attach, is_direct
from shardwise.gradient import Slot, Tape, hook
from shardwise.head import Alone, Head
from shardwise.initial import initial_of, seed_of
from shardwise.layout import Layout, Place
from shardwise.loss import Loss
from shardwise.memory import block_scale, norms, recompute
from shardwise.memory.offload import tiers_of
from shardwise.memory.offload_activations import Activations
from shardwise.memory.offload_tier import Traffic
from shardwise.memory.precision import PRECISIONS
from shardwise.mesh import Mesh
from shardwise.optimizers.optimizer import Optimizer
from shardwise.pipeline_parallel.chain import Chain
from shardwise.pipeline_parallel.holders import Holders
from shardwise.pipeline_parallel.planned import build_schedule, build_stages, takes_losses_back
from shardwise.pipeline_parallel.runner import Runner
from shardwise.pipeline_parallel.schedule import Kind
from shardwise.pipeline_parallel.stages import Whole, parts_of
from shardwise.pipeline_parallel.versions import version_table
from shardwise.pipeline_parallel.wire import Wire
from shardwise.plan import Plan
from shardwise.state import Assembly
from shardwise.tensor_parallel.context import divide
from shardwise.tensor_parallel.division import divide as divide_layers
from shardwise.tensor_parallel.rules import Rules, output_matrix
from shardwise.tensor_parallel.slices import divide as divide_in_time
from shardwise.values import move_buffers, place, settle_frozen


class Assembling:
    """A model on its way to its parallel form. Collective: every rank takes the same steps.

    1. The schedule of the plan, which parts of the model each of its stages holds, and how their layers are divided.
    2. `make_buckets`: a layout for every parameter, and flat buckets that hold this rank's pieces.
    3. `give_values`: drawn piece by piece if the model is on the meta device, else taken from it.
    4. `join_gradients`: modules that write their weight gradients into the buckets, and hooks for all other parameters.
    5. `finish`: the runner.

    Args:
        model, plan, mesh, loss, optimizer, seed, rules, example: as those of `parallelize`.

    Attributes:
        schedule: the plan's, or the one that it begins with.
        loss: as this rank computes it.
        scales: of blocks, with `plan.loss_scaling` "per-block".

    Raises:
        ValueError: the model cannot be cut or divided so.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        loss: Loss,
        optimizer: Optimizer | None,
        seed: int,
        rules: Rules | None,
        example: Batch | None,
    ) -> None:
        self.model, self.plan, self.mesh = model, plan, mesh
        self.loss, self.terms = loss, loss.terms
        self.optimizer, self.seed, self.rules = optimizer, seed, rules
        self.device, self.axis = mesh.device(), mesh.axis("pipeline")
        self.precision = PRECISIONS[plan.precision]
        # Of a slice everything is computed again, its head and loss too: no block of it need be.
        self.whole_slices = plan.slices > 1 and plan.recompute == "full"
        self.by_blocks = "none" if self.whole_slices else plan.recompute
        recompute.require(model, self.by_blocks)

        self.schedule = build_schedule(plan)
        self.stages = build_stages(model, plan, self.schedule, example, loss, mesh)
        # Before anything is changed inside.
        self.chain = None if isinstance(self.stages[0], Whole) else Chain.of(model, parts_of(model))
        self.holders = Holders(model, self.stages, self.schedule)
        if self.schedule.asynchronous:
            self.holders.refuse_shared(plan.schedule)
        self.mine = [self.stages[stage] for stage in self.schedule.placement[self.axis.rank]]
        self.scales, self.block_of = None, dict[int, int]()
        if plan.loss_scaling == "per-block":
            self.scales, self.block_of = block_scale.apply(model, self.precision.compute, mesh.axis("gradient").size)
        if self.precision.converts and self.device.type == "cpu":
            for module in self.mine:
                norms.widen(module)
        self.division = divide_layers(model, plan, mesh, rules) if plan.tensor > 1 else None
        if self.division is not None:
            self.loss = self.division.loss(loss)
            for module in self.mine:
                self.division.region.attend(module)
        self.context = divide(model, self.mine, mesh, plan.context_method) if plan.context > 1 else None
        self.slices = divide_in_time(model, plan.slices) if plan.slices > 1 else None
        self.stage_parameters = [
            [self.holders.names[id(parameter)] for parameter in stage.parameters()] for stage in self.stages
        ]
        self.splits = {name: mesh.axis(name) for name in ("context", "tensor")}
        self.owners = _owners(self.mine)
        schedule_puts_off = any(action.kind is Kind.W for row in self.schedule.rows for action in row)
        self.parts_backward = schedule_puts_off
        # At stage 3 a module's weights are gone by the time of W.
        self.puts_off = schedule_puts_off and plan.zero < 3
        self._steps_done: Callable[[], int] = lambda: 0

    def make_buckets(self, decays: Callable[[str, nn.Parameter], bool], bucket_bytes: int) -> None:
        """Step 2.

        Args:
            decays, bucket_bytes: as those of `parallelize`.
        """
        model, plan, mesh = self.model, self.plan, self.mesh
        sent = PRECISIONS[plan.reduce_dtype].compute if plan.reduce_dtype != "master" else None
        self.reducer = Reducer(mesh, sent=sent)
        self.traffic = Traffic()
        self.tiers = tiers_of(plan.offload, self.device, self.traffic)
        self.layouts = {
            name: self.division.layout(parameter) if self.division is not None else Layout(tuple(parameter.shape))
            for name, parameter in model.named_parameters()
        }
        further = FurtherSums(mesh, self.holders, model, self.layouts)
        unit_of = mark_units(self.mine) if plan.zero == 3 else {}

        def buckets_of(parameters: Iterable[nn.Parameter], stage: int) -> Buckets:
            entries = [self._entry(p, decays, further, unit_of.get(id(p), -1)) for p in parameters]
            storage = Storage(stage, self.precision, self.device, self.reducer, self.optimizer, self.tiers, self.seed)
            return Buckets(entries, storage, further.axes, bucket_bytes, self.parts_backward)

        shared = self.holders.shared
        self.own_buckets = [
            buckets_of((p for p in stage.parameters() if p.requires_grad and not shared(p)), plan.zero)
            for stage in self.mine
        ]
        # What several stages hold is summed when all are done, so it is kept whole; its optimizer state is divided all
        # the same.
        tied = {id(p): p for stage in self.mine for p in stage.parameters() if p.requires_grad and shared(p)}
        self.shared_buckets = [buckets_of(tied.values(), min(plan.zero, 1))] if tied else []

    def _entry(
        self, parameter: nn.Parameter, decays: Callable[[str, nn.Parameter], bool], further: FurtherSums, unit: int
    ) -> Entry:
        holders = self.holders
        name, key = holders.names[id(parameter)], id(parameter)
        layout = self.layouts[name]
        places: dict[str, Place] = dict(self.splits)
        own = self.owners[key]
        first = layout.counted_here(places, ("tensor",))
        return Entry(
            name,
            layout,
            layout.local_shape(places),
            decay=decays(name, parameter),
            direct=len(own) == 1
            and not holders.shared(parameter)
            and is_direct(own[0][0], self.puts_off, self.division),
            counted=first and (not holders.shared(parameter) or self.axis.rank == holders.first[name]),
            first=first,
            largest=layout.largest(places),
            unit=unit,
            block=self.block_of.get(key, 0),
            extra=further.name(parameter, layout),
        )

    def give_values(self) -> None:
        """Step 3."""
        model, owners, seed = self.model, self.owners, self.seed
        initial = {
            name: initial_of(model, name) for name, p in model.named_parameters() if p.is_meta and id(p) in owners
        }
        by_name = {self.holders.names[key]: parameter for key, parameter in _unique(self.mine).items()}
        self.slots: dict[str, Slot] = {}
        self.live: dict[str, nn.Parameter] = {}
        for buckets in (*self.own_buckets, *self.shared_buckets):
            for bucket in buckets.buckets:
                bucket.acquire(fill=False)
                first = bucket.begin_values()
                for item in bucket.entries:
                    self.slots[item.name] = item.slot
                    where = bucket.view(first, item)
                    self.live[item.name] = place(by_name[item.name], item, where, initial, seed, owners, self.mesh)
                bucket.keep_values(first)
                bucket.release()
        self.reducer.meet()
        dtype = self.precision.compute
        self.frozen = {
            name: settle_frozen(
                name, parameter, self.layouts[name], initial, seed, owners, dtype, self.device, self.mesh
            )
            for name, parameter in by_name.items()
            if not parameter.requires_grad
        }
        self.persistent = move_buffers(model, self.mine, dtype, self.device)

    def join_gradients(self, overlap: bool) -> None:
        """Step 4.

        Args:
            overlap: as that of `parallelize`.
        """
        schedule, rank = self.schedule, self.axis.rank
        slot_of = {id(self.live[name]): slot for name, slot in self.slots.items()}
        stages = schedule.placement[rank]
        self.chunks = [
            self._chunk(module, stage, buckets, slot_of, overlap)
            for module, stage, buckets in zip(self.mine, stages, self.own_buckets, strict=True)
        ]
        self.recomputation = None
        if self.by_blocks != "none":
            division = self.division
            layer_of = division.layer if division is not None else lambda module: None
            noting = (division.region if division is not None else None, self.context)
            notes = [part.note for part in noting if part is not None]
            mesh = self.mesh
            moments = recompute.moments_of(schedule, rank)
            self.recomputation = recompute.Recomputation(
                self.by_blocks, moments, mesh.axis("stage"), mesh.axis("world"), layer_of
            )
            for number, chunk in enumerate(self.chunks):
                notes_of = [chunk.note, *notes]
                self.recomputation.apply(number, chunk.module, notes_of, chunk.tape, schedule.num_microbatches)
        for name, slot in self.slots.items():
            hook(self.live[name], slot)

    def _chunk(
        self, module: nn.Module, stage: int, buckets: Buckets, slot_of: dict[int, Slot], overlap: bool
    ) -> ModelChunk:
        tape = Tape()
        live = {item.name: self.live[item.name] for _, item in buckets}
        attach(module, slot_of, {id(parameter) for parameter in live.values()}, tape, self.puts_off, self.division)
        owners = _owners([module])
        data_rank = self.mesh.axis("gradient").rank  # ranks whose positions or rows differ drop different ones
        table = version_table(self.schedule)

        def seeds(microbatch: int) -> int:
            return seed_of(self.seed, "forward", self._steps_done(), data_rank, microbatch, stage)

        return ModelChunk(
            module,
            buckets,
            self.shared_buckets,
            {name: owners.get(id(parameter), []) for name, parameter in live.items()},
            live,
            tape,
            overlap,
            seeds,
            self.splits,
            None if table is None else lambda microbatch: table(microbatch, stage),
            self.slices,
            Activations(self.tiers["activations"]) if "activations" in self.tiers else None,
        )

    def finish(self, negotiate: str) -> Assembly:
        """Step 5.

        Args:
            negotiate: as that of `parallelize`.
        """
        schedule, division, slices, context = self.schedule, self.division, self.slices, self.context
        total = self.loss.sum
        last_rank, last_chunk = schedule.owner(schedule.total_stages - 1)
        if self.terms is not None and last_rank == self.axis.rank and takes_losses_back(schedule):
            head = division.head() if division is not None else _head_of(self.model, self.rules)
            if head is not None and head.module in self.mine[last_chunk].modules():
                total = head.loss(self.terms, self.loss).sum
                self.chunks[last_chunk].adopt(head)
        alike = division.region.exchange if division is not None and not self.plan.sequence else None
        wire = Wire(self.axis, self.device, schedule.total_stages - 1, negotiate, alike)
        runner = Runner(schedule, self.axis.rank, self.chunks, wire, total)
        if slices is not None:
            runner.recompute = self.whole_slices
            runner.finished = slices.finished

        def local(microbatch: Batch, number: int) -> list[Batch]:
            """What this rank computes of a microbatch, in order."""
            if slices is not None:
                return slices.cut(microbatch, number)
            return [context.local(microbatch) if context is not None else microbatch]

        return Assembly(
            self.model if schedule.total_stages == 1 else nn.ModuleList(self.mine),
            self.chunks,
            self.shared_buckets,
            self.frozen,
            self.persistent,
            self.holders.first,
            self.reducer,
            self.splits,
            [division] if division is not None else [],
            runner,
            list(self.holders.names.values()),
            self.layouts,
            self.stage_parameters,
            local,
            self.traffic if self.tiers else None,
            self.recomputation,
            self.chain,
        )

    def count_steps(self, steps_done: Callable[[], int]) -> None:
        """Have what is random depend on the number of steps done."""
        self._steps_done = steps_done


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


def _head_of(model: nn.Module, rules: Rules | None) -> Head | None:
    """The output matrix that this rank holds whole, to be computed with its loss."""
    module = output_matrix(model, rules)
    if module is None or module._parameters.keys() != {"weight", "bias"}:
        return None
    slots, *others = getattr(module, "_landing", ({}, Tape()))
    if len(others) != 1 or ("forward" in module.__dict__ and not slots):
        return None  # computes something else than a linear layer
    return Head(module, slots, others[0], Alone(module.out_features))
