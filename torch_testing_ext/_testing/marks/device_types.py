"""The device types on which a test runs, once on each, and on which it is to fail.

The decorators act on the attribute `device_type` of the test's class, which a class may set itself.
"""

from collections.abc import Callable, Collection
from typing import Any

from torch_testing_ext._torch.devices import accelerator_state

from . import skips

Decorator = Callable[[Any], Any]
# A condition of the test case that is about to run, and a text made of it.
_RunsOn = Callable[[Any], bool]
_Reason = Callable[[Any], str]
Target = str | Collection[str]

GIBIBYTE = 1 << 30


def native_devices() -> tuple[str, ...]:
    """The types of device that PyTorch itself implements, and the one that an extension has registered."""
    return ("cpu", "cuda", "xpu", "meta", "mps", "mtia", accelerator_state.extension_device_type())


def skip_unless(runs_on: _RunsOn, reason: _Reason) -> Decorator:
    def why(test: Any, *args: Any, **kwargs: Any) -> str | None:
        return None if runs_on(test) else reason(test)

    return skips.skip_for(why)
