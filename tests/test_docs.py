"""The documentation's programs run, and its links lead somewhere."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_the_page_on_python_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    said = re.search(r"print\(metrics\)  # (.*)", blocks[0])
    assert said is not None
    assert printed[0] == said[1]
    assert float(printed[1].removeprefix("held out ")) < 1.3
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000020", "step-00000030"]


def test_links_between_pages_and_to_files_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
