import os
import sys

class AbstractFaultToleranceTest:
    def help(self):
        pass

    def test_reconfigure_basic(self):
        pass


class ReconfigureContractTest(TestCase):
    pass
