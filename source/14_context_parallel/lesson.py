# ---
# jupyter:
#   course:
#     module: context_parallel
# ---

# %% [markdown]
# # 14 · Context parallelism
#
# **35–55 minutes.** After this lesson, you will be able to:
#
# - say what a sequence of 128,000 tokens keeps on a GPU, and which technique removes which part of it,
# - compute exact attention on a rank that never holds all keys,
# - predict how many tokens a rank needs before the ring is hidden,
# - explain why a causal mask leaves ranks idle, and how the zigzag order keeps them busy,
# - choose between a ring, an all-to-all, and chapter 13's sequence parallelism.
#
# You need the ring (chapter 01), the activations of a layer (chapter 06), and the loss over a split vocabulary (chapter
# 13). N ranks share a sequence of s tokens, so each of them has n = s/N. The width is h.

# %% [markdown]
# ## Where we are
#
# A team trains Llama-2 70B on 4 hosts of 8 A100, with what you built in chapter 13: tensor and sequence parallelism
# inside each host, and ZeRO-3 across. It fits, with sequences of 4,096 tokens. Then the lawyers among their
# customers ask for whole contracts, and somebody changes the length to 131,072. The run dies in its first forward.
#
# **Predict.** The model is the same, and so is the number of tokens per batch. Which of these has grown by a factor of
# 32 on each GPU?
#
# - A: the gradients of a layer
# - B: what a layer keeps of one sequence for backward
# - C: the parameters that are unsharded at a time
# - D: B and C

# %%
my_prediction = None  # "A", "B", "C" or "D"

# %% tags=["nbval-ignore-output"]
from shared import measure, ranks
from shared.planner import contexts
from shared.plots import attention as attention_plots
from shared.plots import diagrams
from shared.predictions import predicted

ranks.start(world_size=4)

# %% [markdown] tags=["introduction"]
# ## What is wasted
#
# The next table shows what one sequence keeps on each GPU, next to the 34 GB that the model itself takes there. The
# last two columns are where this lesson leads:

# %%
contexts.memory_table()

# %% [markdown]
# It is B. Gradients and unsharded parameters depend on the model only.

# %% [markdown]
# Smaller micro-batches do not help, because nothing is smaller than one sequence. Full recomputation (chapter 06) does:
# for a third more time, it divides the activations by 16. The contracts then need 21.5 + 34 GB and fit on GPUs of 80 GB
# again, but a sequence of a million tokens does not. More tensor parallelism is no way out. A host has 8 GPUs, and
# between hosts, TP sends too much, as a later table shows.
#
# Why does TP send so much? Twice per layer, sequence parallelism gathers all s tokens, in full width, on every rank.
# That is the waste, because nearly everything in a layer treats each token by itself. **Context parallelism** (CP)
# never gathers them: each rank keeps its n tokens from the embedding to the loss. All these ranks have the same
# parameters, as in data parallelism. So their gradients are added up, and ZeRO can shard over them.
#
# Norms, MLPs, projections and the loss cost nothing extra, because they need no other token. There is a single place
# where tokens meet.

# %% [markdown]
# ## Keys that travel
#
# In attention, a query needs the keys and values of other tokens. It does not need them all at the same time. So let
# the queries stay on their rank, and pass keys and values around a ring. In the diagram, follow K0 and V0 through the
# steps:

# %%
diagrams.ring_attention()

# %% [markdown]
# After N steps, all queries have met all keys, and no rank has held more than three ranks' keys at a time: its own,
# those it computes with, and those that are arriving. This is **ring attention** (Liu et al. 2023).
#
# But a softmax divides by a sum over *all* keys, and in step 0, a rank has seen only its own. How can it begin?

