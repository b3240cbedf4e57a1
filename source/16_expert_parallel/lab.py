# ---
# jupyter:
#   course:
#     module: expert_parallel
#     minutes: 90
# ---

# %% [markdown]
# # Lab 16 · Expert parallelism
#
# **90 minutes, 16 points.** The stretch exercise adds 8 minutes and 1 point. In this lab, you turn a mixture of experts
# into a layer whose experts live on different ranks. Each rank brings its own tokens, sends every token to the ranks
# of its experts, and gets the results back. At the end, the layer computes the same outputs and gradients as one
# process that has all experts.
#
# | exercise | you build | minutes | points |
# |---|---|---|---|
# | 16.1 | `route`: top-k, weights, and a loss that keeps the experts busy | 12 | 3 |
# | 16.2 | `sort_by_expert`: from a table of choices to one block of rows per expert | 12 | 3 |
# | 16.3 | `exchange_counts` and `exchange_rows`: sizes first, then tokens, and gradients on the way back | 14 | 3 |
# | 16.4 | `ExpertParallelMoE`: the layer | 22 | 5 |
# | 16.5 | `average_gradients`: one mean for two kinds of parameters | 12 | 2 |
# | 16.6 | Stretch: `clip_grad_norm_` with sharded experts | 8 | 1 |
# | | Break it: seven mistakes, and which of them you would notice | 18 | |
#
# Each exercise has a check. Its first line tries a plain case on two ranks, in float64. The other lines try one to four
# ranks, ranks and experts without any token, and groups of ranks. They compare every gradient with that of one process
# and count the bytes that a rank sends.
#
# Shapes have these letters: T tokens of a rank, D their width, E experts, k experts per token, N ranks.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import expert_parallel as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""A mixture of experts, first in one process, then with its experts on different ranks.

Shape legend: T tokens of this rank, D their width, E experts, k experts per token, N ranks of the group. Each of the
T · k choices of a token and one of its experts is called an assignment; a row is what is sent for one assignment.
"""

import copy
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shared.sharded.layers import expect_same
from shared.sharded.parts import mark_local

# %% [markdown]
# ## Exercise 16.1 · Routing to k experts (12 min, 3 points)
#
# The lesson sent each token to one expert. Most models choose k of them and add up their outputs, with weights that the
# router learns. For that, a gradient must flow through the weights back to the router's logits.
#
# Left alone, a router soon sends everything to a few experts: the ones that are chosen learn faster, so they are chosen
# more often. A **balancing loss** works against that. Let $f_e$ be the share of all T · k assignments that go to expert
# e, and $P_e$ the mean over the tokens of the probability that the router gives to e. The loss is $E \sum_e f_e P_e$
# (Fedus et al. 2021, eq. 4). It is 1 if everything is balanced, and up to E/k if one expert gets all it can. Counting
# has no gradient, so only $P_e$ passes one on.
#
# `logits` has the shape (T, E). Return three tensors:
#
# - `chosen` (T, k): the experts with the k largest probabilities (a softmax over all E logits), the most likely first.
# - `weights` (T, k): the probabilities of these k experts, divided by their sum.
# - `balancing`: the loss above, a tensor without dimensions. If T is 0, it is 0.
#
# With k = 1, dividing leaves 1 for every token, and the router gets no gradient through it. So Switch Transformers and
# the lesson, which are top-1, do not divide. This function is for k of at least 2: with k = 1, only the balancing loss
# trains the router.
#
# Everything except `chosen` has the dtype of `logits`. The check begins with two ranks that have their own tokens. Then
# it tries other k and E, the loss, the gradients, and no tokens at all.
#
# <details><summary>Hint 1</summary>
#
# `torch.topk` returns values and indices. Through which of them can a gradient flow?
#
# </details>
# <details><summary>Hint 2</summary>
#
# An integer tensor divided by an integer is float32. What does that do to a loss in float64?
#
# </details>


# %% tags=["exercise", "export"] grade_id="route"
# %%ranks
def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the experts of each token.

    Returns:
        The chosen experts (T, k), their weights (T, k), and the balancing loss.

    Source: Fedus et al. 2021, "Switch Transformers", eq. 4, with top-k shares.
    """
    ### BEGIN SOLUTION
    tokens, experts = logits.shape
    probabilities = logits.softmax(-1)
    likeliest, chosen = probabilities.topk(top_k)
    weights = likeliest / likeliest.sum(-1, keepdim=True)
    counts = chosen.flatten().bincount(minlength=experts).to(logits.dtype)
    shares = counts / max(chosen.numel(), 1)
    means = probabilities.sum(0) / max(tokens, 1)
    return chosen, weights, experts * (shares * means).sum()
    ### END SOLUTION


