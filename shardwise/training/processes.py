"""Processes of one machine: how many threads each may have, and that none outlives the one that started it."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import signal
import threading
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def num_cores() -> int:
    """Cores this process may use, whatever limits it: the machine, its affinity, or a container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text().split()
        count = min(count, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # no container, or no quota
    return max(1, count)


def threads_per_rank(num_ranks: int) -> int:
    """Threads for each of the ranks that share this machine."""
    return max(1, num_cores() // num_ranks)


def die_with(parent: int) -> None:
    """Ends this process with SIGKILL as soon as its parent is gone, however that ended.

    Args:
        parent: its process id, to see whether it is gone already.
    """
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        return
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
