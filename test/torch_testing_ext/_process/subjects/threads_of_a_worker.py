import _thread
import threading

from torch_testing_ext._process import fork_safety


def verdicts():
    return fork_safety.prepare_to_fork(), fork_safety.check_after_fork()


def test_reader_does_not_count():
    assert verdicts() == (None, None)


def test_another_thread_counts():
    done, started = threading.Event(), threading.Event()
    _thread.start_new_thread(lambda: (started.set(), done.wait()), ())
    started.wait()
    try:
        assert "1 native threads" in str(verdicts()[1])
    finally:
        done.set()
