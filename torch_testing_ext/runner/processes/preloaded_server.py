"""The preloaded server: the process that imports torch once for a whole run and forks those of the test files."""

import importlib
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import NoReturn

from torch_testing_ext._process import early_threads, file_reads, fork_safety, sessions, system
from torch_testing_ext._process.channels import Channel
from torch_testing_ext._process.messages import unexpected

from . import fork_parent_messages
from .file_process import run_and_exit, start_interpreter
from .fork_parent import ForkParent


def main() -> NoReturn:
    """`python -c "... main()" CHANNEL PARENT DIRECTORY DROP_IN COLLAPSE MODULES...`; DROP_IN, COLLAPSE: 0 or 1."""
    channel, parent = int(sys.argv[1]), int(sys.argv[2])
    directory = sys.argv[3]
    file_reads.start()
    sessions.start_session(parent, signal.SIGTERM)
    system.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[4] == "1":
        from torch_testing_ext.upstream import drop_in

        drop_in.install()
    serve_run(channel, directory, warm_up(sys.argv[6:], collapse=sys.argv[5] == "1"))


def serve_run(fd: int, directory: str, unsafe: str | None) -> NoReturn:
    """Serve the run at the other end of a descriptor. `unsafe`: why this process cannot be forked."""
    channel: Channel[fork_parent_messages.ToPreloadedServer] = Channel.on(fd, fork_parent_messages.ToPreloadedServer)
    preloaded_server = PreloadedServerProcess(channel)
    channel.send(fork_parent_messages.PreloadedServerReady(unsafe))
    preloaded_server.serve()
    # A client that was killed has not removed it. Without a check: getppid() shows that death only after a moment.
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def warm_up(modules: Iterable[str], collapse: bool) -> str | None:
    """Import modules that the test files will need. Returns the reason if this process is not safe to fork, or None."""
    for name in modules:
        # A file that needs the module will report the error.
        with suppress(Exception):
            importlib.import_module(name)
    from torch_testing_ext._machine import random_state
    from torch_testing_ext._torch import imported_garbage

    random_state.prepare_to_seed()
    file_reads.add_modules()
    imported_garbage.exempt_imported(garbage=2)
    unsafe = fork_safety.prepare_to_fork()
    if collapse and not unsafe:
        system.collapse_all()
    early = early_threads.explain_early_threads()
    return f"{unsafe}. {early}" if unsafe and early else unsafe


class PreloadedServerProcess(ForkParent[fork_parent_messages.ToPreloadedServer]):
    """Serves the requests of the runner."""

    def on_request(self, message: fork_parent_messages.ToPreloadedServer) -> None:
        """Fork the child that the runner asks for."""
        match message:
            case fork_parent_messages.OpenFile():
                to_file: Channel[fork_parent_messages.ToFile] = Channel.on(message.fds[0], fork_parent_messages.ToFile)
                self.start(message.number, partial(run_and_exit, message, to_file))
                to_file.close()
            case fork_parent_messages.CountDevices():
                to_counter: Channel[fork_parent_messages.Nothing] = Channel.on(
                    message.fds[0], fork_parent_messages.Nothing
                )
                self.start(message.number, partial(_count_devices, to_counter))
                to_counter.close()
            case fork_parent_messages.FindFiles():
                to_finder: Channel[fork_parent_messages.Nothing] = Channel.on(
                    message.fds[0], fork_parent_messages.Nothing
                )
                self.start(message.number, partial(_find_files, message, to_finder))
                to_finder.close()
            case fork_parent_messages.StartUnit():
                # A file that is not safe to fork.
                self.start_unit(message, start_interpreter)
            case fork_parent_messages.Kill():
                raise AssertionError("Kill is carried out by ForkParent")
            case _:
                unexpected(message)


def _find_files(request: fork_parent_messages.FindFiles, channel: Channel[fork_parent_messages.Nothing]) -> NoReturn:
    # It imports pytest.
    from . import pytest_files

    pytest_files.run_and_exit(request, channel)


def _count_devices(channel: Channel[fork_parent_messages.Nothing]) -> NoReturn:
    """Count accelerators, in a separate process: one that has queried them is not safe to fork."""
    import torch

    from torch_testing_ext._machine import accelerators, device_questions
    from torch_testing_ext._machine.device_needs import facts_from
    from torch_testing_ext._process.questions import NoAnswer
    from torch_testing_ext._torch.devices import cuda_state

    fork_safety.of_process.mark_fork_safe()
    try:
        kind, count = accelerators.runtime(), accelerators.device_count()
    except NoAnswer as error:
        channel.send(fork_parent_messages.DevicesCounted(None, 0, failure=str(error)))
        os._exit(0)
    # Now, as long as this process can still fork one that asks.
    why_none = ""
    with suppress(NoAnswer):
        why_none = accelerators.why_no_device()
    uuids = tuple(device_questions.ask_uuids()) if count else ()
    facts = facts_from(device_questions.ask_facts()) if count else ()
    nccl = cuda_state.nccl_version() if count else ()
    backend = torch.distributed.Backend.default_device_backend_map.get(accelerators.accelerator_type() or "", "")
    channel.send(
        fork_parent_messages.DevicesCounted(kind, count, torch.__version__, uuids, facts, nccl, backend, why_none)
    )
    os._exit(0)
