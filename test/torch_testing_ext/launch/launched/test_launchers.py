"""What the variables of launchers say of a process."""

import os
import socket
import subprocess
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

from torch_testing_ext._machine.ports import leased_port
from torch_testing_ext._process import system
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import launched_by
from torch_testing_ext.launch.launched import peers
from torch_testing_ext.launch.launched.peers import PeerEvidence
from torch_testing_ext.launch.launched_by import Launched

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2"}
SRUN = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "1"}


class LaunchedTest(unittest.TestCase):
    def read(self, environ):
        found = Launched.read(environ)
        return None if found is None else (found.rank, found.world_size, found.is_one_machine)

    def test_launchers(self):
        self.assertEqual(self.read(TORCHRUN), (1, 4, True))
        self.assertEqual(self.read(MPIRUN), (0, 2, True))
        self.assertEqual(self.read(HYDRA), (1, 2, True))
        self.assertEqual(self.read(SRUN), (2, 3, True))

    def test_several_machines(self):
        self.assertEqual(self.read({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}), (1, 4, False))
        self.assertEqual(self.read({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}), (0, 2, False))
        self.assertEqual(self.read({**SRUN, "SLURM_STEP_NUM_NODES": "3"}), (2, 3, False))

    def test_several_machines_by_the_variables_of_another_launcher(self):
        """A script sets RANK and WORLD_SIZE to what Slurm says, or Slurm sets those of PMI, too."""
        by_script = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "here"}
        for own in (by_script, {"PMI_RANK": "2", "PMI_SIZE": "3"}):
            for nodes in "12":
                self.assertEqual(self.read({**SRUN, **own, "SLURM_STEP_NUM_NODES": nodes}), (2, 3, nodes == "1"))
        # A step of another size, such as that of an interactive shell, knows nothing.
        step = {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
        self.assertEqual(self.read({**step, **by_script}), (2, 3, False))
        self.assertEqual(self.read({**step, "PMI_RANK": "2", "PMI_SIZE": "3"}), (2, 3, True))

    def test_several_machines_by_hand(self):
        for address, is_one in {"127.0.0.1": True, "localhost": True, "::1": True, "": True, "node0": False}.items():
            own = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "1"}
            self.assertEqual(self.read(own), (0, 2, is_one), address)

    def test_the_rank_on_its_machine(self):
        for local_rank, expected in {"3": 3, "x": 1, "": 1}.items():
            found = Launched.read({**TORCHRUN, "LOCAL_RANK": local_rank})
            assert found is not None
            self.assertEqual(found.local_rank, expected)

    def test_no_launcher(self):
        batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
        alone = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
        self.assertIsNone(self.read(alone))
        self.assertIsNone(self.read({"RANK": "0", "WORLD_SIZE": "1"}))
        for environ in ({}, {"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}, batch_script):
            with self.subTest(environ=environ):
                self.assertIsNone(self.read(environ))
        self.assertIsNone(self.read({"RANK": "x", "WORLD_SIZE": "2"}))

    def test_the_key_is_that_of_the_launch(self):
        def key(**more):
            found = Launched.read({**TORCHRUN, **more})
            assert found is not None
            return found.key

        self.assertEqual(key(), key(RANK="0"))
        self.assertNotEqual(key(), key(MASTER_PORT="2"))
        self.assertNotEqual(key(), key(TORCHELASTIC_RESTART_COUNT="1"))

    def test_a_port_that_ranks_choose_themselves(self):
        """From outside, a rank that sets MASTER_PORT when it has started has none."""
        launched = Launched.read({**MPIRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
        assert launched is not None
        other = {**MPIRUN, "OMPI_COMM_WORLD_RANK": "1"}
        self.assertTrue(launched.is_with(other, os.getppid()))
        self.assertFalse(launched.is_with(MPIRUN, os.getppid()))
        self.assertFalse(launched.is_with(other, os.getpid()))
        self.assertFalse(launched.is_with({**other, "MASTER_PORT": "2"}, os.getppid()))

    def test_shells_between_a_launcher_and_its_ranks(self):
        """Each rank has a parent of its own, and they are of one launch by the launcher."""
        with tempfile.TemporaryDirectory() as folder:
            mpirun = Path(folder, "mpirun")
            mpirun.write_text(
                "#!/bin/sh\nexec 3<&0\nfor rank in 0 1; do\n  export OMPI_COMM_WORLD_RANK=$rank\n"
                "  sh -c 'sh -c \"cat <&3; true\"; true' &\ndone\nwait\n"
            )
            mpirun.chmod(0o700)
            environ = {**os.environ, "OMPI_COMM_WORLD_SIZE": "2", "OF_THIS_TEST": folder}
            with subprocess.Popen([mpirun], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environ) as process:
                until = time.monotonic() + 30
                keys: list[str] = []
                # Of each rank, two shells and `cat`.
                while len(keys) < 6:
                    self.assertLess(time.monotonic(), until)
                    found = system.environments(["OF_THIS_TEST"])
                    ranks = [Launched.read(*pair) for pair in found if pair[0]["OF_THIS_TEST"] == folder]
                    keys = [rank.key for rank in ranks if rank is not None]
                by_hand = [Launched.read({"RANK": "0", "WORLD_SIZE": "2"}, pid) for pid in system.children(process.pid)]
                process.communicate()
        self.assertEqual(len(set(keys)), 1)
        # Their shells are two launches, also in a job of Slurm.
        self.assertEqual(len(set(by_hand)), 2)


class PeersTest(unittest.TestCase):
    """A process is a rank only if another one answers."""

    def setUp(self):
        # A port that no other launch has.
        lease = leased_port()
        self.variables = {**TORCHRUN, "MASTER_PORT": str(lease.__enter__())}
        self.addCleanup(lease.__exit__, None, None, None)

    def launched(self, **more):
        launched = Launched.read({**self.variables, **more})
        assert launched is not None
        return launched

    def assertSeen(self, evidence, **more):
        self.assertIs(peers.look(self.launched(**more)), evidence)

    def start(self, **more):
        """Start a process with such variables, which runs until the test ends."""
        process = subprocess.Popen(
            ["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={**os.environ, **self.variables, **more}
        )
        self.addCleanup(process.wait)
        self.addCleanup(process.stdin.close)

    def test_alone(self):
        self.assertSeen(PeerEvidence.NONE)

    def test_a_process_of_another_rank(self):
        """It may be another program, or have yet to import ours."""
        self.start(RANK="1")
        self.start(RANK="0", WORLD_SIZE="5")
        self.start(RANK="0", MASTER_PORT="2")
        self.assertSeen(PeerEvidence.NONE)
        self.start(RANK="0")
        self.assertSeen(PeerEvidence.PROMISE)

    def test_a_rank_that_imports_ours(self):
        self.launched(RANK="1").announce()
        self.addCleanup(launched_by.withdraw)
        self.assertSeen(PeerEvidence.NONE)
        self.assertSeen(PeerEvidence.PEER, RANK="2")
        launched_by.withdraw()
        self.assertSeen(PeerEvidence.NONE, RANK="2")

    def test_the_coordinator(self):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.launched().address)
            listener.listen()
            self.assertSeen(PeerEvidence.PEER)
            self.assertSeen(PeerEvidence.NONE, RANK="0")

    def test_without_proc(self):
        """No process is seen, but sockets are."""
        with mock.patch.object(os.path, "exists", return_value=False):
            self.assertSeen(PeerEvidence.PROMISE)
            self.launched(RANK="2").announce()
            self.addCleanup(launched_by.withdraw)
            self.assertSeen(PeerEvidence.PEER)

    def test_several_machines(self):
        """Nobody is looked for on other machines: the first test of the ranks does that."""
        elsewhere = self.launched(LOCAL_WORLD_SIZE="1")
        peers.why_no_rank.cache_clear()
        self.addCleanup(peers.why_no_rank.cache_clear)
        for launched, expected in ((elsewhere, "^$"), (self.launched(), "no other rank of that launch is running")):
            with (
                mock.patch.object(peers, "this_launch", return_value=launched),
                mock.patch.object(peers, "LONGEST_WAIT_FOR_PEER", 0.0),
            ):
                self.assertRegex(peers.why_no_rank(), expected)
            peers.why_no_rank.cache_clear()


if __name__ == "__main__":
    run_tests()
