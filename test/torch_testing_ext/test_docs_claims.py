"""What users' pages say of calls, options, messages and figures is so."""

import ast
import inspect
import re
import shlex
import tempfile
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

import torch_testing_ext
from torch_testing_ext import common_distributed, common_utils, hypothesis_utils, pytest_plugin, ranks
from torch_testing_ext._pytest_ranks import marks
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch.aspects import ASPECTS
from torch_testing_ext.runner.options import OPTION_TABLE, sources
from torch_testing_ext.runner.options.commands import COMMANDS

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FOLDERS = ("get-started", "guides", "migrate", "reference", "explanation", "help")
PAGES = [ROOT / "README.md", *sorted(page for folder in FOLDERS for page in (DOCS / folder).glob("*.md"))]
# With the pages for those who work on the package.
ALL_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((DOCS / "contribute").glob("*.md"))]
MOST_WORDS = 18_000
MOST_LINES_OF_README = 80

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(r"^(?:\$ )?((?:[A-Z_]+=\S+ )*)(?:python run_test\.py|torchtest)\b(.*)$")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
SUBCOMMANDS = ("show", "report", "why", "init", "moving", "cluster", "merge", "replay", "diff", "history", "census")
# Options of torch, pytest, unittest, pip, git and others, and of programs of this repository that are no runner.
# Of the mark, as `pytest --markers` shows it.
SIGNATURE = pytest_plugin._EXPLANATIONS[0].partition(": ")[0]
OTHERS_OPTIONS = {
    # Of pytest-cov, and of a conftest.py.
    "--cov",
    "--model",
    *(
        "--nproc-per-node",
        "--nnodes",
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--num_processes",
        "--num-cpus",
        "--num-gpus",
    ),
    *("--nodes", "--ntasks-per-node", "--cpus-per-task", "--gpus-per-node", "--exclusive", "--parallel-mode"),
    *("--trace", "--pdb", "--basetemp", "--lf", "--setup-show", "--version", "--no-deps", "--shm-size", "--ipc"),
    *("--hypothesis-profile", "--accept", "--force", "--to", "--explain", "--diff", "--pytorch", "--subject"),
    *("--vendor", "--check", "--torch", "--series", "--write", "--record", "--json", "--quick", "--only", "--head"),
    *("--cpu-limit", "--dist", "--tags", "--reset-author", "--user"),
    *("--details", "--amend"),
}
# Messages of others that a page explains.
OTHERS_MESSAGES = {"fixture 'dist_env' not found", "module 'fcntl' has no attribute ...", "bdb.BdbQuit"}
# What users ask: the page below docs/ that answers, and the beginning of the line.
ANSWERS = {
    "run one test on 3 ranks": (
        "reference/cheat-sheet.md",
        "| run a test on 3 ranks | `@pytest.mark.world_size(3)` on it",
    ),
    "see only failures": ("reference/cheat-sheet.md", "| see only failures | `torchtest -q` |"),
    "find why it hangs": ("guides/debug.md", "## Find a hang"),
    "run only what my change affects": ("guides/faster.md", "torchtest --affected"),
    "give me JUnit": ("reference/cheat-sheet.md", "| get JUnit, HTML | `torchtest --junitxml report.xml"),
    "debug rank 1": ("guides/debug.md", "torchtest --trace=1 tests/test_sum.py::test_sum"),
    "use GPUs 0 and 2": ("get-started/gpus.md", "torchtest --gpus 0,2"),
    "run on Slurm": ("guides/cluster.md", "torchtest --cluster slurm --cluster-nodes 2"),
    "move my DeepSpeed tests": ("migrate/deepspeed.md", "torchtest moving deepspeed tests/unit"),
    "pin versions": ("get-started/install.md", "## Pin the versions"),
}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def spans(page: Path) -> list[str]:
    """The code in prose, lists and tables of a page."""
    return SPAN.findall(BLOCK.sub("", text_of(page)).replace("\\|", "|"))


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """The variables and the arguments of each command line of the runner."""
    lines = [line for _, block in BLOCK.findall(text_of(page)) for line in block.splitlines()]
    for line in [*lines, *spans(page)]:
        if match := COMMAND.match(line.strip()):
            yield match[1], match[2].partition("  ")[0]


