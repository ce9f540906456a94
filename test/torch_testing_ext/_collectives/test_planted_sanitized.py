"""Each fault that only the sanitizer finds: what the test's message says, and that no time-out is needed for it."""

import os
import unittest
from unittest import mock

from planted_sanitized import FAULTS
from test_planted_faults import Fresh, Persistent, Threaded, _in_fresh_ranks, _outcome_of

from torch_testing_ext._cases import ranked
from torch_testing_ext.common_distributed import sanitize
from torch_testing_ext.common_utils import run_tests


class SanitizedFresh(Fresh):
    pass


class SanitizedPersistent(Persistent):
    pass


class SanitizedThreaded(Threaded):
    pass


BASES = {"fresh": SanitizedFresh, "persistent": SanitizedPersistent, "threaded": SanitizedThreaded}
for _name, _fault in FAULTS.items():
    for _base in _fault.bases:
        _body = _in_fresh_ranks(_fault.body) if _base == "fresh" else lambda self, body=_fault.body: body(self)
        _kinds = tuple(kind for kind in _fault.kinds if kind != "order-fails")
        setattr(BASES[_base], _name, sanitize(*_kinds)(_body))


class PlantedSanitizedFaultTest(unittest.TestCase):
    def check(self, name, base):
        fault = FAULTS[name]
        environ = {"TORCH_TESTING_EXT_SANITIZE_ORDER": "fail"} if "order-fails" in fault.kinds else {}
        with mock.patch.object(ranked, "TIMEOUT_DEFAULT", 1000.0), mock.patch.dict(os.environ, environ):
            outcome, message = _outcome_of(BASES[base](name))
        self.assertEqual(outcome, fault.outcome, message)
        self.assertNotIn("timed out after", message)
        at = 0
        for text in fault.texts:
            found = message.find(text, at)
            self.assertGreaterEqual(found, 0, f"{text!r} is not, or not in this order, in:\n{message}")
            at = found + len(text)


for _name, _fault in FAULTS.items():
    for _base in _fault.bases:
        setattr(
            PlantedSanitizedFaultTest,
            f"test_{_name}_{_base}",
            lambda self, name=_name, base=_base: self.check(name, base),
        )


if __name__ == "__main__":
    run_tests()
