"""The test kit that test files use, by PyTorch's names: bases, decorators, assertions, and parts of PyTorch's suites.

Imports `launch` and all below it. The mirror gives its names; nothing here imports the mirror, pytest or the runner.
"""

# First: importing torch has left the collector much to do, which the imports below would wait for.
from torch_testing_ext import _torch as _torch
