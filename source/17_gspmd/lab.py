# ---
# jupyter:
#   course:
#     module: gspmd
#     minutes: 100
# ---

# %% [markdown]
# # Lab 17 · GSPMD
#
# **100 minutes, 17 points**, and another 10 minutes and 1 point for a stretch exercise. In this lab, you build a
# small **partitioner**. It gets one operation of a program, such as the matrix product `ij,jk->ik`, and the
# placements of its inputs. It decides which collectives are needed, and chooses the cheapest way. Then it runs the
# operation on real ranks, with the collectives of chapter 01. This is how DTensor decides: one operation at a time,
# by cost. XLA first carries layouts through the whole program (see the lesson).
#
# | exercise | you build | minutes | points |
# |---|---|---|---|
# | | This page, and starting the ranks | 3 | |
# | 17.1 | `local_part` and `whole_from`: what each rank holds | 7 | 2 |
# | 17.2 | `shard_rules`: sharded inputs that need no communication | 12 | 2 |
# | 17.3 | `partial_rules`: operations on sums that are not computed yet | 7 | 2 |
# | 17.4 | `rounds_and_bytes`: what a change of placement costs | 5 | 1 |
# | 17.5 | `plan_for`: the cheapest way | 17 | 3 |
# | | The choices for the lesson's five products | 1 | |
# | 17.6 | `redistribute`: on real ranks | 11 | 3 |
# | 17.7 | `execute`: the whole operation | 7 | 1 |
# | | Where DTensor chooses differently | 2 | |
# | | Practice: specs that reach a list of collectives | 10 | |
# | 17.8 | `ranks_along` and `may_change`: two axes | 11 | 3 |
# | 17.9 | stretch: reshapes, outside the 100 minutes | 10 | 1 |
# | | Break it: three mistakes that raise no error | 5 | |
# | | Your own run, in a figure | 2 | |
#
# Each exercise has a check. Its first line tries a plain case, such as a matrix product on two ranks. The other lines
# draw random equations, shapes, placements and meshes. Every result is compared with that of one process, in float64.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import gspmd as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""A partitioner: it decides how ranks run one operation on tensors that are placed on a mesh, and runs it.

For each axis of the mesh, there are rules: placements of the inputs for which no communication is needed. The
partitioner finds the cheapest way to bring the inputs into the placements of some rule, and takes the cheapest rule.

Source: Xu et al. 2021, "GSPMD", arXiv 2105.04663; torch.distributed.tensor (DTensor), which also chooses among rules.

N is the number of ranks along an axis, S the bytes of the tensor that these ranks hold together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shared.placements import (
    EINSUM,
    LINEAR,
    RESHAPE,
    Equation,
    Mesh,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    dim_of,
)
from shared.spmd import partitioning
from shared.spmd.partitioning import MeshGroup, check_lengths, operation_for, rounded
from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter

# %% [markdown]
# ## Exercise 17.1 · What each rank holds (7 min, 2 points)
#
# A placement says how N ranks hold a tensor. There are three, and `shared/placements.py` has a class for each:
#
# | placement | what rank r holds | the whole tensor is |
# |---|---|---|
# | `Shard(dim)` | the r-th of N equal shards of dimension `dim` | the concatenation of all |
# | `Replicate()` | the whole tensor | what any rank holds |
# | `Partial()` | one term of a sum | the sum of all |
#
# Write a function for each direction, without communication:
#
# - `local_part(tensor, placement, index, size)` returns what rank `index` of `size` ranks holds. For `Partial`, rank 0
#   keeps the tensor, and the others hold zeros of the same shape. (There are many ways to write a tensor as a sum. This
#   one needs no rounding.)
# - If `size` does not divide the length of the dimension, raise a `ValueError` with both numbers. (DTensor and XLA
#   allow shards of different sizes. Here, they would hide the idea.)
# - `whole_from(parts, placement)` returns the whole tensor. `parts` has one tensor for each rank, in order.
# - `isinstance(placement, Shard)` tells you the kind of a placement, and `placement.dim` its dimension.
#
# The first check uses two ranks. The second tries up to four ranks and more dimensions. The third tries lengths that do
# not divide evenly.
#
# <details><summary>Hint</summary>
#
# `tensor.chunk(size, dim)` returns equal shards only if `size` divides the length. What does it return for 6 elements
# and 4 ranks?
#
# </details>


# %% tags=["exercise", "export"] grade_id="local-part"
# %%ranks
def local_part(tensor: Tensor, placement: Placement, index: int, size: int) -> Tensor:
    """Return what rank `index` of `size` ranks holds of a tensor.

    Raises:
        ValueError: if the ranks cannot get equal shards.

    Shape: tensor of any shape; with Shard(dim), dimension dim of the result is 1/size as long.
    """
    ### BEGIN SOLUTION
    if isinstance(placement, Shard):
        length = tensor.shape[placement.dim]
        if length % size:
            raise ValueError(
                f"{placement}: {length} elements cannot be divided equally among {size} ranks"
            )
        return tensor.chunk(size, placement.dim)[index].contiguous()
    if isinstance(placement, Partial) and index > 0:
        return torch.zeros_like(tensor)
    return tensor
    ### END SOLUTION


