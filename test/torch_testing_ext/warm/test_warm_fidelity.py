"""A program that a warm server runs cannot be told from one in a new interpreter."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any, ClassVar

import pytest
from kit.files import subject
from kit.warm_runs import WarmBench, settle

_STATE = subject(__file__, "state_of_a_process.py")
_SAME = {
    "state": _STATE,
    "message at exit": "import sys; sys.exit('bye')",
    "exception": "def f():\n    raise ValueError('é')\nf()",
    "syntax error": "def f(:",
    "interrupt": "raise KeyboardInterrupt",
    "abort": "import os; os.abort()",
    "killed": "import os; os.kill(os.getpid(), 9)",
}
_FILE = "import sys\nprint(__file__, sys.argv, sys.path[0], __name__, __spec__, sorted(globals()))\n1 / 0\n"


_PLUGIN = """
import atexit, logging, os, signal, threading, pytest
os.environ["PLUGGED"] = "1"
pytest.plugged = True
atexit.register(print, "bye")
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
logging.basicConfig()
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("loud")
open("written", "a").write("x")
"""
_CONFTEST = """
import logging, os, signal, sys, threading, pytest
def pytest_unconfigure():
    tops = ("_pytest", "pytest", "xdist", "execnet", "plug", "cov", "hypothesis", "torch.", "torch_testing_ext_")
    print(sorted(m for m in sys.modules if m.startswith(tops)), sorted(os.environ.items()))
    print(hasattr(pytest, "plugged"), signal.getsignal(10), logging.root.handlers, threading.active_count())
    print([type(m.__loader__).__name__ for n, m in sorted(sys.modules.items()) if "xdist" in n or "plug" in n])
