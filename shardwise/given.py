"""What `parallelize` and the model it makes are given: what no layout could compute, and what all ranks must have been
given alike."""

import math
from collections.abc import Callable, Iterable
from typing import SupportsFloat

import torch
from torch import nn

from shardwise import batch as batches
from shardwise import collectives
from shardwise.batch import Batch
from shardwise.chunk import ModelChunk
from shardwise.initial import seed_of
from shardwise.mesh import Mesh
from shardwise.optimizers.optimizer import Optimizer
from shardwise.plan import Plan
from shardwise.plan_values import ASYNCHRONOUS
from shardwise.state import fingerprint

VALUE = "value of"  # how the facts begin that are fingerprints of values
# How to hold the same, where one does not see it at once.
MENDS = {
    VALUE: "build the model after torch.manual_seed on every rank, or under torch.device('meta'), where parallelize "
    "draws the same values for every layout from its seed"
}


def refuse_kinds(model: object, plan: object, optimizer: object, mesh: object) -> None:
    """Raises ValueError for what is of another kind than `parallelize` takes."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a {_kind(model)}; give an nn.Module")
    if not isinstance(plan, Plan):
        raise ValueError(f"the plan is a {_kind(plan)}; give shardwise.Plan(replicate=2), for instance")
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"the optimizer is torch's {_kind(optimizer)}, which updates whole parameters; give settings, as "
            "shardwise.AdamW(lr=1e-3): each rank updates its part of them"
        )
    if optimizer is not None and (isinstance(optimizer, type) or not isinstance(optimizer, Optimizer)):
        what = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"a {_kind(optimizer)}"
        raise ValueError(f"the optimizer is {what}; give settings, as shardwise.AdamW(lr=1e-3)")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ValueError(f"the mesh is a {_kind(mesh)}; give shardwise.Mesh(plan), or leave it out")


def _kind(thing: object) -> str:
    return type(thing).__name__


def refuse_lazy(model: nn.Module) -> None:
    """Raises ValueError for parameters and buffers that are made by the first forward."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name!r} has no shape before the model is first called; call it once on an example")


def refuse(model: nn.Module, plan: Plan, clip: float | None) -> None:
    """Raises ValueError for what no layout could compute."""
    if clip is not None and not clip > 0:
        raise ValueError(f"clip = {clip} would stop every update; choose more than 0, or None to clip nothing")
    _refuse_batch_statistics(model, plan)
    _refuse_tables(model, plan)
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ValueError(f"parameter {name!r} is complex; keep its real and imaginary parts as two parameters")
        _refuse_hooks(name, parameter, plan)


def _refuse_tables(model: nn.Module, plan: Plan) -> None:
    """Embeddings that look at how often a batch asks for a row, or write their rows in forward."""
    divided = plan.data_parallel * plan.context * plan.microbatches * plan.slices > 1
    kept_elsewhere = plan.zero == 3 or plan.schedule in ASYNCHRONOUS or plan.precision not in ("fp32", "fp64")
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.scale_grad_by_freq and divided:
            raise ValueError(
                f"module {name!r} scales gradients by frequency, which would be that in a rank's or a microbatch's "
                "part of the batch; set scale_grad_by_freq to False, or use one data-parallel rank and one microbatch"
            )
        if module.max_norm is not None and (plan.data_parallel * plan.context > 1 or kept_elsewhere):
            raise ValueError(
                f"module {name!r} renormalises its rows in forward, which other copies of them would not see; set "
                "max_norm to None, or use one data-parallel rank, fp32 or fp64, zero below 3 and a synchronous schedule"
            )


