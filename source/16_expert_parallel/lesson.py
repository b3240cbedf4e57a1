# ---
# jupyter:
#   course:
#     module: expert_parallel
# ---

# %% [markdown]
# # 16 · Expert parallelism
#
# **40–60 minutes.** After this lesson, you will be able to:
#
# - say what a mixture of experts buys, and what it costs,
# - compute the bytes of its two all-to-alls, and measure them,
# - explain why one busy expert slows down every rank, and what a capacity trades for that,
# - say when computing can hide the all-to-alls, and whether a larger batch helps,
# - say over which ranks each gradient must be averaged.
#
# You need the all-to-all (chapter 01), data parallelism (chapter 02) and the MLP of a transformer block (chapter 13).

# %% [markdown]
# ## Where we are
#
# DeepSeek-V3 has 671 billion parameters. But a token meets only 37 billion of them (DeepSeek-AI 2024, §1), so a token
# costs as much as in a model of 37B. The other 634 billion belong to **experts** that this token did not need.
#
# Where are they? Not on the GPU that holds the token. Each of the model's 58 layers with experts has 256 of them, of
# 3 · 7,168 · 2,048 parameters each: together 11.3 billion, or 22.5 GB in 16 bits. Three such layers would nearly fill a
# GPU of 80 GB, without any gradients or optimizer state. So the experts are spread over many GPUs, and tokens visit
# them. For the first time in this course, the *data* decide which ranks talk to each other, and how much they say.
#
# **Predict.** You double the number of experts on the same GPUs. A token still meets 8 of them. What doubles?
#
# - A: the operations per token
# - B: the bytes that tokens send
# - C: the parameters on each GPU
# - D: all three

# %%
my_prediction = None  # "A", "B", "C" or "D"

# %% tags=["nbval-ignore-output"]
from shared import measure, ranks
from shared.plots import diagrams
from shared.plots import experts as expert_plots
from shared.predictions import predicted

ranks.start(world_size=4)

# %% [markdown] tags=["introduction"]
# ## What is wasted
#
# In a transformer, most parameters are in the MLPs, and every token passes through every one of them. The parameters
# and the operations per token grow together: to give an MLP eight times the parameters, you pay eight times the
# computation, for a comma as for a hard word.
#
# A **mixture of experts** (MoE) separates the two. It has E MLPs, the experts, and a small linear layer, the
# **router**, which chooses one or a few experts for each token. Let's count both for a width of 4,096 and a hidden
# width of 16,384. Each parameter costs a multiplication and an addition per token. One such MLP has 134 million
# parameters, and both axes of the figure count in MLPs.

# %%
WIDTH, HIDDEN = 4096, 16384
mlp = 2 * WIDTH * HIDDEN  # parameters
sizes = (1, 2, 4, 8, 16)
points = {
    "one MLP, wider": [(n, n, f"{n}×") for n in sizes],
    "experts, one per token": [(1 + WIDTH * n / mlp, n, f"E = {n}") for n in sizes],
}
expert_plots.parameters_and_computation(points)

# %% [markdown]
# It is C. The solid line pays for every parameter. The other one rises almost vertically: 16 experts have 16 times the
# parameters of one, and cost 0.05% more than one, for the router. So A is wrong. You will see why B is wrong when we
# count the bytes.

# %% [markdown]
# ## Routing, in a picture
#
# The router computes a score for each expert, and the token goes to the expert with the highest one. This is called
# **top-1 routing** (Fedus et al. 2021). A softmax turns the scores into probabilities, and the expert's output is
# multiplied by its probability. That is how the router learns: from the model's loss, it gets a gradient only through
# this factor. In the picture, expert 1 gets three of the six tokens, and expert 2 gets none:

# %%
diagrams.top_1_routing()

# %% [markdown]
# In the next cell, each of four ranks takes 256 characters of a text, and routes each of them to one of four experts.
# Embedding, router and experts are not trained. `one_process` is the plainest way to compute the layer: one expert
# after another, each on the tokens that chose it.

# %%
# %%ranks
from torch import nn

