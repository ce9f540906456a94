"""accelerate's way, in miniature: a command that launches a script, and its exit code."""

import subprocess
import sys

DEFAULT_LAUNCH_COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def execute_subprocess_async(cmd):
    done = subprocess.run(cmd, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"'{' '.join(cmd)}' failed with returncode {done.returncode}\n{done.stderr}")
