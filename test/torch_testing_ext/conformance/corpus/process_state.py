"""MultiProcessTestCase: what a rank sees of its process, of the parent's state and of the files."""

import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn as nn
from notes import note
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests

STRICTER = {
    "EnvironmentTest.test_show_cpp_stacktraces": ("C++ raises an exception", "passed"),
    "EnvironmentTest.test_rendezvous_variables": ("the variables of a launcher in a rank", "passed"),
}

GLOBAL = {"changed": False}
HERE = os.getpid()


class Spawning(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()


class AttributesTest(Spawning):
    def test_rank(self):
        note(self, self.rank, type(self.rank).__name__)

    def test_world_size(self):
        note(self, self.world_size, type(self.world_size).__name__)

    def test_is_master(self):
        note(self, self.is_master)

    def test_id(self):
        note(self, self.id().rpartition(".")[2], self._testMethodName, self._current_test_name())

    def test_str(self):
        note(self, str(self), repr(self).replace(self.__module__, "module"))

    def test_file_name(self):
        note(self, os.path.isabs(self.file_name), type(self.file_name).__name__)

    def test_constants(self):
        note(self, self.MAIN_PROCESS_RANK, self.TEST_ERROR_EXIT_CODE, MultiProcessTestCase.MAIN_PROCESS_RANK)

    def test_class(self):
        note(self, type(self).__name__, type(self).__qualname__, [base.__name__ for base in type(self).__bases__])

    def test_shortDescription(self):
        """A first line.

        And more.
        """
        note(self, self.shortDescription())

    def test_method_is_callable(self):
        note(self, callable(getattr(self, self._testMethodName)), type(self).test_rank.__name__)

    def test_precision(self):
        note(self, self.precision, self.rel_tol)

    def test_max_diff(self):
        note(self, self.maxDiff, self.longMessage)

    def test_failure_exception(self):
        note(self, self.failureException.__name__)


class FileTest(MultiProcessTestCase):
    """file_name: a file of its own for each test, that setUp has made empty."""

    world_size = 2
    earlier: ClassVar[list] = []

    def setUp(self):
        super().setUp()
        note(self, os.path.exists(self.file_name), os.path.getsize(self.file_name))
        note(self, self.file_name in self.earlier)
        self.earlier.append(self.file_name)
        self._spawn_processes()

    def test_first(self):
        note(self, os.path.exists(self.file_name))

    def test_second(self):
        note(self, os.path.exists(self.file_name))

    def test_writable(self):
        with open(self.file_name, "a") as file:
            file.write("text")
        note(self, os.access(self.file_name, os.R_OK | os.W_OK))

    def test_same_in_ranks(self):
        store = dist.FileStore(self.file_name, 2)
        store.set(f"name{self.rank}", self.file_name)
        note(self, store.get("name0") == store.get("name1"))


class StoreTest(Spawning):
    def test_file_store(self):
        store = dist.FileStore(self.file_name, self.world_size)
        store.set(f"key{self.rank}", "value")
        store.wait(["key0", "key1"])
        note(self, store.get(f"key{1 - self.rank}"))

    def test_group_by_store(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        tensor = torch.tensor([self.rank + 1])
        dist.all_reduce(tensor)
        note(self, tensor.item(), dist.get_backend(), dist.get_rank(), dist.get_world_size())

    def test_group_by_file(self):
        dist.init_process_group(
            "gloo", init_method=f"file://{self.file_name}", rank=self.rank, world_size=self.world_size
        )
        found = [None, None]
        dist.all_gather_object(found, {"rank": self.rank})
        note(self, found)

    def test_no_group_before(self):
        note(self, dist.is_initialized(), dist.is_available())

    def test_sub_group(self):
        dist.init_process_group("gloo", init_method=f"file://{self.file_name}", rank=self.rank, world_size=2)
        group = dist.new_group([1])
        note(self, dist.get_rank(group))

    def test_send_and_receive(self):
        dist.init_process_group("gloo", init_method=f"file://{self.file_name}", rank=self.rank, world_size=2)
        tensor = torch.zeros(2)
        if self.rank == 0:
            dist.send(torch.ones(2), dst=1)
        else:
            dist.recv(tensor, src=0)
        note(self, tensor.tolist())

    def test_monitored_barrier(self):
        dist.init_process_group("gloo", init_method=f"file://{self.file_name}", rank=self.rank, world_size=2)
        dist.monitored_barrier()
        note(self, "through")

    def test_mismatched_collective_is_the_tests_own(self):
        dist.init_process_group("gloo", init_method=f"file://{self.file_name}", rank=self.rank, world_size=2)
        with self.assertRaisesRegex(ValueError, "Invalid"):
            dist.broadcast(torch.ones(1), src=5)

    def test_ddp(self):
        dist.init_process_group("gloo", init_method=f"file://{self.file_name}", rank=self.rank, world_size=2)
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False))
        model(torch.ones(1, 2) * (self.rank + 1)).sum().backward()
        note(self, model.module.weight.grad.tolist())


