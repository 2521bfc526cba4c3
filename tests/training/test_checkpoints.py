import errno
import json
import os
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.training import checkpoints, storage
from shardwise.training.checkpoints import Checkpoints
from shardwise.training.config import CheckpointConfig
from shardwise.training.ranks import Ranks
from shardwise.training.storage import CheckpointError
from tests.pool import run_ranks
from tests.training.fake import FakeParallel, world


def manager(folder: Path, warnings: list[str] | None = None, **settings: Any) -> Checkpoints:
    lines = warnings if warnings is not None else []
    found = Checkpoints(folder, CheckpointConfig(**settings), Ranks.world(), Ranks.world(), lines.append)
    found.prepare()
    return found


def filled(seed: int) -> FakeParallel:
    """A model whose every value follows from the seed, whatever the number of ranks."""
    parallel = FakeParallel()
    generator = torch.Generator().manual_seed(seed)
    parallel.weight.copy_(torch.randn(5, 3, generator=generator))
    parallel.momentum.copy_(torch.randn(5, 3, generator=generator)[parallel.first : parallel.last])
    parallel.steps.fill_(seed)
    return parallel


def save_one(folder: str, seed: int, step: int, asynchronous: bool) -> None:
    found = manager(Path(folder), asynchronous=asynchronous)
    found.save(step, filled(seed).state_dict(), {"samples": 7})
    found.close()


def load_latest(folder: str, seed: int) -> tuple[bool, dict[str, Any], list[str]]:
    warnings: list[str] = []
    path = manager(Path(folder), warnings).latest()
    assert path is not None
    parallel, expected = FakeParallel(), filled(seed)
    storage.load(parallel.state_dict(), path, Ranks.world())
    same = all(
        torch.equal(here, there)
        for here, there in (
            (parallel.weight, expected.weight),
            (parallel.momentum, expected.momentum),
            (parallel.steps, expected.steps),
        )
    )
    return same, checkpoints.facts_of(path), warnings


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_loads_on_another_number_of_ranks(tmp_path: Path, asynchronous: bool) -> None:
    """CASES 19: saved on 2 ranks, loaded on 3, saved there, loaded on 2 and on 1: bitwise equal."""
    run_ranks(save_one, 2, str(tmp_path), 11, 4, asynchronous)
    for same, facts, _ in run_ranks(load_latest, 3, str(tmp_path), 11):
        assert same
        assert (facts["step"], facts["samples"]) == (4, 7)
    run_ranks(save_one, 3, str(tmp_path), 12, 5, asynchronous)
    assert all(same for same, _, _ in run_ranks(load_latest, 2, str(tmp_path), 12))
    assert load_latest(str(tmp_path), 12)[0]


def load_with(folder: str, change: str) -> str:
    state = FakeParallel().state_dict()
    if change == "missing" and world()[0] == world()[1] - 1:
        state["model/extra"] = torch.zeros(2)
    if change == "unknown":
        del state["optimizer/weight/momentum"]
    if change == "shape":
        state["model/weight"] = torch.zeros(5, 4)
    path = manager(Path(folder)).latest()
    assert path is not None
    try:
        storage.load(state, path, Ranks.world())
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "has no 'model/extra', which"),
        ("unknown", "holds 'optimizer/weight/momentum', which"),
        ("shape", r"'model/weight' has shape \[5, 4\] here and \[5, 3\]"),
    ],
)
def test_a_key_that_does_not_fit_is_named_on_every_rank(tmp_path: Path, change: str, said: str) -> None:
    run_ranks(save_one, 2, str(tmp_path), 1, 1, False)
    for message in run_ranks(load_with, 2, str(tmp_path), change):
        assert re.search(said, message), message


def test_spare_keys_may_be_left_alone(tmp_path: Path) -> None:
    save_one(str(tmp_path), 3, 1, False)
    path = checkpoints.path_of(tmp_path, 1)
    weight = torch.zeros(5, 3)
    storage.load({"model/weight": weight}, path, Ranks(), spare=("optimizer/", "step"))
    assert torch.equal(weight, filled(3).weight)
    with pytest.raises(CheckpointError, match="holds 'step'"):
        storage.load({"model/weight": weight}, path, Ranks(), spare=("optimizer/",))


