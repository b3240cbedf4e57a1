# ---
# jupyter:
#   course:
#     module: tensor_parallel
# ---

# %% [markdown]
# # 13 · Tensor parallelism
#
# **60–95 minutes.** After this lesson, you will be able to:
#
# - split the layers and the vocabulary of a GPT over several ranks,
# - predict what a step sends and what a rank keeps, with and without sequence parallelism,
# - hide a collective behind the matmul that needs its result,
# - recognize four mistakes that raise no error,
# - choose between tensor parallelism, ZeRO-3, and both.
#
# You need the two halves of an all-reduce (chapter 01), the activations of a block (chapter 06), `ZeRO3` (chapter 10)
# and device meshes (chapter 11). t is the number of ranks that share a layer, and f = (t−1)/t. s, b and h are sequence
# length, batch size and width.

# %% [markdown]
# ## Where we are
#
# Llama 3 405B was trained on 16,384 GPUs, with about 2,000 sequences per step (Grattafiori et al. 2024, table 4).
# ZeRO-3 shards the model, but each rank still computes whole layers, on sequences of its own. With ZeRO-3 alone, seven
# of every eight GPUs would have had nothing to do.
#
# So Meta let groups of eight GPUs compute each layer *together*. You do the same in this chapter, and find out what it
# costs. Each of your four ranks is behind a link of 1 Gbit/s:

# %% tags=["nbval-ignore-output"]
import math

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
from solutions.zero3 import ZeRO3

text = CharTokens()
config = GPTConfig(vocab_size=128, context=256, layers=4, width=128)


def costs(model, batch):
    return measure.costs(model, torch.optim.AdamW(model.parameters(), lr=1e-3), *batch)


# %% [markdown]
# ## What is wasted
#
# The next cells train a GPT with ZeRO-3 on two ranks and on four, with one sequence of 256 tokens per rank. The figure
# shows what a rank holds at the peak of a step. Which components become smaller with more ranks?


# %%
# %%ranks
def zero3(gpt, group=None):
    return ZeRO3(gpt, gpt.blocks, group=group)


# %% tags=["nbval-ignore-output"]
held = {}
for size in (2, 4):
    with ranks.world(size):
        peaks = ranks.run(
            lambda: costs(zero3(TinyGPT(config)), text.windows([1000 * rank], 256)).peak
        )
        held[f"{size} ranks"] = peaks[0].held.by_component()
totals = [sum(parts.values()) for parts in held.values()]
print(f"With four ranks, the peak is {totals[1] / totals[0]:.0%} of that with two.")
assert 0.8 < totals[1] / totals[0] < 0.9
plots.memory_by_component(held)

# %% [markdown]
# Twice as many ranks halve the shards, but the peak falls by only 15%. A rank still unshards whole units (shown as
# *parameters*, their gradients as *buckets*), and keeps the activations of a whole sequence.
#
# So there are three reasons to split the layers themselves: a unit is too large for a GPU, or the activations of a
# sequence are, or there are fewer sequences than GPUs. In **tensor parallelism** (TP), t ranks compute each layer
# together, on the *same* sequences.

# %% [markdown]
# ## Two ways to split a matrix
#
# A linear layer multiplies its input by a matrix: y = xA. torch stores the transpose, so a column of A is a row of
# `weight`. In the diagram, look at what each rank needs, and at what it computes:

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
# term: nothing to send. But x was used by all ranks, each for its own columns. So each has only a term of x's gradient,
# and an all-reduce adds the terms up.
#
# So a pair lies between two **conjugate operators**: each does in backward what the other one does in forward (Shoeybi
# et al. 2019, §3).

# %%
diagrams.conjugate_operators()

# %% [markdown]
# In code, we build each autograd Function from one function per direction:


# %%
# %%ranks
def identity(x, group):
    return x.view_as(x)


def summed(x, group):
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def operator(in_forward, in_backward):
    """Build a function of a tensor and a group from what it does in forward and in backward."""

    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return in_forward(x, group)

        @staticmethod
        def backward(ctx, gradient):
            return in_backward(gradient, ctx.group), None

    return Operator.apply


copy_to_ranks = operator(in_forward=identity, in_backward=summed)
sum_over_ranks = operator(in_forward=summed, in_backward=identity)


