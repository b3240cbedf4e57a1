"""Judging what master weights cost: what stays from step to step, and what a step needs on top of that."""

import functools
import gc

import torch
from torch import nn

from shared import memory
from shared.checks.engine.candidate import device_here
from shared.checks.engine.footprint import PADDING_BYTES, hidden_bytes, living_bytes, only_what_comes
from shared.checks.engine.framework import Attempt, Wrong

PARAMETERS = 16  # of one size: then one gradient is a sixteenth of all
STAYS = {"Adam": (torch.optim.Adam, {}, 12), "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9}, 8)}
FLOAT32_BYTES = 4
TEMPORARIES = 3  # of a parameter's size, in float32: its gradient, and what an optimizer may need for a moment


def _set_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)


def probe_stays(master_weights, numel: int, optimizer: str) -> int:
    """Step twice. → the bytes that live since the optimizer was built, gradients dropped"""
    optimizer_cls, defaults, _ = STAYS[optimizer]
    parameters = [nn.Parameter(torch.randn(numel, device=device_here()).bfloat16()) for _ in range(PARAMETERS)]
    with only_what_comes():
        masters = master_weights(parameters, optimizer_cls=optimizer_cls, lr=0.01, **defaults)
        for _ in range(2):
            _set_gradients(parameters)
            masters.step()
            masters.zero_grad()
        return living_bytes() + hidden_bytes()


def twelve_bytes_stay(attempt: Attempt) -> None:
    for optimizer, (_, _, each_bytes) in STAYS.items():
        numel = attempt.random.randint(1500, 2500)
        for rank, held_bytes in enumerate(attempt.run(probe_stays, numel, optimizer)):
            numbers = PARAMETERS * numel
            if held_bytes > each_bytes * numbers + PADDING_BYTES * PARAMETERS:
                said = (
                    f"{optimizer}, {PARAMETERS} parameters of {numel:,} numbers in bfloat16: between steps it holds "
                    f"{held_bytes / numbers:.1f} bytes per number beside the parameters; expected {each_bytes}"
                )
                raise Wrong({rank: said}, "Look at: what is still there when step() has returned?")


def probe_step(master_weights, numel: int) -> int:
    """Step once to begin, then once measured. → the bytes that came and went in that step, at their peak"""
    parameters = [nn.Parameter(torch.randn(numel, device=device_here()).bfloat16()) for _ in range(PARAMETERS)]
    build = functools.partial(master_weights, optimizer_cls=torch.optim.SGD)
    masters = build(parameters, lr=0.01, momentum=0.9)
    _set_gradients(parameters)
    masters.step()
    _set_gradients(parameters)
    gc.collect()
    living = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    with memory.peak(nn.ParameterList(parameters), masters, extra={"other": living}) as peak:
        masters.step()
    return peak.held.total_bytes - peak.samples[0].held.total_bytes


def one_gradient_at_a_time(attempt: Attempt) -> None:
    numel = attempt.random.randint(1500, 2500)
    one_bytes = FLOAT32_BYTES * numel
    for rank, came_bytes in enumerate(attempt.run(probe_step, numel)):
        if came_bytes > TEMPORARIES * one_bytes:
            said = (
                f"{PARAMETERS} parameters whose gradients are {one_bytes:,} bytes each in float32: at the peak of a "
                f"step there are {came_bytes:,} bytes more than before; expected those of one gradient"
            )
            raise Wrong({rank: said}, "Look at: how many gradients are in float32 at one moment, and when does one go?")
