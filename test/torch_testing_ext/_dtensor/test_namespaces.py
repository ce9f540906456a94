"""Changes of modules, classes and tables are noticed, with and without the help of Python's own count of them."""

import sys
from types import ModuleType
from unittest import mock

from torch_testing_ext._torch import namespaces
from torch_testing_ext._torch.namespaces import Namespaces
from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

SOURCE = """
table = {"one": 1, "inner": {"two": 2}}
def function(): ...
class Class:
    of_class = {"three": 3}
    counter = 0
    def method(self): ...
"""


class NamespacesTest(TestCase):
    def setUp(self):
        super().setUp()
        self.module = ModuleType("watched.module")
        exec(SOURCE, vars(self.module))
        modules = mock.patch.dict(sys.modules, {"watched": ModuleType("watched"), "watched.module": self.module})
        modules.start()
        self.addCleanup(modules.stop)

    @parametrize(
        "change",
        [
            "module.function = lambda: 0",
            "module.new = 1",
            "del module.function",
            "vars(module)['function'] = 1",
            "module.table['one'] = 2",
            "module.table['more'] = 2",
            "module.table['inner'].clear()",
            "module.Class.method = lambda self: 1",
            "module.Class.of_class['three'] = 4",
            "module.len = 1",
        ],
    )
    @parametrize("counted", [True, False])
    def test_a_change(self, change, counted):
        with mock.patch.object(namespaces, "HAS_VERSIONS", counted and namespaces.HAS_VERSIONS):
            watched = Namespaces([], ["watched"])
            self.assertFalse(watched.have_changed())
            exec(change, {"module": self.module})
            self.assertTrue(watched.have_changed())
            self.assertTrue(watched.have_changed(), "it is noticed once only")
            watched.remember()
            self.assertFalse(watched.have_changed())

    def test_a_change_that_is_undone(self):
        watched = Namespaces([], ["watched"])
        with mock.patch.object(self.module, "function", None), mock.patch.dict(self.module.table, one=7):
            self.assertTrue(watched.have_changed())
        self.assertFalse(watched.have_changed())

    def test_no_change(self):
        watched = Namespaces(["watched.module"], [], ignored=["counter"])
        self.module.imported = ModuleType("imported")
        self.module.Class.counter += 1
        self.module.Class.__slotnames__ = []
        self.module.table["one"] = self.module.table["one"]
        sys.modules["watched"].other = 1
        self.assertFalse(watched.have_changed())

    def test_what_changes_by_itself(self):
        watched = Namespaces([], ["watched"])
        self.module.Class.counter += 1
        self.module.table["inner"]["entry"] = 1  # a cache
        watched.ignore_changes()
        self.module.Class.counter += 1
        self.module.table["inner"]["another"] = 1
        self.assertFalse(watched.have_changed())
        self.module.Class.method = None
        self.assertTrue(watched.have_changed())

    def test_an_import_is_nothing_that_changes_by_itself(self):
        watched = Namespaces([], ["watched"])
        sys.modules["watched.late"] = ModuleType("watched.late")
        self.module.function = lambda: 1
        watched.ignore_changes()
        self.assertFalse(watched.have_changed())
        self.module.function = lambda: 2
        self.assertTrue(watched.have_changed())

    def test_pythons_count_is_used_where_it_exists(self):
        self.assertEqual(namespaces.HAS_VERSIONS, sys.implementation.name == "cpython" and sys.version_info < (3, 14))


instantiate_parametrized_tests(NamespacesTest)

if __name__ == "__main__":
    run_tests()
