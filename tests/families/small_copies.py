"""Every family's small copy, trained on the CPU: bit-equal gradients and the predicted peak, under every kind of schedule.

The cases are divided over several test files, so that test workers share them.
"""

from __future__ import annotations

from collections.abc import Sequence

from families_list import check_linked

from advisor.verification import compare_on_cpu
from estimators.schedule import Backend, Schedule
from probes.profile import Profile
from probes.workload import from_request, reduced_copy


def schedules(profile: Profile) -> Sequence[Schedule]:
    """One of each kind that the runtime executes on this model."""
    found = [
        Schedule(),
        Schedule(Backend.TORCH),
        Schedule(Backend.TORCH, 2),
        Schedule(Backend.TORCH, 2, 4),
        Schedule(Backend.UNSLOTH),
        Schedule(Backend.TORCH, offload_attention=True),
    ]
    if profile.structure.has_feed_forward:
        found += [Schedule(Backend.TORCH_FFN), Schedule(Backend.UNSLOTH_FFN, 2)]
    return found


def check(name: str, variant: str | None) -> None:
    """Trains the small copy under each of its `schedules`."""
    profiles: list[Profile] = []

    def choose(profile: Profile) -> Sequence[Schedule]:
        profiles.append(profile)
        return schedules(profile)

    results = compare_on_cpu(reduced_copy(from_request({"model": name, "variant": variant})), choose)
    assert len(results) == len(schedules(profiles[0]))
    for found in results:
        assert found.exact, found.schedule.name
        assert abs(found.error) < 0.02, f"{found.schedule.name}: {found.error:+.2%}"
        assert (found.recomputed > 0) == (found.schedule.backend is not Backend.NONE)
    check_linked(name, profiles[0].structure.chains)
