"""Works are found in what operations return, and made complete."""

import torch
import torch.distributed as dist
from kit.own_process import in_own_process
from kit.plain_groups import fake_world

from torch_testing_ext._torch.operations import works


def boxed():
    future = torch.futures.Future()
    future.set_result([torch.ones(1)])
    work = torch._C._distributed_c10d._create_work_from_future(future)
    return work, work.boxed()


def test_works_of_results():
    work, box = boxed()
    assert works.work_of(box) is work and works.work_of(([torch.ones(1)], box)) is work
    assert works.work_of(([torch.ones(1)], None)) is None and works.work_of(torch.ones(1)) is None


@in_own_process
def test_complete_works():
    """In place of that of a fake group, whose future has nothing."""
    fake_world()
    outputs = [torch.ones(2)]
    made = works.with_complete_work((outputs, boxed()[1]), outputs)
    assert made[0] is outputs and len(made) == 2
    work = works.work_of(made)
    assert work.is_completed() and work.get_future().wait()[0] is outputs[0]
    alone = works.with_complete_work(boxed()[1], outputs)
    assert isinstance(works.work_of(alone), dist.Work)