def whole_from(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """Return the tensor of which each rank holds a part. The inverse of local_part."""
    ### BEGIN SOLUTION
    if isinstance(placement, Shard):
        return torch.cat(list(parts), placement.dim)
    if isinstance(placement, Partial):
        return sum(parts)
    return parts[0]
    ### END SOLUTION


# %% tags=["check"] grade_id="check-local-part" points=2
check.local_part()

# %% [markdown]
# ## Exercise 17.2 · Sharded inputs that need no communication (12 min, 2 points)
#
# An operation is written as in `torch.einsum`, with a letter for each dimension: `ij,jk->ik` is a matrix product.
# A letter has the same length in every tensor. Here, j does not appear in the result, so the operation sums over it.
#
# Suppose that every input is sharded along the *same letter*, if it has that letter, and replicated if it does not.
# Then each rank can compute with its own shards. What does it get? For the matrix product, there are three letters:
#
# | letter | first input | second input | result |
# |---|---|---|---|
# | i | `Shard(0)` | `Replicate()` | `Shard(0)`: each rank has some rows |
# | j | `Shard(1)` | `Shard(0)` | `Partial()`: each rank has summed over its own j only |
# | k | `Replicate()` | `Shard(1)` | `Shard(1)`: each rank has some columns |
#
# With one more, in which everything is replicated, these are four **rules**. Each is a `Rule(inputs, output)`. An
# `Equation` object has the letters of each tensor: for `Equation.parse("ij,jk->ik")`, `equation.inputs` is
# `(("i", "j"), ("j", "k"))`, `equation.output` is `("i", "k")`, and `equation.letters` is `["i", "j", "k"]`.
# `dim_of("j", ("i", "j"))` is 1, and `dim_of("k", ("i", "j"))` is None.
#
# - `shard_rules(equation)` returns a list: first the rule in which everything is replicated, then one for each letter,
#   in the order of `equation.letters`. In 17.5, this order decides between plans of equal cost.
# - Only an einsum and `max` can drop a letter. (`equation.operation` is then `EINSUM` or `"max"`.) An einsum sums over
#   this letter, so the result is `Partial()`. In `max: ij->i`, each rank's own maximum is not a term of a sum, so there
#   is no rule for j.
#
# The first check asks for the four rules above. The second computes with the rules for many other equations, such as
# `ij->i`, `bij,bjk->bik` and `add: ij,j->ij`, and compares the results with those of one process.
#
# <details><summary>Hint</summary>
#
# Which input of `ij,jk->ik` lacks the letter i, and what does `dim_of` return for it?
#
# </details>


# %% tags=["export"]
# %%ranks
@dataclass(frozen=True)
class Rule:
    """Placements along one axis of the mesh for which an operation needs no communication."""

    inputs: tuple[Placement, ...]
    output: Placement


# %% tags=["exercise", "export"] grade_id="shard-rules"
# %%ranks
def shard_rules(equation: Equation) -> list[Rule]:
    """Return the rule in which everything is replicated, and one for each letter along which the inputs can be sharded.

    Source: GSPMD, §3.2 and §4.2; DTensor's gen_einsum_strategies.
    """
    rules = [Rule((Replicate(),) * len(equation.inputs), Replicate())]
    ### BEGIN SOLUTION
    for letter in equation.letters:
        dims = [dim_of(letter, term) for term in equation.inputs]
        inputs = tuple(Replicate() if dim is None else Shard(dim) for dim in dims)
        output_dim = dim_of(letter, equation.output)
        if output_dim is not None:
            rules.append(Rule(inputs, Shard(output_dim)))
        elif equation.operation == EINSUM:
            rules.append(Rule(inputs, Partial()))
    ### END SOLUTION
    return rules


# %% tags=["check"] grade_id="check-shard-rules" points=2
check.shard_rules()

# %% [markdown]
# ## Exercise 17.3 · Operations on a sum that is not computed yet (7 min, 2 points)
#
# A `Partial` input is a sum over the ranks: x = x₀ + x₁. May each rank apply the operation to its own term, so that
# the result is `Partial`, too? That is right if f(x₀) + f(x₁) = f(x₀ + x₁), and wrong otherwise:
#
# - `neg` satisfies this. `relu`, `exp`, `square`, `plus_one` and `max` do not. For example, `plus_one` would add 1 once
#   per rank.
# - `add` satisfies it if *all* its inputs are `Partial`. With x `Partial` and y `Replicate`, y would be added once per
#   rank.
# - An einsum multiplies its inputs. (x₀ + x₁) y = x₀y + x₁y, so *one* input may be `Partial`, if the others are
#   replicated. But x₀y₀ + x₁y₁ is not (x₀ + x₁)(y₀ + y₁).
#
# `partial_rules(equation)` returns these rules. For an einsum, there is one rule for each input.
# `equation.operation` is the operation's name. `LINEAR` contains `neg`, `add` and `reshape`, but not einsum, whose name
# is `EINSUM`.
#
# The first check asks for the rules of a matrix product. The second computes with your rules for all operations.
#
# <details><summary>Hint</summary>
#
# How many inputs of `ij,jk->ik` are `Partial` in each of its two rules? And how many of `add: ij,ij->ij` in its only
# one?
#
# </details>


# %% tags=["exercise", "export"] grade_id="partial-rules"
# %%ranks
def partial_rules(equation: Equation) -> list[Rule]:
    """Return the rules in which inputs are sums that have not been computed yet. Their result is one, too."""
    operands = range(len(equation.inputs))
    ### BEGIN SOLUTION
    if equation.operation == EINSUM:
        every = [
            tuple(Partial() if each == chosen else Replicate() for each in operands)
            for chosen in operands
        ]
        return [Rule(inputs, Partial()) for inputs in every]
    if equation.operation in LINEAR:
        return [Rule((Partial(),) * len(operands), Partial())]
    return []
    ### END SOLUTION


# %% tags=["check"] grade_id="check-partial-rules" points=2
check.partial_rules()

# %% [markdown]
# ## Exercise 17.4 · What a change of placement costs (5 min, 1 point)
#
# If the inputs match no rule, their placements have to change. Along one axis, each change is one operation. Two of the
# operations are local, because each rank already has everything that it needs:
#
# | from | to | operation | why |
# |---|---|---|---|
# | `Replicate` | `Shard` | `"slice"` | each rank keeps its shard |
# | `Replicate` | `Partial` | `"keep_one"` | rank 0 keeps the tensor, the others take zeros |
#
# The other changes need one of `"all_gather"`, `"all_reduce"`, `"reduce_scatter"` and `"all_to_all"`. An **all-to-all**
# exchanges shards: every rank sends each other rank a different piece. So it can turn shards of one dimension into
# shards of another one, and it sends much less than an all-gather.
#
# `operation_for(before, after)` is given (`shared/spmd/partitioning.py`). It returns the name of the operation, or None
# if nothing changes. It also returns None for `Shard` to `Partial`, which this partitioner leaves out. You write the
# function for the costs:
#
# - `rounds_and_bytes(operation, buffer_bytes, size)` returns a tuple: the number of rounds, each of which costs the
#   latency α, and the bytes that one rank sends. `buffer_bytes` is S, the bytes of the whole tensor: of these, each of
#   the N = `size` ranks holds S/N if it is sharded, and S otherwise. Local operations take 0 rounds and send 0 bytes.
# - For the ring algorithms, you know both from chapter 01. An all-to-all takes N − 1 rounds. In each round, a rank
#   sends one piece to one other rank. How large is a piece, if a rank holds S/N bytes and cuts them into N pieces?
#
# The check compares your costs with the formulas of chapter 01, for up to 64 ranks.
#
# <details><summary>Hint</summary>
#
# An all-reduce is a reduce-scatter and an all-gather. How many rounds and bytes does each of the two take?
#
# </details>


# %% tags=["exercise", "export"] grade_id="rounds-and-bytes"
# %%ranks
def rounds_and_bytes(operation: str, buffer_bytes: float, size: int) -> tuple[int, float]:
    """Return how many rounds an operation takes, and how many bytes each rank sends.

    Source: nccl-tests, PERFORMANCE.md.
    """
    ### BEGIN SOLUTION
    rounds, sent_bytes = size - 1, (size - 1) / size * buffer_bytes
    return {
        "all_gather": (rounds, sent_bytes),
        "reduce_scatter": (rounds, sent_bytes),
        "all_reduce": (2 * rounds, 2 * sent_bytes),
        "all_to_all": (rounds, sent_bytes / size),
    }.get(operation, (0, 0.0))
    ### END SOLUTION


# %% tags=["check"] grade_id="check-rounds-and-bytes" points=1
check.rounds_and_bytes()

# %% [markdown]
# ## Exercise 17.5 · The cheapest way (17 min, 3 points)
#
# Now the partitioner can choose. For every rule, it knows which placements the inputs must have. For every input, it
# knows the **route** there: the steps that change its placements. A rule costs what its routes cost.
#
# There is one catch. A `Partial` result costs nothing now, but later somebody has to compute the sum. If that did not
# count, the partitioner would choose `Partial` too often. So a rule with a `Partial` result also costs what a
# reduce-scatter of the result would cost.
#
# Everything around the choice is given. A `Step` changes the placement of one operand. `Layouts` finds the steps, and
# the rules:
#
# - `layouts.routes(operand)` is a dictionary: for all placements that the operand can get, the cheapest steps.
# - `layouts.rules()` yields `(inputs, output)` for every rule. `inputs[operand]` is a key of that operand's routes.
# - `step.seconds(mesh)` is how long a step takes: α · rounds + β · bytes.
# - `layouts.seconds_to_finish(output)` is how long the reduce-scatter of a `Partial` result would take. For other
#   results, it is 0.
#
# The placements of a tensor are a tuple with one entry for each axis of the mesh, such as `(Shard(0),)`. `Mesh((4,))`
# has one axis, and a link of 10 µs and 25 GB/s. The search behind `Layouts` is in `shared/spmd/partitioning.py`. It
# takes your rules and costs; 17.8 supplies its missing part, `may_change`.


# %% tags=["export"]
# %%ranks
def axis_rules(equation: Equation) -> list[Rule]:
    """Return all rules of an operation along one axis of the mesh."""
    of_shards = reshape_rules if equation.operation == RESHAPE else shard_rules
    return of_shards(equation) + partial_rules(equation)


@dataclass(frozen=True)
class Step(partitioning.Step):
    """Changes the placement of one operand along one axis of the mesh."""

    def seconds(self, mesh: Mesh) -> float:
        """Return α · rounds + β · bytes."""
        link, size = mesh.links[self.axis], mesh.sizes[self.axis]
        rounds, sent_bytes = rounds_and_bytes(self.operation, self.buffer_bytes, size)
        return link.alpha_s * rounds + link.beta_s_per_byte * sent_bytes


class Layouts(partitioning.Layouts):
    """Finds the rules of an operation on a mesh, and the cheapest routes of its inputs, by your rules and costs."""

    step_class = Step

    def axis_rules(self) -> list[Rule]:
        return axis_rules(self.equation)

    def may_change(self, placements: Placements, axis: int, after: Placement) -> bool:
        return may_change(placements, axis, after)


# %% [markdown]
# Write `plan_for`: build a `Plan` for every rule, and return the best one.
#
# - `Plan(steps, output, seconds)` has the steps of all operands, in the order of the operands, and the output of the
#   rule. `seconds` are those of all steps, plus `layouts.seconds_to_finish(output)`.
# - The best plan is the one with the fewest seconds. Among equals, it has the fewest collectives, then the fewest
#   steps. `plan.cost` is a tuple that compares in this order. Among plans of equal cost, `min` keeps the first, and so
#   should you.
#
# `propagate` is given. It returns the placement of the result, and the collectives. It takes an equation as text, which
# may state lengths: `ij,jk->ik, i=4096, k=8`. All other letters get the same length, and no plan shards them more
# finely than some input does, because more ranks might not divide them.
#
# The first check tries matrix products on one axis. The second draws equations, lengths, links and placements, and
# compares the seconds of your plan with those of every other way. The third tries plans of equal cost.
#
# <details><summary>Hint</summary>
#
# The steps of all operands are a list of lists. How do you make one list of them? And which argument of `min` says what
# to compare?
#
# </details>


# %% tags=["exercise", "export"] grade_id="propagate"
# %%ranks
@dataclass(frozen=True)
class Plan:
    """How to run an operation: the steps that bring its inputs into the placements of a rule, and the result."""

    steps: tuple[Step, ...]
    output: Placements
    seconds: float

    @property
    def collectives(self) -> list[Step]:
        return [step for step in self.steps if step.is_collective]

    @property
    def cost(self) -> tuple[float, int, int]:
        return rounded(self.seconds), len(self.collectives), len(self.steps)


def plan_for(equation: Equation, placements: Sequence, mesh: Mesh) -> Plan:
    """Return the cheapest plan."""
    layouts = Layouts(equation, placements, mesh)
    routes = [layouts.routes(operand) for operand in range(len(equation.inputs))]
    ### BEGIN SOLUTION
    plans = []
    for inputs, output in layouts.rules():
        pairs = zip(routes, inputs, strict=True)
        steps = [step for routes_of, target in pairs for step in routes_of[target]]
        seconds = sum(step.seconds(mesh) for step in steps) + layouts.seconds_to_finish(output)
        plans.append(Plan(tuple(steps), output, seconds))
    return min(plans, key=lambda plan: plan.cost)
    ### END SOLUTION


# %% tags=["export"]
# %%ranks
def propagate(equation: str, placements: Sequence, mesh: Mesh) -> tuple:
    """Decide how to run an operation on tensors that are placed on a mesh.

    Args:
        equation: Such as "ij,jk->ik", or "relu: ij->ij, i=64". See Equation.parse.
        placements: For each input, one placement for each axis of the mesh. With one axis, a placement will do.
        mesh: A Mesh, or the sizes of its axes.

    Returns:
        The placement of the result, and the list of collectives. With one axis, the placement is not a tuple.
    """
    plan = plan_for(Equation.parse(equation), placements, Mesh.of(mesh))
    return plan.output if len(plan.output) > 1 else plan.output[0], plan.collectives


# %% tags=["check"] grade_id="check-propagate" points=3
check.propagate()

# %% [markdown]
# The next cell lets your partitioner choose for the lesson's five products: first without lengths, and then with those
# of the lesson's JAX program. In the last two lines, the activations (i × j) and the weight (j × k) are both sharded
# along their first dimension, as in ZeRO-3.


# %%
# %%ranks 0
def show(equation, inputs):
    output, collectives = propagate(equation, inputs, Mesh((4,)))
    print("  ", *inputs, "→", output, [str(step) for step in collectives])


R = Replicate()
products = [(R, Shard(1)), (Shard(0), R), (Shard(1), Shard(0)), (Shard(1), R), (R, Shard(0))]
for equation in ("ij,jk->ik", "ij,jk->ik, i=256, j=2048, k=4096"):
    print(equation)
    for inputs in products:
        show(equation, inputs)
for equation in ("ij,jk->ik, i=16384, j=1024, k=1024", "ij,jk->ik, i=16, j=1024, k=1024"):
    print(equation)
    show(equation, (Shard(0), Shard(0)))

# %% [markdown]
# Without lengths, you choose as DTensor did in the lesson. With them, case 4 becomes an all-to-all: your partitioner
# knows that 4 ranks can divide i, and moving the small x costs less than reducing the large result later. In case 5,
# A is too large for that.
#
# With many rows of activations, the weight is gathered, as in ZeRO-3. With few, the activations are sent to where the
# weight is, as in tensor parallelism.

# %% [markdown]
# ## Exercise 17.6 · Redistribute on real ranks (11 min, 3 points)
#
# `redistribute(shard, before, after, group)` changes the placement of a tensor along one axis. Each rank passes what it
# holds, and gets what it holds afterwards. `operation_for(before, after)` says which operation to use.
#
# - If `before == after`, return the shard. If there is no operation (`Shard` to `Partial`), raise a `ValueError`.
# - `"slice"` and `"keep_one"`: you have already written a function that does both.
# - `ring_all_gather(shard, group)` and `ring_reduce_scatter(tensor, group)` work on *flat* tensors, in the order of the
#   ranks. A shard of dimension 1 is not contiguous in the whole tensor. So, for a reduce-scatter, first stack the
#   pieces for each rank along a new dimension 0. After an all-gather, view the result as a stack, and concatenate its
#   parts.
# - `ring_all_reduce(tensor, group)` works in place. Do not change the argument: clone it.
# - `"all_to_all"`: `all_to_all(shard, before, after, group)` is given. It stacks pieces, too, so read it first.
# - If N does not divide a dimension, raise the error of `local_part`.
#
# The first check tries each operation on two ranks. The next two try up to four ranks, more dimensions, and groups. All
# three count the bytes. The last one tries lengths that do not divide evenly, and `Shard` to `Partial`.
#
# <details><summary>Hint</summary>
#
# `torch.stack([local_part(tensor, after, index, size) for index in range(size)])` has what each rank should get. What
# does `ring_reduce_scatter` return for it on rank r, and what shape must the result have?
#
# </details>


# %% tags=["export"]
# %%ranks
def all_to_all(
    shard: Tensor, before: Shard, after: Shard, group: ProcessGroup | None = None
) -> Tensor:
    """Turn shards of one dimension into shards of another one."""
    size = dist.get_world_size(group)
    pieces = torch.stack([local_part(shard, after, index, size) for index in range(size)])
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)  # received[r] is the piece of rank r
    return whole_from(list(received), before)


