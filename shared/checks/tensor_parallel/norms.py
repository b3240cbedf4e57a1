"""Training with AdamW and with clipped gradients, compared with one process."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls, first_difference, nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.engine.model_parallel.probe import join_one_of
from shared.checks.engine.subgroups import members_of, staying_inside
from shared.checks.tensor_parallel.models import Model
from shared.wire import instrumentation

STEPS = 5
CLIPS, LEAVES = 0.05, 1000.0  # the gradients have norms between 1 and 50
_ADAM: dict[str, Any] = {
    "lr": 1e-2,
    "eps": 1e-3,
}  # with a larger eps, a gradient near 0 does not become a step of size lr
_TOLERANCE = 1e-9
_SGD_LR = 0.1  # with 1.0, the steps amplify a permitted difference of 1e-6 beyond the tolerance
_CLIP_TOLERANCE = 1e-6  # torch adds 1e-6 to a norm before it divides by it, which need not be imitated
_BF16_TOLERANCE = 1e-6  # a square that is rounded to bf16 may be wrong by 2e-3


@dataclass(frozen=True)
class Loop:
    """A training loop: AdamW, or SGD on gradients that are clipped."""

    case: Model
    max_norm: float | None = None
    freezes: str = ""  # parameters with this word in their name are frozen
    steps: int = STEPS
    learning_rate_factor: float = 1.0

    def __str__(self) -> str:
        name = "AdamW" if self.max_norm is None else f"SGD, max_norm {self.max_norm:g}"
        frozen = f", frozen {self.freezes}" if self.freezes else ""
        return f"{name}{frozen}, sequence_parallel={self.case.sequence_parallel}"

    @property
    def tolerance(self) -> float:
        return _CLIP_TOLERANCE if self.max_norm == CLIPS else _TOLERANCE

    def build(self, seed: int) -> nn.Module:
        model = self.case.build_model(seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (self.freezes and self.freezes in name))
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.max_norm is None:
            return torch.optim.AdamW(trained, **_ADAM)
        return torch.optim.SGD(trained, _SGD_LR * self.learning_rate_factor)

    def batches(self, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return [self.case.draw_batch(generator) for _ in range(self.steps)]


@dataclass
class Run:
    """A training loop on one rank."""

    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    calls: list[list[instrumentation.Call]] = field(default_factory=list)  # of each clipping
    # By name, the dimension, the indices and the values without padding, after the last step.
    shards: dict[str, tuple[int | None, tuple[int, ...], torch.Tensor]] = field(default_factory=dict)


def probe_loop(parallelize, loop: Loop, groups: list[list[int]], seed: int, batches: list) -> Run:
    group, members = join_one_of(groups)
    with staying_inside(members if len(groups) > 1 else None):
        model = loop.case.split(parallelize, loop.build(seed).to(device_here()), group)
        optimizer, found = loop.optimizer(model), Run()
        for tokens, targets in batches:
            optimizer.zero_grad()
            loss = model(tokens.to(device_here()), targets.to(device_here()))
            loss.backward()
            found.losses.append(loss.detach())
            if loop.max_norm is not None:
                with instrumentation.listening() as calls:
                    norm = model.clip_grad_norm_(loop.max_norm)
                found.norms.append(torch.as_tensor(norm).detach())
                found.calls.append(calls)
            optimizer.step()
    for name, shard in loop.case.shards(model).items():
        found.shards[name] = shard.dim, tuple(shard.index), shard.without_padding(shard.tensor.detach()).clone()
    return found


def _train_and_judge(attempt: Attempt, loop: Loop, in_groups: bool = False) -> list[Run]:
    """Train on fresh data. Returns what each rank found."""
    size = attempt.world_size
    groups = [list(range(size))]
    if in_groups:
        inside = members_of(attempt, True)
        groups = [inside, [rank for rank in range(size) if rank not in inside]]
    loop = replace(loop, steps=attempt.sizes.steps(loop.steps), learning_rate_factor=attempt.sizes.learning_rate_factor)
    drawn = [(attempt.draw_seed(), loop.batches(attempt.draw_seed())) for _ in groups]
    per_rank = [
        next(draw for draw, members in zip(drawn, groups, strict=True) if rank in members) for rank in range(size)
    ]
    results = attempt.run(probe_loop, loop, groups, per_rank=per_rank, context=str(loop))
    for draw, members in zip(drawn, groups, strict=True):
        _judge(loop, {rank: results[rank] for rank in members}, *draw)
    return results


def _judge(loop: Loop, found: dict[int, Run], seed: int, batches: list) -> None:
    whole, losses, norms = _one_process(loop, seed, batches)
    for step_index, expected in enumerate(norms):
        _judge_norms({rank: each.norms[step_index] for rank, each in found.items()}, expected, loop, step_index)
    for rank, each in found.items():
        for step_index, (loss, expected) in enumerate(zip(each.losses, losses, strict=True)):
            if not nearly_equal(loss, expected, loop.tolerance):
                message = f"{loop}, step {step_index + 1}: the loss is {loss:.8g}, expected {expected:.8g}"
                raise Wrong({rank: message}, "Hint: which parameters were updated with an incomplete gradient?")
        for name, (dim, index, shard) in each.shards.items():
            expected = (
                whole[name] if dim is None else whole[name].index_select(dim, torch.tensor(index, dtype=torch.long))
            )
            if not nearly_equal(shard, expected, loop.tolerance):
                message = (
                    f"{loop}, after {loop.steps} steps, {name}: {first_difference(shard, expected, loop.tolerance)}"
                )
                raise Wrong({rank: message}, "Hint: is the gradient of this parameter the same as in one process?")


def _one_process(loop: Loop, seed: int, batches: list) -> tuple[dict, list, list]:
    model = loop.build(seed)
    optimizer, losses, norms = loop.optimizer(model), [], []
    for tokens, targets in batches:
        optimizer.zero_grad()
        losses.append(model(tokens, targets))
        losses[-1].backward()
        if loop.max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), loop.max_norm))
        optimizer.step()
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return whole, [loss.detach() for loss in losses], norms


def _judge_norms(norms: dict[int, torch.Tensor], expected: torch.Tensor, loop: Loop, step_index: int) -> None:
    tolerance = loop.tolerance if step_index else _TOLERANCE  # nothing has been scaled before the first norm
    for rank, norm in norms.items():
        if norm.numel() != 1 or not nearly_equal(norm.reshape(()), expected.double(), tolerance):
            message = f"{loop}, step {step_index + 1}: the norm is {norm.flatten()[0]:.8g}, expected {expected:.8g}"
            hint = "Hint: which parameters does every rank have, and how many times do you count them?"
            if len({each.flatten()[0].item() for each in norms.values()}) > 1:
                hint = "The ranks have different norms. Hint: which squares does a rank not have?"
            elif step_index:
                hint = "The norm in the previous step was right. Hint: by which factor were its gradients scaled?"
            elif norm.flatten()[0] < expected:
                hint = "It is too small. Hint: which parameters are missing?"
            raise Wrong({rank: message}, hint)


adamw_equals_one_process = on_each(
    _train_and_judge,
    *(Loop(Model(vocabulary=25, sequence_parallel=sequence_parallel)) for sequence_parallel in (False, True)),
)
a_plain_norm_is_clipped = on_each(_train_and_judge, Loop(Model(layers=1), CLIPS))


def clipping_equals_one_process(attempt: Attempt) -> None:
    for sequence_parallel in (False, True):
        _train_and_judge(attempt, Loop(Model(layers=1, biases=True, sequence_parallel=sequence_parallel), CLIPS))
    _train_and_judge(attempt, Loop(Model(layers=1, tied=False, vocabulary=25), CLIPS, freezes="norm"))
    _train_and_judge(attempt, Loop(Model(layers=1), LEAVES))
    if attempt.world_size > 2:
        _train_and_judge(attempt, Loop(Model(layers=1), CLIPS), in_groups=True)


def clipping_sends_one_element(attempt: Attempt) -> None:
    for rank, found in enumerate(_train_and_judge(attempt, Loop(Model(layers=1), CLIPS))):
        for calls in found.calls:
            if len(calls) != 1 or calls[0].payload_bytes > 8:
                message = f"clip_grad_norm_() sends {describe_calls(calls)}; expected one all_reduce of 8 bytes"
                raise Wrong({rank: message}, "Hint: what can a rank add up before it sends?")


@dataclass
class Norm:
    """The norm of a bf16 model's gradients, and the squares that this rank has."""

    norm: float
    of_shards: float
    of_replicas: float


