"""[DDP][TP][test] Compare gradients and parameters of DDP with TP

Problem: the test compares no gradient and no parameter. `_check_module` loops
over the parameters that the 2-D model lists, and after the first forward it
lists none.

Cause: hooks of `_pre_dp_module_transform` replace the parameters by DTensors,
which are not parameters of the module, in every forward. DDP and the optimizer
keep using the local tensors that there were before.

Fix: take those tensors and their placements before the first forward. Compare
all of them, as whole tensors, with the parameters of the 1-D model. Run the test
on CPU, too, where it was skipped: nothing in it needs an accelerator.

Test plan: CUDA_VISIBLE_DEVICES= python
test/distributed/_composable/test_composability/test_2d_composability.py -k
test_2d_ddp_integration_functionality
With a wrong gradient in one rank of the 2-D model the test now fails.
"""

FILE = "test/distributed/_composable/test_composability/test_2d_composability.py"
CLASS = "Test2dFSDP1ParallelIntegration"
TEST = f"{CLASS}.test_2d_ddp_integration_functionality"

PLACEMENTS = """\
        placements = {
            f"module.{name}": param.placements
            for name, param in twod_model.named_parameters()
        }
"""
PARAMETERS = """\
        # The first forward removes the parameters from the module; DDP keeps using these
        twod_params = {
            name: (param, mesh_2d["tp"], placements[name])
            for name, param in twod_model.named_parameters()
        }
"""
CHECK = """\
    def _check_module(self, model, twod_params, check_grad=False):
        expected = dict(model.named_parameters())
        self.assertEqual(set(twod_params), set(expected))
        for name, (local, tp_mesh, placements) in twod_params.items():
            wanted = expected[name]
            if check_grad:
                self.assertIsNotNone(local.grad, name)
                local, wanted = local.grad, wanted.grad
            whole = DTensor.from_local(local.detach(), tp_mesh, placements)
            self.assertEqual(whole.full_tensor(), wanted, msg=name)
"""


def edit(source):
    source.sub(f"{CLASS}.init_model", r"^(?= +_pre_dp_module_transform\()", PLACEMENTS)
    source.sub(f"{CLASS}.init_model", r"^( +return .*), dp_pg$", rf"{PARAMETERS}\1, twod_params, dp_pg")
    source.sub(f"{CLASS}._check_module", r"(?s)\A.*\Z", CHECK)
    source.sub(TEST, r"@skip_if_lt_x_gpu\(4\)", "@skip_if_lt_x_gpu(4, allow_cpu=True)")
    source.sub(TEST, r", dp_pg = self\.init_model", ", twod_params, dp_pg = self.init_model")
    source.sub(TEST, r"(_check_module\(\w+), twod_model", r"\1, twod_params", times=2)
