"""Options from all sources: layers and bad input."""

import contextlib
import dataclasses
import io
import re
import shlex
import unittest
import unittest.mock
from pathlib import Path

from kit.files import FolderCase

from torch_testing_ext._process import user_commands
from torch_testing_ext._process.project_settings import RUNNER_PREFIX
from torch_testing_ext.launch import launch_settings
from torch_testing_ext.runner import aspects_of_run, run_again
from torch_testing_ext.runner.options import (
    OPTION_TABLE,
    Action,
    CountAs,
    Level,
    Options,
    Rerun,
    ShardSpec,
    Shuffle,
    UsageError,
    Verbosity,
    Warm,
)
from torch_testing_ext.runner.options.commands import COMMANDS
from torch_testing_ext.runner.options.names import setting_name
from torch_testing_ext.runner.options.sources import read_options, show_options


class OptionsCase(FolderCase):
    def configure(self, *argv, environ=None, cwd=None, **more):
        return read_options(argv, environ or {}, self.root, cwd or self.root, **more)

    def options(self, *argv, **more):
        return self.configure(*argv, **more).options

    def assertRefused(self, pattern, *argv, **more):
        with self.assertRaisesRegex(UsageError, pattern):
            self.configure(*argv, **more)


class CommandLineTest(OptionsCase):
    def test_a_whole_world_stands_alone(self):
        options = self.options("--simulate", "1024")
        self.assertEqual(options.simulate, 1024)
        self.assertIn(" --simulate 1024", run_again.command(options))
        self.assertEqual(aspects_of_run.variables(options, 0)["_TORCH_TESTING_EXT_WORLD"], "1024")
        self.assertRefused("'0' is not a whole number of at least 1", "--simulate", "0")
        with self.assertRaisesRegex(UsageError, "--simulate 1000000: a whole world has at most 16,384 ranks"):
            aspects_of_run.require(self.options("--simulate", "1000000"))
        for words in (
            ("--delays",),
            ("--sanitize",),
            ("--cluster", "auto"),
            ("--fake-accelerators", "2"),
            ("--ranks-per-gpu", "2"),
        ):
            self.assertRefused(
                f"--simulate and {words[0]} cannot be combined: .* [Ll]eave out", "--simulate", "8", *words
            )

    def test_two_reports_in_one_file(self):
        for words in (
            ("--junitxml", "x", "--html", "x"),
            ("--results", "x", "--run-file", "./x"),
            ("--perfetto", "a/../x", "-o", "journal=x"),
        ):
            self.assertRefused("--.* name one file: .*x", *words)
        options = self.options("--junitxml", "/dev/null", "--html", "/dev/null", "--results", "y")
        self.assertEqual(options.html, options.junitxml)

    def test_every_field_is_in_the_option_table(self):
        self.assertEqual(set(OPTION_TABLE), {field.name for field in dataclasses.fields(Options)} - {"overriding"})

    def test_values(self):
        for argv, field, value in (
            ((), "names", ()),
            (("a", "-v", "b"), "names", ("a", "b")),
            (("-o", "exclude=a", "-o", "exclude=c"), "exclude", ("a", "c")),
            (("--deselect", "a", "--deselect=b", "c"), "deselect", ("a", "b")),
            (("-x", "a"), "maxfail", 1),
            (("--exitfirst",), "maxfail", 1),
            (("--maxfail", "2"), "maxfail", 2),
            (("--reruns=2",), "retries", 2),
            (("--affected",), "affected", "HEAD"),
            (("--affected", "a"), "names", ("a",)),
            (("--affected=trunk",), "affected", "trunk"),
            (("--warm",), "warm", Warm.START),
            (("--warm=off",), "warm", Warm.NEVER),
            (("--repeat", "3"), "repeat", 3),
            (("--repeat=3", "--delays"), "repetitions", 3),
            (("--repeat=until-failure",), "endless", True),
            (("--delays=7",), "delays", "7"),
            (("--delays", "a"), "names", ("a",)),
            (("--trace", "a"), "trace", 0),
            (("--trace",), "jobs", 1),
            (("--trace=2",), "trace", 2),
            (("--trace=2",), "pdb", True),
            (("--trace", "2", "a"), "trace", 2),
            (("--trace", "2", "a"), "names", ("a",)),
            (("--warm", "off"), "warm", Warm.NEVER),
            (("--shuffle", "7"), "shuffle", 7),
            (("-k", "a", "--delays", "7", "--list"), "delays", "7"),
            (("--cov",), "coverage", "*"),
            (("--cov=src",), "coverage", "src"),
            (("-o", "slow-after=2", "-otests=a", "-o", "tests=b"), "slow_after", 2.0),
            (("-o", "tests=b"), "cache", self.root / ".torch_testing_ext"),
            (("--co",), "action", Action.LIST),
            (("--list=json",), "action", Action.LIST_AS_JSON),
            (("-k", "a and b", "-k", "c"), "keyword", ("a and b", "c")),
            (("--shard", "2/3"), "shard", ShardSpec(2, 3)),
            (("--lf",), "rerun", Rerun.LAST_FAILED),
            (("-j3",), "jobs", 3),
            (("--gpus", "auto"), "gpus", None),
            (("--gpus", "all"), "gpus", None),
            (("--gpus", "none"), "gpus", 0),
            (("--gpus", "0,"), "gpus", ("0",)),
            (("--gpus", "2"), "gpus", 2),
            (("--gpus", "2,"), "gpus", ("2",)),
            (("--gpus", "GPU-1f, MIG-2"), "gpus", ("GPU-1f", "MIG-2")),
            (("--timeout", "2.5"), "timeout", 2.5),
            (("--flaky", "fail"), "flaky", CountAs.FAIL),
            (("--shuffle",), "shuffle", Shuffle.RANDOM),
            (("--shuffle=0",), "shuffle", 0),
            (("--shuffle", "--shuffle=off"), "shuffle", None),
            (("-q",), "verbosity", Verbosity.QUIET),
            (("-s",), "stream", True),
            (("--list",), "action", Action.LIST),
            (("a", "--list", "--", "--model", "a big one"), "pytest", "--model 'a big one'"),
            (("a", "--list", "--", "--model", "a big one"), "names", ("a",)),
            (("-o", "pytest=--tb=short -rA"), "pytest", "--tb=short -rA"),
            (("--", "--help-all"), "action", Action.RUN),
        ):
            with self.subTest(argv=argv):
                self.assertEqual(getattr(self.options(*argv), field), value)

    def test_bad_values(self):
        for argv, pattern in (
            (("--shuffel",), "--shuffel is not an option. Did you mean: --shuffle"),
            (("--lst",), "--lst is not an option. Did you mean: --list[?]"),
            (("--basetemp=x",), r"--basetemp is an option of pytest: each test has a folder of its own"),
            (("--tb=short",), r"--tb is an option of pytest: write it after --, as in torchtest -- --tb=short"),
            (("-rA",), r"-rA is an option of pytest: write it after --, as in torchtest -- -rA"),
            (("-p", "x"), r"-p is an option of pytest: write it after --, as in torchtest -- -p"),
            (("-n4",), "-n4 is an option of pytest: use -j N of torchtest"),
            (
                ("--cov-report=xml",),
                "--cov-report is an option of pytest: use --cov of torchtest, and then coverage report",
            ),
            (("--", "--cov=mine"), "--cov=mine: use --cov of torchtest"),
            (("--", "-n", "4"), "-n: use -j N of torchtest"),
            (("-m",), r"-m needs a value: an expression of marks, such as -m 'not slow'"),
            (("--shake", "20"), "--shake is not an option. Use --repeat N --delays "),
            (("--debug-rank=1",), "--debug-rank is not an option. Use --trace=RANK"),
            (("--show-config",), "--show-config is not an option. Use torchtest config"),
            (("--ff",), "--ff is not an option. Use --last-failed"),
            (("--exclude", "a"), "--exclude is not an option. Use --deselect ID, -k 'not NAME'"),
            (("--sweep-within=3",), "--sweep-within is not an option. Did you mean: -o sweep.within=VALUE"),
            (("--repeat",), "--repeat needs a value: a number of runs, such as --repeat 20"),
            (("--cache",), "--cache needs a value"),
            (("-z",), r"-z is not an option. \(--help lists the options\)"),
            (("--pdb=1",), "^--pdb takes no value: leave out '1', or use --trace=RANK to stop in one rank"),
            (("--gpus", "0"), "--gpus: '0' is a number of GPUs: write '0,' for GPU 0, or 'none' for no GPU"),
            (("-j", "0"), "'0' is not a whole number of at least 1"),
            (("-j", "x"), "'x' is not a whole number"),
            (("--timeout", "0"), "'0' is not a positive number of seconds"),
            (("--timeout", "nan"), "not a positive number of seconds"),
            (("--shard", "3/2"), "'3/2' is not a shard: write I/N, such as 1/3"),
            (("--shard", "0/2"), "not a shard"),
            (("--gpus", "0,0"), "'0,0' is not all, none, a number of devices, or a list"),
            (("--gpus", "-1"), "'-1' is not all, none"),
            (("--flaky", "maybe"), "'maybe' is not one of pass, fail"),
            (("--fake-accelerators", "x"), "'x' is not a whole number of at least 1"),
            (("--fake-accelerators=0",), "'0' is not a whole number of at least 1"),
            (("--junitxml", ""), "the path is empty"),
            (("--delays=3:",), "--delays: '3:' is not a seed: 0, 1, 2 ..."),
            (("--trace=x",), "--trace: 'x' is not a rank: 0, 1, 2 ..."),
            (("--shuffle=maybe",), "'maybe' is not a seed, true or false"),
            (("--repeat", "for-ever"), "'for-ever' is not a whole number"),
            (("--warm=always",), "'always' is not one of auto, on, off"),
            (("-o", "jobs"), "'jobs' is not NAME=VALUE"),
            (("-o", "jbos=2"), "-o jbos is not a setting .* Did you mean: jobs"),
            (("-o", "jobs=x"), "-o jobs: 'x' is not a whole number"),
            (("-o", "cluster.timeout=1"), "-o cluster.timeout needs --cluster"),
        ):
            with self.subTest(argv=argv):
                self.assertRefused(pattern, *argv)

    def test_help_is_grouped_and_names_defaults(self):
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout), self.assertRaises(SystemExit) as left:
            self.configure("--help")
        self.assertEqual(left.exception.code, 0)
        text = stdout.getvalue()
        groups = re.findall(r"(?m)^(\w[\w ]*):$", text)
        self.assertEqual(
            groups,
            [
                "selection",
                "resources",
                "execution",
                "diagnosis",
                "output",
                "other",
                "exit codes",
            ],
        )
        words = " ".join(text.split())
        self.assertIn("time limit of a test (default: 300)", words)
        # One screen, and one line for each option.
        self.assertLessEqual(len(text.splitlines()), 60)
        self.assertLessEqual(max(map(len, text.splitlines())), 80)
        options = [line for line in text.splitlines() if line.startswith("  -")]
        self.assertLessEqual(len(options), 33)
        for option in options:
            self.assertRegex(option, r"^  -.*\S  +\w")
        self.assertIn("-x, --exitfirst stop after the first failure", words)
        self.assertEqual(set(re.findall(r"(?m)^  ([a-z]+)  +\w", text)), {"init", "show", "report", "why", "config"})
        for command in COMMANDS:
            self.assertRegex(self.help("--help-all"), rf"(?m)^  {command}  ")

    def help(self, *argv, **more):
        with contextlib.redirect_stdout(io.StringIO()) as stdout, self.assertRaises(SystemExit):
            read_options(argv, {}, self.root, self.root, **more)
        return stdout.getvalue()

    def test_help_all_has_all_options_and_settings(self):
        words = self.help("--help-all")
        for name, spec in OPTION_TABLE.items():
            if spec.level is Level.SETTING:
                self.assertIn(f" {setting_name(name)}=", words)
            elif spec.level is not Level.OF_COMMANDS:
                for flag in (*spec.flags, *(flag for value in spec.values for flag in value.names)):
                    self.assertIn(flag, words)

    def test_commands_have_a_help_of_their_own(self):
        for command, flags in (
            ("show", ["--journal", "--cache"]),
            ("report", ["--perfetto", "--about"]),
            ("why", ["--affected"]),
        ):
            with self.subTest(command):
                text = self.help("--help", command=command)
                self.assertIn(f"{command} [options] ", text)
                self.assertIn(COMMANDS[command].description, text)
                self.assertNotIn("--jobs", text)
                for flag in flags:
                    self.assertIn(flag, text)
        self.assertIn("--cluster-timeout SECONDS", self.help("--help", command="cluster clean"))
        advice = r"show has no option --retries. \(show --help lists its options\)"
        self.assertRefused(advice, "--retries=2", command="show")
        self.assertRefused("report has no option --cach. Did you mean: --cache", "--cach=x", command="report")
        self.assertRefused("show has no option --since", "--since=x", command="show")
        self.assertRefused("--about is not an option", "--about")

    def test_the_one_difference_between_the_two_commands(self):
        def pytorch(*argv):
            return self.options(*argv, as_pytorch=True)

        self.assertEqual(pytorch("-i", "a", "b", "--include", "c").include, ("a", "b", "c"))
        options = pytorch("-x", "a", "b", "--exclude", "c", "d", "--deselect", "e", "f")
        self.assertEqual((options.exclude, options.names, options.maxfail), (("a", "b", "c", "d"), ("f",), None))
        self.assertEqual(options.deselect, ("e",))
        self.assertEqual(pytorch("--exitfirst").maxfail, 1)
        self.assertIn("In torchtest, -x stops the run", self.help("-h", as_pytorch=True))
        self.assertLessEqual(len(self.help("-h", as_pytorch=True).splitlines()), 100)
        self.assertRefused("^-i is not an option", "-i", "a")

    def test_unknown_flags_suggest_similar_ones(self):
        self.assertRefused("--perfeto is not an option. Did you mean: --perfetto", "--perfeto=x")

    def test_the_flag_of_a_setting_suggests_the_setting(self):
        for flag, setting in (
            ("--slow-after", "slow-after"),
            ("--lease-folders", "lease-folder"),
            ("--cluster-root", "cluster.root"),
        ):
            with self.subTest(flag):
                self.assertRefused(f"{flag} is not an option. Did you mean: -o {setting}=VALUE", f"{flag}=x")

    def test_no_abbreviations(self):
        """Their meaning could change when an option is added."""
        self.assertRefused("--shuf is not an option", "--shuf")


