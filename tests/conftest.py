"""Settings every test shares."""

import os
import sys
from types import ModuleType

import pytest

# Ranks and tests share two cores: one thread each, set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads what group a test is in
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two processes of pytest-xdist share the tests: one runs all that need ranks, so there is one pool of them, and
    the other what needs none, while ranks wait for each other."""
    known: dict[ModuleType, bool] = {}
    for item in items:
        assert isinstance(item, pytest.Function)
        ranks = needs_ranks(item.module, known)
        item.add_marker(pytest.mark.xdist_group("ranks" if ranks else "one process"))


def needs_ranks(module: ModuleType, known: dict[ModuleType, bool]) -> bool:
    """Whether a module of tests uses the pool, itself or by what it takes from another."""
    if module not in known:
        known[module] = False
        values = vars(module).values()
        homes = {v.__name__ if isinstance(v, ModuleType) else str(getattr(v, "__module__", "")) for v in values}
        others = [sys.modules[home] for home in homes - {module.__name__} if home.startswith("tests.")]
        known[module] = module.__name__ == "tests.pool" or any(needs_ranks(other, known) for other in others)
    return known[module]