from shared import wire
from shared.data import CharTokens

TOKENS, WIDTH = 256, 64
text = CharTokens()
torch.manual_seed(1)  # the same on every rank
embedding = nn.Embedding(text.vocab_size, WIDTH).to(device)
router = nn.Linear(WIDTH, world_size, bias=False).to(device)
experts = [
    nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)).to(device)
    for _ in range(world_size)
]
tokens, _ = text.windows([TOKENS * rank], length=TOKENS)
x = embedding(tokens[0].to(device)).detach()  # this rank's tokens


def one_process(x):
    gate, expert_of = router(x).softmax(-1).max(-1)
    y = torch.zeros_like(x)
    for index, expert in enumerate(experts):
        mine = expert_of == index
        y[mine] = gate[mine, None] * expert(x[mine])
    return y


# %% [markdown]
# Now we keep one expert per rank: expert r on rank r. That is **expert parallelism** (EP). The tokens have to travel:
# first to their experts, which is called **dispatch**, and then back, which is called **combine**.

# %%
diagrams.two_all_to_alls()

# %% [markdown]
# ## The short version
#
# Look at the middle row of the figure: the ranks receive 3, 7, 4 and 2 rows. No rank knows its number in advance, so
# how large must its buffer be? GShard avoids the question with fixed slots (Lepikhin et al. 2020). For every expert,
# each rank reserves a number of slots, the **capacity**. Then all pieces of the all-to-all are equally long. A token
# that finds no free slot is **dropped**: the layer adds nothing to it, and only the residual connection carries it on.

# %%
# %%ranks


def slots_of(expert_of, capacity):
    """Give each token a slot of its expert, first come, first served. Returns who got one, and the slots."""
    taken, kept, slots = [0] * world_size, [], []
    for token, expert in enumerate(expert_of.tolist()):
        if taken[expert] < capacity:
            kept.append(token)
            slots.append(expert * capacity + taken[expert])
            taken[expert] += 1
    return kept, slots


def exchange(rows):
    """Send the r-th of N equal pieces to rank r."""
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows)
    return received


@torch.no_grad()
def expert_parallel(x, capacity):
    gate, expert_of = router(x).softmax(-1).max(-1)
    kept, slots = slots_of(expert_of, capacity)
    outgoing = x.new_zeros(world_size * capacity, WIDTH)
    outgoing[slots] = x[kept]
    arrived = exchange(outgoing)  # dispatch
    returned = exchange(experts[rank](arrived))  # combine
    y = torch.zeros_like(x)
    y[kept] = gate[kept, None] * returned[slots]
    return y, len(kept)


# %% [markdown]
# Usually, the capacity follows from a **capacity factor** c: it is c · kT/E, where T is the number of this rank's
# tokens, and k the number of experts per token, here 1. With c = 1, there are exactly as many slots as tokens.
#
# **Predict.** A rank has T = 256 tokens of width D = 64, in fp32. There are E = 4 experts on N = 4 ranks, and c = 1.25,
# so the capacity is 80. How many kB does a rank send in forward, for both all-to-alls together? A rank does not send
# the slots of its own expert.

# %%
my_sent_kb = None

# %%
# %%ranks
enough, kept = expert_parallel(x, capacity=TOKENS)
assert kept == TOKENS and torch.allclose(enough, one_process(x), atol=1e-5)
with wire.ledger() as log:
    expert_parallel(x, capacity=80)

# %% tags=["nbval-ignore-output"]
sent_kb = ranks.pull("log")[0].sent_bytes / 1e3
assert sent_kb == 2 * 3 / 4 * 4 * 80 * 64 * 4 / 1e3
print(f"{predicted(my_sent_kb, '{} kB')}measured {sent_kb:.1f} kB")
ranks.pull("log")[0].table(times=False)

# %% [markdown]
# With enough capacity, the result equals that of one process. And 123 kB is what 2 · (N−1)/N · c · T · D elements of 4
# bytes predict. Backward sends gradients the opposite way, so a step costs twice as much, in every MoE layer. The
# bytes grow with the tokens, like those of tensor parallelism. They also grow with k, the number of experts per token,
# but not with E. That is why B was wrong in the first question: with twice as many experts, a token sends what it did
# before.

