"""`shardwise doctor`: it measures everything, writes a file that jobs read, and says what cannot be."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from shardwise import choices, cli
from shardwise.choices import VARIANTS
from shardwise.foresight import doctor, hardware


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["shardwise", "doctor", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_it_measures_everything_and_writes_a_file_that_jobs_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "SECONDS", 0.01)
    monkeypatch.setattr(doctor, "SIZES", {torch.float32: ((4096, 2), (65536, 1)), torch.float16: ((4096, 1),)})
    monkeypatch.setattr(doctor.measure_disk, "__defaults__", (1 << 20,))
    path = tmp_path / "node.json"
    assert run(monkeypatch, "--json", "--out", str(path), "--disk", str(tmp_path)) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == json.loads(path.read_text())
    assert str(path) in said.err
    found = hardware.load(path)
    assert hardware.Hardware(**json.loads(found.to_json())) == found
    assert "gloo" in found.backends
    cpu = found.devices[0]
    assert set(cpu.flops) == {"float32", "float64", "bfloat16", "float16"}
    assert all(speed > 1e6 for speed in (*cpu.flops.values(), cpu.copy_bandwidth))
    assert cpu.memory > 1 << 28
    assert found.shared_memory is None or found.shared_memory > 1e6
    assert found.disk is not None
    assert min(found.disk.write, found.disk.read) > 1e3
    kinds = {(row.collective, row.dtype, row.num_bytes) for row in found.collectives}
    assert kinds == {(c, d, b) for c in VARIANTS for d, b in (("float32", 4096), ("float32", 65536), ("float16", 4096))}
    assert all(set(row.milliseconds) == set(VARIANTS[row.collective]) for row in found.collectives)
    assert choices.load(path).table == found.collectives
    assert [path.name for path in tmp_path.iterdir()] == ["node.json"]  # the disk's file is gone

    doctor.show(found, Console(width=160))
    words = capsys.readouterr().out
    for word in ("reduce_scatter", "float16", "GFLOP/s", "shared memory", "GB/s"):
        assert word in words


def test_its_tables_fit_80_columns_and_cut_no_word() -> None:
    flops = {"float32": 51000.3e9, "float64": 60000.1e9, "bfloat16": 700003.2e9, "float16": 700002.1e9}
    names = ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "NVIDIA H200")
    found = hardware.Hardware(
        date="2026-11-30",
        torch="2.11.0",
        cores=2,
        backends=("gloo",),
        devices=tuple(
            hardware.Device(kind="cpu", name=name, memory=8 << 30, flops=flops, copy_bandwidth=7e9) for name in names
        ),
        shared_memory=6e9,
        disk=hardware.Disk(folder=f"/{'long-name/' * 20}", write=1e9, read=2e9),
        collectives=tuple(
            choices.Measured("gloo", collective, dtype, 64 << 20, dict.fromkeys(ways, 123.45))
            for collective, ways in VARIANTS.items()
            for dtype in ("float32", "bfloat16")
        ),
    )
    out = io.StringIO()
    doctor.show(found, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "\u2026" not in out.getvalue()
    assert "".join(line.strip("\u2502 ").split("  ")[0] for line in lines).count("long-name/") == 2 * 20
    for collective, ways in VARIANTS.items():  # one line for each measurement
        title = next(number for number, line in enumerate(lines) if line.startswith(f"{collective} between"))
        assert all(way in lines[title + 2] for way in ways)
        assert lines[title + 4].count("123.45") == len(ways)


def test_what_cannot_be_is_said_in_a_line_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "measure", lambda *_: pytest.fail("measured"))
    for arguments, reason in (
        (("--out", str(tmp_path)), f"--out {tmp_path}: is a folder; give a file"),
        (("--out", str(tmp_path / "a" / "b")), f"its folder {tmp_path / 'a'} does not exist; give"),
        (("--disk", str(tmp_path / "a")), f"--disk {tmp_path / 'a'}: is no folder; give"),
    ):
        assert run(monkeypatch, *arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert reason in said
        assert said.count("\n") == 1


def test_a_disk_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--disk .*gone: No such file or directory; give a folder"):
        doctor.measure_disk(tmp_path / "gone")


def test_a_damaged_file_is_said_with_the_mend(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    path.write_text('{"date": 3}')
    with pytest.raises(ValueError, match=r"hardware.json is no hardware file .* `shardwise doctor`"):
        hardware.load(path)
