"""A nanny that is free waits for all of its next request."""

import os

from torch_testing_ext._process.channel import Channel, socket_pair
from torch_testing_ext._process.loop import ParentLoop
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner.processes import nanny
from torch_testing_ext.runner.processes.worker_messages import LoadAs, StartUnit, UnitSpec


class RequestInPiecesTest(TestCase):
    def test_a_nanny_waits_for_all_of_it(self) -> None:
        """The request of a class with many tests is longer than what one read returns."""
        tests = tuple(f"T.test_{number:0100}" for number in range(2_000))
        spec = UnitSpec(0, "/f.py", LoadAs(), "/", tests, (1.0,) * len(tests), tests, "/unit", "/ranks", {})
        ours, theirs = socket_pair()
        sender: Channel[StartUnit] = Channel(ours, StartUnit)
        receiver: Channel[StartUnit] = Channel(theirs, StartUnit)
        pid = os.fork()
        if pid == 0:
            code = 2
            try:
                sender.close()
                request = nanny._wait_for_request(ParentLoop(), receiver)
                code = int(request is None or request.unit.tests != tests or len(request.fds) != 2)
            finally:
                os._exit(code)
        receiver.close()
        with open(os.devnull) as null:
            sender.send(StartUnit(0, spec), null.fileno(), null.fileno())
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)
        sender.close()

    def test_a_nanny_ends_with_its_client(self) -> None:
        ours, theirs = socket_pair()
        pid = os.fork()
        if pid == 0:
            code = 2
            try:
                ours.close()
                code = int(nanny._wait_for_request(ParentLoop(), Channel(theirs, StartUnit)) is not None)
            finally:
                os._exit(code)
        theirs.close()
        ours.sendall(b'{"StartUnit": ')  # and no more
        ours.close()
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)


if __name__ == "__main__":
    run_tests()
