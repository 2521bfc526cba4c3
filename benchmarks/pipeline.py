"""Pipeline parallelism: every schedule on two ranks beside torch's of the same name, other systems' and the ideal.

    python -m benchmarks.pipeline [--quick] [--search]

All train the model of the peers' `common.py` with the same AdamW on the same rows. The reference is the data-parallel
step without communication: the same work on the same two cores, and nothing to wait for.
"""

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import harness
from benchmarks.harness import Step

REFERENCE = "no communication"
NUM_RANKS = 2
MICROBATCHES = (4, 8)
# Steps whose losses are compared with those of one process.
CHECKED = 4
# Steps a turn of schedules that do not flush between them.
ASYNCHRONOUS_TURN = 3


@dataclass(frozen=True)
class Contender:
    """A pipeline on two ranks.

    Args:
        system: "shardwise" or "torch".
        schedule: its name there.
        split: layers of each stage; the embedding goes with the first, the head with the last.
        microbatches: a step.
    """

    system: str
    schedule: str
    split: tuple[int, ...]
    microbatches: int

    @property
    def label(self) -> str:
        return f"{self.system} {self.schedule} {'+'.join(map(str, self.split))} m{self.microbatches}"

    @property
    def asynchronous(self) -> bool:
        return self.schedule.startswith("pipedream")


@dataclass(frozen=True)
class Contest:
    """One of our schedules and torch's of the same kind, each with the best split found by `--search`."""

    schedule: str
    split: tuple[int, ...]
    peer: str = ""
    peer_split: tuple[int, ...] = ()

    def ours(self, microbatches: int) -> Contender:
        return Contender("shardwise", self.schedule, self.split, microbatches)

    def theirs(self, microbatches: int) -> Iterator[Contender]:
        """At its own best split, then at ours if that is another one it can have."""
        if self.peer:
            yield Contender("torch", self.peer, self.peer_split, microbatches)
            if len(self.split) == len(self.peer_split) and self.split != self.peer_split:
                yield Contender("torch", self.peer, self.split, microbatches)


CONTESTS = (
    Contest("gpipe", (3, 1), "GPipe", (3, 1)),
    Contest("1f1b", (3, 1), "1F1B", (3, 1)),
    Contest("interleaved", (1, 1, 2, 0), "Interleaved1F1B", (1, 1, 2, 0)),
    Contest("zb-h1", (3, 1), "InterleavedZeroBubble", (1, 1, 2, 0)),
    Contest("zbv", (1, 2, 1, 0), "ZBVZeroBubble", (1, 2, 1, 0)),
    Contest("dualpipev", (1, 1, 2, 0), "DualPipeV", (1, 1, 2, 0)),
    Contest("pipedream", (3, 1)),
    Contest("pipedream-2bw", (3, 1)),
)
# Splits worth trying: those under which the busier rank has least to do, and the even one.
Split = tuple[int, ...]
LINEAR: tuple[Split, ...] = ((3, 1), (2, 2))
LOOPED: tuple[Split, ...] = ((2, 1, 1, 0), (1, 1, 2, 0), (0, 1, 3, 0), (1, 1, 1, 1))
VEE: tuple[Split, ...] = ((1, 2, 1, 0), (1, 1, 2, 0), (0, 2, 1, 1), (0, 1, 2, 1), (1, 1, 1, 1))
SPLITS = {"interleaved": LOOPED, "Interleaved1F1B": LOOPED, "InterleavedZeroBubble": LOOPED}
SPLITS |= dict.fromkeys(("zbv", "dualpipev", "ZBVZeroBubble", "DualPipeV"), VEE)


# On the ranks


