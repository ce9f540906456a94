# a test
import os
import unittest

import expecttest
import linked
import numpy
import shared.leaf
from shared.middle import Middle


class Test(unittest.TestCase):
    def test(self):
        found = [Middle().value(2), Middle().constant, shared.leaf.DATA, linked.VALUE, expecttest.__file__]
        found += [getattr(numpy, "__version__", "none"), os.environ.get("EDITED"), os.environ.get("OMP_NUM_THREADS")]
        with open("result", "w") as file:
            file.write(repr(found))
        print(found, numpy.__name__)
        self.assertNotEqual(Middle().value(2) % 3, 0, found)


if __name__ == "__main__":
    unittest.main()
