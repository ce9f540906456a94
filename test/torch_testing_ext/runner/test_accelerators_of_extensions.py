"""A run on accelerators of an extension: what it leases shows each test its own devices, and no others.

The accelerators are of Python (`kit/python_accelerator`), and known to nothing but torch. The preloaded server has to
be a new interpreter, since torch loads its extensions when it is imported.
"""

import unittest
from unittest import mock

import pytest
from kit.files import subject
from kit.project import Project

from torch_testing_ext.runner import run_site
from torch_testing_ext.runner.options import Options

pytestmark = pytest.mark.slow


class TestRun(unittest.TestCase):
    def test_leases(self):
        project = Project(accelerators=2)
        self.addCleanup(project.close)
        with mock.patch.object(run_site, "may_have_nvidia_gpus", lambda: False):
            inventory, warnings = run_site.find_devices(project.preloaded_server, Options())
        self.assertEqual((inventory.kind, inventory.names, warnings), ("testacc", ("0", "1"), ()))
        self.assertEqual(dict(inventory.identities), {"0": "testacc-0", "1": "testacc-1"})
        self.assertEqual(project.preloaded_server.count_devices().backend, "testccl")
        self.assertEqual([facts.name for facts in inventory.facts], ["Test accelerator"] * 2)

        file = project.write(subject(__file__, "on_accelerators.py"))
        discovery = project.preloaded_server.discover([file], inventory.most_ranks)
        run = project.run_tests_of(discovery.tests, inventory=inventory)
        outcomes = dict.fromkeys(("test_first", "test_second", "test_both", "test_none"), "passed")
        outcomes |= {"test_a_device_for_each": "passed", "test_on_the_cpu": "passed", "test_three": "skipped"}
        self.assertEqual(run.outcomes, outcomes, [attempts[-1].said for attempts in run.attempts.values()])
        devices = {name: len(attempts[-1].lease.devices) for name, attempts in run.attempts.items()}
        expected = {"test_first": 1, "test_second": 1, "test_both": 2, "test_a_device_for_each": 2}
        self.assertEqual({name: count for name, count in devices.items() if count}, expected)


if __name__ == "__main__":
    unittest.main()