def column_parallel(x, weight, group, enter=copy_to_ranks):  # weight (out/t, in)
    return linear(enter(x, group), weight)


def row_parallel(x, weight, group, leave=sum_over_ranks):  # weight (out, in/t)
    return leave(linear(x, weight), group)


# %% [markdown]
# ## Splitting attention by heads
#
# Heads are independent, so each rank computes H/t of the H heads. `query_key_value` is column-parallel: a rank has the
# columns of its own heads. `project` is row-parallel. In the diagram, look at which columns a rank has:

# %%
diagrams.split_heads()

# %% [markdown]
# A rank's columns are not contiguous: it needs a block of the queries, one of the keys and one of the values.
#
# The ranks' heads are not concatenated, but added up, after the projection. One process does concatenate its heads, but
# multiplying them by `project` is a sum, too: m₀P₀ + m₁P₁ + m₂P₂ + m₃P₃, where mᵢ is what head i returns, and Pᵢ its
# rows of the projection.


# %%
# %%ranks
# In shapes, B is the batch size b, T the sequence length s, D the width h, and H the number of heads.
def own(tensor, dim, group=None):
    """Return this rank's part of a tensor that is split along a dimension, as a parameter."""
    parts = tensor.detach().chunk(dist.get_world_size(group), dim)
    return nn.Parameter(parts[dist.get_rank(group)].clone())


