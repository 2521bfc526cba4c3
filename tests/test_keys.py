"""The reference of a configuration's keys."""

from pathlib import Path

from typer.testing import CliRunner

from shardwise.cli import app
from shardwise.config import Config
from shardwise.keys import PAGE, keys, markdown

DOCS = Path(__file__).parent.parent / "docs"


def test_every_key_of_every_section_is_there_with_what_it_takes_and_means() -> None:
    found = {key.name: key for key in keys()}
    for name, section in Config():
        for key, value in section:
            assert f"{name}.{key}" in found or any(other.startswith(f"{name}.{key}.") for other in found), (key, value)
    assert [key.name for key in found.values() if not key.takes or not key.meaning] == []
    assert found["plan.zero"].takes == "whole number ≥ 0 ≤ 3"
    assert found["train.schedule"].takes == "cosine, wsd, linear, constant"
    assert found["plan.recompute"].takes == "text or number"
    assert (found["data.batch"].default, found["data.source"].default) == ("8", '"python"')


def test_what_is_not_built_says_so() -> None:
    unbuilt = {key.name for key in keys("plan.") if key.meaning.endswith("Not built yet")}
    assert unbuilt == {f"plan.{key}" for key in ("expert", "averaging", "compress_gradients", "compress_activations")}


def test_the_page_is_what_the_models_say() -> None:
    """Made by `python -m shardwise.keys > docs/configuration.md`."""
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == PAGE + markdown(keys())


def test_train_prints_them() -> None:
    result = CliRunner().invoke(app, ["train", "--keys"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) == len(keys()) + 1
    assert next(line for line in lines if line.startswith("plan.tensor ")).split()[-3:] == [
        "Megatron",
        "tensor",
        "parallelism",
    ]
