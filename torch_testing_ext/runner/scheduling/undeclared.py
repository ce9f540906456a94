"""Finds tests that seem to use devices, but leased none because they declare no need for them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..model import FinishedTest, TestOutcome

_ABOUT_DEVICES = re.compile(r"\b(cuda|gpus?|accelerators?|nccl|xpu|rocm|hip)\b", re.IGNORECASE)
_MOST = 3  # names in the warning
_NO_RESULT = (TestOutcome.SKIPPED, TestOutcome.ERROR, TestOutcome.FAILED)


def describe_undeclared(finished: Iterable[FinishedTest]) -> str | None:
    """The warning about tests that leased no device, and then were skipped or failed with words about devices."""
    names = list(dict.fromkeys(str(one.test.id) for one in finished if _may_lack_a_device(one)))
    if not names:
        return None
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    tests = "1 test" if len(names) == 1 else f"{len(names)} tests"
    return (
        f"{tests} may need devices, but declared none and so saw none (declare them, for example by "
        f"@skip_if_lt_x_gpu(1)): {', '.join(names[:_MOST])}{more}"
    )


def _may_lack_a_device(one: FinishedTest) -> bool:
    skipped_before = one.last.want is not None or one.test.skip is not None
    return (
        one.outcome in _NO_RESULT
        and not one.test.devices
        and not skipped_before
        and bool(one.test.id.method)
        and bool(_ABOUT_DEVICES.search(one.last.message))
    )
