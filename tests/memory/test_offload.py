"""State on disk: the same steps bit by bit, checkpoints, and what a disk does to it."""

import functools
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise import models
from shardwise.memory import offload_activations, offload_files
from shardwise.memory.offload_files import DiskFile, OffloadError
from shardwise.memory.offload_tier import Tier, Traffic
from shardwise.optimizers import SGD, Adafactor, AdamW, AdamW8bit, Lion, Muon
from shardwise.optimizers.optimizer import Optimizer
from shardwise.parallel import Parallel
from shardwise.parallelize import parallelize
from shardwise.plan import Plan
from shardwise.training.checkpoint_folder import CheckpointFolder
from shardwise.training.faults import fault_of
from shardwise.verify import verify
from tests.models.cases import CONFIGS, VOCABULARY
from tests.pool import run_ranks
from tests.small_models import build, make_batches

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": AdamW(lr=1e-2),
    "adafactor": Adafactor(momentum=0.9),
    "adamw-8bit": AdamW8bit(lr=1e-2, smallest=30, block=16, exclude=()),
    "muon": Muon(lr=1e-2),
    "lion": Lion(lr=1e-2),
    "sgd": SGD(lr=0.1),
}
STEPS = make_batches(4, 12, 4)


def make(plan: dict[str, Any], optimizer: str, offload: dict[str, str]) -> Parallel:
    return parallelize(
        build({"num_blocks": 4, "tied": True}),
        Plan(**plan, offload=offload),
        optimizer=OPTIMIZERS[optimizer],
        clip=1.0,
        bucket_bytes=600,
    )


def differing(one: dict[str, Tensor], other: dict[str, Tensor], exact: bool = True) -> list[str]:
    same = torch.equal if exact else functools.partial(torch.allclose, rtol=1e-4, atol=1e-6)
    return [name for name, value in one.items() if not same(value, other[name])]


def states(parallel: Parallel) -> dict[str, Tensor]:
    return parallel.full_parameters() | {f"grad {k}": v for k, v in parallel.full_gradients().items()}


@patch.object(offload_activations, "SMALLEST", 1)
def with_and_without(plan: dict[str, Any], optimizer: str, offload: dict[str, str], folder: str) -> list[str]:
    """What differs after a few steps; then after state was saved, loaded into a new model, and a step taken there."""
    # One rank without offloading has no stages of ZeRO, which lay parameters out otherwise.
    exact = not plan.get("zero") or plan.get("shard", 1) > 1
    plain = plan if exact else plan | {"zero": 0}
    alone, away = make(plain, optimizer, {}), make(plan, optimizer, offload)
    for batch in STEPS[:3]:
        losses = [parallel.step(parallel.share(batch)).loss for parallel in (alone, away)]
        assert losses[0] == pytest.approx(losses[1], rel=0 if exact else 1e-5, abs=0)
    found = differing(states(alone), states(away), exact)
    with CheckpointFolder(away, folder + "/run") as checkpoints:
        checkpoints.save()
        away.step(away.share(STEPS[3]))  # what is being written is what was saved
    fresh, here = make(plan, optimizer, offload), make(plain, optimizer, {})
    for other in (fresh, here):
        with CheckpointFolder(other, folder + "/run") as checkpoints:
            assert checkpoints.load() == {}
        other.step(other.share(STEPS[3]))
        found += differing(states(away), states(other), exact or other is fresh)
    for parallel in (alone, away, fresh, here):
        parallel.close()
    return found


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"shard": 2, "zero": 1, "microbatches": 2},
    {"shard": 2, "zero": 2, "precision": "bf16", "recompute": "full"},
    {"zero": 3},
    {"zero": 2, "microbatches": 2},
    {"shard": 2, "zero": 3, "pipeline": 2, "microbatches": 3, "precision": "fp16", "schedule": "zb-h1"},
]


def offloaded(plan: dict[str, Any], folder: Path) -> dict[str, str]:
    """Everything that a plan allows."""
    kinds = ["optimizer", "activations"]
    kinds += ["parameters"] if plan.get("zero", 0) == 3 else []
    kinds += ["gradients"] if plan.get("zero", 0) >= 2 else []
    kinds += ["master"] if plan.get("precision") in ("bf16", "fp16") else []
    return {kind: f"disk:{folder / 'state'}" for kind in kinds}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_state_on_disk_changes_no_bit(layout: dict[str, Any], tmp_path: Path) -> None:
    ranks = Plan(**layout).num_ranks
    where = offloaded(layout, tmp_path)
    assert run_ranks(with_and_without, ranks, layout, "adamw", where, str(tmp_path)) == [[]] * ranks
    assert os.listdir(tmp_path / "state") == []


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adamw"])
def test_every_optimizers_state_on_disk_changes_no_bit(optimizer: str, tmp_path: Path) -> None:
    layout = {"shard": 2, "zero": 2, "precision": "bf16"}
    where = offloaded(layout, tmp_path)
    assert run_ranks(with_and_without, 2, layout, optimizer, where, str(tmp_path)) == [[], []]


