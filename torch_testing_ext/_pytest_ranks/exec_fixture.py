"""A fixture that runs in ranks of its own, before the test that asks for it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from torch_testing_ext import launch
from torch_testing_ext._cases import accounting, spawning
from torch_testing_ext._cases.distributed_exec import DistributedFixture
from torch_testing_ext._cases.invocation import case_of
from torch_testing_ext._marks import needs
from torch_testing_ext._marks.settings_of_tests import kinds_on, may_differ
from torch_testing_ext._process.whole_files import source_file
from torch_testing_ext._utils.contexts import changed_environment

from . import dist_env
from .marks import RankSpec, checked_class, spec_for


def run(cls: type[DistributedFixture], request: Any, given: dict[str, Any]) -> DistributedFixture:
    """Start the ranks of a fixture, from pytest's process. Its class has been checked at collection."""
    __tracebackhide__ = True
    spec = spec_for(cls.world_size, {}, checked_class(cls))
    where = launch.this_launch()
    if where is not None:
        pytest.skip(f"{cls.__name__} starts ranks of its own, and a launcher has started {where.world_size}")
    skip = needs.devices(spec.devices).unmet() if spec.devices else None
    if skip is not None:
        pytest.skip(f"{cls.__name__}: {skip.message}")
    instance = cls()
    timeout = spec.timeout or request.config.getoption("dist_timeout", None)
    case = case_of(f"fixture {cls.__name__}", source_file(cls))
    with tempfile.TemporaryDirectory() as directory:
        arguments = (instance, given, spec, Path(directory))
        spawning.run_in_ranks(
            case,
            _in_rank,
            spec.world_size,
            arguments,
            timeout,
            collectives_may_differ=may_differ(cls, cls.run),
            sanitize=kinds_on(cls, cls.run),
        )
    return instance


def _in_rank(rank: int, instance: DistributedFixture, given: dict[str, Any], spec: RankSpec, directory: Path) -> None:
    with changed_environment(**dict(spec.environ)):
        group = dist_env.make(spec, directory, rank)
        if instance.init_distributed:
            next(group)
        accounting.ran(instance.run(**given))
