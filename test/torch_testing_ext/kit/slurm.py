"""A Slurm of its own with two nodes, both this machine: `with SmallSlurm() as slurm:`. And tests to run on nodes."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

DAEMONS = ("slurmctld", "slurmd", "munged")
# Two tests that wait for each other, so each has a node of one CPU slot to itself.
MEET = """
import os, time, unittest
class T(unittest.TestCase):
    def meet(self, own, other):
        open(own, "w").close()
        while not os.path.exists(other): time.sleep(0.02)
        print(os.environ["SLURMD_NODENAME"])
    def test_0(self): self.meet("met0", "met1")
    def test_1(self): self.meet("met1", "met0")
"""
# Says when it has begun, and hangs.
HANGS = """
import os, signal, unittest
class T(unittest.TestCase):
    def test_hangs(self):
        with open("pids", "w") as file:
            print(os.getpid(), os.getppid(), file=file)
        os.close(os.open("began", os.O_WRONLY))
        signal.pause()
"""
_SBIN = "/usr/sbin:/sbin"
_START_TIMEOUT = 60.0
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=2
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
NodeName=node1 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=2 RealMemory=1000
NodeName=node2 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[2]} CPUs=2 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_daemons() -> list[str]:
    """Those that are not installed."""
    return [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:{_SBIN}") is None]


class SmallSlurm:
    """The daemons in the foreground, with their own key, ports and folders."""

    def __enter__(self) -> SmallSlurm:
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torch_testing_ext_slurm_")))
            self.folder.chmod(0o755)  # munged refuses a socket that others cannot reach
            self._processes: list[subprocess.Popen[bytes]] = []
            stack.callback(self._end)
            self._start_all()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def environ(self) -> dict[str, str]:
        """For Slurm's commands."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:{_SBIN}"}

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env={**os.environ, **self.environ}, capture_output=True, text=True, check=True)
        return done.stdout

    def allocators(self) -> list[int]:
        """The processes of salloc that ask this Slurm. One whose controller goes away first would ask for ever."""
        mark = f"SLURM_CONF={self.environ['SLURM_CONF']}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (folder / "comm").read_text() == "salloc\n" and mark in (folder / "environ").read_bytes().split(
                    b"\0"
                ):
                    found.append(int(folder.name))
        return found

    def _start_all(self) -> None:
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o600)
        (self.folder / "state").mkdir()
        text = _CONFIGURATION.format(
            folder=self.folder, host=socket.gethostname(), user=getpass.getuser(), ports=_free_ports(3)
        )
        (self.folder / "slurm.conf").write_text(text)
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "seed", "log")]
        self._start("munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files)
        self._wait("munged", (munge / "socket").exists)
        self._start("slurmctld", "-D", "-i")
        for node in "node1", "node2":
            self._start("slurmd", "-D", "-N", node)
        self._wait("slurm", lambda: self.states() == {"idle"})

    def states(self) -> set[str]:
        """Of the nodes."""
        asked = ["sinfo", "--noheader", "--Node", "--format=%t"]
        environ = {**os.environ, **self.environ}
        return set(subprocess.run(asked, env=environ, capture_output=True, text=True).stdout.split())

    def _start(self, *command: str) -> None:
        with (self.folder / "log").open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **self.environ},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _wait(self, what: str, happened: object) -> None:
        assert callable(happened)
        end = time.monotonic() + _START_TIMEOUT
        while not happened():
            ended = [process.args for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > end:
                log = (self.folder / "log").read_text(errors="replace")[-3000:]
                raise AssertionError(f"{what} does not come up; ended: {ended}\n{log}")
            time.sleep(0.05)

    def _end(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]