# %% [markdown]
# ## A softmax in pieces
#
# You solved this in chapter 13. There, each rank had some columns of the logits, and the loss needed three elements
# from each: the largest logit, the sum of the exponentials, and the target's logit. Attention is the same, with a
# vector in place of the last one. For each query, we carry along
#
# - the **maximum** m of the scores so far,
# - the **sum** of exp(score − m),
# - the **value**, the sum of exp(score − m) · v.
#
# When new keys bring a larger maximum, the old sum and value refer to the wrong one. So we multiply them by exp(m_old −
# m_new), as if the new maximum had been known from the beginning. At the end, we divide value by sum. For example, a
# query has seen the scores 1 and 3: m = 3, and the sum is e⁻² + 1 = 1.14. Then a score of 5 arrives. m becomes 5, so
# the old sum is multiplied by e⁻², which gives 0.15, and the new key adds 1.
#
# This is the **online softmax** that FlashAttention uses inside one GPU; here, it runs over ranks.


# %%
# %%ranks
def absorb(seen, query, key, value):
    """Add some keys to what the queries have seen: the maximum, the sum and the value so far."""
    maximum, total, mixed = seen
    scores = query @ key.mT / query.shape[-1] ** 0.5
    new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
    shrink, weights = (maximum - new_maximum).exp(), (scores - new_maximum).exp()
    return (
        new_maximum,
        shrink * total + weights.sum(-1, keepdim=True),
        shrink * mixed + weights @ value,
    )


# %% [markdown]
# ## The short version
#
# The ring itself is chapter 13's matmul in ring steps, with `absorb` in place of the matmul. `InFlight` launches the
# send and the receive together. If every rank waited for its send first, the ring could hang.
#
# This version waits for each transfer, and it has neither a causal mask nor a backward. In the lab, you add both, and
# keep the next keys in flight while a rank computes.


# %%
# %%ranks
from solutions.async_collectives import InFlight


def pass_on(block):
    """Send a block to the next rank, and return that of the previous one."""
    received = torch.empty_like(block)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    InFlight([(block, right)], [(received, left)], None).wait()
    return received


def ring_without_mask(query, key, value):  # each (B, H, n, h/H)
    keys_values = torch.stack([key, value])
    nothing = torch.zeros_like(query[..., :1])
    seen = nothing - torch.inf, nothing, torch.zeros_like(query)
    for step in range(world_size):
        if step > 0:
            keys_values = pass_on(keys_values)
        seen = absorb(seen, query, *keys_values)
    _, total, mixed = seen
    return mixed / total


# %% [markdown]
# Is it exact? And what does it send?
#
# **Predict.** A rank has keys and values of S bytes together. How many times S does it send in this forward, on four
# ranks? 1 would mean that it sends each of its keys once.

# %%
my_prediction = None  # times S

# %%
# %%ranks
from torch.nn.functional import scaled_dot_product_attention

from shared import wire

torch.manual_seed(0)  # all ranks draw the same whole sequence, to compare
whole = torch.randn(3, 1, 4, 512, 16, dtype=torch.float64)
query, key, value = whole.chunk(world_size, 3)[rank]
with wire.ledger() as log:
    output = ring_without_mask(query, key, value)
expected = scaled_dot_product_attention(*whole).chunk(world_size, 2)[rank]
largest_difference = (output - expected).abs().max().item()
sent_times = log.sent_bytes / (key.nbytes + value.nbytes)

# %%
largest, sent_times = max(ranks.pull("largest_difference")), ranks.pull("sent_times")[0]
assert largest < 1e-12 and sent_times == 3
print("The largest difference from one process is below 1e-12.")
print(f"{predicted(my_prediction, '{} times S')}measured {sent_times:g} times S")

# %% [markdown]
# N − 1 = 3 times: every rank also passes on what it got from others. An all-gather sends the same bytes, but at the end
# of it, each rank holds the keys of the whole sequence.
#
# The result is exact. Nothing was approximated, which distinguishes ring attention from the many methods that let a
# query see fewer keys.

# %% [markdown]
# ## The causal triangle
#
# So far, every query saw every key. A language model hides later tokens, so the first token has one key to look at, and
# the last has all of them. In the diagram, each rank has two chunks of the sequence. Compare the work of rank 0 and
# rank 3, on the left:

