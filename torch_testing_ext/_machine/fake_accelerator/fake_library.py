"""The library of fake accelerators."""

from typing import Any

import torch

from torch_testing_ext._machine.fake_accelerator.building import load_library

library = load_library(torch.__version__)
# Its stubs differ between versions.
accelerator: Any = torch.accelerator
