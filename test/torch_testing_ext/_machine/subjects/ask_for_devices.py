import ctypes
import os
import sys

from torch_testing_ext._machine import accelerators

ask = accelerators._cuda_driver_is_initialised
answers = [ask()]
driver = ctypes.CDLL(sys.argv[1])
answers.append(ask())
driver.cuInit(0)
answers.append(ask())
print(answers, flush=True)
if os.fork() == 0:
    ctypes.c_int.in_dll(driver, "is_initialised").value = 0  # a fork cannot use what its parent has initialised
    print([ask()], flush=True)
    os._exit(0)
os.wait()