class LayersTest(OptionsCase):
    def test_each_layer_overrides_those_before(self):
        names = ("retries", "slow_after", "timeout", "durations")
        self.write("pyproject.toml", "[tool.torch_testing_ext]\nretries = 3\nslow-after = 3.0\ntimeout = 3\n")
        environ = {"TORCH_TESTING_EXT_RUN_SLOW_AFTER": "4", "TORCH_TESTING_EXT_RUN_TIMEOUT": "4"}
        configured = self.configure("--timeout", "5", environ=environ)
        self.assertEqual([getattr(configured.options, name) for name in names], [3, 4.0, 5.0, None])
        self.assertEqual(
            [configured.sources[name] for name in names],
            ["pyproject.toml", "TORCH_TESTING_EXT_RUN_SLOW_AFTER", "command line", "default"],
        )

    def test_lists_flags_and_closed_sets(self):
        self.write(
            "pyproject.toml",
            "[tool.torch_testing_ext]\nexclude = ['a', 'b']\nshuffle = 'yes'\nflaky = 'fail'\nverbosity = 'quiet'\n",
        )
        options = self.options()
        self.assertEqual((options.exclude, options.shuffle), (("a", "b"), Shuffle.RANDOM))
        self.assertEqual((options.flaky, options.verbosity), (CountAs.FAIL, Verbosity.QUIET))
        self.assertIsNone(self.options("--shuffle=off").shuffle)

    def test_a_setting_of_several_flags(self):
        self.write("pyproject.toml", "[tool.torch_testing_ext]\nrerun = 'last-failed'\n")
        self.assertIs(self.options().rerun, Rerun.LAST_FAILED)
        environ = {"TORCH_TESTING_EXT_RUN_RERUN": "nothing"}
        self.assertIs(self.options(environ=environ).rerun, Rerun.NOTHING)
        # Those that are not the defaults come first.
        self.assertRegex(show_options(self.configure()), r"^rerun = last-failed +\(pyproject.toml\)\n.* +\(default\)\n")
        self.assertRefused("RUN_AGAIN is not", environ={"TORCH_TESTING_EXT_RUN_AGAIN": "last-failed"})

    def test_toml_types(self):
        self.write(
            "pyproject.toml",
            '[tool.torch_testing_ext]\nexclude = ["a", "b"]\nshuffle = true\ngpus = 2\nmax-fail = 1\n',
        )
        self.assertRefused(r"max-fail is not a setting of \[tool.torch_testing_ext\]. Did you mean: maxfail")
        self.write(
            "pyproject.toml",
            '[tool.torch_testing_ext]\nexclude = ["a", "b"]\nshuffle = true\nmaxfail = 2\n'
            '[tool.torch_testing_ext.cluster]\naddress = "slurm"\nnodes = 2\n',
        )
        options = self.options()
        self.assertEqual((options.exclude, options.shuffle, options.maxfail), (("a", "b"), Shuffle.RANDOM, 2))
        self.assertEqual((options.cluster, options.cluster_nodes), ("slurm", 2))
        self.write("pyproject.toml", "[tool.torch_testing_ext.sweep]\nwithin = 3\n")
        self.assertEqual(self.options().sweep_within, 3.0)

    def test_toml_lists_of_one_value(self):
        """Names of GPUs and of variables, which are written with commas elsewhere."""
        for gpus, expected in (("[0, 2]", ("0", "2")), ("[1]", ("1",)), ('["GPU-aa"]', ("GPU-aa",)), ("2", 2)):
            self.write(
                "pyproject.toml",
                f"[tool.torch_testing_ext]\ngpus = {gpus}\nsanitize = ['nan', 'hash']\n"
                "[tool.torch_testing_ext.cluster]\nenv = ['A', 'B_*']\n",
            )
            options = self.options()
            self.assertEqual((options.gpus, options.cluster_env), (expected, "A,B_*"))
        self.write("pyproject.toml", "[tool.torch_testing_ext]\njobs = [2, 3]\n")
        self.assertRefused("jobs: '2,3' is not")

    words_of_runner = len(shlex.split(user_commands.runner()))

    def test_the_command_that_reruns_a_test_has_its_options(self):
        for words in (
            ("-m", "not slow", "-m", "gpu"),
            ("-o", "devices=cpu"),
            ("--fake-accelerators", "2"),
            ("--ranks-per-gpu", "2"),
            ("--cluster", "auto"),
            ("--sanitize", "-o", "sanitize-order=fail"),
            ("--sanitize=calls,nan",),
            ("--simulate", "8"),
            ("--sweep", "kill, stop(2)", "-osweep.within=5", "-osweep.points=steps", "-osweep.fail=hang"),
            ("--cache", "elsewhere"),
        ):
            with self.subTest(words):
                options = self.options(*words)
                again = self.options(*shlex.split(run_again.command(options))[self.words_of_runner :], cwd=Path.cwd())
                self.assertEqual(*(dataclasses.replace(each, cache=each.cache.resolve()) for each in (again, options)))

    def test_the_command_leaves_out_what_is_not_chosen(self):
        command = run_again.command(self.options("-o", "devices=auto", "--jobs", "2", "--retries", "3", "name"))
        self.assertRegex(command, rf"^{re.escape(user_commands.runner())} --cache \S+$")
        # A project may set it for all its sweeps.
        environ = {"TORCH_TESTING_EXT_RUN_SWEEP_WITHIN": "5"}
        self.assertNotIn("sweep.within", run_again.command(self.options(environ=environ)))

    def test_paths_are_relative_to_the_place_where_they_are_written(self):
        cwd = self.root / "cwd"
        self.write("pyproject.toml", "[tool.torch_testing_ext]\njunitxml = 'out/junit.xml'\n")
        environ = {"TORCH_TESTING_EXT_RUN_PERFETTO": "trace.json"}
        options = self.options("--html", "report.html", environ=environ, cwd=cwd)
        self.assertEqual(options.junitxml, self.root / "out/junit.xml")
        self.assertEqual((options.html, options.perfetto), (cwd / "report.html", cwd / "trace.json"))
        self.assertEqual(options.tests, ())

    def file(self, name):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return path.resolve()

    def test_drop_in(self):
        inside = self.file("checkout/test/distributed/test_x.py")
        checkout = inside.parents[2]
        options = self.options("--drop-in", "checkout")
        self.assertEqual((options.drop_in, options.drop_in_root), ((checkout,), checkout))
        self.assertEqual((options.tests, options.names), ((checkout / "test/distributed",), ()))
        self.assertNotEqual(options.cache, self.options().cache)
        explicit = self.options("--drop-in", "checkout", "-otests=elsewhere", "--cache", "cache")
        self.assertEqual((explicit.tests, explicit.cache), ((self.root / "elsewhere",), self.root / "cache"))
        self.write("pyproject.toml", "[tool.torch_testing_ext]\ntests = ['mine']\n")
        self.assertEqual(self.options("--drop-in", "checkout").tests, (checkout / "test/distributed",))
        self.assertEqual(self.options().tests, (self.root / "mine",))

    def test_drop_in_of_files(self):
        """All files are selected, although the first is the value of the option and the others are names."""
        inside = self.file("checkout/test/distributed/test_x.py")
        other, alone = self.file("checkout/test/test_y.py"), self.file("test_z.py")
        options = self.options("--drop-in", str(inside), "checkout/test/test_y.py")
        self.assertEqual((options.drop_in_root, options.tests, options.names), (inside.parents[2], (inside, other), ()))
        self.assertEqual(run_again.command(options), f"{user_commands.runner()} --drop-in {inside.parents[2]}")
        self.assertEqual(self.options("--drop-in", "test_z.py").drop_in_root, alone.parent)
        self.assertEqual(
            run_again.command(self.options("--drop-in", "test_z.py")), f"{user_commands.runner()} --drop-in {alone}"
        )

    def test_names_of_a_drop_in(self):
        one, folder = self.file("folder/test_x.py"), self.root.resolve() / "folder"
        for place, name in (
            ("folder", "test_x"),
            ("folder", "folder/test_x.py"),
            ("folder", "test_x.py::C::test"),
            ("folder/test_x.py", "folder/test_x.py::C"),
            ("folder/test_x.py", "folder/test_x.py"),
        ):
            with self.subTest(place=place, name=name):
                options = self.options("--drop-in", place, name)
                self.assertEqual((options.names, options.drop_in_root), ((name,), folder))
                self.assertEqual(options.tests, (one if place.endswith(".py") else folder,))

    def test_several_drop_ins(self):
        one, two = self.file("a/test_x.py"), self.file("b/test/distributed/test_y.py")
        root = self.root.resolve()
        options = self.options("--drop-in", "a", "--drop-in", "b", "test_y")
        self.assertEqual((options.drop_in, options.names), ((root / "a", root / "b"), ("test_y",)))
        self.assertEqual((options.tests, options.drop_in_root), ((one.parent, two.parent), root))
        self.assertEqual(run_again.command(options), f"{user_commands.runner()} --drop-in {root}/a --drop-in {root}/b")
        self.assertEqual(self.options("--drop-in", "a/test_x.py", "--drop-in", "b").tests, (one, two.parent))

    def test_wrong_drop_ins(self):
        self.file("a/test_x.py"), self.file("notes.txt")
        (self.root / "link").symlink_to("a")
        self.assertRefused("--drop-in .*none: there is no such file", "--drop-in", "none")
        self.assertRefused("--drop-in .*none: there is no such file", "--drop-in", "a", "--drop-in", "none")
        self.assertRefused("--drop-in .*/a: named twice", "--drop-in", "a", "--drop-in", "a")
        self.assertRefused("--drop-in .*/link: named twice", "--drop-in", "a", "--drop-in", "link")
        self.assertRefused("--drop-in .*/../a: named twice", "--drop-in", "a", "--drop-in", "a/../a")
        self.assertRefused("notes.txt: this file is not a Python file", "--drop-in", "notes.txt")
        self.assertRefused("the path is empty", "--drop-in", "")

    def test_misspelt(self):
        self.write("pyproject.toml", "[tool.torch_testing_ext]\ntime-out = 3\n")
        self.assertRefused("pyproject.toml: time-out is not a setting .* Did you mean: timeout")
        self.write("pyproject.toml", "[tool.torch_testing_ext]\ntimeout = 'never'\n")
        self.assertRefused("pyproject.toml: timeout: 'never' is not a positive number of seconds")
        self.write("pyproject.toml", "")
        self.assertRefused("RUN_JOB is not .* TORCH_TESTING_EXT_RUN_JOBS", environ={"TORCH_TESTING_EXT_RUN_JOB": "3"})
        self.assertRefused("RUN_JOBS: 'x' is not a whole number", environ={"TORCH_TESTING_EXT_RUN_JOBS": "x"})

    def test_broken_toml(self):
        self.write("pyproject.toml", "[tool.torch_testing_ext\n")
        self.assertRefused("pyproject.toml cannot be read")
        self.write("pyproject.toml", "[tool.torchtest]\njobs = 2\n")
        self.assertRefused(r"pyproject.toml has \[tool.torchtest\]: write \[tool.torch_testing_ext\]")

    def test_ranks_accept_the_variables_of_the_runner(self):
        launch_settings.check_settings({RUNNER_PREFIX + "JOBS": "3"})
        with self.assertRaises(ValueError):
            launch_settings.check_settings({"TORCH_TESTING_EXT_RUNJOBS": "3"})

    def test_show(self):
        self.write("pyproject.toml", "[tool.torch_testing_ext]\nretries = 2\n")
        shown = show_options(self.configure("--shard", "1/2", "-k", "a", "-k", "b"))
        self.assertRegex(shown, r"(?m)^retries = 2 +\(pyproject.toml\)$")
        self.assertRegex(shown, r"(?m)^shard = 1/2 +\(command line\)$")
        self.assertRegex(shown, r"(?m)^keyword = a, b +\(command line\)$")
        self.assertEqual(len(shown.splitlines()), len(OPTION_TABLE))


if __name__ == "__main__":
    unittest.main()