def _reference(common: Any, settings: Any, rank: int, num_ranks: int) -> Step:
    model = common.build_model(settings)
    optimizer = common.adamw(settings, model.parameters())

    def step(number: int) -> float:
        inputs, targets = common.dp_batch(settings, number, rank, num_ranks)
        loss = common.loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def _theirs(common: Any, settings: Any, contender: Contender) -> Step:
    """As the peers' run_pp.py does it."""
    import torch
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, num_ranks = harness.place()
    kind = getattr(schedules, f"Schedule{contender.schedule}")
    num_stages = len(contender.split)
    mine = list(range(rank, num_stages, num_ranks))
    if contender.schedule in ("ZBVZeroBubble", "DualPipeV"):
        mine = [rank, num_stages - 1 - rank]
    edges = list(itertools.accumulate(contender.split, initial=0))
    stages, parameters = [], []
    for number in mine:
        model = common.build_model(settings)
        for layer in list(model.layers):
            if not edges[number] <= int(layer) < edges[number + 1]:
                del model.layers[layer]
        if number > 0:
            model.embed = None
        if number < num_stages - 1:
            model.head = None
        stages.append(PipelineStage(model, number, num_stages, torch.device("cpu")))
        parameters += list(model.parameters())
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    schedule = kind(stages if several else stages[0], n_microbatches=contender.microbatches, loss_fn=common.loss_fn)
    optimizer = common.adamw(settings, parameters)
    first, last = 0 in mine, num_stages - 1 in mine

    def step(number: int) -> float | None:
        inputs, targets = common.batch(settings, number)
        losses: list[torch.Tensor] = []
        schedule.step(*([inputs] if first else []), **({"target": targets, "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        return float(sum(loss.detach() for loss in losses)) / len(losses) if last else None

    return step


def _parallel(common: Any, settings: Any, contender: Contender) -> Any:
    from shardwise import AdamW, Plan, parallelize

    model = common.build_model(settings)
    model.stages = ["embed", "layers.*", "head"]
    plan = Plan(
        pipeline=NUM_RANKS,
        schedule=contender.schedule,
        chunks=len(contender.split) // NUM_RANKS,
        microbatches=contender.microbatches,
        cut=contender.split,
    )
    # torch's own defaults, with which the peers run: weight decay on every parameter.
    optimizer = AdamW(lr=settings.lr, betas=(0.9, 0.999), weight_decay=0.01)
    rules: Any = {"head.out": "vocabulary"}  # where the loss begins
    return parallelize(model, plan, optimizer=optimizer, decay=lambda name, parameter: True, rules=rules)


def _our_step(common: Any, settings: Any, parallel: Any, asynchronous: bool) -> Step:
    def step(number: int) -> Any:
        metrics = parallel.step(common.batch(settings, number))
        return (lambda: metrics.loss) if asynchronous else metrics.loss

    return step


def compare(contenders: list[dict[str, Any]], rounds: int, record: int = 0) -> dict[str, Any]:
    """All in turn, the losses of one process, and for `record` steps of each of ours what the simulator makes of
    them."""
    harness.connect()
    common = harness.peers_common()
    settings = common.parser().parse_args([])
    rank, num_ranks = harness.place()
    steps: dict[str, Step] = {REFERENCE: _reference(common, settings, rank, num_ranks)}
    lengths, ours = {}, {}
    for fields in contenders:
        contender = Contender(**{**fields, "split": tuple(fields["split"])})
        if contender.system == "torch":
            steps[contender.label] = _theirs(common, settings, contender)
            continue
        parallel = ours[contender] = _parallel(common, settings, contender)
        steps[contender.label] = _our_step(common, settings, parallel, contender.asynchronous)
        if contender.asynchronous:
            lengths[contender.label] = ASYNCHRONOUS_TURN
    times = harness.alternate(steps, rounds, lengths=lengths)
    alone = _reference(common, settings, 0, 1)
    expected = [alone(number) for number in range(CHECKED)]
    predictions = {}
    if record:
        rows = functools.partial(common.batch, settings)
        predictions = {contender.label: _predict(parallel, rows, record) for contender, parallel in ours.items()}
    return {"times": asdict(times), "expected": expected, "predictions": predictions}


def _predict(parallel: Any, batch: Callable[[int], Any], steps: int) -> dict[str, float]:
    """Milliseconds of a step: measured, and simulated from the median F, B, W, U and latency of the same steps."""
    import torch.distributed as dist

    from shardwise.pipeline_parallel.simulator import Costs, simulate, steady_step

    parallel.step(batch(0))
    dist.barrier()
    parallel.record()
    took = []
    for number in range(steps):
        start = time.perf_counter()
        metrics = parallel.step(batch(number))
        if not parallel.schedule.asynchronous:
            _ = metrics.loss
            took.append(time.perf_counter() - start)
            dist.barrier()
    timeline = parallel.timeline()
    latency = _latency(timeline)
    costs = Costs.measured(timeline, parallel.schedule.total_stages, latency)
    if parallel.schedule.asynchronous:
        measured, predicted = _period(timeline), steady_step(parallel.schedule, costs)
    else:
        measured, predicted = statistics.median(took), simulate(parallel.schedule, costs).makespan
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, measured)
    return {"measured": max(everyone) * 1e3, "predicted": float(predicted) * 1e3, "latency": latency * 1e3}


def _period(timeline: Any) -> float:
    """The median time from one step's start to the next one's, on the rank where that is longest."""
    periods = []
    for row in timeline.rows:
        starts = [float(next(events).start) for _, events in itertools.groupby(row, key=lambda event: event.step)]
        periods.append(statistics.median(after - before for before, after in itertools.pairwise(starts)))
    return max(periods)


def _latency(timeline: Any) -> float:
    """The median time from the end of an action to the start of one on another rank that waited for it."""
    from shardwise.pipeline_parallel.clock import Need, needs
    from shardwise.pipeline_parallel.schedule import passes

    last = max(event.stage for event in timeline.events)
    made = {
        (event.step, Need(kind, event.stage, event.action.microbatch)): event
        for event in timeline.events
        for kind in passes(event.action)
    }
    found = []
    for row in timeline.rows:
        for before, event in itertools.pairwise(row):
            for need in needs(event.action, event.stage, last):
                maker = made.get((event.step, need))
                if maker is not None and maker.rank != event.rank and maker.end > before.end:
                    found.append(float(event.start - maker.end))
    return max(0.0, statistics.median(found)) if found else 0.0


def asleep(milliseconds: float, microbatches: int, steps: int) -> dict[str, dict[str, float]]:
    """`_predict` for stages that sleep: more ranks than cores, none in another's way.

    Args:
        milliseconds: that a rank's share of F, of B and of W each sleeps.
    """
    import torch
    from torch import Tensor, nn

    from shardwise import SGD, Plan, parallelize

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, seconds: float, again: float) -> Tensor:
            ctx.again = again
            time.sleep(seconds)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
            time.sleep(ctx.again)
            return gradient, None, None

    class Sleeper(nn.Module):
        """Its input's gradient and its weight's are a pass of their own."""

        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds
            self.weight = nn.Parameter(torch.zeros(1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return Sleep.apply(x, self.seconds, self.seconds) + Sleep.apply(self.weight, 0.0, self.seconds)

    harness.connect()
    _, num_ranks = harness.place()
    inputs = torch.zeros(microbatches, 1)
    found = {}
    for contest in CONTESTS:
        chunks = len(contest.split) // NUM_RANKS
        plan = Plan(pipeline=num_ranks, schedule=contest.schedule, chunks=chunks, microbatches=microbatches)
        model = nn.Sequential(*(Sleeper(milliseconds / chunks / 1e3) for _ in range(num_ranks * chunks)))
        parallel = parallelize(model, plan, loss=lambda output, _: output.sum(), optimizer=SGD(lr=0.0))
        found[contest.schedule] = _predict(parallel, lambda _: (inputs, inputs), steps)
    return found


def hold(contender: dict[str, Any], steps: int) -> list[dict[str, float]]:
    """One contender alone, for what it holds in memory."""
    harness.connect()
    common = harness.peers_common()
    settings = common.parser().parse_args([])
    chosen = Contender(**{**contender, "split": tuple(contender["split"])})
    if chosen.system == "torch":
        step = _theirs(common, settings, chosen)
    else:
        step = _our_step(common, settings, _parallel(common, settings, chosen), False)
    return harness.held(step, steps)


def launched(contender: dict[str, Any], steps: int) -> dict[str, Any]:
    """Ours alone, measured as the peers measure theirs."""
    harness.connect()
    common = harness.peers_common()
    settings = common.parser(steps=steps).parse_args([])
    chosen = Contender(**{**contender, "split": tuple(contender["split"])})
    parallel = _parallel(common, settings, chosen)
    last = parallel.mesh.axis("pipeline").rank == parallel.schedule.owner(parallel.schedule.total_stages - 1)[0]

    def step(number: int) -> float | None:
        loss = parallel.step(common.batch(settings, number)).loss
        return loss if last else None

    found: dict[str, Any] = common.run_steps(settings, step, "shardwise")
    return found


def overhead(microbatches: int, rounds: int) -> dict[str, float]:
    """Microseconds an action of a pipeline whose stages add one number, by schedule."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, schedules

    from shardwise import SGD, Plan, parallelize

    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.shift

    harness.connect()
    rank, _ = harness.place()
    inputs, targets = torch.zeros(microbatches, 1), torch.zeros(microbatches, 1)

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return output.sum()

    steps: dict[str, Callable[[], Any]] = {}
    for name, chunks in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)):
        plan = Plan(pipeline=NUM_RANKS, schedule=name, chunks=chunks, microbatches=microbatches)
        model = nn.Sequential(*(Nothing() for _ in range(NUM_RANKS * chunks)))
        parallel = parallelize(model, plan, loss=loss, optimizer=SGD(lr=0.0))
        steps[f"shardwise {name}"] = lambda parallel=parallel: parallel.step((inputs, targets))
    for name, chunks in (("1F1B", 1), ("InterleavedZeroBubble", 2), ("Interleaved1F1B", 2)):
        mine = [
            PipelineStage(Nothing(), number, NUM_RANKS * chunks, torch.device("cpu"))
            for number in range(rank, NUM_RANKS * chunks, NUM_RANKS)
        ]
        kind = getattr(schedules, f"Schedule{name}")
        schedule = kind(mine if chunks > 1 else mine[0], n_microbatches=microbatches, loss_fn=loss)
        arguments = [inputs] if rank == 0 else []
        named = {"target": targets, "losses": []} if rank == 1 else {}
        steps[f"torch {name}"] = lambda schedule=schedule, arguments=arguments, named=named: schedule.step(
            *arguments, **named
        )
    actions = {name: microbatches * (4 if "nterleaved" in name else 2) for name in steps}
    actions["shardwise zb-h1"] = 3 * microbatches
    actions["torch InterleavedZeroBubble"] = 6 * microbatches
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if number >= 2:
                found[name].append((time.perf_counter() - start) / actions[name] * 1e6)
    return {name: statistics.median(each) for name, each in found.items()}


# The report


def run() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="two minutes instead of six: fewer rounds, no peers launched"
    )
    parser.add_argument("--search", action="store_true", help="time every split of every schedule, and nothing else")
    options = parser.parse_args()
    harness.peers_folder()
    print(f"Pipelines on two ranks: {harness.machine()}.\n")
    if options.search:
        _search(4 if options.quick else 8)
        return
    for microbatches in MICROBATCHES:
        _contests(microbatches, (4 if options.quick else 16) * 4 // microbatches, not options.quick)
    _overheads(5 if options.quick else 20)
    if not options.quick:
        _others(rounds=2, steps=14)


def _compare(contenders: list[Contender], rounds: int, record: int = 0) -> tuple[harness.Times, dict[str, Any]]:
    found = harness.run_ranks(
        "benchmarks.pipeline:compare", contenders=[asdict(each) for each in contenders], rounds=rounds, record=record
    )
    return harness.Times(**found["times"]), found


def _search(rounds: int) -> None:
    names = [("shardwise", contest.schedule) for contest in CONTESTS]
    names += [("torch", contest.peer) for contest in CONTESTS if contest.peer]
    for microbatches in MICROBATCHES:
        contenders = [
            Contender(system, name, split, microbatches) for system, name in names for split in SPLITS.get(name, LINEAR)
        ]
        times, _ = _compare(contenders, rounds)
        contenders.sort(key=lambda each: (each.system, each.schedule, times.ratio(each.label, REFERENCE)))
        rows = [
            [f"{each.system} {each.schedule}", "+".join(map(str, each.split)), times.show_ratio(each.label, REFERENCE)]
            for each in contenders
        ]
        print(harness.table([f"{microbatches} microbatches", "layers of the stages", "x reference"], rows) + "\n")


def _ideal(contender: Contender) -> float:
    """1 + the bubble of equal stages whose F, B and W take equally long; steps that flush are counted until all ranks
    are done."""
    from shardwise.pipeline_parallel.schedule import build
    from shardwise.pipeline_parallel.simulator import simulate, steady_bubble

    schedule = build(contender.schedule, NUM_RANKS, contender.microbatches, len(contender.split) // NUM_RANKS)
    return 1 + float(steady_bubble(schedule) if schedule.asynchronous else simulate(schedule).flush_bubble)


def _contests(microbatches: int, rounds: int, whole: bool) -> None:
    first = microbatches == MICROBATCHES[0]
    pairs = [(contest.ours(microbatches), list(contest.theirs(microbatches))) for contest in CONTESTS]
    everyone = [each for ours, theirs in pairs for each in (ours, *theirs)]
    times, found = _compare(everyone, rounds, record=8 if first else 0)
    held = {}
    if whole and first:
        for ours, theirs in pairs:
            for each in (ours, *theirs[:1]):
                held[each] = harness.run_ranks("benchmarks.pipeline:hold", contender=asdict(each), steps=5)
    rows = [[REFERENCE, "", f"{times.median(REFERENCE):.1f}", "1", "", "", times.show_cpu(REFERENCE), "", ""]]
    for ours, theirs in pairs:
        for each in (ours, *theirs):
            rows.append(
                [
                    f"{each.system} {each.schedule}",
                    "+".join(map(str, each.split)),
                    f"{times.median(each.label):.1f}",
                    times.show_ratio(each.label, REFERENCE),
                    f"{times.ratio(each.label, REFERENCE) / _ideal(each):.3f}" if each == ours else "",
                    times.show_ratio(ours.label, each.label) if each != ours else "",
                    times.show_cpu(each.label),
                    harness.megabytes(held.get(each), "own"),
                    harness.megabytes(held.get(each), "resident"),
                ]
            )
    header = ["step", "layers", "median ms", "x reference", "x ideal", "ours / it", "CPU ms", "own MB", "resident MB"]
    print(f"{microbatches} microbatches, {rounds} rounds in turn:\n\n{harness.table(header, rows)}\n")
    lines = [
        harness.agreement(each.label, times.losses[each.label], found["expected"])
        for each in everyone
        if not each.asynchronous
    ]
    print("\n".join(lines) + "\n")
    if not first:
        return
    print("A step as measured, and as the simulator puts it together from its median F, B, W, U and latency:\n")
    _show_predictions(found["predictions"])
    found = harness.run_ranks("benchmarks.pipeline:asleep", 4, milliseconds=10, microbatches=8, steps=5)
    print("The same on four ranks whose stages sleep 10 ms for a rank's F, B and W each, 8 microbatches:\n")
    _show_predictions(found)


def _show_predictions(found: dict[str, dict[str, float]]) -> None:
    rows = [
        [
            name,
            f"{each['latency']:.2f}",
            f"{each['measured']:.1f}",
            f"{each['predicted']:.1f}",
            f"{each['measured'] / each['predicted']:.3f}",
        ]
        for name, each in found.items()
    ]
    print(harness.table(["schedule", "latency ms", "measured ms", "simulated ms", "ratio"], rows) + "\n")


def _overheads(rounds: int) -> None:
    found = harness.run_ranks("benchmarks.pipeline:overhead", microbatches=64, rounds=rounds)
    rows = [[name, f"{microseconds:.0f}"] for name, microseconds in found.items()]
    print("Microseconds an action (F, B, W or both halves) of stages that add one number, 64 microbatches:\n")
    print(harness.table(["schedule", "us an action"], rows) + "\n")


def _others(rounds: int, steps: int) -> None:
    ours = next(contest for contest in CONTESTS if contest.schedule == "zbv").ours(MICROBATCHES[0])
    mine = f"Shardwise {ours.schedule}"
    launches: dict[str, Callable[[], dict[str, Any]]] = {
        mine: lambda: harness.run_ranks("benchmarks.pipeline:launched", contender=asdict(ours), steps=steps)
    }
    for label, environment, script, mode in (
        ("DeepSpeed pipeline", "deepspeed", "run_deepspeed.py", "pipe"),
        ("Megatron-core 1F1B", "megatron", "run_megatron.py", "pp"),
        ("Megatron-core interleaved", "megatron", "run_megatron.py", "pp_interleaved"),
    ):
        python = harness.peer_python(environment)
        if python is None:
            print(f"{label} is not installed (install_peer.sh in the peers' folder): left out.")
            continue
        arguments = ("--mode", mode, "--microbatches", str(ours.microbatches), "--steps", str(steps))
        launches[label] = lambda python=python, script=script, arguments=arguments: harness.peer(
            python, script, *arguments
        )
    found = harness.launches(launches, rounds)
    ratios = {name: harness.launch_ratio(found[mine], results) for name, results in found.items() if name != mine}
    print(f"{rounds} launches each in turn, {steps} steps a launch, {ours.microbatches} microbatches:\n")
    print(harness.table(["step", "median ms", "best ms", "ours / it"], harness.launch_rows(found, ratios)))


if __name__ == "__main__":
    harness.main(run)
