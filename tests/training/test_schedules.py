import math

import pytest

from shardwise.training.config import LogConfig, TrainConfig, steps_of
from shardwise.training.schedules import learning_rate


def rates(**settings: object) -> list[float]:
    config = TrainConfig.model_validate({"steps": 100, "warmup": 10, "min_lr": 0.1, **settings})
    return [learning_rate(update, config, 2.0) for update in range(config.steps)]


def test_warm_up_rises_linearly_to_the_peak() -> None:
    found = rates(schedule="constant")
    assert found[:10] == pytest.approx([0.2 * n for n in range(1, 11)])
    assert set(found[10:]) == {2.0}


def test_cosine_falls_from_the_peak_to_its_end() -> None:
    found = rates(schedule="cosine")
    assert found[10] == 2.0
    assert found[55] == pytest.approx(0.2 + 1.8 * 0.5)
    assert found[99] == pytest.approx(0.2 + 0.9 * (1 + math.cos(math.pi * 89 / 90)))
    assert found[10:] == sorted(found[10:], reverse=True)


def test_linear_wastes_no_update_on_its_end() -> None:
    found = rates(schedule="linear", min_lr=0.0)
    assert found[55] == pytest.approx(1.0)
    assert found[99] == pytest.approx(2.0 / 90)


def test_wsd_is_flat_and_falls_with_the_root() -> None:
    found = rates(schedule="wsd", decay=0.2, min_lr=0.0)
    assert set(found[10:81]) == {2.0}
    assert found[85] == pytest.approx(2.0 * (1 - math.sqrt(5 / 20)))


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "linear", "constant"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (3, 10), (10, 10), (5, 0)])
def test_odd_lengths_stay_within_bounds(schedule: str, steps: int, warmup: int) -> None:
    assert all(0 < rate <= 2.0 for rate in rates(schedule=schedule, steps=steps, warmup=warmup))


def test_updates_beyond_the_steps_stay_at_the_end() -> None:
    config = TrainConfig(steps=10, warmup=0, min_lr=0.5)
    assert learning_rate(1000, config, 1.0) == pytest.approx(0.5)


def test_a_profile_is_a_range_of_steps() -> None:
    assert steps_of(LogConfig(profile="3:5").profile) == range(3, 5)
    for wrong in ("5:3", "3", "a:b", "3:3"):
        with pytest.raises(ValueError, match="is not a range of steps; give FIRST:LAST"):
            LogConfig(profile=wrong)
