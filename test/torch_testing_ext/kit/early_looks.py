"""Runs of ranks whose parent looks whether they wait for each other as soon as all do, and not after a fixed time."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

from torch_testing_ext.launch import probes
from torch_testing_ext.launch.watching import looks

# Seconds without news until the parent looks.
FIRST_LOOK = 0.3
# Seconds in which ranks that wait are looked at twice, so that a false proof would be told.
TWO_LOOKS = 1.5


class _Idleness(probes.Idleness):
    """No rank is idle before all are, since a slow machine must not decide which ranks a screen has."""

    def idle(self, pids: Sequence[int], now: float) -> set[int] | None:
        idle = super().idle(pids, now)
        if idle is None or (idle.issuperset(pids) and not any(map(_may_run, pids))):
            return idle
        return set()


def _may_run(pid: int) -> bool:
    """Whether a thread of the process runs, or waits for a core."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


@contextlib.contextmanager
def early_looks() -> Iterator[None]:
    longest = probes.FIRST_PROBE * probes.FACTOR_IF_BUSY
    with (
        mock.patch.object(probes, "FIRST_PROBE", FIRST_LOOK),
        mock.patch.object(probes, "FACTOR_IF_BUSY", longest / FIRST_LOOK),
        mock.patch.object(probes, "Idleness", _Idleness),
        mock.patch.object(looks, "FIRST_LOOK", FIRST_LOOK / 2),
    ):
        yield
