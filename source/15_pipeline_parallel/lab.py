# ---
# jupyter:
#   course:
#     module: pipeline
#     minutes: 90
# ---

# %% [markdown]
# # Lab 15 · Pipeline parallelism
#
# **90 minutes, 16 points**, and another 7 minutes and 2 points for a stretch exercise. In this lab, you split a model
# by depth: each rank computes a few of its layers, for one micro-batch after another. At the end, `Pipeline(layers)`
# trains any list of layers exactly as one process does, with the schedule that you choose.
#
# | exercise | you build | minutes | points |
# |---|---|---|---|
# | 15.1 | `alternate`: forwards and backwards in turn | 3 | 1 |
# | 15.2 | `under_limit`: a schedule that fits into memory | 20 | 2 |
# | 15.3 | `interleaved`: several chunks of layers per stage | 9 | 2 |
# | 15.4 | `Neighbors`: messages that never make the sender wait | 11 | 2 |
# | 15.5 | `Chunk`: forward and backward of one micro-batch | 11 | 3 |
# | 15.6 | `Pipeline.run`: run the actions of a schedule | 16 | 3 |
# | 15.7 | `sum_tied_gradients`: one parameter on two stages | 7 | 2 |
# | 15.8 | `clip_grad_norm_` over all stages | 6 | 1 |
# | 15.9 | Stretch: `zero_bubble`, a third of the bubble | 7 | 2 |
# | | Break it: two mistakes that raise no error | 6 | |
#
# Each exercise has a check. The checks of schedules need no messages. The others start with a plain model on two
# stages, and then try one to four stages, numbers of layers that cannot be divided evenly, and several steps of
# training. They compare every gradient with that of one process, and count messages, bytes and micro-batches in flight.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import pipeline as check

ranks.start(world_size=4)

# %% tags=["export"] module="pipeline_schedules"
# %%ranks
"""Pipeline schedules: which micro-batch each stage computes when.

A schedule is a list with one entry per stage: the list of its actions, in the order in which it runs them. p is the
number of stages, m that of micro-batches, and v that of chunks of layers per stage.
"""

import math

from shared.schedules import Action

# %% [markdown]
# ## Exercise 15.1 · In turn (3 min, 1 point)
#
# A **schedule** lists what each stage does, in order. An `Action(kind, micro_batch, chunk)` is one entry of such a
# list. Its kind is `"F"` for the forward of a micro-batch, or `"B"` for its backward. `chunk` is 0 until exercise 15.3.
#
# 1F1B and the interleaved schedule have one pattern in common. A stage starts with some forwards, the **warm-up**. Then
# it runs pairs of a forward and a backward. When no forwards are left, it runs the remaining backwards. With four of
# each and a warm-up of 2, that is `F0 F1 F2 B0 F3 B1 B2 B3`.
#
# - `forwards` and `backwards` are two lists of equal length: a stage's actions of each kind, in the order in which they
#   run.
# - `warm_up` may be as large as `len(forwards)`, or larger.
# - Leave both lists as they are. The next cell passes the same ones for every stage.
#
# <details><summary>Hint</summary>
#
# `zip` stops at the end of its shorter argument. Which backwards are left after the pairs?
#
# </details>


# %% tags=["exercise", "export"] grade_id="alternate" module="pipeline_schedules"
# %%ranks
def alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """Order a stage's actions: warm_up forwards, then pairs of a forward and a backward, then the other backwards."""
    ### BEGIN SOLUTION
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    steady = [action for pair in pairs for action in pair]
    return forwards[:warm_up] + steady + backwards[len(forwards) - warm_up :]
    ### END SOLUTION


# %% tags=["check"] grade_id="check-alternate" points=1
check.alternate()

# %% [markdown]
# With `alternate`, the lesson's two schedules take a line each. 1F1B warms up with p − s − 1 forwards. (The lesson's
# p − s includes the forward of the first pair.) And GPipe is nothing but warm-up.


# %% tags=["export"] module="pipeline_schedules"
# %%ranks
def gpipe(stages: int, micro_batches: int) -> list[list[Action]]:
    """Schedule all forwards, then all backwards.

    Bubble: (p − 1) / m of the ideal time.
    Memory: m micro-batches in flight on every stage.
    Source: Huang et al. 2019, "GPipe", §2.3.
    """
    forwards = [Action("F", index) for index in range(micro_batches)]
    backwards = [Action("B", index) for index in range(micro_batches)]
    return [alternate(forwards, backwards, micro_batches) for _ in range(stages)]