# %% tags=["check"] grade_id="check-route" points=3
check.route()

# %% [markdown]
# ## Exercise 16.2 · One block of rows per expert (12 min, 3 points)
#
# An expert wants one matrix with all its tokens. But `chosen` is sorted by token. So number the T · k assignments in
# the order of `chosen.flatten()`: assignment $a$ belongs to token $a$ // k. Then sort these numbers by expert.
#
# With `chosen = [[2, 0], [0, 1], [2, 1]]` and four experts, expert 0 has the assignments 1 and 2, expert 1 has 3 and 5,
# expert 2 has 0 and 4, and nobody chose expert 3:
#
# - `order` is `[1, 2, 3, 5, 0, 4]`,
# - `counts` is `[2, 2, 2, 0]`, one entry for *every* expert.
#
# Within an expert's block, the assignments stay in their order. `order` and `counts` are int64 tensors on the device of
# `chosen`.
#
# If a `capacity` is given, as in the lesson, keep the first `capacity` assignments of each block, and leave the others
# out of `order` and `counts`. With a capacity of 1, the example gives `[1, 3, 0]` and `[1, 1, 1, 0]`. So token 1 has
# lost one of its experts, and token 2 both. The layer adds nothing in their place.
#
# The check tries the plain order, experts without tokens, and the capacity.
#
# <details><summary>Hint 1</summary>
#
# `argsort` promises to keep the order of equal elements only if you ask for it.
#
# </details>
# <details><summary>Hint 2</summary>
#
# For the capacity, you need each assignment's position within its own block. Which index does the block begin at?
#
# </details>


