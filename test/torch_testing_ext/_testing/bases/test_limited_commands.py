"""Commands with a time limit."""

import os
import sys
import tempfile
import unittest
from pathlib import Path

from torch_testing_ext._testing.bases.limited_commands import CommandEnd, Process, run_limited


class TestRunLimited(unittest.TestCase):
    def setUp(self) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.addCleanup(self.log.close)
        self.calls: list[str] = []

    def run_code(self, code: str, limit: float) -> CommandEnd:
        """Run code of Python, and note which functions were called when."""

        def end(process: Process) -> None:
            self.calls.append("end")
            process.kill()
            process.wait()

        def at_limit(process: Process) -> None:
            self.calls.append("at limit")

        command = [sys.executable, "-c", code]
        return run_limited(command, limit, {"WORD": "given"}, self.log, end, at_limit, Path("/"))

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read().decode()

    def test_output_and_exit_code(self) -> None:
        code = "import os, sys; print(os.environ['WORD'], os.getcwd(), os.getsid(0) == os.getpid()); sys.exit('error')"
        ended = self.run_code(code, 60.0)
        self.assertEqual(ended, CommandEnd(1, "exited with code 1"))
        self.assertEqual(sorted(self.output().splitlines()), ["error", "given / True"])
        self.assertEqual(self.calls, ["end"])

    def test_a_late_command_is_ended(self) -> None:
        ended = self.run_code("import time; print('begins', flush=True); time.sleep(1000)", 0.5)
        self.assertEqual(ended, CommandEnd(None, "was terminated after 0.5 s, its time limit"))
        self.assertEqual(self.calls, ["at limit", "end"])

    def test_it_is_ended_if_this_process_is_interrupted(self) -> None:
        code = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGINT); time.sleep(1000)"
        self.assertRaises(KeyboardInterrupt, self.run_code, code, 60.0)
        self.assertEqual(self.calls, ["end"])

    def test_a_command_that_is_missing(self) -> None:
        with self.assertRaises(FileNotFoundError):
            run_limited(["/no/such/command"], 1.0, {}, self.log, lambda process: self.calls.append("end"))
        self.assertEqual(self.calls, [])


if __name__ == "__main__":
    unittest.main()
