"""Tests which saves `--watch` sees, also of files that it does not watch yet, since a run still reads them."""

import pytest

from torch_testing_ext._process import file_reads
from torch_testing_ext.runner.watching import Saves


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "helper.py"
    file.write_text("one")
    return file


def read_by_tests(file):
    return {str(file): {file_reads.hash_of(str(file))}}


def test_a_save_while_tests_run(file):
    """The path is new when the run is over. The save counts once."""
    saves, read = Saves(), read_by_tests(file)
    file.write_text("another")
    saves.watch(read)
    assert [saves.found(), saves.found()] == [True, False]


def test_a_save_between_two_tests(file):
    saves, read = Saves(), read_by_tests(file)
    file.write_text("another")
    read[str(file)] |= read_by_tests(file)[str(file)]
    saves.watch(read)
    assert saves.found()


def test_no_save(file, tmp_path):
    """Nor what tests have removed, or what none has read."""
    gone = tmp_path / "gone"
    gone.write_text("one")
    read = {**read_by_tests(file), **read_by_tests(gone), f"{tmp_path}*": set()}
    gone.unlink()
    saves = Saves()
    saves.watch(read)
    assert not saves.found()


def test_a_save_of_a_watched_file(file):
    """What earlier tests have read of it does not matter: the save has been seen."""
    saves, read = Saves(), read_by_tests(file)
    saves.watch(read)
    file.write_text("another")
    assert saves.found()
    saves.watch(read)
    assert not saves.found()
