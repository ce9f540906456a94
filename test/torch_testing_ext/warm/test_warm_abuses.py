"""What can go wrong around a warm server: each program ends as without one, and nothing is left over."""

from __future__ import annotations

import fcntl
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import venv
from pathlib import Path
from unittest import mock

import pytest
from kit.processes import ROOT
from kit.warm_runs import WarmBench

from torch_testing_ext._process.launcher_variables import LAUNCHERS, TORCHRUN
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.warm import warm_client, warm_program
from torch_testing_ext.warm.read_record import ReadRecord
from torch_testing_ext.warm.server_link import RunProgram

SHOWS = "import torch, mine; print(torch.initial_seed(), mine.VALUE)"


class AbusesTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        self.bench = WarmBench(Path(folder), torch=False)
        self.addCleanup(self.bench.close)
        self.torch = self.bench.packages / "torch" / "__init__.py"
        self.bench.write("mine.py", "VALUE = 1\n")

    def run_both(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run without and with a server; the ends and the outputs are the same."""
        cold, warm = (self.bench.run(*words, warm=is_warm) for is_warm in (False, True))
        self.assertEqual((warm.returncode, warm.stdout, warm.stderr), (cold.returncode, cold.stdout, cold.stderr))
        return warm

    def runs_cold(self, said: str, **options) -> None:
        """A program runs all the same, and one line says why no server has run it."""
        warm = self.bench.run("-c", "print(1)", **options)
        self.assertEqual((warm.returncode, warm.stdout), (0, "1\n"))
        self.assertRegex(warm.stderr, rf"^torch_testing_ext\.warm: .*{said}.*: running cold\n$")

    # -- files

    def test_torch_is_replaced_between_runs(self) -> None:
        """As by pip, with the same size and time of change; also to something that cannot be imported, and back."""
        for source in ("initial_seed = lambda: 1\n", "initial_seed = lambda: 2\n", "initial_seed = (\n", ""):
            with self.subTest(source):
                before = os.stat(self.torch)
                draft = self.torch.with_name("draft")
                draft.write_text(source)
                os.utime(draft, ns=(before.st_atime_ns, before.st_mtime_ns))
                os.rename(draft, self.torch)
                self.run_both("-c", SHOWS)

    def test_torch_is_saved_while_it_is_read(self) -> None:
        """The stage has read the old text when the new one comes."""
        fifo = self.bench.project / "fifo"
        os.mkfifo(fifo)
        self.torch.write_text(f"open({str(fifo)!r}).close()\ninitial_seed = lambda: 1\n")
        client = self.bench.start("-c", SHOWS)
        with open(fifo, "w"):  # the old one has been read
            self.torch.write_text("initial_seed = lambda: 2\n")
        self.assertIn(client.communicate(timeout=60)[0], ("1 1\n", "2 1\n"))
        self.assertEqual(self.bench.run("-c", SHOWS).stdout, "2 1\n")

    def test_a_test_that_changes_its_own_project(self) -> None:
        code = "import mine; print(mine.VALUE); open('mine.py', 'w').write(f'VALUE = {mine.VALUE + 1}\\n')"
        # A compiled file does not tell sources of one size and second apart.
        environ = {**self.bench.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        for value in range(1, 5):
            self.assertEqual(self.bench.run("-c", code, env=environ).stdout, f"{value}\n")

    def test_clocks(self) -> None:
        """Files of the future and of long ago, and a clock that goes back between runs."""
        for ahead in (3600, -3600, -40 * 365 * 86400, 0):
            with self.subTest(ahead):
                self.torch.write_text(f"initial_seed = lambda: {ahead + 1}\n")
                os.utime(self.torch, (time.time() + ahead,) * 2)
                self.assertEqual(self.bench.run("-c", SHOWS).stdout, f"{ahead + 1} 1\n")

    def test_times_in_whole_seconds(self) -> None:
        """On such a file system, a file that is as young as its stamp is coarse may change without a trace."""
        record = ReadRecord()
        record.add_file(str(self.torch))
        found = record.files[str(self.torch)]
        assert found is not None
        whole = tuple(number // 10**9 * 10**9 for number in found[3:])
        record.files[str(self.torch)] = (*found[:3], *whole)
        self.assertEqual(record.unsettled(), str(self.torch))

    def test_another_environment(self) -> None:
        """A virtual environment of its own, whose settings then change."""
        place = self.bench.project / "env"
        venv.create(place, symlinks=True, with_pip=False)
        environ = {**self.bench.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), self.bench.environ["PYTHONPATH"]])}
        words = [str(place / "bin" / "python"), "-m", "torch_testing_ext.warm", "-c", "import sys; print(sys.prefix)"]
        given = {"cwd": self.bench.project, "env": environ, "text": True, "capture_output": True, "check": False}
        for line in ("", "include-system-site-packages = true\n"):
            with open(place / "pyvenv.cfg", "a") as file:
                file.write(line)
            done = subprocess.run(words, **given)
            self.assertEqual((done.stdout, done.stderr), (f"{place}\n", ""))

    def test_what_begins_with_the_interpreter(self) -> None:
        """Coverage of subprocesses; ranks that find each other by the process that has started them."""
        rows = (
            ({"COVERAGE_PROCESS_START": ""}, True),
            ({"COVERAGE_PROCESS_CONFIG": ""}, True),
            ({"PMI_RANK": "0"}, True),
            ({"OMPI_COMM_WORLD_RANK": "0"}, True),
            ({"SLURM_STEP_NUM_TASKS": "2"}, True),
            ({"PMI_RANK": "0", "MASTER_PORT": "1"}, False),
            ({"RANK": "0", "MASTER_PORT": "1"}, False),
            # The client has no time to import the table of launchers.
            *(({launcher.sign: "2"}, launcher is not TORCHRUN) for launcher in LAUNCHERS),
        )
        for environ, cold in rows:
            with self.subTest(environ), mock.patch.dict(os.environ, environ, clear=True):
                self.assertIs(warm_client._has_to_be_cold(), cold)

    # -- places

    def test_a_descriptor_near_the_limit(self) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        with open(os.devnull) as file:
            far = fcntl.fcntl(file, fcntl.F_DUPFD, limit - 2)
            self.addCleanup(os.close, far)
            self.runs_cold("a descriptor that it inherits is near the limit", pass_fds=[far])

    def test_a_place_that_cannot_be_written(self) -> None:
        self.runs_cold("no server can be used", env={**self.bench.environ, "XDG_RUNTIME_DIR": "/proc"})

    @unittest.skipUnless(os.getuid() == 0, "takes root, to give a folder to another user")
    def test_a_folder_of_another_user(self) -> None:
        self.bench.servers.mkdir(mode=0o700)
        os.chown(self.bench.servers, 12345, 12345)
        self.runs_cold("is not a folder of this user")

    def test_a_socket_that_is_something_else(self) -> None:
        """A file, or a server that answers nothing, has the name of the socket."""
        self.bench.run("-c", "pass")
        self.bench.close()
        self.bench.run("-c", "pass")
        (socket,) = self.bench.servers.glob("*.socket")
        os.kill(self.bench.server(), signal.SIGKILL)
        socket.unlink()
        socket.write_text("not a socket")
        self.run_both("-c", SHOWS)

    # -- deaths

    def test_client_and_server_are_killed(self) -> None:
        code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
        client = self.bench.start("-c", code)
        pid = int(client.stdout.readline())  # type: ignore[union-attr]
        gone, server = self.bench.when_ended(pid), self.bench.server()
        ended = self.bench.when_ended(server)
        os.kill(server, signal.SIGKILL)
        client.kill()
        client.communicate()
        gone()
        ended()
        self.run_both("-c", SHOWS)

    def test_the_server_ends_before_it_is_asked(self) -> None:
        """As when its files have changed: the client tries again, and says nothing."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.close()
        program = warm_client.WarmProgram("-c", ["pass"])
        with ours, self.assertRaisesRegex(warm_client.NoServer, "^stale$"):
            warm_client.hand_over(ours, program, {}, {}, leads=False)

    def test_interrupted_at_any_moment(self) -> None:
        """The client ends as a new interpreter does, which has code 1 while it is starting; the program ends, too.

        Python itself loses one of some hundred interrupts, those in certain lines of an import.
        """
        self.bench.run("-c", "pass")
        chance, lost = random.Random(7), 0
        code = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
        for _ in range(12):
            (self.bench.project / "pid").unlink(missing_ok=True)
            client = self.bench.start("-c", code, preexec_fn=lambda: signal.signal(2, signal.default_int_handler))
            self.addCleanup(client.kill)
            time.sleep(chance.uniform(0, 0.2))  # whenever it is, what follows holds
            client.send_signal(signal.SIGINT)
            try:
                errors = client.communicate(timeout=10)[1]
            except subprocess.TimeoutExpired:
                lost += 1
                client.send_signal(signal.SIGINT)
                errors = client.communicate(timeout=60)[1]
            self.assertIn(client.returncode, (-signal.SIGINT, 1), errors)
            if (pid := self.bench.project / "pid").exists() and (text := pid.read_text()):
                self.assertFalse(Path("/proc", text).exists(), errors)
        self.assertLess(lost, 3)

    def test_interrupted_while_it_prepares(self) -> None:
        """A program that cannot begin starts again without the server, and would have lost the interrupt."""
        pid = os.fork()
        if pid == 0:
            try:
                signal.signal(2, signal.default_int_handler)
                signal.pthread_sigmask(signal.SIG_BLOCK, [2])  # as its supervisor leaves it
                sys.orig_argv[:] = [sys.executable, "-c"]
                program = RunProgram(
                    "-c", [""], environ={}, umask=0, ignored=[], blocked=[], numbers=[], leads=False, adopts=False
                )
                with (
                    mock.patch.dict(warm_program._PREPARE, {"-c": lambda *_: os.kill(os.getpid(), 2)}),
                    mock.patch.object(warm_program, "start_cold", lambda *_: os._exit(3)),
                ):
                    request = warm_program.ProgramRequest(program, [os.open(".", os.O_RDONLY)])
                    warm_program.become_program(request, warm_program.FreshInterpreter([], []), mock.MagicMock(), print)
            except KeyboardInterrupt:
                os._exit(0)
            finally:
                os._exit(4)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)

    def test_a_reader_that_leaves(self) -> None:
        """`| head`: the program gets what a new interpreter gets."""
        code = "import sys\nfor n in range(100_000): print(n)"
        ends = []
        for is_warm in (False, True):
            process = self.bench.start("-c", code, warm=is_warm)
            process.stdout.readline()  # type: ignore[union-attr]
            process.stdout.close()  # type: ignore[union-attr]
            ends.append((process.stderr.read().splitlines()[-1], process.wait(60)))  # type: ignore[union-attr]
            process.stderr.close()  # type: ignore[union-attr]
        self.assertEqual(ends[0], ends[1])

    @pytest.mark.slow
    def test_twenty_at_once(self) -> None:
        """While nobody has started a server yet: one starts it, and the others wait for that."""
        running = [self.bench.start("-c", f"import torch; print({n})") for n in range(20)]
        self.assertEqual([one.communicate(timeout=120)[0] for one in running], [f"{n}\n" for n in range(20)])
        self.assertLessEqual(self.bench.status().count("server "), 1)

    def test_a_server_of_another_version(self) -> None:
        """Another version of this package has servers of its own."""
        self.bench.run("-c", "pass")
        code = (
            "import torch_testing_ext as t; t.__version__ = 'other'; from torch_testing_ext.warm.warm_client import *"
        )
        done = subprocess.run(
            [sys.executable, "-c", f"{code}; run(WarmProgram('-c', ['print(2)']))"],
            cwd=self.bench.project, env=self.bench.environ, text=True, capture_output=True, check=False,
        )  # fmt: skip
        self.assertEqual((done.stdout, done.stderr), ("2\n", ""))


if __name__ == "__main__":
    run_tests()
