# ---
# jupyter:
#   course:
#     module: compression
# ---

# %% [markdown]
# # 19 · Less communication
#
# **35–55 minutes.** After this lesson, you will be able to:
#
# - predict how many bytes a step sends with bf16, INT8, top-k and PowerSGD,
# - explain why INT8 gradients need an all-to-all, scales and error feedback,
# - compute on which links compression makes a step faster, and on which slower,
# - say what local SGD and DiLoCo send, and when.
#
# You need the all-to-all and the ring (chapter 01), `OverlappedDDP` (chapter 04), and α and β (chapter 05). N is the
# number of ranks, and Ψ the number of parameters.

# %% [markdown]
# ## Where we are
#
# Chapter 04 hides what it can behind backward. On a slow link, the rest stays exposed, and no better algorithm
# removes it: unless the switches do the adding, an all-reduce of S bytes sends at least 2(N−1)/N · S bytes per rank,
# on average (chapter 01). One knob is left, and that is S itself.
#
# ## What is wasted
#
# Forget memory for a moment, and take a 7B model on 64 hosts with one A100 each, and 10 Gbit/s between the hosts. With
# 16k tokens per GPU, a step computes for 4.2 s, but the all-reduce of its bf16 gradients takes 21 s. Backward can hide
# 2.8 s of that, so in each step, the GPUs wait for more than 18 s.
#
# Yet a gradient is an estimate from a few samples, and its last digits are mostly noise. **Gradient compression** sends
# an approximation that needs fewer bits. How much faster would it make such a step? And would it still pay on a faster
# network?
#
# We measure with something smaller. The next cell starts four ranks on two hosts. Between the hosts, there is a link of
# 0.2 Gbit/s, which the two ranks of a host share.

# %% tags=["nbval-ignore-output"]
from shared import formulas, measure, ranks, tables
from shared.planner.shapes import SHAPES
from shared.plots import compression as compression_plots
from shared.plots import diagrams
from shared.predictions import predicted

measure.start_behind_link(world_size=4, rate="200mbit", ranks_per_host=2)

# %% [markdown]
# ## Sixteen bits
#
# What can you save without touching the all-reduce? A dtype of 16 bits halves its bytes. There are two:

# %%
# %%ranks 0
values = torch.tensor([1e-8, 1.001, 1e5])
print("fp16", values.half().tolist())
print("bf16", values.bfloat16().tolist())

# %% [markdown]
# fp16 has more digits, but a small range: 10⁻⁸ becomes zero, and 10⁵ becomes infinite. bf16 has the range of fp32, and
# about two decimal digits.

# %% [markdown]
# ## Eight bits
#
# To **quantize** means to round to a few values. Each element becomes an integer from −127 to 127, in one byte. An
# element approximately equals its integer times a **scale**: the largest absolute value, divided by 127. If one scale
# served all gradients, a single large element would turn all small ones into zeros. So each *block* of 256 elements has
# its own.
#
# **Predict.** From 32 bits to 8 sounds like a factor of 4. But each block also sends a 4-byte scale. By what factor
# does INT8 really shrink an fp32 gradient, and a bf16 one?

# %%
my_prediction = {"fp32": None, "bf16": None}

# %% [markdown]
# You will write `quantize` and `dequantize` in the lab. Here we import short versions. Do not open their file before
# the lab, because it gives most answers away. The cell prints four elements of a block, and what is left of them:

# %%
# %%ranks
from labs.compressors import BLOCK, dequantize, pack, quantize

