"""A test kit for code that uses torch.distributed. Importing this package does not import torch."""

import os as _os

__version__ = "0.1.0"

# Has torch count CUDA's devices by NVML. Its other way initialises CUDA, and ranks could no longer be forked.
_os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

if _os.environ.get("TORCH_TESTING_EXT_FAKE_ACCELERATORS"):
    from ._machine.fake_accelerator.starting import start_as_the_environment_says as _start

    _start()
