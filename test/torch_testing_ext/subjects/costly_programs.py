"""Tests that cost CPU: themselves, in children, and in processes that have lost their parents."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Computes for some seconds.
BURN = "import time; end = time.process_time() + {}\nwhile time.process_time() < end: pass\n"


def burn(seconds, wait=True):
    child = subprocess.Popen([sys.executable, "-c", BURN.format(seconds)])
    return child.wait() if wait else child


def test_nothing():
    pass


def test_itself():
    exec(BURN.format(0.3))


def test_child():
    burn(0.3)


def test_waits():
    time.sleep(0.5)


def test_orphan():
    # Its parent ends, so that nobody of ours reaps it.
    global orphan
    code = (
        """import os, sys, time
if os.fork(): os._exit(0)
print(os.getpid(), flush=True)
os.close(1)
sys.stdin.read()
""".strip()
        + chr(10)
        + BURN.format(0.3)
        + "time.sleep(60)"
    )
    orphan = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    orphan.pid_of_grandchild = int(orphan.stdout.readline())
    orphan.wait()


def test_orphan_computes():
    orphan.stdin.close()
    stat = Path(f"/proc/{orphan.pid_of_grandchild}/stat")
    while sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13])) < 28:
        time.sleep(0.05)


def test_orphan_ends():
    os.kill(orphan.pid_of_grandchild, 9)
    # A process further up may adopt it and never reap it.
    stat = Path(f"/proc/{orphan.pid_of_grandchild}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.05)


def test_skips():
    pytest.skip("no")


def test_fails():
    raise AssertionError
