"""Memory on disk: ranges of a file without a name, mapped while they are used.

A range that is not mapped costs neither address space nor resident memory; the kernel writes it behind, and keeps what
fits in memory that nobody else wants. Mapping what it has kept costs a tenth of a copy. The file has no name, so
nothing is left of it however a job ends.
"""

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

# What a file gets where there are none without a name; it is unlinked at once, so that one which is still there was
# left by a job that died in between.
PREFIX = "shardwise-offload-"
PAGE = mmap.PAGESIZE
# Map pages, read where they must be, and say what goes wrong; without, touching one that cannot be read ends the
# process (SIGBUS). Linux 5.14.
POPULATE = 23
# Bytes that are freed between two looks at what the allocator of CPU memory could give back.
TRIM = 1 << 26

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class OffloadError(OSError):
    """A disk that does not do what `plan.offload` asks of it: one line with the key, the path and the mend."""


class DiskFile:
    """A file without a name that grows as ranges of it are taken.

    Args:
        folder: where; made if its parent is there.
        key: which key of `plan.offload` asks for it.

    Raises:
        OffloadError: the folder cannot be used.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        self.size = 0
        try:
            folder.mkdir(exist_ok=True)
            for left in folder.glob(f"{PREFIX}*"):
                left.unlink(missing_ok=True)
            self._file = _unnamed(folder)
        except OSError as error:
            there = folder.parent.is_dir()
            what = f"it cannot be written ({error.strerror})" if there else f"there is no folder {folder.parent}"
            raise self._error(what, f"{'' if there else 'make it, '}name a folder on a disk") from None
        self._free: dict[int, list[int]] = {}  # by size, offsets of ranges that were given back

    def take(self, num_bytes: int) -> int:
        """The offset of a range of its own, a multiple of the page size; zeros, or what a range given back held.

        Raises:
            OffloadError: the disk is full.
        """
        length = _pages(num_bytes)
        free = self._free.get(length)
        if free:
            return free.pop()
        offset = self.size
        try:
            # Now, since a page that the disk has no room for would end the process when it is touched.
            os.posix_fallocate(self._file, offset, max(PAGE, length))
        except OSError as error:
            needed, left = length / 1e9, shutil.disk_usage(self.folder).free / 1e9 if self.folder.exists() else 0.0
            room = f" ({needed:.3g} GB more are needed, {left:.3g} GB are free)" if error.errno == errno.ENOSPC else ""
            raise self._error(f"{error.strerror}{room}", "make room, name a folder on another disk") from None
        self.size = offset + length
        return offset

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Let another have the range."""
        self._free.setdefault(_pages(num_bytes), []).append(offset)

    def map(self, offset: int, num_bytes: int, owner: object = None) -> Tensor:
        """Bytes of the file, (num_bytes,), as memory that is the file's for as long as anything refers to it; so long
        `owner` lives too.

        Raises:
            OffloadError: the file has become too short, or there is no address space left.
        """
        within = offset % PAGE
        try:
            memory = mmap.mmap(self._file, within + num_bytes, offset=offset - within)
        except ValueError:
            size = os.fstat(self._file).st_size
            raise self._error(
                f"the file was cut to {size} bytes of {self.size} while it was in use",
                "keep other programs off it, continue from the last checkpoint",
            ) from None
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise MemoryError(f"{num_bytes} bytes of {self.folder} cannot be mapped") from None
            raise self._error(f"{error.strerror}", "check the disk") from None
        if owner is not None:
            weakref.finalize(memory, _nothing, owner).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8, offset=within, count=num_bytes)

    def populate(self, memory: Tensor) -> None:
        """Have all of what `map` gave in memory; other threads go on meanwhile.

        Raises:
            OffloadError: it cannot be read.
        """
        start = memory.data_ptr() // PAGE * PAGE
        if _libc.madvise(start, memory.data_ptr() + memory.numel() - start, POPULATE) == 0:
            return
        error = ctypes.get_errno()
        if error == errno.EFAULT:
            raise self._error("what was written there cannot be read", "check the disk, continue from a checkpoint")
        # An older kernel: pages come as they are touched.

    def _error(self, what: str, mend: str) -> OffloadError:
        return OffloadError(f"plan.offload.{self.key}: {self.folder}: {what}; {mend}, or leave the key out")

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


def _nothing(owner: object) -> None:
    pass


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def _unnamed(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT) or not folder.is_dir():
            raise
    file, path = tempfile.mkstemp(prefix=PREFIX, dir=folder)
    os.unlink(path)
    return file


_freed = 0


def trim(device: torch.device, num_bytes: int) -> None:
    """Give what was freed back to the machine, once it is worth a look: the allocator of CPU memory keeps holes that
    the tensors to come do not fit into."""
    global _freed
    _freed += num_bytes
    if device.type == "cpu" and _freed > TRIM and hasattr(_libc, "malloc_trim"):
        _freed = 0
        _libc.malloc_trim(0)