def one_f_one_b(stages: int, micro_batches: int) -> list[list[Action]]:
    """Schedule each backward as early as possible.

    Bubble: (p − 1) / m of the ideal time, as with GPipe.
    Memory: at most p − s micro-batches in flight on stage s.
    Source: Narayanan et al. 2019, "PipeDream", §3.2; Narayanan et al. 2021, "Megatron-LM", §2.2.1.
    """
    forwards = [Action("F", index) for index in range(micro_batches)]
    backwards = [Action("B", index) for index in range(micro_batches)]
    return [alternate(forwards, backwards, stages - stage - 1) for stage in range(stages)]


# %% [markdown]
# ## Exercise 15.2 · A schedule that fits into memory (20 min, 2 points)
#
# A micro-batch is **in flight** on a stage from its forward to its backward. With 1F1B, stage 0 has p of them in
# flight. What if its memory has room for only two? In the lesson, you looked for such a schedule by hand. Now write the
# function that finds it, for any number of stages and micro-batches, and any limit.
#
# A shorter warm-up is not enough. With four stages, eight micro-batches and a limit of 2, alternating takes 69 units of
# time, if a forward takes 1 unit and a backward 2. But 51 are enough. The reason is that stages wait for the next
# action in their list, although they could run another one. So follow the clock instead. Whenever a stage is free:
#
# - It runs the backward of its next micro-batch, if the gradient has arrived. On the last stage, that is as soon as the
#   micro-batch's forward is done.
# - If there is no such backward, it runs its next forward, provided that the input has arrived and fewer than `limit`
#   micro-batches are in flight.
# - Otherwise it waits.
#
# A forward takes 1 unit, a backward 2, and a message no time. Forwards and backwards both run in the order of the
# micro-batches. With four stages and eight micro-batches, this rule takes:
#
# | limit | 1 | 2 | 3 | 4 or more |
# |---|---|---|---|---|
# | units of time | 96 | 51 | 39 | 33 |
#
# Return a schedule: for each stage, its actions in the order in which it ran them. The check demands that it is
# complete, that no stage exceeds the limit, and that it is as fast as this rule. How you find it is up to you. From
# exercise 15.6 on, you can train with it: `Pipeline(layers, under_limit(4, 8, 2))`.
#
# <details><summary>Hint 1</summary>
#
# Keep a clock, `for now in range(…)`, and three things for every stage: when it is free again, how many forwards it has
# begun, and how many backwards. In the worst case, every action runs alone. How many units does that take?
#
# </details>
# <details><summary>Hint 2</summary>
#
# When has an input arrived? Keep a dict with the time at which each action ends, by kind, micro-batch and stage.
# `ends.get(key, math.inf) <= now` is False until that action has ended, and also if it has not begun.
#
# </details>


# %% tags=["exercise", "export"] grade_id="under-limit" module="pipeline_schedules"
# %%ranks
def under_limit(stages: int, micro_batches: int, limit: int) -> list[list[Action]]:
    """Schedule each backward as early as possible, with at most `limit` micro-batches in flight on a stage.

    Bubble: that of 1F1B if the limit is at least min(p, m), and longer otherwise.
    Memory: at most min(limit, m) micro-batches in flight on a stage.
    """
    ### BEGIN SOLUTION
    schedule = [[] for _ in range(stages)]
    free_at, forwards, backwards = [0] * stages, [0] * stages, [0] * stages
    ends = {}  # when an action ends, by kind, micro-batch and stage

    def has_ended(kind: str, micro_batch: int, stage: int) -> bool:
        return ends.get((kind, micro_batch, stage), math.inf) <= now

    for now in range(3 * stages * micro_batches):
        for stage, actions in enumerate(schedule):
            f, b = forwards[stage], backwards[stage]
            if free_at[stage] > now:
                continue
            if has_ended("F", b, stage) and (stage == stages - 1 or has_ended("B", b, stage + 1)):
                action, units, backwards[stage] = Action("B", b), 2, b + 1
            elif (
                f < micro_batches and f - b < limit and (stage == 0 or has_ended("F", f, stage - 1))
            ):
                action, units, forwards[stage] = Action("F", f), 1, f + 1
            else:
                continue
            actions.append(action)
            free_at[stage] = ends[action.kind, action.micro_batch, stage] = now + units
    return schedule
    ### END SOLUTION


# %% tags=["check"] grade_id="check-under-limit" points=2
check.under_limit()

