"""A process that has not used CUDA stays safe to fork; of one that has, the line is named.

CUDA is a fake (see `fake_cuda.py`). The check `fork-survives` of benchmarks/gpu/run covers the real one.
"""

import os
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

from kit.files import FolderCase
from kit.processes import ROOT
from kit.warm import run_cold, run_warm

HERE = Path(__file__).parent


class FirstUseCase(FolderCase):
    """Runs code in an interpreter that has the fake. Covered on a GPU by the check `fork-survives`."""

    def run_python(self, *words, code=0, **environ):
        path = os.pathsep.join(map(str, (ROOT, HERE)))
        used = self.root / "used.txt"
        used.unlink(missing_ok=True)
        environment = {key: value for key, value in os.environ.items() if key != "PYTORCH_NVML_BASED_CUDA_CHECK"}
        environment.update({"PYTHONPATH": path, "FAKE_CUDA_USED": str(used), **environ})
        run = run_cold if words[0] == "-c" else run_warm
        done = run(*words, cwd=self.root, env=environment, together=True)
        self.assertEqual(code, done.returncode, done.stdout)
        uses = [line.split() for line in used.read_text().splitlines()] if used.exists() else []
        self.used_in_parent = [name for name, pid, parent in uses if pid == parent]
        return done.stdout


class TestNamed(FirstUseCase):
    """The line that used CUDA. Covered on a GPU by the check `fork-survives`."""

    TEST = """
        import fake_cuda
        import torch
        from torch_testing_ext.common_distributed import MultiProcessTestCase
        from torch_testing_ext.common_utils import run_tests

        {at_import}

        class TestIt(MultiProcessTestCase):
            world_size = 2

            def setUp(self):
                super().setUp()
                self._spawn_processes()

            def test_it(self):
                pass

        if __name__ == "__main__":
            {in_main}
            run_tests()
    """

    def run_test(self, at_import="pass", in_main="pass", words=("test_it.py",), **more):
        self.write("test_it.py", self.TEST.format(at_import=at_import, in_main=in_main))
        return self.run_python(*words, **more)

    def line_of(self, text):
        lines = (self.root / "test_it.py").read_text().splitlines()
        return next(number for number, line in enumerate(lines, 1) if text in line)

    def test_each_way_to_use_it(self):
        """Covered on a GPU by the check `fork-survives`."""
        self.write("helper.py", "import torch\n\ndef warm():\n    torch.cuda.init()\n")
        self.write(
            "uses.py",
            """
            import fake_cuda, os, torch
            from torch_testing_ext._torch.first_use import first_use as noted
            from torch_testing_ext._machine import accelerators
            import helper

            def show(use):
                fake_cuda.begin_again()
                use()
                print(noted())

            assert torch.cuda.is_available() and torch.cuda.device_count() == 4
            assert torch.accelerator.device_count() in (0, 4) and accelerators.device_count() == 4
            assert accelerators.unsafe_to_fork() is None
            show(lambda: torch.cuda.init())
            show(helper.warm)
            assert accelerators.unsafe_to_fork() == noted()
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
            show(lambda: torch.cuda.is_available())
            show(lambda: (torch.cuda.is_available(), torch.cuda.init()))
            torch.cuda.is_initialized = lambda: True
            show(lambda: None)
            """,
        )
        self.assertEqual(
            [
                "CUDA is initialised in uses.py:15",
                "CUDA is initialised in helper.py:4",
                "the driver of CUDA is asked for its devices in uses.py:19",
                "the driver of CUDA is asked for its devices in uses.py:20",
                "an accelerator was initialised before torch_testing_ext was imported",
            ],
            self.run_python("uses.py").splitlines(),
        )

    def test_a_process_that_uses_none_forks_without_a_word(self):
        """Covered on a GPU by the check `fork-survives`: NVML counts there, too."""
        output = self.run_test(in_main="assert torch.cuda.is_available() and torch.cuda.device_count() == 4")
        self.assertNotIn("torch_testing_ext:", output)

    def test_use_by_the_main_program(self):
        """Covered on a GPU by the check `fork-survives`."""
        output = self.run_test(in_main="torch.cuda.init()")
        line = self.line_of("torch.cuda.init()")
        self.assertIn(
            "torch_testing_ext: ranks are forked from a new interpreter, which takes seconds to start, because "
            f"this process cannot be forked: CUDA is initialised in test_it.py:{line}\n",
            output,
        )
        self.assertEqual(1, output.count("torch_testing_ext:"))

    def test_use_when_the_file_is_imported(self):
        """Covered on a GPU by the check `fork-survives`."""
        output = self.run_test(at_import="torch.cuda.init()")
        line = self.line_of("torch.cuda.init()")
        self.assertIn("ranks are started as new interpreters, which takes seconds, because", output)
        self.assertIn(f"this process cannot be forked: CUDA is initialised in test_it.py:{line};", output)
        self.assertEqual(1, output.count("torch_testing_ext:"), output)

    def test_a_file_of_run_test(self):
        """Covered on a GPU by the check `fork-survives`."""
        self.write(
            "run_test.py",
            """
            import sys
            from pathlib import Path
            from torch_testing_ext.runner.cli import main
            sys.exit(main(sys.argv[1:], Path.cwd()))
            """,
        )
        output = self.run_test("torch.cuda.init()", words=("run_test.py", "--tests", "."))
        line = self.line_of("torch.cuda.init()")
        self.assertIn("each test of test_it.py runs in a new interpreter", " ".join(output.split()))
        self.assertIn(
            f"because its import uses an accelerator: CUDA is initialised in test_it.py:{line}",
            " ".join(output.split()),
        )


