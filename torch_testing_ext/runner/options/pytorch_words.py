"""The options of PyTorch's run_test.py that have another form here, or none: `run_test.py` takes them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .values import UsageError

Translate = Callable[[list[str]], list[str]]


@dataclass(frozen=True)
class PytorchOption:
    """An option of PyTorch's, and the words that stand for it here."""

    flags: tuple[str, ...]
    # The translation of the words after the flag that are its values.
    ours: Translate = lambda values: []
    # The most values that it takes.
    values: int = 0
    # Whether it may have fewer.
    may_be_alone: bool = False
    # A sentence on an option that changes nothing.
    anyway: str = ""
    # The advice, if it is refused.
    refused: str = ""


def _words(*words: str) -> Translate:
    return lambda values: [*words, *values]


def _shard(values: list[str]) -> list[str]:
    return ["--shard", "/".join(values)]


def _disabled(values: list[str]) -> list[str]:
    return ["--disabled", *(values or [".pytorch-disabled-tests.json"])]


_NOT_DISTRIBUTED = "all tests here are distributed"
OPTIONS = (
    PytorchOption(("--continue-through-error", "--keep-going"), anyway="a failure ends a run only with --exitfirst"),
    PytorchOption(("--distributed-tests",), anyway=_NOT_DISTRIBUTED),
    PytorchOption(("--pipe-logs",), anyway="each test has a log, which is printed if it fails"),
    PytorchOption(("--enable-timeout",), anyway="each test has a time limit: --timeout"),
    PytorchOption(("--ignore-win-blocklist", "--no-translation-validation"), anyway="nothing here depends on it"),
    PytorchOption(
        (
            "--exclude-jit-executor",
            "--exclude-inductor-tests",
            "--exclude-torch-export-tests",
            "--exclude-aot-dispatch-tests",
            "--exclude-quantization-tests",
        ),
        anyway=_NOT_DISTRIBUTED,
    ),
    PytorchOption(("--shard",), _shard, values=2),
    PytorchOption(("--pytest-k-expr",), _words("-k"), values=1),
    PytorchOption(("-pt", "--pytest", "--use-pytest"), _words("-o", "loader=pytest")),
    PytorchOption(("-c",), _words("--coverage")),
    PytorchOption(("--no-showlocals",), _words("-o", "showlocals=false")),
    PytorchOption(("--import-disabled-tests",), _disabled, values=1, may_be_alone=True),
    PytorchOption(("--save-xml",), lambda values: ["--junitxml", *(values or ["report.xml"])], 1, may_be_alone=True),
    PytorchOption(("--enable-td",), refused="--affected=REV, which runs the tests whose files changed"),
    PytorchOption(("--upload-artifacts-while-running",), refused="--junitxml FILE, and upload that"),
    PytorchOption(("--rerun-disabled-tests",), refused="--repeat N without --disabled"),
    PytorchOption(("--exclude-distributed-tests",), refused="PyTorch's own run_test.py: " + _NOT_DISTRIBUTED),
    PytorchOption(
        ("--jit", "--functorch", "--mps", "--xpu", "--cpp", "-core", "--core", "--onnx", "--xdoctest-command"),
        refused="PyTorch's own run_test.py: " + _NOT_DISTRIBUTED,
    ),
    PytorchOption(("--dynamo", "--inductor"), refused="torch.compile in the tests: nothing wraps them here"),
)
_BY_FLAG = {flag: option for option in OPTIONS for flag in option.flags}


def as_ours(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command line with our options in the place of PyTorch's, and a line for each without effect.

    Raises UsageError for an option that has no counterpart.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    words: list[str] = []
    notes = []
    left = list(argv[:end])
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        option = _BY_FLAG.get(flag)
        if option is None or (flag == "--shard" and not _is_shard_of_two(left)):
            words.append(word)
            continue
        if option.refused:
            raise UsageError(f"{flag} of PyTorch's run_test.py is not an option here. Use {option.refused}")
        if option.anyway:
            notes.append(f"{flag} changes nothing: {option.anyway}")
        values = [value] if equals else list(_taken(left, option))
        if len(values) < option.values and not option.may_be_alone:
            raise UsageError(f"{flag} needs a value")
        words += option.ours(values)
    return [*words, *argv[end:]], notes


def _taken(left: list[str], option: PytorchOption) -> Iterator[str]:
    """Take the values of an option from the words after it."""
    for _ in range(option.values):
        if left and not left[0].startswith("-"):
            yield left.pop(0)


def _is_shard_of_two(left: Sequence[str]) -> bool:
    """Whether a shard is two numbers, as in PyTorch's; else it is I/N."""
    return len(left) > 1 and left[0].isdecimal() and left[1].isdecimal()
