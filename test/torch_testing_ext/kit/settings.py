"""Other settings for the time of a `with` block."""

import os
from unittest import mock

from torch_testing_ext._testing.bases import ranked_test_case


def timeout(seconds: float):
    """Another default time-out for a test."""
    return mock.patch.object(ranked_test_case, "TIMEOUT_DEFAULT", seconds)


def environ(**values: str):
    return mock.patch.dict(os.environ, values)
