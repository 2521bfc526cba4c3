"""`shardwise verify`: a configuration's plan against one device, on ranks of this machine or of the job it was started
in."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from shardwise import models, optimizers
from shardwise.batch import Batch
from shardwise.config import Config
from shardwise.mesh import Mesh
from shardwise.parallel import Parallel
from shardwise.plan import Plan
from shardwise.training import disks, launch, processes
from shardwise.training.placement import Placement, placed
from shardwise.verify import Report, verify


def _skip_reduction(parallel: Parallel) -> None:
    """The first bucket of this rank's first chunk keeps its own gradients."""
    bucket = parallel.chunks[0].buckets.buckets[0]
    bucket.reducer = bucket.reducer.alone()


def _stale_weights(parallel: Parallel) -> None:
    """The first rank's first update is lost."""
    if parallel.mesh.rank == 0:
        parallel.chunks[0].buckets.update = lambda *_, **__: None  # type: ignore[method-assign]


# Faults that `--plant` puts into the plan's run, so that anyone can see the oracle notice.
FAULTS: dict[str, Callable[[Parallel], None]] = {"skip-reduction": _skip_reduction, "stale-weights": _stale_weights}


@dataclass(frozen=True)
class Request:
    """What to verify: the configuration, how many steps, and which fault to plant ("" for none)."""

    config: Config
    steps: int
    plant: str = ""


def run(request: Request) -> Report:
    """Verify on as many ranks as the plan has: started here, or, under torchrun or Slurm, those of the job. The same
    report on every rank.

    Raises:
        ValueError: the plan cannot be run; one line for every problem.
    """
    config = request.config
    if request.plant and request.plant not in FAULTS:
        raise ValueError(f"--plant {request.plant}: there is no such fault; choose one of {', '.join(FAULTS)}")
    if request.plant == "skip-reduction" and config.plan.replicate * config.plan.shard * config.plan.context == 1:
        raise ValueError(
            "--plant skip-reduction: this plan adds up no gradients over ranks, so there is nothing to skip; "
            "set plan.replicate or plan.shard above 1"
        )
    work = partial(on_rank, request)
    place = placed()
    if place is None or place.num_ranks == 1:
        config.require(num_ranks=config.plan.num_ranks)
        disks.require(config, _as_verified(config.plan), local=True)
        if config.plan.num_ranks == 1:
            return work(Placement())
    report = launch.on_ranks(work, config.plan.num_ranks, grace=10, offload=disks.folders_of(config.plan))
    if report is None:
        raise KeyboardInterrupt
    return report


def on_rank(request: Request, place: Placement) -> Report:
    """One rank's part."""
    config = request.config
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", processes.threads_per_rank(place.num_ranks))))
    place.connect("cpu", config.train.timeout)
    plan = _as_verified(config.plan)
    vocabulary = vocabulary_of(config)
    return verify(
        models.build(config.model, vocabulary),
        plan,
        random_batches(config, vocabulary, request.steps),
        optimizer=optimizers.build(config.optimizer),
        mesh=Mesh(plan, device="cpu"),
        seed=config.train.seed,
        clip=config.train.clip or None,
        example=random_batches(config, vocabulary, 1)[0],
        sabotage=FAULTS[request.plant] if request.plant else None,
    )


def _as_verified(plan: Plan) -> Plan:
    return plan.replace(precision="fp64") if plan.precision == "fp32" else plan


def vocabulary_of(config: Config) -> int:
    """The vocabulary the model would have, as far as it is known without reading the corpus."""
    return config.model.vocabulary or config.data.vocabulary or 256


def random_batches(config: Config, vocabulary: int, steps: int) -> list[Batch]:
    """Global batches of the configuration's size: random tokens, documents if it masks them, and targets of which a
    random part does not count."""
    generator = torch.Generator().manual_seed(config.train.seed)
    shape = (config.data.batch, config.data.sequence)
    found: list[Batch] = []
    for _ in range(steps):
        inputs = {"tokens": torch.randint(0, vocabulary, shape, generator=generator)}
        if config.data.document_mask:
            starts = torch.rand(shape, generator=generator) < 4 / shape[1]
            starts[:, 0] = True
            inputs["documents"] = starts.cumsum(1)
            places = torch.arange(shape[1]).expand(shape)
            inputs["positions"] = places - torch.where(starts, places, 0).cummax(1).values
        targets = torch.randint(0, vocabulary, shape, generator=generator)
        # Rows lose different parts, so ranks and microbatches count different numbers of targets.
        lost = torch.rand((shape[0], 1), generator=generator) * 0.8
        targets[torch.rand(shape, generator=generator) < lost] = -100
        found.append((inputs, targets))
    return found


def show(report: Report, console: Console) -> None:
    """The report as a table with the worst comparison of each kind, and the verdict."""
    table = Table(title=f"{report.plan}: {report.num_steps} steps against one device in float64", title_justify="left")
    for title in ("what", "comparisons", "worst", "step", "relative error", ""):
        numbers = title in ("comparisons", "step", "relative error")
        table.add_column(title, justify="right" if numbers else "left", overflow="fold")
    for kind, worst in report.worst.items():
        count = sum(difference.kind == kind for difference in report.differences)
        good = worst.error <= report.allowed(kind)
        table.add_row(
            kind,
            str(count),
            worst.name,
            str(worst.step),
            f"{worst.error:.1e}",
            "agrees" if good else "[red]differs[/red]",
        )
    console.print(table)
    console.print(report.describe(), style="green" if report.agrees else "red", highlight=False)
