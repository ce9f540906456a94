"""The configuration of CI: the tests that its commands name, and places that do not exist."""

import re

from kit.files import FolderCase

from torch_testing_ext.runner.run_files.ci_jobs import read_ci_jobs

FILES = ("tests/core/test_a.py", "tests/core/test_b.py", "tests/far/test_c.py", "tests/test_top.py")
A, B, C, TOP = FILES
# A line of a job, and the files that it names.
COMMANDS = (
    ("pytest", FILES),
    ("python -m pytest -q -m 'not gpu'", FILES),
    ("coverage run -m pytest -k 'not slow'", FILES),
    ("pytest tests", FILES),
    ("pytest $TEST_DIRS -v", FILES),
    ("pytest tests/core", (A, B)),
    ("cd tests && pytest core/ far/test_c.py::TestX", (A, B, C)),
    ("pytest -v /workspace/project/tests/far", (C,)),
    ("pytest tests/core --ignore=tests/core/test_b.py", (A,)),
    ("pytest tests/core --ignore tests/core/test_b.py", (A,)),
    ("pytest tests/*/test_a.py", (A,)),
    ("bash -c 'cd tests; pytest core/test_a.py'", (A,)),
    ('if [ "$X" = 1 ]; then pytest -x core/test_b.py; fi', (B,)),
    ("find core/ -name 'test_*.py' -print0 | xargs -0 -n1 -I{} pytest -s '{}'", (A, B)),
    ("torchrun --nproc-per-node 2 tests/far/test_c.py", (C,)),
    ("torchrun --nproc-per-node=2 -m pytest tests/far", (C,)),
    ("python tests/test_top.py --verbose", (TOP,)),
    ("python -m unittest tests/test_top.py", (TOP,)),
    ("torchtest tests/far --shard 1/2", (C,)),
    ('["pytest", "tests/far"]', (C,)),
    ("pytest \\\n  --durations=9 \\\n  tests/far", (C,)),
    ("pytest -v\n        --durations=9\n        tests/far", (C,)),
    ("pytest 'tests/far/test_c.py::test_x[a b]' -k \"x and not y\"", (C,)),
    ("pytest tests/core && pytest tests/far", (A, B, C)),
)
# Lines that name no test.
OTHERS = (
    "# pytest tests/core",
    "pip install pytest pytest-xdist",
    "uv pip install -r tests/requirements.txt pytest",
    "python setup.py bdist_wheel",
    "pytest src/package --doctest-modules",
    "pytest -k TestOfAnotherProject",
    "echo tests/core",
)


class CommandsTest(FolderCase):
    def setUp(self):
        super().setUp()
        for file in FILES:
            self.write(file, "def test_x(): pass\n")

    def jobs(self, text, file=".github/workflows/ci.yml"):
        self.write(file, text)
        return read_ci_jobs(self.root, [self.root / "tests"])

    def test_commands(self):
        for command, named in COMMANDS:
            with self.subTest(command):
                jobs = self.jobs(f"jobs:\n  a:\n    steps:\n      - run: {command}\n      - run: echo x\n")
                self.assertEqual(tuple(file for file in FILES if jobs.names(file)), named, jobs)

    def test_other_lines(self):
        """Beside a command that names one file, they name no other one."""
        for line in OTHERS:
            with self.subTest(line):
                jobs = self.jobs(f"steps:\n- {line}\n- pytest tests/far\n")
                self.assertEqual([file for file in FILES if jobs.names(file)], [C], jobs)

    def test_without_a_command_each_file_may_run(self):
        jobs = self.jobs("on: push\n")
        self.assertEqual((jobs.commands, all(map(jobs.names, FILES))), ((), True))

    def test_files_that_jobs_call(self):
        self.write("Makefile", "test:\n\tpython -m pytest -s -v ./tests/far $(if $(CI),--report-log x.log,)\n")
        self.write("tox.ini", "[testenv]\ncommands = pytest {posargs} tests/core\n")
        jobs = self.jobs("run: make test\n")
        self.assertEqual([file for file in FILES if jobs.names(file)], [A, B, C])

    def test_places_in_vain(self):
        jobs = self.jobs(
            """\
            on:
              push:
                paths: ['tests/gone/**', "!tests/lost.py", 'tests/core/**']  # not tests/comment
            jobs:
              a:
                # tests/nowhere
                steps:
                - run: pytest tests/far/test_gone.py > tests/output
                - filter: [tests/far/test_, tests/core/test_a.py]
                - run: make --out tests/written.py --outfile=tests/too.py
                - files: tests/coverage.xml
            """
        )
        found = [re.fullmatch(r".github/workflows/ci.yml:(\d+) names (.*)", words).groups() for words in jobs.dead]
        self.assertEqual(found, [("3", "tests/gone"), ("3", "tests/lost.py"), ("8", "tests/far/test_gone.py")])

    def test_odd_configurations(self):
        """Nothing in them breaks the reading, and no word is a path by its length or characters."""
        for text in (
            f"tests/{'x' * 5000}",
            "pytest '",
            'pytest "tests/far',
            f"pytest {'x/' * 5000}",
            "pytest \0 ::: [ ] {",
            "\ufffd",
            "[" * 999,
        ):
            with self.subTest(text[:20]):
                self.jobs(text)


if __name__ == "__main__":
    import unittest

    unittest.main()
