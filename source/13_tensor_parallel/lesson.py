# ---
# jupyter:
#   course:
#     module: tensor_parallel
# ---

# %% [markdown]
# # 13 · Tensor parallelism
#
# **45–70 minutes.** After this lesson, you will be able to:
#
# - split the layers and the vocabulary of a GPT over several ranks,
# - predict what a step sends and what a rank keeps, with and without sequence parallelism,
# - hide a collective behind the matmul that needs its result,
# - choose between tensor parallelism, ZeRO-3, and both.
#
# You need the two halves of an all-reduce (chapter 01), the activations of a block (chapter 06), `ZeRO3` (chapter 10)
# and device meshes (chapter 11). t is the number of ranks that share a layer, and f = (t−1)/t. The sequence length is
# s, the batch size b, the width h.

# %% [markdown]
# ## Where we are
#
# Llama 3 405B was trained on 16,384 GPUs, with about 2,000 sequences per step (Grattafiori et al. 2024, table 4).
# ZeRO-3 shards the model, but each rank still computes whole layers, on sequences of its own. With ZeRO-3 alone, seven
# of every eight GPUs would have had nothing to do.
#
# However many ranks there are, each one also unshards whole units, and keeps the activations of a whole sequence. So
# there are three reasons to split the layers themselves: a unit is too large for a GPU, or the activations of a
# sequence are, or there are fewer sequences than GPUs. In **tensor parallelism** (TP), t ranks compute each layer
# together, on the *same* sequences.
#
# In this chapter, you find out what TP costs. Each of your four ranks is behind a link of 1 Gbit/s:

# %% tags=["nbval-ignore-output"]
from shared import formulas, measure, plots, ranks, tables
from shared.planner import layers
from shared.plots import diagrams
from shared.predictions import predicted
from shared.timeline.bundles import bundled

measure.start_behind_link(world_size=4, rate="1gbit", latency_ms=0.1)

# %%
# %%ranks
from functools import partial

from torch import nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from shared import measure, memory, timeline, wire
from shared.data import CharTokens
from shared.models import Block, GPTConfig, TinyGPT, stand_in_for_gpu

text = CharTokens()
config = GPTConfig(vocab_size=128, context=256, layers=4, width=128)

# %% [markdown]
# ## Two ways to split a matrix
#
# Most of a GPT's parameters are in linear layers, which compute y = xA. How can several ranks share this matmul? torch
# stores the transpose of A, so a column of A is a row of `weight`. In the diagram, look at what each rank needs, and at
# what it computes:

# %%
diagrams.split_matrix()

# %% [markdown]
# A layer is **column-parallel** if its columns are split. A rank then needs all of x, and computes some elements of y.
# It is **row-parallel** if its rows are split. Each rank then needs only its slice of x. But what it computes is a
# partial sum: one *term* of every element of y. An all-reduce adds up the terms.
#
# A column-parallel layer returns just what a row-parallel one needs, so they are used in pairs. In an MLP, gelu(xA)B,
# we split A by columns and B by rows. Each rank applies gelu to its own elements of xA, and multiplies them by its rows
# of B. Only the result has to be added up, so the *pair* needs one all-reduce, not two. Row-parallel first would be
# worse: gelu(a + b) ≠ gelu(a) + gelu(b), so the terms would have to be added before gelu, and the outputs gathered at
# the end.

# %% [markdown]
# ## Conjugate operators
#
# In backward, the pair works the other way round. Every rank holds the whole gradient of y, and hence that of its own
# term, so it sends nothing. But x was used by all ranks, each for its own columns. So each has only a term of x's
# gradient, and an all-reduce adds the terms up.
#
# So a pair lies between two **conjugate operators**: each does in backward what the other one does in forward (Shoeybi
# et al. 2019, §3). In the diagram, look at where each direction communicates:

# %%
diagrams.conjugate_operators()

# %% [markdown]
# In code, we build each autograd Function from one function per direction:


# %%
# %%ranks
def identity(x):
    return x.view_as(x)


def summed(x):
    total = x.contiguous().clone()
    dist.all_reduce(total)
    return total


