"""`devices="auto"`: an accelerator for each rank if there are enough, else the CPU; and what a run says of it."""

from __future__ import annotations

import os
import tempfile
import types
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
from kit.files import subject
from kit.pytest_runs import PytestCase, run_pytest

from torch_testing_ext import launch
from torch_testing_ext._machine import accelerators
from torch_testing_ext._process.devices_setting import AUTO, CPU, DEVICES_OF_RUN, default_devices
from torch_testing_ext._pytest_ranks import dist_env, item_in_parent
from torch_testing_ext._pytest_ranks.marks import BadMark, spec_for
from torch_testing_ext._testing.bases import launched_ranks
from torch_testing_ext.common_utils import run_tests

FAKE = {"TORCH_TESTING_EXT_FAKE_DEVICES": "a,b,c"}
SUBJECT = {"test_x.py": subject(__file__, "devices_of_ranks.py")}


class MarkTest(unittest.TestCase):
    def devices(self, available: int, default: str = AUTO, **keywords: object) -> int:
        return spec_for(4, keywords, default).on(available).devices

    def test_a_device_for_each_rank_or_none(self) -> None:
        for available, expected in ((0, 0), (3, 0), (4, 4), (8, 4)):
            self.assertEqual(self.devices(available), expected)
            self.assertEqual(self.devices(available, CPU), 0)
            self.assertEqual(self.devices(available, CPU, devices="auto"), expected)
            self.assertEqual(self.devices(available, devices=0), 0)
            self.assertEqual(self.devices(available, devices=2), 2)

    def test_a_backend_decides(self) -> None:
        self.assertEqual(self.devices(8, backend="gloo"), 0)
        self.assertEqual(self.devices(8, backend="gloo", devices="auto"), 4)
        self.assertEqual(self.devices(0, backend="nccl"), 4)
        self.assertEqual(self.devices(0, CPU, backend="nccl"), 4)

    def test_some_ranks_are_on_another_machine(self) -> None:
        self.assertEqual(spec_for(4, {}, AUTO).on(2, here=2).devices, 4)

    def test_a_machine_needs_the_devices_of_its_own_ranks(self) -> None:
        """Four ranks on two machines with two devices each: no skip."""
        item = types.SimpleNamespace(stash={}, funcargs={}, function=lambda: None)
        for devices, expected in ((2, 4), (1, 0)):
            with (
                mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2", "TORCH_TESTING_EXT_FAKE_DEVICES": ""}),
                mock.patch.multiple(accelerators, device_count=lambda: devices, accelerator_type=lambda: "cuda"),  # noqa: B023
                mock.patch.object(launched_ranks, "wrong_size", return_value=""),
                mock.patch.object(launch, "this_launch", return_value=object()),
                mock.patch.object(item_in_parent, "rank_side", return_value=()),
            ):
                try:
                    spec = item_in_parent.set_up(item, spec_for(4, {}, AUTO))
                except pytest.skip.Exception as skip:
                    self.fail(f"skipped: {skip}")
            self.assertEqual(spec.devices, expected)

    def test_device_and_backend_follow(self) -> None:
        spec = spec_for(2, {}, AUTO)
        of_cuda = {
            "current_accelerator": lambda: torch.device("cuda"),
            "device_count": lambda: 2,
            "set_device_index": lambda index: None,
        }
        nothing = {"LOCAL_RANK": "1", "TORCH_TESTING_EXT_FAKE_DEVICES": "", "TORCH_TESTING_EXT_RANKS_PER_GPU": ""}
        for available, device, backend in ((2, "cuda:1", "nccl"), (1, "cpu", "gloo")):
            with mock.patch.multiple(torch.accelerator, **of_cuda), mock.patch.dict(os.environ, nothing):
                here = spec.on(available)
                rank_env = dist_env.rank_of(here, 1)
                self.assertEqual(rank_env.device, torch.device(device))
                self.assertEqual(dist_env._backend_for(rank_env.device, here), backend)

    def test_a_wrong_value(self) -> None:
        with self.assertRaisesRegex(BadMark, "devices is 'cuda'; it must be 'auto', or a number of accelerators"):
            spec_for(4, {"devices": "cuda"})


class SettingTest(unittest.TestCase):
    def test_who_wins(self) -> None:
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
            os.environ.pop(DEVICES_OF_RUN, None)
            Path(folder, "pyproject.toml").write_text("[tool.torch_testing_ext]\ndevices = 'cpu'\n")
            Path(folder, "inner").mkdir()
            self.assertEqual(default_devices(Path(folder, "inner")), CPU)
            os.environ["TORCH_TESTING_EXT_RUN_DEVICES"] = AUTO
            self.assertEqual(default_devices(Path(folder)), AUTO)
            os.environ[DEVICES_OF_RUN] = CPU
            self.assertEqual(default_devices(Path(folder)), CPU)

    def test_what_a_run_says(self) -> None:
        for count, default, expected in (
            (0, AUTO, "ranks: on the CPU with gloo, since there is no accelerator"),
            (1, AUTO, "ranks: on 1 cuda device, one for each; a test with more ranks runs on the CPU with gloo"),
            (8, AUTO, "ranks: on 8 cuda devices, one for each; a test with more ranks runs on the CPU with gloo"),
            (8, CPU, "ranks: on the CPU with gloo, by the setting devices, unless the mark of a test says otherwise"),
        ):
            with (
                self.subTest(count=count, default=default),
                mock.patch.dict(os.environ, {DEVICES_OF_RUN: default, "TORCH_TESTING_EXT_FAKE_DEVICES": ""}),
                mock.patch.multiple(accelerators, device_count=lambda: count, accelerator_type=lambda: "cuda"),  # noqa: B023
            ):
                self.assertEqual(item_in_parent.where_ranks_run(Path()), expected)


class RunTest(PytestCase):
    @pytest.mark.slow
    def test_leases_and_words(self) -> None:
        run = run_pytest(SUBJECT, "-v", "-v", **FAKE)
        outcomes = dict.fromkeys(run.outcomes, "passed") | {"test_needs_four": "skipped"}
        self.assertEqual(len(outcomes), 6)
        self.assertOutcomes(run, outcomes)
        self.assertIn("ranks: on 3 fake devices, one for each; a test with more ranks runs on the CPU", run.text)
        for name, place in (("auto", "2 fake devices"), ("more_ranks_than_devices", "cpu"), ("cpu", "cpu")):
            self.assertRegex(run.text, rf"::test_{name} PASSED \({place}\) ")

    def test_the_setting_of_the_project(self) -> None:
        source = """
import pytest
@pytest.mark.world_size(2)
def test_x(dist_env): assert dist_env.devices == 0
"""
        settings = "[tool.torch_testing_ext]\ndevices = 'cpu'\n"
        run = run_pytest({"test_x.py": source, "pyproject.toml": settings}, **FAKE)
        self.assertOutcomes(run, {"test_x": "passed"})
        self.assertNotIn("ranks: on", run.text, "pytest's -q")
        self.assertNotIn("(cpu)", run.text)


if __name__ == "__main__":
    run_tests()
