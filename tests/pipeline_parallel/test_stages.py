"""Cutting a model into stages: where, by what measure, and what cannot be cut."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwise.loss import cross_entropy
from shardwise.pipeline_parallel import stages
from shardwise.pipeline_parallel.actions import linear, vee
from shardwise.pipeline_parallel.stages import Part, Stage, balance, cut, parts_of
from tests import small_models


def odd(**given: Any) -> small_models.Odd:
    return small_models.build(given, "cpu")


def sizes(ranges: list[range]) -> list[int]:
    assert [r.start for r in ranges] == [0, *(r.stop for r in ranges[:-1])]  # consecutive, from the first on
    return [len(r) for r in ranges]


# What a model's parts are


def test_parts_are_the_listed_submodules_and_starred_ones_are_blocks() -> None:
    found = parts_of(odd(num_blocks=3))
    assert [part.path for part in found] == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert [part.block for part in found] == [False, True, True, True, False]


def test_parts_that_stand_twice_are_called_twice() -> None:
    same = nn.Linear(2, 2)
    model = nn.Sequential(same, nn.Tanh(), same)
    found = parts_of(model)
    assert [part.module is same for part in found] == [True, False, True]
    x = torch.rand(3, 2)
    stage = Stage(found, first=True, last=True)
    assert torch.equal(stage((), x), model(x))


class Without(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)


class Scaled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def listing(*names: str) -> Without:
    model = Without()
    model.stages = names  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            Without(),
            "plan.pipeline: Without does not say where it may be cut into stages; if its forward is a chain",
        ),
        (Scaled(nn.Linear(2, 2)), "Scaled does not say where it may be cut"),  # its own forward would be forgotten
        (listing("a", "c"), "Without.stages lists 'c', which is not a submodule; correct the list"),
        (listing("a", "c.*"), "Without.stages lists 'c.*', which is not"),
        (listing("a"), "parameter 'b.weight' of Without is in none of its parts; list the submodule"),
    ],
)
def test_models_that_cannot_be_cut_are_refused_with_the_mend(model: nn.Module, line: str) -> None:
    with pytest.raises(ValueError, match=".") as caught:
        parts_of(model)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


# How a stage calls its parts


@pytest.mark.parametrize("edges", list(itertools.combinations(range(1, 7), 2)))
def test_stages_one_after_the_other_are_the_model(edges: tuple[int, int]) -> None:
    """Wherever it is cut, also between parts that pass two tensors and a number on."""
    model = odd(num_blocks=3, pair=True)
    ((inputs, _),) = small_models.make_batches(1, 2, 3)
    parts = parts_of(model)
    assert len(parts) == 7
    received: Any = ()
    for start, stop in itertools.pairwise((0, *edges, 7)):
        received = Stage(parts[start:stop], start == 0, stop == 7)(received, inputs)
    assert torch.equal(received, model(**inputs))


def test_named_inputs_go_to_every_part_that_takes_them() -> None:
    model = odd(num_blocks=3)
    ((inputs, _),) = small_models.make_batches(1, 2, 3, offsets=True)
    parts = parts_of(model)
    middle = Stage(parts[:2], True, False)((), inputs)
    assert isinstance(middle, tuple)
    assert torch.equal(Stage(parts[2:], False, True)(middle, inputs), model(**inputs))


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.got: dict[str, Any] = {}

    def forward(self, x: Any, *rest: Any, mask: Any = None, **others: Any) -> Any:
        self.got = {"x": x, "rest": rest, "mask": mask, **others}
        return x


def test_a_named_input_never_meets_an_argument_of_the_same_name_that_is_already_given() -> None:
    first, second = Takes(), Takes()
    stage = Stage([Part("a", first, True), Part("b", second, True)], True, True)
    stage((), {"x": 1, "mask": 2, "other": 3})
    assert first.got == {"x": 1, "rest": (), "mask": 2, "other": 3}
    assert second.got == {"x": 1, "rest": (), "mask": 2, "other": 3}


def test_inputs_that_the_first_part_does_not_know_by_name() -> None:
    part = [Part("a", nn.Linear(2, 2), True)]
    x = torch.rand(1, 2)
    right = part[0].module(x)
    assert torch.equal(Stage(part, True, True)((), {"features": x}), right)  # the only one: by position
    assert torch.equal(Stage(part, True, True)((), (x,)), right)
    with pytest.raises(
        ValueError, match=r"part 'a' of the model takes \['input'\] and the batch has \['p', 'q'\]: name"
    ):
        Stage(part, True, True)((), {"p": x, "q": x})


# Where to cut


def by_force(table: list[list[float]], placement: tuple[tuple[int, ...], ...]) -> tuple[float, float]:
    """The best busiest rank and, among those cuts, busiest stage."""
    num_stages, num_parts = len(table), len(table[0])
    best = (float("inf"), float("inf"))
    for inner in itertools.combinations(range(1, num_parts), num_stages - 1):
        edges = (0, *inner, num_parts)
        costs = [sum(table[s][edges[s] : edges[s + 1]]) for s in range(num_stages)]
        best = min(best, (max(sum(costs[s] for s in ranks) for ranks in placement), max(costs)))
    return best


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.integers(0, 20), min_size=4, max_size=9),
    shape=st.sampled_from([linear(2), linear(3), linear(4), linear(2, 2), vee(2)]),
)
def test_the_busiest_rank_has_the_least_possible_to_do(costs: list[int], shape: tuple[tuple[int, ...], ...]) -> None:
    num_stages = sum(len(ranks) for ranks in shape)
    table = [[float(cost) for cost in costs]] * num_stages
    found = balance(table, shape)
    assert min(sizes(found)) >= 1
    assert sum(sizes(found)) == len(costs)
    stage_costs = [sum(table[0][r.start : r.stop]) for r in found]
    busiest = max(sum(stage_costs[s] for s in ranks) for ranks in shape)
    assert (busiest, max(stage_costs)) == by_force(table, shape)


@settings(max_examples=30, deadline=None)
@given(costs=st.lists(st.integers(1, 20), min_size=5, max_size=12), num_stages=st.integers(2, 5))
def test_many_parts_are_balanced_by_dynamic_programming(costs: list[int], num_stages: int) -> None:
    table = [[float(cost) for cost in costs]] * num_stages
    edges = stages._smallest_largest(
        [list(itertools.accumulate(row, initial=0.0)) for row in table], num_stages, len(costs)
    )
    found = [sum(costs[a:b]) for a, b in itertools.pairwise(edges)]
    assert max(found) == by_force(table, linear(num_stages))[0]
    assert len(found) == num_stages


def test_a_deep_model_is_cut_at_once() -> None:
    ranges = balance([[1.0] * 400] * 32, linear(32))
    assert sum(sizes(ranges)) == 400
    assert max(sizes(ranges)) == 13


def test_parameters_that_multiply_are_balanced_and_tables_weigh_nothing() -> None:
    """A look-up costs nothing: the embedding goes with as many layers as if it were not there. A head counts."""
    model = nn.Sequential(nn.Embedding(10_000, 8), *(nn.Linear(8, 8, bias=False) for _ in range(8)))
    assert sizes(cut(parts_of(model), linear(2), "parameters")) == [5, 4]
    heavy = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 40))
    assert sizes(cut(parts_of(heavy), linear(2), "parameters")) == [5, 2]


def test_flops_time_and_memory_look_at_an_example() -> None:
    """The last two layers do as much as the first six, though all have as many parameters."""

    class Often(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.times = times

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                x = torch.relu(self.linear(x))
            return x

    model = nn.Sequential(*(Often(1) for _ in range(6)), Often(3), Often(3))
    example = (torch.rand(256, 64), torch.rand(256, 64))
    before = torch.get_rng_state()
    assert sizes(cut(parts_of(model), linear(2), "flops", example)) == [6, 2]
    assert torch.equal(torch.get_rng_state(), before)
    first = sizes(cut(parts_of(model), linear(2), "time", example, lambda y, t: (y - t).sum()))[0]
    assert first in (5, 6, 7)  # measured on a busy machine
    assert torch.equal(torch.get_rng_state(), before)  # though dropout and weights were drawn to measure
    # The first stage of two holds two microbatches' activations, so it gets fewer layers than half.
    plain = nn.Sequential(*(Often(1) for _ in range(9)))
    assert sizes(cut(parts_of(plain), linear(2), "memory", example))[0] < 5


@pytest.mark.parametrize("how", ["flops", "time", "memory"])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_model_is_measured_wherever_it_is_and_left_alone(how: str, device: str) -> None:
    model = small_models.build({"pair": True}, device)
    values = {name: (p, p._version) for name, p in model.named_parameters()}
    example = small_models.make_batches(1, 2, 3)[0]
    found = cut(parts_of(model), linear(3), how, example, cross_entropy.sum)
    assert sum(sizes(found)) == 9
    assert all(p is values[name][0] and p._version == values[name][1] for name, p in model.named_parameters())


def test_buffers_with_values_keep_them_where_parameters_have_none() -> None:
    """An index that is garbage would lead outside its table."""

    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(3, 4, device="meta"))
            self.register_buffer("index", torch.tensor([2, 0, 1, 2]))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table[self.index].sum(0)

    model = nn.Sequential(Indexed(), Indexed(), Indexed())
    for _ in range(20):
        assert sum(sizes(cut(parts_of(model), linear(2), "time", (torch.rand(5, 4), torch.rand(5))))) == 3


@pytest.mark.parametrize(
    ("counts", "found"), [([1, 4], [2, 5]), ([2, 3], [3, 4]), ([3, 4], [3, 4]), ([2, 2, 1], [3, 2, 2])]
)
def test_layers_may_be_counted_out(counts: list[int], found: list[int]) -> None:
    """Five blocks, an embedding and a head: counts of blocks, or of all parts."""
    assert sizes(cut(parts_of(odd(num_blocks=5)), linear(len(counts)), counts)) == found


@pytest.mark.parametrize(
    ("how", "shape", "line"),
    [
        (
            [1, 1],
            linear(2),
            r"plan.cut = \[1, 1\]: list 2 numbers, one for each stage, whose sum is the model's 5 blocks",
        ),
        ([2, 2, 1], linear(2), "list 2 numbers"),
        ([7, 0], linear(2), "stage 1 would hold nothing; give every stage at least one layer"),
        ("parameters", linear(4, 2), "plan.pipeline: 8 stages need as many parts, the model has 7; use fewer"),
        ("flops", linear(2), r'plan.cut = "flops" looks at a microbatch: pass parallelize\(\.\.\., example='),
    ],
)
def test_cuts_that_do_not_fit_are_refused_with_the_mend(how: Any, shape: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line) as caught:
        cut(parts_of(odd(num_blocks=5)), shape, how)
    assert "\n" not in str(caught.value)