def operator(in_forward, in_backward):
    """Build a function of a tensor from what it does in forward and in backward."""

    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return in_forward(x)

        @staticmethod
        def backward(ctx, gradient):
            return in_backward(gradient)

    return Operator.apply


copy_to_ranks = operator(in_forward=identity, in_backward=summed)
sum_over_ranks = operator(in_forward=summed, in_backward=identity)


def column_parallel(x, weight, enter=copy_to_ranks):  # weight (out/t, in)
    return linear(enter(x), weight)


def row_parallel(x, weight, leave=sum_over_ranks):  # weight (out, in/t)
    return leave(linear(x, weight))


# %% [markdown]
# ## Splitting attention by heads
#
# Heads are independent, so each rank computes H/t of the H heads. `query_key_value` is column-parallel: a rank has the
# columns of its own heads. `project` is row-parallel. In the diagram, look at which columns a rank has:

# %%
diagrams.split_heads()

# %% [markdown]
# A rank's columns are not contiguous: it needs a block of the queries, one of the keys and one of the values. One
# process concatenates the heads before `project`, while the ranks add up their results after it. Both compute the same
# sum, m₀P₀ + m₁P₁ + m₂P₂ + m₃P₃, where mᵢ is the output of head i, and Pᵢ its rows of the projection.


# %%
# %%ranks
# In shapes, B is the batch size b, T the sequence length s, D the width h, and H the number of heads.
def own(tensor, dim):
    """Return this rank's part of a tensor that is split along a dimension, as a parameter."""
    return nn.Parameter(tensor.detach().chunk(world_size, dim)[rank].clone())


class SplitBlock(nn.Module):
    """A block of which each rank computes H/t heads, and 1/t of the inner elements of the MLP."""

    def __init__(self, block, column=column_parallel, row=row_parallel):
        super().__init__()
        self.column, self.row = column, row
        self.norm_1, self.norm_2, whole = block.norm_1, block.norm_2, block.attention
        by_head = whole.query_key_value.weight.unflatten(0, (3, whole.heads, -1))
        self.query_key_value = own(by_head, 1)  # (3, H/t, D/H, D)
        self.project = own(whole.project.weight, 1)  # (D, D/t)
        self.up = own(block.up.weight, 0)  # (4D/t, D)
        self.down = own(block.down.weight, 1)  # (D, 4D/t)

    def attend(self, x):
        split = self.column(x, self.query_key_value.flatten(0, 2))
        split = split.unflatten(-1, self.query_key_value.shape[:3])  # (B, T, 3, H/t, D/H)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.row(mixed.transpose(1, 2).flatten(2), self.project)

    def forward(self, x):
        x = x + self.attend(self.norm_1(x))
        return x + self.row(gelu(self.column(self.norm_2(x), self.up)), self.down)


# %% [markdown]
# ## Splitting the vocabulary
#
# Eight ranks split a block of Llama 3 405B into shards of 0.4 billion parameters. Its token embedding is larger than
# five such shards: 128,000 tokens times a width of 16,384 are 2.1 billion parameters (Grattafiori et al. 2024, table
# 3). So the vocabulary is split, too. The embedding has a row for each of V tokens, and a rank keeps V/t. In our GPT,
# the embedding is also the weight of the output layer.
#
# Looking up a token multiplies a one-hot vector by the embedding, so the embedding is a row-parallel layer. A rank gets
# zeros for tokens that it does not own, and an all-reduce adds up the results. The output layer is column-parallel: a
# rank computes the logits of its own V/t tokens.
#
# The loss does not need all logits on one rank. For each position, it is the logarithm of the sum of all exp(logit),
# minus the logit of the target. So the ranks exchange three elements per position instead of V: the largest logit
# (which is subtracted, so that exp does not overflow), the sum, and the target's logit. The diagram shows one position:

# %%
diagrams.split_loss()


# %%
# %%ranks
# Compares tokens (B, T) with the `size` tokens of the vocabulary that this rank owns.
def is_own(tokens, size):  # returns (B, T, size)
    return tokens[..., None] == torch.arange(size * rank, size * (rank + 1))


