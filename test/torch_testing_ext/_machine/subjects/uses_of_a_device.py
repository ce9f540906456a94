import os

import fake_cuda
import helper
import torch

from torch_testing_ext._machine import accelerators
from torch_testing_ext._torch.devices.first_accelerator_use import first_use as noted


def show(use):
    fake_cuda.begin_again()
    use()
    print(noted())


assert torch.cuda.is_available() and torch.cuda.device_count() == 4
assert torch.accelerator.device_count() in (0, 4) and accelerators.device_count() == 4
assert accelerators.unsafe_to_fork() is None
show(lambda: torch.cuda.init())
show(helper.warm)
assert accelerators.unsafe_to_fork() == noted()
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
show(lambda: torch.cuda.is_available())
show(lambda: (torch.cuda.is_available(), torch.cuda.init()))
torch.cuda.is_initialized = lambda: True
show(lambda: None)
