"""Whether the folders of `plan.offload` can be used and have room, found before anything is read or started."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from shardwise import models, optimizers
from shardwise.config import Config, ConfigError
from shardwise.memory.offload_files import DiskFile, OffloadError
from shardwise.memory.offload_tier import DISK
from shardwise.memory.precision import PRECISIONS
from shardwise.optimizers.optimizer import Fragment
from shardwise.plan import Plan
from shardwise.problems import Problem

# From which ZeRO stage on ranks hold parts of a kind and not all of it.
DIVIDED_FROM = {"optimizer": 1, "master": 1, "gradients": 2, "parameters": 3}


def require(config: Config, plan: Plan, local: bool) -> None:
    """Check where a plan keeps state.

    Args:
        config: of the job.
        plan: the configuration's, as it will run.
        local: whether all ranks are on this machine, so that it is known how much its disks are to hold.

    Raises:
        ConfigError: what cannot be used; one line for each problem.
    """
    problems: list[Problem] = []
    folders = folders_of(plan)
    keys: dict[Path, str] = {}
    for key, folder in folders.items():
        keys.setdefault(folder, key)
    for folder, key in keys.items():
        try:
            DiskFile(folder, key)
        except OffloadError as error:
            reason, _, mend = str(error).removeprefix(f"plan.offload.{key}: ").partition("; ")
            problems.append(Problem(f"plan.offload.{key}", reason, mend))
    if not problems and local:
        problems = _too_small(config, plan, folders)
    if problems:
        raise ConfigError(problems)


def folders_of(plan: Plan) -> dict[str, Path]:
    """By key of `plan.offload`, the folders of what is kept on disk."""
    places = plan.offload.model_dump(exclude_none=True)
    return {key: Path(place.removeprefix(DISK)) for key, place in places.items() if place.startswith(DISK)}


def _too_small(config: Config, plan: Plan, folders: dict[str, Path]) -> list[Problem]:
    by_disk: dict[int, list[str]] = {}
    for key in (key for key in folders if key in DIVIDED_FROM):
        by_disk.setdefault(os.stat(folders[key]).st_dev, []).append(key)
    needed = needs(config, plan) if by_disk else {}
    found = []
    for keys in by_disk.values():
        folder, total = folders[keys[0]], sum(needed[key] for key in keys)
        free = shutil.disk_usage(folder).free
        if total > free:
            verb = "needs" if len(keys) == 1 else "need"
            found.append(
                Problem(
                    f"plan.offload.{keys[0]}",
                    f"{folder}: {' and '.join(keys)} {verb} {total / 1e9:.3g} GB or more, and {free / 1e9:.3g} GB are "
                    "free",
                    "make room, name a folder on another disk, or leave the key out",
                )
            )
    return found


def needs(config: Config, plan: Plan) -> dict[str, int]:
    """Bytes that all ranks together keep of each kind of state, at least: a vocabulary that only the corpus tells is
    counted as 256, and what ranks hold beside their parts as nothing. Activations are not known before they are there.
    """
    formats = PRECISIONS[plan.precision]
    optimizer = optimizers.build(config.optimizer)
    model = models.build(config.model, config.model.vocabulary or 256)
    shared = plan.pipeline > 1 and config.model.tied  # what several stages hold keeps all but its moments in memory
    found = dict.fromkeys(DIVIDED_FROM, 0)
    for name, parameter in model.named_parameters():
        shape, size = tuple(parameter.shape), parameter.numel()
        like = torch.empty(size, dtype=formats.master, device="meta")
        fragment = Fragment(name, shape, 0, size, like, like, decay=len(shape) > 1, global_shape=shape)
        found["optimizer"] += sum(moment.nbytes for moment in optimizer.state(fragment).values())
        found["master"] += size * formats.master.itemsize
        if not (shared and name == "embedding.tokens.weight"):
            found["gradients"] += size * formats.master.itemsize
            found["parameters"] += size * formats.compute.itemsize
    whole = plan.shard * plan.context
    return {
        key: size * plan.replicate * (1 if plan.zero >= DIVIDED_FROM[key] else whole) for key, size in found.items()
    }
