import os
import subprocess
import time
import unittest


class T(unittest.TestCase):
    def test_leaks(self):
        left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print(left.pid)

    def test_leaks_a_fork(self):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            while True:
                time.sleep(1000)
        print(pid)

    def test_leaks_what_ignores_sigterm(self):
        command = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1000; done"]
        left = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
        left.stdout.readline()
        print(left.pid)

    def test_has_a_helper_that_ends(self):
        subprocess.Popen(["true"])
