import atexit
import os
import sys
import threading

import torch
import torch.distributed as dist
from beside import number

assert "unittest" not in sys.argv[0] and __name__ == "__main__" and __file__ == sys.argv[0]
assert torch.get_default_dtype() is torch.float32
atexit.register(print, "at exit")
dist.init_process_group("gloo")
# A gloo group that the interpreter has to end may abort the process: its threads still run then.
atexit.register(dist.destroy_process_group)
tensor = torch.tensor([dist.get_rank() + number])
dist.all_reduce(tensor)
# In one write: under torchrun, the ranks share a pipe.
sys.stdout.write(" ".join(["sum", str(tensor.item()), *sys.argv[1:], str(os.environ.get("ADDED"))]) + "\n")
if "sleep" in sys.argv and dist.get_rank():
    threading.Event().wait()
if "fail" in sys.argv and dist.get_rank():
    raise ValueError("as asked")
if "exit" in sys.argv:
    sys.exit(3 if dist.get_rank() else 0)
sys.exit(0)