# %%
diagrams.causal_orders()

# %% [markdown]
# With contiguous parts, rank 3 has seven times the work of rank 0. And since all ranks move in step, everybody waits
# for rank 3.
#
# In the **zigzag order** (on the right), rank r gets chunk r from the beginning, and chunk 2N − 1 − r from the end.
# Cheap and expensive chunks add up to the same.
#
# Let's measure that. Our four ranks share a few cores, so they cannot compute at the same time, as GPUs would. Instead,
# each rank sleeps 15 ms for each pair of chunks that its queries can see, and half of it for one on the diagonal. The
# messages are real, but small.


# %%
# %%ranks
import time

PAIR_S = 0.015
visible = torch.ones(8, 8).tril() - torch.eye(8) / 2  # 1 per pair of chunks, 1/2 on the diagonal
orders = {
    "contiguous": lambda owner: (2 * owner, 2 * owner + 1),
    "zigzag": lambda owner: (owner, 2 * world_size - 1 - owner),
}


def ring_of_sleeps(chunks_of):
    """Sleep instead of computing. Returns, for each step, whose keys it used, and when it began and ended."""
    block, steps = torch.tensor([float(rank)]), []  # instead of keys, the rank that they belong to
    dist.barrier()
    began_s = time.perf_counter()
    for _ in range(world_size):
        source, of_step_s = int(block), time.perf_counter() - began_s
        pairs = visible[list(chunks_of(rank))][:, list(chunks_of(source))].sum().item()
        time.sleep(PAIR_S * pairs)
        steps.append((source, of_step_s, time.perf_counter() - began_s))
        block = pass_on(block)
    return steps


# %% [markdown]
# **Predict.** In each step, the busiest rank decides. How long does the zigzag ring take, compared with the contiguous
# one? 1 would mean that nothing is saved.

# %%
my_prediction = None  # 1 means that nothing is saved

# %%
# %%ranks
rounds = {name: [ring_of_sleeps(order) for _ in range(3)] for name, order in orders.items()}

# %% tags=["nbval-ignore-output"]
rounds = ranks.pull("rounds")
runs = {}
for name in ("contiguous", "zigzag"):
    tries = [[of_rank[name][number] for of_rank in rounds] for number in range(3)]
    runs[name] = min(tries, key=lambda run: max(steps[-1][2] for steps in run))
lasts = {name: max(steps[-1][2] for steps in run) for name, run in runs.items()}
share = lasts["zigzag"] / lasts["contiguous"]
print(f"{predicted(my_prediction)}the zigzag ring takes {share:.2f} of the contiguous ring's time")
measure.expect(share < 0.65, "the zigzag order takes at most 0.65 of the time")
attention_plots.ring_steps(runs)

# %% [markdown]
# Rank 3 needs 14 pairs in the contiguous order, and every rank needs 8 in the other: 8/14 = 0.57. What is hatched in
# the upper lanes is GPU time that you pay for and do not use.
#
# This is not only arithmetic. On 8 H800, one widely used implementation reaches 54% of FlashAttention's speed with
# contiguous parts, and 90% with the zigzag order, forward and backward together, with 8k tokens per GPU over NVLink
# (zhuzilin/ring-flash-attention, README). Our ratio predicts the first of these numbers: with N = 8, N/(2N − 1) is 53%.

