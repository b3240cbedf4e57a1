"""Judge attention on shards: its results, its gradients, and those of common mistakes."""

from dataclasses import dataclass, replace

import torch

from shared.checks.context_parallel import probes
from shared.checks.context_parallel.probes import ALL_TO_ALL, FORWARD, Attended, Setting
from shared.checks.context_parallel.sequences import expect_error, judge, shard, tokens_of
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Wrong
from shared.checks.engine.subgroups import called_alone, members_of

NAMES = ("queries", "keys", "values")


@dataclass
class Whole:
    """A whole sequence in one process: queries, keys, values, the gradient of the output, and what follows from them.

    Attributes:
        tensors: The four of them, in the dtype of the check.
        output: The output, in float64.
        log_sum: The log-sum-exp of each query.
        gradients: Those of queries, keys and values.
    """

    tensors: list[torch.Tensor]
    output: torch.Tensor
    log_sum: torch.Tensor
    gradients: list[torch.Tensor]


def scores_of(query: torch.Tensor, key: torch.Tensor, causal: bool) -> torch.Tensor:
    scores = query @ key.mT / query.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf) if causal else scores


def compute(tensors: list[torch.Tensor], causal: bool) -> Whole:
    """Attend to the whole sequence in this process."""
    *wide, gradient = (tensor.double() for tensor in tensors)
    query, key, value = (tensor.clone().requires_grad_() for tensor in wide)
    scores = scores_of(query, key, causal)
    output = scores.softmax(-1) @ value
    gradients = torch.autograd.grad(output, (query, key, value), gradient)
    return Whole(tensors, output.detach(), scores.detach().logsumexp(-1, keepdim=True), list(gradients))


def draw(attempt: Attempt, setting: Setting) -> Whole:
    """Draw a whole sequence for the ranks that take part."""
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    length = setting.tokens * len(members_of(attempt, setting.in_subgroup))
    shape = setting.batch, setting.heads, length, setting.width
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(setting.dtype) for _ in range(4)]
    return compute(tensors, setting.causal)


def try_it(attempt: Attempt, setting: Setting) -> tuple[Whole, dict[int, Attended]]:
    """Run the student's function on shards. Returns the whole sequence, and what each rank of the group found."""
    members = members_of(attempt, setting.in_subgroup)
    whole, size = draw(attempt, setting), len(members)
    own = []
    for rank in range(attempt.world_size):
        index = members.index(rank) if rank in members else 0
        own.append(tuple(shard(each, 2, index, size, setting.zigzag) for each in whole.tensors))
    context = called_alone(attempt) if setting.in_subgroup else str(setting)
    found = attempt.run(probes.attention, setting, per_rank=own, context=context)
    return whole, {rank: found[rank] for rank in members}


def judge_results(setting: Setting, whole: Whole, found: dict[int, Attended], tolerance: float = 1e-10) -> None:
    """Compare outputs and, if there are any, gradients with those of one process."""

    def parts(tensor: torch.Tensor) -> dict[int, torch.Tensor]:
        return {rank: shard(tensor, 2, index, len(found), setting.zigzag) for index, rank in enumerate(found)}

    index_of = {rank: index for index, rank in enumerate(found)}

    def hint_on_output(rank: int, output: torch.Tensor) -> str:
        mistakes = wrong_outputs(setting, whole, index_of[rank], len(found))
        return next((hint for hint, wrong in mistakes.items() if is_close(output, wrong)), "")

    outputs = {rank: each.output for rank, each in found.items()}
    judge(outputs, parts(whole.output), f"{setting}: the output", hint_on_output, tolerance)
    if setting.piece == FORWARD:
        log_sums = {rank: each.log_sum for rank, each in found.items()}
        hint = "Hint: the log-sum-exp of which keys belongs to this output?"
        judge(log_sums, parts(whole.log_sum), f"{setting}: the log-sum-exp", lambda *_: hint, tolerance)
    if not setting.differentiates:
        return
    for number, name in enumerate(NAMES):

        def hint_on_gradient(rank: int, gradient: torch.Tensor, number=number) -> str:
            mistakes = wrong_gradients(setting, whole, number, index_of[rank], len(found))
            return next((hint for hint, wrong in mistakes.items() if is_close(gradient, wrong)), HINT_ON_TERMS[number])

        gradients = {rank: each.gradients[number] for rank, each in found.items()}
        what = f"{setting}: the output is right, but the gradient of the {name}"
        judge(gradients, parts(whole.gradients[number]), what, hint_on_gradient, tolerance)
    if changed := {rank: f"{setting}: q, k or v was changed" for rank, each in found.items() if not each.kept}:
        raise Wrong(changed, "Hint: which tensor do you write to?")


