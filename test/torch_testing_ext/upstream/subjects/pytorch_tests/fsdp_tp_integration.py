device_type = current_accelerator()


class TestTPFSDPIntegration(Base):
    def move(self, one):
        one.to(self.rank), one.to(self.rank)

    @skip_if_lt_x_gpu(4)
    def test_fsdp_tp_integration(self):
        return [
            CPUOffload(offload_params=True),
        ]

    def _test_fsdp_tp_integration(self, cpu_offload):
        one.to(self.rank), one.to(self.rank), one.to(self.rank)
        FSDP(
            cpu_offload=cpu_offload,
        )
        FSDP(
            cpu_offload=cpu_offload,
        )

    @skip_if_lt_x_gpu(4)
    def test_fsdp_tp_extension_grad(self):
        one.to(self.rank), one.to(self.rank)
        mine = FSDP(model)
        # FSDP comms
        counts[c10d_ops._allgather_base_]
        grads = mine()