def test_a_step_may_change_the_state_while_it_is_written(tmp_path: Path) -> None:
    found = manager(tmp_path)
    parallel = filled(5)
    for step in range(1, 6):
        parallel.weight.fill_(step)
        found.save(step, parallel.state_dict(), {})
        parallel.weight.fill_(-1)
        found.wait()
        weight = torch.empty(5, 3)
        storage.load({"model/weight": weight}, checkpoints.path_of(tmp_path, step), Ranks(), ("optimizer/", "step"))
        assert torch.equal(weight, torch.full((5, 3), float(step)))
    found.close()


def save_growing(folder: str) -> None:
    found = manager(Path(folder), keep=3)
    state = filled(1).state_dict()
    for step in (1, 2, 3):
        if step == 2 and world()[0] == 1:
            state["model/late"] = torch.arange(6.0).view(2, 3)
        if step == 3 and world()[0] == 1:
            state["model/late"] = torch.arange(8.0)
        found.save(step, state, {})
    found.close()


def test_a_state_may_change_its_shape_between_checkpoints(tmp_path: Path) -> None:
    run_ranks(save_growing, 2, str(tmp_path))
    sizes = []
    for step in (1, 2, 3):
        held = storage.metadata_of(checkpoints.path_of(tmp_path, step)).state_dict_metadata
        sizes.append(list(held["model/late"].size) if "model/late" in held else None)
    assert sizes == [None, [2, 3], [8]]


def test_retention_keeps_the_newest_and_the_milestones(tmp_path: Path) -> None:
    found = manager(tmp_path, keep=2, keep_every=20, asynchronous=False)
    for step in range(5, 55, 5):
        found.save(step, filled(step).state_dict(), {})
    assert checkpoints.steps_in(tmp_path) == [20, 40, 45, 50]
    assert sorted(os.listdir(tmp_path)) == [f"step-{step:08d}" for step in (20, 40, 45, 50)]


def damage_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "index", "facts", "manifest", "no manifest"])
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path: Path, harm: str) -> None:
    for step in (1, 2, 3):
        run_ranks(save_one, 2, str(tmp_path), step, step, False)
    newest = checkpoints.path_of(tmp_path, 3)
    shard = newest / "__1_0.distcp"
    victim = {"index": newest / ".metadata", "facts": newest / "state.json"}.get(harm, shard)
    if harm in ("manifest", "no manifest"):
        victim = newest / "manifest.json"
    if harm in ("flip", "index", "facts"):
        damage_bytes(victim)
    elif harm == "cut":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif harm == "manifest":
        victim.write_text('{"files"')
    else:
        victim.unlink()
    results = run_ranks(load_latest, 2, str(tmp_path), 2)
    assert all(same for same, _, _ in results)
    warnings = results[0][2]
    assert len(warnings) == 1
    assert str(victim) in warnings[0]
    assert "going back to step 2" in warnings[0]
    assert results[1][2] == []
    assert checkpoints.steps_in(tmp_path) == [2]


def test_no_whole_checkpoint_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    save_one(str(tmp_path), 1, 1, False)
    damage_bytes(checkpoints.path_of(tmp_path, 1) / ".metadata")
    warnings: list[str] = []
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole"):
        manager(tmp_path, warnings).latest()
    assert "there is none before it" in warnings[0]


def test_what_a_dead_job_left_half_done_is_cleared(tmp_path: Path) -> None:
    save_one(str(tmp_path), 1, 1, False)
    whole = checkpoints.path_of(tmp_path, 1)
    shutil.copytree(whole, checkpoints.path_of(tmp_path, 2).with_suffix(".part"))
    shutil.copytree(whole, checkpoints.path_of(tmp_path, 0).with_suffix(".old"))
    assert manager(tmp_path).latest() == whole
    assert os.listdir(tmp_path) == [whole.name]


