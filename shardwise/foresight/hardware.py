"""What a machine can do, as `shardwise doctor` measured it: the hardware file.

JSON at `shardwise.choices.hardware_file()`, in the user's cache folder.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from shardwise.choices import Measured, as_data, hardware_file


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Device(_Part):
    """Something that computes.

    Attributes:
        kind: torch's name, "cpu" or "cuda".
        name: of the model.
        memory: bytes.
        flops: by number format, FLOP/s of one matrix product, on a CPU with all its cores.
        copy_bandwidth: bytes copied in its own memory per second, on a CPU by one thread.
    """

    kind: str
    name: str
    memory: int
    flops: dict[str, float]
    copy_bandwidth: float


class Disk(_Part):
    """A folder's file system: bytes per second of one file, written to the device and read from it again."""

    folder: str
    write: float
    read: float


class Hardware(_Part):
    """One machine.

    Attributes:
        date: of the measurement.
        torch: its version.
        cores: that a process may use.
        backends: of torch.distributed.
        devices: the CPU first.
        shared_memory: bytes per second that one rank reads of another's memory; None where ranks cannot share it.
        disk: the disk, if it was measured.
        collectives: what collectives between two ranks of this machine take, by variant.
    """

    date: str
    torch: str
    cores: int
    backends: tuple[str, ...]
    devices: tuple[Device, ...]
    shared_memory: float | None
    disk: Disk | None
    collectives: tuple[Measured, ...]

    @field_validator("collectives", mode="before")
    @classmethod
    def _measured(cls, value: Any) -> Any:
        return tuple(one if isinstance(one, Measured) else Measured.of(one) for one in value)

    def to_json(self) -> str:
        """As the file has it."""
        data = self.model_dump(exclude={"collectives"}) | {"collectives": as_data(self.collectives)}
        return json.dumps(data, indent=1)

    def save(self, path: Path) -> None:
        """Write the file; its folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json() + "\n")


def load(path: Path | None = None) -> Hardware:
    """Read a hardware file, by default the user's.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is something else.
    """
    path = path or hardware_file()
    try:
        return Hardware(**json.loads(path.read_text()))
    except (ValidationError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is no hardware file ({reason}); write it anew with `shardwise doctor`") from None
