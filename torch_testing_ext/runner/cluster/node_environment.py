"""The environment of tests on other machines: variables of run_test.py, and nothing of a worker of Ray."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch_testing_ext.launch.settings import RUNNER_PREFIX

# What describes a machine, a login or a job: each node has its own.
_OF_MACHINE = {
    *("PATH", "HOME", "USER", "LOGNAME", "MAIL", "SHELL", "PWD", "OLDPWD", "SHLVL", "_", "HOSTNAME", "HOSTTYPE"),
    *("TMPDIR", "TMP", "TEMP", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"),
    *("DISPLAY", "WAYLAND_DISPLAY", "TERM", "COLORTERM", "COLUMNS", "LINES", "TTY", "CUDA_HOME", "CUDA_PATH"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    *("NVIDIA_VISIBLE_DEVICES", "INVOCATION_ID", "JOURNAL_STREAM", "KUBECONFIG", "EDITOR", "PAGER"),
}
_PREFIXES_OF_MACHINE = (
    *("RAY_", "SLURM_", "SSH_", "XDG_", "DBUS_", "CONDA_", "KUBERNETES_", "LC_", "LESS", "PYENV_", "SUDO_"),
    *("TORCH_TESTING_EXT_LEASED", RUNNER_PREFIX),
)


def environment_for_nodes(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a test may read to decide what it does: all but those that describe this machine."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_MACHINE and not name.startswith(_PREFIXES_OF_MACHINE) and _is_text(name + value)
    }


def _is_text(text: str) -> bool:
    """Whether it can be written as UTF-8: an environment may hold other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def undo_worker() -> list[str]:
    """Give this process, which a worker of Ray has started, what a shell would. Returns a warning if that fails."""
    with suppress(OSError):  # only root may lower it: the kernel then prefers our processes when it is out of memory
        Path("/proc/self/oom_score_adj").write_text("0")
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (most, most))
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, min(nice, 0))
    except OSError:
        more = "which makes them slower beside other work: start Ray with RAY_worker_niceness=0"
        return [f"tests run at niceness {nice}, {more}"]
    return []
