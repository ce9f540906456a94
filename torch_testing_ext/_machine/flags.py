"""Flags that tell a test where it runs: platform, build, accelerators, and switches in the environment.

A flag is computed when it is first read, since some take a process or an import, and is cached from then on. The
names, and the variables that set them, are PyTorch's.
"""

import functools
import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

import torch

from torch_testing_ext._machine import accelerators
from torch_testing_ext._torch.devices import accelerator_state, build_options

Flag = Callable[[], Any]
# Untyped in torch.
_backends: Any = torch.backends


@functools.cache
def flag(name: str) -> Any:
    """Return the value of a flag; each is computed once per process."""
    compute = _FLAGS[name]
    return compute()


def _switch(variable: str, implied_by: Flag = lambda: False) -> Flag:
    """A flag that an environment variable sets; where it is unset, `implied_by` decides."""

    def value() -> bool:
        if variable in os.environ:
            return os.environ[variable] == "1"
        return bool(implied_by())

    return value


def _words(variable: str) -> list[str]:
    return os.environ.get(variable, "").split(",")


def _machine(*names: str) -> Flag:
    return lambda: platform.machine() in names


def _module(name: str) -> Flag:
    def value() -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            # A parent package of it is missing.
            return False

    return value


def _accelerator(kind: str) -> Flag:
    return lambda: accelerators.accelerator_type() == kind and accelerators.device_count() > 0


def _macos_version() -> float:
    """Return the first two numbers of the version of macOS; -1 elsewhere."""
    version, _, _ = platform.mac_ver()
    numbers = version.split(".")[:2]
    return float(".".join(numbers) or -1)


def _is_jetson() -> bool:
    boards = ("orin", "concord", "galen", "xavier", "nano", "jetson", "tegra", "thor")
    return any(board in platform.platform() for board in boards)


def _has_onednn() -> bool:
    return bool(_backends.mkldnn.is_available())


def _has_cuda_build_of(name: str) -> Flag:
    """A flag that also needs a torch for CUDA, not ROCm."""
    return lambda: flag(name) and torch.version.cuda is not None


def _has_cuda_python_bindings() -> bool:
    """Whether cuda-python is installed, in a variant that works with this torch."""
    if not _module("cuda.bindings")():
        return False
    if torch.version.cuda is not None or torch.version.hip is None:
        return torch.version.cuda is not None
    # On ROCm, NVIDIA's bindings can be imported but not called; those of hip-python mark themselves.
    runtime = importlib.import_module("cuda.bindings.runtime")
    return bool(getattr(runtime, "HIP_PYTHON", False))


def _cpu_has(capability: str) -> Flag:
    return lambda: bool(build_options.cpu_capabilities().get(capability, False))


