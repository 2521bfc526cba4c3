"""Which of several equivalent collectives a backend is quickest with, by a measurement.

`shardwise doctor` measures them and leaves a table in the hardware file; without one the shipped table counts. All
ranks of a job go by rank 0's.
"""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

# Ways to the same result. The first is the backend's own. The sum of "all_to_all" is made here, after an exchange.
VARIANTS = {
    "all_reduce": ("all_reduce", "divided"),  # a divided sum and a gather, by the choices for these
    "reduce_scatter": ("reduce_scatter", "all_to_all", "all_reduce"),
    "all_gather": ("all_gather", "broadcast"),
}


@dataclass(frozen=True)
class Measured:
    """What one collective took.

    Args:
        backend: "gloo" or "nccl".
        collective: a key of `VARIANTS`.
        dtype: "float32".
        num_bytes: of the whole tensor.
        milliseconds: by variant, the slowest rank's.
    """

    backend: str
    collective: str
    dtype: str
    num_bytes: int
    milliseconds: dict[str, float]

    @property
    def fastest(self) -> str:
        return min(self.milliseconds, key=self.milliseconds.__getitem__)

    @staticmethod
    def of(data: Any) -> "Measured":
        """From a hardware file's data.

        Raises:
            ValueError: it is something else.
        """
        try:
            found = Measured(**data)
            times = found.milliseconds
            known = set(times) <= set(VARIANTS[found.collective]) and all(float(time) >= 0 for time in times.values())
            if known and times and int(found.num_bytes) > 0:
                return found
        except (TypeError, KeyError, ValueError, AttributeError):
            pass
        raise ValueError(f"{data!r} is no measured collective")


class Choices:
    """Picks variants from a table."""

    def __init__(self, table: Iterable[Measured]) -> None:
        self.table = tuple(table)

    @cached_property
    def _by_kind(self) -> dict[tuple[str, str, str], list[Measured]]:
        found: dict[tuple[str, str, str], list[Measured]] = {}
        for measured in self.table:
            found.setdefault((measured.backend, measured.collective, measured.dtype), []).append(measured)
        return found

    def pick(self, backend: str, collective: str, dtype: torch.dtype, num_bytes: int) -> str:
        """The variant that was quickest at the nearest size measured, in this format or else in float32; the backend's
        own where nothing was."""
        name = str(dtype).removeprefix("torch.")
        rows = self._by_kind.get((backend, collective, name)) or self._by_kind.get((backend, collective, "float32"))
        if not rows:
            return VARIANTS[collective][0]
        size = math.log(max(1, num_bytes))
        return min(rows, key=lambda row: abs(math.log(row.num_bytes) - size)).fastest


