"""What can go wrong in a job, and how it is told: once, from the rank that caused it, in a line where that says all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from shardwise.training.ranks import Ranks, reason_of

PACKAGE = Path(__file__).parent.parent
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# What a rank meets when another one has gone: the transports have no type of their own for it.
GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "gloo",
    "nccl",
    "socket timeout",
    "is gone:",
    "does not answer on",
)

LESS_MEMORY = (
    'the memory is full: keep state on disk with plan.offload.optimizer = "disk:FOLDER" (then activations, and with '
    "plan.zero = 3 parameters and gradients), divide it between ranks with plan.zero, or set plan.recompute to "
    '"full" or plan.microbatches higher for fewer activations'
)
# What allocators without a type of their own for it say: of CPU memory, of oneDNN, of C++.
FULL = ("can't allocate memory", "could not create a primitive", "std::bad_alloc")


class TrainingError(RuntimeError):
    """Training cannot go on; the text says all that the user needs, without a traceback."""


class JobStopped(TrainingError):
    """One line says why."""


class JobFailed(TrainingError):
    """A rank failed; the text is that rank's own error."""


@dataclass(frozen=True)
class Fault:
    """An error of one rank.

    Args:
        rank: which rank.
        kind: "told" where `line` says all, "peer" where it only follows from another rank's end, "bug" for the rest.
        asked: it is about what the user asked for, not about what happened.
        line: the error in one line.
        traceback: where it was raised.
        time: nanoseconds; a rank that fails because another one did is always later.
    """

    rank: int
    kind: Literal["told", "peer", "bug"]
    asked: bool
    line: str
    traceback: str
    time: int

    @property
    def text(self) -> str:
        """What the user should read."""
        if self.kind == "told":
            return self.line
        if self.kind == "peer":
            return f"rank {self.rank} lost another rank: {self.line}"
        return f"rank {self.rank} failed:\n{self.traceback.rstrip()}"


def fault_of(error: BaseException, rank: int) -> Fault:
    """The fault that an exception, caught just now, is."""
    trace = "".join(traceback.format_exception(error))
    if _out_of_memory(error):
        line = f"rank {rank}: {reason_of(error).splitlines()[0]}; {LESS_MEMORY}"
        return Fault(rank, "told", False, line, trace, time.time_ns())
    kind = _kind(error)
    asked = kind == "told" and isinstance(error, ValueError)
    # What the user asked for, or what stopped the job as a whole, is no rank's own.
    own = kind == "told" and not asked and not isinstance(error, TrainingError)
    whose = f"rank {rank}: " if own else ""
    return Fault(rank, kind, asked, whose + reason_of(error), trace, time.time_ns())


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in FULL)


def _kind(error: BaseException) -> Literal["told", "peer", "bug"]:
    if isinstance(error, TrainingError):
        return "told"
    if isinstance(error, (ValueError, OSError)):
        frames = traceback.extract_tb(error.__traceback__)
        # A ValueError raised by our own code is a message to the user; one from elsewhere is not.
        if frames and PACKAGE in Path(frames[-1].filename).parents:
            return "told"
        if isinstance(error, OSError) and not isinstance(error, ConnectionError):
            return "told"
    if isinstance(error, (dist.DistError, ConnectionError)):
        return "peer"
    if isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in GONE):
        return "peer"
    return "bug"


def leave_record(fault: Fault, folder: Path | None) -> None:
    """Writes a fault where torchrun's agent looks for it, and its traceback into the run folder."""
    where = os.environ.get(ERROR_FILE)
    if where:
        # The agent compares whole seconds, and takes the earliest for the cause.
        seconds = fault.time // 1_000_000_000 + (fault.kind == "peer")
        extra = {"py_callstack": fault.text, "timestamp": str(seconds), "fault": asdict(fault)}
        _write(Path(where), json.dumps({"message": {"message": fault.line, "extraInfo": extra}}))
    if folder is not None and folder.is_dir() and fault.kind == "bug":
        _write(folder / f"error-rank-{fault.rank}.txt", fault.traceback)


