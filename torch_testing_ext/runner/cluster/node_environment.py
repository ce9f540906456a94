"""The environment of tests on other machines: variables and versions of the runner, nothing of a worker of Ray."""

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path

import torch_testing_ext
from torch_testing_ext._machine.device_locks import LEASE_FOLDER, LEASED
from torch_testing_ext._machine.device_masks import all_masks
from torch_testing_ext._process.devices_setting import DEVICES_OF_RUN
from torch_testing_ext._process.project_settings import RUNNER_PREFIX

from .agent_messages import NodeFacts
from .ray_actor import digest_of

# What describes a machine, a login or a job: each node has its own.
_OF_MACHINE = {
    *("PATH", "HOME", "USER", "LOGNAME", "MAIL", "SHELL", "PWD", "OLDPWD", "SHLVL", "_", "HOSTNAME", "HOSTTYPE"),
    *("TMPDIR", "TMP", "TEMP", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"),
    *("DISPLAY", "WAYLAND_DISPLAY", "TERM", "COLORTERM", "COLUMNS", "LINES", "TTY", "CUDA_HOME", "CUDA_PATH"),
    *("NVIDIA_VISIBLE_DEVICES", "INVOCATION_ID", "JOURNAL_STREAM", "KUBECONFIG", "EDITOR", "PAGER"),
}
_PREFIXES_OF_MACHINE = (
    *("RAY_", "SLURM_", "SSH_", "XDG_", "DBUS_", "CONDA_", "KUBERNETES_", "LC_", "LESS", "PYENV_", "SUDO_"),
)

# The runner decides for the nodes.
_OF_RUN = (LEASED, LEASE_FOLDER, RUNNER_PREFIX)
# Not UTF-8: an environment may hold any.
_OTHER_BYTES = re.compile("[\ud800-\udfff]")
_SECRET = re.compile(
    r"(?i)(^|_)(TOKENS?|SECRETS?|PASS|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|KEYS?|CREDENTIALS?|AUTH|COOKIE|PAT)(_|$)"
)


def environment_for_nodes(environ: Mapping[str, str], choice: str = "") -> dict[str, str]:
    """The variables that a test may read: all but secrets and what is of this machine. `choice`: of cluster.env."""
    named = names_in(choice)
    sent = {}
    masks = all_masks(environ)
    for name, value in environ.items():
        if name not in named and (_is_of_machine(name) or _SECRET.search(name)):
            continue
        # The option of the run, which counts there as here.
        is_chosen = name == DEVICES_OF_RUN or _is_chosen(name, choice)
        if name in masks or name.startswith(_OF_RUN) or not is_chosen:
            continue
        if not _OTHER_BYTES.search(name + value):
            sent[name] = value
    return sent


def names_in(choice: str) -> list[str]:
    """The names or patterns of cluster.env, with their dashes."""
    return [name for name in choice.split(",") if name]


def _is_chosen(name: str, choice: str) -> bool:
    patterns = names_in(choice)
    if not patterns or patterns[0].startswith("-"):
        return not any(fnmatchcase(name, pattern[1:]) for pattern in patterns)
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def notes_on_environment(environ: Mapping[str, str], choice: str = "") -> list[str]:
    """The variables that are not sent because they look like secrets, and names that are none, in words."""
    sent = environment_for_nodes(environ, choice)
    secrets = []
    for name in sorted(environ):
        if name in sent or _is_of_machine(name):
            continue
        if _SECRET.search(name) and _is_chosen(name, choice):
            secrets.append(name)
    unknown = []
    for name in names_in(choice):
        if not name.startswith("-") and "*" not in name and name not in environ:
            unknown.append(name)
    notes = []
    if secrets:
        notes.append(
            "variables that look like secrets are not sent to the nodes, unless cluster.env names them: "
            + ", ".join(secrets)
        )
    if unknown:
        notes.append(f"cluster.env names variables that are not set here: {', '.join(unknown)}")
    return notes


def withheld_variables(environ: Mapping[str, str], choice: str) -> set[str]:
    """The variables that a program on a node must not get although it has all those of this machine."""
    sent = environment_for_nodes(environ, choice)
    return {name for name in environ if name not in sent and not _is_of_machine(name)}


def _is_of_machine(name: str) -> bool:
    return name in _OF_MACHINE or name.startswith(_PREFIXES_OF_MACHINE)


def undo_worker() -> list[str]:
    """Give this process, which a worker of Ray has started, what a shell would. Returns a warning if that fails."""
    # Only root may lower it: the kernel then prefers our processes when it is out of memory.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0", encoding="ascii")
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


MISSING = "not installed"
_NAMES = {
    "package": "torch_testing_ext",
    "torch": "torch",
    "cuda": "CUDA or ROCm of torch",
    "python": "Python",
    "platform": "platform",
}


@functools.cache
def facts_of_machine() -> NodeFacts:
    torch = _torch_version()
    return NodeFacts(
        _package(),
        torch.get("__version__", MISSING),
        torch.get("cuda", "") or torch.get("hip", ""),
        platform.python_version(),
        f"{platform.system()} {platform.machine()}",
    )


def _package() -> str:
    try:
        version = importlib.metadata.version("torch-testing-ext")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed as a package"
    # A version under development has one number for many states.
    return f"{version}, sources {digest_of(str(Path(torch_testing_ext.__file__).parent))[:12]}"


def _torch_version() -> dict[str, str]:
    """The texts that torch/version.py assigns: importing torch takes seconds."""
    with suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.submodule_search_locations:
            file = Path(spec.submodule_search_locations[0], "version.py")
            assignment = r"^(\w+)\s*(?::[^=\n]*)?=\s*(['\"])(.*?)\2\s*$"
            matches = re.findall(assignment, file.read_text(encoding="utf-8"), re.MULTILINE)
            return {name: value for name, _, value in matches}
    return {}


def differing_facts(here: NodeFacts, nodes: Mapping[str, NodeFacts]) -> list[str]:
    """A line for each fact in which a node differs from this machine."""
    lines = []
    for node, there in nodes.items():
        for field in fields(NodeFacts):
            on_node = getattr(there, field.name)
            on_this_machine = getattr(here, field.name)
            if on_node != on_this_machine:
                name = _NAMES[field.name]
                lines.append(f"  {node}: {name} is {on_node or 'none'}, here {on_this_machine or 'none'}")
    return lines
