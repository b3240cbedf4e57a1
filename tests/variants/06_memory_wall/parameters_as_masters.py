"""Makes new dicts of state in each step, finds gradients by their index, and computes with NumPy's masks."""

import contextlib

import numpy as np
import torch
from torch import nn

from solutions import memory_wall as right


def model_state_bytes(module, optimizer):
    held = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for _, parameter in module.named_parameters():
        held["parameters"] += parameter.nbytes
        held["gradients"] += 0 if parameter.grad is None else parameter.grad.nbytes
    for values in optimizer.state_dict()["state"].values():
        held["optimizer"] += sum(getattr(value, "nbytes", 0) for value in values.values() if torch.is_tensor(value))
    return held


class HoldsMasters(right.HoldsMasters):
    def step_one(self, parameter, group):
        inner_state = dict(self.state[parameter])
        master = inner_state.pop("master", None)
        if master is None:
            master = torch.empty_like(parameter, dtype=torch.float32).copy_(parameter.detach())
        master.grad = parameter.grad.detach().float()
        self.step_inner(master, inner_state, group)
        master.grad = None
        self.state[parameter] = inner_state | {"master": master}
        parameter.copy_(master)


class MasterWeights(HoldsMasters, right.MasterWeights):
    @torch.no_grad()
    def step(self, closure=None):
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            [self.step_one(each, group) for each in group["params"] if each.grad is not None]
        return loss


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, count, *tensors):
        ctx.run, ctx.count, ctx.random = run, count, right.get_rng_states()
        ctx.save_for_backward(*tensors)
        return run(*tensors[:count])

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():
            raise RuntimeError("use create_graph=False")
        inputs = [each.detach().requires_grad_(each.requires_grad) for each in ctx.saved_tensors[: ctx.count]]
        every = [*inputs, *ctx.saved_tensors[ctx.count :]]
        with right.restored(ctx.random), torch.enable_grad():
            output = ctx.run(*inputs)
        needed = {index: each for index, each in enumerate(every) if each.requires_grad}
        found = torch.autograd.grad([output], [*needed.values()], [gradient], allow_unused=True)
        gradient_of = dict(zip(needed, found, strict=True))
        return None, None, *map(gradient_of.get, range(len(every)))


class Checkpointed(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        kind = inputs[0].device.type
        state = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

        def run(*given):
            with contextlib.ExitStack() as contexts:
                contexts.enter_context(torch.autocast(kind, *state, cache_enabled=False))
                return self.module(*given)

        return _Recomputed.apply(run, len(inputs), *inputs, *self.module.parameters())


def activation_peak_bytes(saved_bytes, input_bytes, chosen):
    mask = np.isin(np.arange(len(saved_bytes)), list(chosen))
    saved, given = np.array(saved_bytes), np.array(input_bytes)
    return int((np.where(mask, given, saved).cumsum() + np.where(mask, saved, 0)).max())


def place_checkpoints(saved_bytes, input_bytes, target_bytes):
    blocks = len(saved_bytes)
    masks = sorted(range(1 << blocks), key=int.bit_count)
    choices = [tuple(block for block in range(blocks) if mask >> block & 1) for mask in masks]
    peaks = [activation_peak_bytes(saved_bytes, input_bytes, chosen) for chosen in choices]
    fitting = [chosen for chosen, peak in zip(choices, peaks, strict=True) if peak <= target_bytes]
    if not fitting:
        raise ValueError(f"no peak is below {min(peaks):,} bytes")
    return fitting[0]