@patch.object(offload_activations, "SMALLEST", 1)
def agrees(plan: dict[str, Any]) -> str:
    generator = torch.Generator().manual_seed(0)
    batches = [tuple(torch.randint(VOCABULARY, (2, 6, 12), generator=generator)) for _ in range(2)]
    report = verify(
        models.build(CONFIGS["llama"], VOCABULARY),
        Plan(**plan, precision="fp64"),
        [({"tokens": inputs}, targets) for inputs, targets in batches],
        optimizer=Adafactor(momentum=0.9),
        clip=0.5,
    )
    return "" if report.agrees else report.describe()


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2, "sequence": True, "microbatches": 2},
        {"context": 2, "zero": 3},
        {"tensor": 2, "shard": 2, "zero": 2},
    ],
    ids=str,
)
def test_it_composes_with_tensor_and_context_parallelism(layout: dict[str, Any], tmp_path: Path) -> None:
    ranks = Plan(**layout).num_ranks
    plan = layout | {"offload": offloaded(layout, tmp_path)}
    assert run_ranks(agrees, ranks, plan) == [""] * ranks


def test_host_memory_of_a_cpu_is_where_everything_is() -> None:
    plan = Plan(offload={"optimizer": "cpu"})
    parallel = parallelize(build({}), plan, optimizer=AdamW())
    assert parallel.memory()["optimizer"] > 0
    parallel.close()


def test_state_on_disk_is_not_held(tmp_path: Path) -> None:
    parallel = make({"precision": "bf16"}, "adamw", offloaded({"precision": "bf16"}, tmp_path))
    assert parallel.memory()["optimizer"] == 0
    parallel.step(STEPS[0])
    assert parallel.memory()["optimizer"] == 0
    parallel.close()


# Activations


