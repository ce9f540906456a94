"""Faults of devices, one in each test, in the line with the comment "fault": run with --fake-accelerators 4.

Ranks come first: a process that has used a device cannot fork ranks that use one.
"""

import ctypes
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

KIND = "fakeacc"
in_two_ranks = pytest.mark.world_size(2)


@in_two_ranks
def test_tensor_of_the_cpu_in_a_collective(dist_env):
    loss = torch.zeros(1)
    dist.all_reduce(loss)  # fault


@in_two_ranks
def test_one_of_a_list_is_on_the_cpu(dist_env):
    parts = [torch.zeros(1, device=dist_env.device), torch.zeros(1)]
    dist.all_gather(parts, torch.ones(1, device=dist_env.device))  # fault


@in_two_ranks
def test_the_index_of_the_rank_is_ignored(dist_env):
    model = nn.Linear(2, 2).to(dist_env.device)
    batch = torch.ones(2, 2, device=f"{KIND}:0")
    assert dist_env.rank == 0 or model(batch) is not None  # fault


@in_two_ranks
def test_the_index_of_the_rank_is_ignored_in_a_collective(dist_env):
    dist.all_reduce(torch.ones(1, device=f"{KIND}:0"))  # fault


@in_two_ranks
def test_state_of_an_optimizer_is_left_behind(dist_env):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model.to(dist_env.device)(torch.ones(1, 2, device=dist_env.device)).sum().backward()
    optimizer.step()  # fault


@in_two_ranks
def test_objects_by_way_of_the_cpu(dist_env):
    dist.broadcast_object_list([1], 0, device=torch.device("cpu"))  # fault


@in_two_ranks
def test_ddp_of_a_buffer_of_the_cpu(dist_env):
    model = nn.Linear(2, 2).to(dist_env.device)
    model.register_buffer("scale", torch.ones(1))
    DistributedDataParallel(model, device_ids=[dist_env.device.index])  # fault


@in_two_ranks
def test_fsdp1_of_a_model_of_the_cpu(dist_env):
    model = FullyShardedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2, device=dist_env.device))  # fault


@in_two_ranks
def test_offloaded_parameters_are_moved(dist_env):
    model = fully_shard(nn.Linear(2, 2), offload_policy=CPUOffloadPolicy())
    model.to(dist_env.device)(torch.ones(1, 2, device=dist_env.device))  # fault


@in_two_ranks
def test_received_on_the_cpu(dist_env):
    other = 1 - dist_env.rank
    sent = dist.P2POp(dist.isend, torch.ones(1, device=dist_env.device), other)
    received = dist.P2POp(dist.irecv, torch.ones(1), other)
    dist.batch_isend_irecv([sent, received])  # fault


@in_two_ranks
def test_a_mesh_of_the_cpu(dist_env):
    mesh = init_device_mesh("cpu", (2,))
    distribute_tensor(torch.ones(2), mesh, [Shard(0)])  # fault


@in_two_ranks
def test_a_sparse_gradient(dist_env):
    embedding = nn.Embedding(3, 2, sparse=True).to(dist_env.device)
    embedding(torch.tensor([1], device=dist_env.device)).sum().backward()  # fault


@in_two_ranks
def test_ddp_of_a_model_on_another_device(dist_env):
    other = (dist_env.rank + 1) % 2
    model = DistributedDataParallel(nn.Linear(2, 2).to(dist_env.device), device_ids=[other])
    model(torch.ones(2, 2, device=dist_env.device))  # fault


@in_two_ranks
def test_the_host_reads_memory_of_a_device(dist_env):
    ctypes.string_at(torch.ones(2, device=dist_env.device).data_ptr(), 4)  # fault


def test_cuda_is_hard_coded():
    nn.Linear(2, 2).cuda()  # fault


def test_a_buffer_is_left_behind():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.ones(2)

        def forward(self, x):
            return torch.cat([x, self.scale])  # fault

    Scaled().to(KIND)(torch.ones(2, device=KIND))


def test_a_checkpoint_is_loaded_to_another_device(tmp_path):
    torch.save({"weight": torch.ones(2, 2)}, tmp_path / "x.pt")
    weight = torch.load(tmp_path / "x.pt")["weight"]
    torch.ones(2, 2, device=KIND) @ weight  # fault


def test_pinned_memory_is_assumed():
    batch = torch.ones(2).to(KIND).cpu()
    assert batch.is_pinned()  # fault


def test_the_input_is_not_moved():
    nn.Linear(2, 2).to(KIND)(torch.ones(2, 2))  # fault


