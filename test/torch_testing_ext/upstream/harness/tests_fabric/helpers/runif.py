"""Lightning's way, in miniature: such a test skips unless a script runs it in a process of its own."""

import os

import pytest


def RunIf(standalone):
    is_asked_for = os.environ.get("PL_RUN_STANDALONE_TESTS") == "1"
    return pytest.mark.skipif(condition=not is_asked_for, reason="Requires: [Standalone]", standalone=standalone)
