import importlib
import pkgutil
import runpy
import sys
from pathlib import Path

import fake_cuda

import torch_testing_ext
from torch_testing_ext._machine import accelerators

# It is the module of a device that is there in processes of `--fake-accelerators` only.
OF_A_DEVICE = "torch_testing_ext._machine.fake_accelerator.device_module"
for module in pkgutil.walk_packages(torch_testing_ext.__path__, "torch_testing_ext."):
    if not module.name.endswith("__main__") and ".runner" not in module.name and module.name != OF_A_DEVICE:
        importlib.import_module(module.name)
suites = sorted(Path(sys.argv[1]).rglob("test_*.py"))
assert len(suites) > 10, suites
for suite in suites:
    sys.path[0] = str(suite.parent)
    runpy.run_path(str(suite), run_name="imported")
print(accelerators.unsafe_to_fork())
