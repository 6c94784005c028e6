"""Test runs share two cores: one thread a process, set before torch is imported."""

import gc
import os
from collections.abc import Iterator

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


@pytest.fixture(scope="module")
def quick_collections() -> Iterator[None]:
    """What the libraries hold is not looked at again by every garbage collection that a measurement asks for."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
