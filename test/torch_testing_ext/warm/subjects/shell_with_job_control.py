import os
import signal
import sys

signal.signal(signal.SIGTTOU, signal.SIG_IGN)
child = os.fork()
if child == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(sys.argv[1], sys.argv[1:])
while True:
    status = os.waitpid(child, os.WUNTRACED)[1]
    if not os.WIFSTOPPED(status):
        break
    print("stopped by 20", flush=True)
    os.killpg(child, signal.SIGCONT)
print("ended with", os.waitstatus_to_exitcode(status), flush=True)
