"""Programs of meshes, pipelines and handlers of errors in which most ranks only stand by; one slip each."""

from __future__ import annotations

import contextlib
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from kit.early_looks import TWO_LOOKS
from kit.told import Programs

PROGRAMS = Programs(__name__)
told, quiet = PROGRAMS.told, PROGRAMS.quiet


def dp_and_tp(names: tuple[str, str] = ("dp", "tp")) -> Any:
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


# -- a wrong group


@told(
    "rank 3 waits in group mesh_tp (all_reduce #1",
    "for rank 2, which waits in group mesh_dp (all_reduce #1",
    "for rank 0, which has left",
    size=4,
)
def the_other_dimension_of_a_mesh(self):
    mesh = dp_and_tp()
    if self.rank == 2:
        dist.all_reduce(torch.ones(4), group=mesh.get_group("dp"))  # rank 2
    for _ in range(2):
        dist.all_reduce(torch.ones(4), group=mesh.get_group("tp"))  # rank 3


@told(
    "rank 1 waits in group mesh_dp, which rank 3 calls group mesh_tp (all_reduce #1",
    "for rank 3, which waits in group mesh_tp, which rank 3 calls group mesh_dp (all_reduce #1",
    "for rank 2, which has left",
    size=4,
)
def a_mesh_that_one_rank_turns(self):
    mesh = dp_and_tp(("tp", "dp") if self.rank == 3 else ("dp", "tp"))
    dist.all_reduce(torch.ones(4), group=mesh.get_group("dp"))  # rank 1


@told("rank 3", "create", "in new_group #", size=4)
def a_mesh_of_another_shape(self):
    shape = (4, 1) if self.rank == 3 else (2, 2)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    dist.all_reduce(torch.ones(4), group=mesh.get_group("dp"))


@told("create", "in new_group #", size=4)
def subgroups_of_another_size(self):
    group, _ = dist.new_subgroups(4 if self.rank == 1 else 2)  # rank 1
    dist.all_reduce(torch.ones(4), group=group)


