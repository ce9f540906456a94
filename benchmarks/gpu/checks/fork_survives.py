"""After the import of each suite and each module, a process can still be forked into ranks that use CUDA."""

import ctypes
import importlib
import importlib.util
import os
import sys
from pathlib import Path

ORDER = 10
LIMIT = 30

MODULES = (
    "common_utils",
    "common_distributed",
    "common_cuda",
    "common_fsdp",
    "common_device_type",
    "common_dist_composable",
    "hypothesis_utils",
    "ranks",
    "distributed._tensor.common_dtensor",
    "distributed._shard.sharded_tensor",
    "distributed.multi_threaded_pg",
    "distributed.fake_pg",
    "distributed._spmd",
    "distributed.checkpoint_utils",
)


def check(c):
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    from torch_testing_ext._machine import accelerators

    spoilt = []
    for name, load in (*_modules(), *_suites(c.root)):
        load()
        if (why := accelerators.unsafe_to_fork()) is not None:
            spoilt.append(f"{name}: {why}")
            break
    c.expect(not spoilt, "no module of the kit and no suite initialises CUDA when it is imported", spoilt)
    c.expect(_child_can_use_cuda(torch), "a forked child uses CUDA after all of these imports")
    c.expect(torch.cuda.is_available(), "torch finds the devices by NVML")
    why = accelerators.check_to_fork()
    c.expect(why is None, "a process that has used NVML counts as safe to fork", why)
    c.expect(_child_can_use_cuda(torch), "a forked child uses CUDA after its parent has used NVML")
    c.figure("devices counted without touching them", accelerators.device_count())
    c.expect(accelerators.device_count() > 0, "the kit finds the devices")
    c.expect(not torch.cuda.is_initialized(), "counting devices does not initialise CUDA")
    c.expect(_child_can_use_cuda(torch), "a forked child uses CUDA after the devices were counted")
    c.expect(
        _in_child(
            lambda: _initialise_the_driver() and accelerators.unsafe_to_fork() and _child_is_unsafe(accelerators)
        ),
        "a process in which a library has initialised the driver counts as unsafe to fork, and so do its forks",
    )


def on_cpu(c):
    import torch

    for name, load in _modules():
        load()
        c.expect(not torch.cuda.is_initialized(), f"importing {name} initialises nothing")


def _initialise_the_driver():
    """As a library other than torch does."""
    return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0


def _child_is_unsafe(accelerators):
    return _in_child(lambda: accelerators.unsafe_to_fork() is not None)


def _modules():
    for name in MODULES:
        full = f"torch_testing_ext.{name}"
        if importlib.util.find_spec(full) is not None:
            yield full, lambda full=full: importlib.import_module(full)


def _suites(root):
    for path in sorted((root / "test" / "distributed").rglob("test_*.py")):
        yield str(path.relative_to(root)), lambda path=path: _import(path)


def _import(path: Path):
    sys.path.insert(0, str(path.parent))
    name = f"suite_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    sys.path.remove(str(path.parent))


def _child_can_use_cuda(torch):
    return _in_child(lambda: torch.ones(2, device="cuda").sum().item() == 2)


def _in_child(holds):
    """Does this hold in a forked child?"""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = int(not holds())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
