"""The capabilities of a type of device, as a class for it declares them, and tests that need some."""

from collections.abc import Callable
from typing import Any

from torch_testing_ext._machine import cuda, cuda_support

from .skips import skip_for

Checks = dict[str, Callable[[], Any]]


class Capability:
    """The names of what a device can do, by subject."""

    class dtype:
        """Types of numbers."""

        fp8 = "dtype.fp8"
        bf16 = "dtype.bf16"

    class attention:
        """Kernels of attention."""

        flash_attention = "attention.flash_attention"
        mem_efficient_attention = "attention.mem_efficient_attention"


def _checks(fp8: Any, bf16: Any, flash_attention: Any, mem_efficient_attention: Any) -> Checks:
    return {
        Capability.dtype.fp8: lambda: fp8,
        Capability.dtype.bf16: lambda: bf16,
        Capability.attention.flash_attention: lambda: flash_attention,
        Capability.attention.mem_efficient_attention: lambda: mem_efficient_attention,
    }


BY_DEVICE_TYPE = {
    "cpu": _checks(True, True, True, False),
    "cuda": _checks(
        cuda_support.PLATFORM_SUPPORTS_FP8,
        cuda.SM80OrLater,
        cuda_support.PLATFORM_SUPPORTS_FLASH_ATTENTION,
        cuda_support.PLATFORM_SUPPORTS_MEM_EFF_ATTENTION,
    ),
    "mps": _checks(False, True, False, False),
    "xpu": _checks(True, True, cuda_support.PLATFORM_SUPPORTS_FLASH_ATTENTION, True),
}


def requires_capabilities(*caps: str) -> Callable[[Any], Any]:
    """Skip the test where its device lacks one of these. The device's class must declare each."""

    def why(self: Any, *args: Any, **kwargs: Any) -> str | None:
        known = type(self).get_capabilities()
        where = f"Device '{type(self).device_type}'"
        undeclared = sorted(set(caps) - known.keys())
        if undeclared:
            add = f"Add them to {type(self).__name__}._capabilities()."
            raise AssertionError(f"{where} has not declared capabilities: {', '.join(undeclared)}. {add}")
        lacking = sorted(name for name in set(caps) if not known[name])
        if not lacking:
            return None
        return f"{where} has unsupported capabilities: {', '.join(lacking)}"

    return skip_for(why)
