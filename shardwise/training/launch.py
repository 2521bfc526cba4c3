"""Starts the ranks of a plan on this machine, or joins them where torchrun or Slurm has started them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.config import Config
from shardwise.training import faults, generate, job, worker
from shardwise.training.evaluation import Evaluation
from shardwise.training.faults import JobFailed
from shardwise.training.placement import Placement, placed
from shardwise.training.processes import threads_per_rank
from shardwise.training.progress import Outcome
from shardwise.training.run_folder import RunFolder
from shardwise.training.trainer import Trainer

# Seconds that ranks get, beside `checkpoint.patience`, to end a step and save when they are asked to stop.
GRACE = 600


@dataclass(frozen=True)
class Order:
    """What the launcher tells its workers."""

    config: Config
    run: Path
    parent: int
    outcome: Path


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
    if place is not None and place.num_ranks > 1:
        return _as_rank(config, run, place)
    config.require(num_ranks=config.plan.num_ranks)
    if config.plan.num_ranks == 1 and config.train.restarts == 0:
        return _work(config, run, Placement())
    return _start(config, run or Path(config.train.run or RunFolder.new_path()))


def _work(config: Config, run: Path | None, place: Placement) -> Outcome:
    trainer = job.build(config, run, place)
    if place.restart:
        trainer.display.warn(f"the ranks were started again ({place.restart} of {config.train.restarts} times)")
    outcome = trainer.fit()
    _close(trainer)
    if outcome.finished and config.log.sample and place.rank == 0:
        generate.show(outcome.run, config.log.prompt, num_tokens=config.log.sample)
    return outcome


def _close(trainer: Trainer) -> None:
    trainer.parallel.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _as_rank(config: Config, run: Path | None, place: Placement) -> Outcome:
    """Runs one rank. After a failure the first to fail tells the user, and each ends without waiting for others."""
    try:
        config.require(num_ranks=place.num_ranks)
        return _work(config, run, place)
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:
        fault = faults.fault_of(error, place.rank)
        faults.leave_record(fault, run)
        if not place.launched and place.first_to_fail() and not (faults.agent_reports() and fault.kind == "bug"):
            print(f"error: {fault.text}", file=sys.stderr)
        _exit(2 if fault.asked else 1)


def _exit(status: int) -> NoReturn:
    """Ends the process now: what ends in order may wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_rank(order: Order) -> NoReturn:
    """Runs one rank that the launcher started, to the end of its process."""
    place = placed()
    assert place is not None
    outcome = _as_rank(order.config, order.run, replace(place, launched=True))
    if place.rank == 0:
        facts = {**asdict(outcome), "run": str(outcome.run)}
        order.outcome.write_text(json.dumps(facts))
    _exit(0)


def _start(config: Config, run: Path) -> Outcome:
    num_ranks = config.plan.num_ranks
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name, _environment(num_ranks), _signals():
        folder = Path(name)
        order = Order(config, run, os.getpid(), folder / "outcome.json")
        (folder / "order").write_bytes(pickle.dumps(order))
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id="shardwise",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=config.train.restarts,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
            signals_to_handle="SIGINT",
            shutdown_timeout=GRACE + int(config.checkpoint.patience),
        )
        # -P: the folder of the worker's file is no place to import from.
        command = ("-P", worker.__file__, str(folder / "order"))
        try:
            elastic_launch(settings, sys.executable)(*command)
        except ChildFailedError as error:
            fault = faults.cause(error.failures)
            if fault.asked:
                raise ValueError(fault.line) from None
            raise JobFailed(fault.text) from None
        except SignalException:
            if not order.outcome.exists():
                return Outcome(run, 0, finished=False)
        return _read(order.outcome)


def _read(path: Path) -> Outcome:
    facts: dict[str, Any] = json.loads(path.read_text())
    found = facts["evaluation"]
    return Outcome(**{**facts, "run": Path(facts["run"]), "evaluation": Evaluation(**found) if found else None})


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
