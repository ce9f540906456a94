"""Errors of torch.distributed are noted as they are logged."""

import logging
import unittest

import torch
import torch.distributed as dist
from kit.own_process import error_of, in_own_process
from kit.plain_groups import world_of_one

from torch_testing_ext._torch.groups import collective_errors
from torch_testing_ext._torch.groups.collective_errors import errors


@in_own_process
def test_errors_of_collectives():
    heard = []
    errors.on_error = lambda: heard.append(len(errors.moments))
    errors.watch(lambda error: "peer" in str(error))
    world_of_one()
    dist.all_reduce(torch.ones(1))
    assert errors.moments == heard == []
    for _ in range(2):
        error_of(lambda: dist.all_reduce(torch.ones(1, dtype=torch.int16)))
    assert len(errors.moments) == 2 and heard == [1, 2]
    assert errors.moments == sorted(errors.moments)
    errors.forget()
    assert errors.moments == []


@in_own_process
def test_other_records():
    errors.watch(lambda error: False)
    logger = collective_errors.logger_of_errors()
    logger.propagate = False
    for message in ("error", {"func_name": "all_reduce"}):
        logger.handle(logging.LogRecord("c10d", logging.DEBUG, "x.py", 1, message, (), None))
    assert errors.moments == []


@in_own_process
def test_tests_of_this_logger():
    """They see torch's handlers alone, and what they replace these with hides no error."""
    logger = collective_errors.logger_of_errors()
    before = list(logger.handlers)
    errors.watch(lambda error: False)
    assert logger.handlers == before
    world_of_one()
    with unittest.TestCase().assertLogs(logger, logging.DEBUG) as logged:
        error_of(lambda: dist.all_reduce(torch.ones(1, dtype=torch.int16)))
    assert len(errors.moments) == len(logged.records) == 1


@in_own_process
def test_limit():
    for _ in range(collective_errors._MOST_ERRORS + 5):
        errors.note()
    assert len(errors.moments) == collective_errors._MOST_ERRORS


@in_own_process
def test_lost_peers():
    assert not errors.has_lost_peer(RuntimeError("peer"))
    errors.watch(lambda error: "peer" in str(error))
    assert errors.has_lost_peer(RuntimeError("peer")) and not errors.has_lost_peer(RuntimeError("other"))
