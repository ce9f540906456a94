import sys
import types

import fake_cuda
import torch

from torch_testing_ext._machine import cuda
from torch_testing_ext._machine.cuda import answering_for_torch
from torch_testing_ext._torch.devices.first_accelerator_use import first_use

asking = torch.cuda.current_device, torch.cuda.get_device_capability, torch.cuda.get_device_properties
with answering_for_torch():
    from torch._dynamo.device_interface import CudaInterface, caching_worker_device_properties as cached
    from torch.utils._triton import has_triton, has_triton_package

    has_triton()
    assert CudaInterface.Worker.get_device_properties().major == 9 and cached
    assert torch.cuda.get_device_capability() == (9, 0) and torch.cuda.current_device() == 0
assert not cached
assert (
    asking
    == (torch.cuda.current_device, torch.cuda.get_device_capability, torch.cuda.get_device_properties)
    == (CudaInterface.current_device, torch.cuda.get_device_capability, CudaInterface.get_device_properties)
)

# As in a decorator of a test that needs Triton.
sys.modules["triton"] = types.ModuleType("triton")
for asked in (has_triton_package, has_triton):
    # Not all versions of torch keep both answers.
    getattr(asked, "cache_clear", bool)()
assert cuda.has_triton()
print(first_use())