# %% [markdown]
# ## Imbalance: the slowest rank sets the pace
#
# In the figure of dispatch and combine, expert 1 has 7 of 16 rows. Real text does the same: here, a space is always
# embedded as the same vector, so all spaces go to the same expert. Let's give every expert as many slots as it needs,
# and look at the time. The ranks share this machine's cores, so each row sleeps 1 ms instead of computing on a GPU.
#
# **Predict.** Perfectly balanced, every expert gets 256 rows. How many times as long does the layer take with the rows
# that it really gets? 1 would mean as long as balanced.

# %%
my_slowdown = None

# %%
# %%ranks
import time


def busy_and_total():
    """Return the rows of this rank's expert, how long it is busy, and how long the layer takes, in ms."""
    rows = router(x).argmax(-1).bincount(minlength=world_size)
    dist.all_reduce(rows)
    own = int(rows[rank])
    dist.barrier()
    began_s = time.perf_counter()
    time.sleep(own * 1e-3)
    busy_s = time.perf_counter() - began_s
    dist.barrier()  # combine cannot end before the last expert has computed
    return own, 1e3 * busy_s, 1e3 * (time.perf_counter() - began_s)


# %% tags=["nbval-ignore-output"]
found = ranks.run(lambda: busy_and_total())
rows, busy_ms, total_ms = zip(*found, strict=True)
busiest, slowdown = max(rows) / 256, max(total_ms) / 256
print(f"{predicted(my_slowdown)}the layer takes {slowdown:.2f} times as long as balanced")
print(f"the busiest expert has {busiest:.2f} times the mean rows")
measure.expect(abs(slowdown - busiest) < 0.15, "the busiest expert sets the pace")
expert_plots.busy_and_waiting(rows, busy_ms)

# %% [markdown]
# The layer takes as long as its busiest expert, and a little longer, because barriers between busy cores take time,
# too. The hatched time is lost, in every layer: 45% of what the four ranks could have computed, because 1 − 1/1.83 =
# 0.45. This was seed 1. With seeds 0 to 15, the busiest expert has 1.2 to 2.1 times the mean.

# %% [markdown]
# Three remedies are in use:
#
# - **A balancing loss.** It punishes a router whose probabilities favor the experts that are already busy. You write it
#   in the lab.
# - **A bias per expert**, only for choosing. After each step, it falls for busy experts and rises for idle ones. So no
#   second loss pulls at the router (Wang et al. 2024). DeepSeek-V3 does this, drops no tokens, and keeps only a very
#   small balancing loss within each sequence (DeepSeek-AI 2024, §2.1.2).
# - **A capacity.** It does not balance anything, but it limits how long the slowest rank takes. The price is the next
#   question.

# %% [markdown]
# ## Capacity: what fits is computed, the rest is dropped
#
# **Predict.** With these rows and c = 1, there are as many slots as tokens. What percentage of the tokens is dropped?

# %%
my_dropped_percent = None

# %%
# %%ranks
factors = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
capacities = [int(factor * TOKENS / world_size) for factor in factors]
kept_tokens = [expert_parallel(x, capacity)[1] for capacity in capacities]

# %%
factors, capacities = ranks.pull("factors")[0], ranks.pull("capacities")[0]
kept = [sum(each) / 1024 for each in zip(*ranks.pull("kept_tokens"), strict=True)]
dropped = [1 - share for share in kept]
empty = [1 - share * 64 / capacity for share, capacity in zip(kept, capacities, strict=True)]
print(f"{predicted(my_dropped_percent, '{}%')}dropped with c = 1: {dropped[2]:.0%}")
expert_plots.capacity(factors, dropped, empty)

# %% [markdown]
# There is no good place on this axis as long as the router is not balanced: a small factor drops tokens, and a large
# one sends and computes zeros. At c = 1, both shares are equal: there are as many slots as tokens, so every dropped
# token leaves a slot empty. Did you predict 21%? Expert 3 gets 469 rows, and (469 − 256)/1,024 is 21%. But each rank
# has slots of its own: rank 0 also drops 10 tokens of expert 0, while slots that other ranks have there stay empty.

