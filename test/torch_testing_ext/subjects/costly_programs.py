"""Tests that cost CPU: themselves, in children, in processes that have lost their parents, and by what they share."""

import subprocess
import sys
import time
import types
import unittest

# Computes for some seconds.
BURN = "import time; end = time.process_time() + {}\nwhile time.process_time() < end: pass\n"
# Prints when it has computed, and stays until the process that runs these tests ends.
STAYS = "import sys; print(flush=True); sys.stdin.read()"


def test_nothing():
    pass


def test_itself():
    exec(BURN.format(0.4))


def test_child():
    subprocess.run([sys.executable, "-c", BURN.format(0.4)])


def test_waits():
    time.sleep(0.6)


def test_orphan():
    """The process between ends, so that nobody of ours reaps the one that computes."""
    # It prints first: a process that begins while the next test runs would not count as that test's.
    code = "import os, sys\nif os.fork(): os._exit(0)\nprint(flush=True)\nsys.stdin.readline()\n"
    global orphan
    command = [sys.executable, "-c", f"{code}{BURN.format(0.4)}{STAYS}"]
    orphan = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    orphan.stdout.readline()


def test_orphan_computes():
    orphan.stdin.write(b"\n")
    orphan.stdin.flush()
    orphan.stdout.readline()


def test_starts_a_server():
    global server
    server = subprocess.Popen(
        [sys.executable, "-c", BURN.format(0.4) + STAYS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    server.stdout.readline()


def test_imports():
    """The first of a process that imports large packages."""
    sys.modules.update((name, types.ModuleType(name)) for name in map("of_a_large_package_{}".format, range(30)))
    exec(BURN.format(0.4))


class SharingTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        exec(BURN.format(0.9))

    def test_a(self):
        pass

    def test_b(self):
        pass

    def test_c(self):
        pass


def test_end():
    server.kill()
    server.wait()
    orphan.stdin.close()
    orphan.stdout.close()
