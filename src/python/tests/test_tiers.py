"""What an answer says of tiers, where one of them is in doubt."""

import pytest

from kvatlas.events import DOUBTS
from kvatlas.wire import BEYOND_DEVICE, HolderMatch


def _match(degraded: tuple[str, ...]) -> HolderMatch:
    return HolderMatch("w", 0, 3, 3, 3, 2, 3, 2, 3, not degraded, degraded, None, None, {})


@pytest.mark.parametrize(
    ("degraded", "device", "host"),
    [
        ((), True, True),
        (("host_gap",), True, False),
        (("disk_gap", "external_gap"), True, True),
        (("gap", "disk_gap"), False, False),
        (("host_gap", "a_reason_of_a_later_version"), False, False),
    ],
)
def test_nearer_tiers_stay_certain(degraded: tuple[str, ...], device: bool, host: bool) -> None:
    match = _match(degraded)
    assert (match.device_exact, match.host_exact) == (device, host)


def test_publishers_may_doubt_a_tier() -> None:
    assert set(BEYOND_DEVICE) <= set(DOUBTS)