# %% [markdown]
# ## Exercise 15.3 · Interleaved stages (9 min, 2 points)
#
# The bubble becomes smaller if a micro-batch goes through every stage several times. Each stage gets v **chunks** of
# layers: with 2 stages and 2 chunks, stage 0 has layers 0 and 2, and stage 1 has layers 1 and 3. The third field of an
# `Action` is the index of its chunk.
#
# A stage cannot run chunk 1 of a micro-batch before stage p − 1 has run chunk 0 of it. In that time, it can run p
# forwards, so it works on p micro-batches at a time. Its forwards are: chunk 0 of the first p micro-batches, chunk 1 of
# the same ones, and so on, up to chunk v − 1. Then come the next p micro-batches. The backwards are in the same order,
# but with the chunks from the last to the first. For p = 2, m = 4 and v = 2 (`F0.1` is `Action("F", 0, 1)`):
#
# - forwards: `F0 F1 F0.1 F1.1 F2 F3 F2.1 F3.1`
# - backwards: `B0.1 B1.1 B0 B1 B2.1 B3.1 B2 B3`
#
# Let `alternate` order them. Stage s runs 2(p − s − 1) + (v − 1)p forwards before its first pair.
#
# m must be a multiple of p. The lines that check it are given.
#
# <details><summary>Hint</summary>
#
# Three nested loops give the forwards: over the first micro-batch of each set of p, over the chunks, and over the
# micro-batches of the set. What is different for the backwards?
#
# </details>


