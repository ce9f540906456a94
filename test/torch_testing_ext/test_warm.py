"""Runs of programs in warm forks are like runs in new interpreters, and end with all that they have started."""

import os
import signal
import subprocess
import sys
from unittest import mock

from kit.files import FolderCase
from kit.processes import clean_environ, wait_until_gone
from kit.warm import WarmProcess, run_cold, run_warm, start_warm

SHOWS = """
import os, sys
print(__name__, sys.argv, sys.orig_argv[1:], sys.path[0], os.getcwd())
print(sorted(os.environ.items()))
print("to stderr", file=sys.stderr)
sys.exit({code})
"""
# Tells its pid and that of a process in a session of its own, and waits.
WAITS = """
import os, signal, subprocess
child = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=-3, stderr=-3)  # DEVNULL
print(os.getpid(), child.pid, file={out}, flush=True)
{then}
"""


class RunWarmTest(FolderCase):
    def test_like_a_new_interpreter(self):
        (self.root / "package").mkdir()
        for name in "program.py", "package/__init__.py", "package/module.py":
            self.write(name, SHOWS.format(code=3) if name != "package/__init__.py" else "")
        environ = clean_environ(OF_THIS_PROGRAM="a value")
        for words in ("program.py", "word"), ("-m", "package.module", "word"):
            with self.subTest(words):
                warm, cold = (run(*words, cwd=self.root, env=environ) for run in (run_warm, run_cold))
                self.assertIn("OF_THIS_PROGRAM", cold.stdout)
                self.assertEqual(
                    (warm.returncode, warm.stdout, warm.stderr), (cold.returncode, cold.stdout, cold.stderr)
                )
                self.assertEqual((warm.returncode, warm.stderr), (3, "to stderr\n"))

    def test_that_torch_is_there(self):
        self.write("program.py", "import sys\nprint('torch' in sys.modules, 'torch_testing_ext' in sys.modules)\n")
        done = run_warm("program.py", cwd=self.root, env=clean_environ())
        self.assertEqual(done.stdout, "True False\n")
        # A variable that torch reads when it is imported.
        done = run_warm("program.py", cwd=self.root, env=clean_environ(OMP_NUM_THREADS="7"))
        self.assertEqual(done.stdout, "False False\n")

    def test_both_streams_together(self):
        self.write("program.py", "import os\nfor fd in 1, 2, 1: os.write(fd, b'%d' % fd)\nos._exit(0)\n")
        done = run_warm("program.py", cwd=self.root, env=clean_environ(), together=True)
        self.assertEqual((done.stdout, done.stderr, done.returncode), ("121", "", 0))

    def test_killed_by_a_signal(self):
        self.write("program.py", "import os\nos.kill(os.getpid(), 15)\n")
        self.assertEqual(run_warm("program.py", cwd=self.root, env=clean_environ()).returncode, -signal.SIGTERM)

    def test_a_timeout_ends_the_program_and_its_children(self):
        self.write("program.py", WAITS.format(out="open('fifo', 'w')", then="signal.pause()"))
        os.mkfifo(self.root / "fifo")
        pids, wait = [], WarmProcess.wait

        def wait_for_both(process, timeout):
            self.assertEqual(timeout, 20)
            pids.extend(map(int, (self.root / "fifo").read_text().split()))
            return wait(process, 0.01)

        with mock.patch.object(WarmProcess, "wait", wait_for_both), self.assertRaises(subprocess.TimeoutExpired):
            run_warm("program.py", cwd=self.root, env=clean_environ(), timeout=20)
        self.assertEqual(len(pids), 2)
        self.assertEqual(wait_until_gone(pids, 0), [])


class StartWarmTest(FolderCase):
    def start(self, then):
        self.write("program.py", WAITS.format(out="None", then=then))
        process = start_warm("program.py", cwd=self.root, env=clean_environ())
        self.assertIsInstance(process, WarmProcess)
        self.addCleanup(process.end)
        pids = [int(word) for word in process.stdout.readline().split()]
        self.assertEqual(pids[0], process.pid)
        return process, pids

    def test_signals_and_waiting(self):
        process, pids = self.start("print('more'); signal.pause()")
        self.assertIsNone(process.poll())
        self.assertRaises(subprocess.TimeoutExpired, process.wait, 0.01)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate()
        self.assertEqual((process.returncode, process.poll()), (-signal.SIGINT, -signal.SIGINT))
        self.assertEqual(out, "more\n")
        self.assertIn("KeyboardInterrupt", errors)
        process.kill()  # of a program that has ended: nothing happens
        os.kill(pids[1], signal.SIGKILL)

    def test_end(self):
        process, pids = self.start("signal.pause()")
        process.end()
        self.assertEqual(process.returncode, -signal.SIGKILL)
        self.assertEqual(wait_until_gone(pids, 0), [])
        for stream in process.stdout, process.stderr:
            stream.close()

    def test_a_terminal_gets_a_new_interpreter(self):
        terminal, theirs = os.openpty()
        self.write("program.py", "import sys\nsys.exit(sys.stdout.isatty() and 'torch' not in sys.modules)\n")
        process = start_warm("program.py", cwd=self.root, env=clean_environ(), stdout=theirs)
        os.close(theirs)
        process.communicate()
        os.close(terminal)
        self.assertEqual((process.returncode, process.args[0]), (1, sys.executable))
