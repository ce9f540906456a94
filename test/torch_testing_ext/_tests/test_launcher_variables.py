"""The table of the variables that launchers set."""

import os
import subprocess
import sys
import unittest

from torch_testing_ext._tests import launcher_variables as variables


class TestLauncherVariables(unittest.TestCase):
    def test_the_sign_is_a_variable_of_the_launcher(self) -> None:
        for launcher in variables.LAUNCHERS:
            self.assertIn(launcher.sign, (launcher.rank, launcher.world_size))

    def test_a_process_may_be_a_rank(self) -> None:
        self.assertFalse(variables.may_be_rank({"SLURM_PROCID": "0", "WORLD_SIZE": "2"}))
        for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_NUM_TASKS"):
            self.assertTrue(variables.may_be_rank({name: "0"}), name)

    def test_another_launch_starts_without_these(self) -> None:
        torchrun = dict.fromkeys(variables.RENDEZVOUS, "1")
        torchrun |= {"TORCHELASTIC_RUN_ID": "a", "GROUP_RANK": "0", "ROLE_NAME": "default"}
        self.assertEqual(
            variables.without_launch({**torchrun, "HOME": "/home", "RANKS": "2"}), {"HOME": "/home", "RANKS": "2"}
        )

    def test_no_rank_is_started_from_a_runner(self) -> None:
        torchrun = {**dict.fromkeys(variables.RENDEZVOUS, "1"), "TORCHELASTIC_RUN_ID": "a"}
        mpirun = dict.fromkeys(filter(None, variables.OPEN_MPI), "1")
        chosen = {"HOME": "/home", "SLURM_JOB_ID": "1"}
        for left in (torchrun, mpirun, {**torchrun, **mpirun}):
            environ = {**left, **chosen}
            variables.drop_place(environ)
            self.assertEqual(environ, chosen)
        # The user's own, for tests that read it.
        environ = {"WORLD_SIZE": "4"}
        variables.drop_place(environ)
        self.assertEqual(environ, {"WORLD_SIZE": "4"})

    def test_a_store_of_the_launcher_is_not_asked(self) -> None:
        environ = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "a"}
        self.assertEqual(variables.own_store(environ), {"TORCHELASTIC_USE_AGENT_STORE": "False"})
        self.assertEqual(variables.own_store({}), {})

    def test_torchrun_sets_what_the_table_says(self) -> None:
        """The variables that torch's own agent gives to a rank, by its source."""
        from torch.distributed.elastic.agent.server import local_elastic_agent

        with open(local_elastic_agent.__file__, encoding="utf-8") as source:
            text = source.read()
        for name in (*variables.RENDEZVOUS, *variables.OF_ONE_LAUNCH):
            self.assertIn(f'"{name}"', text)

    def test_the_import_is_quick(self) -> None:
        code = f"import sys, {variables.__name__}; print(sorted(sys.modules.keys() & {{'torch', 'inspect', 'json'}}))"
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-S", "-c", code], env=environ, capture_output=True, text=True, check=True
        )
        self.assertEqual(done.stdout, "[]\n")


if __name__ == "__main__":
    unittest.main()
