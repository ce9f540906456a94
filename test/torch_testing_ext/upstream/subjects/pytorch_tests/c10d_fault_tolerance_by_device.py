import os
import sys
import time

class AbstractFaultToleranceTest:
    def _rank_device(self, device):
        pass


class FaultToleranceTest(AbstractFaultToleranceTest):
    def test_reconfigure_basic(self, device):
        pass


class ReconfigureContractTest(TestCase):
    pass