def agent_reports() -> bool:
    """Whether an agent of torchrun shows the records of its ranks."""
    return ERROR_FILE in os.environ


def _write(path: Path, text: str) -> None:
    # Whole or not at all: the agent may end this rank in the middle, and fails itself where it reads half a record. A
    # disk that is full must not hide the error that is being reported.
    beside = path.with_name(f"{path.name}.part")
    try:
        beside.write_text(text)
        os.replace(beside, path)
    except OSError:
        return


class Death(Protocol):
    """How a worker ended, as torchrun's agent reports it (`ProcessFailure`)."""

    @property
    def exitcode(self) -> int: ...

    @property
    def error_file_data(self) -> Mapping[str, Any]: ...


def cause(deaths: Mapping[int, Death], folders: Mapping[str, Path] | None = None) -> Fault:
    """The fault that ended a job, of all that its ranks report.

    Args:
        deaths: how each rank ended.
        folders: by key of `plan.offload`, where files lie that ranks had mapped.

    A rank's own error comes first, the earliest of several; then an end by a signal, which leaves no record; then the
    loss of a connection.
    """
    faults = [fault for death in deaths.values() if (fault := _recorded(death))]
    own = [fault for fault in faults if fault.kind != "peer"]
    if own:
        return min(own, key=lambda fault: fault.time)
    # The agent itself ends the other ranks with SIGTERM.
    codes = {rank: death.exitcode for rank, death in sorted(deaths.items())}
    killed = next((rank for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM), None)
    if killed is not None:
        return Fault(killed, "told", False, f"rank {killed}{_ended(-codes[killed], folders or {})}", "", 0)
    if faults:
        return min(faults, key=lambda fault: fault.time)
    rank, code = max(codes.items(), key=lambda item: item[1])
    how = _ended(-code, {}) if code < 0 else f" ended with exit status {code}"
    return Fault(rank, "told", False, f"rank {rank}{how}", "", 0)


def _recorded(death: Death) -> Fault | None:
    message = death.error_file_data.get("message")
    fault = message.get("extraInfo", {}).get("fault") if isinstance(message, Mapping) else None
    return Fault(**fault) if fault else None


def _ended(number: int, folders: Mapping[str, Path]) -> str:
    name = signal.Signals(number).name
    if name == "SIGBUS" and folders:  # the kernel does not say which of the mapped files it was
        keys: dict[Path, list[str]] = {}
        for key, folder in folders.items():
            keys.setdefault(folder, []).append(f"plan.offload.{key}")
        where = "; ".join(f"{' and '.join(several)}: {folder}" for folder, several in keys.items())
        return (
            f": {where}: a file was cut or cannot be read while it is mapped ({name}; else /dev/shm is full); keep "
            "other programs off it, check the disk, continue from the last checkpoint, or leave the key out"
        )
    hints = {"SIGKILL": " (often: the machine had no memory left)", "SIGBUS": " (often: /dev/shm is full)"}
    return f" was ended by {name}{hints.get(name, '')}"


def require_agreement(ranks: Ranks, facts: Mapping[str, Mapping[str, object]]) -> None:
    """Stops unless every rank holds the same facts. Collective.

    Args:
        ranks: those that must agree.
        facts: subject ("config", "model", "data") -> name -> value.

    Raises:
        JobStopped: on every rank, naming the first rank, subject and name that differ from rank 0, with both values.
    """
    mine = {subject: {name: str(value) for name, value in values.items()} for subject, values in facts.items()}
    # A digest each, first: models have thousands of names, and they almost always agree.
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    digests = ranks.gather(digest)
    if len(set(digests)) == 1:
        return
    everyone = ranks.gather(mine)
    first = everyone[0]
    rank = next(rank for rank, other in enumerate(everyone) if other != first)
    for subject in first:
        here, there = first[subject], everyone[rank][subject]
        for name in [*here, *there]:
            if here.get(name) != there.get(name):
                values = f"{here.get(name, 'missing')} on rank 0, {there.get(name, 'missing')} on rank {rank}"
                raise JobStopped(f"the ranks do not hold the same {subject}: {name} is {values}")
    raise AssertionError("digests differ and facts do not")
