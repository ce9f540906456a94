"""A process that has not used CUDA stays safe to fork; of one that has, the line is named.

CUDA is a fake (see `fake_cuda.py`). The check `fork-survives` of benchmarks/gpu/run covers the real one.
"""

import os
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

import pytest
from kit.files import FolderCase, subject
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

    TEST = subject(__file__, "ranks_of_an_importer.py")

    def run_test(self, at_import="pass", in_main="pass", words=("test_it.py",), **more):
        self.write("test_it.py", self.TEST.replace("# at import", at_import).replace("# in main", in_main))
        return self.run_python(*words, **more)

    def line_of(self, text):
        lines = (self.root / "test_it.py").read_text().splitlines()
        return next(number for number, line in enumerate(lines, 1) if text in line)

    def test_each_way_to_use_it(self):
        """Covered on a GPU by the check `fork-survives`."""
        self.write("helper.py", "import torch\n\ndef warm():\n    torch.cuda.init()\n")
        self.write(
            "uses.py",
            subject(__file__, "uses_of_a_device.py"),
        )
        self.assertEqual(
            [
                "CUDA is initialised in uses.py:20",
                "CUDA is initialised in helper.py:4",
                "the driver of CUDA is asked for its devices in uses.py:24",
                "the driver of CUDA is asked for its devices in uses.py:25",
                "an accelerator was initialised before torch_testing_ext was imported",
            ],
            self.run_python("uses.py").splitlines(),
        )

    def test_a_process_that_uses_none_forks_without_a_word(self):
        """Covered on a GPU by the check `fork-survives`: NVML counts there, too."""
        output = self.run_test(in_main="assert torch.cuda.is_available() and torch.cuda.device_count() == 4")
        self.assertNotIn("torch_testing_ext:", output)

    @pytest.mark.slow
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

    @pytest.mark.slow
    def test_use_when_the_file_is_imported(self):
        """Covered on a GPU by the check `fork-survives`."""
        output = self.run_test(at_import="torch.cuda.init()")
        line = self.line_of("torch.cuda.init()")
        self.assertIn("ranks are started as new interpreters, which takes seconds, because", output)
        self.assertIn(f"this process cannot be forked: CUDA is initialised in test_it.py:{line};", output)
        self.assertEqual(1, output.count("torch_testing_ext:"), output)

    @pytest.mark.slow
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
        output = self.run_test("torch.cuda.init()", words=("run_test.py", "-o", "tests=."))
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
            from torch_testing_ext._torch.devices.first_accelerator_use import first_use

            def test_it():
                assert first_use() is None and counted == (4, True)
""",
        )
        plugin = ("-p", "torch_testing_ext.pytest_plugin")
        self.run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, "test_it.py")
        self.assertEqual([], self.used_in_parent)

    @pytest.mark.slow
    def test_importing_every_module_and_suite(self):
        """Covered on a GPU by the check `fork-survives`."""
        self.write(
            "import_all.py",
            subject(__file__, "import_all.py"),
        )
        output = self.run_python("import_all.py", str(ROOT / "test" / "distributed"))
        self.assertEqual("None", output.splitlines()[-1], output)
        self.assertEqual([], self.used_in_parent)

    def test_conditions_of_common_cuda_are_answered_by_another_process(self):
        """Covered on a GPU by the check `fork-survives`, which compares the answers with CUDA's."""
        self.write(
            "conditions.py",
            subject(__file__, "conditions_of_cuda.py"),
        )
        self.assertEqual("True None", self.run_python("conditions.py").splitlines()[-1])
        self.assertEqual([], self.used_in_parent)

    def test_decorators_touch_no_device(self):
        """Covered on a GPU by the check `fork-survives`."""
        self.write(
            "decorators.py",
            subject(__file__, "decorators_of_devices.py"),
        )
        self.assertEqual("None", self.run_python("decorators.py").splitlines()[-1])
        self.assertEqual([], self.used_in_parent)

    @pytest.mark.slow
    def test_torch_asks_while_its_own_test_kit_is_imported(self):
        """Covered on a GPU by the check `fork-survives`."""
        self.write(
            "asks.py",
            subject(__file__, "torch_asks.py"),
        )
        self.assertEqual("None", self.run_python("asks.py").splitlines()[-1])
        self.assertEqual([], self.used_in_parent)

    def test_a_class_of_ranks_for_each_type_of_device(self):
        """Covered on a GPU by the check `fork-survives`."""
        self.write(
            "test_it.py",
            subject(__file__, "classes_for_devices.py"),
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
ASK = subject(__file__, "ask_for_devices.py")


@pytest.mark.slow
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
