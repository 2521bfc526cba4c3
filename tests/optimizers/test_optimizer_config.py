"""The [optimizer] section: every optimizer's own settings and defaults, and what it refuses."""

from dataclasses import fields
from pathlib import Path

import pytest

from shardwise import config
from shardwise.config import ConfigError
from shardwise.optimizers import SGD, Adafactor, AdamW, AdamW8bit, Lion, Muon, OptimizerConfig, Override, build

OPTIMIZERS = {
    "adamw": AdamW,
    "adafactor": Adafactor,
    "adamw-8bit": AdamW8bit,
    "muon": Muon,
    "lion": Lion,
    "sgd": SGD,
}


@pytest.mark.parametrize(("name", "optimizer"), OPTIMIZERS.items())
def test_a_name_alone_gives_the_optimizers_own_defaults(name: str, optimizer: type) -> None:
    section = OptimizerConfig.model_validate({"name": name})
    assert build(section) == optimizer()
    given = section.model_dump(exclude_none=True)
    assert set(given) == {"name", *(setting.name for setting in fields(optimizer))}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_resolved_section_reads_back_equal(name: str, tmp_path: Path) -> None:
    overrides = 'optimizer.overrides={"*.norm.*"={lr_scale=0.5}, "head.*"={weight_decay=0.0}}'
    loaded = config.load(None, [f"optimizer.name={name}", "optimizer.lr=0.5", overrides])
    path = tmp_path / "job.toml"
    path.write_text(loaded.to_toml())
    assert config.load(path) == loaded
    optimizer = build(loaded.optimizer)
    assert optimizer.lr == 0.5
    assert optimizer.overrides == {"*.norm.*": Override(lr_scale=0.5), "head.*": Override(weight_decay=0.0)}


def test_settings_reach_the_optimizer() -> None:
    loaded = config.load(None, ["optimizer.name=adamw-8bit", "optimizer.block=2048", 'optimizer.exclude=["a", "b"]'])
    assert build(loaded.optimizer) == AdamW8bit(block=2048, exclude=("a", "b"))
    loaded = config.load(None, ["optimizer.name=muon", "optimizer.adjustment=original", "optimizer.betas=[0.5, 0.75]"])
    assert build(loaded.optimizer) == Muon(adjustment="original", betas=(0.5, 0.75))


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        (
            ["optimizer.momentum=0.9"],
            "optimizer.momentum: 0.9 belongs to adafactor, muon, sgd, not to adamw; "
            "remove it or set optimizer.name to adafactor",
        ),
        (
            ["optimizer.name=lion", "optimizer.block=256"],
            "optimizer.block: 256 belongs to adamw-8bit, not to lion; remove it or set optimizer.name to adamw-8bit",
        ),
        (
            ["optimizer.name=sgd", "optimizer.nesterov=true"],
            "optimizer.nesterov: true looks ahead along the momentum, which is 0; set optimizer.momentum, to 0.9 say",
        ),
        (
            ["optimizer.betas=[1.0, 0.5]"],
            "optimizer.betas: [1.0, 0.5] is out of range; give each at least 0 and below 1, as in [0.9, 0.95]",
        ),
        (["optimizer.betas=[0.9]"], "optimizer.betas: has too few values; give them all"),
        (
            ['optimizer.overrides={"head.*"={lr_scale=-1.0}}'],
            "optimizer.overrides: lr_scale is -1.0; give at least 0",
        ),
        (
            ["optimizer.name=adam"],
            "optimizer.name: 'adam' is not known; did you mean adamw? "
            "choose one of adamw, adafactor, adamw-8bit, muon, lion, sgd",
        ),
    ],
)
def test_what_does_not_go_together_is_one_line(texts: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config.load(None, texts)
    assert str(raised.value) == line
