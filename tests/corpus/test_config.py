import pytest
from pydantic import ValidationError

from shardwise.corpus import DataConfig


def test_defaults_need_nothing() -> None:
    config = DataConfig()
    assert config.sources == ("python",)
    assert config.tokenizer == "bpe"


def test_a_dump_with_every_key_reads_back() -> None:
    config = DataConfig(source=("a.txt", "b.txt"), limit_bytes=7)
    assert DataConfig.model_validate_json(config.model_dump_json(), strict=True) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": ()}, "data.source is empty; give"),
        ({"source": ("a", "")}, "data.source is empty; give"),
        ({"section": 5}, "data.section = 5 is too small; give 0"),
        ({"end_token": "</s>"}, "data.end_token is for a tokenizer.json"),
        ({"subset": "en"}, "data.subset is for a source 'huggingface:NAME'"),
        ({"source": "x.txt", "streaming": False}, "data.streaming is for a source 'huggingface:NAME'"),
    ],
)
def test_what_would_be_ignored_or_senseless_is_refused_with_its_mend(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig(**values)


def test_hugging_face_keys_go_with_a_hugging_face_source() -> None:
    assert DataConfig(source=("x.txt", "huggingface:json"), files="a.jsonl", split="test").split == "test"


@pytest.mark.parametrize("values", [{"held_out": 0.6}, {"vocabulary": 256}, {"batch": 0}, {"sequence": 0}, {"sed": 1}])
def test_impossible_values_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        DataConfig(**values)
