"""Judge what layers must do besides computing right values: in bf16, with odd sizes, in several calls, in memory."""

import re
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared import wire
from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import nearly_equal, total_of
from shared.checks.engine.failures import Wrong
from shared.checks.engine.model_parallel.probe import join_one_of
from shared.checks.tensor_parallel.cases import BATCH, TOKENS, loss_traffic, own_part
from shared.checks.tensor_parallel.models import Model
from shared.models import GatedMLP, GPTConfig, GroupedAttention, TinyGPT
from shared.wire import instrumentation

# -- sizes that the ranks cannot divide evenly are rejected with an error that names the numbers


def probe_rejection(piece, what: str, size: int) -> str:
    """Let the piece split something of this size. Returns what it raised, or "" if it raised nothing."""
    torch.manual_seed(0)  # a layer must be the same on every rank
    build = {
        "outputs": lambda: piece.from_linear(nn.Linear(4, size).to(device_here())),
        "inputs": lambda: piece.from_linear(nn.Linear(size, 4).to(device_here())),
        "inner elements": lambda: piece.from_mlp(GatedMLP(4, size).to(device_here())),
        "query heads": lambda: piece.from_attention(GroupedAttention(2 * size, size, 1).to(device_here())),
        "kv heads": lambda: piece.from_attention(GroupedAttention(24 * size, 12 * size, size).to(device_here())),
        "heads of a GPT": lambda: piece(TinyGPT(GPTConfig(12, 12, 1, size, 12 * size)).to(device_here())),
        "tokens of a GPT": lambda: _run_tokens(piece, size),
    }
    try:
        build[what]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _run_tokens(parallelize, tokens: int) -> None:
    model = parallelize(TinyGPT(GPTConfig(12, 64, 1, 12, 12)).to(device_here()), sequence_parallel=True)
    model(torch.zeros(2, tokens, dtype=torch.long, device=device_here()))


def _judge_rejection(attempt: Attempt, what: str) -> None:
    size = attempt.world_size * attempt.random.randint(2, 9) + attempt.random.randint(1, attempt.world_size - 1)
    context = f"{size} {what} on {attempt.world_size} ranks"
    for rank, message in enumerate(attempt.run(probe_rejection, what, size, context=context)):
        numbers = {int(number) for number in re.findall(r"\d+", message)}
        if not message.startswith("ValueError: ") or not {size, attempt.world_size} <= numbers:
            raised = f"your code raised {message}" if message else "your code raised no error"
            wanted = f"expected a ValueError that names {size} and {attempt.world_size}"
            raise Wrong({rank: f"{context}: {raised}; {wanted}"}, "Hint: which given function raises this error?")


outputs_that_do_not_divide = on_each(_judge_rejection, "outputs")
inputs_that_do_not_divide = on_each(_judge_rejection, "inputs")
inner_elements_that_do_not_divide = on_each(_judge_rejection, "inner elements")
heads_that_do_not_divide = on_each(_judge_rejection, "query heads", "kv heads")
a_gpt_that_does_not_divide = on_each(_judge_rejection, "heads of a GPT", "tokens of a GPT")


# -- several calls of an operator before the first backward, as in every model, and with more than one group


_GROUPS = [[0, 1], [2]]  # in some calls; the others are among all ranks


def probe_calls(operator, seed: int) -> list[str]:
    """Call the operator three times before backward. Returns what differs from three calls with a backward each."""
    group, _ = join_one_of(_GROUPS)
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    drawn = torch.randn(3, BATCH, TOKENS, 6, generator=generator, dtype=torch.float64).to(device_here())
    inputs, groups = [each.clone().requires_grad_() for each in drawn], (group, None, group)

    alone = []
    for x, its_group in zip(inputs, groups, strict=True):
        y = operator(x, its_group)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        alone.append((y.detach().clone(), gradient.clone()))

    outputs = [operator(x, its_group) for x, its_group in zip(inputs, groups, strict=True)]
    gradients = torch.autograd.grad(total_of(y.square().sum() for y in outputs), inputs)
    differs = []
    for index, (y, gradient, (own_y, own_gradient)) in enumerate(zip(outputs, gradients, alone, strict=True)):
        differs += [] if nearly_equal(y.detach(), own_y) else [f"the output of call {index + 1}"]
        differs += [] if nearly_equal(gradient, own_gradient) else [f"the gradient of call {index + 1}"]
    return differs


def calls_do_not_share_anything(attempt: Attempt) -> None:
    context = f"three calls, of which the first and third are in the groups {' and '.join(map(str, _GROUPS))}"
    for rank, differs in enumerate(attempt.run(probe_calls, attempt.draw_seed(), context=context)):
        if differs:
            message = f"{context}: {differs[0]} differs from that of the same call alone"
            hint = "Hint: where does a call keep what it needs later, and can the next call overwrite that?"
            raise Wrong({rank: message}, hint)


# -- how many bytes of activations a rank keeps for backward, and after it has given its tokens to the others


# Of what is kept without sequence parallelism. In units of B · T · D elements, a layer of TinyGPT keeps 4 + 13/N then,
# and 2 + 15/N with it: the inputs of two column-parallel layers, which are gathered, and parts of everything else. On 4
# ranks, that is a fraction of 0.79.
MOST_OF_ACTIVATIONS = 0.9
_SEQUENCES = 16


