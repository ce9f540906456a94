"""Groups that ranks do not make alike: what is suspected of ranks that hang in their creation."""

import threading
import unittest
from dataclasses import replace

import torch.distributed as dist

from torch_testing_ext._collectives.proof.store_waits import suspected_creation
from torch_testing_ext._collectives.records.issued_calls import GroupRecord, make_record
from torch_testing_ext._collectives.records.raw_records import read_raw, unpack_record
from torch_testing_ext._torch.groups import made_groups
from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import rank_collectives


def group(name, *members, rank, world="store", description="undefined"):
    return GroupRecord(name, description, members, members.index(rank), world)


def record(rank, *made, making=None):
    known = make_record(rank, [group(*one, rank=rank) for one in made], [], True, None, 0.0, False)
    return replace(known, creating=making and group(*making, rank=rank))


class SuspicionTest(unittest.TestCase):
    def suspected(self, *records):
        finding = suspected_creation(records)
        return None if finding is None else finding.sentence

    def test_a_member_that_has_not_come(self):
        found = self.suspected(record(0, making=("1", 0, 1)), record(1), record(2))
        expected = "rank 0 is creating group 1 (ranks 0, 1); rank 1 has not started to create it"
        self.assertEqual(found, f"suspected deadlock: {expected}")

    def test_groups_that_are_right(self):
        splits = [record(0, making=("1", 0, 1)), record(1, making=("1", 0, 1)), record(2, ("1", 2, 3))]
        self.assertIsNone(self.suspected(*splits))  # ranks 2 and 3 have the same name for theirs
        self.assertIsNone(self.suspected(record(0, making=("1", 0, 1)), record(1, ("1", 0, 1))))
        self.assertIsNone(self.suspected(record(0, ("1", 0, 1)), record(1)))  # nobody waits
        self.assertIsNone(self.suspected(record(0), record(1)))


class CreationTest(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_a_rank_leaves_what_it_makes(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        self.assertIsNone(made_groups.group_in_creation())
        if self.rank == 1:
            store.wait(["begun"])
            dist.new_group([0, 1])
        else:
            thread = threading.Thread(target=dist.new_group, args=([0, 1],))
            thread.start()
            while made_groups.group_in_creation() is None:
                pass
            left = rank_collectives.collectives_of_test()
            store.set("begun", "")
            thread.join()
            self.assertEqual(read_raw(0, left).creating.members, (0, 1))
        self.assertIsNone(made_groups.group_in_creation())
        self.assertIsNone(unpack_record(rank_collectives.collectives_of_test()).record(self.rank).creating)


if __name__ == "__main__":
    run_tests()
