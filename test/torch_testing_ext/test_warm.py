"""Programs that the server of a test's process forks are like new interpreters; it ends with that process."""

import os
import signal
import subprocess
from pathlib import Path

from kit.files import FolderCase
from kit.processes import clean_environ, wait_until_gone
from kit.warm import run_cold, run_warm

SHOWS = """
import os, sys
print(__name__, sys.argv, sys.orig_argv[1:], sys.path[0], os.getcwd())
print(sorted(os.environ.items()))
print("to stderr", file=sys.stderr)
sys.exit({code})
"""
# Tells its pid, and waits.
WAITS = """
import os, signal
with open("fifo", "w") as file:
    file.write(str(os.getpid()))
signal.pause()
"""
# Tells the pid of the process whose children run programs.
HAS_A_SERVER = """
import os
from kit.warm import run_warm
server = "import os; print(open(f'/proc/{os.getppid()}/stat').read().split()[3])"
print(run_warm("-c", server, cwd=".", env=os.environ).stdout, end="")
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

    def test_both_streams_together(self):
        self.write("program.py", "import os\nfor fd in 1, 2, 1: os.write(fd, b'%d' % fd)\nos._exit(0)\n")
        done = run_warm("program.py", cwd=self.root, env=clean_environ(), together=True)
        self.assertEqual((done.stdout, done.stderr, done.returncode), ("121", None, 0))

    def test_killed_by_a_signal(self):
        self.write("program.py", "import os\nos.kill(os.getpid(), 15)\n")
        self.assertEqual(run_warm("program.py", cwd=self.root, env=clean_environ()).returncode, -signal.SIGTERM)

    def test_a_timeout_ends_the_program(self):
        self.write("program.py", WAITS)
        run_warm("-c", "pass", cwd=self.root, env=clean_environ())  # the server is there
        fifo = self.root / "fifo"
        os.mkfifo(fifo)
        reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reading)
        with self.assertRaises(subprocess.TimeoutExpired):
            run_warm("program.py", cwd=self.root, env=clean_environ(), timeout=3)
        self.assertEqual(wait_until_gone([int(os.read(reading, 32))], 20), [])

    def test_the_server_ends_with_the_process_that_uses_it(self):
        path = os.pathsep.join([str(Path(__file__).parent), clean_environ()["PYTHONPATH"]])
        done = run_cold("-c", HAS_A_SERVER, cwd=self.root, env=clean_environ(PYTHONPATH=path))
        self.assertRegex(done.stdout, r"^\d+\n$", done.stderr)
        self.assertEqual(wait_until_gone([int(done.stdout)], 20), [])
