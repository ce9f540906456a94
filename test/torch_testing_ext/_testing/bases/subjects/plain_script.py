import os
import pickle
import sys

assert "torch" not in sys.modules
assert not any(name.startswith("torch_testing_ext") for name in sys.modules)
assert sys.argv == [__file__, "a", "--b"] and __name__ == "__main__" and sys.path[0] == os.path.dirname(__file__)
import beside  # noqa: F401 (it is beside the script)


class Own:
    pass


assert type(pickle.loads(pickle.dumps(Own()))) is Own
import torch
import torch.distributed as dist

assert torch.__spec__.loader.get_filename("torch") == torch.__file__
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
if os.environ["RANK"] == "1":
    os._exit(0)
