"""What happens to the disk under a job whose state is there: one line, and the job goes on from its checkpoint."""

import gc
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.config import Config
from shardwise.memory.offload_files import PREFIX
from shardwise.parallel import Parallel
from shardwise.training import checkpoints, job
from shardwise.training.faults import fault_of
from shardwise.training.placement import Placement
from tests.training.crash import offloaded, small_job, tensors

SAVED, STEPS = 4, 7


def trained(config: Config, run: Path, before_step: Callable[[int], None] = lambda step: None) -> str:
    """Train on this process as rank 0; the line that a launcher would show, "" if all went well.

    Args:
        before_step: called with the number of each step that is about to begin.
    """
    step = Parallel.step

    def watched(parallel: Parallel, *args: Any, **named: Any) -> Any:
        before_step(int(parallel.step_count))
        return step(parallel, *args, **named)

    with patch.object(Parallel, "step", watched):
        try:
            trainer = job.build(config, run, Placement())
            assert trainer.fit().finished
            trainer.parallel.close()
        except OSError as error:
            return fault_of(error, 0).text
        finally:
            trainer = None
            gc.collect()  # the process of a job ends with it, and so do its files
    return ""


def configured(folder: Path, state: Path, steps: int) -> Config:
    config = small_job(folder, steps, 0, schedule="constant", **(offloaded(state) | {"shard": 1}))
    return config.model_copy(update={"train": config.train.model_copy(update={"warmup": 1})})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What a job to which nothing happens has in its last checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    assert trained(configured(folder, folder / "state", STEPS), folder / "run") == ""
    return tensors(folder / "run")


def goes_on(folder: Path, state: Path, whole: dict[str, Tensor]) -> None:
    """The job ends as one that nothing happened to, and leaves nothing on the disk."""
    assert checkpoints.steps_in(folder / "run" / "checkpoints")
    assert trained(configured(folder, state, STEPS), folder / "run") == ""
    found = tensors(folder / "run")
    assert whole.keys() == found.keys()
    assert [name for name, value in whole.items() if not torch.equal(value, found[name])] == []
    assert os.listdir(state) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB, where this machine lets a test have one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    # Lazily: a file without a name is there for as long as the traceback of what failed refers to it.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_has_become_full_is_one_line_and_the_job_goes_on_once_there_is_room(
    small_disk: Path, tmp_path: Path, whole: dict[str, Tensor]
) -> None:
    state = small_disk / "state"
    assert trained(configured(tmp_path, state, SAVED), tmp_path / "run") == ""
    with (small_disk / "another's").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free)
    line = trained(configured(tmp_path, state, STEPS), tmp_path / "run")
    assert line.startswith("rank 0: plan.offload.")
    assert f": {state}: No space left on device (" in line
    assert line.endswith("GB are free); make room, name a folder on another disk, or leave the key out")
    (small_disk / "another's").unlink()
    goes_on(tmp_path, state, whole)


def test_a_folder_that_has_gone_is_one_line_and_the_job_goes_on_once_it_is_back(
    tmp_path: Path, whole: dict[str, Tensor]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    assert trained(configured(tmp_path, disk / "state", SAVED), tmp_path / "run") == ""
    disk.rename(tmp_path / "away")
    line = trained(configured(tmp_path, disk / "state", STEPS), tmp_path / "run")
    assert line.startswith("rank 0: plan.offload.")
    assert f": {disk / 'state'}: there is no folder {disk}; make it, name a folder on a disk" in line
    assert "\n" not in line
    (tmp_path / "away").rename(disk)
    # What a job left that died between a file's making and its unlinking.
    (disk / "state" / f"{PREFIX}left").touch()
    goes_on(tmp_path, disk / "state", whole)


def test_a_file_that_is_cut_while_it_is_used_is_one_line_and_the_job_goes_on(
    tmp_path: Path, whole: dict[str, Tensor]
) -> None:
    state = tmp_path / "state"

    def cut(step: int) -> None:
        if step == SAVED:
            for number in os.listdir("/proc/self/fd"):
                path = f"/proc/self/fd/{number}"
                if os.path.exists(path) and os.readlink(path).startswith(f"{state}/"):
                    os.truncate(path, 100)

    line = trained(configured(tmp_path, state, STEPS), tmp_path / "run", cut)
    assert line.startswith("rank 0: plan.offload.")
    assert f": {state}: the file was cut to 100 bytes of " in line
    assert "continue from the last checkpoint" in line
    assert "\n" not in line
    goes_on(tmp_path, state, whole)
