"""Which rank of the job this process is, and how the ranks find each other: by torchrun, Slurm, or our launcher."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Slurm gives no port. Jobs on one node must not meet, so it follows from the job's number.
FIRST_PORT, NUM_PORTS = 20000, 20000


@dataclass
class Placement:
    """A process of the job.

    Args:
        rank, num_ranks: in the whole job.
        local_rank: on this machine.
        launched: `shardwise train` started this process.
        restart: how many times the job's ranks were started again.
    """

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    launched: bool = False
    restart: int = 0
    _store: dist.Store | None = field(default=None, repr=False)

    def connect(self, device_type: str, timeout: float) -> None:
        """Initialises torch.distributed, with a timeout in seconds, and takes this rank's device."""
        if device_type != "cpu":
            torch.accelerator.set_device_index(self.local_rank)
        if self.num_ranks == 1 or dist.is_initialized():
            return
        wait = timedelta(seconds=timeout)
        self._store, rank, num_ranks = next(dist.rendezvous("env://", timeout=wait))
        # The agent keeps its store when it starts the ranks again, and with it what the last ones left there.
        self._store = dist.PrefixStore(f"shardwise-{self.restart}", self._store)
        backend = "gloo" if device_type == "cpu" else None
        dist.init_process_group(backend, store=self._store, rank=rank, world_size=num_ranks, timeout=wait)

    def first_to_fail(self) -> bool:
        """Whether no other rank has asked this before."""
        if self._store is None:
            return self.rank == 0
        try:
            return self._store.add("shardwise-failures", 1) == 1
        except (RuntimeError, OSError):
            return False  # the rank that held the store is gone, so it failed first


def placed(env: Mapping[str, str] | None = None) -> Placement | None:
    """The place that torchrun's or Slurm's variables give this process; None without them. Sets torchrun's for Slurm.

    Args:
        env: instead of the process's own environment.
    """
    found = os.environ if env is None else env
    if all(name in found for name in TORCHRUN):
        return Placement(
            rank=int(found["RANK"]),
            num_ranks=int(found["WORLD_SIZE"]),
            local_rank=int(found.get("LOCAL_RANK", "0")),
            restart=int(found.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
    # A job step that srun started; a batch script or an interactive shell has variables of this kind, but one task.
    tasks = int(found.get("SLURM_STEP_NUM_TASKS", "1"))
    if "SLURM_PROCID" in found and "SLURM_STEP_ID" in found and tasks > 1:
        place = Placement(int(found["SLURM_PROCID"]), tasks, int(found.get("SLURM_LOCALID", "0")))
        if env is None:
            nodes = found.get("SLURM_STEP_NODELIST") or found["SLURM_JOB_NODELIST"]
            os.environ.setdefault("MASTER_ADDR", first_host(nodes))
            os.environ.setdefault("MASTER_PORT", str(FIRST_PORT + int(found["SLURM_JOB_ID"]) % NUM_PORTS))
            os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(tasks), LOCAL_RANK=str(place.local_rank))
        return place
    return None


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list, as "n[003-005,9],m1"."""
    found = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    host = "".join(part or "" for part in found.groups()) if found else ""
    if not host:
        raise ValueError(f"SLURM_JOB_NODELIST: {nodes!r} names no host; set MASTER_ADDR to the host of rank 0")
    return host
