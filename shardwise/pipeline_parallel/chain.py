"""Whether a model computes what its parts do one after another, as a pipeline runs them.

`stages` lists the parts of a model; what its own `forward` does between them a pipeline never sees. The first batch
shows it: the model's forward runs once on the meta device, and each part must be given the very tensors that the part
before returned.
"""

import contextlib
import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.pipeline_parallel.stages import Part, Stage


class Chain:
    """A copy without memory of a model that is to be cut, to be asked once.

    Args:
        model: the whole model; it is left alone.
        parts: its parts, as `parts_of` finds them.
    """

    def __init__(self, model: nn.Module, parts: Sequence[Part]) -> None:
        bare = {id(value): _bare(value) for value in (*model.parameters(), *model.buffers())}
        self._model = copy.deepcopy(model, bare)
        self._parts = [Part(part.path, self._model.get_submodule(part.path), part.block) for part in parts]
        self._name = type(model).__name__

    @staticmethod
    def of(model: nn.Module, parts: Sequence[Part]) -> "Chain | None":
        """None for what is a chain by itself, an `nn.Sequential`, and for what cannot be copied."""
        if type(model).forward is nn.Sequential.forward:
            return None
        with contextlib.suppress(Exception):
            return Chain(model, parts)
        return None

    def require(self, inputs: Any) -> None:
        """See that the model is the chain of its parts, if it runs on the meta device at all.

        Args:
            inputs: of a batch: a tensor, a tuple, or a dict of named ones.

        Raises:
            ValueError: it is not; the text says between which parts.
        """
        inputs = tree_map_only(Tensor, self._bare_input, inputs)
        calls: list[tuple[int, tuple[Any, ...], dict[str, Any], Any]] = []
        try:
            with torch.no_grad(), self._recorded(calls):
                output = self._call(inputs)
        except Exception:
            return  # it looks at values, or makes tensors of its own on a device
        problem = self._problem(inputs, calls, output)
        if problem is not None:
            raise ValueError(
                f"plan.pipeline: {self._name}.forward {problem}, and a pipeline runs the parts that "
                f"{self._name}.stages lists one after another and nothing else; put what lies between into a part"
            )

    def _bare_input(self, value: Tensor) -> Tensor:
        dtype = next((p.dtype for p in self._model.parameters() if p.is_floating_point()), value.dtype)
        return torch.empty(value.shape, dtype=dtype if value.is_floating_point() else value.dtype, device="meta")

    def _call(self, inputs: Any) -> Any:
        if isinstance(inputs, dict):
            return self._model(**inputs)
        return self._model(*inputs) if isinstance(inputs, tuple) else self._model(inputs)

    @contextlib.contextmanager
    def _recorded(self, calls: list[tuple[int, tuple[Any, ...], dict[str, Any], Any]]) -> Iterator[None]:
        """Note the calls of parts: which, its arguments, and what it returned."""
        handles = []
        for key, module in {id(part.module): part.module for part in self._parts}.items():

            def note(_: nn.Module, args: Any, named: Any, value: Any, key: int = key) -> None:
                calls.append((key, args, named, value))

            handles.append(module.register_forward_hook(note, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _problem(
        self, inputs: Any, calls: Sequence[tuple[int, tuple[Any, ...], dict[str, Any], Any]], output: Any
    ) -> str | None:
        paths = {id(part.module): part.path for part in self._parts}
        if [key for key, *_ in calls] != [id(part.module) for part in self._parts]:
            return f"calls {_listed(paths[key] for key, *_ in calls)}, not {_listed(p.path for p in self._parts)}"
        stage = Stage(self._parts, first=True, last=True)
        given = stage.first_arguments(inputs)
        named = inputs if isinstance(inputs, dict) else {}
        before = "the batch has"
        for number, (part, (_, args, keywords, value)) in enumerate(zip(self._parts, calls, strict=True)):
            try:
                wanted = _bound(part.module, given, stage.accepted(number, named, len(given)))
            except TypeError:  # it cannot be called with these
                wanted = None
            if wanted is None or not _same(_bound(part.module, args, keywords), wanted):
                return f"gives {part.path!r} something else than what {before}"
            given = stage.passed(value)
            before = f"{part.path!r} returned"
        return None if _same(output, value) else f"returns something else than what {before}"


def _bare(value: Tensor) -> Tensor:
    """The same shape, dtype and kind without memory."""
    bare = torch.empty_like(value, device="meta", requires_grad=value.requires_grad)
    return nn.Parameter(bare, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else bare


def _bound(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
    """What every argument of a forward is, defaults too."""
    bound = inspect.signature(module.forward).bind(*args, **keywords)
    bound.apply_defaults()
    return list(bound.arguments.values())


def _same(left: Any, right: Any) -> bool:
    """Whether two structures hold the same objects."""
    here, there = tree_leaves(left), tree_leaves(right)
    return len(here) == len(there) and all(
        a is b or not (isinstance(a, Tensor) or isinstance(b, Tensor)) and a == b
        for a, b in zip(here, there, strict=True)
    )


def _listed(paths: Any) -> str:
    return ", ".join(paths) or "no part"