HINT_ON_TERMS = (
    "Hint: over which keys is the sum, and is each term added to the right chunk of queries?",
    "Hint: each rank adds its own term. When does it add it, to what, and where does the sum go next?",
    "Hint: each rank adds its own term. When does it add it, to what, and where does the sum go next?",
)


def is_close(found: torch.Tensor, wrong: torch.Tensor) -> bool:
    return found.shape == wrong.shape and torch.allclose(found.double(), wrong, rtol=1e-6, atol=1e-9)


def wrong_outputs(setting: Setting, whole: Whole, index: int, size: int) -> dict[str, torch.Tensor]:
    """Compute what common mistakes lead to, each with its hint."""
    query, key, value = (tensor.double() for tensor in whole.tensors[:3])
    own = tokens_of(index, size, setting.zigzag, query.shape[2])
    rows = scores_of(query, key, setting.causal)[:, :, own]
    results = {}
    every = scores_of(query, key, False)[:, :, own]
    if setting.causal:
        results["The mask is missing. Hint: which pairs are masked, and does every line pass that on?"] = (
            every.softmax(-1) @ value
        )
        later = torch.ones(len(own), len(own), dtype=torch.bool).triu(1)
        local = scores_of(query[:, :, own], key[:, :, own], False).masked_fill(later, -torch.inf)
    else:
        local = every[..., own]
    results["It only knows this rank's own keys. Hint: whose keys does each step use?"] = (
        local.softmax(-1) @ value[:, :, own]
    )
    if size > 1:
        next_to = [tokens_of((index + shift) % size, size, setting.zigzag, query.shape[2]) for shift in (1, -1)]
        for theirs in next_to:
            results["It is another rank's output. Hint: which tokens' queries does this rank have?"] = whole.output[
                :, :, theirs
            ]
        blocks = [tokens_of(other, size, setting.zigzag, query.shape[2]) for other in range(size)]
        if not setting.causal:
            terms = [rows[..., block].softmax(-1) @ value[:, :, block] for block in blocks]
            results["It is the sum over the ranks of separate softmaxes. Hint: what does merge do?"] = sum(terms)
    return results


def wrong_gradients(setting: Setting, whole: Whole, number: int, index: int, size: int) -> dict[str, torch.Tensor]:
    """Compute what common mistakes lead to, each with its hint."""
    tokens = [tokens_of(other, size, setting.zigzag, whole.output.shape[2]) for other in range(size)]
    right = whole.gradients[number]
    results = {"It is all zeros. Hint: where is the sum stored?": torch.zeros_like(right[:, :, tokens[index]])}
    if size == 1:
        return results
    if number == 0:
        return results
    for shift in (1, -1):
        results[f"It belongs to the keys of rank {(index + shift) % size}. Hint: how many hops lead home?"] = right[
            :, :, tokens[(index + shift) % size]
        ]
    for other in range(size):
        query, key, value, gradient = (tensor.double() for tensor in whole.tensors)
        only = torch.zeros_like(gradient)
        only[:, :, tokens[other]] = gradient[:, :, tokens[other]]
        inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        output = scores_of(inputs[0], inputs[1], setting.causal).softmax(-1) @ inputs[2]
        term = torch.autograd.grad(output, inputs, only)[number][:, :, tokens[index]]
        whose = "this rank's own queries" if other == index else f"the queries of rank {other}"
        results[f"It is only the term of {whose}. Hint: how do the terms of the other ranks get here?"] = term
    return results


# -- what the checks try


def plain(attempt: Attempt) -> None:
    setting = Setting(attempt.piece, tokens=4, batch=1, causal=attempt.piece == ALL_TO_ALL)
    judge_results(setting, *try_it(attempt, setting))


def causal(attempt: Attempt) -> None:
    setting = Setting(attempt.piece, tokens=4, batch=1)
    judge_results(setting, *try_it(attempt, setting))


