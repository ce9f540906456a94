"""What the example needs of Lightning's Fabric: it starts its processes by itself."""

import processes
import torch.distributed as dist


class Fabric:
    def __init__(self, accelerator, devices, strategy):
        assert (accelerator, strategy) == ("cpu", "ddp_fork")
        self.world_size = devices

    def launch(self, function):
        def rank_main(rank, port):
            processes.set_variables(rank, self.world_size, port)
            dist.init_process_group("gloo")
            self.global_rank = rank
            function(self)

        processes.run(self.world_size, rank_main)

    def all_reduce(self, tensor, reduce_op):
        assert reduce_op == "sum"
        dist.all_reduce(tensor)
        return tensor