def vocab_parallel_cross_entropy(logits_shard, targets):  # logits_shard (B, T, V/t)
    largest = logits_shard.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    shifted = logits_shard - largest[..., None]
    total = sum_over_ranks(shifted.exp().sum(-1))
    is_target = is_own(targets, logits_shard.shape[-1])
    of_target = sum_over_ranks(shifted.where(is_target, 0).sum(-1))
    return (total.log() - of_target).mean()


# %% [markdown]
# This function cannot see whether its logits are split, and in 2026, neither could Megatron's: with two of its options,
# `GPTModel` gathered them first (Megatron-LM issue 7452). That raises no error, but each exp(logit) counts t times, so
# the loss is too large by log t.
#
# ## The short version
#
# Now we can split a whole GPT. Our text has 94 different characters, which four ranks cannot divide evenly. So we pad
# the vocabulary of every model here to 128. The last 34 rows belong to no character.


# %%
# %%ranks
class SplitGPT(nn.Module):
    """A TinyGPT that the ranks compute together."""

    def __init__(self, gpt):
        super().__init__()
        self.position_embedding, self.norm = gpt.position_embedding, gpt.norm
        self.token_embedding = own(gpt.token_embedding.weight, 0)  # (V/t, D)
        self.blocks = nn.ModuleList(SplitBlock(block) for block in gpt.blocks)

    def forward(self, tokens, targets):
        # The product shows that the embedding is row-parallel. Lab 13 looks up the rows instead.
        embedding = self.token_embedding
        one_hot = is_own(tokens, len(embedding)).type_as(embedding)
        x = row_parallel(one_hot, embedding.T) + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits_shard = column_parallel(self.norm(x), embedding)
        return vocab_parallel_cross_entropy(logits_shard, targets)


# %% [markdown]
# Does it train? We train a small GPT in float64, once in one process and once split over four ranks. All ranks get the
# same batch. The two lines should be equal:

# %%
# %%ranks
small = GPTConfig(vocab_size=128)


def losses_of(model, steps=60):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    starts = [(1000 * number, 1000 * number + 500) for number in range(steps)]
    return [measure.train_step(model, optimizer, *text.windows(each, 64)) for each in starts]


models = TinyGPT(small).double(), SplitGPT(TinyGPT(small).double())
losses = [losses_of(model) for model in models]
for each in losses:
    print(f"{each[0]:.8f} in the first step, {each[-1]:.8f} in the last one")

# %% tags=["claims"]
# %%ranks
assert all(abs(x - y) < 1e-9 for x, y in zip(*losses, strict=True))
assert losses[0][-1] < losses[0][0] - 0.5

# %% [markdown]
# They are. The norms and the position embedding are **replicated**: every rank keeps and updates all of them. Their
# gradients need no communication, because all ranks compute the same tensors outside the pairs, in forward and
# backward. That is why all ranks must draw the same dropout mask there. Inside a pair, each rank needs a mask of its
# own, so Megatron has a second random number generator (`megatron/core/tensor_parallel/random.py`).

# %% [markdown]
# ## What a step sends
#
# The split GPT trains as the whole one does. What does that cost?
#
# **Predict.** Our GPT has four blocks, an embedding and an output layer. How many all-reduces of a whole tensor of
# activations (s × b × h) does a step have, in forward and backward together?

# %%
my_prediction = None


# %%
# %%ranks
model = SplitGPT(TinyGPT(config))
optimizer = torch.optim.AdamW(model.parameters())
log = measure.costs(model, optimizer, *text.windows([0, 1000], 256)).log

# %%
log, sbh = ranks.pull("log")[0], 256 * 2 * 128
whole = [entry.in_backward for entry in log.entries if entry.elements == sbh]
print(f"{predicted(my_prediction)}measured {len(whole)}, of which {sum(whole)} are in backward")

# %% tags=["claims"]
of_blocks = formulas.tensor_parallel_sent_bytes(256 * 2, 128, layers=4, ranks=4, bytes_each=4)
of_the_rest = formulas.all_reduce_sent_bytes(4 * (2 * sbh + 3 * sbh / 128), ranks=4)
log.assert_volume(ops={"all_reduce": 18 + 3}, sent_bytes=of_blocks + of_the_rest)

