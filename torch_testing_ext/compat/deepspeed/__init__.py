"""DeepSpeed's test classes and fixtures of ranks, for pytest. The plugin runs them in ranks."""

from torch_testing_ext import pytest_plugin as _pytest_plugin

from . import plugin as _plugin
from .classes import DistributedFixture as DistributedFixture, DistributedTest as DistributedTest

_pytest_plugin.bring(_plugin)