def hardware_file() -> Path:
    """Where the hardware file is looked for: in the user's cache folder, as prepared corpora are."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "shardwise" / "hardware.json"


def load(path: Path | None = None) -> Choices:
    """The table of a hardware file; the shipped one if there is no file.

    Raises:
        ValueError: the file is something else.
    """
    path = path or hardware_file()
    try:
        found = json.loads(path.read_text())
        return Choices([*map(Measured.of, found["collectives"])])
    except FileNotFoundError:
        return SHIPPED
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no hardware file ({reason}); write it anew with `shardwise doctor`") from None


def as_data(table: Iterable[Measured]) -> list[dict[str, Any]]:
    """For a hardware file."""
    return [asdict(measured) for measured in table]


KB, MB = 1 << 10, 1 << 20
# 2026-11-30, two ranks on two cores of an Intel Xeon, torch 2.13.0. nccl, which is not in it, uses its own.
SHIPPED = Choices(
    (
        Measured("gloo", "all_gather", "bfloat16", 4 * KB, {"all_gather": 0.45, "broadcast": 0.53}),
        Measured("gloo", "all_gather", "bfloat16", MB, {"all_gather": 1.2, "broadcast": 0.72}),
        Measured("gloo", "all_gather", "bfloat16", 16 * MB, {"all_gather": 15.3, "broadcast": 5.94}),
        Measured("gloo", "all_gather", "float16", 4 * KB, {"all_gather": 0.37, "broadcast": 0.42}),
        Measured("gloo", "all_gather", "float16", MB, {"all_gather": 1.89, "broadcast": 0.66}),
        Measured("gloo", "all_gather", "float16", 16 * MB, {"all_gather": 17.4, "broadcast": 8.24}),
        Measured("gloo", "all_gather", "float32", 4 * KB, {"all_gather": 0.3, "broadcast": 0.32}),
        Measured("gloo", "all_gather", "float32", MB, {"all_gather": 0.79, "broadcast": 0.56}),
        Measured("gloo", "all_gather", "float32", 16 * MB, {"all_gather": 18.0, "broadcast": 8.07}),
        Measured("gloo", "all_gather", "float32", 64 * MB, {"all_gather": 78.8, "broadcast": 29.1}),
        Measured("gloo", "all_reduce", "bfloat16", 4 * KB, {"all_reduce": 0.43, "divided": 0.9}),
        Measured("gloo", "all_reduce", "bfloat16", MB, {"all_reduce": 1.96, "divided": 2.38}),
        Measured("gloo", "all_reduce", "bfloat16", 16 * MB, {"all_reduce": 14.6, "divided": 25.2}),
        Measured("gloo", "all_reduce", "float16", 4 * KB, {"all_reduce": 0.42, "divided": 0.73}),
        Measured("gloo", "all_reduce", "float16", MB, {"all_reduce": 3.13, "divided": 2.67}),
        Measured("gloo", "all_reduce", "float16", 16 * MB, {"all_reduce": 28.2, "divided": 35.6}),
        Measured("gloo", "all_reduce", "float32", 4 * KB, {"all_reduce": 0.35, "divided": 0.62}),
        Measured("gloo", "all_reduce", "float32", MB, {"all_reduce": 1.56, "divided": 2.03}),
        Measured("gloo", "all_reduce", "float32", 16 * MB, {"all_reduce": 16.4, "divided": 20.2}),
        Measured("gloo", "all_reduce", "float32", 64 * MB, {"all_reduce": 59.5, "divided": 83.1}),
        Measured(
            "gloo",
            "reduce_scatter",
            "bfloat16",
            4 * KB,
            {"reduce_scatter": 0.48, "all_to_all": 0.34, "all_reduce": 0.45},
        ),
        Measured(
            "gloo", "reduce_scatter", "bfloat16", MB, {"reduce_scatter": 2.16, "all_to_all": 1.71, "all_reduce": 1.62}
        ),
        Measured(
            "gloo",
            "reduce_scatter",
            "bfloat16",
            16 * MB,
            {"reduce_scatter": 31.0, "all_to_all": 21.3, "all_reduce": 15.6},
        ),
        Measured(
            "gloo",
            "reduce_scatter",
            "float16",
            4 * KB,
            {"reduce_scatter": 0.52, "all_to_all": 0.47, "all_reduce": 0.47},
        ),
        Measured(
            "gloo", "reduce_scatter", "float16", MB, {"reduce_scatter": 3.0, "all_to_all": 2.04, "all_reduce": 3.52}
        ),
        Measured(
            "gloo",
            "reduce_scatter",
            "float16",
            16 * MB,
            {"reduce_scatter": 36.9, "all_to_all": 28.0, "all_reduce": 30.8},
        ),
        Measured(
            "gloo", "reduce_scatter", "float32", 4 * KB, {"reduce_scatter": 0.49, "all_to_all": 0.33, "all_reduce": 0.4}
        ),
        Measured(
            "gloo", "reduce_scatter", "float32", MB, {"reduce_scatter": 3.8, "all_to_all": 1.31, "all_reduce": 3.82}
        ),
        Measured(
            "gloo",
            "reduce_scatter",
            "float32",
            16 * MB,
            {"reduce_scatter": 21.2, "all_to_all": 18.7, "all_reduce": 14.7},
        ),
        Measured(
            "gloo",
            "reduce_scatter",
            "float32",
            64 * MB,
            {"reduce_scatter": 110.6, "all_to_all": 87.4, "all_reduce": 52.3},
        ),
    )
)