class Shares(nn.Module):
    """Two layers that save the same input, and a product of two views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 128), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.one(x).chunk(2, -1)
        return left * right + self.other(x)


def chunk_of(model: nn.Module, folder: Path) -> Parallel:
    offload = {"activations": f"disk:{folder}"}
    return parallelize(model, Plan(offload=offload), loss=lambda y, targets: (y * targets).sum(), optimizer=SGD())


def test_what_shares_memory_is_written_once_and_parameters_never(tmp_path: Path) -> None:
    parallel = chunk_of(Shares(), tmp_path)
    batch = torch.randn(512, 64), torch.randn(512, 64)
    assert parallel.step(batch).offload is not None
    parallel._assembly.chunks[0]._activations._tier.writer.shutdown()  # type: ignore[union-attr]
    written = parallel._assembly.traffic.written  # type: ignore[union-attr]
    # The input and what is multiplied; what backward wanted before it was written is not.
    assert 0 < written <= 512 * (64 + 128) * 4


def test_memory_is_another_tensors_once_nobody_refers_to_it(tmp_path: Path) -> None:
    parallel = chunk_of(Shares(), tmp_path)
    batch = torch.randn(512, 64), torch.randn(512, 64)
    parallel.step(batch)
    file = parallel._assembly.chunks[0]._activations._tier.file  # type: ignore[union-attr]
    assert file is not None
    size = file.size
    for _ in range(5):
        parallel.step(batch)
    assert file.size <= 3 * size  # a step may begin while the last one's is being written


def test_a_mapped_tensor_keeps_its_range(tmp_path: Path) -> None:
    tier = Tier("activations", f"disk:{tmp_path}", torch.device("cpu"), Traffic(), *threads())
    saved = offload_activations._Saved(tier, torch.full((20_000,), 3.0), None)
    saved.written.result()
    memory = saved.bring()
    del saved
    other = offload_activations._Saved(tier, torch.full((20_000,), 4.0), None)
    other.written.result()
    assert memory.view(torch.float32).eq(3.0).all()
    del memory
    third = offload_activations._Saved(tier, torch.full((20_000,), 5.0), None)
    assert tier.file is not None
    assert tier.file.size == 2 * 81920  # the first one's range
    third.written.result()
    assert third.bring().view(torch.float32).eq(5.0).all()


def test_a_tensor_that_is_changed_before_it_is_written_is_an_error(tmp_path: Path) -> None:
    reader, writer = threads()
    tier = Tier("activations", f"disk:{tmp_path}", torch.device("cpu"), Traffic(), reader, writer)
    writer.submit(time.sleep, 0.1)
    tensor = torch.zeros(20_000)
    saved = offload_activations._Saved(tier, tensor, None)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        saved.written.result()


def threads() -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
    return ThreadPoolExecutor(1), ThreadPoolExecutor(1)


# Faults


def test_a_full_disk_is_one_line_with_the_key_the_path_and_the_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = DiskFile(tmp_path / "state", "optimizer")
    with pytest.raises(OffloadError) as caught:
        file.take(1 << 50)
    text = str(caught.value)
    assert text.startswith(f"plan.offload.optimizer: {tmp_path / 'state'}: ")
    assert "make room, name a folder on another disk, or leave the key out" in text
    assert "\n" not in text


def test_a_folder_without_a_parent_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        OffloadError, match=r"plan.offload.master: .*/gone/state: there is no folder .*/gone; make it.*"
    ):
        DiskFile(tmp_path / "gone" / "state", "master")


def test_a_folder_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(OffloadError, match=r"plan.offload.master: /proc/x: it cannot be written .*; name a folder on"):
        DiskFile(Path("/proc/x"), "master")


def test_a_folder_that_vanishes_does_no_harm(tmp_path: Path) -> None:
    parallel = make({}, "adamw", {"optimizer": f"disk:{tmp_path / 'state'}"})
    parallel.step(STEPS[0])
    (tmp_path / "state").rmdir()
    assert parallel.step(STEPS[1]).loss > 0
    parallel.close()


def test_a_file_that_was_cut_is_one_line(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, "optimizer")
    offset = file.take(10_000)
    os.truncate(file._file, 100)
    with pytest.raises(OffloadError, match=r"plan.offload.optimizer: .* was cut to 100 bytes of .* last checkpoint"):
        file.map(offset, 10_000)


def test_leftovers_of_a_file_system_without_unnamed_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / f"{offload_files.PREFIX}left"
    left.touch()
    real = os.open

    def refuses(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuses)
    file = DiskFile(tmp_path, "optimizer")
    memory = file.map(file.take(100), 100)
    memory.fill_(7)
    assert os.listdir(tmp_path) == []
    assert file.map(0, 100).eq(7).all()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:132] . DefaultCPUAllocator: can't allocate memory: you tried to"),
        MemoryError("8 bytes of /x cannot be mapped"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_memory_that_is_full_is_one_line_that_names_the_options(error: Exception) -> None:
    fault = fault_of(error, 3)
    assert fault.kind == "told"
    assert re.fullmatch(
        r"rank 3: .* plan.offload.optimizer = \"disk:FOLDER\" .* plan.zero.* plan.recompute .*", fault.line
    )


def test_what_cannot_live_elsewhere_is_refused_with_the_reason_and_the_mend() -> None:
    place = "disk:/scratch"
    found = [
        *Plan(offload={"master": place}).check(),
        *Plan(shard=2, zero=2, offload={"parameters": place}).check(),
        *Plan(shard=2, zero=1, offload={"gradients": place}).check(),
        *Plan(pipeline=2, shard=2, zero=3, schedule="pipedream", offload={"parameters": place}).check(),
    ]
    assert [problem.key for problem in found] == [
        f"plan.offload.{key}" for key in ("master", "parameters", "gradients", "parameters")
    ]
    assert "set plan.zero to 3, which brings them block by block, on one rank too" in str(found[1])
    assert Plan(zero=3, offload={"parameters": place}).check() == []
    assert Plan(zero=2, offload={"gradients": place}).check() == []


LIMITED = """
import resource, sys
import shardwise.training.job
from shardwise.cli import main
held = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (held + int(sys.argv.pop(1)),) * 2)
main()
"""


def test_state_beyond_a_hard_limit_of_memory_trains_on_disk_and_not_without(tmp_path: Path) -> None:
    """16 bytes for each of 35 million parameters, 568 MB, where 520 MB may be had; on disk 420 MB were enough."""
    (tmp_path / "text").write_text("to be or not to be " * 100)
    settings = ["data.tokenizer=bytes", f"data.source={tmp_path / 'text'}", f"data.cache={tmp_path}", "data.batch=2"]
    settings += ["data.held_out=0", "data.sequence=16", "train.steps=1", "checkpoint.asynchronous=false"]
    settings += ["model.layers=45", "model.hidden=256", "model.sequence=16", "model.heads=4", "log.tensorboard=false"]
    (tmp_path / "job.toml").touch()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}

    def train(run: str, *further: str) -> tuple[int, str]:
        command = [sys.executable, "-c", LIMITED, str(520 << 20), "train", str(tmp_path / "job.toml")]
        command += [*settings, f"train.run={tmp_path / run}", *further]
        found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
        return found.returncode, found.stderr.strip()

    status, text = train("inside")
    assert status == 1, text
    assert text.splitlines()[-1].startswith("error: rank 0: "), text
    assert 'the memory is full: keep state on disk with plan.offload.optimizer = "disk:FOLDER"' in text
    kinds = ("optimizer", "parameters", "gradients")
    status, text = train("beyond", "plan.zero=3", *(f"plan.offload.{kind}=disk:{tmp_path / 'state'}" for kind in kinds))
    assert (status, os.listdir(tmp_path / "state")) == (0, []), text