# %% [markdown]
# Switch Transformers have a balancing loss, and reached the same quality sooner with factors of 1 and 1.25 than with 2
# (Fedus et al. 2021, table 1).
#
# A **dropless** layer has no capacity. It sends exactly the rows that exist, but for that, every rank must first learn
# how many rows it will get. That is what you build in the lab: sizes first, then tokens.

# %% [markdown]
# ## EP regroups the data-parallel ranks
#
# Every rank brings its own tokens, so for everything except the experts, expert parallelism *is* data parallelism. It
# needs no new ranks: it regroups the data-parallel ones, and only for the experts.
#
# **Predict.** Eight ranks train with dp = 8 and ep = 4. Over how many ranks is the gradient of the attention layer
# all-reduced, and over how many that of expert 0? The next figure has the answer.

# %%
my_attention_ranks, my_expert_ranks = None, None

# %%
diagrams.expert_fold()

# %% [markdown]
# Over 8 and over 2. The two kinds of parameters arrive at their all-reduce with different gradients:
#
# | parameters | copies | what backward leaves on a rank | which ranks need the same gradient |
# |---|---|---|---|
# | attention, router, norms | dp | the gradient of its own loss | all dp ranks |
# | an expert | dp/ep | the sum over the losses of ep ranks, whose tokens it got | dp/ep ranks |
#
# A model trains on the *mean* of all dp losses, and backward leaves that gradient in neither row. What each row still
# needs is a question of the lab. It is easy to get wrong: in a PyTorch issue with ep = 2, the experts'
# gradients were exactly twice as large as they should be (issue 160285). The gradient *norm* goes wrong as easily:
# DeepSpeed averaged the norms of ranks that hold different experts (issue 8475), and Megatron-LM left some experts out
# (pull request 5916).

# %% [markdown]
# ## Where the all-to-all hides
#
# The gradients of data parallelism hide behind the rest of backward. An all-to-all has nothing to hide behind: an
# expert needs the tokens that dispatch brings, and the next layer needs what combine returns. The experts themselves
# offer one way out: we cut the tokens into pieces, and compute one piece while the others travel.
#
# **Predict.** In chapters 05 and 14, more tokens per rank hid the communication. You double the tokens. Is a larger
# share of the all-to-alls hidden?

# %%
my_prediction = None  # "yes" or "no"

# %%
C = 0.5 * 312e12  # operations per second: an A100 at half of its peak, as in chapter 14
W = 24e9  # bytes per second: an adapter of its own
for tokens in (4096, 8192):
    computing_ms = 1e3 * 4 * tokens * WIDTH * HIDDEN / C
    messages_ms = 1e3 * 2 * tokens * WIDTH * 2 / W  # there and back, 2 bytes per element
    print(f"{tokens:,} tokens: computing {computing_ms:.1f} ms, messages {messages_ms:.1f} ms")

# %% [markdown]
# Computing and messages both double, so the share stays. For a token, an expert of hidden width F computes 4DF
# operations in forward: two matmuls, from D to F and back. It receives D elements and returns D, of b bytes each. At C
# operations and W bytes per second, its computing hides its messages if
#
# $$\frac{4DF}{C} \ge \frac{2bD}{W}, \qquad\text{so}\qquad \boxed{\;F \ge \frac{b}{2}\cdot\frac{C}{W}\;}$$
#
# Look at what is missing: the number of tokens, k, E and D all cancel. A larger batch does not help. Wider experts do,
# and so does a faster network.
#
# An A100 with an adapter of its own has C/W = 1.56 · 10¹⁴ / (24 · 10⁹) = 6,500. So in bf16, F must be at least 6,500 if
# most experts are on other hosts. Our experts have 16,384, 2.5 times as much, so 7.0 ms of computing can hide 2.8 ms of
# messages. If eight GPUs share an adapter, as in chapter 14, F must be at least 52,000.
#
# The bound is for the forward of our experts. Gated experts have a third matmul, so two thirds of the width are enough.
# In backward, any expert computes twice as much for as many bytes, so half the width is enough. But experts have become
# narrower: Mixtral's had 14,336 (Jiang et al. 2024), DeepSeek-V3's have 2,048.

