import logging

import pytest


@pytest.fixture
def of_ranks(dist_env):
    yield dist_env.rank


@pytest.mark.world_size(3)
def test_a(of_ranks):
    logging.warning("a record of %s", of_ranks)


alone = logging.getLogger("alone")
alone.propagate = False  # from 9.1 on, pytest has its handlers there, too


@pytest.mark.world_size(2)
def test_b(of_ranks):
    logging.info("too fine")


def test_c():
    logging.warning("without ranks")


@pytest.mark.world_size(2)
def test_d(of_ranks):
    alone.warning("a record of %s alone", of_ranks)
