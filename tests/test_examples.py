"""What `examples/` holds runs as it stands."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.plan import Plan
from tests.pool import run_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"


def last_loss(script: str, plan: Plan, steps: int) -> float:
    loss = runpy.run_path(str(EXAMPLES / script))["main"](plan, steps=steps)
    assert isinstance(loss, float)
    return loss


def test_own_module_learns_the_same_in_every_layout() -> None:
    alone = last_loss("own_module.py", Plan(), 60)
    assert alone < 1.0  # four classes: 1.39 for a guess
    for plan in (Plan(replicate=2, microbatches=2), Plan(pipeline=2, microbatches=4, schedule="zb-h1")):
        assert run_ranks(last_loss, 2, "own_module.py", plan, 60) == [pytest.approx(alone, rel=1e-3)] * 2


def test_a_hugging_face_model_learns_the_same_by_every_plan_of_the_example() -> None:
    alone = last_loss("huggingface.py", Plan(), 20)
    assert alone < 3.0  # 64 tokens: 4.16 for a guess
    for values in runpy.run_path(str(EXAMPLES / "huggingface.py"))["PLANS"].values():
        found = run_ranks(last_loss, 2, "huggingface.py", Plan(**values), 20)
        assert found == [pytest.approx(alone, rel=1e-2)] * 2


def test_without_transformers_the_example_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('not here')")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "huggingface.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.endswith("not installed; pip install 'shardwise[hf]'\n")
    assert done.stderr.count("\n") == 1