@told(
    "rank 3 waits in group node1 (all_reduce #2",
    "for rank 2, which waits in group leaders (all_reduce #1",
    "for rank 0, which waits in group node0 (all_reduce #3",
    "for rank 1, which has left",
    size=4,
)
def leaders_of_nodes(self):
    """Rank 0 reduces among the leaders in the wrong group, which its node lacks."""
    nodes = [dist.new_group([0, 1], group_desc="node0"), dist.new_group([2, 3], group_desc="node1")]
    leaders = dist.new_group([0, 2], group_desc="leaders")
    node = nodes[self.rank // 2]
    dist.all_reduce(torch.ones(4), group=node)
    if self.rank in (0, 2):
        dist.all_reduce(torch.ones(4), group=node if self.rank == 0 else leaders)
    dist.all_reduce(torch.ones(4), group=node)  # rank 3


@told(
    "rank 1 waits in group", "(new_group, line ", "for rank 2, which waits in group", "for rank 1", size=4, seconds=900
)
def groups_of_which_members_make_more(self):
    """torch names such a group by its members and the number of those before it, which is another one in rank 1.

    The test may take longer than the time-out of its store, which gloo does not heed.
    """
    for members in ([0, 1], [1, 2]):
        if self.rank in members:
            dist.new_group(members, use_local_synchronization=True)  # rank 1


# -- messages of a pipeline


@told(
    "rank 1 waits in the default group (send #1 to rank 3",
    "for rank 3, which waits in the default group (recv #1 from rank 2",
    "for rank 2, which waits in the default group (recv #1 from rank 1",
    "for rank 1",
    size=4,
)
def a_stage_that_sends_past_its_neighbour(self):
    """Rank 1 sends to rank 3, which expects the activations of rank 2."""
    activations = torch.ones(4)
    if self.rank:
        dist.recv(activations, self.rank - 1)
    if self.rank < 3:
        dist.send(activations, 3 if self.rank == 1 else self.rank + 1)  # rank 1


@told("left without", "recv #1 from rank 2", size=4)
def a_ring_with_a_gap(self):
    after, before = (self.rank + 1) % 4, (self.rank - 1) % 4
    operations = [dist.P2POp(dist.irecv, torch.ones(4), before), dist.P2POp(dist.isend, torch.ones(4), after)]
    for work in dist.batch_isend_irecv(operations[: 1 if self.rank == 2 else 2]):
        work.wait()


@told("rank 0 sends [4] float32 to rank 1, which receives [4] float16, in message #2 of the default group", size=4)
def a_type_of_the_second_microbatch(self):
    for microbatch in range(2):
        dtype = torch.float16 if (self.rank, microbatch) == (1, 1) else torch.float32
        if self.rank:
            dist.recv(torch.ones(4, dtype=dtype), self.rank - 1)
        if self.rank < 3:
            dist.send(torch.ones(4), self.rank + 1)


# -- errors, and who raised first


@told("rank 2 of 4 raised KeyError: 'layer 7'", size=4)
def an_error_that_others_translate(self):
    """As frameworks do, which give the error of a collective another name."""
    if self.rank == 2:
        raise KeyError("layer 7")  # rank 2
    try:
        dist.all_reduce(torch.ones(4))
    except RuntimeError as error:
        raise ValueError(f"step failed on rank {self.rank}") from error  # ranks 0, 1, 3


@told("rank 2 of 4 raised KeyError: 'layer 7'", size=4)
def an_error_that_others_hide(self):
    """The error that they raise in its place has no cause."""
    if self.rank == 2:
        raise KeyError("layer 7")  # rank 2
    try:
        dist.all_reduce(torch.ones(4))
    except RuntimeError:
        raise ValueError(f"step failed on rank {self.rank}") from None


@told("rank 1 of 4 exited with code 3 before the test finished", size=4)
def an_exit_in_a_subgroup(self):
    pair = dist.new_group([0, 1])
    if self.rank == 1:
        sys.exit(3)  # rank 1
    if self.rank == 0:
        dist.all_reduce(torch.ones(4), group=pair)  # rank 0
    dist.barrier()  # ranks 2, 3


@told("rank 0 of 4 raised ValueError", "2", size=4)
def a_root_that_is_no_member(self):
    """torch refuses it, in this rank alone."""
    pair = dist.new_group([0, 1], group_desc="pair")
    if self.rank < 2:
        dist.broadcast(torch.ones(4), 2 if self.rank == 0 else 0, group=pair)  # rank 0
    dist.barrier()


@told("rank 1 calls all_reduce [4] int32", "in call #1 of group pair", size=4)
def a_mismatch_in_a_subgroup(self):
    """The other ranks lose their peers for it."""
    pair = dist.new_group([0, 1], group_desc="pair")
    if self.rank < 2:
        mine = torch.ones(4, dtype=torch.int32 if self.rank == 1 else torch.float32)
        dist.all_reduce(mine, group=pair)  # rank 1
        self.assertEqual(mine.tolist(), [2, 2, 2, 2])
    dist.barrier()


@told("rank 2 of 4 failed: AssertionError", size=4)
def an_assertion_between_two_steps(self):
    for step in range(2):
        dist.all_reduce(torch.ones(4))
        self.assertNotEqual((self.rank, step), (2, 0))  # rank 2


@told("ranks 0, 1, 3 left before all_reduce #2; rank 2 is waiting in it", size=4)
def a_retry_of_one_rank(self):
    for _ in range(2 if self.rank == 2 else 1):
        dist.all_reduce(torch.ones(4))  # rank 2


@told("rank 1 left before all_reduce #1 of group pair; rank 0 is waiting in it", size=4)
def a_group_that_one_destroys(self):
    pair = dist.new_group([0, 1], group_desc="pair")
    dist.barrier()
    if self.rank == 1:
        dist.destroy_process_group(pair)
    if self.rank == 0:
        dist.all_reduce(torch.ones(4), group=pair)  # rank 0


@told("rank 2 of 4 raised", "ValueError: planted", size=4)
def an_error_in_a_hook(self):
    model = torch.nn.Linear(2, 2)

    def reduce(gradient):
        if self.rank == 2:
            raise ValueError("planted")  # rank 2
        dist.all_reduce(gradient)
        return gradient

    for parameter in model.parameters():
        parameter.register_hook(reduce)
    model(torch.ones(1, 2)).sum().backward()


@told("rank 1 of 4 raised", "ValueError: planted", size=4)
def an_error_in_a_context(self):
    @contextlib.contextmanager
    def synchronised():
        yield
        dist.barrier()

    with synchronised():
        if self.rank == 1:
            raise ValueError("planted")  # rank 1


# -- sound


@quiet(size=4)
def both_dimensions_of_a_mesh(self):
    mesh = dp_and_tp()
    for name in ("dp", "tp", "tp", "dp"):
        dist.all_reduce(torch.ones(4), group=mesh.get_group(name))


@quiet(size=4)
def slices_of_a_mesh(self):
    mesh = dist.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    for name in ("pp", "tp"):
        dist.all_reduce(torch.ones(4), group=mesh[name].get_group())
    dist.all_reduce(torch.ones(4), group=mesh["dp", "tp"]._flatten().get_group())


@quiet(size=4)
def nodes_with_leaders(self):
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    leaders = dist.new_group([0, 2])
    node = nodes[self.rank // 2]
    for _ in range(3):
        dist.all_reduce(torch.ones(4), group=node)
        if self.rank % 2 == 0:
            dist.all_reduce(torch.ones(4), group=leaders)
        dist.broadcast(torch.ones(4), self.rank // 2 * 2, group=node)


@quiet(size=4)
def a_pipeline(self):
    for _ in range(3):
        if self.rank:
            dist.recv(torch.ones(4), self.rank - 1)
        if self.rank < 3:
            dist.send(torch.ones(4), self.rank + 1)


@quiet(size=4)
def a_ring(self):
    after, before = (self.rank + 1) % 4, (self.rank - 1) % 4
    for _ in range(3):
        operations = [dist.P2POp(dist.irecv, torch.ones(4), before), dist.P2POp(dist.isend, torch.ones(4), after)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


@quiet(size=4)
def a_late_stage(self):
    """Three ranks wait in a chain for the last one, which sleeps."""
    if self.rank < 3:
        dist.recv(torch.ones(4), self.rank + 1)
    else:
        time.sleep(TWO_LOOKS)
    if self.rank:
        dist.send(torch.ones(4), self.rank - 1)


@quiet(size=4)
def an_early_rank(self):
    """It has no part in what follows, and leaves."""
    trio = dist.new_group([0, 1, 2])
    if self.rank == 3:
        return
    time.sleep(0.3)
    dist.all_reduce(torch.ones(4), group=trio)


@quiet(size=4)
def groups_that_members_make(self):
    for members in ([0, 1], [2, 3], [0, 3], [1, 2]):
        if self.rank in members:
            group = dist.new_group(members, use_local_synchronization=True)
            dist.all_reduce(torch.ones(4), group=group)


@quiet(size=4)
def errors_that_all_catch(self):
    for _ in range(2):
        try:
            dist.all_reduce(torch.ones(4))
            raise KeyError("of the test")
        except KeyError:
            dist.barrier()


@quiet(size=4)
def groups_that_all_destroy(self):
    for members in ([0, 1], [2, 3], [0, 3]):
        group = dist.new_group(members)
        if self.rank in members:
            dist.barrier(group=group)
            dist.destroy_process_group(group)
    dist.all_reduce(torch.ones(4))


@quiet(size=4)
def hooks_of_gradients(self):
    model = torch.nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


@quiet(size=4)
def a_time_out_that_a_rank_expects(self):
    """The group of the impatient has a time-out of its own."""
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=TWO_LOOKS))
    if self.rank == 0:
        with self.assertRaises(RuntimeError):
            dist.all_reduce(torch.ones(4), group=pair)
    else:
        time.sleep(TWO_LOOKS)
