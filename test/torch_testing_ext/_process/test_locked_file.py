"""Locks on files. Each opened file has a lock of its own, so one process can have two that conflict."""

import os
import tempfile
import unittest
from pathlib import Path

from torch_testing_ext._process import locks
from torch_testing_ext._process.locks import OwnedFile


class TestLockedFile(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name, "file")

    def test_one_writer_or_many_readers(self) -> None:
        with self.path.open("w") as first, self.path.open() as second, self.path.open() as third:
            self.assertTrue(locks.try_lock(first))
            self.assertFalse(locks.try_lock(second))
            self.assertFalse(locks.try_lock(second, shared=True))
            self.assertTrue(locks.is_locked(second))
            locks.unlock(first)
            self.assertTrue(locks.try_lock(second, shared=True))
            self.assertTrue(locks.try_lock(third, shared=True))
            self.assertFalse(locks.try_lock(first))
            self.assertFalse(locks.is_locked(first))

    def test_asking_leaves_no_lock(self) -> None:
        with self.path.open("w") as first, self.path.open() as second:
            self.assertFalse(locks.is_locked(first))
            self.assertTrue(locks.try_lock(second))

    def test_opened_is_locked_and_read_from_its_start(self) -> None:
        self.path.write_text("before")
        with locks.open_locked(self.path, "a+") as file, self.path.open() as other:
            self.assertEqual(file.read(), "before")
            self.assertFalse(locks.try_lock(other))
        with self.path.open() as other:
            self.assertTrue(locks.try_lock(other))

    def test_a_lock_waits_for_the_process_that_has_it(self) -> None:
        reading, writing = os.pipe()
        with self.path.open("w") as file:
            locks.lock(file)
            if (child := os.fork()) == 0:
                with self.path.open() as own:
                    os.write(writing, b"waits")
                    locks.lock(own)
                    os.write(writing, b"locked")
                os._exit(0)
            self.assertEqual(os.read(reading, 5), b"waits")
            os.set_blocking(reading, False)
            self.assertRaises(BlockingIOError, os.read, reading, 6)
            locks.unlock(file)  # the child has inherited it
        os.set_blocking(reading, True)
        self.assertEqual(os.read(reading, 6), b"locked")
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        os.close(reading)
        os.close(writing)


class TestOwnedFile(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name, "file")
        self.first, self.second = OwnedFile(self.path), OwnedFile(self.path)
        self.addCleanup(self.first.close)
        self.addCleanup(self.second.close)

    def test_others_see_the_owner(self) -> None:
        self.assertFalse(self.second.is_locked())
        self.assertTrue(self.first.try_lock("a longer owner"))
        self.assertFalse(self.second.try_lock("the second"))
        self.assertEqual(self.second.owner(), "a longer owner")
        self.assertTrue(self.second.is_locked())
        self.first.unlock()
        self.assertEqual(self.second.owner(), "")
        self.assertTrue(self.second.try_lock("another"))
        self.assertEqual(self.first.owner(), "another")

    def test_a_file_that_was_deleted_is_made_again(self) -> None:
        self.path.unlink()
        self.assertTrue(self.first.try_lock("the first"))
        self.assertFalse(self.second.try_lock("the second"))
        self.assertEqual(self.path.read_text(), "the first")

    def test_links_are_not_followed(self) -> None:
        link = self.path.with_name("link")
        link.symlink_to(self.path)
        self.assertRaises(OSError, OwnedFile, link)


if __name__ == "__main__":
    unittest.main()
