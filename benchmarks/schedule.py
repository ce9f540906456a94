"""Simulates how busy the schedule of run_test.py keeps the devices. Needs no process and no device.

    python benchmarks/schedule.py [--units N] [--seeds N]

600 units with a realistic distribution of durations and world sizes on 8 and 64 devices. The lower bound of a makespan
is the larger of two times: all work divided by all devices, and the longest unit. The output is the makespan over this
bound: of the schedule with known durations, with guessed durations (off by up to a factor of two) and with none; of
units in the order of their files (FIFO); and of one unit at a time, as PyTorch's runner does it.

Then the same units on several nodes, where a unit has to fit on one of them: with one queue for all nodes, as --cluster
does it, and dealt out to the nodes beforehand, as static shards would.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch_testing_ext.runner.model import Test, TestId, Unit
from torch_testing_ext.runner.scheduling.forecasts import forecast
from torch_testing_ext.runner.scheduling.leases import Leases
from torch_testing_ext.runner.scheduling.node_leases import NodeLeases
from torch_testing_ext.runner.scheduling.unit_queue import Queue

TARGET = 1.05
MACHINES = (8, 64)
CLUSTERS = ((2, 4), (4, 4), (8, 8), (16, 8))  # nodes, and devices of each
WORLD_SIZES = {1: 40, 2: 30, 4: 20, 8: 10}  # weights, in percent
MEDIAN, SPREAD, LONGEST = 3.0, 1.3, 120.0  # seconds; log-normal: a few tests take most of the time


def draw_units(seed: int, count: int) -> list[Unit]:
    """Random units, each with its true duration."""
    rng = random.Random(seed)
    return [
        Unit(number, (_test(number, rng),), seconds=min(LONGEST, MEDIAN * rng.lognormvariate(0, SPREAD)))
        for number in range(count)
    ]


def _test(number: int, rng: random.Random) -> Test:
    size = rng.choices(list(WORLD_SIZES), list(WORLD_SIZES.values()))[0]
    return Test(TestId("test_x.py", "XTest", f"test_{number}"), world_size=size, devices=size)


def lower_bound(units: Iterable[Unit], devices: int) -> float:
    """No schedule can have a shorter makespan."""
    truth = [(unit.seconds or 0.0, unit.devices) for unit in units]
    return max(sum(seconds * width for seconds, width in truth) / devices, max(seconds for seconds, _ in truth))


def ours(units: list[Unit], devices: int, guess: Callable[[float], float | None]) -> float:
    """The makespan if the queue expects `guess(seconds)` for a unit that takes `seconds`."""
    truth = {unit.number: unit.seconds or 0.0 for unit in units}
    leases = Leases(tuple(map(str, range(devices))), 1)
    queue = Queue([replace(unit, seconds=guess(truth[unit.number])) for unit in units], leases)
    starts = forecast(queue, leases, lambda unit: truth[unit.number])
    return max(start.ended for start in starts)


def on_nodes(units: list[Unit], nodes: int, devices: int) -> float:
    """The makespan with one queue for several nodes."""
    leases = NodeLeases()
    for number in range(nodes):
        leases.add(f"node{number}", tuple(map(str, range(devices))), 1)
    queue = Queue(units, leases)
    return max(start.ended for start in forecast(queue, leases, lambda unit: unit.seconds or 0.0))


def dealt_out(units: list[Unit], nodes: int, devices: int) -> float:
    """The makespan if each unit is dealt to the node with the least work, the longest first, before the run begins."""
    shares: list[list[Unit]] = [[] for _ in range(nodes)]
    work = [0.0] * nodes
    for unit in sorted(units, key=lambda one: -(one.seconds or 0.0)):
        least = work.index(min(work))
        shares[least].append(unit)
        work[least] += (unit.seconds or 0.0) * unit.devices
    return max(ours(share, devices, lambda seconds: seconds) for share in shares if share)


def in_order_of_files(units: list[Unit], devices: int) -> float:
    """FIFO: the next unit waits until it fits, and all later units wait for it."""
    now, free = 0.0, devices
    running: list[tuple[float, int]] = []
    for unit in units:
        while free < unit.devices:
            now, width = heapq.heappop(running)
            free += width
        free -= unit.devices
        heapq.heappush(running, (now + (unit.seconds or 0.0), unit.devices))
    return max(end for end, _ in running)


def one_at_a_time(units: list[Unit], devices: int) -> float:
    return sum(unit.seconds or 0.0 for unit in units)


def guessing(seed: int) -> Callable[[float], float]:
    """A function that returns a duration with a random error of up to a factor of two."""
    rng = random.Random(seed)
    return lambda seconds: seconds * 2 ** rng.uniform(-1, 1)


def ratios(devices: int, count: int, seed: int) -> dict[str, float]:
    """The makespan of each schedule, divided by the lower bound."""
    units = draw_units(seed, count)
    bound = lower_bound(units, devices)
    makespans = {
        "ours, durations known": ours(units, devices, lambda seconds: seconds),
        "ours, durations guessed": ours(units, devices, guessing(seed)),
        "ours, nothing known": ours(units, devices, lambda seconds: None),
        "FIFO": in_order_of_files(units, devices),
        "one at a time": one_at_a_time(units, devices),
    }
    return {name: makespan / bound for name, makespan in makespans.items()}


def ratios_on_nodes(nodes: int, devices: int, count: int, seed: int) -> dict[str, float]:
    units = [unit for unit in draw_units(seed, 2 * count) if unit.devices <= devices][:count]
    bound = lower_bound(units, nodes * devices)
    return {
        "one queue": on_nodes(units, nodes, devices) / bound,
        "dealt out beforehand": dealt_out(units, nodes, devices) / bound,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate how busy the schedule keeps the devices.")
    parser.add_argument("--units", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    worst_of_ours = 0.0
    for devices in MACHINES:
        runs = [ratios(devices, arguments.units, seed) for seed in range(arguments.seeds)]
        print(f"{arguments.units} units on {devices} devices, {arguments.seeds} seeds: makespan / lower bound")
        for name in runs[0]:
            found = [run[name] for run in runs]
            print(f"  {name:24} median {statistics.median(found):7.3f}   worst {max(found):7.3f}")
        worst_of_ours = max(worst_of_ours, *(run["ours, durations known"] for run in runs))
    for nodes, devices in CLUSTERS:
        found = [ratios_on_nodes(nodes, devices, arguments.units, seed) for seed in range(arguments.seeds)]
        print(f"{arguments.units} units on {nodes} nodes of {devices} devices, {arguments.seeds} seeds:")
        for name in found[0]:
            each = [run[name] for run in found]
            print(f"  {name:24} median {statistics.median(each):7.3f}   worst {max(each):7.3f}")
        worst_of_ours = max(worst_of_ours, *(run["one queue"] for run in found))
    met = worst_of_ours <= TARGET
    print(f"worst with known durations: {worst_of_ours:.3f}, target {TARGET} at most: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
