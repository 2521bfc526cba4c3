"""One checkpoint folder in the format of torch.distributed.checkpoint: planned, copied, written, checked, read.

The state is a flat mapping from keys to tensors or to objects with torch's `_Checkpointable` protocol, whose pieces may
be disjoint or replicated over the ranks. `manifest.json`, beside torch's files, holds the size and SHA-256 of each.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from shardwise.pieces import Away
from shardwise.training.ranks import Ranks, RanksFailed

State = Mapping[str, Any]

MANIFEST = "manifest.json"
METADATA = ".metadata"
BLOCK = 1 << 22


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, or that does not fit what is to be loaded."""


def _shard(state: State, index: MetadataIndex) -> Tensor:
    held = state[index.fqn]
    tensor = held.__get_tensor_shard__(index) if hasattr(held, "__get_tensor_shard__") else held
    return cast(Tensor, tensor).detach()


def _items(state: State) -> list[WriteItem]:
    """The pieces of the state this rank holds."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state))
    return planner.create_local_plan().items


class _Copies(DefaultSavePlanner):
    """A planner that hands out pieces that were copied before, and brings others one by one."""

    def __init__(self, staged: Staged) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._staged = staged
        self._last: Tensor | None = None
        self._copied = 0

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        staged = self._staged
        # The writer copies what is a part of larger memory, and keeps all copies until the last is written; so it gets
        # copies from here, whose memory is taken back once it asks for the next.
        if self._last is not None:
            self._last.untyped_storage().resize_(0)
            self._last = None
        tensor = staged.tensors[index] if index in staged.tensors else _shard(staged.away, index)
        if index not in staged.tensors or tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = self._last = tensor.clone()
            self._copied += tensor.nbytes
        if self._copied > 8 * BLOCK:  # what was copied lives on in cycles of references
            gc.collect()
            self._copied = 0
        return tensor


@dataclass
class Staged:
    """What one rank writes of a checkpoint: its part of the global plan, and the tensors, which no step touches; or,
    of what is not in memory, where it is: then no step may be taken before it is written."""

    plan: SavePlan
    metadata: Metadata
    tensors: dict[MetadataIndex, Tensor]
    away: dict[str, Away] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        here = sum(tensor.nbytes for tensor in self.tensors.values())
        return here + sum(tensor.nbytes for pieces in self.away.values() for _, tensor in pieces.boxes)


class Stager:
    """Decides which rank writes what of a state, and copies this rank's part to host memory.

    The decision and the copies' memory are kept from one checkpoint to the next, since layouts do not change.

    Args:
        ranks: those that write together.
        copy: whether to copy; else the state must stay as it is until it is written.
    """

    def __init__(self, ranks: Ranks, copy: bool) -> None:
        self._ranks = ranks
        self._copy = copy
        self._items: list[WriteItem] | None = None
        self._planned: tuple[SavePlan, Metadata] | None = None
        self._buffers: dict[MetadataIndex, Tensor] = {}

    def stage(self, state: State) -> Staged:
        """What this rank writes of a state. Collective.

        Raises:
            CheckpointError: the pieces of the ranks do not make up whole tensors.
        """
        items = _items(state)
        if not all(self._ranks.gather(items == self._items)):
            self._planned = self._plan(items)
            self._items = items
        assert self._planned is not None
        plan, metadata = self._planned
        away = {key: held for key, held in state.items() if isinstance(held, Away)}
        tensors = {item.index: _shard(state, item.index) for item in plan.items if item.index.fqn not in away}
        return Staged(plan, metadata, self._copied(tensors) if self._copy else tensors, away)

    def _plan(self, items: list[WriteItem]) -> tuple[SavePlan, Metadata]:
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        # Every rank makes the same global plan from the same local ones: nothing needs to be sent back.
        local_plans = self._ranks.gather(SavePlan(items))
        try:
            plans, metadata = planner.create_global_plan(local_plans)
        except ValueError as error:
            raise CheckpointError(f"the ranks' pieces do not make up whole tensors: {error}") from None
        return plans[self._ranks.rank], metadata

    def _copied(self, tensors: dict[MetadataIndex, Tensor]) -> dict[MetadataIndex, Tensor]:
        buffers: dict[MetadataIndex, Tensor] = {}
        on_device = False
        for index, tensor in tensors.items():
            held = self._buffers.get(index)
            if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
                held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
            on_device |= tensor.device.type != "cpu"
            buffers[index] = held.copy_(tensor, non_blocking=True)
        if on_device:
            torch.accelerator.synchronize()
        self._buffers = buffers
        return buffers


class _HashingStream:
    """A file open for writing that hashes what is written and remembers an error of the operating system."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.digest = hashlib.sha256()
        self.num_bytes = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.digest.update(data)
        self.num_bytes += written
        return written

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        self.file.flush()

    def fileno(self) -> int:
        return self.file.fileno()

    def close(self) -> None:
        self.file.close()


