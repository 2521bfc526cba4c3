"""Context parallelism: the sequence of every tensor is divided over the `context` axis; attention alone looks across.

Each rank runs the whole model on its part of every sequence, with the positions that part has in the whole, and its
part of the loss is the sum over its own targets. Modules that compute attention are replaced, by ring attention or by
Ulysses.
"""

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwise import batch as batches
from shardwise.batch import Batch
from shardwise.mesh import Mesh
from shardwise.tensor_parallel import huggingface
from shardwise.tensor_parallel.ring import RingAttention
from shardwise.tensor_parallel.ulysses import UlyssesAttention
from shardwise.tensor_parallel.zigzag import Spread, Zigzag

# By these names a model takes positions: ours, and Hugging Face's.
POSITIONS = ("positions", "position_ids")
# Look across positions, in a way that no one has divided.
MIXING = (nn.RNNBase, nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.Transformer)


def attention_cores(model: nn.Module) -> list[str]:
    """The paths of the modules that compute attention: those that the model's attribute `attention_cores` lists ("*"
    stands for any one name of a path), else those called `attention.core`.

    Such a module is called as core(q, k, v) or core(q, k, v, documents), q (B, N, S, D), k and v (B, K, S, D), with K
    dividing N, and returns (B, N, S, D); it has no parameters. Its attributes `window`, `scale` and `dropout`, where it
    has them, say what ring attention has to do.

    Raises:
        ValueError: there is none, or a listed path does not exist.
    """
    paths = [name for name, _ in model.named_modules(remove_duplicate=False)]
    listed: Iterable[str] | None = getattr(model, "attention_cores", None)
    if listed is None:
        found = [path for path in paths if path.split(".")[-2:] == ["attention", "core"]]
        if not found:
            raise ValueError(
                f"{type(model).__name__} does not say which of its modules compute attention; give it an attribute "
                '`attention_cores` with their paths, such as ["layers.*.attention.inner"], each called as '
                "(q, k, v, documents) and without parameters"
            )
        return found
    found = []
    for pattern in listed:
        matches = [path for path in paths if re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), path)]
        if not matches:
            raise ValueError(
                f"{type(model).__name__}.attention_cores lists {pattern!r}, which is not a submodule; correct the list"
            )
        found += matches
    return found


def _cores(model: nn.Module) -> dict[str, nn.Module]:
    if huggingface.is_hugging_face(model):
        return huggingface.cores(model)
    return {path: model.get_submodule(path) for path in attention_cores(model)}


def check(model: nn.Module, method: str) -> None:
    """Check that a model's sequences can be divided over ranks, by "ring" or "ulysses", or over time, in "slices".

    Raises:
        ValueError: "reason; mend".
    """
    undo = "plan.slices = 1" if method == "slices" else "plan.context = 1"
    cores = _cores(model)
    name = type(model).__name__
    positions_name(model, undo)
    for path, core in cores.items():
        if next(core.parameters(), None) is not None or next(core.buffers(), None) is not None:
            raise ValueError(
                f"attention module {path!r} of {name} has parameters or buffers; name the module inside that computes "
                "softmax(q k) v alone"
            )
        if method != "ulysses":
            _check_causal(path, core, undo if method == "slices" else 'plan.context_method = "ulysses"')
    inside = tuple(f"{path}." for path in cores)
    for path, module in model.named_modules():
        if path in cores or path.startswith(inside):
            continue
        if isinstance(module, MIXING):
            raise ValueError(
                f"module {path!r} is a {type(module).__name__}, which looks across positions that are computed apart; "
                f"set {undo}"
            )
        scaling = getattr(getattr(module, "rope", None), "scaling", None)
        if getattr(scaling, "kind", None) == "dynamic":
            raise ValueError(
                f"module {path!r} has dynamic rotary scaling, whose angles depend on the length of the whole sequence, "
                f"which no part of its positions shows; set model.rope_scaling.kind to yarn or llama3, or {undo}"
            )


def _check_causal(path: str, core: nn.Module, instead: str) -> None:
    dropout = getattr(core, "dropout", 0.0)
    if getattr(dropout, "p", dropout):
        raise ValueError(
            f"attention module {path!r} drops attention weights, which attention block by block never holds; "
            f"set the model's dropout to 0, or {instead}"
        )
    if not _is_causal_attention(core):
        raise ValueError(
            f"attention module {path!r} does not compute causal softmax attention of its `window` and `scale`, which "
            f"is what attention block by block puts in its place; set {instead}"
        )


@torch.no_grad()
def _is_causal_attention(core: nn.Module) -> bool:
    """Whether a module computes what attention block by block would, tried on a few numbers."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 8, generator=generator)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    window = getattr(core, "window", 0) or 9
    hidden = (distance < 0) | (distance >= window)
    scale = getattr(core, "scale", None) or q.shape[-1] ** -0.5
    expected = ((q @ k.transpose(-1, -2)) * scale).masked_fill(hidden, float("-inf")).softmax(-1) @ v
    try:
        found = core(q, k, v)
    except Exception:
        return False
    return isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found, expected, atol=1e-4)


def positions_name(model: nn.Module, undo: str = "plan.context = 1") -> str:
    """By which name a model takes positions.

    Raises:
        ValueError: it takes none.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in POSITIONS:
        if name in parameters:
            return name
    raise ValueError(
        f"{type(model).__name__}.forward takes no `positions`, so each part of a sequence would seem to begin "
        f"at 0; give it an argument positions=None, (B, S), or set {undo}"
    )


