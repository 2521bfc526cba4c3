"""The commands: what they call, what they say, and how they exit."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import shardwise
from shardwise import __version__, cli, verify_command
from shardwise.config import Config
from shardwise.problems import Problem
from shardwise.training import launch
from shardwise.training.faults import JobFailed, JobStopped
from shardwise.verify import Difference, Report

QUICKSTART = str(Path(__file__).parent.parent / "examples" / "quickstart.toml")
COMMANDS = [command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback]


class Said:
    """What a command left behind."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["shardwise", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        status = caught.value.code
        assert isinstance(status, int)
        return Said(status, *capsys.readouterr())

    return call


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that would have been trained."""
    configs: list[Config] = []
    monkeypatch.setattr(launch, "train", configs.append)
    return configs


def test_train_gets_the_file_and_the_overrides(run, trained) -> None:
    said = run("train", QUICKSTART, "plan.replicate=1", "train.steps=7", "train.run=a b")
    assert (said.status, said.err) == (0, "")
    (config,) = trained
    assert (config.plan.replicate, config.train.steps, config.train.run) == (1, 7, "a b")
    assert config.model.family == "llama"


def test_a_wrong_key_is_one_line_that_suggests_the_right_one(run, trained) -> None:
    said = run("train", QUICKSTART, "plan.tenser=2")
    assert said.err == "error: plan.tenser: no such key; did you mean plan.tensor?\n"
    assert (said.status, said.out, trained) == (2, "", [])


def test_every_problem_is_a_line_of_its_own(run, trained) -> None:
    said = run("train", QUICKSTART, "plan.chunks=2", "plan.vertical_sync=true")
    assert said.status == 2
    assert len(said.err.splitlines()) == 2
    assert all(line.startswith("error: plan.") for line in said.err.splitlines())


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("schedule", "generate", "doctor")])
def test_a_missing_file_is_one_line(run, trained, command: str) -> None:
    said = run(command, "nowhere/job.toml")
    assert said.err == "error: nowhere/job.toml: no such file; give the path of a TOML file\n"
    assert said.status == 2


def test_overrides_without_a_file_are_told_apart(run, trained) -> None:
    said = run("train", "plan.replicate=2")
    assert said.err == "error: plan.replicate=2: is not a configuration file; give CONFIG first, then overrides\n"
    assert said.status == 2


@pytest.mark.parametrize(
    "arguments", [["trian"], ["train"], ["train", QUICKSTART, "--fast"], ["generate", "x", "-n", "0"]]
)
def test_wrong_usage_is_one_line(run, trained, arguments: list[str]) -> None:
    said = run(*arguments)
    assert said.status == 2
    assert len(said.err.splitlines()) == 1
    assert said.err.startswith("error: ")


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (JobStopped("step 3: loss nan; lower optimizer.lr"), 1, "error: step 3: loss nan; lower optimizer.lr\n"),
        (JobFailed("rank 1 failed:\nTraceback"), 1, "error: rank 1 failed:\nTraceback\n"),
        (FileNotFoundError(2, "No such file", "a.json"), 2, "error: a.json: no such file; give a path that exists\n"),
        (KeyboardInterrupt(), 130, ""),
        (cli.ProblemError([Problem("a.b", "is wrong", "mend it")]), 2, "error: a.b: is wrong; mend it\n"),
    ],
)
def test_what_went_wrong_decides_the_exit_status(
    run, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, text: str
) -> None:
    def fail(config: Config) -> None:
        raise error

    monkeypatch.setattr(launch, "train", fail)
    said = run("train", QUICKSTART)
    assert (said.status, said.err) == (status, text)


def test_our_own_mistakes_keep_their_traceback(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: Config) -> None:
        int("not a number")  # a ValueError, but not one for the user

    monkeypatch.setattr(launch, "train", fail)
    with pytest.raises(ValueError, match="invalid literal"):
        run("train", QUICKSTART)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(run, command: str) -> None:
    said = run(command, "--help")
    assert said.status == 0
    assert "Examples:" in said.out
    assert f"shardwise {command} " in said.out


def test_version(run) -> None:
    assert run("--version").out == f"shardwise {__version__}\n"


def test_the_package_is_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "shardwise", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"shardwise {__version__}\n", "")


def test_public_names_are_listed_before_they_are_used() -> None:
    assert set(dir(shardwise)) == {*shardwise.__all__, "__version__"}
    assert all(getattr(shardwise, name) is not None for name in shardwise.__all__)


def test_help_does_not_wait_for_torch() -> None:
    program = (
        "import sys; sys.argv = ['shardwise', 'train', '--help']\n"
        "from shardwise.cli import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules, 'torch is imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "CONFIG" in done.stdout


SMALL = [
    "plan.replicate=1",
    "model.layers=1",
    "model.hidden=16",
    "model.heads=2",
    "model.kv_heads=1",
    "data.tokenizer=bytes",
    "data.section=1024",
    "data.sequence=16",
    "data.batch=4",
    "data.prefetch=0",
    "train.steps=3",
    "train.eval_batches=1",
    "checkpoint.asynchronous=false",
    "log.tensorboard=false",
    "log.peak_tflops=1",
    "log.sample=0",
]


def test_prepare_train_and_generate_follow_one_another(run, tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text("".join(f"{number} times two is {2 * number}\n" for number in range(3000)))
    overrides = [*SMALL, f"data.source={source}", f"data.cache={tmp_path / 'cache'}", f"train.run={tmp_path / 'run'}"]
    prepared = run("prepare", QUICKSTART, *overrides)
    assert prepared.status == 0
    assert "vocabulary: 257\n" in prepared.out
    assert str(tmp_path / "cache") in prepared.out

    trained = run("train", QUICKSTART, *overrides)
    assert trained.status == 0
    assert trained.out.startswith("1 rank: microbatches=2; ")
    assert " parameters; MFU against 1 TFLOP/s (log.peak_tflops of every rank)\n" in trained.out
    assert "bits per byte" in trained.out
    assert (tmp_path / "run" / "config.toml").exists()

    first = run("generate", str(tmp_path / "run"), "--prompt", "7 times", "--tokens", "20", "--seed", "3")
    again = run("generate", str(tmp_path / "run"), "--prompt", "7 times", "--tokens", "20", "--seed", "3")
    other = run("generate", str(tmp_path / "run"), "--prompt", "7 times", "--tokens", "20", "--seed", "4")
    assert first.status == 0
    assert first.out.startswith("7 times")
    assert first.out == again.out
    assert first.out != other.out


def test_verify_agrees_and_says_so_in_the_exit_status(run) -> None:
    said = run("verify", QUICKSTART, *SMALL, "--steps", "1")
    assert said.status == 0
    assert "agrees with one device" in said.out
    found = json.loads(run("verify", QUICKSTART, *SMALL, "--steps", "1", "--json").out)
    assert (found["agrees"], found["steps"]) == (True, 1)
    assert {difference["kind"] for difference in found["differences"]} >= {"loss", "gradient", "parameter"}


NAME = "blocks.0." + "a_module_with_a_long_name." * 4 + "weight"


@pytest.mark.parametrize("width", [50, 80])
def test_verify_cuts_no_name_in_a_narrow_terminal(width: int) -> None:
    out = io.StringIO()
    report = Report("replicate=2", 1e-9, 3, [Difference(0, "gradient", NAME, 1e-12)])
    verify_command.show(report, Console(file=out, width=width, force_terminal=True, no_color=True))
    columns = [line.split("\u2502") for line in out.getvalue().splitlines() if line.count("\u2502") == 7]
    assert "".join(cells[3].strip() for cells in columns) == NAME


def test_verify_has_one_line_for_each_row_where_no_terminal_is(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    report = Report("replicate=2", 1e-9, 3, [Difference(0, "gradient", NAME, 1e-12)])
    monkeypatch.setattr(verify_command, "run", lambda request: report)
    said = run("verify", QUICKSTART)
    assert f" {NAME} " in said.out
    assert max(map(len, said.out.splitlines())) < 300


def test_verify_finds_a_folder_that_cannot_be_used_before_it_starts_ranks(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "on_ranks", lambda *_, **__: pytest.fail("started"))
    said = run("verify", QUICKSTART, "plan.offload.optimizer=disk:/proc/x/y")
    assert (said.status, said.out) == (2, "")
    assert said.err.startswith("error: plan.offload.optimizer: /proc/x/y: there is no folder /proc/x; make it, name")
    assert said.err.count("\n") == 1


def test_verify_names_the_parameter_that_differs(run) -> None:
    said = run("verify", QUICKSTART, *SMALL, "--steps", "2", "--plant", "stale-weights", "--json")
    assert said.status == 1
    found = json.loads(said.out)
    assert found["first"]["kind"] == "parameter"
    assert found["first"]["name"].split(".")[0] in ("embedding", "blocks", "head")
    wrong = run("verify", QUICKSTART, *SMALL, "--plant", "nothing")
    assert wrong.status == 2
    assert len(wrong.err.splitlines()) == 1


def test_a_fault_with_nothing_to_act_on_is_refused(run) -> None:
    said = run("verify", QUICKSTART, *SMALL, "plan.replicate=1", "--plant", "skip-reduction")
    assert said.status == 2
    assert said.err.startswith("error: --plant skip-reduction: ")
    assert len(said.err.splitlines()) == 1


def test_generate_says_what_is_missing(run, tmp_path: Path) -> None:
    said = run("generate", str(tmp_path))
    assert said.status == 2
    assert said.err.startswith(f"error: {tmp_path} holds no checkpoint; ")


def test_generate_on_a_device_that_is_not_there_is_one_line(run, tmp_path: Path) -> None:
    for device in ("cuda:77", "tpo"):
        said = run("generate", str(tmp_path), "--device", device)
        assert said.status == 2
        assert said.err.startswith(f"error: device = {device}: there is none here; choose cpu")
        assert len(said.err.splitlines()) == 1


def test_schedule_is_a_command(run) -> None:
    said = run("schedule", "interleaved", "--stages", "4", "--chunks", "2", "--microbatches", "8")
    assert said.status == 0
    assert "3/16" in said.out
