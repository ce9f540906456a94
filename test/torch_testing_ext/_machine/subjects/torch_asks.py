import fake_cuda
import torch

from torch_testing_ext._machine.cuda import answering_for_torch
from torch_testing_ext._torch.device_state import first_use

asking = torch.cuda.current_device, torch.cuda.get_device_capability, torch.cuda.get_device_properties
with answering_for_torch():
    from torch._dynamo.device_interface import CudaInterface, caching_worker_device_properties as cached
    from torch.utils._triton import has_triton

    has_triton()
    assert CudaInterface.Worker.get_device_properties().major == 9 and cached
    assert torch.cuda.get_device_capability() == (9, 0) and torch.cuda.current_device() == 0
assert not cached
assert (
    asking
    == (torch.cuda.current_device, torch.cuda.get_device_capability, torch.cuda.get_device_properties)
    == (CudaInterface.current_device, torch.cuda.get_device_capability, CudaInterface.get_device_properties)
)
print(first_use())
