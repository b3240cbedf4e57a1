"""Judge Chunk: the forward and backward of single micro-batches, in any order."""

import gc
import weakref

import torch
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference, nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.pipeline.cases import seeded

WIDTH, SAMPLES = 5, 3


def build_layers(seed: int, of_tokens: bool) -> nn.Sequential:
    def build() -> nn.Sequential:
        first = nn.Embedding(7, WIDTH) if of_tokens else nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(first, nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    return seeded(seed, build, torch.float64)


def draw_inputs(seed: int, count: int, of_tokens: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Draw the inputs of micro-batches, and the gradients of their outputs."""
    generator = torch.Generator().manual_seed(seed)
    if of_tokens:
        inputs = [torch.randint(7, (SAMPLES,), generator=generator) for _ in range(count)]
    else:
        inputs = [torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(count)]
    return inputs, [torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(count)]


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def probe_chunk(chunk_cls, seed: int, count: int, of_tokens: bool, is_first: bool, is_last: bool) -> dict:
    """Run forwards in order and backwards in reverse, the first one early. Returns everything that came out."""
    layers = build_layers(seed, of_tokens).to(device_here())
    chunk = chunk_cls(list(layers), is_first=is_first)
    inputs, gradients = ([each.to(device_here()) for each in group] for group in draw_inputs(seed, count, of_tokens))
    found = {"outputs": [], "inputs": {}, "marked": False, "attached": False, "kept": 0, "alive": 0}
    outputs = []
    for index, x in enumerate(inputs):
        output = chunk.run_forward(index, x, squares) if is_last else chunk.run_forward(index, x)
        found["marked"] |= x.requires_grad
        found["attached"] |= output.requires_grad
        found["outputs"].append(output.detach().cpu().clone())
        outputs.append(weakref.ref(chunk.kept[index][1]) if index in chunk.kept else lambda: None)
        del output
    for index in [0, *reversed(range(1, count))]:
        gradient = chunk.run_backward(index, None if is_last else gradients[index])
        found["inputs"][index] = None if gradient is None else gradient.cpu().clone()
    gc.collect()
    found["kept"], found["alive"] = len(chunk.kept), sum(each() is not None for each in outputs)
    found["gradients"] = {name: p.grad.cpu().clone() for name, p in layers.named_parameters() if p.grad is not None}
    return found


def _judge_chunk(
    attempt: Attempt, count: int, of_tokens: bool = False, is_first: bool = False, is_last: bool = False
) -> None:
    seed = attempt.draw_seed()
    found = attempt.run(probe_chunk, seed, count, of_tokens, is_first, is_last)[0]
    layers, (inputs, gradients) = build_layers(seed, of_tokens), draw_inputs(seed, count, of_tokens)
    what = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    what += (" of tokens" if of_tokens else "") + (", the first chunk" if is_first else "")
    what += ", the last chunk" if is_last else ""
    for index, x in enumerate(inputs):
        x.requires_grad_(not is_first)
        output = squares(layers(x)) if is_last else layers(x)
        output.backward(None if is_last else gradients[index])
        if not nearly_equal(found["outputs"][index], output.detach()):
            message = f"{what}: the output of micro-batch {index}: {first_difference(found['outputs'][index], output)}"
            raise Wrong(message, "Hint: is it the output of the layers, or of loss_of?")
        gradient = found["inputs"][index]
        if is_first:
            if gradient is not None:
                raise Wrong(f"{what}: run_backward returns a tensor, expected None", "Hint: who needs this gradient?")
        elif gradient is None or not nearly_equal(gradient, x.grad):
            found_it = "it is None" if gradient is None else first_difference(gradient, x.grad)
            hint = "Hint: which tensor's gradient does the previous stage need, and is that tensor a leaf?"
            raise Wrong(f"{what}: the gradient of input {index}: {found_it}", hint)
    for name, parameter in layers.named_parameters():
        own = found["gradients"].get(name)
        if own is None or not nearly_equal(own, parameter.grad):
            found_it = "it is None" if own is None else first_difference(own, parameter.grad)
            raise Wrong(f"{what}: the gradient of {name}: {found_it}", "Hint: does each micro-batch add to it?")
    if found["marked"]:
        message = f"{what}: after run_forward, the tensor that was given as x requires a gradient"
        raise Wrong(message, "Hint: is your leaf a new tensor, or the one that run_forward was given?")
    if found["attached"]:
        hint = "Hint: what would the message to the next stage keep alive?"
        raise Wrong(f"{what}: the returned output requires a gradient; expected it detached", hint)
    if found["kept"] or found["alive"]:
        message = f"{what}: after all backwards, {max(found['kept'], found['alive'])} outputs still exist; expected 0"
        raise Wrong(message, "Hint: what still refers to the tensors of a micro-batch after its backward?")


def a_plain_micro_batch(attempt: Attempt) -> None:
    _judge_chunk(attempt, 1)


def many_micro_batches(attempt: Attempt) -> None:
    _judge_chunk(attempt, attempt.random.randint(3, 6))


def the_first_and_the_last_chunk(attempt: Attempt) -> None:
    _judge_chunk(attempt, 2, of_tokens=True, is_first=True)
    _judge_chunk(attempt, 2, is_first=True)
    _judge_chunk(attempt, 3, is_last=True)
    _judge_chunk(attempt, 2, of_tokens=True, is_first=True, is_last=True)


def probe_frozen(chunk_cls, seed: int) -> tuple[bool, int]:
    """Run a frozen chunk on tokens. Returns whether run_backward returned None, and what is kept."""
    layers = build_layers(seed, of_tokens=True).to(device_here()).requires_grad_(False)
    chunk = chunk_cls(list(layers), is_first=True)
    (tokens, *_), (gradient, *_) = draw_inputs(seed, 1, of_tokens=True)
    chunk.run_forward(0, tokens.to(device_here()))
    return chunk.run_backward(0, gradient.to(device_here())) is None, len(chunk.kept)


def frozen_layers_need_no_backward(attempt: Attempt) -> None:
    context = "frozen layers, and tokens as inputs"
    is_none, kept = attempt.run(probe_frozen, attempt.draw_seed(), context=context)[0]
    if not is_none or kept:
        what = "the micro-batch is still in self.kept; expected it to be removed"
        raise Wrong(f"{context}: {what if is_none else 'run_backward returns a gradient; expected None'}")
