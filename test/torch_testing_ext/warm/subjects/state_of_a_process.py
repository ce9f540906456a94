import sys

print(sorted(globals().items(), key=str))
print(sorted(sys.modules))
import json  # noqa: F401 (one module more)

print(sorted(sys.modules))
print(sys.argv, sys.orig_argv[1:], sys.path, sys.flags, sys.executable, sys.stdin, sys.stdout, sys.stderr)
print([(s.line_buffering, s.write_through, s.errors) for s in (sys.stdin, sys.stdout, sys.stderr)], sys.stdin.read())
import atexit
import multiprocessing
import os
import resource
import signal
import threading
import warnings

print(os.getcwd(), os.umask(0), sorted(os.environ.items()), os.getpriority(0, 0), os.sched_getaffinity(0))
print([signal.getsignal(n) for n in range(1, 32)], signal.pthread_sigmask(0, []), warnings.filters)
print([resource.getrlimit(n) for n in range(10)], threading.active_count(), threading.main_thread().name)
child = multiprocessing.get_context("fork").Process(target=print, args=("child",), kwargs={"flush": True})
sys.stdout.flush()
child.start()
child.join()
atexit.register(print, "bye")
import torch

print(child.exitcode, sorted(sys.modules), warnings.filters, torch.get_num_threads())
sys.stdout.write("no newline")
sys.exit(300)