def function_of(name: str) -> Callable[..., object] | None:
    """The public function, class or mark with a name."""
    if name in ("pytest.mark.world_size", "world_size"):
        names: dict[str, Callable[..., object]] = {}
        exec(f"def {SIGNATURE}: ...", names)
        return names["world_size"]
    for module in (ranks, common_distributed, common_utils, hypothesis_utils):
        if name.isidentifier() and callable(found := getattr(module, name, None)):
            return found
    return None


def fault_of_call(code: str) -> str | None:
    """Why the call that a page shows would raise a TypeError."""
    try:
        tree = ast.parse(code.removeprefix("@"), mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(tree, ast.Call) or (function := function_of(ast.unparse(tree.func))) is None:
        return None
    arguments = [part for part in tree.args if not isinstance(part, ast.Starred)]
    keywords = {part.arg: part.value for part in tree.keywords if part.arg}
    try:
        # What a page leaves out may be any argument.
        bind = inspect.signature(function).bind_partial if "..." in code else inspect.signature(function).bind
        bind(*(part for part in arguments if ast.unparse(part) != "..."), **keywords)
    except TypeError as error:
        return f"{code}: {error}"
    return None


class CallsTest(unittest.TestCase):
    def test_calls_fit_the_signatures(self) -> None:
        calls = {code for page in PAGES for code in spans(page)}
        faults = [fault for code in sorted(calls) if (fault := fault_of_call(code))]
        self.assertEqual(faults, [])

    def test_signatures_are_complete(self) -> None:
        """Those that name `*args`."""
        shown = {
            code for page in PAGES for code in spans(page) if "*args" in code and function_of(code.partition("(")[0])
        }
        self.assertGreaterEqual(len(shown), 2)
        for code in sorted(shown):
            name, _, parameters = code.partition("(")
            function = function_of(name)
            assert function is not None
            expected = [str(part).split(":")[0] for part in inspect.signature(function).parameters.values()]
            with self.subTest(code=code):
                found = [part.strip().split("=")[0] for part in parameters.rstrip(")").split(",")]
                self.assertEqual(found, expected)

    def test_wrong_calls_are_noticed(self) -> None:
        for code in ('run_script("train.py", size=4)', "@timeout()", "@pytest.mark.world_size(2, device=1)"):
            self.assertIsNotNone(fault_of_call(code), code)
        for code in ('run_script("train.py", world_size=4)', "@timeout(60)", "@pytest.mark.world_size([1, 2])", "f(1)"):
            self.assertIsNone(fault_of_call(code), code)


class OptionsTest(unittest.TestCase):
    def test_command_lines_parse(self) -> None:
        found = {(page.name, *command) for page in ALL_PAGES for command in commands(page)}
        self.assertGreater(len(found), 40)
        for page, variables, arguments in sorted(found):
            if "..." in arguments or "[" in arguments or "--help" in arguments:
                continue
            words = shlex.split(arguments.replace("NAME", "name"))
            if words and words[0] in SUBCOMMANDS:
                continue
            with self.subTest(page=page, arguments=arguments):
                environ = dict(word.split("=", 1) for word in variables.split())
                with mock.patch(
                    "torch_testing_ext.runner.options.dropped_in._existing", tuple
                ):  # the reader's checkouts are not here
                    sources.read_options(words, environ, ROOT, ROOT)

    def test_settings_of_examples_are_read(self) -> None:
        """Those of pyproject.toml."""
        examples = {text for page in PAGES for language, text in BLOCK.findall(text_of(page)) if language == "toml"}
        self.assertGreaterEqual(len(examples), 3)
        for example in sorted(examples):
            with self.subTest(example=example), tempfile.TemporaryDirectory() as folder:
                Path(folder, "pyproject.toml").write_text(example, encoding="utf-8")
                read = sources.read_options((), {}, Path(folder), Path(folder))
                # Another tool's are in a table of that tool alone.
                is_ours = "[tool.coverage." not in example
                self.assertEqual("pyproject.toml" in read.sources.values(), is_ours)

    def test_options_in_prose_exist(self) -> None:
        known = {flag for spec in OPTION_TABLE.values() for flag in (*spec.flags, *spec.of_pytorch)}
        known |= {flag for spec in OPTION_TABLE.values() for value in spec.values for flag in value.names}
        known |= {"--help", "--help-all", "--version", *re.findall(r'"(--[a-z-]+)"', inspect.getsource(pytest_plugin))}
        known |= {option.flag for aspect in ASPECTS for option in aspect.options}
        known |= {flag for command in COMMANDS.values() for flag in OPTION.findall(command.usage)}
        for page in PAGES:
            for code in spans(page):
                for option in OPTION.findall(code):
                    with self.subTest(page=page.name, code=code):
                        self.assertIn(option, known | OTHERS_OPTIONS)


@pytest.mark.slow
class MessagesTest(unittest.TestCase):
    def test_messages_of_troubleshooting_exist(self) -> None:
        texts = "\n".join(strings_of_the_package())
        headings = re.findall(r"^### (.*)$", text_of(DOCS / "help" / "troubleshooting.md"), re.MULTILINE)
        messages = [message for heading in headings for message in SPAN.findall(heading)]
        self.assertGreaterEqual(len(messages), 25)
        for message in messages:
            for part in message.split("..."):
                with self.subTest(message=message, part=part):
                    words = part.strip(" :.,;")
                    self.assertTrue(len(words) < 4 or words in texts or message in OTHERS_MESSAGES)


def inserted(part: ast.expr) -> str:
    """What an f-string inserts: a constant of `marks`, or anything."""
    name = getattr(getattr(part, "value", None), "id", "")
    return {"DIST_ENV": marks.DIST_ENV, "NAME": marks.NAME}.get(name, "...")


def strings_of_the_package() -> Iterator[str]:
    """The texts of the package's sources; "..." stands for what an f-string inserts."""
    for file in sorted((ROOT / "torch_testing_ext").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else inserted(part) for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


class ReadersTest(unittest.TestCase):
    def test_the_start_of_ranks_has_one_figure(self) -> None:
        """One for four ranks on the CPU, and one for a rank on a GPU."""
        benchmarks = text_of(ROOT / "benchmarks" / "README.md")
        self.assertIn("83 against 79 ms", benchmarks)
        self.assertIn("| fresh for each test (`MultiProcessTestCase`) | 1.3 s | 1.2 s |", benchmarks)
        self.assertIn("0.1 s (83 ms)", text_of(DOCS / "help" / "performance.md"))
        sentence = re.compile(r"[^.|]*\b(?:fresh|new|forked) ranks?\b[^.|]*?(\d[\d.]*) (m?s)\b")
        for page in PAGES:
            for number, unit in sentence.findall(BLOCK.sub("", text_of(page)).replace("\n", " ")):
                with self.subTest(page=page.name):
                    self.assertIn(f"{number} {unit}", ("0.1 s", "1.2 s", "83 ms"))

    def test_users_pages_are_short(self) -> None:
        """Without code."""
        words = {str(page.relative_to(ROOT)): len(BLOCK.sub("", text_of(page)).split()) for page in PAGES}
        self.assertLessEqual(sum(words.values()), MOST_WORDS, words)
        self.assertLessEqual(len(text_of(PAGES[0]).splitlines()), MOST_LINES_OF_README)

    def test_two_clicks_lead_everywhere(self) -> None:
        """From README.md to each users' page."""
        near = {PAGES[0]}
        for _ in range(2):
            links = [(page, link) for page in near for link in LINK.findall(text_of(page))]
            near |= {target for page, link in links if (target := (page.parent / link).resolve()).suffix == ".md"}
        self.assertEqual([str(page) for page in PAGES if page.resolve() not in near], [])

    def test_questions_have_an_answer(self) -> None:
        for question, (name, line) in ANSWERS.items():
            with self.subTest(question):
                self.assertIn(DOCS / name, PAGES)
                self.assertRegex(text_of(DOCS / name), f"(?m)^{re.escape(line)}")

    def test_pictures_are_small(self) -> None:
        """And each is in a page."""
        pictures = [file for file in (DOCS / "pictures").iterdir() if file.is_file()]
        self.assertGreater(len(pictures), 4)
        self.assertLessEqual(sum(file.stat().st_size for file in pictures), 1_500_000)
        pages = "\n".join(map(text_of, PAGES))
        self.assertEqual([file.name for file in pictures if f"pictures/{file.name})" not in pages], [])


if __name__ == "__main__":
    run_tests()
