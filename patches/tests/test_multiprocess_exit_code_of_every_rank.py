# Owner(s): ["oncall: distributed"]
# In PyTorch: test/distributed/test_c10d_common.py

from types import SimpleNamespace

from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests, TestCase


class MultiProcessReturnCodesTest(TestCase):
    """What MultiProcessTestCase makes of the exit codes of its ranks."""

    def _case(self, *exit_codes):
        case = MultiProcessTestCase()
        case.pid_to_pipe = {}
        case.skip_return_code_checks = []
        case.special_return_code_checks = {}
        case.processes = [
            SimpleNamespace(pid=100 + rank, exitcode=exit_code)
            for rank, exit_code in enumerate(exit_codes)
        ]
        return case

    def test_all_ranks_pass(self):
        self._case(0, 0, 0)._check_return_codes(self.id, 1.0)

    def test_any_rank_exits_with_another_code(self):
        # As after os._exit(3), SIGKILL and SIGSEGV
        for exit_code in (3, -9, -11):
            for rank in range(3):
                exit_codes = [0, 0, 0]
                exit_codes[rank] = exit_code
                with self.assertRaisesRegex(
                    AssertionError,
                    rf"rank {rank} \(pid {100 + rank}\) exited with code {exit_code}",
                ):
                    self._case(*exit_codes)._check_return_codes(self.id, 1.0)

    def test_special_return_code_is_that_of_rank_0(self):
        # Its peers may end in any way, or go on
        for peer in (0, 1, -6):
            case = self._case(7, peer)
            case.special_return_code_checks = {self.id: 7}
            case._check_return_codes(self.id, 1.0)

        case = self._case(0, 7)
        case.special_return_code_checks = {self.id: 7}
        with self.assertRaisesRegex(AssertionError, "Expected exit code 7"):
            case._check_return_codes(self.id, 1.0)


if __name__ == "__main__":
    run_tests()