def every_order(attempt: Attempt) -> None:
    heads = attempt.world_size * attempt.random.randint(1, 2)
    orders = (True,) if attempt.piece == ALL_TO_ALL else (True, False)
    for balanced in orders:
        for is_causal in (True, False):
            tokens = 2 * attempt.random.randint(1, 4)
            setting = Setting(attempt.piece, tokens, heads=heads, causal=is_causal, balanced=balanced)
            judge_results(setting, *try_it(attempt, setting))
    setting = Setting(attempt.piece, tokens=3, heads=heads, width=5, balanced=False)  # chunks of 3 tokens
    judge_results(setting, *try_it(attempt, setting))


def in_a_group(attempt: Attempt) -> None:
    for balanced in (True, False):
        setting = Setting(attempt.piece, heads=2, balanced=balanced, in_subgroup=True)
        judge_results(setting, *try_it(attempt, setting))


def accumulates_in_float32(attempt: Attempt) -> None:
    """Merging in bf16 rounds once per block, so the error is several times that of rounding the result once."""
    setting = Setting(attempt.piece, tokens=16, width=16, batch=4, dtype=torch.bfloat16, causal=False)
    whole, found = try_it(attempt, setting)
    for index, (rank, each) in enumerate(found.items()):
        pairs: dict[str, tuple] = {"output": (each.output, whole.output, torch.bfloat16)}
        if setting.piece == FORWARD:
            pairs["output"] = each.output, whole.output, torch.float32
            pairs["log_sum"] = each.log_sum, whole.log_sum, torch.float32
        for number, gradient in enumerate(each.gradients):
            pairs[f"gradient of the {NAMES[number]}"] = gradient, whole.gradients[number], torch.bfloat16
        for name, (tensor, right, dtype) in pairs.items():
            expected = shard(right, 2, index, len(found), setting.zigzag)
            if tensor is None or tensor.dtype != dtype:
                kind = "None" if tensor is None else str(tensor.dtype)
                raise Wrong({rank: f"{setting}: the {name} is {kind}; expected {dtype}"}, HINT_ON_DTYPE)
            error = (tensor.double() - expected).square().mean().sqrt().item()
            rounding = (expected.to(torch.bfloat16).double() - expected).square().mean().sqrt().item()
            most = rounding / 50 if dtype == torch.float32 else MOST_ROUNDINGS * rounding
            if error > most:
                times = f"{error / rounding:.2g} times that of rounding the right result to bf16 once"
                message = f"{setting}: the error of the {name} is {times}; expected at most {most / rounding:.2g}"
                raise Wrong({rank: message}, HINT_ON_ROUNDING)


MOST_ROUNDINGS = 1.4
HINT_ON_DTYPE = "Hint: which dtype do partial results have, and where is the result converted back?"
HINT_ON_ROUNDING = "Hint: how often is a partial sum rounded to bf16 on its way around the ring?"


def rejects_unequal_shards(attempt: Attempt) -> None:
    size, setting = attempt.world_size, Setting(attempt.piece, heads=attempt.world_size)
    generator = torch.Generator().manual_seed(attempt.draw_seed())

    def tensors(tokens: int, heads: int = setting.heads, odd: int = -1) -> tuple[torch.Tensor, ...]:
        lengths = [tokens + (number == odd) * 2 for number in range(4)]
        return tuple(torch.randn(2, heads, length, 3, generator=generator, dtype=torch.float64) for length in lengths)

    if size > 1:
        shorter = [tensors(2 if rank == size - 1 else 4) for rank in range(size)]
        context = "4 tokens on each rank except the last one, which has 2"
        expect_error(attempt, probes.attention, setting, shorter, context)
    longer_keys = [tensors(4, odd=1) for _ in range(size)]
    expect_error(attempt, probes.attention, setting, longer_keys, "more keys than queries and values")
    if attempt.piece == ALL_TO_ALL:
        heads = [tensors(4, size + 1) for _ in range(size)]
        if size > 1:
            expect_error(attempt, probes.attention, replace(setting), heads, f"{size + 1} heads on {size} ranks")
        return
    expect_error(attempt, probes.attention, setting, [tensors(3)] * size, "shards of 3 tokens, balanced")
