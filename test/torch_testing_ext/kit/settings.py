"""Other settings for the time of a `with` block."""

import os
from unittest import mock

from torch_testing_ext._testing.bases import tests_in_ranks


def timeout(seconds: float):
    """Another default time-out for a test."""
    return mock.patch.object(tests_in_ranks, "TIMEOUT_DEFAULT", seconds)


def environ(**values: str):
    return mock.patch.dict(os.environ, values)
