"""The entry point for pytest, which loads `torch_testing_ext.pytest_plugin`."""

pytest_plugins = ("torch_testing_ext.pytest_plugin",)
