"""Counts with chain() and sets, moves the master in and out of the state, and grows sets of blocks one by one."""

from itertools import accumulate, chain

import torch

from solutions import memory_wall as right
from solutions.memory_wall import Checkpointed  # noqa: F401


def model_state_bytes(module, optimizer):
    parameters = set(module.parameters())
    gradients = {parameter.grad for parameter in parameters} - {None}
    kept = chain.from_iterable(state.values() for state in optimizer.state.values())

    def total(tensors):
        return sum(tensor.element_size() * tensor.numel() for tensor in tensors)

    return {
        "parameters": total(parameters),
        "gradients": total(gradients),
        "optimizer": total(value for value in kept if isinstance(value, torch.Tensor)),
    }


class HoldsMasters(right.HoldsMasters):
    def step_one(self, parameter, group):
        state = self.state[parameter]
        master = state.pop("master") if "master" in state else parameter.detach().float().clone()
        master.grad = parameter.grad.to(torch.float32)
        try:
            self.step_inner(master, state, group)
        finally:
            master.grad = None
            state["master"] = master
        parameter.data.copy_(master.data)


class MasterWeights(HoldsMasters, right.MasterWeights):
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        with torch.no_grad():
            for parameter, group in filter(lambda pair: pair[0].grad is not None, pairs):
                self.step_one(parameter, group)
        return loss


def activation_peak_bytes(saved_bytes, input_bytes, chosen):
    stays = [given if block in set(chosen) else saved for block, (saved, given) in _blocks(saved_bytes, input_bytes)]
    comes_back = [saved * (block in set(chosen)) for block, (saved, _) in _blocks(saved_bytes, input_bytes)]
    return max(map(sum, zip(accumulate(stays), comes_back, strict=True)))


def _blocks(saved_bytes, input_bytes):
    return enumerate(zip(saved_bytes, input_bytes, strict=True))


def place_checkpoints(saved_bytes, input_bytes, target_bytes):
    level, lowest = {frozenset()}, float("inf")
    while level:
        for chosen in sorted(level, key=sorted):
            peak = activation_peak_bytes(saved_bytes, input_bytes, tuple(sorted(chosen)))
            if peak <= target_bytes:
                return tuple(sorted(chosen))
            lowest = min(lowest, peak)
        level = {chosen | {block} for chosen in level for block in range(len(saved_bytes)) if block not in chosen}
    raise ValueError(f"the lowest possible peak is {lowest:,} bytes")
