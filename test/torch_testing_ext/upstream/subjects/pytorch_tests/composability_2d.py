from torch.distributed.tensor import DTensor, Replicate


class Test2dFSDP1ParallelIntegration:
    def init_model(self, device_type):
        _pre_dp_module_transform(twod_model)
        return model, twod_model, dp_pg

    def _check_module(self, one, other, check_grad=False):
        pass

    @skip_if_lt_x_gpu(4)
    def test_2d_ddp_integration_functionality(self):
        model, twod_model, dp_pg = self.init_model(self.device_type)
        self._check_module(model, twod_model, check_grad=True)
        self._check_module(model, twod_model)
