"""Each fault that only the sanitizer finds: what the test's message says, and that no time-out is needed for it."""

import os
from unittest import mock

import planted_replicas  # noqa: F401  # adds its faults
import planted_works  # noqa: F401  # adds its faults
from kit.planted_ranks import FaultCase, Fresh, Persistent, Threaded, body_for
from planted_sanitized import FAULTS

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
        _kinds = tuple(kind for kind in _fault.kinds if kind != "order-fails")
        setattr(BASES[_base], _name, sanitize(*_kinds)(body_for(_base, _fault)))


class PlantedSanitizedFaultTest(FaultCase):
    def check(self, name, base):
        fault = FAULTS[name]
        environ = {"TORCH_TESTING_EXT_SANITIZE_ORDER": "fail"} if "order-fails" in fault.kinds else {}
        with mock.patch.dict(os.environ, environ):
            self.assert_found(fault, BASES[base](name))


for _name, _fault in FAULTS.items():
    for _base in _fault.bases:
        setattr(
            PlantedSanitizedFaultTest,
            f"test_{_name}_{_base}",
            lambda self, name=_name, base=_base: self.check(name, base),
        )


if __name__ == "__main__":
    run_tests()
