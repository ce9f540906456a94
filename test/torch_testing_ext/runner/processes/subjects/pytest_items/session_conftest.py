import os
import shutil
import tempfile
import time


def pytest_sessionstart(session):
    session.folder = tempfile.mkdtemp()


def pytest_sessionfinish(session, exitstatus):
    shutil.rmtree(session.folder)
    names = [item.name for item in session.items]
    if len(names) > 2:
        return  # the session in which the tests are listed
    if "test_raises_at_the_end" in names:
        raise ValueError("at the end")
    if "test_exits_at_the_end" in names:
        os._exit(0)
    if "test_fails_at_the_end" in names:
        session.exitstatus = 1
    if "test_hangs_at_the_end" in names:
        time.sleep(1000)