def probe_norm(parallelize, case: Model, seed: int, tokens: torch.Tensor, targets: torch.Tensor) -> Norm:
    model = case.split(parallelize, case.build_model(seed).to(device_here(), torch.bfloat16), None)
    model(tokens.to(device_here()), targets.to(device_here())).backward()
    squares = {True: 0.0, False: 0.0}
    for shard in {id(each.tensor): each for each in case.shards(model).values()}.values():
        assert shard.tensor.grad is not None, "a parameter has no gradient after backward()"
        squares[shard.dim is not None] += shard.tensor.grad.double().square().sum().item()
    norm = torch.as_tensor(model.clip_grad_norm_(LEAVES))
    return Norm(norm.item(), squares[True], squares[False])


def a_norm_of_bf16_gradients_is_exact(attempt: Attempt) -> None:
    case, seed = Model(layers=1), attempt.draw_seed()
    batch = case.draw_batch(torch.Generator().manual_seed(attempt.draw_seed()))
    results = attempt.run(probe_norm, case, seed, *batch, context="a bf16 model")
    of_shards = sum(found.of_shards for found in results)
    for rank, found in enumerate(results):
        expected = (of_shards + found.of_replicas) ** 0.5
        if not abs(found.norm - expected) <= _BF16_TOLERANCE * expected:
            message = f"a bf16 model: the norm is {found.norm:.8g}, expected {expected:.8g}"
            raise Wrong({rank: message}, "Hint: in which dtype do you compute the squares, and add them up?")
