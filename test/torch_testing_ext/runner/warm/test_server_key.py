"""Which runs share a server."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from torch_testing_ext.runner.warm import server_key


def _key() -> str:
    return server_key.server_key(sys.path, os.environ)


@contextlib.contextmanager
def _umask() -> Iterator[None]:
    before = os.umask(0o027)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def _limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def _folder() -> Iterator[None]:
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


class ServerKeyTest(unittest.TestCase):
    def test_what_needs_another_server(self) -> None:
        rows: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
            "a variable": lambda: mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "17"}),
            "a variable of a library that nobody knows": lambda: mock.patch.dict(os.environ, {"MY_LIBRARY": "17"}),
            "sys.path": lambda: mock.patch.object(sys, "path", ["/somewhere", *sys.path]),
            "the version of this package": lambda: mock.patch.object(server_key, "__version__", "other"),
            "an option of Python": lambda: mock.patch.dict(sys._xoptions, {"dev": True}),
            "the file mode mask": _umask,
            "a limit": _limit,
            "the working folder": _folder,
        }
        before = _key()
        for what, changed in rows.items():
            with self.subTest(what):
                with changed():
                    self.assertNotEqual(_key(), before)
                self.assertEqual(_key(), before)

    def test_another_terminal(self) -> None:
        before = _key()
        with mock.patch.dict(os.environ, {"TERM": "vt52", "COLUMNS": "17", "SSH_TTY": "/dev/pts/17", "SHLVL": "17"}):
            self.assertEqual(_key(), before)

    def test_servers_of_a_project(self) -> None:
        """Those of an interpreter."""
        key = server_key.project_key(Path("/a"))
        self.assertNotEqual(key, server_key.project_key(Path("/b")))
        with mock.patch.object(sys, "executable", "/other/python"):
            self.assertNotEqual(key, server_key.project_key(Path("/a")))


if __name__ == "__main__":
    unittest.main()