@dataclass
class _HashingFiles(FileSystem):
    """Torch's file system, with a record of each file it has written."""

    written: dict[str, dict[str, Any]] = field(default_factory=dict)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as file:
                yield file
            return
        # The writer closes the stream itself on success; leaving early must close it too.
        with open(path, mode) as file:
            stream = _HashingStream(file)
            try:
                yield stream
            except Exception:
                # torch.save hides what the operating system said.
                if stream.error is not None:
                    raise OSError(stream.error.errno, stream.error.strerror, str(path)) from None
                raise
            if not file.closed:
                file.flush()
                os.fsync(file.fileno())
        self.written[Path(path).name] = {"bytes": stream.num_bytes, "sha256": stream.digest.hexdigest()}

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class Writer:
    """Writes one rank's part of a checkpoint into a folder that exists."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self._writer = FileSystemWriter(folder, per_thread_copy_ahead=0, overwrite=True)
        self._files = _HashingFiles()
        self._writer.fs = self._files

    def write(self, staged: Staged) -> list[WriteResult]:
        """Writes and fsyncs this rank's pieces.

        Raises:
            OSError: the disk is full, the folder is gone or cannot be written.
        """
        plan = SavePlan(staged.plan.items)
        plan = self._writer.prepare_global_plan([SavePlan([])] * self.rank + [plan])[self.rank]
        # What is there by now need not be looked at by the collections between copies.
        freezes = gc.get_freeze_count() == 0
        if freezes:
            gc.freeze()
        try:
            return self._writer.write_data(plan, _Copies(staged)).value()
        finally:
            if freezes:
                gc.unfreeze()

    @property
    def written(self) -> dict[str, dict[str, Any]]:
        """File name -> size in bytes and SHA-256."""
        return self._files.written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes torch's index of all ranks' pieces. On one rank, after all have written."""
        self._writer.finish(metadata, results)


def write_json(path: Path, content: Any) -> None:
    """Writes and fsyncs a JSON file that appears whole or not at all."""
    beside = path.with_name(f"{path.name}.part")
    with open(beside, "w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def sync_folder(path: Path) -> None:
    """Makes renames in a folder last through a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    digest, num_bytes = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            num_bytes += len(block)
    return {"bytes": num_bytes, "sha256": digest.hexdigest()}


def damage(folder: Path, ranks: Ranks) -> str | None:
    """What is wrong with a checkpoint folder, naming the file; None when all is as it was written. Collective.

    Args:
        folder: the checkpoint.
        ranks: those that check together, each a part of the files.
    """

    def check() -> str | None:
        manifest = _manifest(folder)
        if isinstance(manifest, str):
            return manifest
        for name, expected in sorted(manifest.items())[ranks.rank :: ranks.size]:
            path = folder / name
            if not path.exists():
                return f"{path} is missing"
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{path} is damaged: {size} bytes, {expected['bytes']} were written"
            if checksum(path) != expected:
                return f"{path} is damaged: its SHA-256 is not the one that was written"
        return None

    try:
        return next((found for found in ranks.together(check) if found), None)
    except RanksFailed as error:
        return f"{folder} cannot be read: {error}"


def _manifest(folder: Path) -> dict[str, dict[str, Any]] | str:
    path = folder / MANIFEST
    if not path.exists():
        return f"{path} is missing"
    try:
        files = json.loads(path.read_text())["files"]
        assert all(entry.keys() >= {"bytes", "sha256"} for entry in files.values())
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        return f"{path} is damaged: it is no manifest"
    return cast(dict[str, dict[str, Any]], files)


def metadata_of(folder: Path) -> Metadata:
    """Torch's index of a checkpoint: its keys, shapes, dtypes, and where each piece is."""
    return FileSystemReader(folder).read_metadata()


def load(state: State, folder: Path, ranks: Ranks, spare: tuple[str, ...] = ()) -> None:
    """Fills the state in place from a checkpoint written under any layout. Collective.

    Args:
        state: the keys to load; across all ranks they must be those of the checkpoint.
        folder: the checkpoint.
        ranks: those that load together.
        spare: keys of the checkpoint that start so may be left alone.

    Raises:
        CheckpointError: a key is missing or unknown, or a shape differs; on every rank, naming the first one.
    """
    metadata = metadata_of(folder)
    items = _items(state)
    wanted = set().union(*ranks.gather({item.index.fqn for item in items}))
    there = set(metadata.state_dict_metadata)
    unknown = {key for key in there - wanted if not key.startswith(spare)}
    if problem := _difference(sorted(wanted - there), sorted(unknown), folder):
        raise CheckpointError(problem)

    def read() -> None:
        plan = LoadPlan([read for item in items for read in _reads(item, metadata, folder)])
        reader = FileSystemReader(folder)
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        reader.read_data(plan, _InPlace(state)).wait()

    try:
        ranks.together(read)
    except RanksFailed as error:
        raise CheckpointError(str(error)) from None


def _difference(missing: list[str], unknown: list[str], folder: Path) -> str | None:
    if missing:
        return f"{folder} has no {_several(missing)}, which this model and optimizer need"
    if unknown:
        return f"{folder} holds {_several(unknown)}, which this model and optimizer do not have"
    return None


def _several(keys: list[str]) -> str:
    return f"{keys[0]!r}" + (f" and {len(keys) - 1} more keys" if len(keys) > 1 else "")


def _reads(item: WriteItem, metadata: Metadata, folder: Path) -> list[Any]:
    key, there, here = item.index.fqn, metadata.state_dict_metadata[item.index.fqn], item.tensor_data
    assert here is not None, f"{key} is not made of tensors"
    if not isinstance(there, TensorStorageMetadata) or there.size != here.size:
        shape = list(there.size) if isinstance(there, TensorStorageMetadata) else "no tensor"
        raise CheckpointError(f"{key!r} has shape {list(here.size)} here and {shape} in {folder}")
    reads = create_read_items_for_chunk_list(key, there, [here.chunk])
    covered = sum(math.prod(read.lengths) for read in reads)
    if covered != math.prod(here.chunk.sizes):
        raise CheckpointError(f"{folder} holds only a part of {key!r}")
    return reads


class _InPlace(DefaultLoadPlanner):
    def __init__(self, state: State) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state = state

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _shard(self.state, index)
