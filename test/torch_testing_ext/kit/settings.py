"""Other settings for the time of a `with` block."""

import os
from unittest import mock

from torch_testing_ext._cases import ranked


def timeout(seconds: float):
    """Another default time-out for a test."""
    return mock.patch.object(ranked, "TIMEOUT_DEFAULT", seconds)


def environ(**values: str):
    return mock.patch.dict(os.environ, values)