class TestNobodyUsesIt(FirstUseCase):
    """Our own modules, and what tests are made of. Covered on a GPU by the check `fork-survives`."""

    def test_the_variable_is_set_by_whatever_comes_first(self):
        """Covered on a GPU by the check `fork-survives`."""
        show = "import os, sys; print(os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK'), 'torch' in sys.modules)"
        for first in ("import torch_testing_ext", "import torch_testing_ext.pytest_plugin"):
            self.assertEqual("1 False", self.run_python("-c", f"{first}; {show}").strip())
        self.assertEqual(
            "0 False",
            self.run_python("-c", f"import torch_testing_ext; {show}", PYTORCH_NVML_BASED_CUDA_CHECK="0").strip(),
        )

    def test_pytest_sets_it_before_a_test_file_is_imported(self):
        """Covered on a GPU by the check `fork-survives`."""
        self.write(
            "test_it.py",
            """
            import fake_cuda
            import torch
            counted = torch.cuda.device_count(), torch.cuda.is_available()
            from torch_testing_ext._torch.first_use import first_use

            def test_it():
                assert first_use() is None and counted == (4, True)
            """,
        )
        plugin = ("-p", "torch_testing_ext.pytest_plugin")
        self.run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, "test_it.py")
        self.assertEqual([], self.used_in_parent)

    def test_importing_every_module_and_suite(self):
        """Covered on a GPU by the check `fork-survives`."""
        self.write(
            "import_all.py",
            """
            import fake_cuda
            import importlib, pkgutil, runpy, sys
            from pathlib import Path
            import torch_testing_ext
            from torch_testing_ext._machine import accelerators

            for module in pkgutil.walk_packages(torch_testing_ext.__path__, "torch_testing_ext."):
                if not module.name.endswith("__main__") and ".runner" not in module.name:
                    importlib.import_module(module.name)
            suites = sorted(Path(sys.argv[1]).rglob("test_*.py"))
            assert len(suites) > 10, suites
            for suite in suites:
                sys.path[0] = str(suite.parent)
                runpy.run_path(str(suite), run_name="imported")
            print(accelerators.unsafe_to_fork())
            """,
        )
        output = self.run_python("import_all.py", str(ROOT / "test" / "distributed"))
        self.assertEqual("None", output.splitlines()[-1], output)
        self.assertEqual([], self.used_in_parent)

    def test_conditions_of_common_cuda_are_answered_by_another_process(self):
        """Covered on a GPU by the check `fork-survives`, which compares the answers with CUDA's."""
        self.write(
            "conditions.py",
            """
            import fake_cuda
            from torch_testing_ext import common_cuda, common_device_type
            from torch_testing_ext._machine.lazy import LazyVal
            from torch_testing_ext._torch.first_use import first_use

            lazy = {name: bool(value) for name, value in vars(common_cuda).items() if isinstance(value, LazyVal)}
            for name in common_cuda._COMPUTED:
                lazy[name] = getattr(common_cuda, name)
            for name, value in list(vars(common_cuda).items()):
                if name.startswith("evaluate_platform"):
                    lazy[name] = value()
            assert lazy["SM90OrLater"] and lazy["SM53OrLater"] and not lazy["SM100OrLater"], lazy
            assert lazy["IS_SM90"] is True and lazy["TEST_CUDNN"] and lazy["TEST_CUDA"] and lazy["TEST_MULTIGPU"]
            assert common_cuda.sm_is_or_higher_than if hasattr(common_cuda, "sm_is_or_higher_than") else True
            assert common_cuda.TEST_CUDNN_VERSION == 91002
            print(len(lazy) > 50, first_use())
            """,
        )
        self.assertEqual("True None", self.run_python("conditions.py").splitlines()[-1])
        self.assertEqual([], self.used_in_parent)

    def test_decorators_touch_no_device(self):
        """Covered on a GPU by the check `fork-survives`."""
        self.write(
            "decorators.py",
            """
            import fake_cuda
            import torch
            from torch_testing_ext import common_cuda as cuda, common_distributed as dist, common_utils as utils
            from torch_testing_ext._torch.first_use import first_use

            def test(self):
                ran.append(self)

            ran = []
            for decorate in (
                dist.requires_multicast_support(), dist.skip_if_lt_x_gpu(2), dist.skip_if_no_gpu,
                cuda.xfailIfSM89, cuda.xfailIfSM100OrLater, cuda.tf32_on_and_off(), utils.skipIfRocmArch(("gfx90a",)),
                utils.requires_cuda_p2p_access(), dist.requires_nccl_version((2, 10), ""),
            ):
                decorate(test)
            assert dist.sm_is_or_higher_than(torch.device("cuda"), 8, 0)
            assert not dist.sm_is_or_higher_than(torch.device("cuda", 3), 9, 1)
            print(first_use())
            """,
        )
        self.assertEqual("None", self.run_python("decorators.py").splitlines()[-1])
        self.assertEqual([], self.used_in_parent)

    def test_torch_asks_while_its_own_test_kit_is_imported(self):
        """Covered on a GPU by the check `fork-survives`."""
        self.write(
            "asks.py",
            """
            import fake_cuda
            import torch
            from torch_testing_ext._machine.cuda import answering_for_torch
            from torch_testing_ext._torch.first_use import first_use

            asking = torch.cuda.current_device, torch.cuda.get_device_capability, torch.cuda.get_device_properties
            with answering_for_torch():
                from torch.utils._triton import has_triton
                from torch._dynamo.device_interface import CudaInterface, caching_worker_device_properties as cached

                has_triton()
                assert CudaInterface.Worker.get_device_properties().major == 9 and cached
                assert torch.cuda.get_device_capability() == (9, 0) and torch.cuda.current_device() == 0
            assert not cached
            assert asking == (
                torch.cuda.current_device, torch.cuda.get_device_capability, torch.cuda.get_device_properties
            ) == (
                CudaInterface.current_device, torch.cuda.get_device_capability, CudaInterface.get_device_properties
            )
            print(first_use())
            """,
        )
        self.assertEqual("None", self.run_python("asks.py").splitlines()[-1])
        self.assertEqual([], self.used_in_parent)

    def test_a_class_of_ranks_for_each_type_of_device(self):
        """Covered on a GPU by the check `fork-survives`."""
        self.write(
            "test_it.py",
            """
            import fake_cuda
            from torch_testing_ext.common_device_type import instantiate_device_type_tests
            from torch_testing_ext.common_distributed import MultiProcessTestCase
            from torch_testing_ext.common_utils import run_tests
            from torch_testing_ext._machine import accelerators

            class TestIt(MultiProcessTestCase):
                world_size = 2

                def setUp(self):
                    super().setUp()
                    assert accelerators.unsafe_to_fork() is None
                    self._spawn_processes()

                def test_it(self, device):
                    assert device == "cuda:0" and not self.no_magma and self.has_cudnn()
                    assert self.cudnn_version == 91002

                def test_fails(self, device):
                    raise RuntimeError("of the test")

            instantiate_device_type_tests(TestIt, globals(), only_for="cuda")

            if __name__ == "__main__":
                run_tests()
            """,
        )
        output = self.run_python("test_it.py", "-v", code=1)
        self.assertRegex(output, r"test_it_cuda .*ok")
        self.assertIn("FAILED (errors=1)", output)
        self.assertEqual([], self.used_in_parent)
        self.assertNotIn("torch_testing_ext:", output)