_FLAGS: dict[str, Flag] = {
    # platform
    "IS_LINUX": lambda: sys.platform == "linux",
    "IS_WINDOWS": lambda: sys.platform == "win32",
    "IS_MACOS": lambda: sys.platform == "darwin",
    "MACOS_VERSION": _macos_version,
    "IS_PPC": _machine("ppc64le"),
    "IS_X86": _machine("x86_64", "i386"),
    "IS_ARM64": _machine("arm64", "aarch64", "ARM64"),
    "IS_S390X": _machine("s390x"),
    "IS_JETSON": _is_jetson,
    "IS_APPLE_M1": lambda: flag("TEST_MPS") and str(_backends.mps.get_name()).startswith("Apple M1"),
    "IS_AVX512_VNNI_SUPPORTED": _cpu_has("avx512_vnni"),
    "IS_CPU_EXT_SVE_SUPPORTED": _cpu_has("sve"),
    "IS_CPU_CAPABILITY_SVE": lambda: build_options.cpu_kernels() in ("SVE128", "SVE256"),
    "IS_CPU_CAPABILITY_SVE256": lambda: build_options.cpu_kernels() == "SVE256",
    "IS_FILESYSTEM_UTF8_ENCODING": lambda: sys.getfilesystemencoding() == "utf-8",
    "IS_CI": lambda: bool(os.environ.get("CI")),
    "IS_SANDCASTLE": _switch("SANDCASTLE", implied_by=lambda: os.environ.get("TW_JOB_USER") == "sandcastle"),
    "IS_FBCODE": _switch("PYTORCH_TEST_FBCODE", implied_by=lambda: build_options.is_internal_build()),
    "IS_REMOTE_GPU": _switch("PYTORCH_TEST_REMOTE_GPU"),
    "IN_RE_WORKER": lambda: "INSIDE_RE_WORKER" in os.environ,
    "DISABLE_RUNNING_SCRIPT_CHK": _switch("PYTORCH_DISABLE_RUNNING_SCRIPT_CHK"),
    "NO_MULTIPROCESSING_SPAWN": lambda: False,
    # accelerators
    "ACCELERATOR_TYPE": accelerators.accelerator_type,
    "TEST_ACCELERATOR": lambda: accelerators.device_count() > 0,
    "TEST_MULTIACCELERATOR": lambda: accelerators.device_count() > 1,
    "TEST_CUDA": _accelerator("cuda"),
    "TEST_MULTIGPU": lambda: flag("TEST_CUDA") and accelerators.device_count() > 1,
    "TEST_XPU": _accelerator("xpu"),
    "TEST_HPU": _accelerator("hpu"),
    "TEST_MPS": lambda: torch.backends.mps.is_available(),
    "TEST_MTIA": _accelerator("mtia"),
    "TEST_PRIVATEUSE1": lambda: _accelerator(accelerator_state.extension_device_type())(),
    "TEST_PRIVATEUSE1_DEVICE_TYPE": lambda: accelerator_state.extension_device_type(),
    "TEST_CUDA_GRAPH": lambda: flag("TEST_CUDA") and not flag("TEST_SKIP_CUDAGRAPH"),
    "TEST_CUDA_CUDSS": _has_cuda_build_of("TEST_CUDA"),
    "TEST_CUDA_GRAPH_CONDITIONAL_NODES": _has_cuda_build_of("TEST_CUDA_GRAPH"),
    "TEST_CUSPARSE_GENERIC": lambda: not flag("TEST_WITH_ROCM"),
    "TEST_HIPSPARSE_GENERIC": lambda: bool(flag("TEST_WITH_ROCM")) and torch.version.hip is not None,
    "TEST_SKIP_CUDAGRAPH": _switch("PYTORCH_TEST_SKIP_CUDAGRAPH"),
    "EXPANDABLE_SEGMENTS": lambda: "expandable_segments:True" in _words("PYTORCH_CUDA_ALLOC_CONF"),
    # installed packages and build options
    "TEST_ACL": lambda: _has_onednn() and build_options.onednn_uses_arm_compute_library(),
    "TEST_MKL": lambda: bool(_backends.mkl.is_available()),
    "TEST_ONEDNN": lambda: torch.backends.mkldnn.enabled and _has_onednn(),
    "TEST_NUMPY": _module("numpy"),
    "TEST_SCIPY": _module("scipy"),
    "TEST_NUMBA": _module("numba"),
    "TEST_DILL": _module("dill"),
    "TEST_TRANSFORMERS": _module("transformers"),
    "TEST_OPT_EINSUM": _module("opt_einsum"),
    "TEST_Z3": _module("z3"),
    "TEST_FAIRSEQ": _module("fairseq"),
    "TEST_LIBROSA": lambda: _module("librosa")() and not flag("IS_ARM64"),
    "TEST_CUDA_PYTHON_BINDINGS": _has_cuda_python_bindings,
    "TEST_WITH_ROCM": _switch("PYTORCH_TEST_WITH_ROCM", implied_by=lambda: torch.version.hip is not None),
    "TEST_WITH_MTIA": _switch("PYTORCH_TEST_WITH_MTIA"),
    # settings of the run
    "NOTEST_CPU": lambda: "cpu" in _words("PYTORCH_TESTING_DEVICE_EXCEPT_FOR"),
    "TEST_WITH_ASAN": _switch("PYTORCH_TEST_WITH_ASAN"),
    "TEST_WITH_DEV_DBG_ASAN": _switch("PYTORCH_TEST_WITH_DEV_DBG_ASAN"),
    "TEST_WITH_TSAN": _switch("PYTORCH_TEST_WITH_TSAN"),
    "TEST_WITH_UBSAN": _switch("PYTORCH_TEST_WITH_UBSAN"),
    "TEST_WITH_SLOW": _switch("PYTORCH_TEST_WITH_SLOW"),
    "TEST_WITH_PERIODIC": _switch(
        "PYTORCH_TEST_WITH_PERIODIC", implied_by=lambda: os.environ.get("TEST_CONFIG") == "periodic"
    ),
    "TEST_WITH_TV": _switch("PYTORCH_TEST_WITH_TV"),
    "TEST_WITHOUT_COMPILED_AUTOGRAD": _switch("PYTORCH_TEST_WITHOUT_COMPILED_AUTOGRAD"),
    "TEST_WITH_SLOW_GRADCHECK": _switch("PYTORCH_TEST_WITH_SLOW_GRADCHECK"),
    "TEST_SKIP_FAST": _switch("PYTORCH_TEST_SKIP_FAST"),
    "TEST_WITH_CROSSREF": _switch("PYTORCH_TEST_WITH_CROSSREF"),
    "TEST_WITH_TORCHINDUCTOR": _switch("PYTORCH_TEST_WITH_INDUCTOR"),
    "TEST_WITH_AOT_EAGER": _switch("PYTORCH_TEST_WITH_AOT_EAGER"),
    "TEST_WITH_TORCHDYNAMO": _switch(
        "PYTORCH_TEST_WITH_DYNAMO", implied_by=lambda: flag("TEST_WITH_TORCHINDUCTOR") or flag("TEST_WITH_AOT_EAGER")
    ),
    "TEST_CUDA_MEM_LEAK_CHECK": _switch("PYTORCH_TEST_CUDA_MEM_LEAK_CHECK"),
}


def names_of_flags() -> list[str]:
    return sorted(_FLAGS)


def __getattr__(name: str) -> Any:
    if name not in _FLAGS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return flag(name)
