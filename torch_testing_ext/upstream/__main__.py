"""The command line of `python -m torch_testing_ext.upstream`."""

import argparse
import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .mapping import PACKAGE, UserError

_PROGRAM = "python -m torch_testing_ext.upstream"
# Commands with options of their own, by the modules beside the patches that have them.
_BESIDE_THE_PATCHES = {"patch": "outgoing", "patches": "patch_series", "pull-request": "pull_request"}


def main(argv: Sequence[str] | None = None) -> int:
    words = [*(sys.argv[1:] if argv is None else argv)]
    try:
        if words and words[0] in _BESIDE_THE_PATCHES:
            return _run_beside_the_patches(*words)
        options = _parser().parse_args(words)
        code: int = options.command(options)
    except UserError as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    description = "Run, import and patch the test files of a PyTorch checkout."
    parser = argparse.ArgumentParser(prog=_PROGRAM, description=description)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="run a PyTorch test file unmodified on our classes"))
    _add_import(commands.add_parser("import", help="copy PyTorch test files here and rewrite their imports"))
    commands.add_parser("patch", help="turn our test files into a patch for a PyTorch checkout")
    commands.add_parser("patches", help="list or check the patches for PyTorch that we keep")
    commands.add_parser("pull-request", help="commit one of them, with its test, in a PyTorch checkout")
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    run.description = "Run a PyTorch test file unmodified; its imports of PyTorch's test kit give our classes."
    run.add_argument("--explain", action="store_true", help="at the end, list the names that came from PyTorch")
    run.add_argument("path", type=Path, metavar="FILE", help="the test file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments for unittest")
    run.set_defaults(command=_run)


def _add_import(bring: argparse.ArgumentParser) -> None:
    bring.description = "Copy PyTorch test files here, rewrite their imports, and report names that we lack."
    bring.add_argument("files", type=Path, nargs="+", metavar="FILE", help="test files of PyTorch")
    bring.add_argument(
        "--to", type=Path, default=Path("test"), metavar="DIR", help="our test directory (default: test)"
    )
    bring.add_argument("--force", action="store_true", help="overwrite existing files")
    bring.set_defaults(command=_import)


# Each command imports its module only when it runs, so that --help and errors appear at once.


def _run(options: argparse.Namespace) -> NoReturn:
    """Run the file as `python FILE` would, with our test kit in place of PyTorch's. Exits as the file does."""
    from torch_testing_ext._testing.bases import invocation

    from . import drop_in

    path: Path = options.path
    if not path.is_file():
        raise UserError(f"{path} does not exist; name a test file, as in: run test/distributed/test_store.py -v")
    drop_in.install()
    invocation.python_arguments = ["-m", "torch_testing_ext.upstream", "run"]
    sys.argv[:] = [str(path), *options.arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        if options.explain:
            print(drop_in.explain(), file=sys.stderr)
    raise UserError(f"{path} ran no tests: it does not call run_tests() at its end. Run it with pytest instead")


def _import(options: argparse.Namespace) -> int:
    from . import imported_files

    complete = True
    for imported in imported_files.import_files(options.files, options.to, options.force):
        print(f"{imported.file} -> {imported.target}")
        for problem in imported.problems():
            print(f"{imported.file}: {problem}", file=sys.stderr)
            complete = False
    return 0 if complete else 1


def _run_beside_the_patches(command: str, *words: str) -> int:
    """Run a tool for patches: only a checkout of this package has them."""
    name = _BESIDE_THE_PATCHES[command]
    sys.path.insert(0, str(PACKAGE.parent / "patches"))
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UserError("this command needs a checkout of torch_testing_ext, which has the patches") from None
    return int(module.main(words, f"{_PROGRAM} {command}"))


if __name__ == "__main__":
    sys.exit(main())
