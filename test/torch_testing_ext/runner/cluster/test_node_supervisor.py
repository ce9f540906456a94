"""The supervisor of a node ends all that the set-up command and the agent have started, however any of them ends."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.runner.cluster import node_supervisor

# In the place of an actor: starts the supervisor on its own stdin and stdout.
PARENT = """
import os, select, subprocess, sys
source, job, folder = sys.argv[1:]
words = [sys.executable, "-I", "-S", "-c", source, str(os.getpid()), folder]
supervisor = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
supervisor.stdin.write(job.encode() + b"\\n")
supervisor.stdin.flush()
if select.select([0, os.pidfd_open(supervisor.pid)], [], [])[0] == [0]:
    supervisor.stdin.close()
os._exit(supervisor.wait() % 256)
"""
# Daemons: one in a session of its own, and an orphan that ignores signals.
DAEMONS = "setsid sleep 1000 & (setsid bash -c 'trap \"\" TERM HUP; sleep 1000' &)"
SAYS = "echo {word} > $STATE; "


def marked(folder):
    """The processes that have an environment variable which names this folder, by command line."""
    found = {}
    for one in Path("/proc").glob("[0-9]*"):
        try:
            if f"STATE={folder}/state\0".encode() in (one / "environ").read_bytes():
                found[int(one.name)] = (one / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def child_of(pid):
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


class NodeSupervisorTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="torch_testing_ext_test_")
        self.addCleanup(folder.cleanup)
        self.outside = Path(folder.name)
        self.folder = self.outside / "run"
        self.folder.mkdir()
        os.mkfifo(self.outside / "state")

    def start(self, setup, agent):
        job = {
            "root": str(self.folder), "log": str(self.folder / "log"), "setup": setup,
            "words": ["bash", "-c", agent], "environ": {**os.environ, "STATE": str(self.outside / "state")},
        }  # fmt: skip
        source = Path(node_supervisor.__file__).read_text()
        self.parent = subprocess.Popen(
            [sys.executable, "-S", "-c", PARENT, source, json.dumps(job), str(self.folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.addCleanup(self.parent.stdout.close)
        self.addCleanup(self.parent.wait)
        self.addCleanup(self.parent.kill)
        self.addCleanup(self.parent.stdin.close)

    def wait_for(self, word):
        self.assertEqual((self.outside / "state").read_text().strip(), word)

    def wait_for_daemons(self):
        """While a process becomes another program, its environment cannot be read."""
        while len(marked(self.outside)) < 3:
            time.sleep(0.01)

    def process(self, text):
        """The process with this command line, which may have said its word before it became that."""
        while not (found := [pid for pid, line in marked(self.outside).items() if line.startswith(text)]):
            time.sleep(0.01)
        (pid,) = found
        return pid

    def assert_nothing_is_left(self):
        end = time.monotonic() + 10
        while (marked(self.outside) or self.folder.exists()) and time.monotonic() < end:
            time.sleep(0.01)
        self.assertEqual((marked(self.outside), self.folder.exists()), ({}, False))

    def test_kills_at_two_moments(self):
        in_setup = f"{DAEMONS}; {SAYS.format(word='moment')} exec sleep 999", "exit 0"
        in_agent = DAEMONS, f"{DAEMONS}; {SAYS.format(word='moment')} exec sleep 999"
        for moment, run in {"set-up": in_setup, "agent": in_agent}.items():
            for victim, number in (("child", 9), ("child", 15), ("supervisor", 15), ("parent", 9), ("command", 9)):
                with self.subTest(moment=moment, victim=victim, number=number):
                    self.folder.mkdir(exist_ok=True)
                    self.start(*run)
                    self.wait_for("moment")
                    self.wait_for_daemons()
                    parent, child = self.parent.pid, child_of(self.parent.pid)
                    pids = {"parent": parent, "child": child, "supervisor": child_of(child)}
                    os.kill(pids.get(victim) or self.process("sleep 999"), number)
                    self.assert_nothing_is_left()
                    said = self.parent.stdout.read().decode()
                    if (moment, victim) == ("set-up", "command"):
                        self.assertEqual(json.loads(said), {"error": "cluster.setup was killed by SIGKILL"})
                    elif (moment, victim) == ("agent", "command"):
                        self.assertEqual(self.parent.wait(), -signal.SIGKILL % 256)

    def test_in_order(self):
        """The set-up leaves daemons running for the agent, which ends when its stdin does."""
        self.start(f"echo noise; {DAEMONS}", f"{SAYS.format(word='begun')} echo said; cat; exit 3")
        self.wait_for("begun")
        self.wait_for_daemons()
        self.parent.stdin.write(b"x")
        self.parent.stdin.flush()
        self.assertEqual(self.parent.stdout.read().decode(), '{"error": ""}\nsaid\n')
        self.assertEqual(self.parent.wait(), 3)
        self.assert_nothing_is_left()

    def test_the_set_up_fails(self):
        self.start(f"{DAEMONS}; echo no compiler; exit 3", "exit 0")
        self.assertEqual(
            json.loads(self.parent.stdout.read()), {"error": "cluster.setup exited with code 3: no compiler"}
        )
        self.assert_nothing_is_left()


if __name__ == "__main__":
    run_tests()