# %% tags=["exercise", "export"] grade_id="interleaved" module="pipeline_schedules"
# %%ranks
def interleaved(stages: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    """Schedule 1F1B for stages that each have several chunks of layers.

    Bubble: (p − 1) / (v · m) of the ideal time.
    Memory: at most 2(p − s − 1) + (v − 1)p + 1 chunks of micro-batches in flight on stage s.
    Raises:
        ValueError: if m is not a multiple of p.
    Source: Narayanan et al. 2021, "Megatron-LM", §2.2.2.
    """
    if micro_batches % stages:
        raise ValueError(
            f"an interleaved schedule needs a multiple of {stages} micro-batches, one for each stage, "
            f"got {micro_batches}"
        )
    ### BEGIN SOLUTION
    forwards, backwards = [], []
    for first in range(0, micro_batches, stages):
        for chunk in range(chunks):
            for micro_batch in range(first, first + stages):
                forwards.append(Action("F", micro_batch, chunk))
                backwards.append(Action("B", micro_batch, chunks - 1 - chunk))
    warm_ups = [2 * (stages - stage - 1) + (chunks - 1) * stages for stage in range(stages)]
    return [alternate(forwards, backwards, warm_up) for warm_up in warm_ups]
    ### END SOLUTION


# %% tags=["check"] grade_id="check-interleaved" points=2
check.interleaved()

# %% [markdown]
# The next cell simulates your schedules. A backward takes twice as long as a forward, and messages take no time.
# The last number counts one of a micro-batch's two chunks as one half. Read the last three lines from the bottom up,
# and then 1F1B's: how much of the bubble does each further micro-batch in flight remove? If memory has room for one
# more, is it worth it?
#
# <details><summary>Answer</summary>
#
# As fractions of the ideal time, the second one removes 1.9, the third 0.5, and the fourth (as in 1F1B) 0.25. Each is
# worth less than the one before, but even the fourth shortens the step from 39 units of time to 33, by 15%.
#
# </details>
#
# The warm-up of the interleaved schedule contains 2(p − s − 1) forwards, although p − s − 1 would give the same bubble
# here. On a network, the additional forwards give a stage work while messages are in flight.

# %% tags=["nbval-ignore-output"]
# %%ranks 0
from shared import schedules

built = {"GPipe": gpipe(4, 8), "1F1B": one_f_one_b(4, 8), "interleaved": interleaved(4, 8, 2)}
built |= {f"at most {limit}": under_limit(4, 8, limit) for limit in (3, 2, 1)}
for name, schedule in built.items():
    simulated = schedules.simulate(schedule)
    most = max(schedules.most_in_flight(actions) for actions in schedule)
    in_flight = most / schedules.chunks_of(schedule)
    print(
        f"{name}: bubble {simulated.bubble_of_ideal:.3f} of the ideal time, {in_flight:g} in flight"
    )

# %% [markdown]
# ## Exercise 15.4 · Neighbors (11 min, 2 points)
#
# Stage s sends its outputs to stage s + 1, and the gradients of its inputs to stage s − 1. With several chunks, the
# output of the last stage goes on to stage 0, so the stages form a ring.
#
# A stage that waits until its neighbor has received a message cannot compute in the meantime. Worse, two stages that
# both send first would wait for each other forever. So `send` launches the message with `dist.isend` and returns at
# once. The tensor must stay in memory until it has been received, so `send` keeps it in `in_flight`. But a stage *does*
# have to wait for what it receives, so `receive` uses `dist.recv`.
#
# The constructor, `finish` and `route` are given, and you need not read `connect`. `route(kind)` returns the process
# group for messages of this kind, and the rank in it that they go to. For receiving, call `route(kind, sends=False)`:
# the rank is then the sender.
#
# - `send(kind, tensor)`: launch the message, and append `(work, tensor)` to `in_flight[kind]`. Pass `group=…`,
#   `group_dst=…`, and `tag=TAGS[kind]`, which keeps outputs and gradients apart. A message must be contiguous.
# - `receive(kind, like)`: receive into `received`, which is given, and return it. Pass `group=…`, `group_src=…`, and
#   the same tag as the sender. If `kind` is `"B"` and `in_flight["F"]` is not empty, remove its oldest entry, and call
#   `work.wait()`. This returns at once, because the next stage has received at least one output for each gradient that
#   it has sent, the oldest output first. If you kept the entries, all m outputs would stay in memory.
#
# With a single stage, a rank sends messages to itself, which gloo cannot do. The lines for this case are given.
#
# <details><summary>Hint</summary>
#
# With more than two stages, is the rank that you receive outputs from also the one that you send outputs to?
#
# </details>


# %% tags=["export"] module="neighbors"
# %%ranks
"""Messages between the stages of a pipeline."""

from collections import deque
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shared.sharded.stages import expect_message

TAGS = {"F": 0, "B": 1}  # outputs of a forward, and gradients of a backward


# %% tags=["export"] module="neighbors"
# %%ranks
class Neighbors:
    """The messages between this stage and its neighbors. Sends never wait.

    Communication: one message per send().
    """

    def __init__(self, group: ProcessGroup | None):
        self.stage, self.stages = dist.get_rank(group), dist.get_world_size(group)
        self.groups = dict.fromkeys(product("FB", (0, 1)), group)
        self.in_flight: dict[str, deque[tuple[dist.Work, Tensor]]] = {"F": deque(), "B": deque()}
        self.to_itself = {"F": deque(), "B": deque()}
        if self.stages > 1 and "nccl" in dist.get_backend(group):
            self.connect(dist.get_process_group_ranks(group or dist.group.WORLD))


# %% tags=["export"] module="neighbors"
# %%ranks
class Neighbors(Neighbors):
    def connect(self, members: list[int]) -> None:
        """Give messages of each kind and direction a group of their own, and send the first ones.

        NCCL runs the messages of a group in order, so one that is sent could wait for one that is received. And the
        first message to a rank waits until that rank receives it, so even stages send it first, and odd ones receive.
        """
        self.groups = {
            key: dist.new_group(members, use_local_synchronization=True) for key in self.groups
        }
        first = torch.zeros(1, device=torch.accelerator.current_accelerator() or "cpu")
        for kind, sends in product("FB", (self.stage % 2 == 0, self.stage % 2 == 1)):
            group, peer = self.route(kind, sends)
            if sends:
                dist.send(first, group=group, group_dst=peer)
            else:
                dist.recv(first, group=group, group_src=peer)

    def route(self, kind: str, sends: bool = True) -> tuple[ProcessGroup | None, int]:
        """Return the group for messages of a kind, and the stage that they go to (or come from, if sends is False)."""
        peer = (self.stage + (1 if (kind == "F") == sends else -1)) % self.stages
        sender = self.stage if sends else peer
        return self.groups[kind, sender % 2], peer


# %% tags=["exercise", "export"] grade_id="neighbors" module="neighbors"
# %%ranks
class Neighbors(Neighbors):
    def send(self, kind: str, tensor: Tensor) -> None:
        """Launch a message to the next stage ("F") or to the previous one ("B"), without waiting for it."""
        expect_message(tensor)
        if self.stages == 1:
            self.to_itself[kind].append(tensor)
            return
        ### BEGIN SOLUTION
        message = tensor.contiguous()
        group, peer = self.route(kind)
        work = dist.isend(message, group=group, group_dst=peer, tag=TAGS[kind])
        self.in_flight[kind].append((work, message))
        ### END SOLUTION

    def receive(self, kind: str, like: Tensor) -> Tensor:
        """Wait for the next message from the previous stage ("F") or from the next one ("B")."""
        if self.stages == 1:
            return self.to_itself[kind].popleft()
        received = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        ### BEGIN SOLUTION
        group, peer = self.route(kind, sends=False)
        dist.recv(received, group=group, group_src=peer, tag=TAGS[kind])
        if kind == "B" and self.in_flight["F"]:
            work, _ = self.in_flight["F"].popleft()
            work.wait()
        return received
        ### END SOLUTION

    def finish(self) -> None:
        """Wait until all messages have been received."""
        for messages in self.in_flight.values():
            while messages:
                work, _ = messages.popleft()
                work.wait()


# %% tags=["check"] grade_id="check-neighbors" points=2
check.Neighbors()

# %% [markdown]
# ## Exercise 15.5 · One chunk of layers (11 min, 3 points)
#
# A `Chunk` computes its layers for one micro-batch at a time. Between the forward and the backward of a micro-batch, it
# keeps two tensors: the input, whose gradient goes to the previous stage, and the output, from which backward starts.
#
# - `run_forward(micro_batch, x, loss_of)` computes the layers. Only the last chunk of the model gets a `loss_of`, and
#   its output is the loss: `loss_of` applied to the layers' output. Store the input and the output in
#   `self.kept[micro_batch]`, and return the output, detached.
# - The input comes from another rank, so autograd does not know how it was computed. Make a *new* leaf of it, which
#   requires a gradient, and leave `x` itself as it is. The model's first chunk is an exception (`self.is_first`): no
#   stage needs the gradients of its inputs, and tokens are integers, which cannot require one.
# - `run_backward(micro_batch, gradient)` runs backward from the output. `gradient` is the gradient of the output, or
#   None for a loss. Return the gradient of the input (None in the first chunk), and remove the micro-batch from
#   `self.kept`.
# - If the output requires no gradient, because the first chunk's layers are frozen, there is no backward to run.
#
# The next three cells are given. `PostponeWeight`, `postponing` and `run_weights` are for the stretch exercise only, so
# the cell of the first one is folded. The first check runs a plain chunk. The others run several
# micro-batches, and look at what the chunk keeps.
#
# <details><summary>Hint</summary>
#
# `x.detach().requires_grad_(…)` is a new leaf with the same memory. When may it require a gradient?
#
# </details>


# %% tags=["export"]
# %%ranks
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


# %% tags=["export"] jupyter={"source_hidden": true}
# %%ranks
class PostponeWeight(torch.autograd.Function):
    """Compute x Wᵀ + b. Backward keeps the factors of W's gradient, and computes the other gradients.

    W is not among the inputs that autograd sees, because its hooks must wait for its gradient. If x requires no
    gradient, an anchor takes W's place, so that the output requires one.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, bias: Tensor | None, anchor: Tensor | None, postponed: tuple
    ) -> Tensor:
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


# %% tags=["export"]
# %%ranks
class Chunk(nn.Module):
    """Consecutive layers of a model, and what backward needs of every micro-batch in flight."""

    def __init__(
        self, layers: Sequence[nn.Module], is_first: bool = False, postpones: bool = False
    ):
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


# %% tags=["exercise", "export"] grade_id="chunk"
# %%ranks
class Chunk(Chunk):
    def run_forward(self, micro_batch: int, x: Tensor, loss_of: Callable | None = None) -> Tensor:
        """Compute the layers' output, or the loss if loss_of is given."""
        ### BEGIN SOLUTION
        x = x.detach().requires_grad_(not self.is_first)
        output = self(x) if loss_of is None else loss_of(self(x))
        self.kept[micro_batch] = x, output
        return output.detach()
        ### END SOLUTION

    def run_backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Compute the parameters' gradients, and return that of the input."""
        ### BEGIN SOLUTION
        x, output = self.kept.pop(micro_batch)
        if output.requires_grad:
            output.backward(gradient)
        return x.grad
        ### END SOLUTION


# %% tags=["check"] grade_id="check-chunk" points=3
check.Chunk()

# %% [markdown]
# ## Exercise 15.6 · Running a schedule (16 min, 3 points)
#
# `Pipeline(layers, schedule, micro_batches, loss_fn, group)` takes all layers of a model, which are the same on every
# rank, and keeps those of its own stage. The constructor is given. It checks the schedule before anything runs, and
# sets these attributes:
#
# - `actions`: the actions of this stage,
# - `chunks`: its `Chunk`s,
# - `neighbors`: its `Neighbors`,
# - `stage`, `stages` and `micro_batches`: its index, p and m.
#
# Three methods are given as well. `position_of(action)` returns where the action's chunk is in the chain of all chunks:
# 0 is the first chunk of the model, and `self.last` is the last. `input_of(action)` receives the output of the previous
# chunk, and returns it. `send_output(action, output)` sends an output to the next chunk. (Before the first message of a
# shape, these two exchange a small message that says what the shape is.)
#
# Write `run(action, inputs, targets)`, which runs one action. `inputs` and `targets` contain one tensor per
# micro-batch. The first lines are given, and so is `loss_of(target)`: it returns the function that the last chunk's
# `run_forward` needs. That function computes `self.loss_fn(output, target)` divided by m, because the gradients of all
# micro-batches add up. You need not read the given cells before `position_of`.
#
# - `"F"`: the first chunk of the model takes its input from `inputs`, and the others from `self.input_of(action)`. Call
#   the chunk's `run_forward`. The last chunk computes the loss: append it to `self.losses`. The others send their
#   output.
# - `"B"`: the last chunk needs no gradient. The others receive one, with the shape of their own output, which is in
#   `chunk.kept`. Call `run_backward`. All but the first chunk send the result with `self.neighbors.send("B", …)`.
#
# The first check trains a plain model on two stages with GPipe. The others try all schedules, one to four stages, and
# several steps. They also count messages, measure memory, and find out whether a stage waits although it could compute.
# One of them uses a schedule that computes all weight gradients at the end. The given cells can do that already, and
# exercise 15.9 explains it.
#
# <details><summary>Hint</summary>
#
# Each kind has the same three parts: get what the chunk needs, run the chunk, send what it returns. The first and the
# last chunk skip one of them.
#
# </details>


# %% tags=["export"]
# %%ranks
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
            raise ValueError(
                f"there is no schedule {schedule!r}: choose one of {', '.join(builders)}"
            )
        schedule = builders[schedule]()
    expect_schedule(schedule, stages, micro_batches)
    return schedule


# %% tags=["export"]
# %%ranks
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


# %% tags=["export"]
# %%ranks
class Pipeline(Pipeline):
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
            Chunk([layer for _, layer in part], self.stage == index == 0, postpones)
            for index, part in enumerate(own)
        ]
        self.own = own_parameters(layers, own)
        self.tied = tied_parameters(layers, parts, self.stage, self.stages)
        mark_local(
            self.own.values(), self.group, "call clip_grad_norm_() of the Pipeline or Parallel3D"
        )

    def stage_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this stage, by their names in the whole model."""
        return self.own


# %% tags=["export"]
# %%ranks
class Pipeline(Pipeline):
    def position_of(self, action: Action) -> int:
        """Return the index of an action's chunk in the chain of all chunks."""
        return action.chunk * self.stages + self.stage

    def input_of(self, action: Action) -> Tensor:
        """Receive the output of the previous chunk. Before the first one, receive a header that describes it."""
        return self.announcements.receive(action.chunk)

    def send_output(self, action: Action, output: Tensor) -> None:
        """Send an output to the next chunk. Before the first one, send a header that describes it."""
        self.announcements.send(action.chunk, output)


