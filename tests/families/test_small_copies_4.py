"""The small copies, part 4 of 4; see `small_copies`."""

from __future__ import annotations

import pytest
from families_list import CASES
from small_copies import check

pytestmark = pytest.mark.usefixtures("quick_collections")


@pytest.mark.parametrize(("name", "variant"), CASES[3::4])
def test_the_small_copy_trains_exactly_and_within_two_percent_of_the_predicted_peak(
    name: str, variant: str | None
) -> None:
    check(name, variant)
