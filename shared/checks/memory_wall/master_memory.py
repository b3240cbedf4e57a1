"""Judge the memory of master weights: what stays between steps, and what a step needs in addition."""

import functools
import gc

import torch
from torch import nn

from shared import memory
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import PADDING_BYTES, hidden_bytes, ignore_existing_objects, living_bytes
from shared.checks.memory_wall.master_plans import with_step

PARAMETERS = 16  # All have the same size, so one gradient is a sixteenth of all gradients.
STAYS = {"Adam": (torch.optim.Adam, {}, 12), "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9}, 8)}
FLOAT32_BYTES = 4
TEMPORARIES = 3  # float32 tensors of one parameter's size: its gradient, and two temporaries of the optimizer


def _set_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)


def _update(attempt: Attempt) -> str:
    """Return the method that the exercise is about."""
    return "step_one()" if attempt.piece == "HoldsMasters" else "step()"


def probe_stays(master_weights, numel: int, optimizer: str) -> int:
    """Step twice and drop the gradients. Return the bytes allocated since the optimizer was built that still live."""
    optimizer_cls, defaults, _ = STAYS[optimizer]
    parameters = [nn.Parameter(torch.randn(numel, device=device_here()).bfloat16()) for _ in range(PARAMETERS)]
    ignore_existing_objects()
    masters = with_step(master_weights)(parameters, optimizer_cls=optimizer_cls, lr=0.01, **defaults)
    for _ in range(2):
        _set_gradients(parameters)
        masters.step()
        masters.zero_grad()
    return living_bytes() + hidden_bytes()


def twelve_bytes_stay(attempt: Attempt) -> None:
    for optimizer, (_, _, each_bytes) in STAYS.items():
        numel = attempt.random.randint(1500, 2500)
        for rank, held_bytes in enumerate(attempt.run(probe_stays, numel, optimizer)):
            elements = PARAMETERS * numel
            if held_bytes > each_bytes * elements + PADDING_BYTES * PARAMETERS:
                evidence = (
                    f"{optimizer}, {PARAMETERS} parameters of {numel:,} elements in bfloat16: between "
                    "steps, the optimizer "
                    f"holds {held_bytes / elements:.1f} bytes per element besides the parameters; expected {each_bytes}"
                )
                hint = f"Hint: which tensors are still alive when {_update(attempt)} has returned?"
                raise Wrong({rank: evidence}, hint)


def probe_step(master_weights, numel: int) -> int:
    """Step once, then measure a second step. Return how many more bytes live at its peak than before it."""
    parameters = [nn.Parameter(torch.randn(numel, device=device_here()).bfloat16()) for _ in range(PARAMETERS)]
    build = functools.partial(with_step(master_weights), optimizer_cls=torch.optim.SGD)
    masters = build(parameters, lr=0.01, momentum=0.9)
    _set_gradients(parameters)
    masters.step()
    _set_gradients(parameters)
    gc.collect()
    living = [candidate for candidate in gc.get_objects() if type(candidate) in (torch.Tensor, nn.Parameter)]
    with memory.peak(nn.ParameterList(parameters), masters, extra={"other": living}) as peak:
        masters.step()
    return peak.held.total_bytes - peak.samples[0].held.total_bytes


def one_gradient_at_a_time(attempt: Attempt) -> None:
    numel = attempt.random.randint(1500, 2500)
    one_bytes = FLOAT32_BYTES * numel
    for rank, extra_bytes in enumerate(attempt.run(probe_step, numel)):
        if extra_bytes > TEMPORARIES * one_bytes:
            evidence = (
                f"{PARAMETERS} parameters whose gradients take {one_bytes:,} bytes each in float32: at its "
                f"peak, {_update(attempt)} holds {extra_bytes:,} bytes more than before it; "
                "expected about the bytes of one gradient"
            )
            raise Wrong(
                {rank: evidence}, "Hint: how many float32 gradients exist at the same time, and when is each one freed?"
            )
