"""What a rank holds, by name: for checkpoints, for comparison, and counted in bytes."""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise import collectives
from shardwise.batch import Batch
from shardwise.chunk import ModelChunk
from shardwise.data_parallel.bucket import Bucket
from shardwise.data_parallel.bucket_pieces import BucketPieces
from shardwise.data_parallel.buckets import Buckets
from shardwise.data_parallel.entry import Entry
from shardwise.data_parallel.reducer import Reducer
from shardwise.layout import Layout, Place
from shardwise.memory.offload_tier import Traffic
from shardwise.memory.recompute import Recomputation
from shardwise.mesh import Axis, Mesh
from shardwise.optimizers.optimizer import Optimizer
from shardwise.pieces import Pieces, pieces_of
from shardwise.pipeline_parallel.chain import Chain
from shardwise.pipeline_parallel.runner import Runner
from shardwise.tensor_parallel.division import Division


@dataclass
class Assembly:
    """What `parallelize` has put together for this rank."""

    model: nn.Module
    chunks: list[ModelChunk]
    shared: list[Buckets]  # parameters that several stages hold
    frozen: dict[str, nn.Parameter]
    persistent: dict[str, Tensor]  # buffers that belong to the state
    holders: dict[str, int]  # by name of parameter or buffer, the pipeline rank that answers for it
    reducer: Reducer
    splits: dict[str, Axis]  # the axes that layouts divide parameters over
    closes: list[Division]
    runner: Runner
    order: list[str]  # parameter names as the whole model registers them
    layouts: dict[str, Layout]
    stage_parameters: list[list[str]]  # by stage, the names of its parameters
    local: Callable[[Batch, int], list[Batch]]  # (microbatch, its number) -> what this rank computes of it, in order
    traffic: Traffic | None  # what offloading has moved; None if nothing is offloaded
    recomputation: Recomputation | None  # None if nothing is computed again
    chain: Chain | None  # of a model that is cut, to be compared with the first batch; None if there is nothing to see


