"""Collectives by measurement: what is picked, that all ranks pick alike, and that every variant gives the same."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise import choices, collectives
from shardwise.choices import SHIPPED, VARIANTS, Choices, Measured
from shardwise.mesh import Mesh
from tests.pool import run_ranks

TABLE = Choices(
    [
        Measured("gloo", "all_gather", "float32", 1000, {"all_gather": 1.0, "broadcast": 2.0}),
        Measured("gloo", "all_gather", "float32", 100_000, {"all_gather": 3.0, "broadcast": 2.0}),
        Measured("gloo", "all_gather", "float16", 1000, {"all_gather": 3.0, "broadcast": 2.0}),
    ]
)


@pytest.mark.parametrize(
    ("backend", "dtype", "num_bytes", "picked"),
    [
        ("gloo", torch.float32, 1, "all_gather"),
        ("gloo", torch.float32, 9_000, "all_gather"),
        ("gloo", torch.float32, 11_000, "broadcast"),
        ("gloo", torch.float32, 1 << 40, "broadcast"),
        ("gloo", torch.float16, 1, "broadcast"),
        ("gloo", torch.float64, 1, "all_gather"),  # not measured: as float32
        ("nccl", torch.float32, 1 << 40, "all_gather"),  # not measured: the backend's own
    ],
)
def test_the_quickest_at_the_nearest_size_is_picked(
    backend: str, dtype: torch.dtype, num_bytes: int, picked: str
) -> None:
    assert TABLE.pick(backend, "all_gather", dtype, num_bytes) == picked


def test_what_is_shipped_has_every_collective_of_gloo() -> None:
    assert {(row.backend, row.collective) for row in SHIPPED.table} == {("gloo", name) for name in VARIANTS}
    assert SHIPPED.pick("nccl", "reduce_scatter", torch.bfloat16, 1 << 20) == "reduce_scatter"


def test_a_file_that_is_none_is_told_with_the_mend(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    assert choices.load(path) is SHIPPED
    for text in ("{", "[]", "{}", '{"collectives": [{"backend": "gloo"}]}', '{"collectives": 3}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"hardware.json is no hardware file .* `shardwise doctor`"):
            choices.load(path)
    path.write_text(json.dumps({"collectives": choices.as_data(TABLE.table), "date": "today"}))
    assert choices.load(path).table == TABLE.table


def every_variant(dtype: torch.dtype) -> list[torch.Tensor]:
    axis = Mesh({"shard": torch.distributed.get_world_size()}).axis("shard")
    numel = 35 * axis.size
    mine = torch.arange(numel, dtype=dtype) % 7 - axis.rank
    found = []
    for variant in VARIANTS["reduce_scatter"]:
        only = Choices([Measured("gloo", "reduce_scatter", "float32", 1, {variant: 1.0})])
        found.append(collectives.reduce_scatter(mine.clone(), replace(axis, choices=only)).clone())
    for variant in VARIANTS["all_gather"]:
        only = Choices([Measured("gloo", "all_gather", "float32", 1, {variant: 1.0})])
        full = torch.full((numel,), -1, dtype=dtype)
        collectives.all_gather(found[0], full, replace(axis, choices=only))
        found.append(full)
    for variant in VARIANTS["all_reduce"]:
        only = Choices([Measured("gloo", "all_reduce", "float32", 1, {variant: 1.0})])
        found.append(collectives.all_reduce(mine.clone().view(35, -1), replace(axis, choices=only)).view(-1))
    odd = torch.ones(numel + 1, dtype=dtype)  # which no variant could divide
    found.append(collectives.all_reduce(odd, replace(axis, choices=only)))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_variant_gives_the_same(ranks: int, dtype: torch.dtype) -> None:
    numel = 35 * ranks
    whole = sum(torch.arange(numel, dtype=dtype) % 7 - rank for rank in range(ranks))
    for rank, found in enumerate(run_ranks(every_variant, ranks, dtype)):
        own = whole.view(ranks, -1)[rank]
        assert all(torch.equal(value, own) for value in found[:3])
        assert all(torch.equal(value, whole) for value in found[3:7])
        assert torch.equal(found[7], torch.full((numel + 1,), float(ranks), dtype=dtype))


def chosen(folders: list[str]) -> tuple[Measured, ...] | str:
    """By which table this rank goes, each rank with a cache folder of its own."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = folders[torch.distributed.get_rank()]
    try:
        mesh = Mesh({"shard": 2})
    except ValueError as error:
        return str(error)
    finally:
        del os.environ["XDG_CACHE_HOME"]
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before
    tables = [mesh.axis(name).choices.table for name in ("world", "shard", "zero", "gradient", "data")]
    assert all(table == tables[0] for table in tables)
    return tables[0]


def test_all_ranks_go_by_the_first_ranks_file(tmp_path: Path) -> None:
    for name, text in (("a", json.dumps({"collectives": choices.as_data(TABLE.table)})), ("b", "no JSON")):
        (tmp_path / name / "shardwise").mkdir(parents=True)
        (tmp_path / name / "shardwise" / "hardware.json").write_text(text)
    folders = [str(tmp_path / name) for name in ("a", "b")]
    assert run_ranks(chosen, 2, folders) == [TABLE.table] * 2
    told = run_ranks(chosen, 2, folders[::-1])
    assert told[0] == told[1]
    assert "is no hardware file" in told[0]
