"""Tensors of a fake accelerator against those of the CPU: run with --fake-accelerators 4."""

import copy
import importlib
import io
import os
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

KIND = "fakeacc"


def both(make):
    """What a function of a device returns for the CPU and for a fake accelerator, the latter copied to the CPU."""
    results = []
    for device in ("cpu", f"{KIND}:1"):
        torch.manual_seed(0)
        result = make(device)
        tensors = result if isinstance(result, (tuple, list)) else [result]
        assert all(str(tensor.device) == device for tensor in tensors)
        results.append([tensor.detach().cpu() for tensor in tensors])
    return results


def check(make):
    on_cpu, on_device = both(make)
    assert_close(on_device, on_cpu)


def trained(make_module, *shape):
    """The output, and the gradients of all parameters and of the input."""

    def make(device):
        module = make_module().to(device)
        x = torch.randn(*shape).to(device).requires_grad_()
        output = module(x)
        output = output[0] if isinstance(output, tuple) else output
        output.pow(2).sum().backward()
        return [output, x.grad, *(parameter.grad for parameter in module.parameters())]

    check(make)


def test_count():
    assert torch.accelerator.current_accelerator().type == KIND
    assert torch.accelerator.device_count() == torch.fakeacc.device_count() == 4


def test_factories():
    check(lambda device: torch.arange(12.0, device=device).view(3, 4) @ torch.ones(4, 2, device=device))
    check(lambda device: [torch.eye(2, device=device), torch.full((2,), 3, device=device)])
    assert torch.tensor([1, 2], device=KIND).tolist() == [1, 2]
    assert sorted(torch.randperm(4, device=KIND).tolist()) == [0, 1, 2, 3]


def test_views_share_memory():
    x = torch.arange(12.0, device=KIND).view(3, 4)
    y = x.t()[1:]
    y.mul_(2)
    assert x[0, 1].item() == 2
    assert y._base is x._base
    assert y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    torch.view_as_real(torch.view_as_complex(x.reshape(3, 2, 2))).zero_()
    assert x.sum().item() == 0


def test_results_of_other_sizes():
    out = torch.empty(0, device=KIND)
    torch.add(torch.ones(3, device=KIND), 1, out=out)
    assert out.tolist() == [2, 2, 2]
    out.resize_(10)
    assert out[:3].tolist() == [2, 2, 2]
    storage = out.untyped_storage()
    storage.resize_(0)
    assert storage.size() == 0
    assert torch.nonzero(torch.tensor([0, 1], device=KIND)).tolist() == [[1]]
    assert torch.unique(torch.tensor([1, 1, 3], device=KIND)).device.type == KIND


def test_convolution():
    trained(lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=True), nn.BatchNorm2d(4), nn.ReLU()), 2, 3, 8, 8)
    trained(lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), 2, 4, 5, 5)


@pytest.mark.parametrize("bias", [True, False])
def test_lstm(bias):
    trained(lambda: nn.LSTM(5, 6, num_layers=2, bias=bias), 3, 4, 5)


@pytest.mark.parametrize("bias", [True, False])
def test_gru(bias):
    trained(lambda: nn.GRU(5, 6, num_layers=2, bias=bias, bidirectional=True), 3, 4, 5)


def test_transformer():
    trained(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, 4, 8)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
@pytest.mark.parametrize("foreach", [True, False])
def test_optimizer(name, foreach):
    def make(device):
        model = nn.Linear(4, 4).to(device)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4, device=device)).pow(2).sum().backward()
            optimizer.step()
        return list(model.parameters())

    check(make)


def test_autocast():
    with torch.autocast(KIND, dtype=torch.bfloat16):
        lower = nn.Linear(4, 4).to(KIND)(torch.randn(2, 4, device=KIND))
        full = lower.softmax(0)
    assert (lower.dtype, full.dtype) == (torch.bfloat16, torch.float32)


def test_random_numbers():
    torch.manual_seed(3)
    first, second = torch.randn(5, device=KIND), torch.randn(5, device=KIND)
    assert not first.equal(second)
    torch.manual_seed(3)
    assert torch.randn(5, device=KIND).equal(first)
    state = torch.fakeacc.get_rng_state()
    third = torch.randn(5, device=KIND)
    torch.fakeacc.set_rng_state(state)
    assert torch.randn(5, device=KIND).equal(third)
    of_cpu = torch.get_rng_state()
    nn.functional.dropout(first)
    assert torch.get_rng_state().equal(of_cpu)


def test_states_of_random_numbers():
    state = torch.fakeacc.get_rng_state()
    first = torch.rand(3, device=KIND)
    with torch.random.fork_rng(devices=[0], device_type=KIND):
        torch.rand(3, device=KIND)
    torch.fakeacc.set_rng_state(state)
    assert_close(torch.rand(3, device=KIND), first)
    assert torch.rand(2, generator=torch.Generator()).device.type == "cpu"


def test_a_state_that_follows_its_parameters():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for device in ("cpu", KIND):
        model.to(device)
        optimizer.load_state_dict(optimizer.state_dict())
        model(torch.ones(1, 2, device=device)).sum().backward()
        optimizer.step()
        assert optimizer.state[model.weight]["momentum_buffer"].device.type == device