class SplitBlock(nn.Module):
    """A block of which each rank computes H/t heads, and 1/t of the inner elements of the MLP."""

    def __init__(self, block, group, linears):
        super().__init__()
        self.group, (self.column, self.row) = group, linears
        self.norm_1, self.norm_2 = block.norm_1, block.norm_2
        by_head = block.attention.query_key_value.weight.unflatten(
            0, (3, block.attention.heads, -1)
        )
        self.query_key_value = own(by_head, 1, group)  # (3, H/t, D/H, D)
        self.project = own(block.attention.project.weight, 1, group)  # (D, D/t)
        self.up = own(block.up.weight, 0, group)  # (4D/t, D)
        self.down = own(block.down.weight, 1, group)  # (D, 4D/t)

    def attend(self, x):
        split = self.column(x, self.query_key_value.flatten(0, 2), self.group)
        split = split.unflatten(-1, self.query_key_value.shape[:3])  # (B, T, 3, H/t, D/H)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.row(mixed.transpose(1, 2).flatten(2), self.project, self.group)

    def feed_forward(self, x):
        inner = gelu(self.column(x, self.up, self.group))
        return self.row(inner, self.down, self.group)

    def forward(self, x):
        x = x + self.attend(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


# %% [markdown]
# ## Splitting the vocabulary
#
# Eight ranks split a block of Llama 3 405B into shards of 0.4 billion parameters. Next to that, its token embedding is
# huge: 128,000 tokens times a width of 16,384 are 2.1 billion parameters, more than five such shards (Grattafiori et
# al. 2024, table 3). So the vocabulary has to be split, too. Of the embedding's rows, one for each of V tokens, a rank
# keeps V/t. In our GPT, the embedding is also the weight of the output layer.
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
def is_own(tokens, size, group):  # returns (B, T, size)
    first = size * dist.get_rank(group)
    return tokens[..., None] == torch.arange(first, first + size)


def vocab_parallel_cross_entropy(logits_shard, targets, group=None):  # logits_shard (B, T, V/t)
    largest = logits_shard.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    shifted = logits_shard - largest[..., None]
    total = sum_over_ranks(shifted.exp().sum(-1), group)
    is_target = is_own(targets, logits_shard.shape[-1], group)
    of_target = sum_over_ranks(shifted.where(is_target, 0).sum(-1), group)
    return (total.log() - of_target).mean()


# %% [markdown]
# ## The short version
#
# Now we can split a whole GPT. Our text has 94 different characters, which four ranks cannot divide evenly. So we pad
# the vocabulary to 128.


# %%
# %%ranks
class SplitGPT(nn.Module):
    """A TinyGPT that the ranks of a group compute together."""

    def __init__(self, gpt, group=None, linears=(column_parallel, row_parallel)):
        super().__init__()
        self.group, (self.column, self.row) = group, linears
        self.token_embedding = own(gpt.token_embedding.weight, 0, group)  # (V/t, D)
        self.position_embedding, self.norm = gpt.position_embedding, gpt.norm
        self.blocks = nn.ModuleList(SplitBlock(block, group, linears) for block in gpt.blocks)

    def forward(self, tokens, targets):
        # The product shows that the embedding is row-parallel. Lab 13 looks up the rows instead.
        one_hot = is_own(tokens, len(self.token_embedding), self.group).type_as(
            self.token_embedding
        )
        x = self.row(one_hot, self.token_embedding.T, self.group) + self.positions(tokens)
        for block in self.blocks:
            x = block(x)
        logits_shard = self.column(self.norm(x), self.token_embedding, self.group)
        return vocab_parallel_cross_entropy(logits_shard, targets, self.group)

    def positions(self, tokens):
        return self.position_embedding.weight[: tokens.shape[1]]


# %% [markdown]
# Does it train? We train a small GPT in one process, and split over four ranks, in float64. All ranks get the same
# batch:

# %%
# %%ranks --timeout 180
small = GPTConfig(vocab_size=128)


def losses_of(model, steps=180):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    starts = [(1000 * number, 1000 * number + 500) for number in range(steps)]
    return [measure.train_step(model, optimizer, *text.windows(each, 64)) for each in starts]


curves = {"one process": losses_of(TinyGPT(small).double())}
curves["split"] = losses_of(SplitGPT(TinyGPT(small).double()))

# %%
in_one_process, in_parts = ranks.pull("curves")[0].values()
print(f"losses: {in_parts[0]:.4f} in the first step, {in_parts[-1]:.4f} in the last one")
assert all(map(math.isclose, in_one_process, in_parts))

# %% [markdown]
# The losses agree to nine digits in every step. The norms and the position embedding are **replicated**: every rank
# keeps and updates all of them. Their gradients need no communication, because all ranks compute the same tensors
# outside the pairs, in forward and backward.
#
# Outside the pairs, all ranks must draw the same dropout mask, but inside, each rank needs a mask of its own. So
# Megatron has a second random number generator for the pairs, whose seed depends on the rank
# (`megatron/core/tensor_parallel/random.py`). With sequence parallelism, below, each rank has other tokens outside the
# pairs, so it draws its own mask there, too.

# %% [markdown]
# ## What a step sends
#
# **Predict.** Our GPT has four blocks, an embedding and an output layer. How many all-reduces of a whole tensor of
# activations (s × b × h) does a step have, in forward and backward together?

# %%
my_prediction = None


# %%
# %%ranks
log = costs(SplitGPT(TinyGPT(config)), text.windows([0, 1000], 256)).log

# %%
log, sbh = ranks.pull("log")[0], 256 * 2 * 128
whole = [entry.in_backward for entry in log.entries if entry.elements == sbh]
print(f"{predicted(my_prediction)}measured {len(whole)}, of which {sum(whole)} are in backward")
of_blocks = formulas.tensor_parallel_sent_bytes(256 * 2, 128, layers=4, ranks=4, bytes_each=4)
of_the_rest = formulas.all_reduce_sent_bytes(4 * (2 * sbh + 3 * sbh / 128), ranks=4)
log.assert_volume(ops={"all_reduce": 18 + 3}, sent_bytes=of_blocks + of_the_rest)

# %% [markdown]
# A block has two all-reduces in forward and two in backward (Shoeybi et al. 2019, §3), so a rank sends 4 · 2f · sbh
# elements for it. The embedding adds one in forward, and the output layer one in backward. The loss has three smaller
# ones.
#
# The next layer needs each result immediately, so these all-reduces are exposed. In backward, there is something to do
# meanwhile: Megatron hides the all-reduce behind computing the gradients of weights (`tensor_parallel/layers.py`).
#
# TP's traffic grows with the number of tokens. ZeRO-3's does not.

# %% [markdown]
# ## Sequence parallelism
#
# In chapter 06, we counted 16 sbh elements that a block keeps for backward. TP divides 12 of them by t. The other 4,
# the inputs and outputs of the two norms, are outside the pairs, so every rank keeps all of them. But norms and dropout
# treat each token separately. In **sequence parallelism** (SP), a rank computes whatever is outside the pairs only for
# its own s/t tokens. The diagram shows what replaces each all-reduce:

# %%
diagrams.sequence_parallel()

# %% [markdown]
# Before a pair, an all-gather gives each rank all tokens. After it, a reduce-scatter adds up the terms for each rank's
# own tokens. These are the two halves of an all-reduce. They are conjugate, too, so only the operators change:


# %%
# %%ranks
from torch.utils.checkpoint import checkpoint

from shared.c10d import all_gather_single, reduce_scatter_single


def gathered(x, group):  # (B, T/t, D) → (B, T, D)
    shard = x.transpose(0, 1).contiguous()
    whole = shard.new_empty(dist.get_world_size(group) * len(shard), *shard.shape[1:])
    all_gather_single(whole, shard, group=group)
    return whole.transpose(0, 1)


def scattered(x, group):  # terms (B, T, D) → sum (B, T/t, D)
    whole = x.transpose(0, 1).contiguous()
    shard = whole.new_empty(len(whole) // dist.get_world_size(group), *whole.shape[1:])
    reduce_scatter_single(shard, whole, group=group)
    return shard.transpose(0, 1)


gather_tokens = operator(in_forward=gathered, in_backward=scattered)
scatter_tokens = operator(in_forward=scattered, in_backward=gathered)
column_from_tokens = partial(column_parallel, enter=gather_tokens)
row_to_tokens = partial(row_parallel, leave=scatter_tokens)
# This one gathers the tokens again in backward, instead of keeping them.
column_gathering_again = partial(checkpoint, column_from_tokens, use_reentrant=False)


# %% [markdown]
# **Predict.** In one process, a block of our GPT keeps 64 bytes per sbh. How many does a rank keep with TP, and how
# many with TP and SP, if t = 4? And how many bytes does a block send with SP, as a multiple of those with TP alone?

# %%
my_tp_bytes, my_sp_bytes, my_ratio = None, None, None

# %%
# %%ranks
linears = {
    "TP": (column_parallel, row_parallel),
    "TP + SP": (column_from_tokens, row_to_tokens),
    "TP + SP, gathered again": (column_gathering_again, row_to_tokens),
}


blocks = {"one process": Block(config)}
blocks |= {name: SplitBlock(Block(config), None, pair) for name, pair in linears.items()}
kept = {}
for name, block in blocks.items():
    x = torch.randn(1, 64 if "SP" in name else 256, config.width, requires_grad=True)
    with wire.ledger() as log:
        kept[name] = memory.kept_for_backward(block, x) / (256 * config.width), log

# %%
kept, rows = ranks.pull("kept")[0], []
options = {"attention": "fused", "dropout": False, "bytes_each": 4}
for name, (per_sbh, log) in kept.items():
    options |= {"tensor_ranks": 4 if "TP" in name else 1, "sequence_parallel": "SP" in name}
    formula = formulas.activation_bytes(256, 1, 128, 4, **options) / (256 * 128)
    rows.append([name, f"{per_sbh:.1f}", f"{formula:g}", log.summary()])
    assert abs(per_sbh - (22 if name == "TP + SP" else formula)) < 0.3
print(predicted((my_tp_bytes, my_sp_bytes), "{} and {} bytes", "\n"), end="")
print(predicted(my_ratio, "{} times as many sent", "\n"), end="")
_, *sent = [log.sent_bytes for _, log in kept.values()]
assert sent[0] == sent[1] == 0.8 * sent[2]
tables.Table(["", "kept, bytes per sbh", "formula", "collectives of a block"], rows)

# %% [markdown]
# The formulas are those of Korthikanti et al. (2022, §4) for our block, which has fused attention, fp32 and no dropout:
# 16 + 48/t with TP, and 64/t with SP. In 16 bits and with dropout, they are 10 + 24/t and 34/t.
#
# With SP, a block sends the same bytes. But it keeps 22 bytes per sbh instead of 16, because backward needs the
# *gathered* inputs of the two column-parallel layers. These are whole, so the total is 4 · (2 + 14/t) bytes. Megatron
# keeps only the rank's own tokens of these inputs, and gathers them again in backward. The last row does that with
# `checkpoint` (chapter 06). It reaches the formula, with two more all-gathers. SP lets you choose: send what TP sends
# and keep the gathered inputs, or send a quarter more and keep 1/t of everything.

# %% [markdown]
# SP has another price. A norm sees only the rank's own tokens, so the gradients of replicated parameters are terms of a
# sum. They have to be added up after backward. Compare the ranks:


# %%
# %%ranks
class SequenceParallelGPT(SplitGPT):
    def positions(self, tokens):  # of the rank's own tokens
        parts = super().positions(tokens).chunk(dist.get_world_size(self.group))
        return parts[dist.get_rank(self.group)]

    def finish_gradient_sync(self):
        for name, parameter in self.named_parameters():
            if "norm" in name or "position" in name:
                dist.all_reduce(parameter.grad, group=self.group)


models = {"one process": TinyGPT(small).double(), "TP": SplitGPT(TinyGPT(small).double())}
models["TP + SP"] = SequenceParallelGPT(TinyGPT(small).double(), None, linears["TP + SP"])
batch, gradients = text.windows([0, 500], 64), {}
for name, model in models.items():
    model(*batch).backward()
    gradients[name] = model.norm.weight.grad[0].item()
model.finish_gradient_sync()
gradients["TP + SP, added up"] = model.norm.weight.grad[0].item()

# %%
gradients = ranks.pull("gradients")
rows = [[name, *(f"{1e3 * of[name]:.3f}" for of in gradients)] for name in gradients[0]]
assert len(set(rows[0][1:] + rows[1][1:] + rows[3][1:])) == 1 and len(set(rows[2][1:])) == 4
tables.Table(["1000 × one element of the gradient", *(f"rank {index}" for index in range(4))], rows)

# %% [markdown]
# ## A matmul in ring steps
#
# An all-gather can even hide behind the matmul that needs its result, because a matmul does not need all tokens at
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


ways = {"before": gather_then_multiply, "after": multiply_in_ring_steps}
with torch.no_grad():
    assert torch.allclose(*[way() for way in ways.values()], atol=1e-4)

# %% [markdown]
# The ranks share this machine's cores, so the layer imitates a GPU by sleeping for 24 ms per chunk. A chunk has 2.1 MB,
# which take 16.8 ms on this link.
#
# **Predict.** How many milliseconds do the ring steps save in total? 0 would mean that no transfer is hidden.

# %%
my_prediction_ms = None

# %%
# %%ranks
with torch.no_grad():
    lines = measure.recorded(ways, partial(timeline.record, layer), rounds=8)

# %% tags=["nbval-ignore-output"]
lines = [of_ranks[0] for of_ranks in ranks.pull("lines")[0].values()]
before_ms, after_ms = (1e3 * (line.ended_s - line.began_s) for line in lines)
print(f"{predicted(my_prediction_ms, '{} ms')}measured {before_ms - after_ms:.0f} ms")
measure.expect(before_ms > 1.15 * after_ms, "multiplying in ring steps is faster")
# Draw the six messages of the all-gather as one bar, and the two of each ring step, too. A rank notices the end of a
# ring step's transfer only when it waits, so its bar shows how long the link needs.
steps = bundled(lines[1], 2, ["1", "2", "3"], most_s=16.8e-3)
lines = [bundled(lines[0], 6, ["all-gather"]), steps]
plots.timeline(lines, ["gather, then multiply", "in ring steps"])

# %% [markdown]
# Each transfer hides behind a multiplication. The link needs 3 · 16.8 = 50 ms for three chunks, so you save about that.
# Often it is a little more, because the upper row also exposes what comes on top of the link's 50 ms: the rank launches
# six messages before it begins to wait, and has to wake up at their end. On busy cores, it can be less.
#
# A rank notices the end of a transfer only when it waits. So the bars 1 to 3 show at most the 16.8 ms
# that the link needs.
#
# The reduce-scatter after a pair can be cut in the same way. On GPUs, this is called asynchronous TP, and gains less:
# NVLink leaves little to hide, and cutting a matmul into pieces makes it less efficient. torchtitan measured 5.7% for
# Llama 3.1 70B on 256 H100 (`benchmarks/llama3_h100_202412_torchtitan.md`, table 4).

# %% [markdown]
# ## Tensor parallelism, ZeRO-3, or both?
#
# The next cells train our GPT on four ranks in four ways. *Both* uses a mesh of 2 × 2 ranks: TP splits the layers along
# one dimension, and ZeRO-3 shards the result along the other, here without SP. A step has one, two or four sequences
# for all ranks together. Compare the peaks, and the bytes sent:


# %%
# %%ranks --timeout 180
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
ways = {  # how to build the model, and which part of the batch this rank gets, of how many
    "ZeRO-3": (lambda: zero3(TinyGPT(config)), rank, 4),
    "TP": (lambda: SplitGPT(TinyGPT(config)), 0, 1),
    "TP + SP": (lambda: SequenceParallelGPT(TinyGPT(config), None, linears["TP + SP"]), 0, 1),
    "both, 2 × 2": (lambda: zero3(SplitGPT(TinyGPT(config), tp), dp), dist.get_rank(dp), 2),
}
by_way = {}
for name, (build, index, parts) in ways.items():
    for count in {"ZeRO-3": (4,), "both, 2 × 2": (2, 4)}.get(name, (1, 4)):
        starts = range(1000 * index, 1000 * count, 1000 * parts)
        of_step = costs(build(), text.windows(starts, 256))
        figures = (of_step.held.total_bytes, of_step.peak.peak_bytes, of_step.log.sent_bytes)
        by_way[count, name] = [nbytes / 1e6 for nbytes in figures]

# %% tags=["nbval-ignore-output"]
by_way = ranks.pull("by_way")[0]
assert by_way[1, "TP"][2] < by_way[4, "ZeRO-3"][2] < by_way[4, "TP"][2]
rows = [[*map(str, way), *(f"{mb:.1f}" for mb in by_way[way])] for way in sorted(by_way)]
tables.Table(
    ["sequences, all ranks", "", "held between steps", "peak", "sent"], rows, "MB per rank"
)

# %% [markdown]
# All four hold about a quarter of the model state, but they differ in three ways:
#
# - **Activations.** ZeRO-3 needs four sequences, one per rank. TP can run with one, and then its peak is half of
#   ZeRO-3's with four. With four, TP keeps parts of all of them, which is more than ZeRO-3 keeps. *Both* can run with
#   two; with four, it has no advantage.
# - **Bytes.** For a block, ZeRO-3 sends 3f · 12h² elements, however many tokens there are. TP sends 8f · sbh. They are
#   equal if sb = 4.5h, which is 576 tokens here. One sequence has 256, and four have 1,024.
# - **Overlap.** ZeRO-3 prefetches. TP's collectives are mostly exposed, unless you cut its matmuls into steps.
#
# How large can t be? The next cell computes the time of one layer of Llama-2 70B, forward and backward, for one
# sequence of 4,096 tokens on H100s that reach half of their peak. The 16 GPUs are on two hosts, each with one adapter
# of 400 Gbit/s. Which t is the fastest?

# %%
layers.layer_figure("Llama-2 70B")

# %% [markdown]
# Sixteen GPUs are slower than eight. A formula tells why. A layer has 12h² parameters, and each costs 6 FLOPs per token
# in forward and backward. So a rank computes 72 sbh²/t FLOPs, at C FLOP/s. It sends 8f · sbh elements of 2 bytes, at W
# bytes per second, the bus bandwidth. The two times have the ratio
#
# $$\frac{\text{all-reduces}}{\text{computing}} = \frac{2}{9} \, (t-1) \, \frac{C}{h W}$$
#
# The ratio grows with t and shrinks with h. The number of tokens cancels, so a larger batch does not help. With C = 494
# TFLOP/s, h = 8,192 and t = 8, the all-reduces add 25% over NVLink, where W is 370 GB/s, and 200% over one adapter of
# 47 GB/s. The bar for t = 8 shows a little more, because it includes latency.
#
# A ring over two hosts is as slow as the adapter. Adding up inside each host first would halve the bytes between the
# hosts. With that, sixteen GPUs would take about 10 ms, which is still more than eight need.
#
# With eight adapters per host, W would be the same as inside, and sixteen GPUs would be faster than eight. But they
# would wait for all-reduces for about two fifths of the time, and as two replicas of eight they would do more. **So TP
# usually stays inside a host, which often means t = 8.**
#
# ZeRO-3's communication overlaps. The next cell compares it with TP on eight GPUs:

# %%
layers.layer_table("Llama-2 70B")

# %% [markdown]
# With enough sequences, ZeRO-3 is faster, even between hosts.
#
# But there may be too few sequences, as for Llama 3 405B: 16 million tokens per step are about 1,000 per GPU, an eighth
# of a sequence of 8,192. So GPUs shared sequences. The run used TP with t = 8, and 16 pipeline stages (chapter 15).
#
# What decides is not the number of parameters alone, but memory, batch and links:
#
# | your situation | use |
# |---|---|
# | each GPU gets a whole sequence, and its activations and an unsharded unit fit | ZeRO-3 |
# | something does not fit, or there are fewer sequences than GPUs, on one host | TP and SP |
# | the same, on several hosts | both: TP and SP inside each host, ZeRO-3 across hosts |
#
# Our running example is Llama-2 70B on 4 hosts of 8 A100 with 80 GB each. With TP and SP inside each host, and 256
# sequences per step, the planner computes:

# %%
from shared.planner.layouts import Job, TrainingLayout, a100_hosts, memory, step_time
from shared.planner.shapes import SHAPES

job = Job(SHAPES["Llama-2 70B"], sequences=256)
for stage in (0, 1):
    layout = TrainingLayout(dp=4, pp=1, tp=8, zero_stage=stage)
    plan, step = memory(job, layout), step_time(job, layout, a100_hosts(4))
    state_gb = (plan.parameters + plan.gradients + plan.optimizer) / 1e9
    print(f"ZeRO stage {stage}: {state_gb:.0f} GB of state, ", end="")
    print(f"{plan.activations / 1e9:.1f} GB of activations, {step.total_s:.0f} s per step")
    assert (plan.total_bytes < 80e9) == (stage == 1)

# %% [markdown]
# TP 8 alone leaves 138 GB of state on each GPU. It fits only if the four hosts shard the optimizer's state, too. ZeRO-1
# does that, and here it is enough. ZeRO-3 would leave 35 GB of state and room for more activations, but send more.

# %% [markdown]
# ## Four mistakes that raise no error
#
# The next cell makes three mistakes. The first two were found in real code in 2026: in Megatron's `GPTModel`, which
# could gather its logits and still pass them to the loss of split ones (Megatron-LM issue 7452), and in NeMo-RL's
# `get_grad_norm` (pull request 3788).
#
# 1. Logits that were already gathered are passed to `vocab_parallel_cross_entropy`.
# 2. For the gradient norm, the squares of *all* gradients are all-reduced, although every rank has those of the
#    replicated parameters.
# 3. In a row-parallel layer, every rank adds the bias before the sum.


# %%
# %%ranks
def squares(model):
    return sum(p.grad.square().sum() for p in model.parameters())


torch.manual_seed(0)
layer, x = nn.Linear(64, 64), torch.randn(1, 64)
terms = linear(x.chunk(4, dim=1)[rank], own(layer.weight, 1), layer.bias)
added = sum_over_ranks(terms, None) - linear(x, layer.weight)
whole, split, _ = models.values()
broken = {
    "loss": (whole(*batch), vocab_parallel_cross_entropy(whole(batch[0]), batch[1])),
    "gradient norm": (squares(whole).sqrt(), summed(squares(split), None).sqrt()),
    "an element of the bias": (layer.bias[0], added[0, 0]),
}
broken = {name: [value.item() for value in pair] for name, pair in broken.items()}

# %%
broken = ranks.pull("broken")[0]
loss, norm, bias = broken.values()
assert math.isclose(loss[1] - loss[0], math.log(4)) and norm[1] > 1.05 * norm[0]
assert math.isclose(bias[1], 4 * bias[0], rel_tol=1e-3)
rows = [[name, *(f"{value:.3f}" for value in pair)] for name, pair in broken.items()]
tables.Table(["", "right", "broken"], rows)

# %% [markdown]
# The loss is too large by log t, because each exp(logit) counts t times. With a norm that is too large, gradients are
# clipped too much. The bias is added t times.
#
# The fourth mistake is to forget an all-reduce in backward, here the one before each MLP:


# %%
# %%ranks --timeout 180
class Forgetful(SplitBlock):
    def feed_forward(self, x):
        return self.row(gelu(linear(x, self.up)), self.down, self.group)


gpt = TinyGPT(small).double()
forgetful = SplitGPT(gpt)
forgetful.blocks = nn.ModuleList(Forgetful(block, None, linears["TP"]) for block in gpt.blocks)
curves["forgot an all-reduce"] = losses_of(forgetful)

# %%
right, _, wrong = ranks.pull("curves")[0].values()
early, late = (sum(wrong[part]) / sum(right[part]) - 1 for part in (slice(60), slice(150, 180)))
print(f"The loss is {early:.1%} higher in the first 60 steps, and {late:.1%} after step 150.")
assert abs(early) < 0.01 and late > 0.05
plots.loss_ratio({"forgot an all-reduce": wrong}, right)

# %% [markdown]
# The first loss is right, because forward is, and for 60 steps, the ratio stays near 1. But the gradients that leave
# the MLPs are only terms, different on each rank, so the replicated parameters drift apart. To find this early, compare
# *gradients* with one process, and replicated parameters between ranks.

# %% [markdown]
# ## The production version
#
# In torch, `parallelize_module` replaces the parameters of the layers in a plan with DTensors (chapter 10). The next
# cell does this to an MLP, and compares its collectives with ours:

# %%
# %%ranks
from torch.distributed.tensor import Shard
from torch.distributed.tensor import parallel as styles

plans = {"TP": {"1": styles.ColwiseParallel(), "3": styles.RowwiseParallel()}}
plans["TP + SP"] = {
    "0": styles.SequenceParallel(),
    "1": styles.ColwiseParallel(input_layouts=Shard(1)),
    "3": styles.RowwiseParallel(output_layouts=Shard(1)),
}


def collectives_of(mlp):
    with wire.ledger() as log:
        mlp(torch.randn(1, 64, config.width, requires_grad=True)).sum().backward()
    return [(entry.op, entry.in_backward, entry.elements) for entry in log.entries]


compared = {}
for name, plan in plans.items():
    block, ours = Block(config), SplitBlock(Block(config), None, linears[name])
    mlp = nn.Sequential(block.norm_2, block.up, nn.GELU(), block.down)
    styles.parallelize_module(mlp, init_device_mesh(device.type, (world_size,)), plan)
    of_ours = collectives_of(lambda x, ours=ours: ours.feed_forward(ours.norm_2(x)))
    compared[name] = of_ours, collectives_of(mlp)
norm_placements = str(mlp[0].weight.grad.placements)

# %%
for name, (ours, torchs) in ranks.pull("compared")[0].items():
    found = [f"{op} in {'backward' if late else 'forward'}" for op, late, _ in torchs]
    print(f"{name}:", ", ".join(found))
    assert ours == torchs
print("gradient of the norm with SP:", ranks.pull("norm_placements")[0])

# %% [markdown]
# They agree. With SP, torch's gradients of the norm are `Partial`: terms that are still to be added up. DTensor adds
# them up when the optimizer needs the sum.
#
# Our examples cut a whole model into parts. If no GPU can hold the whole model, build it on the meta device (chapter
# 10), and let each rank fill in its own parts. DTensors also know which part they are, so DCP (chapter 12) can save a
# model that 8 ranks split, and load it on 4.
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
# | TP | 16ψ/t † | 4 + 12/t | 8f | ring steps |
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
# - PyTorch, [Tensor Parallelism](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html): the parallel
#   styles.

# %% [markdown]
# ## What is still wasted
#
# TP needs the fast links inside a host, and cannot split a head. In attention, every rank still has all tokens of a
# sequence. Chapter 14 splits those, too. And larger models need a split that sends less: chapter 15 gives each rank
# *whole layers*, so that only the activations between two layers are sent.
#
# In the lab, you build these layers, and split a whole TinyGPT. You also split two layers of Llama: a gated MLP, and
# attention with fewer heads of keys and values than ranks.

# %%
ranks.stop()
