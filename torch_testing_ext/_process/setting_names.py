"""The beginnings of the names of our variables, and the names that processes without ranks read, too.

Those of an aspect are in its module. pytest's plugin imports this in every run, so it imports nothing.
"""

PREFIX = "TORCH_TESTING_EXT_"
# Begins those that this package sets for its own processes.
OWN_PREFIX = "_TORCH_TESTING_EXT_"

# The folder that keeps the files of ranks.
LOGS = f"{PREFIX}LOGS"
# On a cluster with cluster.fake-gpus: the devices that the test would have if they existed.
FAKE_DEVICES = f"{PREFIX}FAKE_DEVICES"
# PyTorch's, for the time limit of each test.
DEFAULT_TIMEOUT = "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"
