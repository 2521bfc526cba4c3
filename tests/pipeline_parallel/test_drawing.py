"""Drawings show what the timeline holds, in the terminal, as pictures, as traces and as a page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.pipeline_parallel.drawing import COLORS, color, figure, save_trace, terminal, trace
from shardwise.pipeline_parallel.page import save_page
from shardwise.pipeline_parallel.schedule import Kind, build
from shardwise.pipeline_parallel.simulator import Costs, simulate
from shardwise.pipeline_parallel.timeline import Timeline, compare

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine; apt-get install chromium")


def _timeline(name: str = "1f1b", p: int = 2, m: int = 3, v: int = 1) -> Timeline:
    return simulate(build(name, p, m, v)).timeline


def test_terminal_lines_have_whole_columns_per_unit_of_time() -> None:
    lines = terminal(_timeline(), 50).plain.splitlines()  # 12 units in 43 columns: three each
    assert lines[0] == "rank 0  F0 F1······  D0   F2  D1  ···  D2  "
    assert lines[1] == "rank 1 ··· F0  D0   F1  D1   F2  D2  ······"
    assert lines[2] == " F  forward   D  backward  "


def test_slices_are_called_by_their_sequence_and_share_its_shade() -> None:
    timeline = simulate(build("1f1b", 1, 2, slices=2)).timeline
    assert terminal(timeline, 120).plain.splitlines()[0].split("D")[1].strip() == "0.1"
    assert timeline.from_json(timeline.to_json()) == timeline
    assert len({color(e, 2) for e in timeline.events if e.action.kind is Kind.F}) == 2
    assert trace([timeline])["traceEvents"][2]["name"] == "F0.0"


def test_terminal_falls_back_to_what_fits() -> None:
    timeline = _timeline("zb-h1", 2, 12)  # 37 units in 43 columns: one each
    assert terminal(timeline, 50).plain.splitlines()[0].startswith("rank 0 01·00211322")
    assert terminal(timeline, 50, colored=False).plain.splitlines()[0].startswith("rank 0 FF·BWFBWFBWF")
    squeezed = terminal(_timeline("1f1b", 8, 64), 60, colored=False).plain.splitlines()
    assert {len(line) for line in squeezed[:8]} == {60}


def test_terminal_of_measured_times_fills_the_width() -> None:
    timeline = simulate(build("1f1b", 2, 3), Costs.uniform(2, 0.31, 0.42, 0.27)).timeline
    assert {len(line) for line in terminal(timeline, 80).plain.splitlines()[:2]} == {80}


def test_colors_tell_kinds_chunks_and_neighbours_apart() -> None:
    events = _timeline("zbv", 2, 4, 2).events
    assert {color(e) for e in events if e.action[1:] == (0, 0)} == {COLORS[k] for k in (Kind.F, Kind.B, Kind.W)}
    assert len({color(e) for e in events if e.action.kind is Kind.F}) == 4  # two chunks, odd and even


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_written(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"it.{suffix}"
    figure([_timeline("interleaved", 2, 4, 2)] * 2, path, "interleaved")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    figure([_timeline("interleaved", 2, 4, 2)] * 2, path, "interleaved")
    assert path.read_bytes() == data


def test_an_unknown_picture_format_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="it.what: Format 'what' is not supported"):
        figure([_timeline()], tmp_path / "it.what", "it")


def test_missing_matplotlib_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"needs matplotlib; pip install 'shardwise\[plots\]'"):
        figure([_timeline()], tmp_path / "it.png", "it")


def test_trace_holds_every_action_and_counts_activations(tmp_path: Path) -> None:
    timeline = _timeline("1f1b", 3, 4)
    save_trace([timeline, replace(timeline, source="measured", unit="s")], tmp_path / "it.trace.json")
    data = json.loads((tmp_path / "it.trace.json").read_text())
    assert data == trace([timeline, replace(timeline, source="measured", unit="s")])
    blocks = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert len(blocks) == 2 * len(timeline.events)
    assert {(e["pid"], e["tid"]) for e in blocks} == {(pid, rank) for pid in (0, 1) for rank in range(3)}
    first = next(e for e in blocks if e["pid"] == 1 and e["tid"] == 1)
    assert (first["name"], first["ts"], first["dur"]) == ("F0", 1e6, 1e6)
    held = [e["args"]["held"] for e in data["traceEvents"] if e["ph"] == "C" and e["pid"] == 0 and e["tid"] == 0]
    assert max(held) == 3
    assert held[-1] == 0


def _page(path: Path) -> str:
    simulated = _timeline("interleaved", 4, 8, 2)
    measured = replace(
        simulate(build("interleaved", 4, 8, 2), Costs.uniform(8, 1, 1.2, 1.1)).timeline, source="measured"
    )
    table = [["rank", "idle"], ["0", "</script><b>9</b>"]]
    save_page([simulated, measured], path, "a <title>", ["bubble 3/16"], table, compare(simulated, measured))
    return path.read_text()


def test_page_asks_nobody_for_anything(tmp_path: Path) -> None:
    text = _page(tmp_path / "it.html")
    assert not re.findall(r"""(?:src|href)\s*=(?!\s*["']data:)|url\(|@import|https?://|fetch\(|XMLHttp""", text)
    assert text.count("</script>") == 2


# What a reader does, played in the page: point at rank 1's first action, zoom, pan, switch a kind off, go back.
PLAY = """
<script>
addEventListener("load", () => {
  const canvas = document.querySelector("canvas"), tip = document.getElementById("tip"), seen = {};
  const box = canvas.getBoundingClientRect(), drawn = () => Number(document.body.dataset.drawn);
  const at = (x, y) => ({ clientX: box.left + x, clientY: box.top + y, bubbles: true, cancelable: true });
  const middle = (1.5 / 68.4) * (box.width - 62) + 62;
  canvas.dispatchEvent(new PointerEvent("pointermove", at(middle, 56 + 10)));
  seen.tip = tip.textContent; seen.visible = tip.style.visibility;
  seen.all = drawn();
  for (let i = 0; i < 12; i++) canvas.dispatchEvent(new WheelEvent("wheel", { ...at(200, 20), deltaY: -300 }));
  seen.zoomed = drawn();
  canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  canvas.dispatchEvent(new MouseEvent("dblclick"));
  seen.back = drawn();
  const button = document.querySelector("button.kind"); button.click();
  seen.pressed = button.getAttribute("aria-pressed");
  const out = document.createElement("pre"); out.id = "seen"; out.textContent = JSON.stringify(seen);
  document.body.append(out);
});
</script>
"""


@needs_browser
def test_page_opens_in_a_browser_and_reacts(tmp_path: Path) -> None:
    text = _page(tmp_path / "it.html")
    played = tmp_path / "played.html"
    played.write_text(text.replace("</body>", PLAY + "</body>"))
    run = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
        + ["--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update"]
        + [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1300,900", "--dump-dom", played.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "CONSOLE" not in run.stderr
    found = re.search(r'<pre id="seen">(.*)</pre>', run.stdout)
    assert found is not None
    seen = json.loads(found[1].replace("&amp;", "&"))
    actions = 2 * 4 * (8 * 2 * 2 + 2)
    assert seen["tip"] == "F0  forward\nmicrobatch 0, stage 1, rank 1, chunk 0\nstart 1\nduration 1"
    assert seen["visible"] == "visible"
    assert (seen["all"], seen["back"], seen["pressed"]) == (actions, actions, "false")
    assert 0 < seen["zoomed"] < actions / 4
    assert "<h1>a &lt;title&gt;</h1>" in run.stdout
    assert "&lt;b&gt;9&lt;/b&gt;</td>" in run.stdout
    assert "interleaved, measured" in run.stdout
