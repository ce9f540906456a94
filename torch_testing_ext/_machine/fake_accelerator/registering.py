"""Gives torch the fake accelerator in this process: `import torch` calls `autoload` where the run has one.

This package may be what imports torch, so that no module that does so itself may be imported here: it is not whole yet.
Those of `_torch` are.
"""

import os
from contextlib import suppress
from typing import Any, NoReturn

import torch

from torch_testing_ext._torch import replacing
from torch_testing_ext._torch.devices import accelerator_state, build_options

from . import COUNT, KIND, LIBRARY_FOLDER, refusal
from .building import FakeAcceleratorError, load_library

BACKEND = "fakeccl"
_UNUSED_NAME = "privateuseone"


def autoload() -> None:
    """Register the device in a process of a run that has fake accelerators: the entry point that torch calls."""
    if os.environ.get(COUNT) and os.environ.get(LIBRARY_FOLDER):
        # The first process of the run refuses, and has more to say than torch would.
        with suppress(FakeAcceleratorError):
            register()


def register() -> None:
    """Load the library and name the device. Raises FakeAcceleratorError where torch has another accelerator."""
    name = accelerator_state.extension_device_type()
    if name == KIND:
        return
    if name != _UNUSED_NAME:
        raise FakeAcceleratorError(
            f"fake accelerators cannot be used with {name}, an extension of torch: leave them out, or do not import "
            f"what brings {name}"
        )
    # Asking the driver of CUDA would make this process unsafe to fork.
    may_be_another = build_options.device_may_exist()
    present = torch.accelerator.current_accelerator(check_available=True) if may_be_another else None
    if present is not None:
        raise FakeAcceleratorError(refusal(present.type))
    library = load_library(torch.__version__)
    # Its stubs do not export these functions.
    utils: Any = torch.utils
    utils.rename_privateuse1_backend(KIND)
    # Any extension that is imported later wants this place, by one of these names.
    replacing.replace_for_good("other extensions", lambda name, rename: _refuse_other_extension)
    from . import device_module

    accelerator_state.register_device_module(KIND, device_module)
    utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if torch.distributed.is_available():

        def make_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
            from ..device_sharing import ranks_per_device

            claims = store if ranks_per_device() == 1 else None
            return library.stage(torch.distributed.ProcessGroupGloo(store, rank, size, timeout), claims)

        torch.distributed.Backend.register_backend(BACKEND, make_group, devices=[KIND])


def _refuse_other_extension(backend_name: str) -> NoReturn:
    raise FakeAcceleratorError(
        f"{backend_name} cannot be loaded beside the fake accelerator: torch has one place for extensions. Run without "
        "fake accelerators"
    )
