"""Traffic: what a block of a test communicates, as numbers for assertions."""

from torch_testing_ext._testing.bases.traffic_blocks import (
    SeenTraffic as SeenTraffic,
    TrafficError as TrafficError,
    traffic as traffic,
)
