"""Judge how values are quantized: their integers, their scales, and the values that these stand for."""

from dataclasses import dataclass

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong

BLOCK = 256
LEVELS = 127
TINY = torch.finfo(torch.float32).tiny
_ROUNDING = 1e-5  # more than a hundred rounding errors of float32


# -- on a rank


@dataclass
class Quantized:
    integers: torch.Tensor
    scales: torch.Tensor
    kept: bool  # whether the argument is unchanged


def probe_quantize(quantize, values: torch.Tensor) -> Quantized:
    values = values.to(device_here())
    before = values.clone()
    integers, scales = quantize(values)
    return Quantized(integers.cpu(), scales.cpu(), torch.equal(values, before))


def probe_dequantize(dequantize, integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return dequantize(integers.to(device_here()), scales.to(device_here())).cpu()


# -- in the kernel


def blocks_of(attempt: Attempt, rows: tuple[int, ...], count: int) -> torch.Tensor:
    """Draw values whose blocks have very different sizes, with the shape [*rows, count · BLOCK]."""
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    sizes = 10.0 ** torch.randint(-4, 4, (*rows, count, 1), generator=generator)
    return (sizes * torch.randn(*rows, count, BLOCK, generator=generator)).flatten(-2)


def random_values_are_quantized(attempt: Attempt) -> None:
    count = attempt.sizes.pick(3, range(1, 40))
    _judge_quantized(attempt, blocks_of(attempt, (), count), "random values")
    _judge_quantized(attempt, blocks_of(attempt, (4,), count), "random values in 4 rows")
    _judge_quantized(attempt, blocks_of(attempt, (2, 3), count), "random values in 2 × 3 rows")


def awkward_blocks_are_quantized(attempt: Attempt) -> None:
    values = blocks_of(attempt, (), 6).view(6, BLOCK)
    at = attempt.random.randrange(BLOCK)
    values[0] = 0
    values[1] = 1e-42 * values[1].sign()
    values[2, at] = -1e6
    values[3] = -values[3].abs()
    values[4] = 3.5
    _judge_quantized(attempt, values.flatten(), "blocks of zeros, of very small values, and with an outlier")
    _judge_quantized(attempt, values.flatten().double(), "values in float64")
    _judge_quantized(attempt, values.flatten().to(torch.bfloat16), "values in bfloat16")


def _judge_quantized(attempt: Attempt, values: torch.Tensor, context: str) -> None:
    (found,) = attempt.run(probe_quantize, values, context=context)
    integers, scales, blocks = found.integers, found.scales, values.double().unflatten(-1, (-1, BLOCK))
    shapes = {"integers": (integers, values.shape, torch.int8), "scales": (scales, blocks.shape[:-1], torch.float32)}
    for name, (tensor, shape, dtype) in shapes.items():
        if tensor.dtype != dtype:
            raise Wrong(f"{context}: the {name} are {tensor.dtype}, expected {dtype}")
        if tensor.shape != shape:
            raise Wrong(
                f"{context}: for values of shape {list(values.shape)}, the {name} have the shape {list(tensor.shape)}, "
                f"expected {list(shape)}",
                "Hint: how many elements share a scale?"
                if tensor.numel() != shape.numel()
                else "Hint: the number of elements is right. Which line gives them the wrong dimensions?",
            )
    if not found.kept:
        raise Wrong(f"{context}: quantize() has changed its argument", "Hint: which operation works in place?")
    expected = (blocks.abs().amax(-1) / LEVELS).clamp(min=TINY)
    off = (scales.double() / expected - 1).abs()
    if not bool((off <= max(_ROUNDING, torch.finfo(values.dtype).eps)).all()):
        index = int((off.nan_to_num(torch.inf)).flatten().argmax())
        raise Wrong(
            f"{context}: the scale of block {index} is {scales.flatten()[index].item():.6g}, "
            f"expected {expected.flatten()[index].item():.6g}",
            "Hint: this block holds only zeros or very small values. What is TINY for?"
            if expected.flatten()[index] == TINY and scales.flatten()[index] < TINY
            else "Hint: which element of the block should become 127 or −127?",
        )
    error = (integers.double().unflatten(-1, (-1, BLOCK)) * scales.double().unsqueeze(-1) - blocks).abs()
    # A value in the middle between two multiples may be rounded to either of them.
    most = scales.double().unsqueeze(-1) * (0.5 + LEVELS * _ROUNDING)
    if not bool((error <= most).all()):
        index = int((error / most).nan_to_num(torch.inf).flatten().argmax())
        block, value = index // BLOCK, blocks.flatten()[index].item()
        raise Wrong(
            f"{context}: element {index} is {value:.6g}, and became the integer {integers.flatten()[index].item()} "
            f"with the scale {scales.flatten()[block].item():.6g}",
            "Hint: to which integer is it closest, and does your conversion to int8 round to it?"
            if values.dtype != torch.bfloat16
            else "Hint: to which integer is it closest, and in which dtype do you divide by the scale?",
        )


def values_are_dequantized(attempt: Attempt) -> None:
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    for rows in ((), (3,), (2, 3)):
        count = attempt.sizes.pick(2, range(1, 40))
        integers = torch.randint(-LEVELS, LEVELS + 1, (*rows, count * BLOCK), generator=generator).to(torch.int8)
        scales = 10.0 ** torch.randint(-6, 6, (*rows, count), generator=generator).float()
        context = f"integers of shape {list(integers.shape)}, scales of shape {list(scales.shape)}"
        (found,) = attempt.run(probe_dequantize, integers, scales, context=context)
        if found.dtype != torch.float32:
            raise Wrong(f"{context}: the result is {found.dtype}, expected torch.float32")
        if found.shape != integers.shape:
            raise Wrong(f"{context}: the result has the shape {list(found.shape)}, expected {list(integers.shape)}")
        expected = integers.double() * scales.double().repeat_interleave(BLOCK, -1)
        off = ~((found.double() - expected).abs() <= 1e-6 * expected.abs())  # This finds nan, too.
        if off.any():
            index = int(off.flatten().nonzero()[0])
            raise Wrong(
                f"{context}: element {index} is {found.flatten()[index].item():.6g}, "
                f"expected {expected.flatten()[index].item():.6g}",
                "Hint: which scale belongs to this element?",
            )