class State:
    """The state of an assembled model by name. No microbatch may be in flight."""

    def __init__(self, parts: Assembly, mesh: Mesh, optimizer: Optimizer | None) -> None:
        self._parts, self._mesh, self._optimizer = parts, mesh, optimizer
        self._units = [*(chunk.buckets for chunk in parts.chunks), *parts.shared]
        self._given: list[BucketPieces] = []  # by `by_name`, until they are loaded

    def entries(self) -> Iterator[tuple[Bucket, Entry]]:
        """Every trained parameter this rank holds, with its bucket."""
        return itertools.chain(*self._units)

    def _buckets(self) -> list[Bucket]:
        return [bucket for unit in self._units for bucket in unit.buckets]

    def by_name(self) -> dict[str, Tensor | Pieces]:
        """This rank's parts of parameters and buffers, "model/<name>", and of "optimizer/<parameter>/<moment>"."""
        state: dict[str, Tensor | Pieces] = {}
        places: dict[str, Place] = dict(self._parts.splits)
        self._given = [BucketPieces(bucket, self._optimizer, places) for bucket in self._buckets()]
        for bucket, pieces in zip(self._buckets(), self._given, strict=True):
            for entry in bucket.entries:
                state[f"model/{entry.name}"] = pieces.values(entry)
                for moment, part in pieces.moments(entry).items():
                    state[f"optimizer/{entry.name}/{moment}"] = part
        for name, parameter in self._parts.frozen.items():
            state[f"model/{name}"] = self._boxed(name, parameter.detach())
        for name, buffer in self._parts.persistent.items():
            state[f"model/{name}"] = buffer
        return state

    def _boxed(self, name: str, tensor: Tensor) -> Tensor | Pieces:
        """This rank's part of something in a parameter's shape, as boxes of the whole if it is divided."""
        layout = self._parts.layouts[name]
        if not layout.splits:
            return tensor
        places = {axis: self._mesh.axis(axis) for axis in ("context", "tensor")}
        return pieces_of(layout, places, tensor.view(-1), 0, tensor.numel())

    def loaded(self) -> None:
        """Call after tensors of `state_dict()` were overwritten in place."""
        for pieces in self._given:
            pieces.loaded()
        self._given = []
        for bucket in self._buckets():
            bucket.store()
        self._parts.reducer.meet()
        for unit in self._units:
            unit.refresh()
        for chunk in self._parts.chunks:
            chunk.settle()

    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter (in mixed precision its master), whole, on every rank, in the model's own order."""
        mine: dict[str, Tensor] = dict(self._parts.frozen)
        for bucket in self._buckets():
            with bucket.shelves.here("parameters", "master", changed=False):
                kept = bucket.stage < 3 and not bucket.precision.mixed
                whole = bucket.values if kept else bucket.whole(bucket.master)
            mine |= {entry.name: bucket.view(whole, entry) for entry in bucket.entries}
        return self._gather(mine)

    def full_gradients(self) -> dict[str, Tensor]:
        """Every trained parameter's summed gradient of the last update, before clipping, whole, on every rank."""
        mine: dict[str, Tensor] = {}
        for bucket in self._buckets():
            with bucket.shelves.here("gradients", changed=False):
                whole = bucket.whole(bucket.own_gradient) / bucket.scale
            mine |= {entry.name: bucket.view(whole, entry) for entry in bucket.entries}
        return self._gather(mine)

    def _gather(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        axis = self._mesh.axis("pipeline")
        order = self._parts.order  # one on all ranks, unlike the entries of buckets
        mine = self._joined({name: mine[name].detach() for name in order if name in mine})
        facts = collectives.all_gather_object({name: (tuple(t.shape), t.dtype) for name, t in mine.items()}, axis)
        known = {name: fact for other in facts for name, fact in other.items()}
        found = {}
        for name in order:
            if name not in known:
                continue
            shape, dtype = known[name]
            if axis.rank == self._parts.holders[name]:
                found[name] = mine[name].clone(memory_format=torch.contiguous_format)
            else:
                found[name] = torch.empty(shape, dtype=dtype, device=self._mesh.device())
        for holder in range(axis.size):
            held = [tensor for name, tensor in found.items() if self._parts.holders[name] == holder]
            collectives.broadcast_all(held, axis, holder)
        return found

    def _joined(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameters' pieces on the tensor ranks, put together."""
        axis, layouts = self._mesh.axis("tensor"), self._parts.layouts
        divided = [name for name in mine if layouts[name].splits] if axis.size > 1 else []
        found = mine | {name: mine[name].new_empty(layouts[name].shape) for name in divided}
        for rank in range(axis.size if divided else 0):
            places = {axis.name: Axis(axis.name, rank, axis.size, axis.ranks)}
            pieces = {
                name: mine[name].contiguous()
                if rank == axis.rank
                else mine[name].new_empty(layouts[name].local_shape(places))
                for name in divided
            }
            collectives.broadcast_all(list(pieces.values()), axis, rank)
            for name, piece in pieces.items():
                for source, target in layouts[name].pieces(places):
                    source.of(found[name]).copy_(target.of(piece))
        return found

    def replicas_agree(self) -> str | None:
        """The name of the first parameter whose bits differ between ranks that hold the same piece, None if there is
        none."""
        mine: dict[object, str] = {}
        for bucket in self._buckets():
            bucket.acquire()
            for entry in bucket.entries:
                piece = (entry.name, tuple(source for source, _ in entry.layout.pieces(self._parts.splits)))
                # Of a copy: storage that NumPy has seen can no longer be given back.
                mine[piece] = fingerprint(bucket.view(bucket.values, entry).clone())
            bucket.release()
        everyone = collectives.all_gather_object(mine, self._mesh.axis("world"))
        found: dict[object, str] = {}
        odd = {piece[0] for other in everyone for piece, bits in other.items() if found.setdefault(piece, bits) != bits}
        return next((name for name in self._parts.order if name in odd), None)

    def memory(self) -> dict[str, int]:
        """Bytes this rank holds between steps for trained parameters: "parameters", "gradients" and "optimizer" state;
        and "buffers", what whole gradients land in during backward from ZeRO stage 2 on; and, where a plan recomputes,
        "activations", what blocks keep at most at once once it has been measured. Padding of buckets is counted,
        other ranks' memory that this one maps is not."""
        found = dict.fromkeys(("parameters", "gradients", "optimizer", "buffers"), 0)
        for unit in self._units:
            found["buffers"] += unit.landing_bytes
            for bucket in unit.buckets:
                for kind, size in bucket.memory().items():
                    found[kind] += size
        for chunk in self._parts.chunks:
            found["parameters"] += chunk.version_bytes
        recomputation = self._parts.recomputation
        if recomputation is not None and recomputation.report is not None:
            found["activations"] = recomputation.report.kept_bytes
        return found


def fingerprint(tensor: Tensor) -> str:
    """Digest of a tensor's bits, shape and dtype."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.blake2b(flat.numpy().tobytes(), digest_size=8)
    digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
    return digest.hexdigest()
