# Owner(s): ["oncall: distributed"]
# ruff: noqa: F821

TP_DEGREE = 2
LR = 3e-5


def init_model(device_type, model_parallel_size): ...


class Test2dParallelIntegration(DTensorTestBase):
    def _check_module(self, m1, m2, check_grad): ...
    def test_2d_ddp_integration_functionality(self): ...
