"""Models and logits in bf16: what stays in bf16, and what has to be computed with more precision."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared import wire
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.tensor_parallel.cases import BATCH, TOKENS, loss_traffic, own_part
from shared.checks.tensor_parallel.models import Model
from shared.wire import instrumentation

# bf16 has 8 significant bits. The loss is a mean over 24 tokens of a model with two layers.
_LOSS_TOLERANCE, _LEAST_COSINE = 0.03, 0.98
_OUTPUTS = 240
# Of each element of the loss's gradient. A rounding to bf16 changes it by at most 2⁻⁸, and a correct solution may round
# it three times: the saved softmax, the gradient that arrives, and their product.
_GRADIENT_TOLERANCE = 0.015


def probe_loss(vocab_parallel_cross_entropy, logits: torch.Tensor, targets: torch.Tensor) -> dict:
    own = logits[..., list(own_part(logits.shape[-1], None))].to(device_here()).requires_grad_()
    with instrumentation.listening() as calls:
        loss = vocab_parallel_cross_entropy(own, targets.to(device_here()))
    loss.backward()
    return {"loss": loss.item(), "gradient": own.grad.cpu(), "sent": _sent_bytes(calls)}


def _sent_bytes(calls: list) -> float:
    return sum(wire.sent_bytes_of(call, 0) for call in calls)


def a_loss_of_bf16_logits_is_exact(attempt: Attempt) -> None:
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    logits = torch.randn(BATCH, TOKENS, _OUTPUTS, generator=generator).to(torch.bfloat16)
    targets = torch.randint(_OUTPUTS, (BATCH, TOKENS), generator=generator)
    exact = logits.double().requires_grad_()
    loss = F.cross_entropy(exact.flatten(0, 1), targets.flatten())
    loss.backward()
    expected, gradients = loss.item(), exact.grad.chunk(attempt.world_size, -1)
    for rank, found in enumerate(attempt.run(probe_loss, logits, targets, context="bf16 logits")):
        if not abs(found["loss"] - expected) <= 1e-5 * expected:
            message = f"bf16 logits: the loss is {found['loss']:.7g}, expected {expected:.7g}"
            raise Wrong({rank: message}, "Hint: in which dtype are the sums over the vocabulary computed?")
        error = ((found["gradient"].double() - gradients[rank]) / gradients[rank]).abs().max().item()
        if not error <= _GRADIENT_TOLERANCE:
            message = f"bf16 logits: the loss is right, but an element of its gradient is wrong by {error:.1%}"
            raise Wrong({rank: message}, "Hint: in which dtype does backward compute exp(logit)?")
        most_bytes = sum(each.sent_bytes(attempt.world_size) for each in loss_traffic(targets.numel(), 4))
        if found["sent"] > 1.01 * most_bytes:
            message = f"bf16 logits: forward sends {found['sent']:,.0f} bytes; expected {most_bytes:,.0f}"
            raise Wrong({rank: message}, "Hint: in which dtype are the sums sent?")


def probe_bf16(parallelize, case: Model, seed: int, tokens: torch.Tensor, targets: torch.Tensor) -> dict:
    model = parallelize(case.build_model(seed).to(device_here(), torch.bfloat16), None, case.sequence_parallel)
    with instrumentation.listening() as calls:
        loss = model(tokens.to(device_here()), targets.to(device_here()))
        loss.backward()
    return {
        "loss": loss.item(),
        "dtypes": {parameter.dtype for parameter in model.parameters()},
        "gradient": model.blocks[0].norm_1.weight.grad,
        "sent": _sent_bytes(calls),
    }


def a_bf16_gpt_stays_bf16(attempt: Attempt) -> None:
    for sequence_parallel in (False, True):
        case, seed = Model(sequence_parallel=sequence_parallel), attempt.draw_seed()
        tokens, targets = case.draw_batch(torch.Generator().manual_seed(attempt.draw_seed()))
        whole = case.build_model(seed).to(torch.bfloat16)
        expected = case.loss_of(whole(tokens).float(), targets)
        expected.backward()
        needs = case.traffic(whole, tokens, 0, attempt.world_size)
        in_a_step = needs["forward"] + needs["backward"]
        most_bytes = sum(each.sent_bytes(attempt.world_size) for each in in_a_step)
        context = f"a bf16 model, {sequence_parallel = }"
        results = attempt.run(probe_bf16, case, seed, tokens, targets, context=context)
        for rank, found in enumerate(results):
            _judge(rank, found, expected.item(), whole, context)
            if found["sent"] > 1.01 * most_bytes:
                message = f"{context}: a step sends {found['sent']:,.0f} bytes; expected {most_bytes:,.0f}"
                raise Wrong({rank: message}, "Hint: what is the dtype of the activations that are sent?")


def _judge(rank: int, found: dict, expected: float, whole: nn.Module, context: str) -> None:
    if found["dtypes"] != {torch.bfloat16}:
        raise Wrong(
            {rank: f"{context}: parameters have the dtypes {found['dtypes']}; expected only bfloat16"},
            "Hint: which line converts them?",
        )
    if not abs(found["loss"] - expected) < _LOSS_TOLERANCE * expected:
        message = f"{context}: the loss is {found['loss']:.5g}, expected about {expected:.5g}"
        raise Wrong({rank: message}, "Hint: which sums have many terms, and in which dtype are they added up?")
    gradient = found["gradient"]
    reference = whole.blocks[0].norm_1.weight.grad
    cosine = F.cosine_similarity(gradient.double(), reference.double(), 0)
    if gradient.dtype != torch.bfloat16 or not cosine > _LEAST_COSINE:
        message = f"{context}: the gradient of blocks.0.norm_1.weight points in another direction than in one process"
        raise Wrong({rank: message}, "Hint: is this gradient added up over the ranks?")
