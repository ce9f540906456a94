# Owner(s): ["oncall: distributed"]
# In PyTorch: test/distributed/test_c10d_common.py

import unittest
from types import SimpleNamespace

from torch.testing._internal.common_distributed import (
    MultiProcessTestCase,
    TEST_SKIPS,
)
from torch.testing._internal.common_utils import run_tests, TestCase


class MultiProcessSkipTest(TestCase):
    """A test of MultiProcessTestCase is skipped if all of its ranks skip it."""

    def _raised_for(self, *exit_codes):
        case = MultiProcessTestCase()
        case.pid_to_pipe = {}
        case.skip_return_code_checks = []
        case.special_return_code_checks = {}
        case.processes = [
            SimpleNamespace(pid=100 + rank, exitcode=exit_code)
            for rank, exit_code in enumerate(exit_codes)
        ]
        try:
            case._check_return_codes(self.id, 1.0)
        except (unittest.SkipTest, RuntimeError) as error:
            return error
        return None

    def test_all_ranks_skip(self):
        skip = TEST_SKIPS["generic"].exit_code
        self.assertIsInstance(self._raised_for(skip, skip), unittest.SkipTest)

    def test_some_ranks_do_not_skip(self):
        skip = TEST_SKIPS["generic"].exit_code
        # A peer that passes, that crashes, and that skips for another reason
        for other in (0, -6, TEST_SKIPS["no_cuda"].exit_code):
            for exit_codes in ((skip, other), (other, skip)):
                error = self._raised_for(*exit_codes)
                self.assertIsInstance(error, RuntimeError)
                self.assertIn(
                    f"rank 0 exited with code {exit_codes[0]}, "
                    f"rank 1 exited with code {exit_codes[1]}",
                    str(error),
                )


if __name__ == "__main__":
    run_tests()