def test_targets_are_not_moved():
    logits = torch.zeros(2, 3, device=KIND)
    nn.functional.cross_entropy(logits, torch.tensor([0, 1]))  # fault


def test_numpy_of_a_device():
    torch.ones(2, device=KIND).numpy()  # fault


def test_a_generator_of_the_cpu():
    torch.randn(2, device=KIND, generator=torch.Generator())  # fault


def test_more_devices_than_there_are():
    torch.ones(2, device=f"{KIND}:4")  # fault


def test_memory_is_leaked():
    leaked = [torch.ones(1000, device=KIND) for _ in range(3)]
    assert torch.accelerator.memory_allocated() == 0, len(leaked)  # fault


def test_a_buffer_is_registered_late():
    model = nn.Linear(2, 2).to(KIND)
    model.register_buffer("scale", torch.ones(2))
    torch.dot(model(torch.ones(1, 2, device=KIND))[0], model.scale)  # fault


def test_a_checkpoint_of_a_device_that_is_not_there():
    file = io.BytesIO()
    torch.save(torch.ones(1, device=f"{KIND}:3"), file)
    file.seek(0)
    torch.load(file, map_location=f"{KIND}:4")  # fault


def test_parameters_of_the_cpu_are_assigned():
    model = nn.Linear(2, 2).to(KIND)
    model.load_state_dict(nn.Linear(2, 2).state_dict(), assign=True)
    model(torch.ones(1, 2, device=KIND))  # fault


def test_a_generator_of_a_device_for_the_cpu():
    torch.rand(2, generator=torch.Generator(KIND))  # fault


def test_the_state_of_the_cpus_generator():
    torch.fakeacc.set_rng_state(torch.get_rng_state())  # fault


def test_autocast_of_cuda():
    with torch.autocast("cuda"):
        assert nn.Linear(2, 2).to(KIND)(torch.ones(1, 2, device=KIND)).dtype == torch.float16  # fault


def test_scaler_of_cuda():
    assert torch.amp.GradScaler("cuda").is_enabled()  # fault


def test_events_without_timing():
    first, second = torch.Event(KIND), torch.Event(KIND)
    first.record()
    second.record()
    first.elapsed_time(second)  # fault


def test_a_stream_of_another_device():
    with torch.Stream(f"{KIND}:1"):
        x = torch.ones(1, device=KIND)
    assert x.device.index == 0  # fault


def test_numpy_in_inference_mode():
    with torch.inference_mode():
        nn.Linear(2, 2).to(KIND)(torch.ones(1, 2, device=KIND)).numpy()  # fault


def test_a_tensor_of_a_device_is_pinned():
    torch.ones(2, device=KIND).pin_memory()  # fault


def test_a_worker_loads_to_a_device():
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return torch.ones(1, device=KIND)

    torch.ones(1, device=KIND)
    list(torch.utils.data.DataLoader(Data(), num_workers=1))  # fault


def test_hidden_state_of_the_cpu():
    nn.GRU(2, 2).to(KIND)(torch.ones(1, 1, 2, device=KIND), torch.zeros(1, 1, 2))  # fault


def test_a_mask_of_the_cpu():
    x = torch.ones(1, 1, 2, device=KIND)
    nn.MultiheadAttention(2, 1).to(KIND)(x, x, x, attn_mask=torch.zeros(1, 1))  # fault


def test_a_gradient_of_the_cpu():
    x = torch.ones(2, device=KIND, requires_grad=True)
    (x * 2).backward(torch.ones(2))  # fault


def test_complex_of_two_devices():
    torch.complex(torch.ones(2, device=KIND), torch.ones(2))  # fault


def test_a_list_on_two_devices():
    torch._foreach_add([torch.ones(2, device=KIND)], [torch.ones(2)])  # fault


def test_a_sparse_tensor():
    torch.eye(2).to_sparse().to(KIND)  # fault


def test_a_sparse_matrix():
    matrix = torch.eye(2).to_sparse_csr().to(KIND)
    matrix @ torch.ones(2, device=KIND)  # fault


def test_an_operation_that_the_cpu_lacks():
    weight = torch.ones(1, device=KIND)
    torch.ops.aten._cudnn_rnn_flatten_weight([weight], 1, 1, 0, 1, 1, 1, False, False)  # fault


def test_an_index_out_of_range():
    nn.Embedding(3, 2).to(KIND)(torch.tensor([3], device=KIND))  # fault


def test_a_device_that_is_not_there_is_chosen():
    torch.accelerator.set_device_index(4)  # fault


def test_shared_with_another_process():
    torch.multiprocessing.get_context("spawn").SimpleQueue().put(torch.ones(1, device=KIND))  # fault