# %% tags=["exercise", "export"] grade_id="redistribute"
# %%ranks
@torch.no_grad()
def redistribute(
    shard: Tensor, before: Placement, after: Placement, group: ProcessGroup | None = None
) -> Tensor:
    """Change the placement of a tensor over the ranks of a group.

    Raises:
        ValueError: if the ranks cannot get equal shards, or no operation makes this change.

    Communication: what rounds_and_bytes() says.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    ### BEGIN SOLUTION
    if before == after:
        return shard
    operation = operation_for(before, after)
    if operation is None:
        raise ValueError(f"no single operation turns {before} into {after}")
    if operation in ("slice", "keep_one"):
        return local_part(shard, after, rank, size)
    if operation == "all_reduce":
        total = shard.clone()
        ring_all_reduce(total, group)
        return total
    if operation == "all_gather":
        gathered = ring_all_gather(shard.flatten(), group).view(size, *shard.shape)
        return whole_from(list(gathered), before)
    if operation == "all_to_all":
        return all_to_all(shard, before, after, group)
    pieces = torch.stack([local_part(shard, after, index, size) for index in range(size)])
    return ring_reduce_scatter(pieces, group).view(pieces.shape[1:])
    ### END SOLUTION


# %% tags=["check"] grade_id="check-redistribute" points=3
check.redistribute()

# %% [markdown]
# ## Exercise 17.7 · The whole operation (7 min, 1 point)
#
# `execute(equation, shards, placements, mesh_group)` runs an operation. Each rank passes what it holds of each input,
# and gets what it holds of the result, placed as `propagate` says for the same equation, placements and mesh.
#
# `mesh_group` is a `MeshGroup`: a mesh, and for each of its axes the process group of the ranks along it. With one
# axis, a process group will do, or None for all ranks. `compute(equation, tensors)` is given. It runs an operation on
# local tensors.
#
# - Make a plan, and take its steps in order: in a list of your own, replace the shard of input `step.operand` by the
#   one redistributed from `step.before` to `step.after`. The group of the step's axis is
#   `mesh_group.groups[step.axis]`.
# - Then compute with what you have, and return the result.
#
# The first check multiplies matrices on two ranks. The others draw equations, shapes and placements, count the bytes,
# compare the bytes with DTensor's, and try lengths that do not divide evenly.
#
# <details><summary>Hint</summary>
#
# Every rank makes the same plan, without asking the others. On which arguments does the plan depend?
#
# </details>


# %% tags=["export"]
# %%ranks
def make_mesh_group(mesh: Mesh) -> MeshGroup:
    """Create the process groups of a mesh over all ranks. Every rank must call this."""
    mesh, rank, groups = Mesh.of(mesh), dist.get_rank(), []
    for axis in range(len(mesh.sizes)):
        created = [(ranks, dist.new_group(ranks)) for ranks in ranks_along(mesh.sizes, axis)]
        groups += [group for ranks, group in created if rank in ranks]
    return MeshGroup(mesh, tuple(groups))


def compute(equation: Equation, tensors: Sequence[Tensor]) -> Tensor:
    """Run an operation on local tensors."""
    # A lambda, because local_shape is defined in 17.9.
    return partitioning.compute(equation, tensors, lambda *arguments: local_shape(*arguments))


# %% tags=["exercise", "export"] grade_id="execute"
# %%ranks
@torch.no_grad()
def execute(
    equation: str, shards: Sequence[Tensor], placements: Sequence, mesh_group=None
) -> Tensor:
    """Run an operation on tensors that are placed on a mesh.

    Args:
        equation: As for propagate().
        shards: What this rank holds of each input.
        placements: As for propagate(). The placement of the result is the one that propagate() returns.
        mesh_group: A MeshGroup. With one axis, a process group, or None for all ranks.

    Raises:
        ValueError: if the ranks cannot hold equal shards.

    Communication: the collectives that propagate() returns.
    """
    parsed, mesh_group = Equation.parse(equation), MeshGroup.of(mesh_group)
    check_lengths(parsed, shards, placements, mesh_group.mesh)
    ### BEGIN SOLUTION
    shards = list(shards)
    for step in plan_for(parsed, placements, mesh_group.mesh).steps:
        group = mesh_group.groups[step.axis]
        shards[step.operand] = redistribute(shards[step.operand], step.before, step.after, group)
    return compute(parsed, shards)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-execute" points=1
check.execute()

# %% [markdown]
# ### Where DTensor chooses differently
#
# DTensor has rules, costs and a search, too, and often chooses the same. In these cases, it does not (torch 2.13, on a
# CPU, for matrices of 64 × 64 elements whose lengths the equation states):
#
# | operation | inputs | you | DTensor |
# |---|---|---|---|
# | matrix product | `Shard(1)`, `Replicate()` | all-to-all, gives `Shard(0)` | nothing, gives `Partial()` |
# | matrix product | `Partial()`, `Shard(1)` | all-reduce, gives `Shard(1)` | all-gather, gives `Partial()` |
# | `relu` | `Partial()` | reduce-scatter, gives `Shard(0)` | all-reduce, gives `Replicate()` |
# | `add` | `Shard(0)`, `Shard(1)` | all-to-all, gives `Shard(0)` | all-gather, gives `Shard(0)` |
#
# In the first two lines, DTensor does not count what its `Partial` result costs later. In the third, it keeps the
# result whole on every rank. In the fourth, it replaces the all-to-all by an all-gather, as it always does on a CPU.

# %% [markdown]
# ## Practice: specs that reach a list of collectives (10 min)
#
# Now go in the other direction with the lesson's compiler: you know the collectives that you want, and look for the
# annotations. The program is `relu(x @ A) @ B`, and the mesh has dp = 2 and tp = 4. x has 512 × 256 elements, A has 256
# × 1024, and B has 1024 × 256. Which specs of x, A and B give a compiled program with exactly these collectives?
#
# | target | collectives, in this order |
# |---|---|
# | 1 | an all-reduce of 65,536 elements along tp |
# | 2 | an all-gather of 262,144 elements along tp |
# | 3 | an all-gather of 65,536 elements along dp, and an all-reduce of 65,536 along tp |
# | 4 | two all-gathers of 65,536 elements along dp, and an all-reduce of 65,536 along tp |
#
# An entry of `my_specs` has a tuple for each array, with what `P(…)` would get: `(("dp",), (), (None, "tp"))` splits
# the rows of x along dp, and the columns of B along tp. Sizes count the elements that the devices of one group hold
# together, after the all-gather or all-reduce. There are no points, so try as often as you like.

# %%
my_specs = {"1": None, "2": None, "3": None, "4": None}

# %%
from shared.spmd import practice

practice.table(my_specs)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The result of 512 × 256 has 131,072 elements. Which spec of x leaves each group with half of them? And where does a
# rank of tp have a term of a sum?
#
# </details>
# <details><summary>Answers</summary>
#
# In all four, the rows of x are split along dp: `("dp",)`. The rest decides.
#
# - Target 1 is data and tensor parallelism: A is `(None, "tp")`, and B is `("tp",)`.
# - In target 2, B is `(None, "tp")`, like A. So the inner activations, 256 × 1024 elements, are gathered between the
#   two products.
# - In targets 3 and 4, dp also splits weights, as in ZeRO-3: B is `("tp", "dp")`, and in target 4, A is `("dp",
#   "tp")`.
#
# </details>

# %% tags=["claims"] jupyter={"source_hidden": true}
answers = {
    "1": (("dp",), (None, "tp"), ("tp",)),
    "2": (("dp",), (None, "tp"), (None, "tp")),
    "3": (("dp",), (None, "tp"), ("tp", "dp")),
    "4": (("dp",), ("dp", "tp"), ("tp", "dp")),
}
assert {name: practice.collectives_of(*specs) for name, specs in answers.items()} == practice.WANTED

# %% [markdown]
# ## Exercise 17.8 · Two axes (11 min, 3 points)
#
# On a mesh of 2 × 2 ranks, a tensor has two placements, such as `(Shard(0), Shard(1))`: axis 0 divides the rows, and
# axis 1 the columns. Your rules apply to each axis separately, and `Layouts` already combines them. Two things are
# missing:
#
# 1. **Which ranks form a group?** `ranks_along(sizes, axis)` returns the lists of ranks that form a process group along
#    an axis. Ranks are numbered along the last axis first, so `(2, 2)` is the grid `[[0, 1], [2, 3]]`. Along axis 0,
#    the groups are `[0, 2]` and `[1, 3]`; along axis 1, they are `[0, 1]` and `[2, 3]`. In each group, the ranks are in
#    increasing order. The groups are in the order of their first ranks.
# 2. **May one axis change alone?** With `(Shard(0), Shard(0))`, axis 0 first divides the rows into two halves, and axis
#    1 divides each half again. Rank 0 holds the first quarter, rank 1 the second, and so on. If axis 0 were gathered
#    first, ranks 0 and 2 would both hold quarters 1 and 3, which no placement describes. So an axis may not gather a
#    dimension that a later axis still divides. For the same reason, axis 0 may not slice a dimension that axis 1 has
#    already divided.
#
# `may_change(placements, axis, after)` returns False if a *later* axis shards a dimension that this change would gather
# or slice: the dimension of `placements[axis]`, or that of `after`. In all other cases, it returns True.
#
# Three checks follow. 17.8a tries both functions alone. 17.8b runs operations on meshes of 2 × 2, 1 × 4, 4 × 1 and 2
# × 1 ranks, and counts the bytes. 17.8c compares the seconds of your plans with those of every other way.
#
# <details><summary>Hint</summary>
#
# `torch.arange(4).view(2, 2)` is the grid. Which dimension must come last, so that each row of the result is one group?
#
# </details>


# %% tags=["exercise", "export"] grade_id="ranks-along"
# %%ranks
def ranks_along(sizes: tuple[int, ...], axis: int) -> list[list[int]]:
    """Return the ranks of each process group along one axis of a mesh."""
    ### BEGIN SOLUTION
    grid = torch.arange(math.prod(sizes)).view(sizes)
    return grid.movedim(axis, -1).reshape(-1, sizes[axis]).tolist()
    ### END SOLUTION


def may_change(placements: Placements, axis: int, after: Placement) -> bool:
    """Return whether one axis may change while all others stay, because no later one shards the same dimension."""
    ### BEGIN SOLUTION
    touched = [each for each in (placements[axis], after) if isinstance(each, Shard)]
    return not any(later in touched for later in placements[axis + 1 :])
    ### END SOLUTION


# %% tags=["check"] grade_id="check-ranks-along" points=1
check.ranks_along()

# %% tags=["check"] grade_id="check-two-axes" points=1
check.two_axes()

# %% tags=["check"] grade_id="check-propagate-on-two-axes" points=1
check.propagate_on_two_axes()

# %% [markdown]
# ## Exercise 17.9 · Stretch: reshapes (10 min, 1 point)
#
# Attention splits a dimension into heads: `reshape: b(hd)->bhd, h=4, d=8` turns 32 columns into 4 heads of 8. A
# dimension of two letters, such as `hd`, is stored head by head. So if N divides the number of heads, its shards
# contain whole heads, and sharding `(hd)` is the same as sharding h. But a shard of d consists of columns from every
# head, so it is not a shard of `(hd)`.
#
# - `reshape_rules(equation)` returns the same rules as `shard_rules`, but only for letters that *begin* a dimension in
#   the input and in the output. `dim_of(letter, term)` is None if a letter does not begin a dimension. (If N does not
#   divide h, `Layouts` leaves out the rule.)
# - `local_shape(equation, shape)` returns the shape of the result on this rank. `shape` is that of the rank's own
#   tensor. Where the tensor is sharded, its lengths are shorter than those of the equation. Only the first letter of a
#   dimension can be sharded, so `equation.lengths`, a dictionary, is right for all other letters. (Here,
#   `equation.inputs` is `(("b", "hd"),)`, and `equation.output` is `("b", "h", "d")`.)
#
# The first check splits columns into heads. The second tries reshapes in both directions, with lengths that do not
# divide evenly.
#
# <details><summary>Hint</summary>
#
# On this rank, the dimension `hd` has 16 elements, and d = 8. How many heads does the rank have?
#
# </details>


# %% tags=["exercise", "export"] grade_id="reshape-rules"
# %%ranks
def reshape_rules(equation: Equation) -> list[Rule]:
    """Return the rules of a reshape: everything is replicated, or sharded along a letter that begins a dimension."""
    ### BEGIN SOLUTION
    ((term,), output) = equation.inputs, equation.output
    rules = [Rule((Replicate(),), Replicate())]
    for letter in equation.letters:
        before, after = dim_of(letter, term), dim_of(letter, output)
        if before is not None and after is not None:
            rules.append(Rule((Shard(before),), Shard(after)))
    return rules
    ### END SOLUTION


def local_shape(equation: Equation, shape: Sequence[int]) -> list[int]:
    """Return the shape of a reshape's result on this rank."""
    ### BEGIN SOLUTION
    lengths = dict(equation.lengths)
    for letters, length in zip(equation.inputs[0], shape, strict=True):
        lengths[letters[0]] = length // math.prod(lengths[each] for each in letters[1:])
    return [math.prod(lengths[each] for each in letters) for letters in equation.output]
    ### END SOLUTION


