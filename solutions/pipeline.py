# Built by `make notebooks` from source/15_pipeline_parallel/lab.py: edit that, not this.
"""Pipeline parallelism: each rank of a group computes some of the layers, for one micro-batch after another.

p is the number of stages (the ranks of the group), m that of micro-batches, and v that of chunks per stage.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F  # noqa: N812

from shared.schedules import Action, chunks_of
from shared.sharded.announcements import Announcements
from shared.sharded.ownership import (
    expect_same_layers,
    expect_unchanged,
    named_layers,
    own_parameters,
    split_evenly,
    tied_parameters,
)
from shared.sharded.parts import mark_local
from shared.sharded.stages import (
    Uninterrupted,
    accumulate,
    expect_equal_parts,
    expect_schedule,
    expect_tensor,
    is_plain_linear,
)
from solutions.async_collectives import InFlight
from solutions.neighbors import Neighbors
from solutions.pipeline_schedules import gpipe, interleaved, one_f_one_b, zero_bubble


class PostponeWeight(torch.autograd.Function):
    """Compute x Wᵀ + b. Backward keeps the factors of W's gradient, and computes the other gradients.

    W is not among the inputs that autograd sees, because its hooks must wait for its gradient. If x requires no
    gradient, an anchor takes W's place, so that the output requires one.
    """

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor | None, anchor: Tensor | None, postponed: tuple) -> Tensor:
        ctx.parameter, ctx.terms = postponed
        weight = ctx.parameter.detach()
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        ctx.terms.append((ctx.parameter, x.detach(), gradient))
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return of_x, of_bias, None, None


class Chunk(nn.Module):
    """Consecutive layers of a model, and what backward needs of every micro-batch in flight."""

    def __init__(self, layers: Sequence[nn.Module], is_first: bool = False, postpones: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.is_first = is_first  # in the whole model, so nobody needs the gradients of its inputs
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # input and output, by micro-batch
        self.micro_batch: int | None = None  # the one that step() is computing
        self.terms: dict[int, list] = {}  # what run_weights() multiplies, by micro-batch
        if postpones:
            for layer in self.modules():
                if type(layer) is nn.Linear and "forward" not in vars(layer):
                    layer.forward = partial(self.postponing, layer)

    def postponing(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Compute a linear layer whose backward leaves the gradient of its weight to run_weights(), where possible."""
        # Outside of step(), nobody would call run_weights().
        if self.micro_batch is None or not is_plain_linear(layer, x):
            return type(layer).forward(layer, x)
        terms = self.terms.setdefault(self.micro_batch, [])
        anchor = None if x.requires_grad else torch.empty(0, requires_grad=True)
        return PostponeWeight.apply(x, layer.bias, anchor, (layer.weight, terms))

    @torch.no_grad()
    def run_weights(self, micro_batch: int) -> None:
        """Compute the weight gradients that a micro-batch's backward has postponed, and add them."""
        for weight, x, gradient in self.terms.pop(micro_batch, []):
            accumulate(weight, gradient.flatten(0, -2).T @ x.flatten(0, -2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = expect_tensor(layer(x), layer)
        return x

    def run_forward(self, micro_batch: int, x: Tensor, loss_of: Callable | None = None) -> Tensor:
        """Compute the layers' output, or the loss if loss_of is given."""
        x = x.detach().requires_grad_(not self.is_first)
        output = self(x) if loss_of is None else loss_of(self(x))
        self.kept[micro_batch] = x, output
        return output.detach()

    def run_backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Compute the parameters' gradients, and return that of the input."""
        x, output = self.kept.pop(micro_batch)
        if output.requires_grad:
            output.backward(gradient)
        return x.grad


def build_schedule(
    schedule: str | Sequence[Sequence[Action]], stages: int, micro_batches: int, chunks: int
) -> Sequence[Sequence[Action]]:
    """Build a schedule from its name, or return one that is given.

    Raises:
        ValueError: if it cannot work. The message is one sentence.
    """
    builders = {
        "gpipe": lambda: gpipe(stages, micro_batches),
        "1f1b": lambda: one_f_one_b(stages, micro_batches),
        "interleaved": lambda: interleaved(stages, micro_batches, chunks),
        "zero_bubble": lambda: zero_bubble(stages, micro_batches),
    }
    if isinstance(schedule, str):
        if schedule not in builders:
            raise ValueError(f"there is no schedule {schedule!r}: choose one of {', '.join(builders)}")
        schedule = builders[schedule]()
    expect_schedule(schedule, stages, micro_batches)
    return schedule


class Pipeline:
    """Trains a list of layers, of which each rank of a group computes some.

    Args:
        layers: All layers of the model, the same on every rank. Each takes one tensor and returns one. A BatchNorm
            normalizes each micro-batch by itself, unlike one process.
        schedule: "gpipe", "1f1b", "interleaved" or "zero_bubble", or the actions of each stage.
        micro_batches: The number of equal parts that a batch is divided into.
        loss_fn: Returns the mean loss of a micro-batch, from the last layer's output and the targets. The batch's loss
            is the mean of these. If loss_fn ignores some targets, each micro-batch should have equally many.
        chunks: The number of chunks of layers per stage, if the schedule is "interleaved".

    Memory: the stage's own parameters, what backward needs of the micro-batches in flight, and until the end of a step
        the gradients that were sent.
    Communication: per micro-batch, one message forward and one backward between neighboring chunks, of the size of the
        activations; one broadcast of the loss.
    Raises:
        ValueError: if there are fewer layers than chunks, or if the schedule cannot work.
    Source: Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training".
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        schedule: str | Sequence[Sequence[Action]] = "1f1b",
        micro_batches: int = 8,
        loss_fn: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
        group: ProcessGroup | None = None,
        chunks: int = 2,
    ):
        self.group, self.loss_fn = group, loss_fn
        self.stage, self.stages = dist.get_rank(group), dist.get_world_size(group)
        built = build_schedule(schedule, self.stages, micro_batches, chunks)
        self.actions, self.micro_batches = built[self.stage], micro_batches
        self.last = chunks_of(built) * self.stages - 1
        self.neighbors = Neighbors(group)
        self.keep_own_layers(list(named_layers(layers)))
        self.losses: list[Tensor] = []
        self.announcements, self.uninterrupted = Announcements(self.neighbors), Uninterrupted()

    def keep_own_layers(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        """Build the chunks of this stage, and look for parameters that other stages have, too."""
        positions = self.last + 1
        if len(layers) < positions:
            raise ValueError(f"{len(layers)} layers cannot be split into {positions} chunks")
        expect_same_layers(layers, self.group)
        devices = (parameter.device for _, layer in layers for parameter in layer.parameters())
        self.device = next(devices, torch.device("cpu"))
        parts = split_evenly(len(layers), positions)
        postpones = any(action.kind == "W" for action in self.actions)
        own = [[layers[index] for index in part] for part in parts[self.stage :: self.stages]]
        self.chunks = [
            Chunk([layer for _, layer in part], self.stage == index == 0, postpones) for index, part in enumerate(own)
        ]
        self.own = own_parameters(layers, own)
        self.tied = tied_parameters(layers, parts, self.stage, self.stages)
        mark_local(self.own.values(), self.group, "call clip_grad_norm_() of the Pipeline or Parallel3D")

    def stage_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this stage, by their names in the whole model."""
        return self.own

    def position_of(self, action: Action) -> int:
        """Return the index of an action's chunk in the chain of all chunks."""
        return action.chunk * self.stages + self.stage

    def input_of(self, action: Action) -> Tensor:
        """Receive the output of the previous chunk. Before the first one, receive a header that describes it."""
        return self.announcements.receive(action.chunk)

    def send_output(self, action: Action, output: Tensor) -> None:
        """Send an output to the next chunk. Before the first one, send a header that describes it."""
        self.announcements.send(action.chunk, output)

    def run(self, action: Action, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Run the forward or the backward of one micro-batch."""
        chunk, index = self.chunks[action.chunk], action.micro_batch
        is_first = self.position_of(action) == 0
        is_last = self.position_of(action) == self.last
        if action.kind == "F":
            x = inputs[index] if is_first else self.input_of(action)
            if is_last:
                self.losses.append(chunk.run_forward(index, x, self.loss_of(targets[index])))
            else:
                self.send_output(action, chunk.run_forward(index, x))
        else:
            gradient = None if is_last else self.neighbors.receive("B", chunk.kept[index][1])
            gradient = chunk.run_backward(index, gradient)
            if not is_first:
                self.neighbors.send("B", gradient)

    def loss_of(self, target: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that computes this micro-batch's part of the mean loss."""
        return lambda output: self.loss_fn(output, target) / self.micro_batches

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradients of the stage's parameters, which are added to their .grad.

        Args:
            inputs: The batch, on every rank. Only the first stage reads its values.
            targets: What loss_fn compares the outputs with. Only the last stage reads its values.

        Returns:
            The mean loss of the batch, in float64, the same on every rank.

        Raises:
            ValueError: if the batch cannot be cut into equal micro-batches.
        """
        expect_equal_parts(inputs, targets, self.micro_batches)
        expect_unchanged(self.chunks, self.own)
        with self.uninterrupted:  # raises if an earlier step ended with an error
            self.announcements.begin_step(inputs)
            self.losses = []
            earlier = self.set_tied_gradients_aside()
            # Unlike the views of chunk(), these let the first layer change one micro-batch in place.
            micro_inputs = inputs.unsafe_chunk(self.micro_batches)
            self.run_actions(micro_inputs, targets.chunk(self.micro_batches))
            self.neighbors.finish()
            if self.tied:
                self.sum_tied_gradients()
            for parameter, gradient in earlier:
                parameter.grad += gradient
            zero = torch.zeros((), dtype=torch.float64, device=inputs.device)
            loss = sum((each.double() for each in self.losses), zero)
            dist.broadcast(loss, group_src=self.stages - 1, group=self.group)
        return loss

    def run_actions(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Run this stage's actions in order."""
        for action in self.actions:
            chunk = self.chunks[action.chunk]
            chunk.micro_batch = action.micro_batch
            if action.kind == "W":
                chunk.run_weights(action.micro_batch)
            else:
                self.run(action, inputs, targets)
            chunk.micro_batch = None

    def set_tied_gradients_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the gradients of tied parameters from earlier steps, which have been added up already."""
        earlier = [(parameter, parameter.grad) for parameter, _ in self.tied if parameter.grad is not None]
        for parameter, _ in self.tied:
            parameter.grad = None
        return earlier

    def sum_tied_gradients(self) -> None:
        """Give every copy of a tied parameter the sum of the gradients of all copies.

        Communication: one message of the parameter's size to each other stage that has it.
        """
        for parameter, stages in self.tied:
            if not parameter.requires_grad:
                continue
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            others = [stage for stage in stages if stage != self.stage]
            by_stage = {stage: own if stage == self.stage else torch.empty_like(own) for stage in stages}
            sends = [(own, stage) for stage in others]
            InFlight(sends, [(by_stage[stage], stage) for stage in others], self.group).wait()
            parameter.grad = torch.stack(list(by_stage.values())).sum(0)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all stages is at most max_norm.

        Returns:
            The norm before scaling, the same on every rank.

        Communication: one all-reduce of one element.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        counted_elsewhere = {parameter for parameter, stages in self.tied if stages[0] != self.stage}
        for parameter in self.own.values():
            if parameter.grad is not None and parameter not in counted_elsewhere:
                total += parameter.grad.abs().double().square().sum()
        dist.all_reduce(total, group=self.group)
        norm = total.sqrt()
        for parameter in self.own.values():
            if parameter.grad is not None:
                parameter.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
