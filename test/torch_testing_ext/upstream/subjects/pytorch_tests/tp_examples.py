class DistTensorParallelExampleTest:
    def _test_mlp_training_e2e(self, recompute_activation):
        if sequence:
            self.assertEqual(
                counts[functional.all_gather_into_tensor], 2
            )
        else:
            self.assertEqual(counts[functional.all_reduce], 1)

    @with_comms
    # TODO: input_reshard
    # @parametrize("recompute_activation", both)
    @parametrize("recompute_activation", one)
    def test_mlp_training(self, recompute_activation):
        pass