# %% [markdown]
# What if the experts are too narrow? Some models also have a **shared expert**, which computes every token on the
# token's own rank, so it can run during the exchange. DeepSeek-V3 has one, and would still spend about as much time on
# all-to-alls between hosts as on computing (DeepSeek-AI 2024, §3.2.1).
#
# But two micro-batches do not depend on each other. So while the tokens of one travel, the GPU computes the other: its
# experts, and also its attention and its shared expert. The diagram draws computing and exchanging 1 : 1, as DeepSeek
# reports them. Follow micro-batch 1, which is gray without hatching:

# %%
diagrams.hidden_exchanges()

# %% [markdown]
# Two forwards that take turns still waste both ends: the network idles during the first attention, and the GPU during
# the last combine. DeepSeek's **DualPipe** pairs the *forward* of one micro-batch with the *backward* of another one.
# In backward, gradients go through combine first, so backward begins on the network exactly where the forward begins on
# the GPU. In the last two lanes, neither ever waits. The drawing flatters: it draws backward as long as forward, and
# DeepSeek's exchanges also occupy 20 of a GPU's 132 streaming multiprocessors (§3.2.2).
#
# Where does a stage of a pipeline find such a pair? DualPipe is a schedule (chapter 15) that feeds the pipeline from
# both ends, so each rank has one stage for each direction. Once the pipeline is full, micro-batches that go forward
# meet others that come back, and every rank has such a pair. The price is two copies of the parameters (DualPipe's
# README).

# %% [markdown]
# ## What has been reported
#
# DeepSeek-V3 sends each token to 8 of 256 experts, but only within 4 of 8 groups of experts. So a token goes to at most
# four hosts, and crosses the slow links at most four times in each direction (DeepSeek-AI 2024, §3.2.2). DeepEP is the
# library for these all-to-alls. The README of its first version reports, on H800 GPUs, with 4,096 tokens per rank,
# dispatched in FP8 and combined in bf16:
#
# | ranks | links | dispatch | combine |
# |---|---|---|---|
# | 8 | NVLink | 153 GB/s | 158 GB/s |
# | 64 | between hosts | 51 GB/s | 50 GB/s |
#
# Let's put these numbers to work. A token has 7,168 elements, which are 7,168 bytes in FP8. If each of a rank's 4,096
# tokens goes to four hosts, the limit, they are 117 MB. At 51 GB/s, a dispatch between hosts takes 2.3 ms, and a
# combine, with twice the bytes, 4.7 ms. DeepSeek-V3 has 58 such layers (§4.2), so these tokens spend 0.4 s of their
# forward on the network.
#
# With 37 billion parameters per token, the same forward computes 2 · 37 · 10⁹ · 4,096 = 3.0 · 10¹⁴ operations. An H800
# has a peak of 2 · 10¹⁵ per second in FP8. Let's assume that it reaches 40% of that while it computes. Then the forward
# computes for 0.38 s. So the two are about 1 : 1, as DeepSeek reports, and this is the time that DualPipe hides.

# %% [markdown]
# ## Choosing
#
# | your situation | use |
# |---|---|
# | all experts fit on every GPU, with DDP, ZeRO-1 or ZeRO-2 | no EP: no token travels |
# | they fit only with ZeRO-3 | EP, if a rank has fewer than 3EF/(2k) tokens |
# | a host's GPUs together hold the experts | EP inside the host |
# | they do not | EP over hosts, with a limit on the hosts per token |
# | F is at least (b/2) · C/W | the layer can hide its own exchanges, in pieces |
# | F is smaller | hide them behind another micro-batch (DualPipe) |
# | one expert is much busier than the mean | a bias or a balancing loss first; a capacity only as a limit |
#
# Why fewer than 3EF/(2k)? In a forward, ZeRO-3 gathers the 3DF parameters of each of the E gated experts, and EP sends
# 2kTD elements. For DeepSeek-V3, the two are equal at T = 98,000 tokens per rank.

