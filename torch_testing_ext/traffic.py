"""The communication of a block of a test, as numbers for assertions."""

from torch_testing_ext._testing.bases.traffic_blocks import (
    SeenTraffic as SeenTraffic,
    TrafficError as TrafficError,
    traffic as traffic,
)
