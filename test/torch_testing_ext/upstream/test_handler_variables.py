"""The variables that PyTorch's run_test.py sets for a few files, in a run of a checkout."""

import os
import unittest
from pathlib import Path
from unittest import mock

from kit.files import FolderCase

from torch_testing_ext.upstream import handler_variables

FILE = f"/pytorch/test/{handler_variables.FILES[0]}"


class HandlerVariablesTest(FolderCase):
    def setUp(self):
        super().setUp()
        patched = mock.patch.dict(os.environ)
        patched.start()
        self.addCleanup(patched.stop)
        for name in ("BACKEND", "WORLD_SIZE", "TEMP_DIR"):
            os.environ.pop(name, None)

    def test_the_import(self):
        """As the file's own check wants them; the folder is for the import alone."""
        with handler_variables.for_import(FILE):
            self.assertEqual((os.environ["BACKEND"], os.environ["WORLD_SIZE"]), ("gloo", "3"))
            folder = Path(os.environ["TEMP_DIR"])
            self.assertTrue((folder / "barrier").is_dir())
        self.assertFalse(folder.exists())
        self.assertNotIn("TEMP_DIR", os.environ)
        self.assertIn("BACKEND", os.environ)

    def test_each_test_has_a_folder(self):
        handler_variables.use_folder(FILE, self.root)
        self.assertEqual(os.environ["TEMP_DIR"], str(self.root))
        self.assertTrue((self.root / "test_dir").is_dir())

    def test_what_the_user_has_set_stays(self):
        os.environ.update(BACKEND="nccl", TEMP_DIR="/tmp/mine")
        with handler_variables.for_import(FILE):
            handler_variables.use_folder(FILE, self.root)
        self.assertEqual((os.environ["BACKEND"], os.environ["TEMP_DIR"]), ("nccl", "/tmp/mine"))
        del os.environ["TEMP_DIR"]
        handler_variables.use_folder(FILE, self.root)
        self.assertEqual((os.environ["BACKEND"], os.environ["WORLD_SIZE"]), ("nccl", "3"))

    def test_other_files_get_none(self):
        with handler_variables.for_import("/pytorch/test/distributed/test_store.py"):
            handler_variables.use_folder("/pytorch/test/distributed/test_store.py", self.root)
            self.assertNotIn("BACKEND", os.environ)
            self.assertNotIn("TEMP_DIR", os.environ)


if __name__ == "__main__":
    unittest.main()