def probe_saved(parallelize, seed: int, tokens: torch.Tensor, targets: torch.Tensor) -> dict[bool, int]:
    """Return the bytes that autograd saves in forward, without parameters, with and without sequence parallelism."""
    found = {}
    for sequence_parallel in (False, True):
        case = Model(head_width=4, sequence_parallel=sequence_parallel)
        model = parallelize(case.build_model(seed).to(device_here()), None, sequence_parallel)
        owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        saved: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor, owned=owned, saved=saved) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in owned:
                saved[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(tokens.to(device_here()), targets.to(device_here()))
        found[sequence_parallel] = sum(storage.nbytes() for storage in saved.values())
        loss.backward()
    return found


def tokens_divide_activations(attempt: Attempt) -> None:
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    drawn = [Model().draw_batch(generator) for _ in range(_SEQUENCES)]
    tokens, targets = map(torch.cat, zip(*drawn, strict=True))
    for rank, found in enumerate(attempt.run(probe_saved, attempt.draw_seed(), tokens, targets)):
        if found[True] > MOST_OF_ACTIVATIONS * found[False]:
            message = f"forward keeps {found[True]:,} bytes for backward with sequence parallelism"
            message += f", and {found[False]:,} bytes without it"
            hint = "Hint: which activations does a rank have for its own tokens only, and do views keep more alive?"
            raise Wrong({rank: message}, hint)


# bf16 has 8 significant bits. The loss is a mean over 24 tokens of a model with two layers.
_LOSS_TOLERANCE, _LEAST_COSINE = 0.03, 0.98
_OUTPUTS = 240
# Of each element of the loss's gradient. A rounding to bf16 changes it by at most 2⁻⁸, and a correct solution may round
# it three times: the saved softmax, the gradient that arrives, and their product.
_GRADIENT_TOLERANCE = 0.015


@dataclass
class Computed:
    loss: float
    gradient: torch.Tensor
    sent_bytes: float
    dtypes: set[torch.dtype] = field(default_factory=set)  # of the model's parameters


def probe_loss(vocab_parallel_cross_entropy, logits: torch.Tensor, targets: torch.Tensor) -> Computed:
    own = logits[..., list(own_part(logits.shape[-1], None))].to(device_here()).requires_grad_()
    with instrumentation.listening() as calls:
        loss = vocab_parallel_cross_entropy(own, targets.to(device_here()))
    loss.backward()
    assert own.grad is not None, "the logits have no gradient after backward()"
    return Computed(loss.item(), own.grad.cpu(), _sent_bytes(calls))


def _sent_bytes(calls: list) -> float:
    return sum(wire.sent_bytes_of(call, 0) for call in calls)


def a_loss_of_bf16_logits_is_exact(attempt: Attempt) -> None:
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    logits = torch.randn(BATCH, TOKENS, _OUTPUTS, generator=generator).to(torch.bfloat16)
    targets = torch.randint(_OUTPUTS, (BATCH, TOKENS), generator=generator)
    exact = logits.double().requires_grad_()
    loss = F.cross_entropy(exact.flatten(0, 1), targets.flatten())
    (exact_gradient,) = torch.autograd.grad(loss, exact)
    expected, gradients = loss.item(), exact_gradient.chunk(attempt.world_size, -1)
    for rank, found in enumerate(attempt.run(probe_loss, logits, targets, context="bf16 logits")):
        if not abs(found.loss - expected) <= 1e-5 * expected:
            message = f"bf16 logits: the loss is {found.loss:.7g}, expected {expected:.7g}"
            raise Wrong({rank: message}, "Hint: in which dtype are the sums over the vocabulary computed?")
        error = ((found.gradient.double() - gradients[rank]) / gradients[rank]).abs().max().item()
        if not error <= _GRADIENT_TOLERANCE:
            message = f"bf16 logits: the loss is right, but an element of its gradient is wrong by {error:.1%}"
            raise Wrong({rank: message}, "Hint: in which dtype does backward compute exp(logit)?")
        most_bytes = sum(each.sent_bytes(attempt.world_size) for each in loss_traffic(targets.numel(), 4))
        if found.sent_bytes > 1.01 * most_bytes:
            message = f"bf16 logits: forward sends {found.sent_bytes:,.0f} bytes; expected {most_bytes:,.0f}"
            raise Wrong({rank: message}, "Hint: in which dtype are the sums sent?")


def probe_bf16(parallelize, case: Model, seed: int, tokens: torch.Tensor, targets: torch.Tensor) -> Computed:
    model = parallelize(case.build_model(seed).to(device_here(), torch.bfloat16), None, case.sequence_parallel)
    with instrumentation.listening() as calls:
        loss = model(tokens.to(device_here()), targets.to(device_here()))
        loss.backward()
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return Computed(loss.item(), model.blocks[0].norm_1.weight.grad, _sent_bytes(calls), dtypes)


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
            if found.sent_bytes > 1.01 * most_bytes:
                message = f"{context}: a step sends {found.sent_bytes:,.0f} bytes; expected {most_bytes:,.0f}"
                raise Wrong({rank: message}, "Hint: what is the dtype of the activations that are sent?")


def _judge(rank: int, found: Computed, expected: float, whole: nn.Module, context: str) -> None:
    if found.dtypes != {torch.bfloat16}:
        raise Wrong(
            {rank: f"{context}: parameters have the dtypes {found.dtypes}; expected only bfloat16"},
            "Hint: which line converts them?",
        )
    if not abs(found.loss - expected) < _LOSS_TOLERANCE * expected:
        message = f"{context}: the loss is {found.loss:.5g}, expected about {expected:.5g}"
        raise Wrong({rank: message}, "Hint: which sums have many terms, and in which dtype are they added up?")
    gradient = found.gradient
    reference = whole.get_parameter("blocks.0.norm_1.weight").grad
    assert reference is not None
    cosine = F.cosine_similarity(gradient.double(), reference.double(), 0)
    if gradient.dtype != torch.bfloat16 or not cosine > _LEAST_COSINE:
        message = f"{context}: the gradient of blocks.0.norm_1.weight points in another direction than in one process"
        raise Wrong({rank: message}, "Hint: is this gradient added up over the ranks?")
