"""Folders of `plan.offload` are found wanting before anything is read."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwise import models, optimizers
from shardwise.config import Config, ConfigError
from shardwise.corpus.config import DataConfig
from shardwise.models.config import ModelConfig
from shardwise.optimizers import OptimizerConfig
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from shardwise.training import disks, launch
from shardwise.training import job as jobs
from tests.models.cases import VOCABULARY

MODEL = ModelConfig(family="llama", layers=2, hidden=24, heads=2, sequence=16, vocabulary=VOCABULARY)


def config(**plan: object) -> Config:
    return Config(model=MODEL, data=DataConfig(sequence=16), plan=Plan(**plan))


def everywhere(folder: Path, *keys: str) -> dict[str, str]:
    return {key: f"disk:{folder}" for key in keys}


def test_every_folder_that_cannot_be_used_is_found_before_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "build", lambda *_: pytest.fail("read"))
    offload = {"optimizer": "disk:/proc/x", "activations": f"disk:{tmp_path / 'gone' / 'state'}"}
    with pytest.raises(ConfigError) as caught:
        launch.train(config(offload=offload), tmp_path / "run")
    first, second = caught.value.problems
    assert (first.key, second.key) == ("plan.offload.optimizer", "plan.offload.activations")
    assert first.reason.startswith("/proc/x: it cannot be written")
    assert second.reason.endswith(f"there is no folder {tmp_path / 'gone'}")
    assert not (tmp_path / "run").exists()


def test_a_disk_that_is_too_small_for_all_that_goes_there_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = everywhere(tmp_path, "optimizer", "gradients", "activations")
    job = config(shard=2, zero=2, offload=offload)
    needed = disks.needs(job, job.plan)
    total = needed["optimizer"] + needed["gradients"]
    disks.require(job, job.plan, local=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=total))
    disks.require(job, job.plan, local=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=total - 1))
    disks.require(job, job.plan, local=False)  # other machines have disks of their own
    with pytest.raises(
        ConfigError, match=r"plan.offload.optimizer: .*: optimizer and gradients need .* GB are free; make room"
    ):
        disks.require(job, job.plan, local=True)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adamw-8bit", "adafactor"])
def test_what_is_needed_is_what_one_rank_takes(optimizer: str, tmp_path: Path) -> None:
    keys = ("optimizer", "master", "gradients", "parameters")
    job = config(zero=3, precision="bf16", offload=everywhere(tmp_path, *keys)).model_copy(
        update={"optimizer": OptimizerConfig(name=optimizer)}
    )
    parallel = parallelize(models.build(MODEL, VOCABULARY), job.plan, optimizer=optimizers.build(job.optimizer))
    shelves = [bucket.shelves for buckets in (c.buckets for c in parallel.chunks) for bucket in buckets.buckets]
    taken = {key: sum(s.of(key).num_bytes for s in shelves) for key in keys}  # type: ignore[union-attr]
    for key, least in disks.needs(job, job.plan).items():
        assert least <= taken[key] <= 1.25 * least + 4096, key
    parallel.close()


def test_copies_need_room_each() -> None:
    alone = disks.needs(config(), Plan())
    assert alone["optimizer"] == 2 * alone["master"]
    doubled = disks.needs(config(), Plan(replicate=2, shard=2, zero=1))
    assert doubled["optimizer"] == 2 * alone["optimizer"]
    assert doubled["gradients"] == 4 * alone["gradients"]