def _refuse_hooks(name: str, parameter: nn.Parameter, plan: Plan) -> None:
    if parameter._post_accumulate_grad_hooks:
        raise ValueError(
            f"parameter {name!r} has a hook for accumulated gradients, which are kept in buckets and never in .grad; "
            "use parameter.register_hook, or let parallelize(..., optimizer=...) update"
        )
    if not parameter._backward_hooks:
        return
    if parameter.is_meta:
        raise ValueError(
            f"parameter {name!r} has a gradient hook and is on the meta device, where another one takes its place; "
            "register the hook on the parameters of the parallel model"
        )
    if plan.tensor > 1 or plan.schedule in ASYNCHRONOUS:
        what = f"plan.tensor = {plan.tensor} divides it" if plan.tensor > 1 else f"{plan.schedule} keeps versions of it"
        raise ValueError(
            f"parameter {name!r} has a gradient hook, and {what}; change the gradient in the model instead"
        )


def _refuse_batch_statistics(model: nn.Module, plan: Plan) -> None:
    if plan.data_parallel * plan.context * plan.microbatches * plan.slices == 1:
        return
    for name, module in model.named_modules():
        synchronised = isinstance(module, nn.SyncBatchNorm) and plan.microbatches == 1
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not synchronised:
            raise ValueError(
                f"module {name!r} is a {type(module).__name__}: its statistics would be those of a rank's or a "
                "microbatch's part of the batch, so no layout could equal one device; use GroupNorm or LayerNorm, or "
                "one data-parallel rank and one microbatch"
            )


def refuse_different_batches(batch: Batch, mesh: Mesh) -> None:
    """Raises ValueError if ranks of a data rank were given different rows: each uses what it needs of its own copy.
    Collective over the job."""
    if mesh.num_ranks == mesh.axis("data").size:
        return
    mine = mesh.axis("data").rank, [fingerprint(tensor) for tensor in batches.tensors(batch)]
    first: dict[int, tuple[int, list[str]]] = {}
    for rank, (share_of, prints) in enumerate(collectives.all_gather_object(mine, mesh.axis("world"))):
        other, right = first.setdefault(share_of, (rank, prints))
        if prints != right:
            raise ValueError(
                f"ranks {other} and {rank} are both data rank {share_of} and were given different batches: give "
                "every rank the rows of parallel.data_rank, parallel.share(global batch) for instance"
            )


def require_lr(lr: object) -> float:
    """A step's learning rate.

    Raises:
        ValueError: it is no finite number of 0 or more.
    """
    found = float(lr) if isinstance(lr, SupportsFloat) else math.nan
    if not 0 <= found < math.inf:
        raise ValueError(f"lr = {lr!r} is no learning rate; give a finite number of 0 or more")
    return found


def refuse_changed(chunks: Iterable[ModelChunk], frozen: dict[str, nn.Parameter]) -> None:
    """Raises ValueError for parameters that were frozen, trained or replaced since the model was made parallel."""
    changed = [(name, "no longer") for chunk in chunks for name in chunk.changed()]
    changed += [(name, "now") for name, parameter in frozen.items() if parameter.requires_grad]
    for name, when in changed:
        raise ValueError(
            f"parameter {name!r} is {when} to be trained, which is settled when a model is made parallel; build the "
            "model anew, parallelize it and load a checkpoint"
        )


def facts_of(
    model: nn.Module, plan: Plan, decays: Callable[[str, nn.Parameter], bool], given: dict[str, object]
) -> dict[str, str]:
    """Fingerprints of what all ranks must have been given alike."""
    facts = {f"plan.{key}": repr(getattr(plan, key)) for key in type(plan).model_fields}
    facts |= {name: repr(value) for name, value in given.items()}
    for name, p in model.named_parameters():
        kind = f"{'trained' if p.requires_grad else 'frozen'}{', on the meta device' if p.is_meta else ''}"
        decay = ", with weight decay" if decays(name, p) else ""
        facts[f"parameter {name!r}"] = f"{str(p.dtype).removeprefix('torch.')} {list(p.shape)} {kind}{decay}"
    facts["order of parameters"] = str(seed_of(*(name for name, _ in model.named_parameters())))
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        facts |= {f"{VALUE} {kind} {name!r}": fingerprint(tensor) for name, tensor in named if not tensor.is_meta}
    return facts
