"""Settings every test shares."""

import os

# Ranks and tests share two cores: one thread each, set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
