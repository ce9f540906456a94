def compiler_fn(no_inductor=False):
    return lambda gm: torch.compile(gm, backend="mine")

class Net:
    def forward(self):
        pass


class ReplicateTest:
    # TODO: consider using all devices
    @property
    def world_size(self):
        return min(2, torch.cuda.device_count())

    def setUp(self):
        super().setUp()

    def _test_compile(self, no_sync):
        for step in (0, 1):
            context = chosen(step)
            context = contextlib.nullcontext()

            with context:
                inner = (
                    contextlib.nullcontext()
                    if model_idx == 0
                    else other
                )
            if not no_sync or step == 1:
                for mine in models:
                    check(mine)
                for optim in optims:
                    optim.step()

class DDP_TP_Test:
    def setUp(self):
        # Hmm, it is a question
        torch.cuda.set_device("cuda:0")

    @unittest.skipIf(not HAS_GPU, "a reason")
    def test_ddp_tp(self):
        init_device_mesh(
            "cuda", (2, 2)
        )
        model = torch.compile(model)
        with compiled_autograd._enable(compiler_fn()):
            loss = model(data).sum()
            # TODO: We need something
            with self.assertRaises(AssertionError):
                loss.backward()

        # check(nothing)


if __name__ == "__main__":
    run_tests()
