"""`shardwise doctor`: measures the machine. Half a minute."""

import itertools
import os
import platform
import statistics
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shardwise import collectives, kernels
from shardwise.choices import VARIANTS, Choices, Measured
from shardwise.foresight.hardware import Device, Disk, Hardware
from shardwise.host_memory import HostLink, HostMemory
from shardwise.mesh import Axis, default_device_type
from shardwise.training import launch
from shardwise.training.placement import Placement
from shardwise.training.processes import num_cores

KB, MB = 1 << 10, 1 << 20
FORMATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SECONDS = 0.3  # for each thing that one process measures
DISK_BYTES = 256 * MB
SHARED_BYTES = 64 * MB
# By format, the sizes that collectives are measured with, and how often.
SIZES = {
    torch.float32: ((4 * KB, 20), (256 * KB, 20), (MB, 10), (16 * MB, 4), (64 * MB, 3)),
    torch.bfloat16: ((4 * KB, 20), (MB, 10), (16 * MB, 3)),
    torch.float16: ((4 * KB, 20), (MB, 10), (16 * MB, 3)),
}
NUM_RANKS = 2


def measure(disk: Path | None, tell: Callable[[str], None], sizes: Any = None) -> Hardware:
    """Measure this machine.

    Args:
        disk: the folder whose disk to measure; None leaves it out.
        tell: is told what is being measured.
        sizes: instead of `SIZES`.

    Raises:
        ValueError: a folder that cannot be used, or ranks that cannot be started; one line.
    """
    backends = [
        name
        for name, there in (
            ("gloo", dist.is_gloo_available()),
            ("nccl", dist.is_nccl_available()),
            ("mpi", dist.is_mpi_available()),
            ("xccl", dist.is_xccl_available()),
        )
        if there
    ]
    found_disk = None
    if disk is not None:
        tell(f"disk of {disk}")
        found_disk = measure_disk(disk)
    devices = []
    for kind in dict.fromkeys(("cpu", default_device_type())):
        tell(f"matrix products and copies on {kind}")
        devices.append(_device(torch.device(kind)))
    tell(f"{NUM_RANKS} ranks")
    between = launch.on_ranks(partial(_between_ranks, sizes or SIZES), NUM_RANKS, grace=10)
    if between is None:
        raise KeyboardInterrupt
    shared, table = between
    return Hardware(
        date=time.strftime("%Y-%m-%d"),
        torch=torch.__version__,
        cores=num_cores(),
        backends=tuple(backends),
        devices=tuple(devices),
        shared_memory=shared,
        disk=found_disk,
        collectives=tuple(table),
    )