@pytest.mark.parametrize("is_finite", [True, False])
def test_scaler(is_finite):
    scaler = torch.amp.GradScaler(KIND, init_scale=4.0)
    weight = nn.Parameter(torch.ones(2, device=KIND))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale((weight * (1 if is_finite else torch.inf)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (weight.tolist(), scaler.get_scale()) == (([0.0] * 2, 4.0) if is_finite else ([1.0] * 2, 2.0))


def test_packed_sequences():
    def make(device):
        torch.manual_seed(0)
        lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True).to(device)
        packed = nn.utils.rnn.pack_padded_sequence(
            torch.ones(2, 5, 3, device=device), torch.tensor([5, 3]), batch_first=True
        )
        return nn.utils.rnn.pad_packed_sequence(lstm(packed)[0])[0]

    check(make)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpoints(use_reentrant):
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).to(KIND)
    x = torch.ones(2, 3, device=KIND, requires_grad=True)
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert x.grad.shape == x.shape


def test_loaders():
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    for workers in (0, 1):
        loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True, num_workers=workers)
        batches = [batch for (batch,) in loader]
        assert all(batch.is_pinned() for batch in batches)
        assert [batch.to(KIND, non_blocking=True).tolist() for batch in batches] == [[0, 1], [2, 3]]


def test_types():
    check(lambda device: torch.fft.fft(torch.arange(3.0, device=device)).conj())
    check(lambda device: torch.ones(2, 2, dtype=torch.bfloat16, device=device) @ torch.eye(2, device=device).bfloat16())
    check(lambda device: torch.ones(2, device=device).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "l1_loss", "huber_loss"])
def test_losses(loss):
    """No warning that the CPU has not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(
            lambda device: getattr(nn.functional, loss)(torch.ones(2, 3, device=device), torch.zeros(2, 3).to(device))
        )


def test_inference_mode():
    with torch.inference_mode():
        y = nn.Linear(2, 2).to(KIND)(torch.ones(1, 2, device=KIND))
        assert y.is_inference()
        assert y.add_(1).cpu().numpy().shape == (1, 2)


def test_save_load_pickle_copy():
    file = io.BytesIO()
    torch.save({"x": torch.arange(3.0, device=f"{KIND}:1")}, file)
    file.seek(0)
    assert str(torch.load(file)["x"].device) == f"{KIND}:1"
    file.seek(0)
    assert torch.load(file, map_location="cpu")["x"].tolist() == [0, 1, 2]
    assert pickle.loads(pickle.dumps(torch.ones(2, device=KIND))).device.type == KIND
    assert next(copy.deepcopy(nn.Linear(2, 2).to(KIND)).parameters()).device.type == KIND


def test_memory_is_counted():
    before = torch.fakeacc.memory_allocated(2)
    x = torch.empty(1000, device=f"{KIND}:2")
    free, total = torch.fakeacc.mem_get_info(2)
    assert torch.fakeacc.memory_allocated(2) - before == total - free == 4000
    del x
    assert torch.fakeacc.memory_allocated(2) == before
    assert torch.fakeacc.max_memory_allocated(2) >= 4000
    assert torch.fakeacc.mem_get_info(2) == (total, total)


def test_other_processes_count_and_give_back_when_they_end():
    code = (
        "import sys, torch; x = torch.empty(1000, device='fakeacc:3'); print(flush=True); sys.stdin.read(1); "
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    )
    # It imports torch anew: a fork of a process that has used the devices cannot use them.
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    free, total = torch.fakeacc.mem_get_info(3)
    assert total - free == 4000
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert torch.fakeacc.mem_get_info(3) == (total, total)
    child.wait()
    child.stdout.close()


def test_out_of_memory():
    with pytest.raises(torch.OutOfMemoryError, match="Fake accelerator 0 is out of memory"):
        torch.empty(1 << 40, device=KIND)


def test_pinned_memory():
    pinned = torch.ones(2).pin_memory()
    assert pinned.is_pinned() and not torch.ones(2).is_pinned()
    assert pinned.to(KIND, non_blocking=True).tolist() == [1, 1]


def test_streams_and_events():
    start, end = (torch.Event(KIND, enable_timing=True) for _ in range(2))
    stream = torch.fakeacc.Stream()
    start.record()
    with torch.fakeacc.stream(stream):
        assert torch.fakeacc.current_stream() == stream
        torch.fakeacc._sleep(1000)
        x = torch.ones(1000, device=KIND).cumsum(0)
    torch.fakeacc.current_stream().wait_stream(stream)
    end.record()
    torch.fakeacc.synchronize()
    assert x[-1].item() == 1000
    assert start.elapsed_time(end) > 0
    with torch.fakeacc.device(2):
        assert torch.empty(1, device=KIND).device.index == 2


def total(x):
    return (x * 2 + 1).relu().sum()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    def make(device):
        torch._dynamo.reset()
        x = torch.arange(-3.0, 3, device=device, requires_grad=True)
        output = torch.compile(total, backend=backend, fullgraph=True)(x)
        output.backward()
        return [output, x.grad]

    check(make)


@pytest.mark.parametrize("function", [torch.relu, total])
def test_inductor_refuses(function):
    """In one line that says what to do, before it generates any code; it still compiles for the CPU."""
    compiled = torch.compile(function)
    with pytest.raises(RuntimeError) as refused:
        compiled(torch.ones(3, device=KIND))
    assert [line for line in str(refused.value).splitlines() if "fake accelerators" in line] == [
        "FakeAcceleratorError: torch.compile's backend inductor has no code for fake accelerators: use "
        "backend='aot_eager' or 'eager', or compile on the CPU"
    ]
    x = torch.ones(3)
    assert_close(compiled(x), function(x))


@pytest.mark.parametrize("module", ["torch.utils", "torch.utils.backend_registration"])
def test_another_extension_is_refused(module):
    with pytest.raises(RuntimeError, match=r"npu cannot be loaded beside the fake accelerator.*Run without"):
        importlib.import_module(module).rename_privateuse1_backend("npu")
