import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import models
from shardwise.config import Config
from shardwise.training import checkpoints, generate, job, metrics
from shardwise.training.placement import Placement
from tests.pool import run_ranks
from tests.training.crash import small_job
from tests.training.fake import world


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    parts = {name: getattr(config, name).model_copy(update=update) for name, update in sections.items()}
    return config.model_copy(update=parts)


def train(config: Config, run: str) -> dict[str, torch.Tensor]:
    """Trains on the ranks of the pool; every parameter, whole."""
    rank, num_ranks = world()
    trainer = job.build(config, Path(run), Placement(rank, num_ranks, rank))
    assert trainer.fit().finished
    found: dict[str, torch.Tensor] = trainer.parallel.full_parameters()  # type: ignore[attr-defined]
    trainer.parallel.close()
    return found


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in metrics.read(run / "metrics.jsonl") if row["kind"] == "train"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path, dict[str, torch.Tensor]]:
    """A run of a small tied model over two pipeline ranks."""
    folder = tmp_path_factory.mktemp("trained")
    config = small_job(folder, 4, 0, "constant", pipeline=2, microbatches=2)
    config = changed(config, model={"dropout": 0.0}, data={"tokenizer": "bpe", "vocabulary": 400})
    parameters = run_ranks(train, 2, config, str(folder / "run"))[0]
    return config, folder / "run", parameters


def test_a_run_of_any_layout_loads_into_one_process(trained: tuple[Config, Path, dict[str, torch.Tensor]]) -> None:
    _, run, parameters = trained
    model, tokenizer, step = generate.load(run, device="cpu")
    assert step == 4
    assert not model.training
    held = dict(model.named_parameters())
    assert held.keys() == parameters.keys()
    assert all(torch.equal(held[name], value) for name, value in parameters.items())
    assert model.head.output.weight is model.embedding.tokens.weight
    assert tokenizer.decode(tokenizer.encode("def main():")) == "def main():"
    path = checkpoints.path_of(run / "checkpoints", 3)
    assert generate.load(run, step=3, device="cpu").step == generate.load(path, device="cpu").step == 3


def test_a_run_in_fp16_loads_without_its_loss_scale(tmp_path: Path) -> None:
    config = small_job(tmp_path, 2, 0, "constant", pipeline=2, microbatches=2, precision="fp16")
    run_ranks(train, 2, changed(config, model={"dropout": 0.0}), str(tmp_path / "run"))
    assert generate.load(tmp_path / "run", device="cpu").step == 2


def test_a_run_goes_on_in_another_precision_with_a_new_loss_scale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = changed(small_job(tmp_path, 1, 0, "constant", replicate=1), model={"dropout": 0.0})
    said = []
    for steps, plan in enumerate(
        (
            {"precision": "fp32"},
            {"precision": "fp16"},
            {"precision": "fp16", "loss_scaling": "per-block"},
            {"precision": "fp32"},
        ),
        start=1,
    ):
        train(changed(config, plan=plan, train={"steps": steps}), str(tmp_path / "run"))
        said.append("no loss scale of this kind: it starts anew" in "".join(capsys.readouterr()))
    assert said == [False, True, True, False]
    assert len(losses(tmp_path / "run")) == 4


def test_text_streams_and_is_the_same_for_the_same_seed(
    trained: tuple[Config, Path, dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = generate.load(trained[1], device="cpu")
    pieces = list(generate.stream(found, "def ", num_tokens=20, seed=5))
    assert len(pieces) > 1
    assert pieces == list(generate.stream(found, "def ", num_tokens=20, seed=5))
    assert pieces != list(generate.stream(found, "def ", num_tokens=20, seed=6))
    end = found.tokenizer.end
    tokens = list(models.generate(found.model, [end], max_tokens=5, temperature=0))
    text = tokens[: tokens.index(end)] if end in tokens else tokens  # the end of a document is that of the sample
    assert "".join(generate.stream(found, num_tokens=5, temperature=0)) == found.tokenizer.decode(text)
    generate.show(trained[1], "class ", num_tokens=5)
    assert capsys.readouterr().out.startswith("\na sample of step 4:\nclass ")


def test_what_cannot_be_loaded_is_said_in_a_line(
    trained: tuple[Config, Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained[1], run)
    with pytest.raises(ValueError, match=r"holds no checkpoint of step 9; name a run folder of shardwise train"):
        generate.load(run, step=9)
    shard = next(checkpoints.path_of(run / "checkpoints", 4).glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert generate.load(run, device="cpu").step == 3
    assert f"warning: {shard} is damaged" in capsys.readouterr().err
    (run / "config.toml").write_text((run / "config.toml").read_text().replace("hidden = 32", "hidden = 16"))
    with pytest.raises(ValueError, match=r"'model/.*' has shape \[.*\] here and \[.*\] in "):
        generate.load(run, device="cpu")
    (run / "config.toml").unlink()
    with pytest.raises(ValueError, match="is in no run folder"):
        generate.load(run)


def test_a_run_goes_on_under_another_layout(
    trained: tuple[Config, Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    config, run, _ = trained
    config = changed(config, train={"steps": 7})
    for name, plan in (("pipeline", {}), ("data", {"pipeline": 1, "replicate": 2, "microbatches": 1})):
        shutil.copytree(run, tmp_path / name)
        run_ranks(train, 2, changed(config, plan=plan), str(tmp_path / name))
    shutil.copytree(run, tmp_path / "one")
    train(changed(config, plan={"pipeline": 1, "microbatches": 1}), str(tmp_path / "one"))
    expected = losses(tmp_path / "pipeline")
    assert len(expected) == 7
    assert losses(tmp_path / "data") == pytest.approx(expected, rel=1e-5)
    assert losses(tmp_path / "one") == pytest.approx(expected, rel=1e-5)
