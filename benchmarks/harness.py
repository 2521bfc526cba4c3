"""Puts contenders side by side: in turn, on the same ranks, in one run.

A machine that is busy or warm slows whoever runs at that moment, so only the ratio of two contenders of the same round
says anything. Contenders that can share a process take turns step by step (`alternate`); those that need another
environment take turns launch by launch (`launches`). What each holds in memory is measured in processes of its own
(`Memory.measure`).
"""

import importlib
import importlib.util
import json
import math
import os
import platform
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Where torch's memory of freed blocks, gloo's sockets and the caches of every layer have settled.
WARMUP = 3
PATIENCE_SECONDS = 600.0


class Missing(Exception):
    """Something outside the repository that a benchmark needs; the text is one line."""


# The peers


def peers_folder() -> Path:
    """The folder with the model that all contenders train, and the scripts of the peers.

    Raises:
        Missing: it is not where it should be.
    """
    folder = Path(os.environ.get("SHARDWISE_PEERS") or ROOT.parent / "shared" / "peers")
    if not (folder / "common.py").is_file():
        raise Missing(
            f"{folder}/common.py, the model that is trained, does not exist: set SHARDWISE_PEERS to its folder"
        )
    return folder.resolve()


def peers_common() -> ModuleType:
    """The peers' `common.py`: the model, its batches and its loss."""
    spec = importlib.util.spec_from_file_location("peers_common", peers_folder() / "common.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peer_python(name: str) -> Path | None:
    """The interpreter of a peer's environment, None if it is not installed."""
    home = Path(os.environ.get("PEERS_ROOT") or Path.home() / ".cache" / "shardwise-peers")
    python = home / "venvs" / name / "bin" / "python"
    return python if python.exists() else None


# Launching


def _environment(**more: str) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    fixed = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **fixed, **more}


def _free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def run_ranks(function: str, num_ranks: int = 2, **arguments: Any) -> Any:
    """Call "module:function" with the arguments on every rank, each in a fresh process; rank 0's result.

    Arguments and result pass as JSON; what the ranks print is dropped.

    Raises:
        RuntimeError: a rank failed; with what the ranks wrote to stderr.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        order = {"function": function, "arguments": arguments}
        (folder / "order.json").write_text(json.dumps(order))
        ranks = []
        with open(folder / "errors", "w") as errors:
            for rank in range(num_ranks):
                place = {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
                command = [sys.executable, "-m", "benchmarks.harness", name]
                ranks.append(
                    subprocess.Popen(
                        command, env=_environment(**place), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors
                    )
                )
        try:
            codes = _codes(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if codes != [0] * num_ranks:
            said = (folder / "errors").read_text()[-4000:]
            raise RuntimeError(f"{function} failed, exit codes {codes} (None: still running)\n{said}")
        return json.loads((folder / "result.json").read_text())


def _codes(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """The exit codes once all have ended, one has failed, or patience is over."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        codes = [process.poll() for process in ranks]
        if any(codes) or None not in codes or time.monotonic() > until:
            return codes
        time.sleep(0.05)


def _serve(name: str) -> None:
    """One rank of `run_ranks`."""
    folder = Path(name)
    order = json.loads((folder / "order.json").read_text())
    os.environ["BENCHMARK_STORE"] = str(folder / "store")
    module, function = order["function"].split(":")
    value = getattr(importlib.import_module(module), function)(**order["arguments"])
    if place()[0] == 0:
        (folder / "result.json").write_text(json.dumps(value))
    # Threads of peers and of gloo may not end by themselves.
    os._exit(0)


def place() -> tuple[int, int]:
    """(rank, number of ranks) of this process."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def connect() -> None:
    """Initialise torch.distributed over gloo. Collective over the ranks of `run_ranks`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, num_ranks = place()
    store = dist.FileStore(os.environ["BENCHMARK_STORE"], num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)