# %% [markdown]
# A block has two all-reduces in forward and two in backward (Shoeybi et al. 2019, §3), so a rank sends 4 · 2f · sbh
# elements for it. The embedding adds one in forward, and the output layer one in backward. TP's traffic grows with the
# number of tokens. ZeRO-3's does not.
#
# In forward, the next layer needs each result immediately, so the all-reduces are exposed. In backward, there is
# something to do meanwhile: Megatron hides the all-reduce behind computing the gradients of weights
# (`tensor_parallel/layers.py`).

# %% [markdown]
# ## Sequence parallelism
#
# In chapter 06, we counted 16 sbh elements that a block keeps for backward. TP divides 12 of them by t. The other 4,
# the inputs and outputs of the two norms, are outside the pairs, so every rank keeps all of them. But norms treat each
# token separately. In **sequence parallelism** (SP), a rank computes whatever is outside the pairs only for its own s/t
# tokens. The diagram shows what replaces each all-reduce:

# %%
diagrams.sequence_parallel()

# %% [markdown]
# Before a pair, an all-gather gives each rank all tokens. After it, a reduce-scatter adds up the terms for each rank's
# own tokens. These are the two halves of an all-reduce. They are conjugate, too, so only the operators change:


# %%
# %%ranks
from torch.utils.checkpoint import checkpoint

from shared.c10d import all_gather_single, reduce_scatter_single


def gathered(x):  # (B, T/t, D) → (B, T, D)
    shard = x.transpose(0, 1).contiguous()
    whole = shard.new_empty(world_size * len(shard), *shard.shape[1:])
    all_gather_single(whole, shard)
    return whole.transpose(0, 1)


