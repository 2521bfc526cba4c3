"""Schedules survive CSV and JSON, and a broken file is named in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.pipeline_parallel.schedule import (
    FAMILIES,
    Action,
    Kind,
    ScheduleError,
    Weights,
    build,
    from_file,
    load,
    save,
    unroll,
)


@pytest.mark.parametrize("name", FAMILIES)
def test_json_gives_back_every_family(name: str, tmp_path: Path) -> None:
    schedule = build(name, 3, 5, FAMILIES[name].least_chunks)
    save(schedule, tmp_path / "it.json")
    assert load(tmp_path / "it.json") == schedule


@pytest.mark.parametrize("name", FAMILIES)
def test_csv_gives_back_every_family(name: str, tmp_path: Path) -> None:
    schedule = build(name, 3, 5, FAMILIES[name].least_chunks)
    if schedule.rounds is not None:
        with pytest.raises(ValueError, match="continues between steps, which CSV cannot hold; save it as .json"):
            save(schedule, tmp_path / "it.csv")
        schedule = replace(unroll(schedule, 2), rounds=None)
    save(schedule, tmp_path / "it.csv")
    assert load(tmp_path / "it.csv") == schedule


@pytest.mark.parametrize("suffix", ["json", "csv"])
def test_files_keep_slices(suffix: str, tmp_path: Path) -> None:
    schedule = build("1f1b", 2, 2, slices=3)
    path = tmp_path / f"it.{suffix}"
    save(schedule, path)
    assert load(path) == build(str(path), 2, 2, slices=3) == schedule
    with pytest.raises(ValueError, match="is a schedule for 3 slices of a sequence, not 2; ask for 3"):
        build(str(path), 2, 2, slices=2)


def test_a_csv_written_by_hand(tmp_path: Path) -> None:
    """Idle cells and spaces are allowed, and updates may be left to the end."""
    path = tmp_path / "mine.csv"
    path.write_text("F0, F1, ., BW0, -, BW1\n, F0, BW0, F1, BW1\n")
    schedule = load(path)
    assert schedule.name == "mine"
    assert schedule.rows == build("1f1b", 2, 2).rows
    path.write_text("# name = turn\nF0@0,F0@3,BW0@3,BW0@0\nF0@1,F0@2,B0@2,W0@2,BW0@1\n")
    turned = load(path)
    assert (turned.name, turned.num_chunks, turned.placement) == ("turn", 2, ((0, 3), (1, 2)))
    assert turned.rows[1][2:4] == (Action(Kind.B, 0, 1), Action(Kind.W, 0, 1))


def test_a_csv_can_be_asynchronous(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("# asynchronous = true\n# weights = double\nF0,BW0,U0,F1,BW1,U1\n")
    schedule = load(path)
    assert schedule.asynchronous
    assert schedule.weights is Weights.DOUBLE
    path.write_text("# asynchronous = true\nF0,BW0\n")
    with pytest.raises(ScheduleError, match="rank 0: missing action U0"):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0,F1,BW0,BW1\nF0,Q1,BW0,BW1\n", "rank 1 cell 1: unknown action 'Q1'; write F, B, W, BW or U"),
        ("F0,F1,BW0,BW1\nF0,BW0,BW1\n", r"rank 1 action 2 \(BW1\): stands before its F1"),
        ("F0,F1,BW0,BW1\nF0,BW0,F1\n", r"rank 1: missing action B1 \(or BW\)"),
        ("F0,F1,F1,BW0,BW1\nF0,BW0,F1,BW1\n", r"rank 0 action 2 \(F1\): duplicate, action 1"),
        ("F0,BW0,F1,BW1\nF0,F1,BW0,BW1\n", "cycle: rank 0 action 1"),
        ("", "holds no rows; give one line of actions per rank"),
        ("F0@0,F0@1,BW0@1,BW0\n", "rank 0: BW0 needs @stage, one of"),
        ("F0@0,BW0@0\nF0@2,BW0@2\n", "the placement must hold each of the 2 stages once"),
        ("# what = 1\nF0,BW0\n", "line 1: unknown key 'what'; use name, asynchronous, weights, slices"),
        ("# slices = two\nF0,BW0\n", "slices = 'two' is not a number"),
        ("# weights = old\nF0,BW0\n", "unknown weights 'old'; use latest, vertical, double"),
    ],
)
def test_a_broken_csv_is_named_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [["F0"]]}, "1 rows for 2 ranks"),
        ({"rows": [["F0"], ["F9x"]]}, "rank 1 cell 0: unknown action 'F9x'"),
        ({"num_stages": "many"}, "a field has the wrong type"),
        ({"speed": 1}, "unknown field 'speed'"),
        ({"rounds": [[["F0"], ["F0"]]]}, "rounds are first, next and drain, not 1"),
    ],
)
def test_a_broken_json_is_named_in_one_line(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    save(build("1f1b", 2, 2), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ScheduleError, match=message):
        load(path)


def test_a_json_without_a_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    for text, message in (("{}", "missing field 'placement'"), ("[1", "not JSON"), ("[1]", "a schedule is an object")):
        path.write_text(text)
        with pytest.raises(ScheduleError, match=message):
            load(path)


def test_other_suffixes_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "it.txt").write_text("F0")
    with pytest.raises(ScheduleError, match="schedules are read from .csv or .json"):
        load(tmp_path / "it.txt")
    with pytest.raises(ValueError, match="schedules are saved as .csv or .json"):
        save(build("1f1b", 1, 1), tmp_path / "it.txt")
    with pytest.raises(ScheduleError, match="cannot be read"):
        load(tmp_path / "nowhere.json")


def test_a_file_for_other_numbers_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "it.csv")
    save(build("1f1b", 2, 4), path)
    assert build(path, 2, 4) == from_file(path) == from_file(path, num_microbatches=4)
    with pytest.raises(ValueError, match="is a schedule for 2 pipeline ranks, not 4; ask for 2"):
        build(path, 4, 4)
    with pytest.raises(ValueError, match="is a schedule for 4 microbatches, not 8"):
        build(path, 2, 8)
