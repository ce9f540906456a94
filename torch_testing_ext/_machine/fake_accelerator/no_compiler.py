"""The answers of a fake accelerator to torch.compile."""

from typing import NoReturn

from torch_testing_ext._machine.fake_accelerator.building import FakeAcceleratorError


class _NoCompiler:
    """Raises when inductor first uses it as one of the code generators that a device's module has."""

    def __call__(self, *_: object) -> NoReturn:
        raise FakeAcceleratorError(
            "torch.compile's backend inductor has no code for fake accelerators: use backend='aot_eager' or 'eager', "
            "or compile on the CPU"
        )

    supports_caching = property(__call__)


# Inductor takes them when it is first used, also for the CPU, and uses them for a tensor of this device.
Scheduling = PythonWrapperCodegen = CppWrapperCodegen = WrapperFxCodegen = _NoCompiler()
