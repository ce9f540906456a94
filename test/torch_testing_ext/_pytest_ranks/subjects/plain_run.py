"""A run without ranks imports little of the package."""

import sys


def test_plain():
    ours = [name for name in sys.modules if name.startswith("torch_testing_ext.")]
    light = ["early_threads", "words", "terminal", "declarations", "setting_readers"]
    light += ["setting_names"]
    ours = [name.removeprefix("torch_testing_ext.") for name in ours]
    assert set(ours) == {
        "_process",
        *[f"_process.{name}" for name in light],
        "_machine",
        "_machine.fake_accelerator",
        "_tests",
        "_tests.launcher_variables",
        "launch",
        "launch.host_kinds",
        "launch.aspect",
        "launch.start_settings",
        *[name for name in ours if name.startswith("launch.aspects")],
        "pytest_plugin",
    }
    assert "torch" not in sys.modules
