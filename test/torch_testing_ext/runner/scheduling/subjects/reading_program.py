import contextlib
import glob
import os
import sys

from torch_testing_ext._process import file_reads

file_reads.begin(sys.argv[1])
import module  # noqa: F401 (it is read)

for name in "a.txt", "absent.txt":
    with contextlib.suppress(OSError):
        open(name).close()
open("out.txt", "w").close()
open("out.txt").close()
glob.glob("data/*")
fd = os.open("b.txt", os.O_RDONLY)
if os.fork() == 0:
    open("in_child.txt").close()
    os.execv(sys.executable, [sys.executable, "-c", "pass"])
os.wait()
