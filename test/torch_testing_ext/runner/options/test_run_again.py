"""The command that runs a test again has every option that may change how it ends, as one can write it."""

import shlex
import tempfile
import unittest
from pathlib import Path

from torch_testing_ext._process import user_commands
from torch_testing_ext._process.setting_readers import read_boolean
from torch_testing_ext.launch.aspects import ASPECTS
from torch_testing_ext.runner import run_again
from torch_testing_ext.runner.options import OPTION_TABLE, Options
from torch_testing_ext.runner.options.sources import read_options

_CLUSTER = ("--cluster", "auto")
_SWEEP = ("--sweep", "kill")
# Words that set an option to another value than its own, by field.
EXAMPLES = {
    "marks": ("-m", "not slow"),
    "pytest": ("--", "-W", "error", "--import-mode=importlib"),
    "loader": ("-o", "loader=unittest"),
    "gpus": ("--gpus", "none"),
    "devices": ("-o", "devices=cpu"),
    "ranks_per_gpu": ("--ranks-per-gpu", "2"),
    "shared_leases": ("-o", "shared-leases=false"),
    "memory_check": ("-o", "memory-check=false"),
    "fake_accelerators": ("--fake-accelerators", "2"),
    "cluster": _CLUSTER,
    "cluster_nodes": (*_CLUSTER, "--cluster-nodes", "2"),
    "cluster_gpus_per_node": (*_CLUSTER, "-o", "cluster.gpus-per-node=2"),
    "cluster_fake_gpus": (*_CLUSTER, "-o", "cluster.fake-gpus=true"),
    "cluster_root": (*_CLUSTER, "-o", "cluster.root=/shared/a b"),
    "cluster_setup": (*_CLUSTER, "-o", "cluster.setup=make 'it' && true"),
    "cluster_env": (*_CLUSTER, "-o", "cluster.env=-A,-B_*"),
    "cluster_only": (*_CLUSTER, "-o", "cluster.only=a", "-o", "cluster.only=zone=b"),
    "cluster_not": (*_CLUSTER, "-o", "cluster.not=a"),
    "timeout": ("--timeout", "0.5"),
    "leaked": ("-o", "leaked=fail"),
    "repeat": ("--repeat", "until-failure"),
    "world_size": ("--world-size", "3"),
    "nodes": ("--world-size", "4", "--nodes", "2"),
    "cache": ("--cache", "other"),
    "simulate": ("--simulate", "8"),
    "sanitize": ("--sanitize",),
    "sanitize_order": ("-o", "sanitize-order=fail"),
    "sweep": _SWEEP,
    "sweep_points": (*_SWEEP, "-o", "sweep-points=steps"),
    "sweep_within": (*_SWEEP, "-o", "sweep-within=3"),
    "sweep_fail": (*_SWEEP, "-o", "sweep-fail=hang"),
    "sweep_known": (*_SWEEP, "-o", "sweep-known=/dev/null"),
}
# It has a test of its own: its files must exist.
ELSEWHERE = {"drop_in"}
# A switch of an aspect needs no words but its flag.
SWITCHES = {
    option.field: (option.flag,)
    for aspect in ASPECTS
    for option in aspect.options
    if option.read is read_boolean and option.in_runner and option.field not in EXAMPLES
}


def read(words, root=None):
    return read_options(words, {}, root or Path.cwd(), Path.cwd()).options


def again(options, root=None):
    return read(shlex.split(run_again.command(options).removeprefix(user_commands.runner())), root)


class RunAgainTest(unittest.TestCase):
    def test_every_option_that_decides_comes_back(self):
        deciding = {field for field, spec in OPTION_TABLE.items() if spec.in_command}
        examples = EXAMPLES | {field: words for field, words in SWITCHES.items() if field in deciding}
        self.assertEqual(set(examples) | ELSEWHERE, deciding)
        for field, words in examples.items():
            with self.subTest(field=field):
                options = read(words)
                self.assertNotEqual(getattr(options, field), getattr(read([]), field))
                come_back = again(options)
                for other in deciding:
                    self.assertEqual(getattr(come_back, other), getattr(options, other), other)

    def test_the_forms_of_values_come_back(self):
        for words in (["--gpus", "2"], ["--gpus", "0,"], ["--gpus", "0,2"], ["--repeat", "3"], ["--sanitize=all"]):
            with self.subTest(words=words):
                options = read(words)
                self.assertNotEqual(options, read([]))
                self.assertEqual(again(options), options)

    def test_the_command_line_comes_back_against_the_settings(self):
        """What equals the default is another value than that of the settings."""
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            settings = (
                'gpus = "none"',
                'devices = "cpu"',
                "timeout = 1",
                "memory-check = false",
                'loader = "unittest"',
            )
            (root / "pyproject.toml").write_text("[tool.torch_testing_ext]\n" + "\n".join(settings) + "\n")
            for words, field in (
                (["--gpus", "all"], "gpus"),
                (["-o", "devices=auto"], "devices"),
                (["--timeout", "300"], "timeout"),
                (["-o", "memory-check=true"], "memory_check"),
                (["-o", "loader=auto"], "loader"),
            ):
                with self.subTest(words=words):
                    options = read(words, root)
                    self.assertEqual(getattr(options, field), getattr(Options(), field))
                    self.assertEqual(getattr(again(options, root), field), getattr(Options(), field))

    def test_a_repetition_with_delays_is_one(self):
        options = read(["--repeat", "20", "--delays=7"])
        command = run_again.of_repetition(run_again.command(options), options, 3)
        self.assertEqual(command, f"{user_commands.runner()} --delays=10")

    def test_what_only_selects_or_reports_is_left_out(self):
        words = ["-k", "x", "--lf", "-x", "--junitxml", "x.xml", "-q", "--retries", "2", "-j", "3", "--warm=off"]
        self.assertEqual(run_again.command(read(words)), user_commands.runner())


if __name__ == "__main__":
    unittest.main()
