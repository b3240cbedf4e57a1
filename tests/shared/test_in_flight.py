"""A parameter in flight: everything that reads its values waits for its all-gather, and nothing else does.

No ranks are needed: the work is a fake, which fills the parameter when somebody waits for it.
"""

import copy
import io
import pickle
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from shared.guards import in_flight
from shared.guards.in_flight import AllGatherInFlight, InFlightParameter

pytestmark = pytest.mark.chapter("zero1", "zero2")


class Work:
    """An all-gather that fills a parameter with sevens when somebody waits for it."""

    def __init__(self, parameter: nn.Parameter, error: BaseException | None = None):
        self.memory, self.error, self.waits = parameter.data.numpy(), error, 0  # torch does not see the change

    def wait(self) -> None:
        self.waits += 1
        if self.error is not None:
            raise self.error
        self.memory[...] = 7.0


def launched(error: BaseException | None = None) -> tuple[nn.Parameter, Work]:
    parameter = nn.Parameter(torch.zeros(2, 2))
    work = Work(parameter, error)
    AllGatherInFlight(work, [parameter])
    return parameter, work


def saved(parameter: nn.Parameter) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def loaded(parameter: nn.Parameter) -> torch.Tensor:
    with torch.no_grad():
        parameter.copy_(torch.full((2, 2), 7.0))
    return parameter


def filled(parameter: nn.Parameter) -> torch.Tensor:
    torch._foreach_add_([target := torch.zeros(2, 2)], [parameter])
    return target


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient


READS = {  # each returns four sevens
    "linear": lambda p: nn.functional.linear(torch.eye(2), p),
    "matmul": lambda p: torch.eye(2) @ p,
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "clone": lambda p: p.clone(),
    "view": lambda p: p.view(4),
    "index": lambda p: torch.stack([p[0], p[1]]),
    "iteration": lambda p: torch.stack(list(p)),
    "numpy": lambda p: torch.from_numpy(np.asarray(p.detach())),
    "item": lambda p: torch.full((4,), p.max().item()),
    "stack": lambda p: torch.stack([p]),
    "dot": lambda p: torch.einsum("ij,jk->ik", torch.eye(2), p),
    "torch.ops": lambda p: torch.ops.aten.add.Tensor(p, 0),
    "foreach": filled,
    "keyword": lambda p: torch.add(input=torch.zeros(2, 2), other=p),
    "to": lambda p: p.to(torch.float64),
    "vector": lambda p: parameters_to_vector([p]),
    "functional_call": lambda p: torch.func.functional_call(nn.Linear(2, 2, bias=False), {"weight": p}, torch.eye(2)),
    "autograd.Function": Double.apply,
    "checkpoint": lambda p: torch.utils.checkpoint.checkpoint(lambda q: q * 1, p, use_reentrant=False),
    "copy_ into it": loaded,
    "copy_ from it": lambda p: torch.zeros(2, 2).copy_(p.detach()),
    "setitem": lambda p: torch.zeros(2, 2).__setitem__(slice(None), p) or p,
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch.save": saved,
    "storage": lambda p: torch.tensor(p.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float32),
    "repr": lambda p: torch.full((4,), 7.0) if "7." in repr(p) else p.detach(),
    "inference_mode": lambda p: torch.inference_mode()(lambda: p * 1)(),
    "compiled": lambda p: torch.compile(lambda q: q * 1, backend="eager")(p),
    "jvp": lambda p: torch.func.jvp(lambda q: q * 1, (p,), (torch.ones(2, 2),))[0],
}


@pytest.mark.parametrize("name", READS)
def test_whoever_reads_a_value_waits(name):
    parameter, work = launched()
    found = READS[name](parameter)
    assert found.flatten().tolist() == [7.0] * 4
    assert work.waits == 1 and type(parameter) is nn.Parameter
    assert not hasattr(parameter, "all_gather_in_flight")
    assert type(found) in (torch.Tensor, nn.Parameter)


def describe(parameter: nn.Parameter) -> None:
    assert isinstance(parameter, nn.Parameter) and isinstance(parameter, torch.Tensor)
    assert (parameter.shape, parameter.size(1), parameter.numel(), parameter.dim()) == ((2, 2), 2, 4, 2)
    assert (parameter.dtype, parameter.device.type, parameter.is_leaf) == (torch.float32, "cpu", True)
    assert parameter.grad_fn is None and parameter.nbytes == 16 and parameter._version >= 0


def set_gradients(parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones(2, 2)
    parameter.grad.add_(1)
    assert parameter.grad.sum() == 8
    del parameter.grad
    torch.optim.SGD([parameter]).zero_grad()
    assert parameter.grad is None


def put_into_modules(parameter: nn.Parameter) -> None:
    layer = nn.Linear(2, 2, bias=False)
    layer.weight = parameter
    assert list(layer.parameters()) == [parameter] and dict(layer.named_parameters()).keys() == {"weight"}
    layer.train().eval().zero_grad()
    layer.requires_grad_(False).requires_grad_(True)


NO_READS = {
    "what it looks like": describe,
    "its gradient": set_gradients,
    "modules": put_into_modules,
    "sets": lambda p: {p: 1}[p] + len({p, p}),
    "hooks": lambda p: (p.register_hook(print).remove(), p.register_post_accumulate_grad_hook(print).remove()),
}


@pytest.mark.parametrize("name", NO_READS)
def test_nobody_waits_without_reading_a_value(name):
    parameter, work = launched()
    NO_READS[name](parameter)
    assert work.waits == 0 and type(parameter) is InFlightParameter
    assert parameter.sum() == 28


def test_one_wait_completes_all_parameters_of_an_all_gather():
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    work = Work(one)
    AllGatherInFlight(work, [one, other])
    assert one.sum() == 14 and type(other) is nn.Parameter and work.waits == 1


def test_a_list_of_parameters_waits_for_each():
    pairs = [launched() for _ in range(3)]
    assert torch.cat([torch.stack([each for each, _ in pairs])]).sum() == 84
    assert [work.waits for _, work in pairs] == [1, 1, 1]


def test_threads_wait_once():
    parameter, work = launched()
    threads = [threading.Thread(target=parameter.sum) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert work.waits == 1


@pytest.mark.parametrize("error", [RuntimeError("connection closed"), KeyboardInterrupt()])
def test_values_that_never_came_cannot_be_read(error):
    """A second wait for gloo's handle would last until its timeout, and the old values would be wrong."""
    parameter, work = launched(error)
    with pytest.raises(type(error)):
        parameter.sum()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"a parameter of shape \[2, 2\] and others are incomplete.*checkpoint"):
            parameter.sum()
    assert work.waits == 1


def test_a_parameter_of_another_class_cannot_be_in_flight():
    class Own(nn.Parameter):
        pass

    assert in_flight.can_be_in_flight([nn.Parameter(torch.zeros(1))])
    assert not in_flight.can_be_in_flight([nn.Parameter(torch.zeros(1)), Own(torch.zeros(1))])