def scattered(x):  # terms (B, T, D) → sum (B, T/t, D)
    whole = x.transpose(0, 1).contiguous()
    shard = whole.new_empty(len(whole) // world_size, *whole.shape[1:])
    reduce_scatter_single(shard, whole)
    return shard.transpose(0, 1)


gather_tokens = operator(in_forward=gathered, in_backward=scattered)
scatter_tokens = operator(in_forward=scattered, in_backward=gathered)
column_from_tokens = partial(column_parallel, enter=gather_tokens)
row_to_tokens = partial(row_parallel, leave=scatter_tokens)
# This one gathers the tokens again in backward, instead of keeping them.
column_gathering_again = partial(checkpoint, column_from_tokens, use_reentrant=False)


# %% [markdown]
# **Predict.** In one process, a block of our GPT keeps 64 bytes per sbh, namely 16 elements of 4 bytes. How many bytes
# does a rank keep with TP, and how many with TP and SP, if t = 4?

# %%
my_tp_bytes, my_sp_bytes = None, None

# %%
# %%ranks
blocks = {  # and on how many of 256 tokens a rank computes outside the pairs
    "one process": (Block(config), 256),
    "TP": (SplitBlock(Block(config)), 256),
    "TP + SP": (SplitBlock(Block(config), column_from_tokens, row_to_tokens), 64),
    "gathered again": (SplitBlock(Block(config), column_gathering_again, row_to_tokens), 64),
}
kept = []
for name, (block, tokens) in blocks.items():
    x = torch.randn(1, tokens, config.width, requires_grad=True)
    with wire.ledger() as log:
        kept_bytes = memory.kept_for_backward(block, x)
    kept.append([name, f"{kept_bytes / (256 * config.width):.1f}", log.summary()])

# %%
kept = ranks.pull("kept")[0]
print(predicted((my_tp_bytes, my_sp_bytes), "{} and {} bytes", "\n"), end="")
tables.Table(["", "kept, bytes per sbh", "collectives of a block"], kept)

# %% tags=["claims"]
options = {"attention": "fused", "dropout": False, "bytes_each": 4}
for name, per_sbh, _ in kept:
    split, by_tokens = name != "one process", name in ("TP + SP", "gathered again")
    options |= {"tensor_ranks": 4 if split else 1, "sequence_parallel": by_tokens}
    formula = formulas.activation_bytes(256, 1, 128, 4, **options) / (256 * 128)
    assert abs(float(per_sbh) - (22 if name == "TP + SP" else formula)) < 0.3

# %% [markdown]
# With SP, a block sends the same bytes. It should keep 64/t = 16 bytes per sbh, instead of 16 + 48/t with TP
# (Korthikanti et al. 2022, §4, for a block like ours in fp32 and without dropout). But it keeps 22, because backward
# needs the *gathered* inputs of the two column-parallel layers, which are whole. Megatron keeps only the rank's own
# tokens of these inputs, and gathers them again in backward. The last row does that with `checkpoint` (chapter 06). So
# SP lets you choose: send what TP sends and keep 4 · (2 + 14/t) bytes, or send a quarter more and keep 1/t of
# everything.

# %% [markdown]
# SP has another price. A norm sees only the rank's own tokens, so the gradients of replicated parameters are terms of a
# sum. They have to be added up after backward.

# %% [markdown]
# ## A matmul in ring steps
#
# An all-gather can even hide behind the matmul that needs its result, because the matmul does not need all tokens at
# once. In a ring (chapter 01), one chunk arrives in each step. While a rank passes a chunk on, it can multiply it:


# %%
# %%ranks
from solutions.async_collectives import InFlight, launch_all_gather

layer = nn.Sequential()
layer.multiply = nn.Linear(1024, 64, bias=False)
stand_in_for_gpu(layer, forward_ms=24)
own_tokens = torch.randn(512, 1024)


def gather_then_multiply(chunk=own_tokens):
    whole = chunk.new_empty(world_size * chunk.numel())
    launch_all_gather(whole, chunk.flatten()).wait()
    return torch.cat([layer(each.view_as(chunk)) for each in whole.chunk(world_size)])


def multiply_in_ring_steps(chunk=own_tokens):
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    results = [None] * world_size
    for number in range(world_size):
        following, more = torch.empty_like(chunk), number < world_size - 1
        # A rank passes on every chunk except the last one.
        in_flight = InFlight([(chunk, right)] * more, [(following, left)] * more, None)
        results[(rank - number) % world_size] = layer(chunk)
        in_flight.wait()
        chunk = following
    return torch.cat(results)


# %% tags=["claims"]
# %%ranks
with torch.no_grad():
    assert torch.allclose(gather_then_multiply(), multiply_in_ring_steps(), atol=1e-4)

# %% [markdown]
# The ranks share this machine's cores, so the layer imitates a GPU by sleeping for 24 ms per chunk. A chunk has 2.1 MB,
# which take 16.8 ms on this link.
#
# **Predict.** How many milliseconds do the ring steps save in total? 0 would mean that no transfer is hidden.

# %%
my_prediction_ms = None

# %%
# %%ranks
ways = {"before": gather_then_multiply, "after": multiply_in_ring_steps}
with torch.no_grad():
    lines = measure.recorded(ways, partial(timeline.record, layer), rounds=8)

# %% tags=["nbval-ignore-output"]
before, after = (of_ranks[0] for of_ranks in ranks.pull("lines")[0].values())
before_ms, after_ms = (1e3 * (line.ended_s - line.began_s) for line in (before, after))
print(f"{predicted(my_prediction_ms, '{} ms')}measured {before_ms - after_ms:.0f} ms")
measure.expect(before_ms > 1.15 * after_ms, "multiplying in ring steps is faster")
# Draw the six messages of the all-gather as one bar, and the two of each ring step, too.
lines = [bundled(before, 6, ["all-gather"]), bundled(after, 2, ["1", "2", "3"], most_s=16.8e-3)]
plots.timeline(lines, ["gather, then multiply", "in ring steps"])

# %% [markdown]
# Each transfer hides behind a multiplication. The link needs 3 · 16.8 = 50 ms for three chunks, so you save about that.
# Only launching the messages remains exposed. (A rank notices the end of a transfer only when it waits, so the bars 1
# to 3 show at most the 16.8 ms that the link needs.)
#
# The reduce-scatter after a pair can be cut in the same way. On GPUs, such steps are called asynchronous TP, and gain
# less: NVLink leaves less to hide, and cutting a matmul into pieces makes it less efficient. On 256 H100, torchtitan
# trained Llama 3 70B 9% faster with it in bf16, and 4% or 16% with two kinds of float8
# (`benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md`).

# %% [markdown]
# ## Tensor parallelism, ZeRO-3, or both?
#
# Both leave a rank about 1/t of the model state. They differ in three ways:
#
# - **Activations.** ZeRO-3 needs a sequence per rank. TP can run with a single one.
# - **Bytes.** For a block, ZeRO-3 sends 3f · 12h² elements, however many tokens there are. TP sends 8f · sbh. The two
#   are equal if sb = 4.5h, which is 576 tokens in our GPT.
# - **Overlap.** ZeRO-3 prefetches. TP's collectives are mostly exposed, unless you cut its matmuls into steps.
#
# On a mesh (chapter 11), you can use both: TP splits the layers along one dimension, and ZeRO-3 shards the result along
# the other.
#
# How large can t be? The figure shows the time of one layer of Llama-2 70B, forward and backward, for one sequence of
# 4,096 tokens on H100s that reach half of their peak. The 16 GPUs are on two hosts, each with one adapter of 400
# Gbit/s. Which t is the fastest?

# %%
layers.layer_figure("Llama-2 70B")

# %% [markdown]
# Sixteen GPUs are slower than eight. Why? A layer has about 12h² parameters, and each costs 6 FLOPs per token in
# forward and backward. (The scores of attention would add less than 10%.) So a rank computes 72 sbh²/t FLOPs, at C
# FLOP/s. It sends 8f · sbh elements of 2 bytes, at W bytes per second, the bus bandwidth. The two times have the ratio
#
# $$\frac{\text{all-reduces}}{\text{computing}} = \frac{2}{9} \, (t-1) \, \frac{C}{h W}$$
#
# The number of tokens cancels, so a larger batch does not help. With C = 494 TFLOP/s and h = 8,192, the all-reduces of
# eight GPUs add 25% over NVLink, where W is 370 GB/s. Those of sixteen add 430% over one adapter of 47 GB/s. (The bars
# include latency, and count parameters exactly.)
#
# A ring over two hosts is as slow as the adapter. With eight adapters per host, W would be the same as inside, and
# sixteen GPUs would be faster than eight. But as two replicas of eight, they would do more. **So TP usually stays
# inside a host, which often means t = 8.**
#
# ZeRO-3's communication overlaps. How does it compare with TP on eight GPUs?

# %%
layers.layer_table("Llama-2 70B")

# %% [markdown]
# With enough sequences, ZeRO-3 is faster, even between hosts. But there may be too few, as for Llama 3 405B: 16 million
# tokens per step are about 1,000 per GPU, an eighth of a sequence of 8,192. The run used TP with t = 8, and 16 pipeline
# stages (chapter 15). So memory, batch and links decide, and not the number of parameters alone:
#
# | your situation | use |
# |---|---|
# | each GPU gets a whole sequence, and its activations and an unsharded unit fit | ZeRO-3 |
# | something does not fit, or there are fewer sequences than GPUs, on one host | TP and SP |
# | the same, on several hosts | both: TP and SP inside each host, ZeRO across hosts |
#
# Our running example is Llama-2 70B on 4 hosts of 8 A100 with 80 GB each. With TP and SP inside each host, and 256
# sequences per step, the planner computes for each GPU, if matmuls reach 66% of its peak:

# %%
from shared.planner.layouts import Job, TrainingLayout, a100_hosts, memory, step_time
from shared.planner.shapes import SHAPES

job = Job(SHAPES["Llama-2 70B"], sequences=256)
for stage in (0, 1):  # 0 shards nothing
    layout = TrainingLayout(dp=4, pp=1, tp=8, zero_stage=stage)
    plan, step = memory(job, layout), step_time(job, layout, a100_hosts(4))
    print(f"ZeRO-{stage}: {plan.total_bytes / 1e9:.0f} GB, {step.total_s:.0f} s per step")

# %% tags=["claims"]
assert plan.total_bytes < 80e9

# %% [markdown]
# TP 8 alone needs 149 GB, of which 138 are model state. It fits only if the four hosts shard the optimizer's state,
# too, as ZeRO-1 does. That costs no time, because ZeRO-1 sends what an all-reduce sends (chapter 07). ZeRO-3 would
# leave 35 GB of state and room for more activations, but send more.

# %% [markdown]
# ## The production version
#
# In torch, `parallelize_module` replaces the parameters of the layers in a plan with DTensors (chapter 10). Here is the
# plan for an MLP with SP:

# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor import parallel as styles

block, plan = Block(config), {"0": styles.SequenceParallel()}
plan["1"] = styles.ColwiseParallel(input_layouts=Shard(1))
plan["3"] = styles.RowwiseParallel(output_layouts=Shard(1))
mlp = nn.Sequential(block.norm_2, block.up, nn.GELU(), block.down)
styles.parallelize_module(mlp, init_device_mesh(device.type, (world_size,)), plan)
with wire.ledger() as log:
    mlp(torch.randn(1, 64, config.width, requires_grad=True)).sum().backward()
print(log.summary())
print("gradient of the norm:", mlp[0].weight.grad.placements)

# %% [markdown]
# These are our collectives: an all-gather and a reduce-scatter in each direction. The gradient of the norm is
# `Partial`: terms that DTensor adds up when the optimizer needs the sum.
#
# If no GPU can hold the whole model, build it on the meta device (chapter 10), and let each rank fill in its own parts.
# DTensors know which part they are, so DCP (chapter 12) can save a model that 8 ranks split, and load it on 4.
#
# | here | torch | Megatron-LM |
# |---|---|---|
# | `column_parallel` | `ColwiseParallel` | `ColumnParallelLinear` |
# | `row_parallel` | `RowwiseParallel` | `RowParallelLinear` |
# | embedding | `RowwiseParallel` | `VocabParallelEmbedding` |
# | `vocab_parallel_cross_entropy` | `loss_parallel` | `vocab_parallel_cross_entropy` |
# | SP | `SequenceParallel` | `--sequence-parallel` |
# | gathering again in backward | no | always, with SP |
# | ring steps | with `torch.compile` | `--tp-comm-overlap` |

# %% [markdown]
# ## Recap
#
# All figures are for one block, which has ψ parameters in fp32, with AdamW. Unless the table says otherwise, the unit
# is sbh elements.
#
# | | model state, bytes | activations | wire: sent per step | overlap |
# |---|---|---|---|---|
# | ZeRO-3 | 16ψ/t, plus units | 16, of own sequences | 3fψ elements | prefetching |
# | TP | 16ψ/t † | 4 + 12/t | 8f | in backward: gradients of weights |
# | TP + SP | 16ψ/t † | 2 + 14/t | 8f | ring steps |
# | … gathered again | 16ψ/t † | 16/t | 10f | ring steps |
#
# † Plus replicated parameters.
#
# **Terms**
#
# - **tensor parallelism** (TP): several ranks compute each layer together, on the same samples.
# - **column-parallel**: a linear layer of which each rank computes some of the outputs.
# - **row-parallel**: a linear layer of which each rank has some of the inputs. The ranks' results are added up.
# - **conjugate operators**: two operators, each of which does in backward what the other one does in forward.
# - **replicated**: kept and updated by every rank of a group, with the same values.
# - **sequence parallelism** (SP): outside the split layers, each rank computes its own tokens only.
#
# ## Further reading
#
# - [On a real cluster](../docs/cluster.md): which ranks share layers, and which share a batch.
# - Shoeybi et al., [Megatron-LM](https://arxiv.org/abs/1909.08053), 2019, §3: the pairs, f and g, and the vocabulary.
# - Korthikanti et al., [Reducing Activation Recomputation](https://arxiv.org/abs/2205.05198), 2022, §4: what a layer
#   keeps.
# - PyTorch, [Tensor Parallelism](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html).

# %% [markdown]
# ## What is still wasted
#
# TP needs the fast links inside a host, and cannot split a head. In attention, every rank still has all tokens of a
# sequence. Chapter 14 splits those, too. And larger models need a split that sends less: chapter 15 gives each rank
# *whole layers*, so that only the activations between two layers are sent.
#
# In the lab, you build these layers for any group of ranks, and split a whole TinyGPT. You also split two layers of
# Llama: a gated MLP, and attention with fewer heads of keys and values than ranks.

# %%
ranks.stop()