# %% tags=["exercise", "export"] grade_id="pipeline-run"
# %%ranks
class Pipeline(Pipeline):
    def run(self, action: Action, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Run the forward or the backward of one micro-batch."""
        chunk, index = self.chunks[action.chunk], action.micro_batch
        is_first = self.position_of(action) == 0
        is_last = self.position_of(action) == self.last
        ### BEGIN SOLUTION
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
        ### END SOLUTION

    def loss_of(self, target: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that computes this micro-batch's part of the mean loss."""
        return lambda output: self.loss_fn(output, target) / self.micro_batches


# %% [markdown]
# The next cell is given. `step` cuts the batch into micro-batches, runs this stage's actions, and broadcasts the loss
# to all ranks:


# %% tags=["export"]
# %%ranks
class Pipeline(Pipeline):
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


# %% tags=["export"]
# %%ranks
class Pipeline(Pipeline):
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
        earlier = [
            (parameter, parameter.grad) for parameter, _ in self.tied if parameter.grad is not None
        ]
        for parameter, _ in self.tied:
            parameter.grad = None
        return earlier


# %% tags=["check"] grade_id="check-pipeline" points=3
check.Pipeline()

# %% [markdown]
# ## Exercise 15.7 · One parameter on two stages (7 min, 2 points)
#
# In many GPTs, the output layer has the same weight as the token embedding. In a pipeline, the embedding is on the
# first stage, and the output layer on the last. Each of these stages has a copy of the weight, and computes only its
# own part of the gradient. If nothing were done, the copies would drift apart, and no error would tell you.
#
# `self.tied` is given: a list with a pair `(parameter, stages)` for each parameter that this stage shares with others.
# `stages` lists all stages that have it, in order, including this one. (On most stages, `self.tied` is empty.)
#
# Complete `sum_tied_gradients()`, which `step` calls at the end. `own` is this stage's gradient (zeros if there is
# none), and `others` are the other stages that have the parameter:
#
# - Exchange the gradients with `InFlight(sends, receives, self.group)` from lab 01, and call its `wait()`. `sends` and
#   `receives` are lists of pairs of a tensor and a stage. (Stages are ranks of the group.)
# - Add the gradients up in the order of `stages`, so that the sum has the same bits on all of them, and store the sum
#   in `parameter.grad`.
#
# <details><summary>Hint</summary>
#
# A dictionary that maps each stage to its gradient, with your own among them, can be summed in order. Why must you not
# write the sum into your own gradient before it has been sent?
#
# </details>


# %% tags=["exercise", "export"] grade_id="tied-gradients"
# %%ranks
class Pipeline(Pipeline):
    def sum_tied_gradients(self) -> None:
        """Give every copy of a tied parameter the sum of the gradients of all copies.

        Communication: one message of the parameter's size to each other stage that has it.
        """
        for parameter, stages in self.tied:
            if not parameter.requires_grad:
                continue
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            others = [stage for stage in stages if stage != self.stage]
            ### BEGIN SOLUTION
            by_stage = {
                stage: own if stage == self.stage else torch.empty_like(own) for stage in stages
            }
            sends = [(own, stage) for stage in others]
            InFlight(sends, [(by_stage[stage], stage) for stage in others], self.group).wait()
            parameter.grad = torch.stack(list(by_stage.values())).sum(0)
            ### END SOLUTION


# %% tags=["check"] grade_id="check-tied-gradients" points=2
check.sum_tied_gradients()

# %% [markdown]
# ## Exercise 15.8 · Clipping (6 min, 1 point)
#
# `clip_grad_norm_(max_norm)` scales all gradients by the same factor, so that their norm over the *whole* model is at
# most `max_norm`. It returns the norm before scaling, as a tensor without dimensions, in float64. The lines that scale
# are given.
#
# - A stage has only the gradients of its own parameters, in `self.own.values()`. Add their squares up in `total`, and
#   then `total` over all stages, with one all-reduce.
# - Count a tied parameter once: on the first stage that has it.
# - A parameter's gradient may be None.
#
# <details><summary>Hint</summary>
#
# For which pairs of `self.tied` is this stage not the first one?
#
# </details>


# %% tags=["exercise", "export"] grade_id="clip-grad-norm"
# %%ranks
class Pipeline(Pipeline):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all stages is at most max_norm.

        Returns:
            The norm before scaling, the same on every rank.

        Communication: one all-reduce of one element.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        ### BEGIN SOLUTION
        counted_elsewhere = {
            parameter for parameter, stages in self.tied if stages[0] != self.stage
        }
        for parameter in self.own.values():
            if parameter.grad is not None and parameter not in counted_elsewhere:
                total += parameter.grad.abs().double().square().sum()
        dist.all_reduce(total, group=self.group)
        ### END SOLUTION
        norm = total.sqrt()
        for parameter in self.own.values():
            if parameter.grad is not None:
                parameter.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm


# %% tags=["check"] grade_id="check-clip-grad-norm" points=1
check.clip_grad_norm_()

# %% [markdown]
# ## Exercise 15.9 · Stretch: a third of the bubble (7 min, 2 points)
#
# The previous stage waits only for the gradient of this stage's *input*. Nothing needs the gradients of the weights
# before the optimizer step. A **zero-bubble** schedule splits the backward in two: `"B"` computes the gradient of the
# input, and `"W"` computes those of the weights, when the stage would otherwise wait.
#
# `Chunk` can do this already: with a schedule that has `"W"`, the backward of its linear layers keeps their inputs and
# the gradients of their outputs, and `run_weights` multiplies them later. (Parameters of other layers get their
# gradients in `"B"`.)
#
# Write `zero_bubble(stages, micro_batches)`, a simple schedule of this kind:
#
# - Begin with 1F1B.
# - Stage s postpones the weight gradients by s backwards: after `B5`, stage 2 runs `W3`.
# - The remaining `W` actions run at the end. There may be fewer micro-batches than stages.
#
# If F, B and W each take one unit of time and m ≥ p, the bubble is p − 1 units, instead of 3(p − 1) with 1F1B. The
# memory does not grow beyond 1F1B's maximum: stage s postpones s micro-batches, but has s fewer in flight than stage 0.
# (This counts a micro-batch until its `W`. Besides its inputs, a linear layer keeps the gradients of its outputs from
# `B` to `W`.)
#
# <details><summary>Hint</summary>
#
# Copy the actions of 1F1B one by one. Which `W` follows a `B`, if any, and how many are left at the end?
#
# </details>


# %% tags=["exercise", "export"] grade_id="zero-bubble" module="pipeline_schedules"
# %%ranks
def zero_bubble(stages: int, micro_batches: int) -> list[list[Action]]:
    """Schedule 1F1B with weight gradients that stage s postpones by s backwards.

    Bubble: (p − 1) / 3m of the ideal time if F, B and W take equally long and m ≥ p.
    Memory: at most p micro-batches in flight on every stage.
    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", §2, schedule ZB-H1.
    """
    ### BEGIN SOLUTION
    schedule = []
    for stage, actions in enumerate(one_f_one_b(stages, micro_batches)):
        postponed = []
        for action in actions:
            postponed.append(action)
            if action.kind == "B" and action.micro_batch >= stage:
                postponed.append(Action("W", action.micro_batch - stage))
        left = range(max(0, micro_batches - stage), micro_batches)
        schedule.append(postponed + [Action("W", index) for index in left])
    return schedule
    ### END SOLUTION


# %% tags=["check"] grade_id="check-zero-bubble" points=2
check.zero_bubble()

# %% [markdown]
# ## Break it: two mistakes that raise no error (6 min)
#
# The first broken pipeline forgets to divide the loss by m, and the second clips each stage by its own norm. The next
# cells train your pipeline and both broken ones on text, with AdamW and with SGD.
#
# The first broken one also reports losses that are 8 times too large, which everybody would notice. So we divide what
# it reports by 8, and look only at how it trains.
#
# **Predict.** In each of the four cases, will at least one of the first five losses differ from the right one by more
# than 1%: True or False? (AdamW divides each gradient by an average of its size, but SGD uses it as it is. And the norm
# of one stage is smaller than the norm of all, so a stage that is clipped by its own norm keeps more of its gradient.)

# %%
my_prediction = {
    "forgets to divide, AdamW": None,
    "clips per stage, AdamW": None,
    "forgets to divide, SGD": None,
    "clips per stage, SGD": None,
}

# %%
# %%ranks
from shared.data import CharTokens
from shared.models import GPTConfig, gpt_layers

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, context=32, layers=4, heads=4, width=32)


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class ForgetsToDivide(Pipeline):
    def __init__(self, layers, micro_batches=8):
        super().__init__(layers, micro_batches=micro_batches, loss_fn=token_loss)
        self.loss_fn = lambda output, target: micro_batches * token_loss(output, target)