DRIVER = """
int is_initialised;
int cuInit(unsigned flags) { is_initialised = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return is_initialised ? 0 : 3; }
"""
ASK = """
import ctypes, os, sys
from torch_testing_ext._machine import accelerators
ask = accelerators._cuda_driver_is_initialised
answers = [ask()]
driver = ctypes.CDLL(sys.argv[1])
answers.append(ask())
driver.cuInit(0)
answers.append(ask())
print(answers, flush=True)
if os.fork() == 0:
    ctypes.c_int.in_dll(driver, "is_initialised").value = 0  # a fork cannot use what its parent has initialised
    print([ask()], flush=True)
    os._exit(0)
os.wait()
"""


class TestOtherLibraries(FolderCase):
    """Covered on a GPU by the check `fork-survives`, which initialises CUDA by ctypes."""

    @unittest.skipUnless(shutil.which("cc"), "there is no C compiler")
    def test_the_driver_is_asked(self):
        """A new interpreter: a library stays loaded. Its driver is a fake, compiled here."""
        library = self.root / "libcuda.so.1"
        source = self.write("driver.c", DRIVER)
        subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        asked = subprocess.run([sys.executable, "-c", ASK, library], env=environment, stdout=subprocess.PIPE, text=True)
        self.assertEqual("[False, False, True]\n[True]\n", asked.stdout)


if __name__ == "__main__":
    unittest.main()
