"""Tests of the wheel where users are: in an environment of its own, beside the default torch, away from the checkout.

They run only when you name an environment, which they make if it is not there: `pytest test/wheel --environment DIR`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from stranger import CannotInstall, Stranger, make_environment

OPTION = "--environment"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=Path, metavar="DIR", help="install the wheel there, in a new environment or again")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return True if config.getoption(OPTION, None) is None else None


def pytest_sessionstart(session: pytest.Session) -> None:
    folder = session.config.getoption(OPTION, None)
    if folder is None or hasattr(session.config, "workerinput"):
        return
    try:
        make_environment(folder.absolute())
    except CannotInstall as error:
        pytest.exit(f"no environment for the wheel: {error}", returncode=1)


@pytest.fixture
def stranger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stranger]:
    stranger = Stranger(request.config.getoption(OPTION).absolute(), tmp_path)
    yield stranger
    stranger.leave()
