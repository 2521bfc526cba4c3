"""Kills ranks of a training job at random moments and compares what comes of it with a run that was left alone.

    python -m tests.training.crash --kills 20 [--offload]

The job resumes by itself: its launcher starts the ranks again (`--restarts`), or the same command is given again.
"""

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardwise.config import Config
from shardwise.corpus import DataConfig
from shardwise.models import ModelConfig
from shardwise.plan import Plan
from shardwise.training import checkpoints, launch, metrics, storage
from shardwise.training.config import CheckpointConfig, LogConfig, TrainConfig
from shardwise.training.faults import JobFailed
from shardwise.training.ranks import Ranks

TIMES = ("seconds", "tokens_per_second", "utilisation", "seconds_left", "offload_hidden", "offload_waited")


def small_job(
    folder: Path, steps: int, restarts: int, schedule: Literal["cosine", "constant"] = "cosine", **plan: Any
) -> Config:
    """A job of quick steps with dropout, a checkpoint every third one, on the source of this package."""
    return Config(
        model=ModelConfig(layers=2, hidden=32, heads=2, sequence=32, dropout=0.1),
        data=DataConfig(
            source=str(Path(launch.__file__).parent / "*.py"),
            tokenizer="bytes",
            sequence=32,
            batch=4,
            held_out=0.2,
            cache=str(folder / "cache"),
        ),
        plan=Plan(**(plan or {"replicate": 2})),
        train=TrainConfig(
            steps=steps, schedule=schedule, warmup=5, eval_every=0, eval_batches=2, restarts=restarts, device="cpu"
        ),
        checkpoint=CheckpointConfig(every=3, keep=2),
        log=LogConfig(every=1, tensorboard=False, peak_tflops=1.0),
    )


def workers() -> dict[int, int]:
    """Rank -> process id of the workers that this process has started."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"worker.py" in (entry / "cmdline").read_bytes():
                variables = (entry / "environ").read_bytes().split(b"\0")
                rank = next(part for part in variables if part.startswith(b"RANK="))
                found[int(rank[len(b"RANK=") :])] = int(entry.name)
        except (OSError, ValueError, StopIteration):
            continue  # it ended meanwhile
    return found


@dataclass
class Killer:
    """Kills `kills` ranks from a thread, each once the run has got further, about half while a checkpoint is written.

    Afterwards it calls `then`.
    """

    run: Path
    kills: int
    random: random.Random
    then: Callable[[], None] = lambda: None
    killed: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Killer":
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        seen = -1
        while len(self.killed) < self.kills and not self._over.is_set():
            time.sleep(0.02)
            step, running = self._step(), workers()
            if step <= seen or len(running) < 2:
                continue
            mid_save = self.random.random() < 0.5
            time.sleep(self.random.uniform(0, 0.3))
            while mid_save and not self._saving() and not self._over.is_set():
                pass
            if mid_save:
                time.sleep(self.random.uniform(0, 0.01))
            rank = self.random.choice(sorted(running))
            try:
                os.kill(running[rank], signal.SIGKILL)
            except ProcessLookupError:
                continue
            seen = self._step()
            self.killed.append(f"rank {rank} near step {seen}" + (", mid-save" if self._saving() else ""))
        while not self._over.is_set() and (self._step() <= seen or len(workers()) < 2):
            time.sleep(0.02)
        if not self._over.is_set():
            self.then()

    def _step(self) -> int:
        return max((row["step"] for row in metrics.read(self.run / "metrics.jsonl")), default=-1)

    def _saving(self) -> bool:
        return any((self.run / "checkpoints").glob("step-*.part"))


def train_to_the_end(config: Config, run: Path) -> int:
    """Trains until the run is finished, giving the command again after every kill; returns how often it was given."""
    for times in range(1, 1000):
        try:
            assert launch.train(config, run).finished
            return times
        except JobFailed as error:
            if not any(sign in str(error) for sign in ("SIGKILL", "lost another rank")):
                raise
    raise AssertionError("the run never finished")


def rows(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics, without times."""
    found = metrics.read(run / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in TIMES} for row in found]


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint."""
    path = checkpoints.find(run, print)
    held = storage.metadata_of(path).state_dict_metadata
    state: dict[str, torch.Tensor] = {}
    for key, found in held.items():
        assert isinstance(found, TensorStorageMetadata)
        state[key] = torch.empty(found.size, dtype=found.properties.dtype)
    storage.load(state, path, Ranks())
    return state


def differences(left: Path, right: Path) -> list[str]:
    """What two finished runs do not have bit for bit in common."""
    here, there = tensors(left), tensors(right)
    found = [key for key in sorted(here.keys() | there.keys()) if not _same(here.get(key), there.get(key))]
    pairs = zip(rows(left), rows(right), strict=False)
    found += [f"metrics of step {a['step']}" for a, b in pairs if a != b]
    if len(rows(left)) != len(rows(right)):
        found.append("number of rows")
    return found


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return left is not None and right is not None and left.dtype == right.dtype and torch.equal(left, right)


def offloaded(folder: Path) -> dict[str, Any]:
    """A plan whose state lives on disk, in `folder`."""
    kinds = ("optimizer", "master", "parameters", "gradients", "activations")
    return {"shard": 2, "zero": 3, "precision": "bf16", "offload": {kind: f"disk:{folder}" for kind in kinds}}


def survive(
    folder: Path, kills: int, steps: int, restarts: int, seed: int, offload: bool = False
) -> tuple[list[str], list[str]]:
    """Runs a job twice, once with kills; returns what was killed, and what differs or was left behind."""
    os.environ["OMP_NUM_THREADS"] = "1"
    plan = offloaded(folder / "state") if offload else {}
    config = small_job(folder, steps, restarts, **plan)
    assert launch.train(config, folder / "whole").finished
    with Killer(folder / "killed", kills, random.Random(seed)) as killer:
        train_to_the_end(config, folder / "killed")
    left = [f"{path} is left" for path in (folder / "state").glob("*")]
    return killer.killed, differences(folder / "whole", folder / "killed") + left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--restarts", type=int, default=0, help="by the launcher, before the command is given again")
    parser.add_argument("--offload", action="store_true", help="with all state on disk")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        killed, found = survive(Path(name), asked.kills, asked.steps, asked.restarts, asked.seed, asked.offload)
    for number, line in enumerate(killed, 1):
        print(f"{number:3d}  {line}")
    if found or len(killed) < asked.kills:
        raise SystemExit(f"seed {asked.seed}: {len(killed)} of {asked.kills} kills; differs in {found}")
    print(f"seed {asked.seed}: {len(killed)} kills, and every row of metrics, parameter and moment is bitwise the same")


if __name__ == "__main__":
    main()
