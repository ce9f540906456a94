"""The environment variables of run_test.py that tests on other machines get."""

from __future__ import annotations

from collections.abc import Mapping

from torch_testing_ext.launch.settings import RUNNER_PREFIX

from .lines import fields_of

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
    return fields_of(
        {
            name: value
            for name, value in environ.items()
            if name not in _OF_MACHINE and not name.startswith(_PREFIXES_OF_MACHINE)
        }
    )
