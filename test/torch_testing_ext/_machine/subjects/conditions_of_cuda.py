import fake_cuda

from torch_testing_ext import common_cuda, common_device_type
from torch_testing_ext._machine.lazy_values import LazyVal
from torch_testing_ext._torch.devices.first_accelerator_use import first_use

lazy = {name: bool(value) for name, value in vars(common_cuda).items() if isinstance(value, LazyVal)}
for name in common_cuda._COMPUTED:
    lazy[name] = getattr(common_cuda, name)
for name, value in list(vars(common_cuda).items()):
    if name.startswith("evaluate_platform"):
        lazy[name] = value()
assert lazy["SM90OrLater"] and lazy["SM53OrLater"] and not lazy["SM100OrLater"], lazy
assert lazy["IS_SM90"] is True and lazy["TEST_CUDNN"] and lazy["TEST_CUDA"] and lazy["TEST_MULTIGPU"]
assert common_cuda.sm_is_or_higher_than if hasattr(common_cuda, "sm_is_or_higher_than") else True
assert common_cuda.TEST_CUDNN_VERSION == 91002
print(len(lazy) > 50, first_use())