block = torch.tensor([0.5, -0.2, 3.0, 0.005]).repeat(BLOCK // 4)
integers, scales = quantize(block)
print(f"{block[:4].tolist()} → {integers[:4].tolist()}, times a scale of {scales.item():.4f}")
message = pack(integers, scales)  # one tensor of bytes
ratios = [nbytes / message.nbytes for nbytes in (block.nbytes, block.bfloat16().nbytes)]

# %%
ratios = [round(ratio, 2) for ratio in ranks.pull("ratios")[0]]
print(f"{predicted((*my_prediction.values(),), '{} and {}')}measured {ratios}")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert ratios == [3.94, 1.97]

# %% [markdown]
# For 256 elements, INT8 sends 260 bytes instead of 1,024. Against the 512 bytes of bf16, it saves only a factor of two.

# %% [markdown]
# An all-reduce cannot add these integers up: in int8, 100 + 100 overflows to −56, and every rank has its own scales.
# Ranks have to dequantize before they add. So we build the all-reduce from two collectives that only move bytes. In the
# diagram, a block has only two elements. Follow the first shard:

# %%
diagrams.quantized_all_reduce()

# %% [markdown]
# In an all-to-all, each rank gets its own shard from all ranks. It adds the shards up in fp32, quantizes the sum, and
# all-gathers it. ZeRO++ replaces its reduce-scatter in this way, even with 4 bits (Wang et al. 2023).

# %% [markdown]
# ## Keeping what was not sent
#
# Rounding loses something in each step. Does it average out? In the next cell, one element of a block is 1.0 in every
# step, and all others are 0.003.
#
# **Predict.** After 100 steps, a small element should add up to 0.3. What is its sum if you quantize each gradient?

# %%
my_prediction = None

# %%
# %%ranks 0
gradient = torch.full((BLOCK,), 0.003).index_fill(0, torch.tensor(0), 1.0)
lossy, kept, unsent = torch.zeros(BLOCK), torch.zeros(BLOCK), torch.zeros(BLOCK)
for _ in range(100):
    lossy += dequantize(*quantize(gradient))
    unsent += gradient
    sent = dequantize(*quantize(unsent))
    unsent -= sent
    kept += sent
print(f"quantized gradients: {lossy[1]:.3f}, with what was not sent: {kept[1]:.3f}")

# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks 0
assert lossy[1] == 0 and abs(kept[1] - 0.3) < 0.004

# %% [markdown]
# The scale is 1/127 = 0.008, so 0.003 is always rounded to zero. The sum stays 0.

# %% [markdown]
# For the second sum, the rank keeps what it has not sent, and adds it to the next gradient. This is called **error
# feedback**. After two steps, 0.006 is rounded to 0.008. Nothing is lost: everything applied plus everything unsent
# equals the sum of all gradients.
#
# INT8 rounds twice, so there are two errors. Each stays on the rank that made it: the first one on every rank, the
# second one on the rank that has added up the shard.

# %% [markdown]
# ## A compressor behind backward
#
# To hide compressed messages behind backward, `OverlappedDDP` takes a `compressor`. When a bucket is full, the
# compressor's `exchange(bucket)` launches a collective, and backward goes on. But INT8 needs the result of the first
# collective for the second one. So `exchange` is a *generator*: it yields the handle of each collective. After
# backward, the bucket's `wait()` waits for the handle, and continues the generator. With bf16, there is only one
# `yield`:


# %%
# %%ranks
from labs.compressors import Compressor, Int8, PowerSGD, TopK


class Bf16(Compressor):
    def exchange(self, bucket):
        sent = bucket.unsent.bfloat16()  # of this step, and whatever is left of earlier ones
        bucket.unsent -= sent
        yield dist.all_reduce(sent, async_op=True)
        bucket.flat.copy_(sent)  # what the optimizer will see


# %% [markdown]
# ## The largest elements only
#
# If nothing unsent is lost, why send every element in every step? **Top-k** compression sends the k elements with the
# largest absolute values. All others stay unsent, until they have become large. The diagram shows it for k = 2:

# %%
diagrams.top_k()

# %% [markdown]
# Every rank chooses its own elements. So it also sends their indices, and gathers the values of all ranks. This
# all-gather sends (N−1) · 8 bytes per chosen element, 4 of which are the index. The fp32 all-reduce sends 2(N−1)/N · 4
# bytes per element. So top-k saves bytes only if it sends less than 1/N of the elements: 25% for 4 ranks, but 1.6% for
# 64. A method whose messages can be added up does not get more expensive with every rank.

# %% [markdown]
# ## A product of two thin matrices
#
# Here is such a method. The gradient of a linear layer is a matrix. **PowerSGD** approximates it by P·Qᵀ, where P and Q
# have only r columns (r is often 1 to 4). Vogels et al. (2019) compute them with one step of a power iteration, and
# start with the summed Q of the previous training step:

# %%
diagrams.low_rank()

# %% [markdown]
# In the formulas, M is a rank's matrix in `unsent`, and Σ is a sum over the ranks:
#
# ```
# P = Σ M·Q             all-reduce
# P = orthogonalize(P)
# Q = Σ Mᵀ·P            all-reduce
# ΣM ≈ P·Qᵀ
# M ← M − P·(Mᵀ·P)ᵀ     this rank has sent its own part of P·Qᵀ
# ```
#
# P is linear in M, so it can be all-reduced, and so can Q afterwards. In between, P's columns are made orthonormal, so
# that P·Qᵀ is the closest matrix to ΣM that they can form. An n × m matrix costs r(n + m) elements.

# %% [markdown]
# ## What the loss costs in bytes
#
# Does a network still learn? We train a small one on digits, with SGD and momentum, behind our link of 0.2 Gbit/s.


# %%
# %%ranks
import time

from torch import nn

from shared import measure, wire
from shared.data import digits
from shared.models import MLP
from solutions.manual_ddp import mean_over_ranks_
from solutions.overlapped_ddp import OverlappedDDP

images, labels = digits()


class Classifier(MLP):
    def forward(self, picked):
        return nn.functional.cross_entropy(super().forward(images[picked]), labels[picked])


def trained(compressor, steps=200):
    """Return the bytes that a rank has sent per step, the seconds per step, and the mean loss of each step."""
    model = OverlappedDDP(Classifier((64, 384, 384, 10)), compressor=compressor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    draws = torch.Generator().manual_seed(rank)
    picked = torch.randint(len(images), (steps, 24), generator=draws)
    dist.barrier()
    start = time.perf_counter()
    with wire.ledger() as log:
        losses = torch.tensor([measure.train_step(model, optimizer, each) for each in picked])
    seconds = time.perf_counter() - start
    mean_over_ranks_(losses)
    return log.sent_bytes / steps, seconds / steps, losses.tolist()


# %%
# %%ranks --timeout 300
compressors = {
    "fp32": None,
    "bf16": Bf16(),
    "INT8": Int8(),
    "top 0.3%": TopK(0.003),
    "PowerSGD, r = 2": PowerSGD(2),
}
runs = {name: trained(compressor) for name, compressor in compressors.items()}

# %% [markdown]
# In the figure, all lines end after 200 steps. How far to the left of fp32 does each of them end, and how much higher?

# %% tags=["nbval-ignore-output"]
runs = ranks.pull("runs")[0]
compression_plots.loss_against_bytes({name: (run[0], run[2]) for name, run in runs.items()})

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
last = {name: sum(losses[-20:]) / 20 for name, (_, _, losses) in runs.items()}
assert max(last[name] for name in ("bf16", "INT8", "PowerSGD, r = 2")) < last["fp32"] + 0.05
assert last["top 0.3%"] > last["fp32"] + 0.05
fewer = {name: runs["fp32"][0] / run[0] for name, run in runs.items()}
assert [round(fewer[name]) for name in ("top 0.3%", "PowerSGD, r = 2")] == [83, 44]
measure.expect(runs["bf16"][1] < runs["fp32"][1], "bf16 saves time on a slow link")

# %% [markdown]
# bf16 and INT8 reach the loss of fp32. PowerSGD is the bargain here: it gets there, too, with 44 times fewer bytes.
# Top-k sends half of that, and pays for it with a loss of 0.18 instead of 0.09.
#
# Fewer bytes are not yet less time. In the next figure, the lines end after the same 200 steps. Which one ends first?

# %% tags=["nbval-ignore-output"]
compression_plots.loss_against_seconds(
    {name: (run[1], run[2]) for name, run in runs.items()}, "0.2 Gbit/s between two hosts"
)

# %% [markdown]
# That depends on the cores: in our runs, sometimes top-k ended first, and sometimes bf16. No method comes near the
# factors of 44 and 83 that the bytes promise, because what is left is computing, and compression adds to it. Where four
# ranks share few cores, INT8 and top-k can even take longer than fp32.
#
# How much compression a model tolerates also depends on the optimizer. SGD tolerates elements that come late. But Adam
# divides each element by its recent size. Error feedback breaks that: an element that is 0 for nine steps and then
# carries ten gradients at once gets the wrong scale. 1-bit Adam therefore begins without compression. Then it fixes
# Adam's variance, and compresses the momentum (Tang et al. 2021).

# %% [markdown]
# ## When compression makes a step slower
#
# Backward hides an all-reduce of S bytes up to T, the time of backward itself. What stays exposed is at least:
#
# ```
# exposed(S) = max(0, 2(N−1)α + 2fSβ − T)          f = (N−1)/N
# ```
#
# In practice, it is more, because the last bucket has nothing left to hide behind (chapter 04).
#
# Let compression take t seconds of computing, and send S′ bytes. It pays if
#
# ```
# t + exposed(S′) < exposed(S)
# ```
#
# So if nothing is exposed, nothing can be saved. INT8 has a second problem: its all-gather needs the sum of the
# all-to-all. Our buckets launch it in `wait()`, after backward, where nothing hides it.
#
# **Predict.** Back to the 7B model on 64 hosts with one A100 each, at 16k tokens per GPU and with gradients in bf16. At
# which rates does INT8 make a step faster: 10, 100 or 400 Gbit/s?

# %%
my_prediction = None

# %% [markdown]
# The next cell leaves out t and α, which would only make INT8 look worse.

# %%
psi, gpus = SHAPES["Llama-2 7B"].parameters, 64
backward_s = 4 * psi * 16_384 / 156e12  # at half of an A100's 312 TFLOP/s
step_s, rows = 1.5 * backward_s, []  # forward takes half as long as backward
for gbit in (10, 100, 400):
    bf16_s = formulas.all_reduce_sent_bytes(2 * psi, gpus) / (gbit / 8 * 1e9)
    int8_s = bf16_s * (1 + 4 / 256) / 2
    bf16_exposed = max(0, bf16_s - backward_s)
    int8_exposed = max(0, int8_s / 2 - backward_s) + int8_s / 2  # all-to-all, all-gather
    ratio = (step_s + int8_exposed) / (step_s + bf16_exposed)
    of = (bf16_s, bf16_exposed, int8_s, int8_exposed, ratio)
    rows.append([f"{gbit} Gbit/s", *(f"{each:.2f}" for each in of)])
faster = [row[0] for row in rows if float(row[-1]) < 1]
print(f"{predicted(my_prediction)}INT8 saves time at {', '.join(faster)}")
header = ["", "bf16, s", "exposed, s", "INT8, s", "exposed, s", "step, INT8 / bf16"]
tables.Table(header, rows, f"Backward takes {backward_s:.1f} s, and forward half of that.")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert faster == ["10 Gbit/s"] and rows[0][1:3] == ["21.23", "18.40"]

# %% [markdown]
# At 10 Gbit/s, INT8 almost halves a step. At 100 and 400 Gbit/s, backward already hides everything that bf16 sends, so
# the exposed all-gather is pure loss. If it were hidden, too, INT8 would still save nothing. In data centers, links are
# fast, most communication is hidden already, and some methods cannot use an all-reduce: only 6 of more than 200 setups
# became faster than optimized data parallelism (Agarwal et al., MLSys 2022).

# %% [markdown]
# ## Compressing only between hosts
#
# With k GPUs per host, INT8 wastes what a ring saves. In a ring, only one rank of a host sends to the next host. In
# the all-to-all, all k of them do, so with many hosts, almost k times as many elements leave each host. With eight
# GPUs, that is almost eight times as many, each in about a quarter of fp32's bytes. So the all-to-all sends twice as
# much between hosts as the reduce-scatter that it replaces. The remedy is three hops:
#
# 1. a reduce-scatter inside each host, on the fast links, in full precision,
# 2. INT8 between the ranks of different hosts that have the same shard,
# 3. an all-gather inside each host.
#
# ZeRO++ splits its all-to-all into two hops for this reason. We try it on our two hosts of two ranks:

# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh

from shared.c10d import all_gather_single, reduce_scatter_single

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "inside"))
between, inside = mesh.get_group("host"), mesh.get_group("inside")


