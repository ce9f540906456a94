"""Stores, directories, sparse sums, the fake group and DistributedTestBase: the helpers of common_distributed."""

import os
import socket
import sys
import tempfile
import unittest
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.outcomes import outcome_of
from kit.ranks import Ranks, ranks_told

from torch_testing_ext import common_distributed as cd
from torch_testing_ext._testing.helpers import stores_and_folders
from torch_testing_ext.common_utils import TestCase, find_free_port, run_tests
from torch_testing_ext.distributed import fake_pg


class TestTcpStore(TestCase):
    def test_set_and_get(self):
        store = cd.create_tcp_store()
        store.set("key", "value")
        self.assertEqual(store.get("key"), b"value")
        self.assertGreater(store.port, 0)

    def test_each_has_a_port_of_its_own(self):
        first, second = cd.create_tcp_store(), cd.create_tcp_store()
        self.assertNotEqual(first.port, second.port)

    def test_a_port_that_another_process_takes_first(self):
        with socket.socket() as taken:
            taken.bind(("", 0))
            taken.listen()
            ports = [taken.getsockname()[1], find_free_port()]
            with mock.patch.object(stores_and_folders, "find_free_port", side_effect=ports):
                self.assertEqual(cd.create_tcp_store().port, ports[1])

    def test_options(self):
        for libuv in (False, True):
            store = cd.create_tcp_store("127.0.0.1", world_size=2, wait_for_workers=False, use_libuv=libuv)
            other = dist.TCPStore("127.0.0.1", store.port, 2, False, timedelta(seconds=30), wait_for_workers=False)
            other.set("key", "of the other")
            self.assertEqual(store.get("key"), b"of the other")
            self.assertEqual(store.libuvBackend, libuv)

    def test_timeout(self):
        store = cd.create_tcp_store(timeout=timedelta(milliseconds=100))
        self.assertEqual(store.timeout, timedelta(milliseconds=100))
        with self.assertRaises(dist.DistStoreError):
            store.get("never set")


class TestDirectories(TestCase):
    def setUp(self):
        super().setUp()
        keep = mock.patch.dict(os.environ)
        keep.start()
        self.addCleanup(keep.stop)
        self.addCleanup(cd.cleanup_temp_dir)

    def test_made_and_removed(self):
        cd.initialize_temp_directories()
        directory = os.environ["TEMP_DIR"]
        self.assertEqual(sorted(os.listdir(directory)), ["barrier", "init_dir", "test_dir"])
        self.assertEqual(os.environ["INIT_METHOD"], f"file://{directory}/init_dir/shared_init_file")
        cd.cleanup_temp_dir()
        self.assertFalse(os.path.exists(directory))

    def test_init_method_given(self):
        cd.initialize_temp_directories("tcp://localhost:1")
        self.assertEqual(os.environ["INIT_METHOD"], "tcp://localhost:1")

    def test_cleaning_up_without_directories(self):
        with mock.patch.object(cd, "tmp_dir", None):
            cd.cleanup_temp_dir()


class TestSmallHelpers(TestCase):
    def test_captured_output(self):
        before = sys.stdout, sys.stderr
        with cd.captured_output() as (out, err):
            print("out")
            print("err", file=sys.stderr)
        self.assertEqual((out.getvalue(), err.getvalue()), ("out\n", "err\n"))
        self.assertEqual((sys.stdout, sys.stderr), before)
        with self.assertRaises(KeyError), cd.captured_output():
            raise KeyError
        self.assertEqual((sys.stdout, sys.stderr), before)

    def test_create_device(self):
        for device in (cd.create_device(), cd.create_device(lazy_init=True), cd.create_device(interface="lo")):
            self.assertIsNotNone(device)

    def test_requires_ddp_rank(self):
        self.assertEqual([cd.requires_ddp_rank(device) for device in ("cuda", "xpu", "cpu")], [True, True, False])

    def test_verify_ddp_error_logged(self):
        def model(**logged):
            return mock.Mock(**{"_get_ddp_logging_data.return_value": logged})

        whole = {"iteration": 1, "has_error": 1, "error": "it broke: badly"}
        cd.verify_ddp_error_logged(model(**whole), "it broke")
        cd.verify_ddp_error_logged(model(**whole), "it broke\nException raised from a.cpp")
        with self.assertRaisesRegex(AssertionError, "'it held' is not in the error that DDP logged: 'it broke: badly'"):
            cd.verify_ddp_error_logged(model(**whole), "it held")
        for key in whole:
            less = {name: value for name, value in whole.items() if name != key}
            with self.assertRaisesRegex(AssertionError, f"no '{key}'"):
                cd.verify_ddp_error_logged(model(**less), "it broke")

    def test_tables_of_backends(self):
        self.assertIn("mpi", cd.DistTestCases.skip_collective["allgather_coalesced"])
        self.assertEqual(cd.DistTestCases.skip_collective["reduce"], set())
        self.assertIn("gloo", cd.DistTestCases.backend_feature["ddp"])

    def test_all_names_exist(self):
        exported: dict[str, object] = {}
        exec("from torch_testing_ext.common_distributed import *", exported)
        self.assertGreater(len(exported), 60)
        for name in exported.keys() - {"__builtins__"}:
            self.assertIs(exported[name], getattr(cd, name))