def peer(python: Path, script: str, *arguments: str, num_ranks: int = 2) -> dict[str, Any]:
    """Run one of the peers' scripts under torchrun and return its result (`common.run_steps`)."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    address = ["--master-addr", "127.0.0.1", "--master-port", _free_port()]
    folder = peers_folder()
    quiet = {"PYTHONPATH": str(folder), "PEERS_OUT": "", "TOKENIZERS_PARALLELISM": "false"}
    command = [str(python), *torchrun, *address, str(folder / script), *arguments]
    done = subprocess.run(
        command, env=_environment() | quiet, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return found
    raise RuntimeError(f"{script} {' '.join(arguments)} gave no result:\n{done.stderr[-2000:]}")


# Time

Step = Callable[[int], Any]


@dataclass
class Times:
    """Step times of contenders that took turns.

    Args:
        milliseconds: by contender, of every round the slowest rank's.
        cpu: by contender, the median milliseconds of processor time of every rank, all its threads together: what is
            left when waiting, and a machine shared with others, are taken out.
        losses: by contender, of every step the mean over the ranks that know the loss; warm-up comes first.
    """

    milliseconds: dict[str, list[float]]
    cpu: dict[str, list[float]]
    losses: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.milliseconds[name])

    def best(self, name: str) -> float:
        return min(self.milliseconds[name])

    def ratio(self, name: str, other: str) -> float:
        """The median over rounds of one contender's time over the other's."""
        return statistics.median(self._ratios(name, other))

    def interval(self, name: str, other: str) -> tuple[float, float]:
        """95 % confidence for `ratio`, by order statistics: no assumption on how noise is distributed."""
        ordered = sorted(self._ratios(name, other))
        reach = 0.98 * math.sqrt(len(ordered))
        low, high = math.floor(len(ordered) / 2 - reach), math.ceil(len(ordered) / 2 + reach)
        return ordered[max(0, low)], ordered[min(len(ordered) - 1, high)]

    def show_ratio(self, name: str, other: str) -> str:
        """`ratio`, with its interval."""
        if name == other:
            return "1"
        low, high = self.interval(name, other)
        return f"{self.ratio(name, other):.3f} ({low:.3f} to {high:.3f})"

    def _ratios(self, name: str, other: str) -> list[float]:
        pairs = zip(self.milliseconds[name], self.milliseconds[other], strict=True)
        return [mine / theirs for mine, theirs in pairs]

    def show_cpu(self, name: str) -> str:
        return "/".join(f"{milliseconds:.0f}" for milliseconds in self.cpu[name])


def alternate(
    contenders: dict[str, Step], rounds: int, warmup: int = WARMUP, lengths: dict[str, int] | None = None
) -> Times:
    """Time contenders in turn: every round each makes a step, in an order drawn anew. Collective over the world.

    All ranks meet before each turn, so none pays for what another left behind; a turn ends on a rank when it knows its
    losses.

    Args:
        contenders: name -> step(number of the step) -> the loss, or None on ranks that do not know it.
        rounds: timed ones, after `warmup` others.
        lengths: name -> steps a turn, for contenders whose steps overlap each other; the time is then that of one step.
            Such a contender returns a function that gives the loss, which is called at the end of the turn.
    """
    import torch.distributed as dist

    lengths = lengths or {}
    own: dict[str, list[tuple[float, float, list[float | None]]]] = {name: [] for name in contenders}
    draw = random.Random(0)
    for number in range(warmup + rounds):
        for name in draw.sample(list(contenders), len(contenders)):
            length = lengths.get(name, 1)
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            found = [contenders[name](number * length + part) for part in range(length)]
            losses = [loss() if callable(loss) else loss for loss in found]
            took, busy = time.perf_counter() - start, time.process_time() - busy
            own[name].append((took * 1e3 / length, busy * 1e3 / length, losses))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    times = Times({}, {}, {})
    for name in contenders:
        turns = list(zip(*(other[name] for other in everyone), strict=True))
        times.milliseconds[name] = [max(took for took, _, _ in turn) for turn in turns[warmup:]]
        times.cpu[name] = [statistics.median(busy for _, busy, _ in other[name][warmup:]) for other in everyone]
        times.losses[name] = [
            statistics.fmean(loss for loss in step if loss is not None)
            for turn in turns
            for step in zip(*(losses for _, _, losses in turn), strict=True)
        ]
    return times


def held(step: Step, steps: int) -> list[dict[str, float]]:
    """What every rank holds at most over so many steps of one contender alone. Collective over the world."""
    for number in range(steps):
        step(number)
    return Memory.everywhere()


def as_peers(step: Step, steps: int, name: str) -> dict[str, Any]:
    """One contender alone, measured as the peers measure theirs. Collective over the world."""
    common = peers_common()
    found: dict[str, Any] = common.run_steps(common.parser(steps=steps).parse_args([]), step, name)
    return found


def launches(contenders: dict[str, Callable[[], dict[str, Any]]], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Results of contenders that are launched in turn, `rounds` times each; every result has a `median_ms`."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, launch in contenders.items():
            found[name].append(launch())
    return found


def launch_ratio(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """The median over rounds of the ratio of two contenders' medians."""
    return statistics.median(a["median_ms"] / b["median_ms"] for a, b in zip(mine, theirs, strict=True))