class FullDisk:
    """A file system that is full after some bytes, on one rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> None:
        self.full = True
        write = storage._HashingStream.write

        def failing(stream: storage._HashingStream, data: Any) -> int:
            if self.full and world()[0] == rank:
                stream.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                raise stream.error
            return write(stream, data)

        monkeypatch.setattr(storage._HashingStream, "write", failing)


def save_on_full_disk(folder: str, asynchronous: bool) -> tuple[str | None, list[str], list[int]]:
    warnings: list[str] = []
    found = manager(Path(folder), warnings, asynchronous=asynchronous)
    found.save(1, filled(1).state_dict(), {})
    found.wait()
    with pytest.MonkeyPatch.context() as monkeypatch:
        FullDisk(monkeypatch, rank=1)
        found.save(2, filled(2).state_dict(), {})
        found.wait()
        failure = found.failure
    found.save(3, filled(3).state_dict(), {})
    found.close()
    assert found.failure is None
    return failure, warnings, checkpoints.steps_in(Path(folder))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_costs_one_line_and_not_the_state(tmp_path: Path, asynchronous: bool) -> None:
    results = run_ranks(save_on_full_disk, 2, str(tmp_path), asynchronous)
    for failure, warnings, steps in results:
        assert failure is not None
        assert "rank 1: No space left on device" in failure
        assert len(warnings) <= 1
        assert steps == [1, 3]
    (line,) = results[0][1]
    assert line.startswith("the checkpoint of step 2 was not written: ")
    assert line.endswith("that of step 1 is the last good one")
    assert all(same for same, _, _ in run_ranks(load_latest, 2, str(tmp_path), 3))


def test_the_last_checkpoint_is_tried_again_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    found = manager(tmp_path, warnings, patience=60)
    disk = FullDisk(monkeypatch)

    def mend(seconds: float) -> None:
        disk.full = False

    monkeypatch.setattr("time.sleep", mend)
    found.save_last(9, filled(9).state_dict(), {})
    assert checkpoints.steps_in(tmp_path) == [9]
    assert "the state is kept in memory" in warnings[-1]


def test_the_last_checkpoint_is_given_up_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = manager(tmp_path, patience=0)
    FullDisk(monkeypatch)
    with pytest.raises(CheckpointError, match="the checkpoint of step 9 is lost: .*No space left"):
        found.save_last(9, filled(9).state_dict(), {})


def test_too_little_room_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = manager(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10, 8, 2))  # type: ignore[attr-defined]
    found.save(1, filled(1).state_dict(), {})
    found.close()
    assert found.failure is not None
    assert "(128B are needed, 2B are free)" in found.failure
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written: Not a directory.*choose another train.run"):
        manager(tmp_path / "file" / "checkpoints")


def test_find_takes_a_run_a_folder_or_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        save_one(str(folder), step, step, False)
    one, two = (checkpoints.path_of(folder, step) for step in (1, 2))
    warnings: list[str] = []
    assert checkpoints.find(tmp_path, warnings.append) == two
    assert checkpoints.find(folder, warnings.append, step=1) == one
    assert checkpoints.find(one, warnings.append) == one
    damage_bytes(two / "state.json")
    assert warnings == []
    assert checkpoints.find(tmp_path, warnings.append) == one
    assert len(warnings) == 1
    with pytest.raises(CheckpointError, match="no whole checkpoint of step 2"):
        checkpoints.find(tmp_path, warnings.append, step=2)
    with pytest.raises(CheckpointError, match="holds no checkpoint; name a run folder"):
        checkpoints.find(tmp_path / "nothing", warnings.append)


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    save_one(str(tmp_path), 1, 1, False)
    facts = checkpoints.path_of(tmp_path, 1) / "state.json"
    facts.write_text(json.dumps({"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoints.facts_of(facts.parent)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_the_operating_system_says_reaches_the_user(tmp_path: Path, asynchronous: bool) -> None:
    """A file that may grow no further: torch's own writer turns that into an error without a reason."""
    warnings: list[str] = []
    found = manager(tmp_path, warnings, asynchronous=asynchronous)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        found.save(1, {"model/weight": torch.ones(1_000_000)}, {})
        found.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(warnings) == 1
    assert "was not written: " in warnings[0]
    assert "File too large: " in warnings[0]
    assert os.listdir(tmp_path) == []
    found.save(2, {"model/weight": torch.ones(1_000_000)}, {})
    found.close()
    assert checkpoints.steps_in(tmp_path) == [2]
