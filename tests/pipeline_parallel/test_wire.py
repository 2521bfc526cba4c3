"""Messages between stages: what they consist of, nested or not, and tags that never meet."""

import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.mesh import Mesh
from shardwise.pipeline_parallel.schedule import Kind
from shardwise.pipeline_parallel.wire import _ITEMS, _MICROBATCHES, Spec, TensorSpec, Wire
from tests.pool import run_ranks

VALUES: tuple[Any, ...] = (
    torch.rand(2, 3, requires_grad=True),
    {"mask": torch.ones(4, dtype=torch.bool), "sizes": [1, None, "text"]},
    (torch.rand(1, dtype=torch.float64), 0.5),
    torch.empty(0, 5),
)


def test_a_spec_says_everything_about_nested_values_and_fills_them_again() -> None:
    spec = Spec.of(VALUES)
    assert spec.tensors == [
        TensorSpec((2, 3), torch.float32, True),
        TensorSpec((4,), torch.bool, False),
        TensorSpec((1,), torch.float64, False),
        TensorSpec((0, 5), torch.float32, False),
    ]
    assert spec.gradients == spec.tensors[:1]
    assert pickle.loads(pickle.dumps(spec)) == spec
    filled = spec.fill([torch.zeros(t.shape, dtype=t.dtype) for t in spec.tensors])
    assert isinstance(filled, tuple)
    assert filled[1]["sizes"] == [1, None, "text"]
    assert filled[2][1] == 0.5
    assert Spec.of(filled) == spec


@pytest.mark.parametrize(
    "other",
    [
        (torch.rand(2, 4, requires_grad=True), *VALUES[1:]),
        (torch.rand(2, 3), *VALUES[1:]),
        (torch.rand(2, 3, dtype=torch.float64, requires_grad=True), *VALUES[1:]),
        (VALUES[0], {**VALUES[1], "sizes": [2, None, "text"]}, *VALUES[2:]),
        VALUES[:3],
        (VALUES[0], [*VALUES[1:]]),
    ],
)
def test_specs_differ_where_a_receiver_would_have_to_know(other: tuple[Any, ...]) -> None:
    assert Spec.of(other) != Spec.of(VALUES)


def test_no_two_messages_under_way_have_the_same_tag() -> None:
    wire = Wire(Mesh({}).axis("pipeline"), torch.device("cpu"), 3, "once")
    tags = [
        wire._tag(kind, microbatch, boundary, item)
        for kind, microbatch, boundary, item in itertools.product(
            (Kind.F, Kind.B), range(_MICROBATCHES), range(3), range(_ITEMS)
        )
    ]
    assert len(set(tags)) == len(tags)
    assert min(tags) >= 0


def passing() -> list[Any]:
    axis = Mesh({"pipeline": 2}, device="cpu").axis("pipeline")
    wire = Wire(axis, torch.device("cpu"), 1, "once")
    found: list[Any] = []
    for number, signature in enumerate([(2, 3), (2, 3), (4, 3)]):  # two of one shape, one of another
        if axis.rank == 0:
            values = (
                torch.full(signature, float(number), requires_grad=True),
                {"flag": number < 2, "none": torch.empty(0)},
            )
            assert (wire.known(0, signature) is None) == (number != 1)
            wire.send_activation(number, 0, 1, values, signature)
            gradient = wire.receive_tensors(Kind.B, number, 0, 1, wire.known(0, signature).gradients).wait()[0]
            found.append(gradient.tolist())
        else:
            ahead = wire.receive_activation(number, 0, 0, signature, ahead=True)
            assert (ahead is None) == (number != 1)  # what is not known cannot be received ahead
            incoming = ahead or wire.receive_activation(number, 0, 0, signature, ahead=False)
            assert incoming is not None
            x, named = incoming.spec.fill(incoming.wait())
            assert isinstance(x, Tensor)
            assert x.requires_grad
            assert named["none"].shape == (0,)
            found.append((x.shape, x.unique().tolist(), named["flag"]))
            wire.send_tensors(Kind.B, number, 0, 0, [x.detach() * 2])
        wire.prune()
    wire.flush()
    torch.distributed.barrier()
    wire.close()
    return found


def test_what_is_negotiated_once_is_remembered_by_the_shapes_of_the_inputs() -> None:
    sent, received = run_ranks(passing, 2)
    assert received == [((2, 3), [0.0], True), ((2, 3), [1.0], True), ((4, 3), [2.0], False)]
    assert sent == [[[0.0] * 3] * 2, [[2.0] * 3] * 2, [[4.0] * 3] * 4]