# %% [markdown]
# ## The production version
#
# | here | Megatron-LM | DeepSpeed's `MoE` |
# |---|---|---|
# | ranks that share a set of experts | `--expert-model-parallel-size` | `ep_size` |
# | experts per token | `--moe-router-topk` | `k` |
# | capacity factor | `--moe-expert-capacity-factor`; dropless without it | `capacity_factor` |
# | balancing loss | `--moe-aux-loss-coeff` | the second value that forward returns |
#
# A rank with many small experts would run many small matmuls. Libraries run them as one **grouped matmul**, which takes
# one matrix of rows, and the offsets at which each expert's rows end. In torch 2.13, it is
# `torch.nn.functional.grouped_mm`.

# %% [markdown]
# ## Recap
#
# T tokens per rank, width D, k experts per token, N = ep ranks, elements of b bytes:
#
# | | memory | wire: bytes sent per layer, forward and backward | overlap |
# |---|---|---|---|
# | experts on every rank | E experts | none; gradients of all experts per step | with backward |
# | EP, dropless | E/N experts | about 4 (N−1)/N · k · T · D · b, and the sizes | in pieces, or another micro-batch |
# | EP with capacity factor c | E/N experts | 4 (N−1)/N · c · k · T · D · b | in pieces, or another micro-batch |
#
# Four numbers to keep: **4kTDb** bytes per layer and step for large N, **max/mean** rows for the time of a layer,
# **F ≥ (b/2) · C/W** for experts that hide their own messages in forward, and **dp/ep** copies of each expert.
#
# **Terms**
#
# - **expert**: one of several MLPs of a layer; a token passes through only a few of them.
# - **mixture of experts** (MoE): a layer of experts and a router.
# - **router**: the linear layer that scores the experts for each token.
# - **top-1 routing**: each token goes to the expert with its highest score; with top-k, to k of them.
# - **expert parallelism** (EP): ranks hold different experts and exchange tokens.
# - **dispatch**: the all-to-all that sends tokens to their experts.
# - **combine**: the all-to-all that sends the results back.
# - **capacity**: the most rows that an expert takes from one rank: the capacity factor times their mean.
# - **dropped token**: a token that finds its expert full, so the layer adds nothing to it.
# - **dropless**: without a capacity; the ranks exchange sizes first.
# - **balancing loss**: a second loss that makes the router use all experts alike.
# - **DualPipe**: a pipeline schedule that hides the all-to-alls of one micro-batch behind computing another one.
# - **grouped matmul**: one kernel for the matmuls of several experts, each with its own number of rows.
#
# ## Further reading
#
# - Lepikhin et al., [GShard](https://arxiv.org/abs/2006.16668), 2020: capacity, and dispatch as two all-to-alls.
# - Fedus et al., [Switch Transformers](https://arxiv.org/abs/2101.03961), 2021, §2: top-1, and the balancing loss.
# - Wang et al., [Auxiliary-Loss-Free Load Balancing](https://arxiv.org/abs/2408.15664), 2024: the bias per expert.
# - Jiang et al., [Mixtral of Experts](https://arxiv.org/abs/2401.04088), 2024: eight experts, two per token.
# - DeepSeek-AI, [DeepSeek-V3](https://arxiv.org/abs/2412.19437), 2024, §2.1.2 and §3.2: the bias, and DualPipe.
# - [DeepEP](https://github.com/deepseek-ai/DeepEP): the kernels. The table above is from the README of version 1.
# - [On a real cluster](../docs/cluster.md): who knows the sizes, and which links carry tokens.

# %% [markdown]
# ## What is still wasted
#
# In this chapter, data decide where tokens go, and we had to say by hand which rank sends what. You have now written
# every collective of five kinds of parallelism yourself. In chapter 17, a compiler derives them from the layout of the
# tensors.

# %%
ranks.stop()