def length_of(batch: Batch, positions: str, only: frozenset[str] | None, key: str) -> int:
    """The sequence length of a batch (inputs, targets).

    Args:
        positions: what will be added to the inputs.
        only: the inputs that there may be; None: any.
        key: of the plan, for messages.

    Raises:
        ValueError: the inputs are not a dict of those allowed, or tensors have no sequence or different ones.
    """
    inputs, targets = batch
    if not isinstance(inputs, dict):
        raise ValueError(
            f"{key} adds {positions!r} to a model's inputs, which must be a dict of named tensors, "
            f"not a {type(inputs).__name__}; name them as the model's forward does"
        )
    if only is not None and (others := sorted(set(inputs) - only)):
        raise ValueError(
            f"{key} does not divide what {others[0]!r} means to a Hugging Face model; give it "
            f"{' and '.join(sorted(only))} alone"
        )
    lengths = {tuple(leaf.shape[1:2]) for leaf in batches.tensors(batch)}
    if len(lengths) != 1 or () in lengths:
        shapes = {name: tuple(leaf.shape) for name, leaf in inputs.items() if isinstance(leaf, Tensor)}
        of_targets = [tuple(leaf.shape) for leaf in batches.tensors(targets)]
        raise ValueError(
            f"{key} divides dimension 1 of every tensor of a batch, which must be the sequence; inputs are "
            f"{shapes} and targets {of_targets}: leave out what has no sequence, or set {key} = 1"
        )
    ((length,),) = lengths
    return int(length)


class Context:
    """The division of sequences over a mesh's context axis. Made by `divide`."""

    def __init__(self, mesh: Mesh, positions: str, only: frozenset[str] | None = None) -> None:
        axis = mesh.axis("context")
        # A group of its own: attention must not wait behind sums of gradients.
        self.axis = replace(axis, group=mesh.private_group(axis))
        self._positions = positions
        self._only = only  # the tensors that may be among the inputs, where others would mean something
        self._spreads: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by tensor of positions, or of documents
        self._current: Spread | None = None

    def local(self, batch: Batch) -> Batch:
        """This rank's part of every sequence of a batch (inputs, targets), with positions.

        Args:
            batch: inputs a dict; every tensor (B, S, ...).

        Raises:
            ValueError: the inputs are not a dict, or tensors have no sequence or different ones.
        """
        inputs, targets = batch
        length = length_of(batch, self._positions, self._only, "plan.context")
        zigzag = Zigzag(length, self.axis.size)

        def take(leaf: Any) -> Any:
            return zigzag.take(leaf, self.axis.rank) if isinstance(leaf, Tensor) else leaf

        divided, targets = torch.utils._pytree.tree_map(take, (inputs, targets))
        if self._positions not in divided:
            first = next(iter(batches.tensors(divided)))
            positions = zigzag.positions(self.axis.rank, first.device)
            divided[self._positions] = positions.expand(len(first), -1)
        spread = Spread(zigzag, inputs.get("documents"))
        self._spreads[divided[self._positions]] = spread
        if spread.documents is not None:
            self._spreads[divided["documents"]] = spread
        return divided, targets

    def spread_of(self, documents: Tensor | None) -> Spread:
        """How the sequences lie that attention is called for.

        By the documents themselves, since a layer that is computed again in backward comes after others' calls; without
        documents as in the stage's last call, since a step has one length.

        Raises:
            ValueError: the documents are not those of a batch.
        """
        if documents is None:
            assert self._current is not None, "the model was called with a batch that was not divided"
            return self._current.undivided()
        found: Spread | None = self._spreads.get(documents)
        if found is None:
            raise ValueError(
                "plan.context: attention was called with documents that are not the batch's, so those of the other "
                'ranks are not known; give them as the input "documents" (B, S), and pass them on as they are'
            )
        return found

    def note(self) -> Callable[[], None]:
        """Note how the sequences at hand lie; the function that is returned makes it so again."""
        current = self._current
        return lambda: setattr(self, "_current", current)

    def enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Called before a stage, with (received, inputs)."""
        self._current = self._spreads[arguments[1][self._positions]]


def _divided(core: nn.Module, context: Context, method: str) -> nn.Module:
    if method == "ulysses":
        return UlyssesAttention(core, context.axis, context.spread_of)
    window = int(getattr(core, "window", 0) or 0)
    return RingAttention(context.axis, context.spread_of, window, getattr(core, "scale", None))


def inputs_of(model: nn.Module) -> frozenset[str] | None:
    """The inputs whose meaning survives a division of the sequence; None: any."""
    return huggingface.INPUTS if huggingface.is_hugging_face(model) else None


def replace_cores(model: nn.Module, make: Callable[[nn.Module], nn.Module]) -> None:
    """Put `make(core)` in the place of every module that computes attention."""
    for path, core in _cores(model).items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, make(core))
    if huggingface.is_hugging_face(model):
        huggingface.route(model)


def divide(model: nn.Module, stages: Iterable[nn.Module], mesh: Mesh, method: str) -> Context:
    """Replace the attention modules of this rank's stages. Collective over the job.

    Args:
        model: the whole model.
        stages: this rank's stages.
        mesh: the job's mesh.
        method: "ring" or "ulysses".

    Returns:
        what divides batches.

    Raises:
        ValueError: as `check` does.
    """
    try:
        check(model, method)
    except ValueError as error:
        raise ValueError(f"plan.context: {error}") from None
    only = inputs_of(model)
    context = Context(mesh, positions_name(model), only)
    replace_cores(model, lambda core: _divided(core, context, method))
    for stage in stages:
        stage.register_forward_pre_hook(context.enter)
    return context