# %% [markdown]
# ## When the ring is hidden
#
# Each step computes with one block of keys while the next one is in flight. Which takes longer?
#
# A rank multiplies n queries with n keys, and the probabilities with n values: 4n²h operations. With a causal mask and
# in zigzag order, half of them are needed: 2n²h. A rank sends n keys and n values, 4nk bytes in 16 bits, where k is the
# width of keys and values. At C operations and W bytes per second, the transfer is hidden if
#
# $$\frac{2n^2h}{C} \ge \frac{4nk}{W}, \qquad\text{so}\qquad \boxed{\;n \;\ge\; \frac{2k}{h}\cdot\frac{C}{W}\;}$$
#
# Computing grows with n², sending only with n, so the ring of a longer sequence is *easier* to hide. Chapter 05 had the
# same condition, tokens per GPU against C/W. But here, only tokens of the *same* sequence count, because two sequences
# per batch double both sides. In Llama-2 70B, eight heads of queries share one head of keys. With this grouped-query
# attention, k/h is 1/8, which helps the ring eightfold.
#
# **Predict.** With TP 8 inside it, a host acts as one rank of the ring. At half of their peak, its 8 A100 compute
# C = 1.25 · 10¹⁵ operations per second. They share an adapter with W = 24 GB/s. From which n on is the ring between 4
# hosts hidden?

# %%
my_prediction = None  # n

# %%
C, W, k_over_h = 1.25e15, 24e9, 1 / 8
print(f"{predicted(my_prediction, 'n = {}')}the formula says n = {2 * k_over_h * C / W:,.0f}")
marks = {8_192: "s = 32k", 32_768: "s = 128k"}
attention_plots.step_times(contexts.step_times(), marks)

# %% [markdown]
# The lines cross at n = 13,000, so s must be at least 52,000. With each doubling of n, computing quadruples, and the
# transfer only doubles. The 128k sequence has time to spare: at n = 32,768, a step computes for 14 ms, and the transfer
# takes 6. A sequence of 32k tokens cannot hide its ring, with 0.9 ms against 1.4. **On a slow network, context
# parallelism pays for long sequences only.** If each GPU has an adapter of its own, W is eight times as large, and the
# formula says 1,600 tokens. The figure says 2,100, because it also counts the latency of a message.

# %% [markdown]
# What does context parallelism replace? Without it, longer sequences need more tensor parallelism or recomputation. For
# Llama-3 8B on B200, NVIDIA reports that training with CP is 1.05 times as fast as with the best layout without it at
# 32k tokens, 1.37 times at 256k, and 2.67 times at 512k. At 1,024k, no layout without CP fits, even with full
# recomputation (NeMo's documentation, "Long sequence performance").

# %% [markdown]
# ## Does the ring replace recomputation?
#
# Recomputation costs a third more time, and a hidden ring costs nothing. So can the team drop recomputation? First,
# the ring has to be hidden in backward, too. There, attention's two matmuls become five, so a rank computes 2.5 times
# as much: 5n²h operations. It also sends three times as much. Keys and values go around once more, and their gradients
# go around with them, in fp32. Together, these are 12nk bytes per step, so backward needs n ≥ (2.4k/h) · C/W. Here,
# that is n = 15,600, a fifth more.
#
# Gradients make one hop more than keys, as you will see in the lab. This last hop has nothing to hide behind: 8nk
# bytes, or 11 ms. Compare it with everything else in a layer of 0.86 billion parameters, for the 128k sequence. In
# forward, the other matmuls compute 2 operations per parameter and token, and for ZeRO-3, each host sends (N−1)/N of
# 1.7 GB. Backward doubles both:
#
# | ms per layer | 4 hosts: forward | backward | 8 hosts: forward | backward |
# |---|---|---|---|---|
# | attention computes | 56 | 141 | 28 | 70 |
# | the other matmuls compute | 45 | 90 | 22 | 45 |
# | the ring sends | 17 | 62 | 20 | 64 |
# | ZeRO-3 sends, in 16 bits | 53 | 107 | 62 | 125 |
#
# On 4 hosts, a layer computes for 332 ms. The last hop is 3% of that, and recomputing the forward would be 30%. So the
# ring would save time, but without recomputation, 86 + 34 GB is too much for 80. With both, the sequence takes only
# 5 + 34 GB, so one four times as long fits, too.
#
# On 8 hosts, CP 8 needs no recomputation. It keeps 43 GB of activations and 17 GB of state, and n is 16,384, just above
# the bound. But the bound looks at the ring alone. ZeRO-3 sends parameters and gradients over the same adapter. On 4
# hosts, both together fit into a layer's forward: 70 ms against 101. On 8 hosts, they do not: 82 ms against about 50.
# There, you need an adapter per GPU.

