"""Checkpoints in a loop of one's own: whole, exact, and for any other plan."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.training import storage
from shardwise.training.storage import CheckpointError
from tests.pool import run_ranks


def parallel_of(hidden: int = 6, **plan: Any) -> shardwise.Parallel:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2)
        )
    return shardwise.parallelize(model, shardwise.Plan(**plan), optimizer=shardwise.AdamW(lr=0.05))


def train(parallel: shardwise.Parallel, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        losses.append(parallel.step(parallel.share((inputs, (inputs[:, 0] > 0).long()))).loss)
    return losses


def begin(folder: str, plan: dict[str, Any]) -> list[float]:
    parallel = parallel_of(**plan)
    with shardwise.CheckpointFolder(parallel, folder) as checkpoints:
        assert checkpoints.load() is None
        train(parallel, range(3))
        checkpoints.save(next_step=3, name="first")
        losses = train(parallel, range(3, 6))
    parallel.close()
    return losses


def go_on(folder: str, plan: dict[str, Any]) -> list[float]:
    parallel = parallel_of(**plan)
    with shardwise.CheckpointFolder(parallel, folder) as checkpoints:
        facts = checkpoints.load()
        assert facts == {"next_step": 3, "name": "first"}
        losses = train(parallel, range(facts["next_step"], 6))
    parallel.close()
    return losses


FP64: dict[str, Any] = {"precision": "fp64"}


def test_what_was_saved_goes_on_bitwise_and_under_another_plan(tmp_path: Path) -> None:
    here = {"shard": 2, "zero": 3, **FP64}
    whole = run_ranks(begin, 2, str(tmp_path), here)[0]
    assert run_ranks(go_on, 2, str(tmp_path), here)[0] == whole
    assert go_on(str(tmp_path), FP64) == pytest.approx(whole, rel=1e-12)


def test_a_loss_scale_that_the_checkpoint_lacks_starts_anew(tmp_path: Path) -> None:
    begin(str(tmp_path), {"precision": "bf16"})
    assert len(go_on(str(tmp_path), {"precision": "fp16"})) == 3


def test_the_newest_stay(tmp_path: Path) -> None:
    parallel = parallel_of()
    with shardwise.CheckpointFolder(parallel, tmp_path, keep=2) as checkpoints:
        for step in range(4):
            train(parallel, range(step, step + 1))
            checkpoints.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_damaged_one_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    parallel = parallel_of()
    with shardwise.CheckpointFolder(parallel, tmp_path) as checkpoints:
        for step in range(2):
            train(parallel, range(step, step + 1))
            checkpoints.save(step=step)
    manifest = tmp_path / "step-00000002" / storage.MANIFEST
    manifest.write_text(manifest.read_text()[:-9])
    with (
        shardwise.CheckpointFolder(parallel, tmp_path) as checkpoints,
        pytest.warns(UserWarning, match="step-00000002.*going back to step 1"),
    ):
        assert checkpoints.load() == {"step": 0}


def save_now(checkpoints: shardwise.CheckpointFolder) -> None:
    checkpoints.save()
    checkpoints.close()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_one_that_cannot_be_written_is_raised_and_the_earlier_one_stays(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = parallel_of()
    checkpoints = shardwise.CheckpointFolder(parallel, tmp_path, asynchronous=asynchronous)
    train(parallel, range(1))
    checkpoints.save(kept=True)
    train(parallel, range(1, 2))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shardwise.training.checkpoints._make_room", full)
        with pytest.raises(CheckpointError, match="a checkpoint was not written: .*No space left on device"):
            save_now(checkpoints)
    with shardwise.CheckpointFolder(parallel, tmp_path) as again:
        assert again.load() == {"kept": True}


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    begin(str(tmp_path), {})
    other = parallel_of(hidden=7)
    with (
        shardwise.CheckpointFolder(other, tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match=r"'model/4.weight' has shape \[2, 7\] here and \[2, 6\]"),
    ):
        checkpoints.load()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        shardwise.CheckpointFolder(parallel_of(), tmp_path / "file" / "folder")
