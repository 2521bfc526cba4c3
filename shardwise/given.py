"""What `parallelize` is given: what no layout could compute, and what all ranks must have been given alike."""

from collections.abc import Callable

from torch import nn

from shardwise.initial import seed_of
from shardwise.plan import Plan
from shardwise.state import fingerprint


def refuse(model: nn.Module, plan: Plan, clip: float | None) -> None:
    """Raises ValueError for what no layout could compute."""
    if clip is not None and not clip > 0:
        raise ValueError(f"clip = {clip} would stop every update; choose more than 0, or None to clip nothing")
    _refuse_batch_statistics(model, plan)
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ValueError(f"parameter {name!r} is complex; keep its real and imaginary parts as two parameters")


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
        facts |= {f"value of {kind} {name!r}": fingerprint(tensor) for name, tensor in named if not tensor.is_meta}
    return facts
