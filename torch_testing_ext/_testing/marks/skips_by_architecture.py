"""Skips, expected failures and helpers for particular devices."""

from collections.abc import Sequence
from typing import Any

import torch

from torch_testing_ext._machine import accelerators, cuda_versions
from torch_testing_ext._machine.flags import flag

from .parametrized import Decorator as Decorator
from .skips import bare_or_called, lazy_skip_if
from .skips_at_run import skip_but_pass_in_sandcastle_if

MI350_ARCH = ("gfx950",)
MI300_ARCH = ("gfx942",)
MI200_ARCH = ("gfx90a",)
NAVI3_ARCH = ("gfx1100", "gfx1101")
NAVI3_5_ARCH = ("gfx1150", "gfx1151")
NAVI4_ARCH = ("gfx1200", "gfx1201")
NAVI_ARCH = ("gfx1030", *NAVI3_ARCH, *NAVI3_5_ARCH, *NAVI4_ARCH)


def getRocmArchName(device_index: int = 0) -> str:
    return str(accelerators.cuda_properties()["archs"][device_index])


def isRocmArchAnyOf(arch: Sequence[str]) -> bool:
    if torch.version.hip is None:
        return False
    own = getRocmArchName()
    return any(name in own for name in arch)


def is_navi3_arch() -> bool:
    if torch.version.hip is None or not flag("TEST_CUDA"):
        return False
    arch, _, _ = getRocmArchName().partition(":")
    return arch in NAVI3_ARCH


def skipIfRocmArch(arch: Sequence[str]) -> Decorator:
    def is_affected() -> bool:
        return flag("TEST_WITH_ROCM") and isRocmArchAnyOf(arch)

    return lazy_skip_if(is_affected, f"test skipped on {arch}")


def runOnRocmArch(arch: Sequence[str]) -> Decorator:
    def is_affected() -> bool:
        return flag("TEST_WITH_ROCM") and not isRocmArchAnyOf(arch)

    return lazy_skip_if(is_affected, f"test only runs on {arch}")


getRocmVersion = cuda_versions.rocm_version


def skipIfRocmVersionLessThan(version: Sequence[int] | None = None) -> Decorator:
    def is_older() -> bool:
        return flag("TEST_WITH_ROCM") and (version is None or getRocmVersion() < tuple(version))

    return lazy_skip_if(is_older, f"ROCm version {version} or later required")


def skipIfRocmVersionAtLeast(version: Sequence[int] | None = None) -> Decorator:
    def is_affected() -> bool:
        return flag("TEST_WITH_ROCM") and version is not None and getRocmVersion() >= tuple(version)

    return lazy_skip_if(is_affected, f"ROCm version at least {version}: known failure")


def skipIfRocmVersionInRange(first_bad: Sequence[int], first_good: Sequence[int], reason: str) -> Decorator:
    def is_affected() -> bool:
        return flag("TEST_WITH_ROCM") and tuple(first_bad) <= getRocmVersion() < tuple(first_good)

    since = ".".join(map(str, first_bad))
    until = ".".join(map(str, first_good))
    return lazy_skip_if(is_affected, f"{reason} (ROCm >= {since}, < {until})")


def requires_cuda_p2p_access() -> Decorator:
    """Skip unless every CUDA device can read the memory of every other, which requires compute capability 8.0."""
    lacks_access = not accelerators.peers_have_access()
    return skip_but_pass_in_sandcastle_if(lacks_access, "cuda p2p access is not available")


def skipIfWindowsXPU(func: Any = None, *, msg: str = "test doesn't currently work on the Windows stack") -> Any:
    def is_affected() -> bool:
        return bool(flag("IS_WINDOWS") and flag("TEST_XPU"))

    on_windows = lazy_skip_if(is_affected, f"skipIfWindowsXPU: {msg}")
    return bare_or_called(func, on_windows)