def int8_all_reduce(tensor, group=None):
    bucket = Int8().new_bucket([nn.Parameter(tensor)], group)
    bucket.flat.copy_(tensor)
    bucket.launch()
    bucket.wait()
    return bucket.flat


def int8_between_hosts(tensor):
    shard, total = tensor.new_empty(len(tensor) // 2), torch.empty_like(tensor)
    reduce_scatter_single(shard, tensor, group=inside)
    all_gather_single(total, int8_all_reduce(shard, between), group=inside)
    return total


# %% [markdown]
# **Predict.** In fp32, a ring of four ranks sends 1.5 S from each host. INT8 among all four sends 2 · S/3.94 = 0.51 S,
# because our all-gather sends directly to each rank, too. What does INT8 between hosts send from each host, as a
# multiple of S?

# %%
my_prediction = None

# %%
# %%ranks
torch.manual_seed(rank)
gradient = torch.randn(1_000_000)
ways = {
    "fp32": lambda: dist.all_reduce(gradient.clone()),
    "INT8 among all ranks": lambda: int8_all_reduce(gradient),
    "INT8 between hosts": lambda: int8_between_hosts(gradient),
}
times = measure.jobs(ways, rounds=5)

# %% tags=["nbval-ignore-output"]
print(f"{predicted(my_prediction, '{} S')}by the formula 1/3.94 = {1 / 3.94:.2f} S")
times = ranks.pull("times")[0]
times

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
# %%ranks
exact = gradient.clone()
dist.all_reduce(exact)
assert (int8_between_hosts(gradient) - exact).norm() < 0.02 * exact.norm()

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
measure.expect(times.ratio("INT8 between hosts", "INT8 among all ranks") < 1, "two hops save time")

# %% [markdown]
# Each of the two ranks of a host all-reduces S/2 with one other rank, and sends half of it twice: S/2 per rank, S in
# total, 3.94 times smaller. A host sends 25 MB per second, and S is 4 MB. So 1.5 S, 0.51 S and 0.25 S should take 240,
# 81 and 41 ms. In our runs, fp32 came within 15 ms of that. The other two took up to 35 ms more, because they also
# quantize.

# %% [markdown]
# ## Sending less often
#
# You can also send the same bytes less often. In **local SGD**, each rank takes H optimizer steps by itself, on its own
# batches. Only then do the ranks average their parameters:

# %%
diagrams.local_sgd()

# %% [markdown]
# **DiLoCo** treats the ranks' average movement as a gradient. This **pseudogradient** is the shared parameter minus
# the mean of the ranks' parameters. An *outer* optimizer takes a step with it: SGD with a learning rate of 0.7 and a
# Nesterov momentum of 0.9. With momentum 0 and a learning rate of 1, this would be local SGD. In the paper, eight
# replicas of a language model took their own steps with AdamW, exchanged parameters every H = 500 steps, and reached
# about the perplexity of data parallelism (Douillard et al. 2023).
#
# What does that buy on a link of 1 Gbit/s? There, the 7B model above would compute for 4.2 s, and then exchange bf16
# gradients for 212 s, in *every* step. DiLoCo's exchange in float32 takes twice as long, 424 s. But it is needed only
# once in 500 steps, which compute for 2,100 s, so it adds a fifth. How large must H be for it to add a tenth?
#
# <details><summary>Answer</summary>
#
# 424 s / (0.1 · 4.2 s) ≈ 1,000 steps.
#
# </details>
#
# INTELLECT-1, with 10B parameters, was trained like this on up to 14 hosts on three continents. It exchanged in INT8
# every H = 100 steps. Compared with fp32 gradients in every step, it sent 4 · 100 times fewer bytes (Jaghouar et al.
# 2024, arXiv 2412.01152).
#
# ### Found in the wild
#
# From January to July 2025, torchft's DiLoCo subtracted the other way round: a rank's parameters minus the shared ones.
# So the outer optimizer stepped away from what the ranks had learned. Nothing raised an error. A unit test of June even
# expected this sign: the gradient that it compares with was 4, and the fix made it −4 (pull request 233).

# %% [markdown]
# ## The production version
#
# | here | in production |
# |---|---|
# | `Bf16` | `bf16_compress_hook`, `fp16_compress_hook`, without error feedback |
# | `Int8` | ZeRO++ in DeepSpeed (`zero_quantized_gradients`), for ZeRO-3; 1-bit Adam (the momentum, with both errors) |
# | `PowerSGD` | `powerSGD_hook`, which launches the second all-reduce as soon as the first one is complete |
# | local SGD | `post_localSGD_hook` with `PostLocalSGDOptimizer` |
# | DiLoCo | `torchft.local_sgd.DiLoCo` |

# %% [markdown]
# ## Recap
#
# The bytes are per rank and step, for Ψ gradients in fp32. f is (N−1)/N.
#
# | | bytes sent | additional memory | where it applies |
# |---|---|---|---|
# | fp32 | 8fΨ | | |
# | bf16 | 4fΨ | (4Ψ with feedback) | everywhere |
# | INT8 | 2fΨ · (1 + 4/256) | 4Ψ | slow links |
# | top-k | 8(N−1) K, for K elements in all buckets | 4Ψ | few ranks, K below Ψ/N |
# | PowerSGD | 8f · r(n + m) per matrix | 4Ψ and Q | slow links |
# | DiLoCo | 8fΨ / H | 8Ψ: shared parameters and momentum | between data centers |
#
# Compression pays if t + exposed(S′) < exposed(S), where exposed(S) is at least max(0, 2(N−1)α + 2fSβ − T). With INT8
# and PowerSGD, the second collective of a bucket needs the result of the first one, and ours starts after backward.
#
# **Terms**
#
# - **gradient compression**: sending an approximation of the gradients that needs fewer bytes.
# - **quantize**: to round to a few values. A quantized element is an integer times a scale.
# - **scale**: the number that the integers of a quantized block are multiplied by.
# - **error feedback**: adding to a rank's gradients what it has not sent in earlier steps.
# - **top-k**: compression that sends the k elements with the largest absolute values, and their indices.
# - **PowerSGD**: compression of a matrix into a product of two thin ones, which can be all-reduced.
# - **local SGD**: training in which ranks average their parameters every H optimizer steps.
# - **DiLoCo**: local SGD that passes the pseudogradient to an outer optimizer with Nesterov momentum.
# - **pseudogradient**: the shared parameters minus the mean of those that the ranks have after H steps.
#
# ## Further reading
#
# - [On a real cluster](../docs/cluster.md): where compression belongs.
# - Vogels et al., *PowerSGD*, NeurIPS 2019 (arXiv 1905.13727): the algorithm, and why linearity matters.
# - Wang et al., *ZeRO++*, 2023 (arXiv 2306.10209): all three collectives of ZeRO-3 with fewer bytes.
# - Agarwal et al., *On the Utility of Gradient Compression*, MLSys 2022 (arXiv 2103.00543): a model of when it pays.
# - Douillard et al., *DiLoCo*, 2023 (arXiv 2311.08105): how the loss depends on H and on the number of ranks.

# %% [markdown]
# ## What is still wasted
#
# The methods of this course assume that ranks are equally fast, and rarely fail. Between data centers, neither is true:
# a step, or H steps, takes as long as the slowest rank, and every collective needs all ranks.
#
# This was the last lesson. In the first one, you started four ranks. Now you can say what each of them holds, what it
# sends, and what hides it. In the last lab, you build `Int8`, `TopK` and `PowerSGD`. Then you break them.

# %%
ranks.stop()