"""


# Runs a command as a shell with job control does, and continues it when it is stopped.
_SHELL = subject(__file__, "shell_with_job_control.py")


# Changes its surroundings, and then imports a module that has the name of one of the server's.
_RESTARTS = """
import os, signal, sys, tempfile
found = os.umask(0o77), signal.getsignal(signal.SIGHUP), signal.getitimer(signal.ITIMER_REAL)
saved = os.dup(1)
os.dup2(os.open("hidden", os.O_CREAT | os.O_WRONLY), 1)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.setitimer(signal.ITIMER_REAL, 1000)
sys.path.insert(0, "own")
import torch
os.dup2(saved, 1)
print(found, torch.VALUE)
"""


class WarmTestCase(unittest.TestCase):
    """Tests with one server for the class."""

    bench: ClassVar[WarmBench]
    torch: ClassVar[bool] = False

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.bench = WarmBench(Path(folder.name), cls.torch)
        cls.addClassCleanup(cls.bench.close)
        while ": 0 runs" in cls.bench.run("-c", "pass").stdout + cls.bench.status():  # files of the bench are too young
            pass

    def assert_same(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        cold, warm = (self.bench.run(*words, warm=warm, **options) for warm in (False, True))
        for one in ("returncode", "stdout", "stderr"):
            a, b = (settle(str(getattr(run, one))) for run in (cold, warm))
            self.assertEqual(a, b, (one, words))
        return warm


class WithTorchTest(WarmTestCase):
    torch = True

    @pytest.mark.slow
    def test_code(self) -> None:
        for name, code in _SAME.items():
            with self.subTest(name):
                self.assert_same("-c", code, "a", "b c", input="typed")

    @pytest.mark.slow
    def test_modules_that_a_stage_has_imported(self) -> None:
        self.bench.write("test_s.py", "import torch\n\n\ndef test_s():\n    assert torch.nn is None\n")
        self.assert_same("-m", "pytest", "-q", "-W", "ignore", "test_s.py")
        code = "import importlib.util as u; s = u.find_spec('pytest'); print(s.origin, s.submodule_search_locations)"
        self.assert_same("-c", f"{code}; print(s.loader.get_source('pytest')[:40], u.find_spec('json.decoder').origin)")

    def test_a_debugger_in_a_rank(self) -> None:
        """The server has imported our modules, where no terminal was."""
        lines = (
            "from torch_testing_ext.common_distributed import MultiProcessTestCase",
            "from torch_testing_ext.common_utils import run_tests",
            "class T(MultiProcessTestCase):",
            "    world_size = 1",
            "    def setUp(self): super().setUp(); self._spawn_processes()",
            "    def test_b(self): x = 41; breakpoint()",
            "if __name__ == '__main__': run_tests()",
        )
        self.bench.write("test_b.py", "\n".join(lines))
        self.bench.run("-c", "import torch_testing_ext.common_distributed")  # from now on, a stage imports it
        pid, terminal = pty.fork()
        if pid == 0:
            given = self.bench.command("test_b.py")
            os.chdir(given["cwd"])
            os.execve(sys.executable, given["args"], given["env"])
        seen = b""
        with contextlib.suppress(OSError):  # it has ended
            while b"(rank 0) " not in seen:
                seen += os.read(terminal, 4096)
            os.write(terminal, b"c\n")
            while True:
                seen += os.read(terminal, 4096)
        os.waitpid(pid, 0)
        os.close(terminal)
        self.assertIn(b"OK", seen)

    def test_many_at_once(self) -> None:
        running = [self.bench.start("-c", f"import torch; print({n})") for n in range(8)]
        self.assertEqual([one.communicate(timeout=120)[0] for one in running], [f"{n}\n" for n in range(8)])


class SameAsColdTest(WarmTestCase):
    def test_files_and_modules(self) -> None:
        self.bench.write("s.py", _FILE)
        self.bench.write("bad.py", "x = (\n")
        (self.bench.project / "link.py").symlink_to(self.bench.project / "s.py")
        for words in (("s.py", "x"), ("./s.py",), ("../project/s.py",), ("link.py",), ("bad.py",), ("-m", "s", "y")):
            with self.subTest(words):
                self.assert_same(*words)
        for words in (("nosuch.py",), ("-m", "nosuch")):
            with self.subTest(words):
                self.assert_same(*words)

    def test_what_a_client_hands_over(self) -> None:
        """Another folder and mask, an ignored signal, a further descriptor, closed streams."""
        code = "import os, signal, sys; print(os.getcwd(), signal.getsignal(signal.SIGHUP), sys.stdin, os.umask(0))"
        reading, writing = os.pipe()
        os.write(writing, b"from a pipe")
        os.close(writing)

        def change() -> None:
            os.chdir("/usr")
            os.umask(0o70)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

        self.assert_same("-c", code, preexec_fn=change)
        many = [fcntl.fcntl(reading, fcntl.F_DUPFD, number) for number in range(3, 30)]
        read = f"import os; print(os.read({reading}, 99), [os.fstat(fd).st_ino for fd in {many}])"
        warm = self.bench.run("-c", read, pass_fds=[reading, *many])
        self.assertEqual(warm.stdout, f"b'from a pipe' {[os.fstat(reading).st_ino] * len(many)}\n", warm.stderr)
        for fd in (reading, *many):
            os.close(fd)
        self.assert_same("-c", "import sys; print(sys.stdin, file=sys.stderr)", preexec_fn=lambda: os.close(0))
        self.assert_same("-c", "import sys; print(sys.stdout, file=sys.stderr)", preexec_fn=lambda: os.close(1))
        with open("/dev/full", "w") as full:
            self.assert_same("-c", "print('x')", capture_output=False, stdout=full, stderr=subprocess.DEVNULL)

    @pytest.mark.slow
    def test_plugins_of_pytest(self) -> None:
        """One that does much when it is imported, with options that load others, or none."""
        self.bench.write("conftest.py", _CONFTEST)
        self.bench.write("test_p.py", "def test_p():\n    assert 1 == 2\n")
        off = {"env": {**self.bench.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}}
        for text, options, given in (
            (_PLUGIN, (), {}),
            (_PLUGIN, ("-p", "no:plugging"), {}),
            (_PLUGIN, ("-p", "no:xdist", "--assert=plain"), {}),
            (_PLUGIN, ("-p", "plugging"), off),
            (_PLUGIN, ("--cov=test_p", "--cov-report="), {}),
            ("", (), {}),
            ("", (), off),
            ("raise ValueError('broken')", (), {}),
        ):
            self.bench.install_plugin("plugging", text)
            with self.subTest(text=text[:9], options=options, off=bool(given)):
                self.assert_same("-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_p.py", **given)

    def test_a_program_that_starts_again(self) -> None:
        """It gets back what it has redirected until then, as pytest does while it imports tests."""
        self.bench.write("own/torch.py", "VALUE = 1\n")
        self.bench.write("restarts.py", _RESTARTS)
        self.assertIn(" 1\n", self.assert_same("restarts.py").stdout)
        self.bench.write(
            "test_r.py", "import sys\nsys.path.insert(0, 'own')\nimport torch\n\n\ndef test_r():\n    pass\n"
        )
        alone = {**self.bench.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        self.assertIn("1 passed", self.assert_same("-m", "pytest", "-q", "test_r.py", env=alone).stdout)

    def test_other_programs_run_cold(self) -> None:
        warm = self.bench.run("true")
        self.assertEqual((warm.returncode, warm.stderr.count("\n")), (0, 1))
        self.assertIn("running cold", warm.stderr)
        self.assertEqual(self.bench.run("no-such-program").returncode, 127)
        self.assertEqual(self.bench.run("python", "-X", "dev", "-c", "pass").returncode, 0)

    def test_signals_and_job_control(self) -> None:
        wait = "import signal, sys, time\nprint('up', flush=True)\n"
        handler = "import signal, sys; signal.signal(10, lambda *_: sys.exit(7))\n"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            with self.subTest(number):
                process = self.bench.start("-c", f"{handler}{wait}time.sleep(60)")
                process.stdout.readline()  # type: ignore[union-attr]
                process.send_signal(number)
                _, errors = process.communicate(timeout=60)
                self.assertEqual(process.returncode, 7 if number == signal.SIGUSR1 else -number, errors)
        process = self.bench.start(
            "-c", "import os; print(os.getpid(), flush=True); os.kill(os.getpid(), 20); print('on')"
        )
        pid = int(process.stdout.readline())  # type: ignore[union-attr]
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        self.assertTrue(os.WIFSTOPPED(status))
        self.assertIn(") T", Path(f"/proc/{pid}/stat").read_text())
        process.send_signal(signal.SIGCONT)
        self.assertEqual(process.communicate(timeout=60)[0], "on\n")

    def test_killed_client_server_and_supervisor(self) -> None:
        code = "import os, sys; print(os.getpid(), os.getppid(), flush=True); sys.stdin.read(); print('done')"
        process = self.bench.start("-c", code, stdin=subprocess.PIPE)
        pid, _ = map(int, process.stdout.readline().split())  # type: ignore[union-attr]
        gone = os.pidfd_open(pid)
        process.kill()
        process.communicate(timeout=60)
        self._wait(gone)
        # A program outlives the server, and a new server comes with the next one.
        process = self.bench.start("-c", code, stdin=subprocess.PIPE)
        process.stdout.readline()  # type: ignore[union-attr]
        server = self.bench.server()
        os.kill(server, signal.SIGKILL)
        self.assertEqual(process.communicate("", timeout=60)[0], "done\n")
        self.assertEqual(process.returncode, 0)
        self.assertEqual(self.bench.run("-c", "print(1)").stdout, "1\n")
        self.assertNotEqual(self.bench.server(), server)
        process = self.bench.start("-c", code, stdin=subprocess.PIPE)
        pid, supervisor = map(int, process.stdout.readline().split())  # type: ignore[union-attr]
        self.assertNotEqual(supervisor, os.getpid(), "it ran cold")
        gone = os.pidfd_open(pid)
        os.kill(supervisor, signal.SIGKILL)
        process.communicate(timeout=60)
        self.assertEqual(process.returncode, -signal.SIGKILL)
        self._wait(gone)

    def _wait(self, gone: int) -> None:
        self.assertTrue(select.select([gone], [], [], 60)[0])
        os.close(gone)

    def test_terminal(self) -> None:
        """`breakpoint()` at a terminal; Ctrl-Z, Ctrl-C and Ctrl-\\\\ there, under a shell with job control."""
        code = "import os, time\nprint(os.isatty(0), flush=True)\nx = 41\nbreakpoint()\nprint('after', x, flush=True)\n"
        self.bench.write("debugged.py", f"{code}time.sleep(60)\n")
        pid, terminal = pty.fork()
        if pid == 0:
            given = self.bench.command("debugged.py")
            os.chdir(given["cwd"])
            shell = [sys.executable, "-c", _SHELL, *given["args"]]
            os.execve(sys.executable, shell, given["env"])
        seen = b""

        def expect(text: bytes) -> None:
            nonlocal seen
            while text not in seen:
                seen += os.read(terminal, 4096)
            seen = seen.partition(text)[2]

        for text, typed in (
            (b"(Pdb) ", b"p x + 1\n"),
            (b"42", b"c\n"),
            (b"after 41", b"\x1a"),
            (b"stopped by 20", b"\x03"),
            (b"Program interrupted", b"\x1c"),  # pdb handles SIGINT
            (b"ended with -3", b""),
        ):
            expect(text)
            os.write(terminal, typed)
        os.waitpid(pid, 0)
        os.close(terminal)


class ServerTest(WarmTestCase):
    def setUp(self) -> None:
        self.bench.run("stop")

    def test_ends_when_idle_or_told_to(self) -> None:
        self.assertEqual(self.bench.run("status").stdout, "no server runs\n")
        self.bench.run("-c", "pass")
        server = os.pidfd_open(self.bench.server())
        self.assertIn("stopped server", self.bench.run("stop").stdout)
        SameAsColdTest._wait(self, server)  # type: ignore[arg-type]
        idle = {**self.bench.environ, "TORCH_TESTING_EXT_WARM_IDLE": "1"}
        self.bench.run("-c", "pass", env=idle)
        self.assertEqual(sorted(p.name for p in self.bench.servers.glob("*.socket.*")), [])

    def test_whatever_ends_leaves_nothing(self) -> None:
        """A server that is killed while a stage imports; the folder of the servers goes."""
        place = self.bench.project / "pid"
        hanging = f"open({str(place)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
        torch = self.bench.packages / "torch" / "__init__.py"
        before = torch.read_text()
        self.addCleanup(torch.write_text, before)
        torch.write_text(f"import os, time; {hanging}")
        client = self.bench.start("-c", "pass")
        while not (place.exists() and (said := place.read_text())):
            pass
        stage = self.bench.when_ended(int(said))
        torch.write_text(before)
        with open(f"/proc/{said}/stat") as stat:
            server = int(stat.read().rpartition(")")[2].split()[1])
        self.assertNotEqual(server, os.getpid())
        os.kill(server, signal.SIGKILL)
        stage()
        self.assertEqual(client.communicate(timeout=60), ("", ""))
        self.assertEqual(client.returncode, 0)
        self.bench.run("-c", "pass")  # a server that finds itself stale leaves the client to run cold, and none is left
        ended = self.bench.when_ended(self.bench.server())
        shutil.rmtree(self.bench.servers)
        ended()

    def test_a_folder_with_a_long_name(self) -> None:
        """Longer than the address of a socket may be."""
        place = self.bench.project / ("long" * 50)
        place.mkdir()
        environ = {**self.bench.environ, "XDG_RUNTIME_DIR": str(place)}
        self.assertEqual(self.bench.run("-c", "pass", env=environ).stderr, "")
        self.assertRegex(self.bench.run("status", env=environ).stdout, r"server \d+: 1 runs")
        self.assertRegex(self.bench.run("stop", env=environ).stdout, r"stopped server \d+")

    def test_refuses_what_it_cannot_trust(self) -> None:
        """A folder that others can enter, and a socket that a killed server has left."""
        self.bench.run("-c", "pass")
        os.chmod(self.bench.servers, 0o755)
        warm = self.bench.run("-c", "print(1)")
        self.assertEqual((warm.stdout, warm.stderr.count("\n")), ("1\n", 1))
        os.chmod(self.bench.servers, 0o700)
        os.kill(self.bench.server(), signal.SIGKILL)
        self.assertEqual(self.bench.run("-c", "print(1)").stdout, "1\n")
        off = {**self.bench.environ, "TORCH_TESTING_EXT_WARM": "0"}
        self.assertEqual(
            self.bench.run("-c", "import os; print(os.getsid(0) == os.getsid(os.getppid()))", env=off).stdout, "True\n"
        )

    def test_differing_limits_get_servers_of_their_own(self) -> None:
        code = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
        self.bench.run("-c", "pass")
        limited = self.bench.run("-c", code, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (500, 600)))
        self.assertEqual(limited.stdout, "500\n")
        self.assertEqual(self.bench.status().count("server "), 2)
