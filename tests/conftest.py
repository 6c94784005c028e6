"""Test runs share two cores: one thread a process, set before torch is imported."""

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
