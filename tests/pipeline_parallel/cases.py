"""How the property tests of schedules draw: the same cases on every run, and few enough to be quick."""

from hypothesis import settings

some = settings(max_examples=40, derandomize=True, deadline=None, database=None)
