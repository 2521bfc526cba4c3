"""`shardwise schedule` prints what a schedule costs, writes every format, and refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from shardwise.pipeline_parallel.commands import schedule
from shardwise.pipeline_parallel.schedule import FAMILIES, build, hand_on_early, load, save
from shardwise.pipeline_parallel.simulator import Costs, simulate
from shardwise.pipeline_parallel.timeline import load_timeline

app = typer.Typer()
app.command()(schedule)


def _run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.output


def _refused(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_the_readmes_example() -> None:
    out = _run("interleaved", "--stages", "4", "--chunks", "2", "--microbatches", "8")
    assert "interleaved · 4 ranks × 2 chunks · 8 microbatches" in out
    assert "bubble 3/16 of ideal time (18.75%)" in out
    assert "0     0, 4                 5.5      5.5                1    24   4.5" in out
    assert "rank 0 FFFFFFFFFFF···D0FD1" in out


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_shown_with_only_stages_and_microbatches(name: str) -> None:
    out = _run(name, "-p", "3", "-m", "4")
    assert out.count("\nrank ") >= 4
    assert "of ideal time" in out


def test_bubbles_are_told_apart() -> None:
    assert "bubble 3/8 of ideal time (37.50%)\ntime 33, ideal 24\n" in _run("1f1b", "-p", "4", "-m", "8")
    out = _run("zb-h2", "-p", "4", "-m", "8")
    assert "bubble 0 of ideal time\nbubble 1/8 of ideal time (12.50%) if all ranks meet between steps\n" in out
    out = _run("pipedream", "-p", "4", "-m", "4", "--steps", "2")
    assert "bubble 0 of ideal time in steady state\n" in out
    assert _versions(out) == ["4", "3", "2", "1"]
    assert _versions(_run("pipedream", "-p", "4", "-m", "9", "--vertical-sync")) == ["4"] * 4


def test_slices_cost_their_share_of_a_microbatch() -> None:
    out = _run("1f1b", "-p", "4", "-m", "4", "--slices", "4")
    assert "1f1b · 4 ranks · 4 microbatches of 4 slices" in out
    assert "bubble 3/16 of ideal time (18.75%)\ntime 14.25, ideal 12\n" in out
    assert [line.split()[2] for line in out.splitlines()[1:] if line[:1].isdigit()] == ["1.75", "1.5", "1.25", "1"]


def _versions(out: str) -> list[str]:
    """The column of weight versions."""
    return [line.split()[4] for line in out.splitlines() if line[:1].isdigit()]


def test_costs_and_transfers_count() -> None:
    """Two forwards, two transfers and two backwards in a row."""
    assert "time 6.5, ideal 3\n" in _run("1f1b", "-p", "2", "-m", "1", "--costs", "0.5,1,1.5", "--comm", "0.25")


def test_auto_takes_a_limit_and_a_barrier() -> None:
    assert "bubble 0 of ideal time" in _run("auto", "-p", "4", "-m", "8", "--limit", "8")
    assert "bubble 1/8 of ideal time" in _run("auto", "-p", "4", "-m", "8", "--limit", "8", "--barrier")


def test_every_format_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = ["it.png", "it.svg", "it.html", "it.json", "it.csv", "it.trace.json"]
    wanted = [part for name in names for part in ("--out", tmp_path / name)]
    out = _run("zbv", "-p", "2", "-m", "3", *wanted)
    assert [line for line in out.splitlines() if line.startswith("wrote ")] == [f"wrote {tmp_path / n}" for n in names]
    schedule = build("zbv", 2, 3, 2)
    assert load(tmp_path / "it.csv") == load(tmp_path / "it.json") == schedule
    assert len(load_timeline(tmp_path / "it.json").events) == sum(map(len, schedule.rows))
    assert json.loads((tmp_path / "it.json").read_text())["bubble_fraction"] == "0"
    assert "traceEvents" in json.loads((tmp_path / "it.trace.json").read_text())
    assert (tmp_path / "it.svg").read_text().count("<path") > 30
    assert "zbv" in (tmp_path / "it.html").read_text(encoding="utf-8")


def test_a_file_is_shown_like_a_family(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    save(build("zb-h1", 3, 5), path)
    assert "zb-h1 · 3 ranks · 5 microbatches" in _run(path)
    assert "is a schedule for 3 pipeline ranks, not 4; ask for 3" in _refused(path, "-p", "4")


@pytest.mark.parametrize("early", [False, True])
def test_a_recording_may_have_backwards_in_two_halves(tmp_path: Path, early: bool) -> None:
    plain = build("1f1b", 3, 4)
    ran = simulate(hand_on_early(plain) if early else plain, Costs.uniform(3, 2, 3, 1)).timeline
    path = tmp_path / "run.json"
    path.write_text(json.dumps(ran.to_json() | {"source": "measured", "unit": "s"}))
    out = _run("1f1b", "-p", "3", "-m", "4", "--measured", path)
    assert f"step {ran.makespan} simulated, {ran.makespan} measured: +0.0%" in out
    assert ran.makespan == (34 if early else 36)


def test_a_recording_stands_beside_its_simulation(tmp_path: Path) -> None:
    path, page = tmp_path / "run.json", tmp_path / "both.html"
    _run("1f1b", "-p", "3", "-m", "4", "--costs", "2,3,1", "--out", path)
    data = json.loads(path.read_text())["timeline"] | {"source": "measured", "unit": "s"}
    path.write_text(json.dumps(data))
    out = _run("1f1b", "-p", "3", "-m", "4", "--measured", path, "--out", page)
    assert "time 36 s, ideal 24 s" in out
    assert "step 36 simulated, 36 measured: +0.0%" in out
    assert "1f1b, measured" in page.read_text()
    out = _run("1f1b", "-p", "3", "-m", "4", "--measured", path, "--costs", "1,1,1")
    assert "step 18 simulated, 36 measured: +100.0%" in out
    assert "compare runs of the same schedule" in _refused("gpipe", "-p", "3", "-m", "3", "--measured", path)


def test_auto_searches_with_recorded_times(tmp_path: Path) -> None:
    """Record any schedule, search the best for its times, and give the file to the plan."""
    path, best = tmp_path / "run.json", tmp_path / "best.json"
    _run("zb-h1", "-p", "4", "-m", "12", "--costs", "3,4,2", "--out", path)
    recorded = json.loads(path.read_text())
    path.write_text(json.dumps(recorded["timeline"] | {"source": "measured"}))
    _run("auto", "-p", "4", "-m", "12", "--limit", "8", "--measured", path, "--out", best)
    found = json.loads(best.read_text())
    assert found["ideal"] == 12 * 9
    assert found["bubble"] < recorded["bubble"]
    assert build(str(best), 4, 12).name == "auto"


def test_a_recorded_asynchronous_step_is_compared_in_steady_state(tmp_path: Path) -> None:
    from shardwise.pipeline_parallel.simulator import steady_timeline

    path = tmp_path / "run.json"
    path.write_text(json.dumps(steady_timeline(build("pipedream", 3, 4), unit="s").to_json()))
    assert "step 14 simulated, 14 measured: +0.0%" in _run("pipedream", "-p", "3", "-m", "4", "--measured", path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b",), "1f1b needs --stages and --microbatches, such as --stages 4 --microbatches 8"),
        (("1f1c", "-p", "2", "-m", "2"), "unknown schedule '1f1c'; did you mean 1f1b?"),
        (("1f1b", "-p", "0", "-m", "2"), "stages = 0 is too small; use at least 1"),
        (("1f1b", "-p", "2", "-m", "2", "-v", "2"), "1f1b has one chunk per rank, not 2; set chunks = 1"),
        (("pipedream-2bw", "-p", "4", "-m", "2"), "microbatches = 2 is below 4; raise it or use pipedream"),
        (("1f1b", "-p", "2", "-m", "2", "--costs", "1,2"), "--costs '1,2' must be three times F,B,W, such as 1,1,1"),
        (("1f1b", "-p", "2", "-m", "2", "--costs", "1,-2,1"), "must not be negative"),
        (("1f1b", "-p", "2", "-m", "2", "--comm", "-1"), "--comm -1 is negative"),
        (("1f1b", "-p", "2", "-m", "2", "--limit", "2"), "--limit goes with auto, not with 1f1b; leave it out"),
        (("gpipe", "-p", "2", "-m", "2", "--vertical-sync"), "--vertical-sync goes with pipedream, not with gpipe"),
        (("auto", "-p", "2", "-m", "2", "--limit", "0"), "--limit 0 holds no microbatch; give at least 1"),
        (("1f1b", "-p", "2", "-m", "2", "--out", "it.bmp"), "--out it.bmp: unknown format; use one of .png"),
        (("1f1b", "-p", "2", "-m", "2", "--out", "/nowhere/it.csv"), "there is no folder /nowhere; make it"),
        (("nowhere.csv",), "error: nowhere.csv: cannot be read: No such file or directory; give"),
        (
            ("1f1b", "-p", "2", "-m", "2", "--measured", "nowhere.json"),
            "--measured nowhere.json: cannot be read: No such",
        ),
        (("1f1b", "-p", "2", "-m", "2", "--measured", __file__), "is no recorded timeline ("),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert message in _refused(*arguments)


def test_help_has_examples() -> None:
    assert "shardwise schedule 1f1b --stages 4 --microbatches 8" in _run("--help")