# %% tags=["check"] grade_id="check-reshape-rules" points=1
check.reshape_rules()

# %% [markdown]
# ## Break it: three mistakes that raise no error (5 min)
#
# Each rank holds some columns of a matrix x, or a term of x, as after a matrix product whose inputs were sharded along
# j. The three functions below ignore that. Such mistakes have been found in real code.
#
# - `steps_with_a_term` updates a replicated weight, whose gradient x is still `Partial` (in Megatron-LM issue 1446, the
#   ranks had different gradients of one replicated weight, too).
# - `relu_too_early` computes relu before the sum.
# - `flattens_shards` flattens a matrix of which each rank holds some columns, as if the result were sharded, too. (A
#   similar mistake is pytorch/pytorch issue 179502.)
#
# **Predict.** Each result is compared with that of one process. The first is compared on each rank, and the other two
# as whole tensors. Which of them have the right sum over all elements? Set those to True, and the others to False.

# %%
my_prediction = {"steps_with_a_term": None, "relu_too_early": None, "flattens_shards": None}

# %%
# %%ranks
draw = torch.Generator().manual_seed(17)
terms = torch.randn(world_size, 8, 8, generator=draw, dtype=torch.float64).to(device)
x = terms.sum(0)
columns = local_part(x, Shard(1), rank, world_size)


