"""Programs with one slip are told on the first screen, at both levels; sound ones beside them are quiet."""

import unittest

import pytest
import told_bystanders
import told_causes
import told_dead_threads
import told_elsewhere
import told_helpers
import told_in_a_file_with_a_rather_long_name
import told_innocent
import told_ragged
import told_recoveries
import told_short
import told_stores
import told_threads
import told_uneven
import told_unrecorded
from kit.told import add_tests

from torch_testing_ext.common_utils import run_tests


class UnevenTest(unittest.TestCase):
    """Ranks that differ as they must, and one that differs as it must not."""


class LongTextsTest(unittest.TestCase):
    """On 80 columns."""


class ShortTextsTest(unittest.TestCase):
    """Twins of the long ones: nothing is cut in vain."""


class RaggedTest(unittest.TestCase):
    """The same in the forms of libraries."""


class BystandersTest(unittest.TestCase):
    """In meshes, pipelines and handlers of errors, the rank with the slip is told, and not those beside it."""


class HelpersTest(unittest.TestCase):
    """The collective of a helper of the standard library, or of torch, is told."""


class CausesTest(unittest.TestCase):
    """The cause is in the title."""


class DeadThreadsTest(unittest.TestCase):
    """An exception that ends a thread is not lost if it is a collective's."""


class ElsewhereTest(unittest.TestCase):
    """The rank that has another list of members, or has left, and the line where."""


class InnocentTest(unittest.TestCase):
    """A rank that has done its part is not blamed."""


class RecoveriesTest(unittest.TestCase):
    """A slip after a recovery is told, and the fault that the ranks have recovered from."""


class StoresTest(unittest.TestCase):
    """A wait for a new world, or for a key, has words, also where there is no group yet."""


class ThreadsTest(unittest.TestCase):
    """The collective of a thread is told, and not the wait for the thread."""


class UnrecordedTest(unittest.TestCase):
    """Roots and monitored barriers, which torch's recorders leave out."""


# For each level.
MORE = (pytest.mark.slow, pytest.mark.nightly)

add_tests(CausesTest, told_causes.PROGRAMS)
add_tests(DeadThreadsTest, told_dead_threads.PROGRAMS)
add_tests(ElsewhereTest, told_elsewhere.PROGRAMS)
add_tests(InnocentTest, told_innocent.PROGRAMS)
add_tests(RecoveriesTest, told_recoveries.PROGRAMS, *MORE)
add_tests(StoresTest, told_stores.PROGRAMS, *MORE)
add_tests(ThreadsTest, told_threads.PROGRAMS, *MORE)
add_tests(UnevenTest, told_uneven.PROGRAMS)
add_tests(UnrecordedTest, told_unrecorded.PROGRAMS, *MORE)
add_tests(RaggedTest, told_ragged.PROGRAMS, *MORE)
add_tests(BystandersTest, told_bystanders.PROGRAMS, *MORE)
add_tests(HelpersTest, told_helpers.PROGRAMS, *MORE)
add_tests(ShortTextsTest, told_short.PROGRAMS, *MORE)
add_tests(LongTextsTest, told_in_a_file_with_a_rather_long_name.PROGRAMS)


if __name__ == "__main__":
    run_tests()