# %% [markdown]
# ## Swapping tokens for heads
#
# There is a second way, without a ring. Heads do not talk to each other, so a rank could compute *some heads* for all
# tokens. But it has all heads of some tokens. An all-to-all turns one into the other, and a second one turns the
# outputs back (DeepSpeed-**Ulysses**, Jacobs et al. 2023):

# %%
diagrams.tokens_for_heads()

# %% [markdown]
# In between, each rank calls any attention kernel it likes, with a plain causal mask. All ranks have equal work without
# any zigzag. The catch: N cannot exceed the number of heads, and with grouped-query attention, that is the number of
# heads of *keys*, unless you copy them.
#
# What do the three ways of sharing one sequence send? For one layer's forward, and Llama-2 70B at 128k over 4 hosts:

# %%
contexts.traffic_table()

# %% [markdown]
# In the forward of a layer, chapter 13's sequence parallelism gathers all s tokens in their full width twice, and
# reduce-scatters them twice. Between hosts, that is hopeless: 6.44 GB take 268 ms, and the whole layer computes for
# 101 ms. The ring sends only keys and values, which grouped-query attention has made narrow, and hides them.
#
# Ulysses lies in between: 1.21 GB take 50 ms, and attention has to wait for them. A host sends (N−1)/N of the queries
# and outputs of its n tokens, and n = s/N *falls* with N. Its keys cost as much as in the ring: TP 8 has left one head
# of keys per GPU, and every other host needs a copy of it.
#
# | your situation | use |
# |---|---|
# | the sequence fits inside a host, with TP and SP, without recomputation | no context parallelism |
# | it fits only with recomputation | try the ring: it may cost less than the recomputation that it replaces |
# | n is at least (2.4k/h) · C/W, and ZeRO leaves the adapter time | the ring, in zigzag order, between hosts |
# | n is smaller | fewer hosts per sequence, so that n grows, or a faster network; else a part of the ring is exposed |
# | masks between documents | gather the keys, as Llama 3 did: simpler, with all of it exposed |
# | fast links and enough heads of keys, or a kernel without the sums that a ring needs | Ulysses, inside a host |
# | fast links inside hosts, slow ones between them | heads inside, the ring between hosts (USP, Fang and Zhao 2024) |

# %% [markdown]
# ## Which technique removes which activations
#
# Long sequences have collected many cures, and not all of them treat the same disease. In 16 bits, a layer with a heads
# keeps sbh · (34 + 5as/h) bytes of b sequences (Korthikanti et al. 2022). Without dropout, as in the first table of
# this lesson, 34 becomes 32:
#
# | technique | what happens to these bytes |
# |---|---|
# | FlashAttention | removes 5as/h, the only term with s². The rest stays |
# | TP | divides 24 of the 34, and the s² term, by t |
# | … with SP | divides all of them by t |
# | context parallelism | divides all of them by N, on top of t |
# | full recomputation | leaves 2 of the 34, and computes forward twice |
# | ZeRO, any stage | nothing. It shards what does not depend on s |
# | mixture of experts (chapter 16) | removes nothing: two experts per token, wide as the MLP, keep twice its bytes |
#
# The last two rows are worth a second look. ZeRO makes room for a longer sequence, because it shrinks the model's share
# of the memory, but the activations of the sequence stay as they are. A mixture of experts does not even make room: it
# adds parameters.

# %% [markdown]
# ## Two things that know where a token is
#
# We said that everything outside attention treats each token by itself. Two things do not, and forgetting either of
# them raises no error:
#
# - **Positions.** If each rank counts its tokens from 0, tokens on different ranks get the same position. RoPE then
#   rotates them alike. A reader of Megatron-LM's code suspected just that (issue 560).
# - **The mean of the loss.** If padding sits at the end of the sequence, ranks have different numbers of targets, and
#   the mean of their means is not the mean (torchtitan pull request 2206). This is chapter 02's weighted mean again.
#
# In the lab, you meet both.

