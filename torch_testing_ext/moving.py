"""Converts tests of other projects: the command `torchtest moving`, also `python -m torch_testing_ext.moving`."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_testing_ext._process import user_commands
from torch_testing_ext.upstream.other_projects import PROJECTS

_OF_PYTORCH = (
    "torch_testing_ext has the names of torch.testing._internal. For files of a checkout, "
    "`python -m torch_testing_ext.upstream import FILE` does it"
)
_LEFT_OUT = ("site-packages", "node_modules", "__pycache__")


def main(argv: Sequence[str] | None = None, prog: str = "python -m torch_testing_ext.moving") -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] in (["pytorch"], ["torch"]):
        print(f"{prog}: for tests of PyTorch itself, change the imports: {_OF_PYTORCH}", file=sys.stderr)
        return 2
    options = _parser(prog).parse_args(words)
    try:
        import libcst  # noqa: F401
    except ImportError as error:
        print(f"{prog}: this command needs libcst: {user_commands.install('moving')} ({error})", file=sys.stderr)
        return 2
    missing = [str(path) for path in options.paths if not path.exists()]
    if missing:
        print(f"{prog}: {', '.join(missing)} does not exist", file=sys.stderr)
        return 2
    return _convert_all(options.project, sorted(set(_files(options.paths))), options.diff)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Convert tests that use the helpers of PROJECT to torch_testing_ext. Files change in place; the "
        "lines that you have to change yourself are listed. docs/migrate/ has examples.",
        epilog="exit code: 0, or 1 if a file could not be converted",
    )
    parser.add_argument("--diff", action="store_true", help="show the changes, and write nothing")
    parser.add_argument("project", choices=sorted(PROJECTS), metavar="PROJECT", help=", ".join(sorted(PROJECTS)))
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="a file or folder")
    return parser


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
        for folder, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in _LEFT_OUT]
            yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _convert_all(project: str, files: Sequence[Path], only_show: bool) -> int:
    """Convert files, or only show how they would change. Returns the exit code."""
    from torch_testing_ext.upstream.converting import convert_file

    changed, unread, by_hand = [], [], []
    for path in files:
        try:
            source = path.read_bytes()
            converted = convert_file(source, PROJECTS[project], path)
            if converted.source != source and not only_show:
                path.write_bytes(converted.source)
        except Exception as error:
            why = str(error).partition("\n")[0] or repr(error)
            unread.append(f"{path}: not converted: {why}")
            continue
        by_hand += [f"{path}:{line}: {text}" for line, text in converted.by_hand]
        if converted.source != source:
            changed.append(path)
            if only_show:
                _show(path, source, converted.source)
    same = len(files) - len(changed) - len(unread)
    _tell(changed, same, unread, by_hand, only_show)
    return 1 if unread else 0


def _show(path: Path, old: bytes, new: bytes) -> None:
    before = old.decode(errors="replace").splitlines(keepends=True)
    after = new.decode(errors="replace").splitlines(keepends=True)
    sys.stdout.writelines(difflib.unified_diff(before, after, str(path), str(path)))


def _tell(changed: list[Path], same: int, unread: list[str], by_hand: list[str], only_show: bool) -> None:
    if not only_show:
        for path in changed:
            print(f"converted {path}")
    for line in unread:
        print(line, file=sys.stderr)
    if by_hand:
        print("change these lines yourself:", *by_hand, sep="\n  ", file=sys.stderr)
    verb = "would change" if only_show else "changed"
    print(f"{len(changed)} files {verb}, {same} unchanged", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
