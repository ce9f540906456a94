"""Nodes: one machine pretends to be several, each with ranks, devices and folders of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch_testing_ext._process.declarations import AskedOptions, Level, Option, Setting, number
from torch_testing_ext._process.setting_readers import count
from torch_testing_ext.launch.aspect import Aspect
from torch_testing_ext.launch.host_kinds import HostKind

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import Host, RankAttempt, TestPlan
    from torch_testing_ext.launch.jobs import Job

NODES: Setting[int] = Setting("_TORCH_TESTING_EXT_NODES", "a number of nodes", number, 1)
_NODES = Option(
    "nodes",
    "execution",
    count,
    "run each test in ranks as if on N machines",
    "N",
    kind=int | None,
    setting=NODES,
    pytest_help="run each test in ranks as if on N machines",
    level=Level.HELP_ALL,
    apart={"cluster": "the nodes of a cluster are real: each test runs on one of them"},
)


class PretendedNodes(Aspect):
    """Gives each rank a place on one of several nodes."""

    name = "nodes"
    gaps = MappingProxyType(
        {
            HostKind.OWN: "the class gives its processes their variables",
            HostKind.THREADS: "threads share the variables and folders of their process",
            HostKind.TORCHRUN: "torchrun sets the variables of its ranks",
            HostKind.LAUNCHED: "the launcher has placed the ranks",
        }
    )
    options = (_NODES,)

    def require(self, asked: AskedOptions) -> None:
        nodes = asked.value(_NODES)
        if nodes is None:
            return
        from torch_testing_ext.launch.launched_by import this_launch
        from torch_testing_ext.launch.pretended_nodes import MOST_NODES

        if nodes > MOST_NODES:
            raise ValueError(f"{_NODES.flag} {nodes}: a machine can pretend to be {MOST_NODES} nodes at most")
        if this_launch() is not None:
            raise ValueError(f"{_NODES.flag}: a launcher has placed the ranks of this run: run it without one")

    def header(self, asked: AskedOptions) -> str:
        nodes = asked.value(_NODES)
        return "" if nodes is None else f"nodes: {nodes}, pretended; a test whose ranks {nodes} does not divide has one"

    def facts(self, asked: AskedOptions) -> Mapping[str, str]:
        nodes = asked.value(_NODES)
        return {} if nodes is None else {"nodes": str(nodes)}

    def check(self, host: Host, plan: TestPlan) -> TestPlan:
        from torch_testing_ext.launch.pretended_nodes import why_not

        nodes = nodes_of(plan)
        why = self.gaps.get(host.kind, "") or why_not(nodes, plan.world_size)
        if plan.nodes > 1 and why:
            raise host.refusal(f"the test has {nodes} nodes", why)
        return plan

    def prepare(self, attempt: RankAttempt) -> None:
        from dataclasses import replace

        attempt.plan = replace(attempt.plan, nodes=nodes_of(attempt.plan))

    def equip(self, attempt: RankAttempt) -> None:
        """Let the ranks meet at the address of the first node, unless the test has chosen one."""
        from torch_testing_ext.launch.pretended_nodes import address_of

        if attempt.plan.nodes > 1 and attempt.environ.get("MASTER_ADDR") == "127.0.0.1":
            attempt.environ["MASTER_ADDR"] = address_of(0)

    def complete_job(self, attempt: RankAttempt, job: Job) -> Job:
        nodes = attempt.plan.nodes
        if nodes == 1:
            return job
        from dataclasses import replace

        from torch_testing_ext.launch.pretended_nodes import Nodes

        return replace(job, nodes=Nodes(nodes, _masks(nodes, {**os.environ, **attempt.environ})))


def nodes_of(plan: TestPlan) -> int:
    """The number of nodes of a test: that of the run counts before its own, where it divides the ranks."""
    from torch_testing_ext.launch.pretended_nodes import why_not

    of_run = NODES.value()
    return plan.nodes if of_run == 1 or why_not(of_run, plan.world_size) else of_run


def _masks(nodes: int, environ: Mapping[str, str]) -> tuple[Mapping[str, str], ...]:
    """For each node, the variables that show its part of the accelerators which the ranks may use."""
    from torch_testing_ext._machine import accelerators, visible_devices

    kind = accelerators.runtime()
    if kind is None:
        return ()
    names = visible_devices.visible_names(environ, kind, accelerators.device_count())
    each = len(names) // nodes
    if not each:
        return ()
    parts = [names[node * each : (node + 1) * each] for node in range(nodes)]
    return tuple(visible_devices.masks_for(part, kind) for part in parts)


NODES_OF_TEST = PretendedNodes()