# %% [markdown]
# ## The production version
#
# In torch, `context_parallel` in `torch.distributed.tensor.experimental` is a prototype. Inside its `with` block, the
# buffers that you name are cut, so name the positions, too. It also replaces `scaled_dot_product_attention`.
#
# | here | torch 2.13 | Megatron-LM |
# |---|---|---|
# | the ring | `set_rotate_method("alltoall")` | `--cp-comm-type p2p` |
# | all keys on each rank | `"allgather"`, the default | `--cp-comm-type all_gather` |
# | Ulysses | no | `--cp-comm-type a2a` |
# | zigzag | head-tail load balancer, on by default, for causal masks only | always, if the mask is causal |
# | online softmax | merges outputs by the log of their sums, in fp32 | the same |
#
# Why would anybody gather all keys? Llama 3 was trained that way, with N = 16 for its 128k sequences, and also in 2N
# chunks. With 8 heads of keys, gathering them is cheap next to the attention itself, and masks between documents are
# simpler if a rank has all keys (Grattafiori et al. 2024, §3.3).

# %% [markdown]
# ## Recap
#
# Per layer and rank, in the forward, with n = s/N tokens per rank:
#
# | | activations | wire: bytes sent, 16 bits | overlap |
# |---|---|---|---|
# | SP over N ranks | 1/N | 8(N − 1) · nh | matmuls in ring steps |
# | ring attention | 1/N, and two visiting blocks of keys | 4(N − 1) · nk | with attention, if n ≥ (2k/h) · C/W |
# | Ulysses | 1/N | 4(N − 1)/N · n(h + k), if N divides the key heads of a rank | none |
#
# Three numbers to keep: **n ≥ (2k/h) · C/W** tokens per rank hide the ring's forward, and backward needs a fifth more.
# The zigzag order takes **N/(2N − 1)** of the contiguous one's time. And 128k tokens of Llama-2 70B keep **344 GB** on
# each GPU with TP 8 and SP, 86 GB with CP 4 on top, and 5.4 GB if each layer is recomputed as well.
#
# **Terms**
#
# - **context parallelism** (CP): each rank keeps a part of every sequence, in all layers, attention included.
# - **ring attention**: exact attention in which queries stay on their rank, and keys and values move around a ring.
# - **online softmax**: a softmax over keys that arrive in blocks, from a running maximum, sum and value.
# - **zigzag order**: rank r has chunks r and 2N − 1 − r of a sequence, so that a causal mask costs all ranks the same.
# - **Ulysses**: attention between two all-to-alls, which swap a part of the tokens for a part of the heads and back.
#
# ## Further reading
#
# - Liu et al., [Ring Attention](https://arxiv.org/abs/2310.01889), 2023, §3: the ring, and when it is hidden.
# - Brandon et al., [Striped Attention](https://arxiv.org/abs/2311.09431), 2023: the triangle, and another order.
# - Jacobs et al., [DeepSpeed Ulysses](https://arxiv.org/abs/2309.14509), 2023, §3: the all-to-alls.
# - Fang and Zhao, [USP](https://arxiv.org/abs/2405.07719), 2024: both at once.
# - Grattafiori et al., [The Llama 3 Herd of Models](https://arxiv.org/abs/2407.21783), 2024, §3.3: CP in a real run.
# - [On a real cluster](../docs/cluster.md): which ranks share a sequence, and which add up gradients.

# %% [markdown]
# ## What is still wasted
#
# Layers are split by tensor parallelism, sequences by context parallelism. Both communicate in every layer. Chapter 15
# splits the model by *depth*, so that only the activations between two layers are sent.
#
# In the lab, you build the causal, balanced ring with its backward, and train a GPT with it.

# %%
ranks.stop()
