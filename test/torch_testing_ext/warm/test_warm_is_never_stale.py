"""After any edit, a warm run ends as a cold one: random edits of a project, each followed by both.

TORCH_TESTING_EXT_WARM_EDITS sets how many edits the long test makes, TORCH_TESTING_EXT_WARM_SEED which.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import subprocess
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.files import subject
from kit.warm_runs import WarmBench, settle

pytestmark = pytest.mark.slow

_PROGRAM = subject(__file__, "edited_program.py")
_LEAF = "import json\n\nwith open(f'{__file__[:-7]}data.json') as file:\n    DATA = json.load(file)\n"
_MIDDLE = "from shared.base import Base\n\n\nclass Middle(Base):\n    constant = 1\n"
_SHADOWING = (
    "expecttest.py",
    "random.py",
    "numbers.py",
    "numpy.py",
    "torch.py",
    "shared/json.py",
    "typing_extensions.py",
)


class Project:
    """A project, and the edits that it goes through."""

    def __init__(self, bench: WarmBench, seed: int):
        self.bench, self.random = bench, random.Random(seed)
        self.heavy = "numpy"
        self.environ = dict(bench.environ)
        self.log: list[str] = []
        self._body(), self._middle(), self._data(), self._linked(), self._program()
        bench.write("shared/__init__.py", "")
        bench.write("shared/leaf.py", _LEAF)

    def edits(self) -> list[Callable[[], object]]:
        ours = (self._body, self._signature, self._middle, self._data, self._linked, self._program)
        return [
            *ours,
            self._shadow,
            self._delete,
            self._upgrade,
            self._variable,
            self._twice,
            self._conftest,
            self._plugin,
            self._set,
        ]

    def edit(self) -> str:
        chosen = self.random.choice(self.edits())
        chosen()
        self.log.append(chosen.__name__)
        return chosen.__name__

    def _number(self) -> int:
        return self.random.randrange(100)

    def _write(self, name: str, text: str) -> None:
        """As different editors do: in place, or by a new file; with the time of the old one, sometimes."""
        path = self.bench.project / name
        before = path.stat() if path.exists() else None
        if self.random.random() < 0.5:
            self.bench.write(name, text)
        else:
            draft = self.bench.write(f"{name}.draft", text)
            os.replace(draft, path)
        if before is not None and len(text) != before.st_size and self.random.random() < 0.2:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def _body(self) -> None:
        self._write("shared/base.py", f"class Base:\n    def value(self, x):\n        return x + {self._number()}\n")

    def _signature(self) -> None:
        default = f"        return x * {self._number()} + y\n"
        self._write("shared/base.py", f"class Base:\n    def value(self, x, y={self._number()}):\n{default}")

    def _middle(self) -> None:
        self._write("shared/middle.py", _MIDDLE.replace("1", str(self._number())))

    def _data(self) -> None:
        self._write("shared/data.json", str(self._number()))

    def _linked(self) -> None:
        for number in range(3):
            self.bench.write(f"target{number}.py", f"VALUE = 'target {number}'\n")
        link = self.bench.project / "linked.py"
        link.unlink(missing_ok=True)
        link.symlink_to(f"target{self.random.randrange(3)}.py")

    def _program(self) -> None:
        self._write("test_it.py", _PROGRAM.replace("numpy", self.heavy) + "#" * self.random.randrange(9))

    def _shadow(self) -> None:
        """A module of the project has the name of one that the server has imported; or has it no more."""
        path = self.bench.project / self.random.choice(_SHADOWING)
        if path.exists():
            path.unlink()
        else:
            path.write_text("from math import *\n\nVALUE = 1\n")

    def _delete(self) -> None:
        path = self.bench.project / "shared" / "base.py"
        if path.exists():
            path.unlink()
        else:
            self._body()

    def restore(self) -> None:
        """Undo what hides other edits: a program that cannot import all of its modules shows nothing of them."""
        for name in _SHADOWING:
            (self.bench.project / name).unlink(missing_ok=True)
        if not (self.bench.project / "shared" / "base.py").exists():
            self._body()

    def _upgrade(self) -> None:
        """A package comes, goes, or changes in a folder of PYTHONPATH, before the server's own packages."""
        place = self.bench.packages / "expecttest"
        if place.exists() and self.random.random() < 0.3:
            shutil.rmtree(place)
            return
        place.mkdir(exist_ok=True)
        (place / "__init__.py").write_text(
            f"import unittest\n\nVERSION = {self._number()}\nTestCase = unittest.TestCase\n"
        )

    def _variable(self) -> None:
        self.environ[self.random.choice(("EDITED", "OMP_NUM_THREADS", "EXPECTTEST_ACCEPT"))] = str(
            1 + self._number() % 2
        )

    def _twice(self) -> None:
        self._body()
        self._body()

    def _conftest(self) -> None:
        self._write("conftest.py", f"import builtins\n\nbuiltins.edited = {self._number()}\n")

    def _plugin(self) -> None:
        """A plugin of pytest comes, changes, or goes."""
        facts = self.bench.packages / "edited_plugin-1.0.dist-info"
        if facts.exists() and self.random.random() < 0.3:
            shutil.rmtree(facts)
            return
        effect = self.random.choice(("import pytest; pytest.edited = True", "import os; os.environ['EDITED'] = 'x'"))
        text = f"{effect}\n\n\ndef pytest_unconfigure():\n    print({self._number()}, hasattr(pytest, 'edited'))\n"
        self.bench.install_plugin("edited_plugin", f"import pytest\n{text}")

    def _set(self) -> None:
        """The program sets a variable that the import of torch reads, or does so no more."""
        text = (self.bench.project / "test_it.py").read_text()
        if text.startswith("import os\n"):
            self._write("test_it.py", text.split("\n", 2)[2])
        else:
            line = f"import os\nos.environ['OMP_NUM_THREADS'] = '{1 + self._number() % 3}'\n"
            self._write("test_it.py", line + text)

    def verdict(self, warm: bool, words: tuple[str, ...]) -> tuple[int, str, str, str]:
        result = self.bench.project / "result"
        result.unlink(missing_ok=True)
        done: subprocess.CompletedProcess[str] = self.bench.run(*words, warm=warm, env=self.environ)
        with contextlib.suppress(FileNotFoundError):
            return done.returncode, settle(done.stdout), settle(done.stderr), result.read_text()
        return done.returncode, settle(done.stdout), settle(done.stderr), ""


class NeverStaleTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.bench = WarmBench(Path(folder.name))
        self.addCleanup(self.bench.close)

    def _compare(self, project: Project, words: tuple[str, ...] = ("test_it.py",)) -> None:
        cold, warm = (project.verdict(warm, words) for warm in (False, True))
        code, out, errors, result = warm
        if (begin := errors.removesuffix(cold[2])) and cold[2].startswith(begin):
            warm = code, out, cold[2], result  # it has started again, which repeats what it had printed
        self.assertEqual(warm, cold, f"after {project.log}")

    def test_each_kind_of_edit(self) -> None:
        project = Project(self.bench, 1)
        self._compare(project)
        for edit in project.edits():
            edit()
            project.log.append(edit.__name__)
            self._compare(project)
            project.restore()

    def test_plugins_of_pytest(self) -> None:
        project = Project(self.bench, 2)
        for _ in range(6):
            project._plugin()
            for options in ((), ("-p", "no:edited_plugin")):
                self._compare(project, ("-m", "pytest", "-q", *options, "test_it.py"))

    def test_random_edits(self) -> None:
        seed = int(os.environ.get("TORCH_TESTING_EXT_WARM_SEED", "0"))
        project = Project(self.bench, seed)
        for number in range(int(os.environ.get("TORCH_TESTING_EXT_WARM_EDITS", "100"))):
            if number % 3 == 0:
                project.restore()
            project.edit()
            project.heavy = "torch" if number % 20 == 10 else "numpy"
            if project.heavy == "torch" or number % 20 == 11:
                project._program()
            self._compare(project, ("-m", "pytest", "-q", "test_it.py") if number % 10 == 5 else ("test_it.py",))
        ran = re.search(r"(\d+) runs", self.bench.status())
        assert ran is not None
        self.assertGreater(int(ran[1]), 0)
