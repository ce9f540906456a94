import importlib
import pkgutil
import runpy
import sys
from pathlib import Path

import fake_cuda

import torch_testing_ext
from torch_testing_ext._machine import accelerators

# They are modules of a device that is there in processes of `--fake-accelerators` only.
_FAKE = "torch_testing_ext._machine.fake_accelerator"
_NAMES = ("device_module", "fake_devices", "fake_generators", "fake_library", "fake_memory", "fake_streams")
OF_A_DEVICE = {f"{_FAKE}.{name}" for name in _NAMES}
for module in pkgutil.walk_packages(torch_testing_ext.__path__, "torch_testing_ext."):
    if not module.name.endswith("__main__") and ".runner" not in module.name and module.name not in OF_A_DEVICE:
        importlib.import_module(module.name)
suites = sorted(Path(sys.argv[1]).rglob("test_*.py"))
assert len(suites) > 10, suites
for suite in suites:
    sys.path[0] = str(suite.parent)
    runpy.run_path(str(suite), run_name="imported")
print(accelerators.unsafe_to_fork())
