import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import Config
from shardwise.training import checkpoints, faults, job, launch, placement, processes
from shardwise.training.faults import Fault, JobFailed, JobStopped
from shardwise.training.placement import Placement, first_host, placed
from shardwise.training.progress import Outcome
from tests.pool import run_ranks
from tests.training.crash import Killer, differences, offloaded, small_job, workers
from tests.training.fake import world


def train_here(config: Config, run: str) -> Outcome:
    """Trains on the ranks of the pool."""
    rank, num_ranks = world()
    trainer = job.build(config, Path(run), Placement(rank, num_ranks, rank))
    outcome = trainer.fit()
    trainer.parallel.close()
    return outcome


@pytest.mark.parametrize(("offload", "kills"), [(False, 1), (True, 1)], ids=["in memory", "on disk"])
def test_kills_and_a_stop_leave_a_run_that_goes_on_bitwise(
    offload: bool, kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks die by SIGKILL; the launcher starts them again; SIGTERM saves; other processes run the rest."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    steps, run = 4000, tmp_path / "killed"
    plan = offloaded(tmp_path / "state") if offload else {}
    config = small_job(tmp_path, steps, restarts=kills, schedule="constant", **plan)
    with Killer(run, kills, random.Random(3), then=lambda: os.kill(os.getpid(), signal.SIGTERM)) as killer:
        outcome = launch.train(config, run)
    assert len(killer.killed) == kills
    assert not outcome.finished
    assert workers() == {}
    assert f"the ranks were started again ({kills} of {kills} times)" in capfd.readouterr().out
    assert checkpoints.steps_in(run / "checkpoints")[-1] == outcome.step < steps
    rest = config.model_copy(update={"train": config.train.model_copy(update={"steps": outcome.step + 5})})
    for folder in ("killed", "whole"):
        assert all(end.finished for end in run_ranks(train_here, 2, rest, str(tmp_path / folder)))
    assert differences(tmp_path / "whole", run) == []
    assert list((tmp_path / "state").glob("*")) == []  # nothing of what was offloaded is left


PLANTED = """
import os
if os.environ.get("RANK") == "1":
    from shardwise.training.trainer import Trainer
    count = Trainer._count
    def fail(self, *args):
        count(self, *args)
        if self.progress.step == 3:
            raise KeyError("planted")
    Trainer._count = fail
"""


def test_one_rank_s_error_ends_the_job_at_once_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    with pytest.raises(JobFailed) as caught:
        launch.train(small_job(tmp_path, 100_000, restarts=0), tmp_path / "run")
    text = str(caught.value)
    assert text.startswith("rank 1 failed:\nTraceback")
    assert text.endswith("KeyError: 'planted'")
    assert "Traceback" not in "".join(capfd.readouterr())
    assert "KeyError" in (tmp_path / "run" / "error-rank-1.txt").read_text()
    assert not (tmp_path / "run" / "error-rank-0.txt").exists()
    assert workers() == {}
    assert time.time() - (tmp_path / "run" / "error-rank-1.txt").stat().st_mtime < 10


def test_a_rank_ended_while_it_records_its_error_leaves_no_half_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's agent reads every record that is there when it ends the other ranks, and breaks on half of one."""
    record = tmp_path / "error.json"
    monkeypatch.setenv(faults.ERROR_FILE, str(record))
    killed = tmp_path / "killed.py"
    killed.write_text(
        "import os, pathlib, signal\n"
        "from shardwise.training import faults\n"
        "write = pathlib.Path.write_text\n"
        "def half(path, text):\n"
        "    write(path, text[: len(text) // 2])\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "pathlib.Path.write_text = half\n"
        "faults.leave_record(faults.fault_of(KeyError('planted'), 1), None)\n"
    )
    assert subprocess.run([sys.executable, str(killed)]).returncode == -signal.SIGTERM
    assert not record.exists()
    faults.leave_record(faults.fault_of(KeyError("planted"), 1), None)
    assert json.loads(record.read_text())["message"]["extraInfo"]["fault"]["rank"] == 1


def test_a_worker_does_not_outlive_the_process_that_started_it() -> None:
    child = (
        "import time\nfrom shardwise.training.processes import die_with\n"
        "die_with({})\nprint('up', flush=True)\ntime.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}.format(os.getpid())], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        assert started.stdout.readline() == "up\n"
        started.kill()
        started.wait()
        deadline = time.monotonic() + 5
        while _runs(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processes, "num_cores", lambda: 8)
    assert [processes.threads_per_rank(num) for num in (1, 3, 8, 9)] == [8, 2, 1, 1]
    monkeypatch.undo()
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(processes, "QUOTA", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    quota.write_text("350000 100000\n")
    assert processes.num_cores() == 4
    quota.write_text("max 100000\n")
    assert processes.num_cores() == 16


def test_torchrun_and_slurm_say_which_rank_a_process_is() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert placed(torchrun) == Placement(5, 8, 1)
    slurm = {"SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
    assert placed(slurm) == Placement(3, 4, 1)
    # A batch script, or an interactive shell, is no rank.
    assert placed({**slurm, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert placed({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    assert placed({}) is None


def test_slurm_s_variables_become_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    slurm = {"PROCID": "3", "STEP_ID": "0", "STEP_NUM_TASKS": "4", "JOB_NODELIST": "n[07-09]", "JOB_ID": "123456"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert placed() == Placement(3, 4, 0)
    assert [os.environ[name] for name in names] == ["3", "4", "0", "n07", "23456"]


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("n[003-005,9],m1", "n003"),
        ("gpu[12]", "gpu12"),
        ("rack-a[1,4]-x,b", "rack-a1-x"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_a_plan_of_another_size_than_the_job_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended: list[int] = []
    monkeypatch.setattr(launch, "_exit", ended.append)
    monkeypatch.setattr(launch, "placed", lambda: Placement(0, 3))
    launch.train(small_job(tmp_path, 1, 0), tmp_path)
    assert ended == [2]


@dataclass
class Death:
    exitcode: int
    error_file_data: dict[str, Any] = field(default_factory=dict)


def left(kind: Any, time_ns: int, rank: int, exitcode: int = 1) -> Death:
    fault = Fault(rank, kind, False, f"line {rank}", "trace", time_ns)
    return Death(exitcode, {"message": {"extraInfo": {"fault": vars(fault)}}})


def test_the_cause_is_the_first_error_of_a_rank_s_own() -> None:
    assert faults.cause({0: left("peer", 1, 0), 1: left("bug", 9, 1), 2: left("bug", 8, 2)}).rank == 2
    # A rank that was killed has left nothing; the others have lost it, or were ended by the agent.
    deaths = {0: left("peer", 5, 0), 1: Death(-signal.SIGKILL), 2: Death(-signal.SIGTERM)}
    assert faults.cause(deaths).line == "rank 1 was ended by SIGKILL (often: the machine had no memory left)"
    assert faults.cause({0: Death(-signal.SIGTERM), 1: Death(-signal.SIGSEGV)}).line == "rank 1 was ended by SIGSEGV"
    assert faults.cause({0: left("peer", 5, 0), 1: Death(-signal.SIGTERM)}).text == "rank 0 lost another rank: line 0"
    assert faults.cause({0: Death(-signal.SIGTERM), 1: Death(3)}).line == "rank 1 ended with exit status 3"


def test_a_file_that_is_cut_under_a_rank_that_reads_it_is_one_line_with_the_key_and_the_folder() -> None:
    deaths = {0: left("peer", 5, 0), 1: Death(-signal.SIGBUS)}
    assert faults.cause(deaths).line == "rank 1 was ended by SIGBUS (often: /dev/shm is full)"
    line = faults.cause(deaths, dict.fromkeys(("optimizer", "master"), Path("/scratch/state"))).line
    where = "plan.offload.optimizer and plan.offload.master: /scratch/state"
    assert line.startswith(f"rank 1: {where}: a file was cut or cannot be read while it is mapped (SIGBUS; ")
    assert "continue from the last checkpoint" in line


def fault_from(error: Exception) -> Fault:
    try:
        raise error
    except Exception as caught:
        return faults.fault_of(caught, 4)


def test_errors_are_told_in_a_line_where_a_line_says_all() -> None:
    try:
        first_host("")
    except ValueError as error:
        asked = faults.fault_of(error, 4)
    assert (asked.kind, asked.asked, asked.text) == ("told", True, str(asked.line))
    assert fault_from(JobStopped("enough")).text == "enough"
    assert fault_from(OSError(28, "No space left on device", "/x")).text == "rank 4: No space left on device: /x"
    assert fault_from(ValueError("of a library")).text.startswith("rank 4 failed:\nTraceback")
    assert fault_from(RuntimeError("[gloo/pair.cc] Connection closed by peer")).kind == "peer"
    assert fault_from(RuntimeError("size mismatch")).kind == "bug"
    assert fault_from(ConnectionResetError(104, "Connection reset by peer")).kind == "peer"


def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(ValueError, match=r"""train.device: 'tpu' is not here; use "auto", or "cpu\""""):
        job._device_type("tpu")
    assert placement.TORCHRUN[0] == "RANK"