def launch_rows(found: dict[str, list[dict[str, Any]]], ratios: dict[str, float]) -> list[list[str]]:
    """Rows (name, median of medians, best step, ratio where there is one) of contenders that were launched in turn."""
    return [
        [
            name,
            f"{statistics.median(result['median_ms'] for result in results):.1f}",
            f"{min(result['min_ms'] for result in results):.1f}",
            f"{ratios[name]:.3f}" if name in ratios else "1",
        ]
        for name, results in found.items()
    ]


def agreement(name: str, losses: Sequence[float], expected: Sequence[float], tolerance: float = 2e-5) -> str:
    """One line that says whether a contender's first losses are those of one process, to the tolerance (relative)."""
    pairs = list(zip(losses, expected, strict=False))
    worst = max(abs(loss - other) / abs(other) for loss, other in pairs)
    last = f"{pairs[-1][0]:.6f} after {len(pairs)} steps, {pairs[-1][1]:.6f} in one process"
    return f"{name}: loss {last} ({'equal' if worst <= tolerance else 'DIFFERENT'}, at most {worst:.0e} apart)"


# Memory


@dataclass(frozen=True)
class Memory:
    """What one rank has held at most, in MB.

    Args:
        resident: as the kernel counts it (VmHWM), with the code of libraries, and with memory shared between ranks
            counted on each of them.
        own: without pages of files, and with shared memory counted by this rank's share of it.
    """

    resident: float
    own: float

    @staticmethod
    def here() -> "Memory":
        """Of this process up to now."""
        rolled = _kilobytes("/proc/self/smaps_rollup")
        peak = _kilobytes("/proc/self/status")["VmHWM"]
        # What is shared or of files lasts from the first step to the last, so it is in the peak too.
        elsewhere = rolled["Rss"] - rolled["Pss_Anon"] - rolled["Pss_Shmem"]
        return Memory(peak / 1024, (peak - elsewhere) / 1024)

    @staticmethod
    def everywhere() -> list[dict[str, float]]:
        """Of all ranks, as plain data. Collective over the world."""
        import torch.distributed as dist

        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, asdict(Memory.here()))
        return found


def _kilobytes(path: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in Path(path).read_text().splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if parts[1:] == ["kB"]:
            found[name] = int(parts[0])
    return found


# Words


def machine() -> str:
    """One line on what the numbers were taken."""
    import torch

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    load = os.getloadavg()[0]
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores of {model}, torch {torch.__version__}, one thread a "
        f"rank, gloo; load before the run {load:.1f}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: the first column is left-aligned, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(header), f"| {' | '.join(rule)} |", *map(line, rows)])


def megabytes(ranks: Sequence[dict[str, float]] | None, key: str) -> str:
    """One memory figure of every rank, as `410/398`."""
    return "/".join(f"{rank[key]:.0f}" for rank in ranks) if ranks else "-"


def main(run: Callable[[], None]) -> None:
    """Run a benchmark; what is missing is said in one line."""
    if shutil.which("nproc") is None or not Path("/proc/self/smaps_rollup").exists():
        sys.exit("error: the benchmarks read Linux's /proc; run them on Linux")
    try:
        run()
    except Missing as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    _serve(sys.argv[1])