def steps_with_a_term():
    weight = torch.ones_like(x)
    return weight - 0.1 * terms[rank], weight - 0.1 * x


def relu_too_early():
    return redistribute(torch.relu(terms[rank]), Partial(), Replicate()), torch.relu(x)


def flattens_shards():
    return redistribute(columns.reshape(-1), Shard(0), Replicate()), x.reshape(-1)


measured = {}
for mistake in (steps_with_a_term, relu_too_early, flattens_shards):
    found, expected = mistake()
    right_sum = bool((found.sum() - expected.sum()).abs() < 1e-9)
    measured[mistake.__name__] = right_sum
    assert found.shape == expected.shape and not torch.allclose(found, expected, rtol=0, atol=1e-9)
if rank == 0:
    print(measured)

# %%
from shared.predictions import predicted

measured = ranks.pull("measured")[0]
assert measured == {"steps_with_a_term": False, "relu_too_early": False, "flattens_shards": True}
for name, right_sum in measured.items():
    print(f"{name}: {predicted(my_prediction[name])}measured {right_sum}")

# %% [markdown]
# In the first mistake, each rank subtracts only its own term, so from now on, the ranks' weights differ. With DTensor,
# a missing argument has the same effect: without `grad_placements`, `to_local` assumes that the gradient of a
# replicated weight is replicated, too.
#
# The second drops all negative terms, so its sums are right or too large, never too small. The third has all the right
# elements, in the wrong order, so a check of sums, means or norms does not find it. Your partitioner makes none of
# these mistakes, because it has no rules for them.

