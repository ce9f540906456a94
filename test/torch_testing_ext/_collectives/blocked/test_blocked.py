"""Tests what a rank tells of the call that it is in: the method, the variable that has it, the keys of a store."""

import datetime
import sys
import unittest
from datetime import timedelta

from torch_testing_ext._collectives.blocked import method_calls
from torch_testing_ext.common_utils import run_tests


class Probe:
    """Its methods look at the frame that calls them."""

    def get(self, *args, **kwargs):
        frame = sys._getframe(1)
        return method_calls.method_call_of(frame.f_code, frame.f_lasti), method_calls.keys_in_words(frame, "get", list)

    def wait(self, *args, **kwargs):
        frame = sys._getframe(1)
        return method_calls.method_call_of(frame.f_code, frame.f_lasti), method_calls.timeout_of_wait(frame)


KEY = "of the module"


class CallsTest(unittest.TestCase):
    def setUp(self):
        self.store, self.name = Probe(), "mine"

    def test_the_method_and_its_owner(self):
        store = self.store
        self.assertEqual(store.wait()[0], ("wait", 0, ("store",), ""))
        self.assertEqual(self.store.wait()[0], ("wait", 0, ("self", "store"), ""))
        stores = [store]
        self.assertEqual(stores[0].wait()[0], ("wait", 0, (), ""))
        self.assertEqual(store.get(str(self.name.upper().lower()), f"{self.name} {store}")[0].name, "get")
        self.assertEqual(store.get(f"{self.name}", [str(1), *self.name])[0][:2], ("get", 2))
        self.assertEqual(store.get(key="x")[0][:2], ("get", 1))

    def test_what_is_not_certain(self):
        store, get, is_late, none = self.store, self.store.get, True, None
        self.assertIsNone(get("a")[0])
        self.assertIsNone((store.get if is_late else get)("a")[0])
        self.assertIsNone((get if is_late else store.get)("a")[0])
        self.assertIsNone((store.get if is_late else store.wait)("a" if is_late else "b")[0])
        self.assertIsNone((none or store.get)("a")[0])

    def test_arguments_of_two_ways(self):
        store, is_late, rank, none = self.store, True, 2, None
        of_store = ("get", 1, ("store",), "")
        self.assertEqual(store.get("a" if is_late else "b")[0], of_store)
        self.assertEqual(store.get("a" if rank != 2 else "b"), (of_store, ("'b'",)))
        self.assertEqual(store.get("a" if rank <= 2 else f"{rank}"), (of_store, ("'a'",)))
        self.assertEqual(store.get(none or self.name)[0], of_store)
        self.assertEqual(store.get(self.name and KEY)[0], of_store)
        self.assertEqual(store.get("a" if is_late and rank else "b")[0], of_store)
        self.assertEqual(store.get([name + KEY for name in "ab"] if is_late else "b")[0], of_store)
        self.assertEqual(self.store.get("a", "x" if is_late else "y")[0], ("get", 2, ("self", "store"), ""))
        self.assertEqual(self.store.get(key="a" if is_late else "b")[0].name, "get")

    def test_keys(self):
        store, rank, listed = self.store, 2, ["a", "b"]
        self.assertEqual(store.get("plain")[1], ("'plain'",))
        self.assertEqual(store.get(f"{rank - 1} of {self.name}")[1], ("'1 of mine'",))
        self.assertEqual(store.get(KEY)[1], ("'of the module'",))
        self.assertEqual(store.get(["a", KEY])[1], ("'a'", "'of the module'"))
        self.assertEqual(store.get(listed)[1], ("'a'", "'b'"))
        self.assertEqual(store.get(self.id())[1], ("self.id()",))
        self.assertEqual(store.get(f"{rank:03}")[1], ("f'{rank:03}'",))
        self.assertEqual(store.get(["a"], timedelta(seconds=9))[1], ("'a'",))
        self.assertEqual((store.get("a")[1], store.get("b")[1]), ((), ()))  # two calls in a line

    def test_time_outs(self):
        store, seconds, limit = self.store, 3, timedelta(minutes=1)
        self.assertEqual(store.wait(["a"], timedelta(seconds=seconds))[1], 3.0)
        self.assertEqual(store.wait(["a"], datetime.timedelta(minutes=2, seconds=1))[1], 121.0)
        self.assertEqual(store.wait(["a"], limit)[1], 60.0)
        self.assertIsNone(store.wait(["a"])[1])
        self.assertIsNone(store.wait(["a"], timedelta(seconds=float("3")))[1])


if __name__ == "__main__":
    run_tests()
