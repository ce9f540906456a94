"""The cache of the fake accelerator's library, and what can go wrong while a stand-in for a compiler builds it."""

import ast
import contextlib
import fcntl
import importlib.metadata
import io
import os
import queue
import struct
import sys
import sysconfig
import threading
import unittest
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import torch
from kit.files import FolderCase
from kit.processes import output_of_python
from kit.with_accelerators import KIND, with_accelerators

import torch_testing_ext._machine.fake_accelerator as names
from torch_testing_ext import _torch
from torch_testing_ext._machine.fake_accelerator import building, registering, shared_memory, starting
from torch_testing_ext._machine.fake_accelerator.building import Compiler, FakeAcceleratorError, Torch, key_of
from torch_testing_ext._machine.fake_accelerator.shared_memory import SharedMemory
from torch_testing_ext._machine.nvml import GpuProcess, Usage
from torch_testing_ext._torch.devices import build_options
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.runner import cli
from torch_testing_ext.runner.model import ExitCode
from torch_testing_ext.runner.scheduling.inventory import planned_devices

COMPILER = Path(__file__).parent / "subjects" / "compiler.sh"


class BuildingCase(FolderCase):
    def setUp(self) -> None:
        super().setUp()
        self.cache = self.root / "cache"
        self.calls = self.root / "calls"
        self.announced: list[str] = []
        environ = self.environ(CXX=str(COMPILER), CALLS=str(self.calls), AS="")
        environ.__enter__()
        self.addCleanup(environ.__exit__, None, None, None)

    def environ(self, **variables: str) -> AbstractContextManager[object]:
        return mock.patch.dict(os.environ, variables)

    def build(self) -> Path:
        return building.library_folder(self.cache, self.announced.append)

    def number_of_calls(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0

    def refused(self) -> str:
        """What the user reads of a build that fails: one line."""
        with self.assertRaises(FakeAcceleratorError) as caught:
            self.build()
        text = str(caught.exception)
        self.assertNotIn("\n", text)
        return text


class CacheTest(BuildingCase):
    def test_built_once(self) -> None:
        folder = self.build()
        self.assertEqual((folder / building.LIBRARY).read_text(), "whole\n")
        self.assertRegex(self.announced[0], r"^building the fake accelerator for torch [\d.]+\S*, about 40 s, once$")
        self.assertEqual(self.build(), folder)
        self.assertEqual((self.number_of_calls(), len(self.announced)), (1, 1))

    def test_the_folder_has_an_entry_point_that_torch_finds(self) -> None:
        folder = self.build()
        (distribution,) = importlib.metadata.distributions(path=[str(folder)])
        (entry,) = distribution.entry_points
        self.assertEqual((entry.group, entry.name), ("torch.backends", "fakeacc"))
        module, _, function = entry.value.partition(":")
        self.assertTrue((folder / f"{module}.py").exists())
        self.assertEqual(function, "autoload")

    def test_all_that_matters_is_in_the_key(self) -> None:
        torch, compiler = Torch(Path("/t"), "2.13.0", "abc"), Compiler(("c++",), "c++ 12")
        source = self.write("a.cpp", "int a;")
        key = key_of(torch, compiler, [source])
        self.assertEqual(key, key_of(Torch(Path("/elsewhere"), "2.13.0", "abc"), compiler, [source]))
        others = {
            "version of torch": key_of(Torch(Path("/t"), "2.13.1", "abc"), compiler, [source]),
            "commit of torch": key_of(Torch(Path("/t"), "2.13.0", "abd"), compiler, [source]),
            "compiler": key_of(torch, Compiler(("clang++",), "c++ 12"), [source]),
            "version of the compiler": key_of(torch, Compiler(("c++",), "c++ 13"), [source]),
            "flags": key_of(torch, compiler, [source], ["-O3"]),
            "source": key_of(torch, compiler, [self.write("a.cpp", "int b;")]),
        }
        with mock.patch("sysconfig.get_config_var", return_value="cpython-399-x86_64-linux-gnu"):
            others["Python"] = key_of(torch, compiler, [source])
        self.assertEqual([name for name, other in others.items() if other == key], [])

    def test_a_library_of_another_torch_is_not_loaded(self) -> None:
        with self.environ(**{names.LIBRARY_FOLDER: str(self.build())}), mock.patch.dict(sys.modules):
            sys.modules.pop(building.MODULE, None)
            with self.assertRaisesRegex(FakeAcceleratorError, "another torch or Python: unset"):
                building.load_library("1.0")


class FaultsTest(BuildingCase):
    def test_a_compiler_that_fails(self) -> None:
        with self.environ(AS="fails"):
            text = self.refused()
        self.assertRegex(text, r"failed \(exit code 1\).* Try another compiler")
        (log,) = self.cache.glob("*.log")
        self.assertIn(str(log), text)
        self.assertIn("no such thing", log.read_text())
        self.check_nothing_is_left()

    def test_a_compiler_that_fails_on_a_full_disk(self) -> None:
        with (
            self.environ(AS="fails"),
            mock.patch("shutil.disk_usage", side_effect=lambda path: mock.Mock(free=(path != self.cache) << 30)),
        ):
            self.assertRegex(self.refused(), f"cannot be built: {self.cache} is full; make room there, or set XDG_")
        self.check_nothing_is_left()

    def test_a_compiler_that_is_killed_half_way(self) -> None:
        with self.environ(AS="dies"):
            self.assertRegex(self.refused(), "killed by signal 9; .* try again")
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        """No half of a library is there, and the next build succeeds."""
        self.assertEqual([path.name for path in self.cache.iterdir() if path.is_dir()], [])
        self.assertEqual((self.build() / building.LIBRARY).read_text(), "whole\n")

    def test_a_build_that_was_killed_half_way(self) -> None:
        folder = self.build()
        part = folder.rename(folder.with_name(f"{folder.name}.abc.part"))
        (part / building.LIBRARY).write_text("half")
        self.assertEqual((self.build() / building.LIBRARY).read_text(), "whole\n")
        self.assertEqual([path for path in self.cache.iterdir() if path.suffix == ".part"], [])
        # Its compiler may go on: it writes elsewhere.
        first, second = (line.rpartition(" ")[2] for line in self.calls.read_text().splitlines())
        self.assertNotEqual(first, second)

    def test_a_library_that_lost_its_end(self) -> None:
        """As after a crash of the machine."""
        folder = self.build()
        for damaged in (building.LIBRARY, "size"):
            (folder / damaged).write_text("")
            self.assertEqual((self.build() / building.LIBRARY).read_text(), "whole\n")
        self.assertEqual(self.number_of_calls(), 3)

    def test_two_builds_at_once(self) -> None:
        """The second waits for the first, and does not build."""
        folder = self.build()
        away = folder.rename(self.root / "away")
        announced: queue.Queue[str] = queue.Queue()
        results: queue.Queue[Path] = queue.Queue()
        with folder.with_name(f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            second = threading.Thread(
                target=lambda: results.put(building.library_folder(self.cache, announced.put)), daemon=True
            )
            second.start()
            self.assertRegex(announced.get(timeout=60), "^waiting for another process")
            away.rename(folder)
        second.join(60)
        self.assertEqual(results.get_nowait(), folder)
        self.assertEqual(self.number_of_calls(), 1)

    def test_a_cache_that_cannot_be_written(self) -> None:
        self.cache.write_text("a file")
        self.assertRegex(self.refused(), r"cannot be kept in .*cache \(.*\): make it writable .* or set XDG_CACHE_HOME")

    def test_a_cache_that_can_only_be_read_serves(self) -> None:
        folder = self.build()
        with mock.patch.object(Path, "mkdir", side_effect=PermissionError):
            self.assertEqual(self.build(), folder)

    def test_no_compiler(self) -> None:
        with self.environ(CXX="", PATH=str(self.root)):
            self.assertRegex(self.refused(), "^there is no C.. compiler: install one")
        with self.environ(CXX="mycc -m64"):
            self.assertRegex(self.refused(), "^mycc, which CXX names, is not there: install one")
        with self.environ(CXX="mycc '"):
            self.assertRegex(self.refused(), "^CXX=mycc ' cannot be run .*: install one")
        program = self.write("no_program", "int main")
        program.chmod(0o755)
        with self.environ(CXX=str(program)):
            self.assertRegex(self.refused(), "^CXX=.*no_program cannot be run .*: install one")

    def test_no_headers_of_python(self) -> None:
        # These need the paths, and are kept from then on.
        sysconfig.get_config_vars()
        with mock.patch("sysconfig.get_paths", return_value={"include": str(self.root)}):
            self.assertRegex(self.refused(), r"Python.h is not in .*: install the headers of Python \(python3")


class StartingTest(BuildingCase):
    def test_numbers(self) -> None:
        for count in (0, -1, 17):
            with self.assertRaisesRegex(FakeAcceleratorError, f"there can be 1 to 16 fake accelerators, not {count}"):
                starting.check(count, {})
        for count in (1, 16):
            starting.check(count, {})

    def test_settings(self) -> None:
        good = {names.MEMORY: "1000", names.LATE_STREAMS: "0"}
        starting.check(1, good)
        for setting, value, text in (
            (names.MEMORY, "16 GiB", "=16 GiB is no number of bytes: write one, or unset it"),
            (names.MEMORY, "0", "=0 is no number of bytes"),
            (names.LATE_STREAMS, "true", "=true is not understood: write 1, or unset it"),
        ):
            with self.assertRaisesRegex(FakeAcceleratorError, setting + text):
                starting.check(1, {**good, setting: value})

    def test_a_number_in_the_environment_of_a_file(self) -> None:
        """The process ends with one line."""
        for value, text in (
            ("x", "there can be 1 to 16 fake accelerators, not x"),
            ("0", "there can be 1 to 16 fake accelerators, not 0"),
            ("1.5", "there can be 1 to 16 fake accelerators, not 1.5"),
        ):
            with self.environ(**{names.COUNT: value}), self.assertRaises(SystemExit) as caught:
                starting.start_as_the_environment_says()
            self.assertEqual(caught.exception.code, f"{names.COUNT}={value}: {text}")

    def test_a_mask_that_names_a_device_that_is_not_there(self) -> None:
        for mask in ("", "-1", "0", "3,0", "1,-1"):
            starting.check(4, {names.MASK: mask})
        for mask, wrong in {"4": "4", "0,7": "7", "GPU-1": "GPU-1"}.items():
            with self.assertRaisesRegex(FakeAcceleratorError, f"names {wrong}, .* unset it, or name 0 to 3"):
                starting.check(4, {names.MASK: mask})

    def test_a_mask_that_names_a_device_twice(self) -> None:
        """As CUDA's, it would show none: tests would run on the CPU without a word."""
        with self.assertRaisesRegex(FakeAcceleratorError, "=1,3, 1 names 1 twice, so that none is visible: name it"):
            starting.check(4, {names.MASK: "1,3, 1"})

    def test_the_environment_of_a_run(self) -> None:
        with self.environ(XDG_CACHE_HOME=str(self.cache), PYTHONPATH="/before"), mock.patch("sys.path", [*sys.path]):
            starting.start(3, self.announced.append)
            folder = os.environ[names.LIBRARY_FOLDER]
            self.assertEqual(os.environ[names.COUNT], "3")
            self.assertEqual(os.environ["PYTHONPATH"], f"/before{os.pathsep}{folder}")
            self.assertEqual(sys.path[-1], folder)
            memory = Path(os.environ[names.MEMORY_FILE])
            self.assertEqual(memory.stat().st_size, 32768)
            starting.start(2, self.announced.append)
            self.assertEqual((os.environ[names.COUNT], self.number_of_calls()), ("2", 1))
            starting.remove_memory_file(memory.parent, os.getpid() + 1)
            self.assertTrue(memory.exists())
            starting.remove_memory_file(memory.parent, os.getpid())
            self.assertFalse(memory.exists())

    def test_another_extension_is_refused_by_name(self) -> None:
        """It would want the same place in torch."""
        self.write("other-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: other\nVersion: 1\n")
        self.write("other-1.dist-info/entry_points.txt", "[torch.backends]\nother_npu = other:autoload\n")
        text = "cannot be used with other_npu, an extension of torch: run in"
        with (
            mock.patch("sys.path", [*sys.path, str(self.root)]),
            self.assertRaisesRegex(FakeAcceleratorError, text),
        ):
            starting.start(2, self.announced.append)
        self.assertEqual(self.number_of_calls(), 0)

    def test_no_search_path_begins_with_the_working_folder(self) -> None:
        with self.environ(XDG_CACHE_HOME=str(self.cache), PYTHONPATH=""), mock.patch("sys.path", [*sys.path]):
            starting.start(1, self.announced.append)
            self.assertEqual(os.environ["PYTHONPATH"], os.environ[names.LIBRARY_FOLDER])
            starting.remove_memory_file(Path(os.environ[names.MEMORY_FILE]).parent, os.getpid())


class RegisteringTest(unittest.TestCase):
    def test_no_module_that_may_be_half_imported(self) -> None:
        """torch registers the device while it is imported, be it by one of our modules: `_torch` is whole even then."""
        tree = ast.parse((building.HERE / "registering.py").read_text(encoding="utf-8"))
        imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        self.assertEqual(
            {name for name in imported if name.startswith("torch_testing_ext")},
            {"torch_testing_ext._torch", "torch_testing_ext._torch.devices"},
        )
        code = f"import sys, {building.__name__}; print('torch' in sys.modules)"
        self.assertEqual(output_of_python("-c", code), "False\n")
        code = f"import sys, {_torch.__name__}; print('torch' in sys.modules)"
        self.assertEqual(output_of_python("-c", code), "False\n")

    @with_accelerators(2)
    def test_an_extension_that_was_there_first(self) -> None:
        text = f"cannot be used with {KIND}, an extension of torch: leave them out, or do not import what brings {KIND}"
        with self.assertRaisesRegex(FakeAcceleratorError, text):
            registering.register()

    def test_a_machine_that_has_another_accelerator(self) -> None:
        text = r"has an accelerator \(cuda\), .*: leave them out, or hide the real one, as with CUDA_VISIBLE_DEVICES="
        with (
            mock.patch.object(build_options, "device_may_exist", lambda: True),
            mock.patch.object(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda")),
            self.assertRaisesRegex(FakeAcceleratorError, text),
        ):
            registering.register()


class RunnerOptionTest(BuildingCase):
    def main(self, *words: str) -> tuple[int, mock.Mock, mock.Mock]:
        """The exit code of the runner, whose session and start of devices are mocks."""
        with (
            self.environ(),
            mock.patch("signal.signal"),
            mock.patch("torch_testing_ext.runner.run_session.run", return_value=0) as run,
            mock.patch.object(starting, "start", side_effect=self.start) as start,
        ):
            return cli.main(words, self.root), run, start

    def start(self, count: int) -> None:
        starting.check(count, {})

    def test_a_run_starts_them(self) -> None:
        code, run, start = self.main("--fake-accelerators=4")
        start.assert_called_once_with(4)
        self.assertEqual((code, planned_devices(run.call_args.args[0])), (0, None))

    def test_a_plan_needs_their_number_alone(self) -> None:
        code, run, start = self.main("--dry-run", "--fake-accelerators=32")
        start.assert_not_called()
        self.assertEqual((code, planned_devices(run.call_args.args[0])), (0, 32))

    def test_a_refusal_is_one_line(self) -> None:
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            code, run, _ = self.main("--fake-accelerators=32")
        run.assert_not_called()
        self.assertEqual(code, ExitCode.USAGE)
        self.assertRegex(errors.getvalue(), "^.*: --fake-accelerators: there can be 1 to 16 fake .*, not 32\n$")


class SharedMemoryTest(FolderCase):
    def test_what_a_process_had_is_free_when_it_has_ended(self) -> None:
        file = self.root / "memory"
        shared_memory.make_file(file)
        locked, end = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            self.lock_row_and_wait(file, 5, {2: 4000}, locked[1], end[0])
        os.read(locked[0], 1)
        source = SharedMemory(file)
        usage = source.usage()
        self.assertEqual(usage["fake-0002"], Usage(4000, (GpuProcess(pid, 4000),)))
        self.assertEqual((usage["fake-0000"], len(usage)), (Usage(0), 16))
        os.write(end[1], b"e")
        # A zombie has given its memory back.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self.assertEqual(source.usage()["fake-0002"], Usage(0))
        os.waitpid(pid, 0)
        source.close()
        for descriptor in (*locked, *end):
            os.close(descriptor)

    def lock_row_and_wait(self, file: Path, row: int, counts: dict[int, int], locked: int, end: int) -> None:
        """In a child: do as the library does in a process that uses devices."""
        with file.open("r+b") as memory:
            fcntl.lockf(memory, fcntl.LOCK_EX, 1, row)
            memory.seek(row * 16 * 8)
            memory.write(struct.pack("16q", *(counts.get(number, 0) for number in range(16))))
            memory.flush()
            os.write(locked, b"l")
            os.read(end, 1)
            os._exit(0)


if __name__ == "__main__":
    run_tests()
