"""The paths of PyTorch that the suites, the edits and the patches name, and whether PyTorch still has them.

    python patches/pytorch_paths.py --pytorch CHECKOUT    # record them anew, for a checkout of PyTorch's `main`

`pytorch_paths.json` holds the record: by path, where the file was seen last, or null if PyTorch has it no more; and the
suites that PyTorch's TEST_LINTER exempts from its rules.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import hardware_rules

HERE = Path(__file__).parent
RECORD = HERE / "pytorch_paths.json"
SUITES = HERE.parent / "test" / "distributed"
_TARGET = re.compile(r"^\+\+\+ b/(\S+)$", re.MULTILINE)
_TARGET_OF_TEST = re.compile(r"^# In PyTorch: (\S+)$", re.MULTILINE)
_FILE_OF_EDIT = re.compile(r'^FILE = "(\S+)"$', re.MULTILINE)


def named() -> dict[str, set[str]]:
    """By path of PyTorch, the suites, edits and patches that name it."""
    by_path: dict[str, set[str]] = {}
    for path, name in _names():
        by_path.setdefault(path, set()).add(name)
    return by_path


def suites() -> Iterator[Path]:
    """Our files of tests at PyTorch's paths."""
    return (file for file in sorted(SUITES.rglob("test_*.py")) if "properties" not in file.parts)


def path_of(suite: Path) -> str:
    """The path of a suite in PyTorch."""
    return f"test/distributed/{suite.relative_to(SUITES).as_posix()}"


def _names() -> Iterator[tuple[str, str]]:
    yield from ((path_of(file), "suite") for file in suites())
    for file in sorted((HERE / "test-suite").glob("[0-9]*.py")):
        yield from ((path, file.name) for path in _FILE_OF_EDIT.findall(file.read_text(encoding="utf-8")))
    for file in sorted((HERE / "tests").glob("test_*.py")):
        yield from ((path, file.name) for path in _TARGET_OF_TEST.findall(file.read_text(encoding="utf-8")))
    for file in sorted(HERE.glob("*.patch")):
        yield from ((path, file.name) for path in _TARGET.findall(file.read_text(encoding="utf-8")))


def record(checkout: Path) -> dict[str, object]:
    """The record for a checkout as it is now."""
    shown = ["git", "-C", str(checkout), "show", "--no-patch", "--format=%H %cs", "HEAD"]
    commit, date = subprocess.run(shown, capture_output=True, text=True, check=True).stdout.split()
    paths = {path: commit if (checkout / path).is_file() else None for path in sorted(named())}
    exempt = sorted({path_of(file) for file in suites()} & hardware_rules.exempt(checkout))
    today = datetime.date.today().isoformat()
    return {"recorded": today, "of": f"pytorch/pytorch, {date}", "paths": paths, "exempt": exempt}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pytorch", type=Path, required=True, metavar="CHECKOUT", help="a checkout of PyTorch's main")
    made = record(parser.parse_args(words).pytorch)
    RECORD.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    gone = [path for path, commit in made["paths"].items() if commit is None]  # type: ignore[attr-defined]
    print("\n".join(f"gone: {path}, named by {', '.join(sorted(named()[path]))}" for path in gone) or "all are there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
