"""Starts the ranks of a plan on this machine, or joins them where torchrun or Slurm has started them."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.config import Config
from shardwise.training import disks, faults, generate, job, worker
from shardwise.training.faults import JobFailed
from shardwise.training.placement import Placement, placed
from shardwise.training.processes import threads_per_rank
from shardwise.training.progress import Outcome
from shardwise.training.run_folder import RunFolder

T = TypeVar("T")

# Seconds that ranks get to end a step and save when they are asked to stop, beside what they may wait for the disk.
GRACE = 600


@dataclass(frozen=True)
class Order:
    """What the launcher tells its workers: the work, where rank 0 leaves its result, and where tracebacks go."""

    work: Callable[[Placement], Any]
    parent: int
    result: Path
    folder: Path | None


def train(config: Config, run: Path | None = None) -> Outcome:
    """Trains as the configuration says: in this process for one rank, else in as many as the plan has.

    Under torchrun, or srun with several tasks, this process is one rank of the job already, and a failure ends it here.

    Args:
        config: everything.
        run: the run folder; None takes `train.run`, or a new one.

    Raises:
        ValueError: something the user asked for cannot be; one line each.
        TrainingError: the job failed; the text is that of the rank that did.
    """
    place = placed()
    joins = place is not None and place.num_ranks > 1
    if not joins:
        _require(config, config.plan.num_ranks, local=True)
        run = run or Path(config.train.run or RunFolder.new_path())
        if config.plan.num_ranks == 1 and config.train.restarts == 0:
            return _train(config, run, Placement())
    grace = GRACE + int(config.checkpoint.patience)
    work = partial(_train, config, run)
    outcome = on_ranks(
        work,
        config.plan.num_ranks,
        restarts=config.train.restarts,
        grace=grace,
        folder=run,
        offload=disks.folders_of(config.plan),
    )
    if outcome is None:
        assert run is not None
        return Outcome(run, 0, finished=False)
    return outcome


def _require(config: Config, num_ranks: int, local: bool) -> None:
    """Finds what cannot be before the corpus is read."""
    config.require(num_ranks=num_ranks)
    disks.require(config, config.plan, local)


def _train(config: Config, run: Path | None, place: Placement) -> Outcome:
    local = place.num_ranks == int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    _require(config, place.num_ranks, local)
    trainer = job.build(config, run, place)
    if place.restart:
        trainer.display.warn(f"the ranks were started again ({place.restart} of {config.train.restarts} times)")
    outcome = trainer.fit()
    trainer.parallel.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if outcome.finished and config.log.sample and place.rank == 0:
        generate.show(outcome.run, config.log.prompt, num_tokens=config.log.sample)
    return outcome


def on_ranks(
    work: Callable[[Placement], T],
    num_ranks: int,
    *,
    restarts: int = 0,
    grace: int = GRACE,
    folder: Path | None = None,
    offload: Mapping[str, Path] | None = None,
) -> T | None:
    """Runs `work(place)` on every rank, in processes that torchrun's agent starts on this machine.

    Under torchrun or Slurm this process is one of the ranks, and runs `work` itself. SIGINT and SIGTERM reach the
    workers as SIGINT.

    Args:
        work: picklable; connects its place itself.
        num_ranks: how many to start.
        restarts: times they are started again after one has failed.
        grace: seconds they get after SIGINT.
        folder: where a rank that fails leaves its traceback, once the folder is there.
        offload: by key of `plan.offload`, folders with files that ranks map, to be named where one ends a rank.

    Returns:
        rank 0's result, or under torchrun or Slurm this rank's; None where a signal ended the work before its result.

    Raises:
        ValueError: a rank found that something the user asked for cannot be.
        JobFailed: a rank failed; the text is its own error, told once. Where this process is a rank, it ends instead.
    """
    place = placed()
    if place is not None and place.num_ranks > 1:
        return _as_rank(work, place, folder)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name, _environment(num_ranks), _signals():
        order = Order(work, os.getpid(), Path(name) / "result", folder)
        (Path(name) / "order").write_bytes(pickle.dumps(order))
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id="shardwise",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=restarts,
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(name) / "logs")),
            signals_to_handle="SIGINT",
            shutdown_timeout=grace,
        )
        try:
            # -P: the folder of the worker's file is no place to import from.
            elastic_launch(settings, sys.executable)("-P", worker.__file__, str(Path(name) / "order"))
        except ChildFailedError as error:
            fault = faults.cause(error.failures, offload)
            if fault.asked:
                raise ValueError(fault.line) from None
            raise JobFailed(fault.text) from None
        except SignalException:
            if not order.result.exists():
                return None
        result: T = pickle.loads(order.result.read_bytes())
        return result


def run_rank(order: Order) -> NoReturn:
    """Runs one rank that `on_ranks` started, to the end of its process."""
    place = placed()
    assert place is not None
    result = _as_rank(order.work, replace(place, launched=True), order.folder)
    if place.rank == 0:
        order.result.write_bytes(pickle.dumps(result))
    _exit(0)


def _as_rank(work: Callable[[Placement], T], place: Placement, folder: Path | None) -> T:
    """Runs one rank. After a failure the first to fail tells the user, and each ends without waiting for others."""
    try:
        return work(place)
    except KeyboardInterrupt:
        _exit(130)
    except Exception as error:
        fault = faults.fault_of(error, place.rank)
        faults.leave_record(fault, folder)
        if not place.launched and place.first_to_fail() and not (faults.agent_reports() and fault.kind == "bug"):
            print(f"error: {fault.text}", file=sys.stderr)
        _exit(2 if fault.asked else 1)


def _exit(status: int) -> NoReturn:
    """Ends the process now: what ends in order may wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def _environment(num_ranks: int) -> Iterator[None]:
    """What the workers inherit, and silence of the agent, which says with several lines what we say with one."""
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    wanted = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(num_ranks))),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    if sys.platform == "linux":
        wanted["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Any wish to stop reaches the workers as SIGINT: save and exit. SIGTERM the agent sends when one has failed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT)) for number in numbers}
    before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