def _device(device: torch.device) -> Device:
    on_cpu = device.type == "cpu"
    size = 1024 if on_cpu else 8192
    flops = {}
    for dtype in FORMATS:
        try:
            # A format without instructions takes long: half the size in each direction is an eighth of the work.
            side = size if not on_cpu or dtype.itemsize >= 4 or kernels.native(dtype) else size // 4
            a = torch.ones(side, side, dtype=dtype, device=device)
            out = torch.empty_like(a)
            seconds = _best(device, partial(torch.mm, a, a, out=out))
            flops[_name(dtype)] = 2 * side**3 / seconds
        except RuntimeError:  # not every device has every format
            continue
    source = torch.ones((64 * MB if on_cpu else 1024 * MB) // 4, device=device)
    target = torch.empty_like(source)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = _best(device, lambda: target.copy_(source))
    torch.set_num_threads(threads)
    copied = source.numel() * source.element_size() / seconds
    if on_cpu:
        return Device(kind="cpu", name=_processor(), memory=_memory(), flops=flops, copy_bandwidth=copied)
    memory = int(torch.accelerator.get_memory_info(device)[1])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Device(kind=device.type, name=name, memory=memory, flops=flops, copy_bandwidth=copied)


def _best(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of the quickest of several runs."""
    best, until = float("inf"), time.perf_counter() + SECONDS
    work()
    while best == float("inf") or time.perf_counter() < until:
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory() -> int:
    """Bytes this process may use: the machine's, or the container's if that has less."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(found, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return found


def measure_disk(folder: Path, num_bytes: int = DISK_BYTES) -> Disk:
    """Write a file and read it again, past the kernel's cache where the system can be told to.

    Raises:
        ValueError: the folder cannot be written to.
    """
    path = folder / f".shardwise-doctor-{uuid.uuid4().hex}"
    block = os.urandom(MB)
    try:
        with open(path, "wb", buffering=0) as file:
            start = time.perf_counter()
            for _ in range(num_bytes // MB):
                file.write(block)
            os.fsync(file.fileno())
            write = num_bytes / (time.perf_counter() - start)
        with open(path, "rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            while file.read(MB):
                pass
            read = num_bytes / (time.perf_counter() - start)
    except OSError as error:
        raise ValueError(f"--disk {folder}: {error.strerror}; give a folder that can be written to") from None
    finally:
        path.unlink(missing_ok=True)
    return Disk(folder=str(folder.resolve()), write=write, read=read)


def _between_ranks(sizes: Any, place: Placement) -> tuple[float | None, list[Measured]]:
    """One rank's part: shared memory's bandwidth, and the table of collectives."""
    torch.set_num_threads(1)
    place.connect("cpu", 60.0)
    ranks = tuple(range(place.num_ranks))
    axis = Axis("doctor", place.rank, place.num_ranks, ranks, dist.group.WORLD)
    shared = _shared_memory(axis)
    table = _table(sizes, axis, torch.device("cpu"), "gloo")
    kind = default_device_type()
    if kind == "cuda" and dist.is_nccl_available() and torch.accelerator.device_count() >= place.num_ranks:
        torch.accelerator.set_device_index(place.local_rank)
        group = dist.new_group(backend="nccl")
        device = torch.device(kind, place.local_rank)
        table += _table(sizes, Axis("doctor", place.rank, place.num_ranks, ranks, group), device, "nccl")
    return shared, table


def _shared_memory(axis: Axis) -> float | None:
    link = HostLink.connect(axis)
    if link is None:
        return None
    memory = HostMemory(link, SHARED_BYTES, torch.uint8)
    memory.mine.fill_(axis.rank)
    target = torch.empty(SHARED_BYTES, dtype=torch.uint8)
    best = float("inf")
    for _ in range(5):
        link.wait_for_all()
        start = time.perf_counter()
        target.copy_(memory.tensors[(axis.rank + 1) % axis.size])
        best = min(best, time.perf_counter() - start)
    link.wait_for_all()
    link.close()
    return float(SHARED_BYTES / max(collectives.all_gather_object(best, axis)))


def _table(sizes: Any, axis: Axis, device: torch.device, backend: str) -> list[Measured]:
    """What every variant of every collective takes, in turn."""
    found: list[Measured] = []
    for dtype, rows in sizes.items():
        for num_bytes, repeats in rows:
            for collective in ("reduce_scatter", "all_gather", "all_reduce"):  # the last is put together from the first
                tensor = torch.ones(num_bytes // dtype.itemsize, dtype=dtype, device=device)
                name = _name(dtype)
                times: dict[str, list[float]] = {variant: [] for variant in VARIANTS[collective]}
                for repeat in range(repeats + 1):
                    for variant in times:
                        only = Measured(backend, collective, name, num_bytes, {variant: 0.0})
                        took = _seconds(collective, tensor, _choosing(axis, [only, *found]))
                        if repeat:
                            times[variant].append(took)
                mine = {variant: statistics.median(taken) * 1e3 for variant, taken in times.items()}
                everyone = collectives.all_gather_object(mine, axis)
                milliseconds = {variant: round(max(other[variant] for other in everyone), 4) for variant in times}
                found.append(Measured(backend, collective, name, num_bytes, milliseconds))
    return found


def _choosing(axis: Axis, table: list[Measured]) -> Axis:
    return Axis(axis.name, axis.rank, axis.size, axis.ranks, axis.group, Choices(table))


def _seconds(collective: str, tensor: Tensor, axis: Axis) -> float:
    dist.barrier()
    start = time.perf_counter()
    if collective == "all_reduce":
        collectives.all_reduce(tensor, axis)
    elif collective == "reduce_scatter":
        collectives.reduce_scatter(tensor, axis)
    else:
        collectives.all_gather(tensor.view(axis.size, -1)[axis.rank], tensor, axis)
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize(tensor.device)
    return time.perf_counter() - start


# Words


def show(found: Hardware, console: Console) -> None:
    """The measurements as tables."""
    console.print(
        f"{found.date}, torch {found.torch}, {found.cores} cores, backends {', '.join(found.backends)}", highlight=False
    )
    devices = found.devices
    table = _columns("Devices", "", *(device.name for device in devices))
    table.add_row("memory, GB", *(f"{device.memory / 1e9:.1f}" for device in devices))
    for dtype in FORMATS:
        name = _name(dtype)
        speeds = (f"{device.flops[name] / 1e9:.1f}" if name in device.flops else "-" for device in devices)
        table.add_row(f"{name}, GFLOP/s", *speeds)
    table.add_row("copy, GB/s", *(f"{device.copy_bandwidth / 1e9:.1f}" for device in devices))
    console.print(table)
    table = _columns("Between", "what", "GB/s")
    shared = "none" if found.shared_memory is None else f"{found.shared_memory / 1e9:.2f}"
    table.add_row("shared memory, read by a rank", shared)
    if found.disk is not None:
        table.add_row(f"disk of {found.disk.folder}, written", f"{found.disk.write / 1e9:.2f}")
        table.add_row(f"disk of {found.disk.folder}, read", f"{found.disk.read / 1e9:.2f}")
    console.print(table)
    rows = sorted(found.collectives, key=lambda row: (row.backend, row.collective, row.dtype, row.num_bytes))
    for (backend, collective), group in itertools.groupby(rows, key=lambda row: (row.backend, row.collective)):
        several = list(group)
        ways = list(several[0].milliseconds)
        title = f"{collective} between {NUM_RANKS} ranks by {backend}, ms by how it is made"
        table = _columns(title, "format", "KB", *ways, "quickest")
        for row in several:
            times = (f"{row.milliseconds[way]:.2f}" if way in row.milliseconds else "-" for way in ways)
            table.add_row(row.dtype, f"{row.num_bytes / KB:.0f}", *times, row.fastest)
        console.print(table)
    for note in notes(found):
        console.print(note, style="yellow", highlight=False)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _columns(title: str, *names: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(
            name, justify="left" if name in ("", "what", "format", "quickest") else "right", overflow="fold"
        )
    return table


def notes(found: Hardware) -> list[str]:
    """What a user should know of the machine, a line each."""
    said = []
    cpu = found.devices[0]
    for name in ("bfloat16", "float16"):
        if cpu.flops.get(name, 0.0) * 2 < cpu.flops.get("float32", 0.0):
            said.append(
                f"{name} products are slow on this processor: they are multiplied in float32 and kept in 16 bits"
            )
    if found.shared_memory is None:
        said.append("ranks of this machine cannot share memory: sums and gathers pass through sockets")
    return said
