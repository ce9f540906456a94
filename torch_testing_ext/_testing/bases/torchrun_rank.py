"""Runs a script in a process of torchrun, as Python does, and leaves the collectives of this rank when Python exits.

It is started as a file: torchrun_rank.py FOLDER SANITIZE SCRIPT ARGUMENTS. The script decides when torch is imported:
what it sets before that, such as environment variables, has its effect.
"""

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import sys
import threading
import types
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any


class Recording(importlib.abc.MetaPathFinder):
    """The files that this rank leaves in a folder for the process that has started torchrun.

    It begins when torch has been imported, which it sees as a finder of modules.
    """

    def __init__(self, folder: str, sanitize: str):
        self._folder = folder
        self._sanitize = sanitize
        self._rank = int(os.environ["RANK"])
        self._is_on = False
        # What the rank notes of its threads, until it exits.
        self._noting = ExitStack()
        self._dead: Any = ()
        atexit.register(self._write_collectives)
        if "torch" in sys.modules:
            self._begin()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find torch, once, and begin when it has been executed."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader = spec.loader

            def exec_module(module: types.ModuleType) -> None:
                # Have the method of the class again.
                del loader.exec_module
                loader.exec_module(module)
                self._begin()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _begin(self) -> None:
        """Record the collectives of this rank from now on."""
        file = Path(__file__).absolute()
        package = str(file.parents[2])
        sys.path.append(package)
        try:
            import torch.distributed

            from torch_testing_ext._process import messages
            from torch_testing_ext._torch.groups import watched_groups
            from torch_testing_ext.launch import AccountWriter, RankContext, rank_collectives
            from torch_testing_ext.launch.aspects import warnings_in_rank
            from torch_testing_ext.launch.causes import is_of_lost_peer
            from torch_testing_ext.launch.jobs import Sanitize, log_of
        finally:
            sys.path.remove(package)
        if torch.distributed.is_available():
            world_size = int(os.environ["WORLD_SIZE"])
            context = RankContext(self._rank, world_size, Path(self._folder), AccountWriter(None))
            context.enter()
            watched_groups.watch_process_groups(lambda name: nullcontext(), is_of_lost_peer)
            sanitize = messages.from_json(self._sanitize, messages.by_name(Sanitize))
            rank_collectives.begin_sanitizing(self._rank, sanitize, log_of(self._folder, self._rank))
            self._dead = self._noting.enter_context(warnings_in_rank.uncaught_in_threads())
            self._is_on = True

    def end_threads(self) -> None:
        """Wait for the threads of a script that is over, and raise what torch.distributed has raised in one."""
        if self._is_on:
            from torch_testing_ext.launch.aspects import warnings_in_rank

            threading._shutdown()  # type: ignore[attr-defined, unused-ignore]
            warnings_in_rank.raise_of_collectives(self._dead)

    def _write_collectives(self) -> None:
        """Write the file when Python exits."""
        data = b""
        if self._is_on:
            from torch_testing_ext.launch import rank_collectives

            try:
                # What it raises is in its log, too.
                rank_collectives.end_of_sanitizing()
            finally:
                data = rank_collectives.collectives_of_test()
        target = os.path.join(self._folder, f"rank{self._rank}.{os.getpid()}")
        with open(f"{target}.new", "wb") as file:
            file.write(data)
        os.replace(f"{target}.new", f"{target}.left")


def main() -> None:
    folder, sanitize, script, *words = sys.argv[1:]
    recording = Recording(folder, sanitize)
    sys.argv = [script, *words]
    # The flag is new in Python 3.11.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    module = types.ModuleType("__main__")
    vars(module).update(__file__=script, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    with io.open_code(script) as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    try:
        exec(code, vars(module))
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
    recording.end_threads()


if __name__ == "__main__":
    main()
