"""What makes the stamps of a process stale."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

from torch_testing_ext.runner.warm.stamps import Stamps


class StampsTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()
        self.on_path = self.root / "on_path"
        self.elsewhere = self.root / "elsewhere"
        for made in (self.on_path, self.elsewhere):
            made.mkdir()
        self.module = self.on_path / "stamped_module.py"
        self.module.write_text("import os\nVALUE = 1\n")
        self.data = self.elsewhere / "data"
        self.data.write_text("1")
        path = mock.patch.object(sys, "path", [str(self.on_path), *sys.path])
        path.start()
        self.addCleanup(path.stop)
        self.addCleanup(sys.modules.pop, "stamped_module", None)
        self.stamps = Stamps()
        self.stamps.begin()
        try:
            importlib.import_module("stamped_module")
            self.data.read_text()
            os.listdir(self.elsewhere)
            for name in ("no_such_module", "importlib_metadata_of_nobody"):
                importlib.util.find_spec(name)
            (self.elsewhere / "missing").exists()
            with self.assertRaises(FileNotFoundError):
                (self.elsewhere / "missing").read_text()
        finally:
            self.stamps.end()

    def test_nothing_has_changed(self) -> None:
        self.assertIsNone(self.stamps.changed())

    def test_a_file_is_replaced(self) -> None:
        """With the same size and time of change."""
        for file in (self.module, self.data):
            with self.subTest(file.name):
                before = os.stat(file)
                draft = file.with_name("draft")
                draft.write_bytes(b"#" * before.st_size)
                os.utime(draft, ns=(before.st_atime_ns, before.st_mtime_ns))
                os.rename(draft, file)
                self.assertEqual(self.stamps.changed(), str(file))
                self.stamps.files[str(file)] = None
                file.unlink()

    def test_a_module_is_deleted(self) -> None:
        self.module.unlink()
        self.assertEqual(self.stamps.changed(), str(self.module))

    def test_a_file_that_was_missing_appears(self) -> None:
        (self.elsewhere / "missing").write_text("")
        self.assertEqual(self.stamps.changed(), str(self.elsewhere / "missing"))

    def test_names_in_a_folder_that_was_listed(self) -> None:
        (self.elsewhere / "another").write_text("")
        self.assertEqual(self.stamps.changed(), str(self.elsewhere))

    def test_names_in_a_folder_of_the_path(self) -> None:
        """Those that an import may find, and what is installed."""
        for name, counts in (
            ("test_new.py", False),
            ("results.json", False),
            ("another_package/", False),
            ("os.py", True),
            ("stamped_module/", True),
            ("no_such_module.py", True),
            ("new-1.0.dist-info/", True),
            ("new.pth", True),
        ):
            with self.subTest(name):
                path = self.on_path / name
                path.mkdir() if name.endswith("/") else path.write_text("")
                self.assertEqual(self.stamps.changed(), str(self.on_path) if counts else None)
                path.rmdir() if name.endswith("/") else path.unlink()

    def test_what_was_read_before(self) -> None:
        """By Python itself, when it started."""
        self.assertIn(os.path.join(sys.prefix, "pyvenv.cfg"), self.stamps.files)
        self.assertTrue(any(name.endswith(".pth") for name in self.stamps.files))

    def test_modules_and_libraries(self) -> None:
        self.stamps.add_modules()
        self.assertIn(unittest.__file__, self.stamps.files)
        self.assertTrue(any(".so" in name for name in self.stamps.files))

    def test_files_that_may_have_changed_without_a_trace(self) -> None:
        """On file systems with times in whole seconds, a change within the second of the stamp leaves none."""
        self.assertIsNotNone(self.stamps.unsettled())
        self._age()
        self.assertIsNone(self.stamps.unsettled())

    def _age(self) -> None:
        """Have everything been written long before this process read it."""
        moment = time.time() + 3600
        self.stamps._started = moment
        patched = mock.patch.object(time, "time", lambda: moment)
        patched.start()
        self.addCleanup(patched.stop)

    def test_an_event_that_cannot_be_read(self) -> None:
        self.stamps._on_error("open")
        self.assertEqual(self.stamps.changed(), "/")

    def test_nothing_is_noted_after_the_end(self) -> None:
        path = self.elsewhere / "later"
        path.write_text("")
        path.read_text()
        self.assertNotIn(str(path), self.stamps.files)
        self.assertNotIn(self.stamps._searched, sys.meta_path)


if __name__ == "__main__":
    unittest.main()
