"""What .ci/release_files.py says of the files of a release, and what it writes beside them."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import torch_testing_ext

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
sys.path.append(str(ROOT / ".ci"))

import release_files  # noqa: E402

NAME = "torch_testing_ext"
METADATA = """Metadata-Version: 2.4
Name: torch-testing-ext
Version: 1.2.0
License-Expression: BSD-3-Clause
Requires-Dist: torch>=2.11
Requires-Dist: rich>=13; extra == "ui"
Requires-Dist: torch-testing-ext[ui]; extra == "test"
"""
WHEEL = {
    f"{NAME}/__init__.py": "",
    f"{NAME}/py.typed": "",
    f"{NAME}_points.py": "",
    f"{NAME}-1.2.0.dist-info/METADATA": METADATA,
    f"{NAME}-1.2.0.dist-info/licenses/LICENSE": "BSD",
}
SDIST = (f"{NAME}-1.2.0/pyproject.toml", f"{NAME}-1.2.0/test/test_x.py")
CHANGELOG = "# Changelog\n\n## 1.2.0 (2026-12-01)\n"


class ReleaseFilesTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dist = Path(folder.name)

    def write(self, wheel=f"{NAME}-1.2.0-py3-none-any.whl", files=WHEEL, sdist=SDIST):
        for old in self.dist.iterdir():
            old.unlink()
        with zipfile.ZipFile(self.dist / wheel, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        with tarfile.open(self.dist / f"{NAME}-1.2.0.tar.gz", "w:gz") as archive:
            for name in sdist:
                archive.addfile(tarfile.TarInfo(name), io.BytesIO())

    def faults(self, tag="v1.2.0", changelog=CHANGELOG):
        return [*release_files.faults(self.dist, tag, changelog)]

    def test_faults(self):
        self.write()
        self.assertEqual(self.faults(), [])
        self.assertEqual(self.faults(tag=""), [])
        self.assertEqual(self.faults(tag="", changelog="## 1.2.0 (unreleased)\n"), [])
        self.assertEqual(self.faults(tag="v1.2.1"), ["the tag v1.2.1 is not v1.2.0"])
        no_date = ["CHANGELOG.md has no section for 1.2.0 with a date"]
        self.assertEqual(self.faults(changelog="## 1.2.0 (unreleased)\n"), no_date)
        self.assertEqual(self.faults(changelog="## 1.2.0-rc1 (2026-12-01)\n"), no_date)

    def test_contents(self):
        for more, fault in (
            ("test/test_x.py", "test/test_x.py is in the wheel"),
            (f"{NAME}/__pycache__/a.pyc", f"{NAME}/__pycache__/a.pyc is in the wheel"),
            (f"{NAME}_other.py", f"{NAME}_other.py is in the wheel"),
        ):
            self.write(files={**WHEEL, more: ""})
            self.assertEqual(self.faults(), [fault])
        self.write(sdist=(*SDIST, f"{NAME}-1.2.0/.venv/bin/python"))
        self.assertEqual(self.faults(), [".venv/bin/python is in the sdist"])
        lacking = {name: text for name, text in WHEEL.items() if "typed" not in name and "LICENSE" not in name}
        self.write(files=lacking)
        self.assertEqual(self.faults(), [f"{NAME}/py.typed is not in the wheel", "the licence is not in the wheel"])
        self.write(wheel=f"{NAME}-1.2.0-cp312-cp312-linux_x86_64.whl")
        self.assertIn("it should be torch_testing_ext-1.2.0-py3-none-any.whl", self.faults()[0])
        (self.dist / f"{NAME}-1.1.0.tar.gz").touch()
        self.assertEqual(self.faults(), ["there are 1 wheels and 2 sdists, not one of each"])

    def test_what_is_written(self):
        self.write()
        changelog = self.dist.with_suffix(".md")
        changelog.write_text(CHANGELOG)
        self.addCleanup(changelog.unlink)
        with mock.patch.object(release_files, "CHANGELOG", changelog), redirect_stdout(io.StringIO()) as said:
            self.assertEqual(release_files.main([str(self.dist), "v1.2.0"]), 0)
            self.assertEqual(len(said.getvalue().splitlines()), 4)
            self.assertEqual(release_files.main([str(self.dist), "v1.3.0"]), 1)
        done = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=self.dist, capture_output=True)
        self.assertEqual((done.returncode, done.stdout.count(b": OK")), (0, 3), done)
        (file,) = self.dist.glob("*.cdx.json")
        bill = json.loads(file.read_text())
        wheel = self.dist / f"{NAME}-1.2.0-py3-none-any.whl"
        about = bill["metadata"]["component"]
        self.assertEqual((about["purl"], about["licenses"][0]["license"]["id"]), (BILL_OF, "BSD-3-Clause"))
        self.assertEqual(about["hashes"][0]["content"], hashlib.sha256(wheel.read_bytes()).hexdigest())
        needs = {part["name"]: part["scope"] for part in bill["components"]}
        self.assertEqual(needs, {"torch": "required", "rich": "optional"})
        self.assertEqual(bill["dependencies"][0]["dependsOn"], [part["bom-ref"] for part in bill["components"]])


BILL_OF = "pkg:pypi/torch-testing-ext@1.2.0"


if __name__ == "__main__":
    unittest.main()