class EnvironmentTest(MultiProcessTestCase):
    """The environment of the parent when it starts the ranks."""

    world_size = 2

    def setUp(self):
        super().setUp()
        os.environ["CONFORMANCE_SET"] = "before"
        self.addCleanup(os.environ.pop, "CONFORMANCE_SET", None)
        os.environ.pop("CONFORMANCE_REMOVED", None)
        self._spawn_processes()
        os.environ["CONFORMANCE_SET"] = "after"

    def test_set_before(self):
        note(self, os.environ.get("CONFORMANCE_SET"))

    def test_not_set(self):
        note(self, os.environ.get("CONFORMANCE_REMOVED"))

    def test_change_stays_in_the_rank(self):
        os.environ["CONFORMANCE_RANK"] = str(self.rank)
        note(self, os.environ["CONFORMANCE_RANK"])

    def test_no_change_of_others(self):
        note(self, os.environ.get("CONFORMANCE_RANK"))

    def test_rendezvous_variables(self):
        note(self, [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")])

    def test_show_cpp_stacktraces(self):
        note(self, os.environ.get("TORCH_SHOW_CPP_STACKTRACES"))

    def test_getenv_of_children(self):
        note(self, os.popen("echo $CONFORMANCE_SET").read().strip())


class GlobalsTest(MultiProcessTestCase):
    """A rank has the module as it is after its import, whatever the parent has done with it since."""

    world_size = 2
    of_the_class = "as written"

    def setUp(self):
        super().setUp()
        GLOBAL["changed"] = True
        type(self).of_the_class = "changed by the parent"
        self.addCleanup(GLOBAL.update, changed=False)
        self._spawn_processes()

    def test_change_of_a_global_stays_in_the_rank(self):
        GLOBAL[str(self.rank)] = True
        note(self, str(1 - self.rank) in GLOBAL)

    def test_no_change_of_other_tests(self):
        note(self, "0" in GLOBAL or "1" in GLOBAL)

    def test_main_module_name(self):
        note(self, type(self).__module__ == __name__, __name__ in sys.modules)


class ProcessTest(Spawning):
    def test_pids_differ(self):
        store = dist.FileStore(self.file_name, 2)
        store.set(f"pid{self.rank}", str(os.getpid()))
        note(self, store.get("pid0") != store.get("pid1"))

    def test_main_thread(self):
        note(self, threading.current_thread() is threading.main_thread())

    def test_working_directory(self):
        note(self, os.path.isdir(os.getcwd()))

    def test_change_of_directory(self):
        os.chdir("/")
        note(self, os.getcwd())

    def test_temporary_file(self):
        with tempfile.NamedTemporaryFile() as file:
            note(self, os.path.exists(file.name))

    def test_standard_input(self):
        note(self, sys.stdin is None or sys.stdin.read() == "")

    def test_print(self):
        print("to stdout")
        print("to stderr", file=sys.stderr)
        note(self, sys.stdout is not None)

    def test_warnings_pass(self):
        warnings.warn("of a rank", UserWarning, stacklevel=1)
        note(self, "warned")

    def test_signal_handlers(self):
        note(self, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)

    def test_own_thread(self):
        found = []
        thread = threading.Thread(target=found.append, args=(1,))
        thread.start()
        thread.join()
        note(self, found)

    def test_fork(self):
        pid = os.fork()
        if pid == 0:
            os._exit(5)
        note(self, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def test_imports(self):
        import colorsys

        note(self, colorsys.__name__)


class SeedsTest(Spawning):
    """All ranks draw the same numbers, the same in each test."""

    def test_torch(self):
        note(self, torch.rand(2).tolist())

    def test_torch_again(self):
        note(self, torch.rand(2).tolist())

    def test_random(self):
        note(self, random.random())

    def test_numpy(self):
        import numpy

        note(self, float(numpy.random.rand()))

    def test_initial_seed(self):
        note(self, torch.initial_seed())


class TorchStateTest(MultiProcessTestCase):
    """State of torch that the parent has changed does not reach the ranks, which are new processes."""

    world_size = 1

    def setUp(self):
        super().setUp()
        self.addCleanup(torch.set_default_dtype, torch.get_default_dtype())
        self.addCleanup(torch.set_grad_enabled, torch.is_grad_enabled())
        self.addCleanup(torch.use_deterministic_algorithms, False)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(99)
        self._spawn_processes()

    def tearDown(self):
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        super().tearDown()

    def test_default_dtype(self):
        note(self, torch.get_default_dtype())

    def test_grad_enabled(self):
        note(self, torch.is_grad_enabled())

    def test_deterministic(self):
        note(self, torch.are_deterministic_algorithms_enabled())

    def test_seed(self):
        note(self, torch.initial_seed())

    def test_sparse_invariants(self):
        note(self, torch.sparse.check_sparse_tensor_invariants.is_enabled())

    def test_default_device(self):
        note(self, torch.get_default_device())

    def test_inference_mode(self):
        note(self, torch.is_inference_mode_enabled())


class UnchangedTest(Spawning):
    """Fresh ranks: what one test changes, the next does not see."""

    def test_1_changes(self):
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(5)
        sys.modules["made_up"] = sys
        self.__class__.left = True
        note(self, torch.get_default_dtype())

    def test_2_sees_nothing(self):
        note(self, torch.get_default_dtype(), "made_up" in sys.modules, hasattr(self, "left"), torch.initial_seed())


if __name__ == "__main__":
    run_tests()