# %% tags=["exercise", "export"] grade_id="sort-by-expert"
# %%ranks
def sort_by_expert(
    chosen: Tensor, experts: int, capacity: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sort the assignments by expert.

    Args:
        chosen: The experts of each token (T, k).
        experts: E, the number of experts.
        capacity: How many assignments each expert keeps at most; None keeps all.

    Returns:
        The assignments that are kept, in blocks by expert, and the length of each block (E).
    """
    ### BEGIN SOLUTION
    expert_of = chosen.flatten()
    order = expert_of.argsort(stable=True)
    counts = expert_of.bincount(minlength=experts)
    if capacity is None:
        return order, counts
    begins = counts.cumsum(0) - counts
    positions = torch.arange(len(order), device=order.device) - begins[expert_of[order]]
    return order[positions < capacity], counts.clamp(max=capacity)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-sort-by-expert" points=3
check.sort_by_expert()

# %% [markdown]
# ## The layer in one process
#
# The next three cells are given, and they use what you have written. Read `forward`: it gathers a row per assignment,
# lets the experts compute, weights the results, and adds them up per token. `run_experts` is the only method that has
# to know where the experts are. (`class MoE(MoE):` continues the class. If you run its first cell again, run the second
# one again, too.)


# %% tags=["export"]
# %%ranks
class Expert(nn.Module):
    """The two-layer MLP of a transformer block."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def run_each(experts: Iterable[nn.Module], rows: Tensor, counts: list[int]) -> Tensor:
    """Let each expert compute its block of rows. The results have the order of the rows."""
    blocks = rows.split(counts)
    return torch.cat([expert(block) for expert, block in zip(experts, blocks, strict=True)])


# %% tags=["export"]
# %%ranks
class MoE(nn.Module):
    """A mixture of experts: a router chooses top_k of the experts for each token, and their outputs are added up.

    Args:
        dim: D, the width of a token.
        hidden: The width between the two layers of an expert.
        experts: E, the number of experts.
        top_k: How many experts each token gets. With 1, only aux_loss trains the router.
        capacity_factor: With a factor c, an expert keeps ⌈c · T · k / E⌉ assignments and drops the others. None keeps
            all, which is called dropless.

    Attributes:
        aux_loss: The balancing loss of the last forward. Add it to the loss with a small factor, such as 0.01.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        top_k: int,
        capacity_factor: float | None = None,
    ):
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(
                f"top_k must be from 1 to {experts}, the number of experts, got {top_k}"
            )
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ValueError(
                f"capacity_factor must be positive, or the experts would drop every token, got {capacity_factor}"
            )
        self.top_k, self.capacity_factor, self.aux_loss = top_k, capacity_factor, None
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(experts))


# %% tags=["export"]
# %%ranks
class MoE(MoE):
    def forward(self, x: Tensor) -> Tensor:  # (…, D) → (…, D)
        tokens, experts = x.reshape(-1, x.shape[-1]), self.router.out_features
        chosen, weights, self.aux_loss = route(self.router(tokens), self.top_k)
        capacity = None
        if self.capacity_factor is not None:
            capacity = math.ceil(self.capacity_factor * chosen.numel() / experts)
        order, counts = sort_by_expert(chosen, experts, capacity)
        token_of = order // self.top_k
        outputs = self.run_experts(tokens[token_of], counts)
        weighted = (outputs * weights.flatten()[order].unsqueeze(-1)).to(tokens.dtype)
        return torch.zeros_like(tokens).index_add(0, token_of, weighted).view(x.shape)

    def run_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute each row with its expert. The rows come in blocks by expert, of these lengths."""
        return run_each(self.experts, rows, counts.tolist())

    def __getstate__(self) -> dict:
        """Leave the last forward's graph out of copies, which could not have it."""
        return {**self.__dict__, "aux_loss": None}


# %% [markdown]
# ## Exercise 16.3 · Sizes first, then tokens (14 min, 3 points)
#
# Rank r gets the r-th of N equal blocks of the experts. A rank knows from its `counts` how many rows it will send to
# every rank, but not how many it will receive. Without these sizes, it cannot allocate the receive buffer, and
# `all_to_all_single` does not find them out by itself. So the ranks exchange the sizes first.
#
# **a.** `exchange_counts(counts, group)` returns a tensor (N, E/N): entry (s, j) says how many rows rank s sends for
# the j-th of *this* rank's experts.
#
# - `dist.all_to_all_single(received, sent, group=group)` cuts `sent` into N equal pieces and sends piece r to rank r.
#   `received` gets the pieces in rank order.
#
# **b.** `exchange_rows(rows, sent, received, group)` sends the first `sent[0]` rows to rank 0, the next `sent[1]` to
# rank 1, and so on, and returns the `received[s]` rows of each rank s, in rank order. Both lists have N integers.
# Autograd does not record collectives, so write the two methods of `Exchange`:
#
# - `dist.all_to_all_single(output, input, output_sizes, input_sizes, group=group)` sends pieces of different lengths.
#   Both tensors must be contiguous.
# - `backward` gets the gradient of every row that this rank has received. The rank that sent the row needs it. Return
#   one gradient for `rows`, and `None` for each of the other arguments.
# - A rank that sends or receives nothing must make the same calls. A piece of length 0 is allowed.
#
# The check tries plain rows, gradients, ranks that send nothing, bytes, and groups.
#
# <details><summary>Hint 1</summary>
#
# In backward, who sends how many rows to whom? Compare with forward.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The gradient of `x.sum()` is one element, expanded to the shape of `x`. Is that contiguous?
#
# </details>


# %% tags=["exercise", "export"] grade_id="exchange-counts"
# %%ranks
def exchange_counts(counts: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Tell every rank how many rows it will get for each of its experts.

    Shape: counts [E], the rows of this rank for every expert; returns [N, E/N].
    Communication: one all-to-all of E integers.
    """
    ### BEGIN SOLUTION
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    return received.view(dist.get_world_size(group), -1)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-exchange-counts" points=1
check.exchange_counts()


# %% tags=["exercise", "export"] grade_id="exchange-rows"
# %%ranks
class Exchange(torch.autograd.Function):
    """Forward: an all-to-all of rows. Backward: an all-to-all of their gradients, the other way."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent: list[int], received: list[int], group) -> Tensor:
        ### BEGIN SOLUTION
        ctx.sent, ctx.received, ctx.group = sent, received, group
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output
        ### END SOLUTION

    @staticmethod
    @once_differentiable  # collectives record no graph
    def backward(ctx, gradient: Tensor):
        ### BEGIN SOLUTION
        returned = gradient.new_empty(sum(ctx.sent), *gradient.shape[1:])
        dist.all_to_all_single(
            returned, gradient.contiguous(), ctx.sent, ctx.received, group=ctx.group
        )
        return returned, None, None, None
        ### END SOLUTION


# %% tags=["export"]
# %%ranks
def exchange_rows(
    rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup | None = None
) -> Tensor:
    """Send rows to the ranks, in rank order, and return the rows that they send here.

    Shape: rows [sum(sent), …]; returns [sum(received), …].
    Communication: one all-to-all of the rows in forward, and one of the gradients of received rows in backward.
    """
    return Exchange.apply(rows, sent, received, group)


# %% tags=["check"] grade_id="check-exchange-rows" points=2
check.exchange_rows()

# %% [markdown]
# ## Exercise 16.4 · The layer with sharded experts (22 min, 5 points)
#
# Now put the pieces together. `ExpertParallelMoE` inherits `forward` from `MoE`. So you only have to give each rank its
# experts (in the first cell), and write a `run_experts` that finds them (in the third). Every rank calls it with its
# own `rows` and `counts`, for *all* experts, in blocks by expert.
#
# - In `__init__`, make `self.experts` an `nn.ModuleDict` with copies of this rank's experts. The keys are their indices
#   among all experts, as strings, so that parameters keep their names: rank 1 of 2 has `experts.2.up.weight` and
#   `experts.3.up.weight` if there are four experts.
# - In `run_experts`, send each row to the rank of its expert (this is called **dispatch**), let this rank's experts
#   compute what has arrived, and send the results back (**combine**), so that the returned rows have the order of
#   `rows`.
# - Rows arrive in blocks by *rank*, and within each of these by expert. `run_each` needs one block per expert, and the
#   experts: `self.experts.values()`, because an `nn.ModuleDict` iterates over its keys. Reorder the rows, and undo it
#   before you send them back.
# - Use `self.group`. Per forward, a rank sends its E counts and each of its rows once, and each result once. In
#   backward, it sends as many rows again, and no counts.
# - A rank without tokens takes part in all exchanges, and so does one whose experts get no rows.
#
# What should the gradients be? Suppose that every rank has its own loss. Backward then gives each expert the gradient
# of the *sum* of all ranks' losses, because the rows of all ranks passed through it. The router's gradient is that of
# this rank's loss alone. Nothing has to be added up here: exercise 16.5 does that.
#
# The check tries a plain layer, several sizes and backwards, ranks and experts without tokens, capacity, bytes, groups,
# memory, and arguments that must be rejected (by the given lines).
#
# <details><summary>Hint 1</summary>
#
# Let `received` be the result of `exchange_counts`, (N, E/N). How many rows come from rank s? How many are for the j-th
# local expert?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Write down, for N = 2 and E = 4, the local expert of each block that arrives, in the order of arrival. Then write down
# the local expert of each *row*, if the blocks have 2, 0, 1 and 3 rows. You have sorted such a list before.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `Tensor.repeat` and `Tensor.repeat_interleave` write these two lists for any N and E.
#
# </details>


# %% tags=["exercise", "export"] grade_id="expert-parallel-moe"
# %%ranks
class ExpertParallelMoE(MoE):
    """A mixture of experts with E/N of the experts on each rank. Each rank brings its own tokens.

    Backward gives an expert the gradient of the sum of all ranks' losses, and the router that of this rank's loss. All
    ranks call forward and backward equally often. If some run under no_grad, the others wait in their exchanges.

    Memory: E/N experts and the whole router.
    Communication: an all-to-all of E integers, then two all-to-alls of rows in forward and two in backward.
    """

    def __init__(self, moe: MoE, group: ProcessGroup | None = None):
        nn.Module.__init__(self)  # that of MoE would create all experts
        self.top_k, self.capacity_factor, self.aux_loss = moe.top_k, moe.capacity_factor, None
        self.group, self.router = group, copy.deepcopy(moe.router)
        ### BEGIN SOLUTION
        per_rank = len(moe.experts) // dist.get_world_size(group)
        first = dist.get_rank(group) * per_rank
        own = range(first, first + per_rank)
        self.experts = nn.ModuleDict(
            {str(index): copy.deepcopy(moe.experts[index]) for index in own}
        )
        ### END SOLUTION
        advice = "call clip_grad_norm_() of chapter 16, which adds up the experts' squares over the ranks"
        mark_local(self.experts.parameters(), group, advice)


# %% tags=["export"]
# %%ranks
class ExpertParallelMoE(ExpertParallelMoE):
    @classmethod
    def from_moe(cls, moe: MoE, group: ProcessGroup | None = None) -> "ExpertParallelMoE":
        """Divide the experts of a layer among the ranks of a group. The layer must be the same on every rank.

        Raises:
            ValueError: on every rank, if N does not divide the number of experts, or if their layers differ.
        """
        experts, world_size = len(moe.experts), dist.get_world_size(group)
        if experts % world_size:
            raise ValueError(
                f"cannot divide {experts} experts evenly among {world_size} ranks: "
                f"choose a multiple of {world_size} experts"
            )
        settings = {"top_k": moe.top_k, "capacity_factor": moe.capacity_factor}
        expect_same(moe.named_parameters(), group, **settings)
        return cls(moe, group)


# %% tags=["exercise", "export"] grade_id="run-experts"
# %%ranks
class ExpertParallelMoE(ExpertParallelMoE):
    def run_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute each row with its expert, on whichever rank that is."""
        ### BEGIN SOLUTION
        received = exchange_counts(counts, self.group)  # (N, E/N)
        world_size, per_rank = received.shape
        to_ranks, from_ranks = counts.view(world_size, -1).sum(1).tolist(), received.sum(1).tolist()
        arrived = exchange_rows(rows, to_ranks, from_ranks, self.group)
        # From blocks by rank to blocks by expert.
        blocks = torch.arange(per_rank, device=counts.device).repeat(world_size)
        by_expert = blocks.repeat_interleave(received.flatten()).argsort(stable=True)
        outputs = run_each(self.experts.values(), arrived[by_expert], received.sum(0).tolist())
        by_rank = outputs[by_expert.argsort()]  # the inverse of a permutation is its argsort
        return exchange_rows(by_rank, from_ranks, to_ranks, self.group)
        ### END SOLUTION


# %% tags=["check"] grade_id="check-expert-parallel-moe" points=5
check.ExpertParallelMoE()

# %% [markdown]
# ## Exercise 16.5 · Two kinds of gradients (12 min, 2 points)
#
# A model trains on the *mean* of the ranks' losses. After backward, its parameters have two kinds of gradients. An
# expert has the gradient of the sum of all ranks' losses, because their tokens came to it. All other parameters (the
# router, attention, embeddings) have that of this rank's loss, because every rank has a replica of them.
#
# In the lesson's example, with dp = 8 and ep = 4, each expert also has dp/ep = 2 copies. Then "all ranks" are only the
# four of an ep group: each copy has the sum of *their* losses.
#
# Turn both into the gradients of the mean of all dp losses, in place:
#
# - `experts` are the parameters of this rank's experts, and `others` those that every rank has.
# - `group` has all dp ranks, and `replicas` those with a copy of this rank's experts. If `replicas` is None, no other
#   rank has one. (If `group` is None, it means all ranks, as always.)
# - Copies of an expert must end with the same gradient. Which sum does each of them have before, and what do you divide
#   it by?
# - A `.grad` is None on all ranks that share the parameter, or on none of them. None stays None.
# - A `.grad` may be a view that is not contiguous, and an all-reduce takes only contiguous tensors.
# - All-reduce each gradient of `others` once, over `group`, and one of `experts` only over `replicas`.
#
# <details><summary>Hint 1</summary>
#
# Without copies, an expert already has the gradient of the sum. What turns it into that of the mean? Does it take a
# collective?
#
# </details>
# <details><summary>Hint 2</summary>
#
# With dp = 8 and ep = 4, of how many losses is a copy's gradient the sum? And of how many is it after the all-reduce?
#
# </details>


# %% tags=["exercise", "export"] grade_id="average-gradients"
# %%ranks
@torch.no_grad()
def average_gradients(
    experts: Iterable[nn.Parameter],
    others: Iterable[nn.Parameter],
    group: ProcessGroup | None = None,
    replicas: ProcessGroup | None = None,
) -> None:
    """Turn the gradients into those of the mean of the ranks' losses, in place.

    Args:
        experts: The parameters of this rank's experts.
        others: The parameters that every rank has.
        group: All ranks, each with a loss of its own.
        replicas: The ranks that have a copy of this rank's experts; None if no other rank has one.

    Communication: all-reduces of the gradients of others over group, and of those of experts over replicas, if any.
    """
    ### BEGIN SOLUTION
    world_size = dist.get_world_size(group)
    for parameter in experts:
        if parameter.grad is not None:
            total = parameter.grad.contiguous()
            if replicas is not None:
                dist.all_reduce(total, group=replicas)
            parameter.grad.copy_(total / world_size)
    for parameter in others:
        if parameter.grad is not None:
            mean = parameter.grad.contiguous()
            dist.all_reduce(mean, group=group)
            parameter.grad.copy_(mean / world_size)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-average-gradients" points=2
check.average_gradients()

# %% [markdown]
# ## Exercise 16.6 · Stretch: one norm (8 min, 1 point)
#
# To clip, you need the norm of the gradient of the *whole* model: all experts, and everything else once. Torch's
# `clip_grad_norm_` sees only what this rank has.
#
# - Add up the squares in float64. A `.grad` may be None, and `experts` and `others` may be generators.
# - Send one all-reduce of a single element, over `group`: ranks that together have each expert once. With several
#   copies of the experts (dp > ep), that is not the group of 16.5.
# - Scale all gradients of this rank by `max_norm / (norm + 1e-6)`, but only if that makes them smaller.
# - Return the norm before scaling, the same on every rank.
#
# <details><summary>Hint</summary>
#
# Which squares does no other rank have, and which do all of them have? Only one kind belongs in the all-reduce.
#
# </details>


# %% tags=["exercise", "export"] grade_id="clip-grad-norm"
# %%ranks
@torch.no_grad()
def clip_grad_norm_(
    experts: Iterable[nn.Parameter],
    others: Iterable[nn.Parameter],
    max_norm: float,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Scale the gradients so that their norm over the whole model is at most max_norm.

    Args:
        group: ranks that together have each expert once.

    Returns:
        The norm before scaling, the same on every rank.

    Communication: one all-reduce of one element.
    """
    ### BEGIN SOLUTION
    sharded = [parameter.grad for parameter in experts if parameter.grad is not None]
    replicated = [parameter.grad for parameter in others if parameter.grad is not None]
    device = (sharded + replicated)[0].device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in sharded:
        total += gradient.double().square().sum()
    dist.all_reduce(total, group=group)
    for gradient in replicated:
        total += gradient.double().square().sum()
    norm = total.sqrt()
    for gradient in sharded + replicated:
        gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm
    ### END SOLUTION


# %% tags=["check"] grade_id="check-clip-grad-norm" points=1
check.clip_grad_norm_()

# %% [markdown]
# ## Break it: seven mistakes, and which of them you would notice (18 min)
#
# The first four mistakes have been reported in large code bases, and none of the first five raises an error. The next
# cells train a small model on text for 40 steps: an embedding, your layer and an output layer, on four ranks with their
# own samples.
#
# - `keeps_the_sum`: experts keep the gradient of the sum of the losses, N times the right one (PyTorch issue 160285).
# - `constant_weights`: autograd does not see that the weights depend on the router (NeMo Automodel pull request 2995).
# - `counts_replicas`: in the norm, a parameter that every rank has counts N times (with tensor parallelism, in
#   ROCm/TransformerEngine pull request 715).
# - `own_norm`: each rank clips by the norm of what it has itself (ColossalAI issue 2192).
# - `mixes_up_rows`: the results come back to their tokens in the reverse order.

# %%
# %%ranks
from shared.data import CharTokens

text = CharTokens()
right_route = route


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(text.vocab_size, 32)
            self.layer = ExpertParallelMoE.from_moe(MoE(32, 64, experts=8, top_k=2))
            self.output = nn.Linear(32, text.vocab_size)
        self.double().to(device)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        logits = self.output(x + self.layer(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.01 * self.layer.aux_loss


# %%
# %%ranks
def constant_weights(logits, top_k):
    chosen, weights, balancing = right_route(logits, top_k)
    return chosen, weights.detach(), balancing


def clip(experts, others, mistake, max_norm=0.3):
    """Clip in place, right or wrong. Returns the norm."""

    def squares_of(parameters):
        return sum(parameter.grad.square().sum() for parameter in parameters)

    total = squares_of(experts)
    if mistake == "counts_replicas":
        total = total + squares_of(others)
    if mistake != "own_norm":
        dist.all_reduce(total)
    if mistake != "counts_replicas":
        total = total + squares_of(others)
    for parameter in experts + others:
        parameter.grad *= (max_norm / total.sqrt()).clamp(max=1)
    return total.sqrt()


# %%
# %%ranks
def history(mistake):
    """Train. Returns the mean loss and the norm of each step, and how far the ranks' replicas are apart at the end."""
    global route
    route = constant_weights if mistake == "constant_weights" else right_route
    model = Model()
    run_experts = model.layer.run_experts
    if mistake == "mixes_up_rows":
        model.layer.run_experts = lambda rows, counts: run_experts(rows, counts).flip(0)
    experts = list(model.layer.experts.parameters())
    others = [*model.embedding.parameters(), *model.layer.router.parameters()]
    others += model.output.parameters()
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), lr=3e-3), [], []
    for step in range(40):
        first = 1000 * step + 250 * rank
        tokens, targets = text.windows(range(first, first + 250, 125), length=32)
        optimizer.zero_grad()
        loss = model(tokens.to(device), targets.to(device))
        loss.backward()
        average_gradients(experts, others)
        if mistake == "keeps_the_sum":
            for parameter in experts:
                parameter.grad *= world_size
        norms.append(clip(experts, others, mistake).item())
        optimizer.step()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        losses.append(mean.item())
    route = right_route
    mine = model.layer.router.weight.detach().clone()
    dist.broadcast(mine, src=0)
    return losses, norms, (mine - model.layer.router.weight).abs().max().item()


# %% [markdown]
# **Predict.** Which mistakes show in the loss of the very first step? And after which ones do the ranks no longer have
# the same router? Set those to True, and the others to False.

# %%
MISTAKES = ("keeps_the_sum", "constant_weights", "counts_replicas", "own_norm", "mixes_up_rows")
my_first_loss = dict.fromkeys(MISTAKES)
my_drift = dict.fromkeys(MISTAKES)

# %% tags=["nbval-ignore-output"]
from shared import tables

found = {name: ranks.run(lambda it: history(it), name) for name in ("right", *MISTAKES)}
rows = []
for name, each in found.items():
    losses, norms, _ = each[0]
    apart = max(drift for _, _, drift in each)
    rows.append(
        [name, *(f"{losses[step]:.4f}" for step in (0, 1, 39)), f"{norms[0]:.4f}", f"{apart:.0e}"]
    )
tables.Table(["", "loss, step 1", "step 2", "step 40", "norm, step 1", "routers apart"], rows)

# %%
right = found["right"][0]
for name in MISTAKES:
    losses, norms, _ = found[name][0]
    shows = abs(losses[0] - right[0][0]) > 1e-9
    drifts = max(drift for _, _, drift in found[name]) > 1e-9
    yours = [
        "" if guess is None else f" (you: {guess})"
        for guess in (my_first_loss[name], my_drift[name])
    ]
    print(f"{name}: first loss {shows}{yours[0]}, drift {drifts}{yours[1]}")
    assert shows == (name == "mixes_up_rows") and drifts == (name == "own_norm")
    assert abs(norms[0] - right[1][0]) > 1e-6

# %% [markdown]
# The next figure shows three of your runs. If they had no names, which one would you take for the right one?

# %%
from shared import plots

shown = ("right", "keeps_the_sum", "mixes_up_rows")
plots.loss_curves({name: found[name][0][0] for name in shown})

# %% [markdown]
# Only `mixes_up_rows` changes the loss of the first step, and you would not notice it without the right run beside it:
# in ours, it is 4.7552 instead of 4.7564. The four others compute the right outputs, so their first loss is right to
# the last digit.
#
# After 40 steps, `mixes_up_rows` has learned more slowly. On its own, it looks like a healthy run: even if one layer
# does not work, the rest of the model learns. `keeps_the_sum` hardly differs, because AdamW divides a factor of N out
# again, and clipping scales everything alike. By chance, it even ends a little lower.
#
# The first *norm* gives all five away, although `constant_weights` changes it by only 0.2%. So log the gradient norm,
# and compare it with that of one process once. With `own_norm`, each rank scales the same averaged gradient by another
# factor, so the ranks end with different routers.
#
# You will notice the next mistake. Rank 2 has no tokens in this batch, so someone lets it skip the layer. NeMo
# Automodel hung in a similar way when no token chose the experts of a rank (pull request 935). What does the doctor
# say?

# %% tags=["raises-exception"]
# %%ranks --timeout 10
torch.manual_seed(0)
layer = ExpertParallelMoE.from_moe(MoE(8, 16, experts=4, top_k=1)).to(device)
tokens = torch.randn(0 if rank == 2 else 5, 8, device=device)
if len(tokens):
    layer(tokens)

# %% [markdown]
# Every rank has to take part in every exchange, even if all of its counts are 0.
#
# The last mistake happens if you balance without a loss. DeepSeek-V3 adds a bias per expert to the scores, only to
# *choose* experts. After each step, the bias of overloaded experts falls a little, and that of the others rises. It is
# easy to put this update into `forward`. But a step has several micro-batches, and with activation checkpointing
# (chapter 06), each forward runs twice. Torchtitan's first version updated the bias in every micro-batch (pull request
# 1304), and counted recomputed tokens twice (pull request 1593).
#
# **Predict.** A layer has 8 experts, top-2. If the bias moves by 0.05 between forward and its recomputation, what
# percentage of the tokens is computed by other experts in backward than in forward?

# %%
my_rerouted_percent = None

# %%
import torch

scores = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0)) + torch.linspace(0, 1, 8)
bias = torch.zeros(8)


def chosen_with(bias):
    return (scores + bias).topk(2).indices.sort().values


before = chosen_with(bias)
load = before.flatten().bincount(minlength=8).float()
bias += 0.05 * (load.mean() - load).sign()  # the update, one forward too early
rerouted = (chosen_with(bias) != before).any(1).float().mean().item()
guess = "" if my_rerouted_percent is None else f", predicted {my_rerouted_percent:g}%"
print(f"measured {100 * rerouted:.1f}%{guess}")
assert 0.04 < rerouted < 0.07

# %% [markdown]
# About one token in 19 gets another expert. (DeepSeek's bias moves by 0.001, so there, it would be fewer.) For these
# tokens, backward computes the gradients of experts that never contributed to the loss. With fixed slots, as in the
# lesson, only the gradients are wrong. In our layer, an expert gets a different number of rows, and torch compares
# shapes: it raises a `CheckpointError`, unless you pass `use_reentrant=True`.
#
# With the finished module, the training script has this as a strategy: `torchrun --nproc_per_node=4 -m solutions.train
# --model moe --strategy ep`.

# %%
ranks.stop()
