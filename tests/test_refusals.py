"""`docs/combinations.md` says what is refused: every row is tried, and every rule has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise import plan_rules
from shardwise.config import ConfigError, load
from shardwise.plan_rules import Job

TEXT = (Path(__file__).parent.parent / "docs" / "combinations.md").read_text()
ROWS = re.findall(r"^\| `(plan\..+?)` \| `(plan\..+?)`: (.+) \|$", TEXT, re.MULTILINE)
# What these say depends on the ranks that are there or on a file, or they stand behind keys that are not built.
WITHOUT_ROW = {"_ranks", "_schedule_file", "_expert", "_averaging", "_compression"}


@pytest.mark.parametrize(("asked", "key", "reason"), ROWS, ids=[row[0] for row in ROWS])
def test_what_is_said_to_be_refused_is_refused_in_these_words(asked: str, key: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, asked.split())
    assert [(problem.key, problem.reason) for problem in caught.value.problems] == [(key, reason)]


def test_every_rule_has_a_row() -> None:
    found = set()
    for asked, _, _ in ROWS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shardwise.config.Config.require", lambda *_: None)
            config = load(None, asked.split())
        job = Job(config.model, None, config.data.batch)
        found |= {rule.__name__ for rule in plan_rules.RULES if list(rule(config.plan, job))}
    assert found | WITHOUT_ROW == {rule.__name__ for rule in plan_rules.RULES}


def test_every_row_is_tried() -> None:
    assert sum(line.startswith("| `") for line in TEXT.splitlines()) == len(ROWS)
