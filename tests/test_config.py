"""One TOML file and dotted overrides become a checked configuration, or one line for each problem."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise import config
from shardwise.config import Config, ConfigError

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.toml"))


def line_of(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load(path, overrides)
    return str(caught.value)


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def test_without_a_file_every_key_has_its_default() -> None:
    assert config.load() == Config()
    assert Config().check(num_ranks=1) == []


def test_a_file_gives_values_and_overrides_win_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, "[plan]\nreplicate = 2\nmicrobatches = 2\n[train]\nsteps = 7\n[optimizer]\nlr = 1\n")
    loaded = config.load(path, ["plan.replicate=3", "train.seed = 5", "plan.replicate=4"])
    assert (loaded.plan.replicate, loaded.plan.microbatches) == (4, 2)
    assert (loaded.train.steps, loaded.train.seed) == (7, 5)
    assert loaded.optimizer.lr == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plan.schedule=gpipe", "gpipe"),
        ("plan.schedule=1f1b", "1f1b"),
        ('plan.schedule="gpipe"', "gpipe"),
        ("plan.cut=[1, 3]", (1, 3)),
        ("plan.vertical_sync=false", False),
        ("plan.microbatches=0x4", 4),
    ],
)
def test_an_override_is_toml_and_a_bare_word_is_text(text: str, value: object) -> None:
    loaded = config.load(None, [text, "plan.pipeline=2", "data.batch=8"])
    assert getattr(loaded.plan, text[5:].split("=")[0]) == value


def test_what_toml_would_take_for_a_date_or_a_second_line_is_text() -> None:
    assert config.load(None, ["train.run=2024-01-01"]).train.run == "2024-01-01"
    assert config.load(None, ["train.run=1\nseed = 3"]).train == Config().train.model_copy(
        update={"run": "1\nseed = 3"}
    )
    assert config.load(None, ["train.run="]).train.run == ""
    assert config.load(None, ["train.run=a=b"]).train.run == "a=b"


def test_an_override_reaches_into_a_table(tmp_path: Path) -> None:
    path = write(tmp_path, '[model]\nfamily = "llama"\nrope_scaling = { kind = "linear", factor = 2.0 }\n')
    loaded = config.load(path, ["model.rope_scaling.factor=4"])
    assert (loaded.model.rope_scaling.kind, loaded.model.rope_scaling.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("plan.tenser=2", "plan.tenser: no such key; did you mean plan.tensor?"),
        ("plann.tensor=2", "plann.tensor: no such section; did you mean plan.tensor?"),
        ("tensor=2", "tensor: no such key; did you mean plan.tensor?"),
        ("train.lr=1", "train.lr: no such key; did you mean optimizer.lr?"),
        ("plan.lr=1", "plan.lr: no such key; did you mean optimizer.lr?"),
        ("plan.sequence.x=1", "plan.sequence: {'x': 1} is not possible; give true or false"),
        ("colour.red=1", "colour: no such key; known: model, data, plan, optimizer, train, checkpoint, log"),
        ("plan=2", "plan: 2 is not a section; give keys, as plan.KEY=VALUE"),
        ("plan.tensor", "plan.tensor: is not key=value; write it as plan.replicate=2"),
        ("=2", "=2: is not key=value; write it as plan.replicate=2"),
        ("plan.replicate=", "plan.replicate: '' is not possible; give a whole number"),
        ("plan.replicate=two", "plan.replicate: 'two' is not possible; give a whole number"),
        ("train.steps=true", "train.steps: true is not possible; give a whole number"),
        ("train.steps='3'", "train.steps: '3' is not possible; give a whole number"),
        ("train.steps=0", "train.steps: 0 is not possible; give at least 1"),
        ("optimizer.lr=inf", "optimizer.lr: inf is not possible; give a finite number"),
        ("model.hidden=1000000000", "model.hidden: 1000000000 is not possible; give at most 16777216"),
        ("optimizer.lr=fast", "optimizer.lr: 'fast' is not possible; give a number"),
        ("optimizer.betas=0.9", "optimizer.betas: 0.9 is not possible; give a list"),
        ("optimizer.betas=[0.9]", "optimizer.betas: has too few values; give them all"),
        (
            "optimizer.name=adm",
            "optimizer.name: 'adm' is not known; did you mean adamw? choose one of adamw, adafactor, adamw-8bit, muon, "
            "lion, sgd",
        ),
        ("data.source=3", "data.source: 3 is not possible; give a text, or give a list"),
        (
            "model.rope_scaling.factr=3",
            "model.rope_scaling.factr: no such key; did you mean model.rope_scaling.factor?",
        ),
        ("plan.offload.optimiser=cpu", "plan.offload.optimiser: no such key; did you mean plan.offload.optimizer?"),
        ("plan.compress_activations=gist", 'plan.compress_activations: "gist" is not built yet; set it to "none"'),
    ],
)
def test_a_wrong_override_is_one_line_with_the_key_and_the_mend(override: str, line: str) -> None:
    assert line_of(override) == line


def test_a_broken_toml_value_says_so() -> None:
    line = line_of("plan.cut=[1, 2")
    assert line.startswith("plan.cut: [1, 2 is not a TOML value: ")
    assert "\n" not in line


def test_all_problems_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "[plan]\ntenser = 2\nreplicate = 0\n[train]\nsteps = -1\n[plann]\ntensor = 2\n")
    lines = line_of("train.sed=1", path=path).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "plan.tenser",
        "plan.replicate",
        "train.sed",
        "train.steps",
        "plann.tensor",
    ]


def test_a_model_and_a_section_that_explain_themselves_keep_their_words() -> None:
    line = line_of("model.heads=3", "model.hidden=256")
    assert line.startswith("model.heads: 3 does not divide hidden = 256; ")
    assert line_of("data.section=12").startswith("data.section: 12 is too small")


def test_rules_between_sections_are_checked() -> None:
    assert line_of("plan.replicate=3", "data.batch=2") == (
        "plan: a batch of 2 sequences has not one for each of 3 data-parallel ranks; raise data.batch to 3, or lower "
        "plan.replicate or plan.shard"
    )
    assert line_of("plan.replicate=3", "data.batch=4", "plan.microbatches=2").startswith("plan.microbatches: ")
    assert line_of("plan.pipeline=9", "model.layers=4").startswith("plan.pipeline: ")
    assert line_of("data.sequence=64", "model.sequence=32") == (
        "data.sequence: 64 is longer than the model's 32 tokens; lower it or set model.sequence to 64"
    )
    assert line_of("plan.vertical_sync=true", "data.sequence=64", "model.sequence=32").count("\n") == 1


def test_ranks_are_checked_where_they_are_known() -> None:
    loaded = config.load(None, ["plan.replicate=2"])
    assert loaded.check(num_ranks=2) == []
    with pytest.raises(ConfigError, match="replicate 2 needs 2 ranks and there are 3"):
        loaded.require(num_ranks=3)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, "[plan\n")
    assert line_of(path=path).startswith(f"{path}: is not TOML: ")
    assert line_of(path=tmp_path / "jb.toml") == f"{tmp_path / 'jb.toml'}: no such file; did you mean {path}?"
    assert line_of(path=tmp_path / "other" / "x.toml").endswith("no such file; give the path of a TOML file")
    assert line_of(path=tmp_path) == f"{tmp_path}: is a folder; give the path of a TOML file"
    path.write_bytes(b"\xff\xfe\x00")
    assert line_of(path=path).startswith(f"{path}: is not TOML: ")


def test_the_resolved_configuration_reads_back_equal(tmp_path: Path) -> None:
    loaded = config.load(
        None,
        [
            "plan.pipeline=2",
            "plan.cut=[1,3]",
            "optimizer.betas=[0.5,0.75]",
            "model.family=llama",
            'data.source=["a","b"]',
            "log.tensorboard=false",
            'log.prompt="say \\"it\\"\\n"',
        ],
    )
    again = config.load(write(tmp_path, loaded.to_toml()))
    assert again == loaded
    assert again.to_toml() == loaded.to_toml()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_loads(path: Path) -> None:
    assert config.load(path).check() == []


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().plan = Config().plan