class Sparse(Ranks):
    world_size = 3

    def sums(self):
        self.join_group()
        for inputs, expected in cd.simple_sparse_reduce_tests(self.rank, self.world_size):
            (tensor,) = inputs
            dist.all_reduce(tensor)
            self.assertEqual(tensor.to_dense(), expected[0].to_dense())

    def sums_of_two_each(self):
        self.join_group()
        for inputs, expected in cd.simple_sparse_reduce_tests(self.rank, self.world_size, num_inputs=2):
            self.assertEqual((len(inputs), len(expected)), (2, 2))
            tensor = (inputs[0] + inputs[1]).coalesce()
            dist.all_reduce(tensor)
            for wanted in expected:
                self.assertEqual(tensor.to_dense(), wanted.to_dense())


class TestSparse(TestCase):
    @pytest.mark.slow
    def test_against_gloo(self):
        for method in ("sums", "sums_of_two_each"):
            self.assertEqual(outcome_of(Sparse(method)), ("passed", ""))

    def test_cases(self):
        cases = cd.simple_sparse_reduce_tests(rank=1, world_size=3)
        shapes = [(inputs[0].sparse_dim(), inputs[0].dense_dim()) for inputs, _ in cases]
        self.assertEqual(shapes, [(1, 0), (2, 0), (3, 0), (1, 1), (1, 2), (1, 3)])
        for inputs, expected in cases:
            self.assertEqual(inputs[0].shape[0], 3)
            self.assertEqual(inputs[0]._nnz(), 2)
            self.assertEqual(expected[0].to_dense().sum(), 6 * 2 ** inputs[0].dense_dim())


class TestFakeGroup(TestCase):
    def start(self, rank, world_size):
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=world_size)
        self.addCleanup(dist.destroy_process_group)

    def test_any_rank_of_any_world(self):
        self.start(rank=2, world_size=64)
        self.assertEqual((dist.get_rank(), dist.get_world_size(), dist.get_backend()), (2, 64, "fake"))

    def test_collectives_return(self):
        self.start(rank=0, world_size=4)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 3)
        dist.barrier()
        dist.all_gather([torch.empty(3) for _ in range(4)], tensor)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        self.assertEqual(tensor, torch.ones(3))

    def test_groups_within_it(self):
        self.start(rank=1, world_size=4)
        group = dist.new_group([1, 3])
        self.assertEqual((dist.get_rank(group), dist.get_world_size(group)), (0, 2))
        dist.all_reduce(torch.ones(1), group=group)

    def test_registering_it_again(self):
        from torch_testing_ext._torch.groups import dataless_groups

        dataless_groups.register_fake_backend()
        self.start(rank=0, world_size=2)


class OnBase(cd.DistributedTestBase):
    world_size = 2

    def tell(self, value):
        Ranks.tell(self, value)

    def makes_its_group(self):
        group = self.create_pg("cpu")
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 2)
        self.tell([dist.get_backend(group), group.size(), self.rank_to_device("cpu"), os.environ["WORLD_SIZE"]])

    def makes_a_smaller_group(self):
        if self.rank == 0:
            self.assertEqual(self.create_pg("cpu", world_size=1, backend="gloo").size(), 1)


class StartsTwice(OnBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()


class TestDistributedTestBase(TestCase):
    def test_group(self):
        with mock.patch.dict(os.environ, WORLD_SIZE="17"):
            told = ranks_told(OnBase("makes_its_group"))
            self.assertEqual(os.environ["WORLD_SIZE"], "17")
        self.assertEqual(told, [["gloo", 2, {"0": [0], "1": [0]}, "2"]] * 2)

    def test_world_size_is_restored(self):
        with mock.patch.dict(os.environ):
            os.environ.pop("WORLD_SIZE", None)
            outcome_of(OnBase("makes_its_group"))
            self.assertNotIn("WORLD_SIZE", os.environ)

    def test_ranks_that_are_started_twice(self):
        seen = outcome_of(StartsTwice("makes_its_group"))
        self.assertRegex(seen.message, r"StartsTwice.setUp\(\) starts ranks twice")

    def test_of_another_size(self):
        self.assertEqual(outcome_of(OnBase("makes_a_smaller_group")), ("passed", ""))

    def test_backend_by_device(self):
        test = OnBase("makes_its_group")
        table = {"cpu": "gloo", "cuda": "nccl", "cuda:1": "nccl", "hpu": "hccl", "xpu": "xccl", "mps": "gloo"}
        self.assertEqual({device: test.backend(device) for device in table}, table)

    def test_devices_of_ranks(self):
        test = OnBase("makes_its_group")
        with mock.patch("torch.get_device_module") as module:
            module.return_value.device_count.return_value = 1
            self.assertEqual(test.rank_to_device("cuda"), {0: [0], 1: [0]})
            module.return_value.device_count.return_value = 8
            self.assertEqual(test.rank_to_device("cuda"), {0: [0], 1: [1]})


class TestOldSettings(unittest.TestCase):
    def test_default_timeout(self):
        self.assertEqual(cd.TIMEOUT_DEFAULT, float(os.environ.get("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "300")))
        self.assertEqual(cd.get_timeout("any.test"), cd.TIMEOUT_DEFAULT)

    def test_file_schema(self):
        with tempfile.TemporaryDirectory() as directory:
            url = f"{cd.FILE_SCHEMA}{directory}/store"
            dist.init_process_group("gloo", init_method=url, rank=0, world_size=1)
            dist.destroy_process_group()


if __name__ == "__main__":
    run_tests()
