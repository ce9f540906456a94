"""The names of the variables by which settings reach tests and ranks.

pytest's plugin imports this in every run, so it imports nothing.
"""

PREFIX = "TORCH_TESTING_EXT_"
# Begins those that this package sets for its own processes.
OWN_PREFIX = "_TORCH_TESTING_EXT_"

START = f"{PREFIX}START"
LOGS = f"{PREFIX}LOGS"
STREAM = f"{PREFIX}STREAM"
DEBUG_RANK = f"{PREFIX}DEBUG_RANK"
SANITIZE = f"{PREFIX}SANITIZE"
SANITIZE_ORDER = f"{PREFIX}SANITIZE_ORDER"
SHAKE = f"{PREFIX}SHAKE"
# On a cluster with cluster.fake-gpus: the devices that the test would have if they existed.
FAKE_DEVICES = f"{PREFIX}FAKE_DEVICES"
# The ranks of the world, without communication, that tests run in.
WORLD = f"{OWN_PREFIX}WORLD"
# Ranks write when their collectives began and ended, also those that pass.
LANES = f"{OWN_PREFIX}LANES"
# The runner tries faults in each test.
SWEEP = f"{OWN_PREFIX}SWEEP"
# PyTorch's, for the time limit of each test.
DEFAULT_TIMEOUT = "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"
# How many fake accelerators there are. A user may set it for a file that is run directly.
FAKE_ACCELERATORS = f"{PREFIX}FAKE_ACCELERATORS"