# %% [markdown]
# ## Your own run
#
# ZeRO-3 gathers weights, and tensor parallelism moves activations. Your partitioner knows neither name, only rules and
# costs. The next cells let it multiply activations by a weight of 1024 × 1024, with both split by rows. The result has
# to end up split by rows, too. We count what rank 0 really sends, for 16 to 16,384 rows.


# %%
# %%ranks
from shared import wire


def sent_mb(rows):
    """Run the product with this many rows. Returns the MB that this rank sends."""
    text, mesh = f"ij,jk->ik, i={rows}, j=1024, k=1024", Mesh((world_size,))
    shards = [torch.randn(length // world_size, 1024, device=device) for length in (rows, 1024)]
    with wire.ledger() as log:
        result = execute(text, shards, (Shard(0), Shard(0)))
        redistribute(result, propagate(text, (Shard(0), Shard(0)), mesh)[0], Shard(0))
    return sum(entry.sent_bytes for entry in log.entries) / 1e6


own_run = {rows: sent_mb(rows) for rows in [4**power for power in range(2, 8)]}

# %%
from shared.plots.placements import sent_by_rows

own_run, mb_per_row = ranks.pull("own_run")[0], 4 * 1024 / 1e6
ways = {
    "gather the weight, as ZeRO-3": {rows: 3 / 4 * 1024 * mb_per_row for rows in own_run},
    "move the activations, as TP": {rows: 15 / 16 * rows * mb_per_row for rows in own_run},
}
sent_by_rows(own_run, ways)

# %% tags=["claims"] jupyter={"source_hidden": true}
for rows, mb in own_run.items():
    assert abs(mb - min(way[rows] for way in ways.values())) < 1e-6, (rows, mb)

# %% [markdown]
# Up to 256 rows, the points lie on the line of tensor parallelism: an all-to-all of the activations (3/16 of them), and
# a reduce-scatter of the result (3/4). From 1,024 rows on, they lie on the line of ZeRO-3. The lines cross at about 820
# rows, but your partitioner changes sides at about 620: it counts seconds, and tensor parallelism takes six rounds
# instead of three. The two strategies of chapters 09 and 13 are one rule each, and the number of rows decides between
# them.

# %%
ranks.stop()
