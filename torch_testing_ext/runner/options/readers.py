"""Readers of options: each converts a text to a value; the message of its ValueError says what is valid."""

from __future__ import annotations

import shlex

from torch_testing_ext._process.setting_readers import count, read_boolean

from .values import Gpus, Repeat, ShardSpec, Shuffle


def read_shard(text: str) -> ShardSpec:
    index, slash, total = text.partition("/")
    if not (slash and index.isdecimal() and total.isdecimal() and 1 <= int(index) <= int(total)):
        raise ValueError(f"{text!r} is not a shard: write I/N, such as 1/3 for the first of three")
    return ShardSpec(int(index), int(total))


def write_gpus(gpus: Gpus) -> str:
    """The text that `read_gpus` reads as these."""
    if isinstance(gpus, tuple):
        return ",".join(gpus) + ("," if len(gpus) == 1 else "")
    if gpus is None:
        return "all"
    return str(gpus) if gpus else "none"


def read_gpus(text: str) -> Gpus:
    """`auto`, `all` or `none`, a number of devices, or a comma-separated list of their names."""
    if text in ("auto", "all"):
        return None
    if text == "none":
        return 0
    if text == "0":
        # Whoever knows CUDA_VISIBLE_DEVICES=0 means the first GPU.
        raise ValueError("'0' is a number of GPUs: write '0,' for GPU 0, or 'none' for no GPU")
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if "," not in text and text.isdecimal():
        return int(text)
    if not names or len(set(names)) < len(names) or "-1" in names:
        raise ValueError(
            f"{text!r} is not all, none, a number of devices, or a list of different devices such as 0,2 (one: 0,)"
        )
    return names


def read_cluster(text: str) -> str:
    """`auto` or an address for a Ray cluster, or the name of another site, which the session knows."""
    host, _, port = text.removeprefix("ray://").rpartition(":")
    if text.isidentifier() or (host and port.isdecimal() and int(port) < 1 << 16):
        return text
    raise ValueError(f"{text!r} is not auto, slurm, HOST:PORT or ray://HOST:PORT")


def read_environment(text: str) -> str:
    """Names of variables, or patterns, separated by commas: all with a dash before them, or none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len({name.startswith("-") for name in names}) > 1 or "-" in names:
        raise ValueError(f"{text!r} is not a list of names such as A,B_* (only these) or -A,-B_* (all but these)")
    return ",".join(names)


# What torchtest does by itself or leaves to others, by the option of pytest or of a plugin.
_NOT_FOR_PYTEST = {
    **dict.fromkeys(("-n", "--numprocesses", "--dist", "--tx"), "use -j N of torchtest"),
    **dict.fromkeys(("-x", "--exitfirst", "--maxfail"), "use -x or --maxfail of torchtest"),
    **dict.fromkeys(("--lf", "--last-failed", "--ff", "--failed-first"), "use --lf of torchtest"),
    **dict.fromkeys(("--sw", "--stepwise"), "use -x and --lf of torchtest"),
    **dict.fromkeys(("--junitxml", "--junit-xml", "--junit"), "use --junitxml of torchtest"),
    **dict.fromkeys(("--co", "--collect-only"), "use --list of torchtest"),
    **dict.fromkeys(("-k", "-m", "-l", "--showlocals"), "use that of torchtest"),
    **dict.fromkeys(("--pdb", "--trace"), "use --pdb of torchtest"),
    **dict.fromkeys(
        ("--fixtures", "--funcargs", "--fixtures-per-test", "--markers", "--setup-plan", "--cache-show"),
        "it runs no test: use pytest",
    ),
    **dict.fromkeys(("--simulate", "--sanitize", "--fake-accelerators"), "use that of torchtest"),
    "--forked": "each test has processes of its own",
    "--rank-timeout": "use --timeout of torchtest",
    "--cov": "use --cov of torchtest, and then coverage report, coverage xml or coverage json",
    "--basetemp": "each test has a folder of its own, in TMPDIR",
}


def why_not_for_pytest(word: str) -> str:
    """Why an option of pytest has no use under this runner, with the remedy; empty for the others."""
    name = word.partition("=")[0]
    if name.startswith("--cov"):
        name = "--cov"
    elif not name.startswith("--"):
        # `-n4` is `-n 4`.
        name = name[:2]
    return _NOT_FOR_PYTEST.get(name, "")


def read_pytest_options(text: str) -> str:
    """Options for pytest, as a shell would read them."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    if words and not words[0].startswith("-"):
        raise ValueError(f"{words[0]}: only options of pytest follow: write names of tests before --")
    for word in words:
        why = word.startswith("-") and why_not_for_pytest(word)
        if why:
            raise ValueError(f"{word}: {why}")
    return shlex.join(words)


def read_repeat(text: str) -> int | Repeat:
    """A number of repetitions, or `until-failure`."""
    return Repeat.UNTIL_FAILURE if text == Repeat.UNTIL_FAILURE.value else count(text)


def read_shuffle(text: str) -> int | Shuffle | None:
    """`random`, a seed, or whether to shuffle at all."""
    if text.isdecimal():
        return int(text)
    if text == Shuffle.RANDOM.value:
        return Shuffle.RANDOM
    try:
        return Shuffle.RANDOM if read_boolean(text) else None
    except ValueError:
        raise ValueError(f"{text!r} is not a seed, true or false") from None