def clips_per_stage(pipeline, max_norm):
    parameters = list(pipeline.stage_parameters().values())
    norm_of_stage = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm_of_stage)


# %%
# %%ranks
optimizers = {"AdamW": (torch.optim.AdamW, 3e-3), "SGD": (torch.optim.SGD, 0.3)}


def losses_of(pipeline, optimizer_name, clip=None, steps=5):
    optimizer_cls, lr = optimizers[optimizer_name]
    optimizer, losses = optimizer_cls(pipeline.stage_parameters().values(), lr=lr), []
    for number in range(steps):
        inputs, targets = text.windows(range(500 * number, 500 * number + 800, 100), 32)
        optimizer.zero_grad()
        losses.append(pipeline.step(inputs.to(device), targets.to(device)).item())
        if clip is not None:
            clip(pipeline, 0.1)
        optimizer.step()
    return losses


# %%
# %%ranks --timeout 180
def layers():
    return [layer.to(device) for layer in gpt_layers(config)]


curves = {}
for name in optimizers:
    right = losses_of(Pipeline(layers(), loss_fn=token_loss), name)
    broken = losses_of(ForgetsToDivide(layers()), name)
    curves[f"forgets to divide, {name}"] = right, [loss / 8 for loss in broken]
    right = losses_of(Pipeline(layers(), loss_fn=token_loss), name, Pipeline.clip_grad_norm_)
    broken = losses_of(Pipeline(layers(), loss_fn=token_loss), name, clips_per_stage)
    curves[f"clips per stage, {name}"] = right, broken

# %% tags=["nbval-ignore-output"]
from shared import plots
from shared.predictions import predicted

curves = ranks.pull("curves")[0]
for name, (right, broken) in curves.items():
    most = max(abs(b / r - 1) for r, b in zip(right, broken, strict=True))
    print(f"{name}: {predicted(my_prediction[name])}measured {most > 0.01} ({most:.1%})")
right, broken = curves["forgets to divide, SGD"]
plots.loss_curves({"right": right, "forgets to divide, SGD": broken})

# %% [markdown]
# AdamW hides both mistakes, because it divides out the size of a gradient. SGD does not: without the division by m, its
# steps are 8 times too large. (In our run, its loss was nan after a few more steps.) With clipping per stage, the steps
# of each stage are too large by a factor of its own. So to test a pipeline, compare its gradients, or a step of SGD,
# with one process. Never rely on the losses of AdamW.

# %%
ranks.stop()
