"""Folders in shared places: only one of this user, which others cannot write to and which is no link, is used."""

import errno
import fcntl
import os
import socket
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from torch_testing_ext._process.private_folders import (
    UnsafeFolder,
    locked_folder,
    make_locked,
    make_private,
    remove_left,
    socket_name,
)
from torch_testing_ext.common_utils import run_tests


class PrivateFoldersTest(unittest.TestCase):
    def setUp(self):
        shared = tempfile.TemporaryDirectory(prefix="torch_testing_ext_test_")
        self.addCleanup(shared.cleanup)
        self.shared = Path(shared.name)

    def test_names_of_sockets(self):
        """Also of a path that is too long for an address, by a system that shows no descriptors."""
        deep = self.shared / ("deep" * 30)
        deep.mkdir()
        for shows in (True, False):
            path = str(deep / f"socket_{shows}")
            with (
                self.subTest(shows),
                mock.patch("os.path.isdir", return_value=shows),
                socket.socket(socket.AF_UNIX) as listener,
            ):
                with socket_name(path) as name:
                    self.assertLess(len(name), 100)
                    self.assertEqual(name.startswith("/proc/"), shows)
                    listener.bind(name)
                self.assertTrue(os.path.exists(path))
                self.assertFalse(os.path.exists(os.path.dirname(name)))
        with socket_name(str(self.shared / "short")) as name:
            self.assertEqual(name, str(self.shared / "short"))

    def test_which_folders_are_used(self):
        self.assertEqual(make_private(self.shared / "a" / "new").stat().st_mode & 0o777, 0o700)
        self.assertEqual(make_private(self.shared / "a" / "new"), self.shared / "a" / "new")  # that of an earlier run
        (self.shared / "file").touch()
        (self.shared / "link").symlink_to(self.shared / "a")
        (self.shared / "dangling").symlink_to(self.shared / "nowhere")
        for name in "file", "link", "dangling":
            with self.subTest(name), self.assertRaisesRegex(UnsafeFolder, "is not a folder of this user"):
                make_private(self.shared / name)
        for mode in 0o777, 0o720, 0o702, 0o1777:
            (self.shared / "a").chmod(mode)
            with self.subTest(oct(mode)), self.assertRaisesRegex(UnsafeFolder, "can be written to by other users"):
                make_private(self.shared / "a")
        (self.shared / "a").chmod(0o755)
        make_private(self.shared / "a")
        with mock.patch.object(os, "getuid", lambda: 12345), self.assertRaisesRegex(UnsafeFolder, "not a folder of"):
            make_private(self.shared / "a")

    def test_what_is_removed(self):
        """Folders of processes that were killed: their locks are free, or they are empty and old."""
        base = str(self.shared)
        used, lock = make_locked("run", base)
        self.addCleanup(os.close, lock)
        left, fd = make_locked("run", base)
        (left / "file").touch()
        os.close(fd)
        for name in "run-without-lock", "run-old", "run-full", "other":
            (self.shared / name).mkdir()
        (self.shared / "run-full" / "file").touch()
        (self.shared / "run-link").symlink_to(left)
        for name in "run-old", "run-full":
            os.utime(self.shared / name, (1, 1))
        with locked_folder("run", base) as own:
            (own / "file").touch()
            names = ("other", "run-full", "run-link", "run-without-lock", used.name, own.name)
            self.assertEqual(sorted(names), sorted(os.listdir(base)))
        self.assertFalse(own.exists())
        self.assertEqual(remove_left(self.shared, "run"), [])

    def test_files_that_cannot_be_locked(self):
        """Some network file systems have no locks: the folder is used, and nobody removes it for another process."""
        refuses = OSError(errno.ENOSYS, "no locks")
        with mock.patch.object(fcntl, "flock", side_effect=refuses), locked_folder("run", str(self.shared)) as own:
            self.assertEqual(remove_left(self.shared, "run"), [])
            self.assertTrue(own.is_dir())
        self.assertFalse(own.exists())


if __name__ == "__main__":
    run_tests()
