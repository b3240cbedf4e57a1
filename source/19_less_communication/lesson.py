# ---
# jupyter:
#   course:
#     module: compression
# ---

# %% [markdown]
# # 19 · Less communication
#
# **50–80 minutes.** After this lesson, you will be able to:
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
# How much is there to gain? The next cells record a step of `OverlappedDDP` behind a link of 1 Gbit/s. As in chapter
# 01, the ranks run on the CPU and delay each message, so the link is emulated. Each block of the GPT sleeps as a
# stand-in for a GPU.

# %% tags=["nbval-ignore-output"]
from shared import measure, plots, ranks, tables
from shared.plots import compression as compression_plots
from shared.plots import diagrams
from shared.predictions import predicted

ranks.start(world_size=4, backend="gloo:cpu", detect_mismatch=False)

# %% tags=["nbval-ignore-output"]
# %%ranks
from torch import nn

from shared import measure, timeline, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT, stand_in_for_gpu
from solutions.overlapped_ddp import OverlappedDDP

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=6, width=192)
sample = text.windows([1000 * rank], length=16)


def step_of(compressor=None):
    """Return a large model, wrapped, and its training step as a job."""
    model = TinyGPT(config)
    stand_in_for_gpu(model.blocks, forward_ms=8, backward_ms=16)
    model = OverlappedDDP(model, bucket_cap_mb=2.0, compressor=compressor)
    return model, measure.training_step(model, *sample)


model, step = step_of()
with measure.behind_link("1gbit", latency_ms=0.1):
    line = measure.recorded({"step": step}, lambda: timeline.record(model), rounds=5)["step"][0]

# %% [markdown]
# ## What is wasted
#
# In the figure, compare the time marked as `waits` with the time of the whole step:

# %% tags=["nbval-ignore-output"]
line = ranks.pull("line")[0]
measure.expect(line.exposed_ms > 30, "communication is exposed")
plots.timeline([line])

# %% [markdown]
# In our run, almost a quarter of the step is waiting. The gradients take 10.8 MB, because each element has 32 bits. But
# a gradient is an estimate from a few samples, so its last digits are mostly noise. **Gradient compression** sends an
# approximation that needs fewer bits.

# %% [markdown]
# ## Sixteen bits
#
# The simplest approximation is a dtype of 16 bits. There are two:

# %%
# %%ranks 0
values = torch.tensor([1e-8, 1.001, 1e5])
print("fp16", values.half().tolist())
print("bf16", values.bfloat16().tolist())

# %% [markdown]
# fp16 has more digits, but a small range: 10⁻⁸ becomes zero, and 10⁵ becomes infinite. bf16 has the range of fp32, and
# about two decimal digits. Either way, an all-reduce needs half the bytes, and three lines:

# %%
# %%ranks
gradient = torch.randn(100_000)
with wire.ledger() as log:
    sent = gradient.bfloat16()
    dist.all_reduce(sent)
    gradient.copy_(sent)
sent_in_16_bits = log.sent_bytes

# %%
print(f"{ranks.pull('sent_in_16_bits')[0] / 1e3:.0f} kB sent by a rank, instead of 600 kB in fp32")
assert ranks.pull("sent_in_16_bits")[0] == 300_000

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
# You will write `quantize` and `dequantize` in the lab. Here we import short versions from `labs/compressors.py`. Do
# not open this file before the lab: it gives most answers away. The first print shows one block of 256 elements:
# compare its first elements with what is left of them.

# %%
# %%ranks
from labs.compressors import BLOCK, dequantize, pack, quantize

block = torch.tensor([0.5, -0.2, 3.0, 0.005]).repeat(BLOCK // 4)
integers, scales = quantize(block)
print(f"{block[:4].tolist()} → {integers[:4].tolist()}, times a scale of {scales.item():.4f}")
torch.manual_seed(0)
fp32 = torch.randn(100 * BLOCK)
message = pack(*quantize(fp32))  # integers and scales in one tensor of bytes
ratios = [nbytes / message.nbytes for nbytes in (fp32.nbytes, fp32.bfloat16().nbytes)]
overflow = torch.tensor(100, dtype=torch.int8) + torch.tensor(100, dtype=torch.int8)

# %%
ratios = [round(ratio, 2) for ratio in ranks.pull("ratios")[0]]
print(f"{predicted((*my_prediction.values(),), '{} and {}')}measured {ratios}")
print(f"100 + 100 in int8: {ranks.pull('overflow')[0].item()}")
assert ratios == [3.94, 1.97]

# %% [markdown]
# Against bf16, INT8 saves only a factor of two. And an all-reduce cannot add it up: 100 + 100 overflows, and every rank
# has its own scales. Ranks have to dequantize before they add. So we build the all-reduce from two collectives that
# only move bytes. In the diagram, a block has only two elements. Follow the first shard:

# %%
diagrams.quantized_all_reduce()

# %% [markdown]
# In an all-to-all, each rank gets its own shard from all ranks. It adds the shards up in fp32, quantizes the sum, and
# all-gathers it. ZeRO++ replaces its reduce-scatter in this way, even with 4 bits (Wang et al. 2023).

# %% [markdown]
# ## Keeping what was not sent
#
# Rounding loses something in each step. Does it average out? In this cell, one element of a block is 1.0 in every step,
# and all others are 0.003.
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
assert lossy[1] == 0 and abs(kept[1] - 0.3) < 0.004

# %% [markdown]
# The scale is 1/127 = 0.008, so 0.003 is always rounded to zero. For the second sum, the rank keeps what it has not
# sent, and adds it to the next gradient. After two steps, 0.006 is rounded to 0.008. This is called **error feedback**.
# Everything applied plus everything unsent equals the sum of all gradients.
#
# INT8 rounds twice, so there are two errors. Each stays on the rank that made it: the first one on every rank, the
# second one on the rank that has added up the shard.

# %% [markdown]
# ## Two collectives behind backward
#
# To hide all this behind backward, `OverlappedDDP` takes a `compressor`. When a bucket is full, the compressor's
# `exchange(bucket)` launches a collective, and backward goes on. But INT8 now needs the result of the first collective
# for the second one. So `exchange` is a *generator*: it yields the handle of each collective, and continues when that
# one is complete. With bf16, there is only one `yield`:


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
# `Bf16` still loses a little, because its all-reduce rounds the sums, too. torch's own hook for bf16 keeps no error.

# %% [markdown]
# ## The largest elements only
#
# With error feedback, we may leave out most elements. **Top-k** compression sends the k elements with the largest
# absolute values. All others stay unsent, until they have become large. The diagram shows it for k = 2:

# %%
diagrams.top_k()

# %% [markdown]
# Every rank chooses its own elements. So it also sends their indices, and gathers the values of all ranks.
#
# **Predict.** An all-gather sends (N−1) · 8 bytes per chosen element, 4 of which are the index. The fp32 all-reduce
# sends 2(N−1)/N · 4 bytes per element. What share of the elements can four ranks send before top-k needs *more* bytes?

# %%
my_prediction = None


# %%
# %%ranks
def sent_bytes(compressor=None):
    """Return the bytes that a rank sends for the gradients of 100,000 elements."""
    model = OverlappedDDP(nn.Linear(100_000, 1, bias=False), compressor=compressor)
    with wire.ledger() as log:
        model(torch.randn(100_000)).sum().backward()
    return log.sent_bytes


by_share = {share: sent_bytes(TopK(share)) for share in (0.01, 0.1, 0.25, 0.5)}
of_fp32 = sent_bytes()

# %%
by_share, of_fp32 = ranks.pull("by_share")[0], ranks.pull("of_fp32")[0]
for share, nbytes in by_share.items():
    print(f"{share:.0%} of the elements: {nbytes / of_fp32:.2f} × the bytes of fp32")
print(predicted(my_prediction, "{:.0%}", "\n"), end="")
assert by_share[0.25] == of_fp32

# %% [markdown]
# Break-even is at 1/N: 25% for 4 ranks, but 1.6% for 64. Each rank receives the elements of *all* others, so top-k gets
# more expensive with every rank. A method whose messages can be added up does not.

# %% [markdown]
# ## A product of two thin matrices
#
# The gradient of a linear layer is a matrix. **PowerSGD** approximates it by P·Qᵀ, where P and Q have only r columns (r
# is often 1 to 4). Vogels et al. (2019) compute them with one step of a power iteration, and start with the summed Q of
# the previous training step:

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
# that P·Qᵀ is the closest matrix to ΣM that they can form. An n × m matrix costs r(n + m) elements. Biases are sent as
# they are.

# %% [markdown]
# ## What the loss costs in bytes
#
# Does a network still learn? We train a small one on digits, with SGD and momentum, behind an emulated link of 0.2
# Gbit/s. One of the runs is top-k without error feedback.


# %%
# %%ranks
import time

from shared.data import digits
from shared.models import MLP

images, labels = digits()


class Classifier(MLP):
    def __init__(self):
        super().__init__((64, 384, 384, 10))

    def forward(self, images, labels):
        return nn.functional.cross_entropy(super().forward(images), labels)


# %%
# %%ranks
class Forgetful(TopK):
    def exchange(self, bucket):
        bucket.unsent.copy_(bucket.flat)  # drops what the steps before have not sent
        return super().exchange(bucket)


def batches(steps):
    draws = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        picked = torch.randint(len(images), (24,), generator=draws)
        yield images[picked], labels[picked]


def trained(model, steps=200):
    """Return the bytes that a rank has sent per step, the seconds per step, and the mean loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dist.barrier()
    start = time.perf_counter()
    with wire.ledger() as log:
        losses = [measure.train_step(model, optimizer, *batch) for batch in batches(steps)]
    seconds = time.perf_counter() - start
    return log.sent_bytes / steps, seconds / steps, mean_over_ranks(losses)


def mean_over_ranks(losses):
    total = torch.tensor(losses)
    dist.all_reduce(total)
    return (total / world_size).tolist()


# %%
# %%ranks --timeout 300
compressors = {
    "fp32": None,
    "bf16": Bf16(),
    "INT8": Int8(),
    "top 0.3%": TopK(0.003),
    "top 0.3%, no feedback": Forgetful(0.003),
    "PowerSGD, r = 2": PowerSGD(2),
}
runs = {}
with measure.behind_link("200mbit", latency_ms=0.1):
    for name, compressor in compressors.items():
        runs[name] = trained(OverlappedDDP(Classifier(), compressor=compressor))

# %% [markdown]
# In the figure, all lines end after 200 steps. How far to the left of fp32 does each of them end, and how much higher?

# %% tags=["nbval-ignore-output"]
runs = ranks.pull("runs")[0]
last = {name: sum(losses[-20:]) / 20 for name, (_, _, losses) in runs.items()}
rows = [
    [name, f"{nbytes / 1e3:.1f}", f"{runs['fp32'][0] / nbytes:.1f}", f"{last[name]:.2f}"]
    for name, (nbytes, _, _) in runs.items()
]
print(tables.Table(["", "kB sent per step", "times fewer", "last loss"], rows))
assert max(last[name] for name in ("bf16", "INT8", "PowerSGD, r = 2")) < last["fp32"] + 0.05
assert last["top 0.3%"] < last["top 0.3%, no feedback"]
compression_plots.loss_against_bytes({name: (run[0], run[2]) for name, run in runs.items()})

# %% [markdown]
# bf16 and INT8 reach the loss of fp32. PowerSGD is the bargain here: it does, too, with 44 times fewer bytes. Top-k
# sends half of that, and pays for it with a loss of 0.18 instead of 0.09. Without error feedback, it is worse still.
#
# Fewer bytes are not yet less time. In this figure, the lines end after the same 200 steps. Which one ends first?

# %% tags=["nbval-ignore-output"]
measure.expect(runs["bf16"][1] < runs["fp32"][1], "bf16 saves time on a slow link")
compression_plots.loss_against_seconds(
    {name: (run[1], run[2]) for name, run in runs.items()},
    "Behind an emulated link of 0.2 Gbit/s",
)

# %% [markdown]
# In our run, bf16 and PowerSGD took about half of the time of fp32, INT8 about a third, and top-k a little less. None
# came near the factors of 44 and 83 that the bytes promise: what is left is computing, and compression adds to it.
# PowerSGD sends a tenth of INT8's bytes, but takes longer: its products and its orthogonal columns cost time.
#
# How much compression a model tolerates also depends on the optimizer: the theory of error feedback is about SGD. Adam
# divides each element by its recent size. Error feedback breaks that: an element that is 0 for nine steps and then
# carries ten gradients at once gets the wrong scale. 1-bit Adam therefore begins without compression. Then it fixes
# Adam's variance, and compresses the momentum (Tang et al. 2021).

# %% [markdown]
# ## torch's PowerSGD
#
# torch has some of these as communication hooks of DDP (chapter 04). The next cell trains with its PowerSGD. DDP
# rebuilds its buckets after the first step, and an old bucket's error would be added to the wrong gradients. So
# PowerSGD must start in iteration 2 or later:


# %%
# %%ranks --timeout 180
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel

try:
    power.PowerSGDState(None, start_powerSGD_iter=1)
except ValueError as error:
    print(error)
ddp = DistributedDataParallel(Classifier())
state = power.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1)
ddp.register_comm_hook(state, power.powerSGD_hook)
torchs = trained(ddp)

# %% tags=["nbval-ignore-output"]
torchs = sum(ranks.pull("torchs")[0][2][-20:]) / 20
print(f"last loss: ours {last['PowerSGD, r = 2']:.2f}, torch's {torchs:.2f}")
assert abs(torchs - last["PowerSGD, r = 2"]) < 0.15

# %% [markdown]
# ## When compression makes a step slower
#
# Backward hides an all-reduce of S bytes up to T, the time of backward itself. What stays exposed is at least:
#
# ```
# exposed(S) = max(0, 2(N−1)α + 2fSβ − T)          f = (N−1)/N
# ```
#
# It is more than that in practice, because the last bucket has nothing left to hide behind (chapter 04).
#
# Let compression take t seconds of computing, and send S′ bytes. It pays if
#
# ```
# t + exposed(S′) < exposed(S)
# ```
#
# So if nothing is exposed, nothing can be saved. INT8 has a second problem: its all-gather needs the sum of the
# all-to-all. Our `Int8` launches it in `wait()`, after backward, where nothing hides it. PowerSGD's second all-reduce
# is exposed, too, but small.
#
# **Predict.** A 7B model trains on 64 hosts with one A100 each, at 16k tokens per GPU. Backward takes 2.8 s, and
# gradients are in bf16. At which rates does INT8 make a step faster: 10, 100 or 400 Gbit/s?

# %%
my_prediction = None

# %% [markdown]
# The next cell leaves out t and α, which would only make INT8 look worse. It also leaves out that the last bucket
# stays exposed: here, that is the embedding, with 2% of all bytes.

# %%
from shared import formulas
from shared.planner.shapes import SHAPES

psi, tokens, gpus = SHAPES["Llama-2 7B"].parameters, 16_384, 64
flops_per_s = 156e12  # half of an A100's 312 TFLOP/s
backward_s = 4 * psi * tokens / flops_per_s
rows, saves = [], []
for gbit in (10, 100, 400):
    bf16_s = formulas.all_reduce_sent_bytes(2 * psi, gpus) / (gbit / 8 * 1e9)
    int8_s = bf16_s * (1 + 4 / 256) / 2
    bf16_exposed = max(0, bf16_s - backward_s)
    int8_exposed = max(0, int8_s / 2 - backward_s) + int8_s / 2  # all-to-all, all-gather
    computing_s = 1.5 * backward_s  # forward takes half as long as backward
    ratio = (computing_s + int8_exposed) / (computing_s + bf16_exposed)
    saves += [gbit] if ratio < 1 else []
    of = (bf16_s, bf16_exposed, int8_s, int8_exposed)
    rows.append([f"{gbit} Gbit/s", *(f"{each:.2f}" for each in of), f"{ratio:.2f}"])
print(f"{predicted(my_prediction)}INT8 saves time at {saves} Gbit/s")
assert saves == [10]
header = ["", "bf16, s", "exposed, s", "INT8, s", "exposed, s", "step, INT8 / bf16"]
tables.Table(header, rows, f"Backward takes {backward_s:.1f} s, and forward half of that.")

# %% [markdown]
# At 10 Gbit/s, INT8 almost halves a step. At 100 and 400 Gbit/s, backward already hides everything that bf16 sends, so
# the exposed all-gather is pure loss. If it were hidden, too, INT8 would still save nothing. In data centers, links are
# fast, most communication is hidden already, and some methods cannot use an all-reduce: only 6 of more than 200 setups
# became faster than optimized data parallelism (Agarwal et al., MLSys 2022).

# %% [markdown]
# ### On the CPUs of this course
#
# Here, t is large: four ranks share a few cores, and it takes milliseconds to quantize a bucket. The next cell times a
# step of the large GPT behind emulated links of 0.2 and 1 Gbit/s, and over loopback.
#
# **Predict.** By what factor does INT8 change the time of a step on each link? 1 would mean no change.

# %%
my_prediction = {"0.2 Gbit/s": None, "1 Gbit/s": None, "loopback": None}

# %%
# %%ranks --timeout 300
jobs, sent_mb = {}, {}
for name in ("fp32", "bf16", "INT8", "top 0.3%", "PowerSGD, r = 2"):
    model, jobs[name] = step_of(compressors[name])
    with wire.ledger() as log:
        model(*sample).backward()
    sent_mb[name] = log.sent_bytes / 1e6
times = {}
for name, rate in {"0.2 Gbit/s": "200mbit", "1 Gbit/s": "1gbit"}.items():
    with measure.behind_link(rate, latency_ms=0.1):
        times[name] = measure.jobs(jobs, rounds=5)
times["loopback"] = measure.jobs(jobs, rounds=5)

# %% tags=["nbval-ignore-output"]
times, sent_mb = ranks.pull("times")[0], ranks.pull("sent_mb")[0]
rows = [
    [name, f"{mb:.2f}", *(f"{measured.ms()[name]:.0f}" for measured in times.values())]
    for name, mb in sent_mb.items()
]
for where, mine in my_prediction.items():
    factor = times[where].ratio("INT8", "fp32")
    print(f"INT8, {where}: {predicted(mine)}measured {factor:.2f}")
slowest = max(times["loopback"].ratio(name, "fp32") for name in sent_mb)
least_saved = max(times["0.2 Gbit/s"].ratio(name, "fp32") for name in sent_mb if name != "fp32")
measure.expect(least_saved < 1, "everything saves time on the slowest link")
measure.expect(times["1 Gbit/s"].ratio("bf16", "fp32") < 1, "bf16 saves time at 1 Gbit/s")
measure.expect(slowest > 1.05, "some compression makes a step slower over loopback")
tables.Table(["", "MB sent", *(f"step, ms: {where}" for where in times)], rows)

# %% [markdown]
# In our run, everything saved time on the slowest link. At 1 Gbit/s, only bf16 did. Top-k sent 83 times fewer bytes
# than fp32 there, and its step was no shorter: nothing hides what compression computes.

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
# ZeRO++ splits its all-to-all into two hops for this reason. We try it on two hosts of two ranks. Where the kernel
# allows it, these links are real:

# %% tags=["nbval-ignore-output"]
ranks.stop()
measure.start_behind_link(4, "200mbit", ranks_per_host=2)

# %%
# %%ranks
from labs.compressors import Int8
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shared import measure
from shared.c10d import all_gather_single, reduce_scatter_single

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "inside"))
inside, between = mesh.get_group("inside"), mesh.get_group("host")
torch.manual_seed(rank)
gradient = torch.randn(1_000_000)


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
exact = gradient.clone()
dist.all_reduce(exact)
error = ((int8_between_hosts(gradient) - exact).norm() / exact.norm()).item()
ways = {
    "fp32": lambda: dist.all_reduce(gradient.clone()),
    "INT8 among all ranks": lambda: int8_all_reduce(gradient),
    "INT8 between hosts": lambda: int8_between_hosts(gradient),
}
times = measure.jobs(ways, rounds=5)

# %% tags=["nbval-ignore-output"] jupyter={"source_hidden": true}
times = ranks.pull("times")[0]
print(f"{predicted(my_prediction, '{} S')}by the formula 1/3.94 = {1 / 3.94:.2f} S")
measure.expect(times.ratio("INT8 between hosts", "INT8 among all ranks") < 1, "two hops save time")
assert max(ranks.pull("error")) < 0.02
times

# %% [markdown]
# Each of the two ranks of a host all-reduces S/2 with one other rank, and sends half of it twice: S/2 per rank, S in
# total, 3.94 times smaller. A host sends 25 MB per second, and S is 4 MB. So 1.5 S, 0.51 S and 0.25 S should take 240,
# 81 and 41 ms. In our run, fp32 took 241 ms. The other two took 16 ms more than that, in which they quantize.

# %% [markdown]
# ## Sending less often
#
# You can also send the same bytes less often. Accumulating g micro-batches (chapter 02) sends 1/g of the bytes per
# sample, but the batch becomes g times as large. In **local SGD**, each rank takes H optimizer steps by itself, on its
# own batches. Only then do the ranks average their parameters:

# %%
diagrams.local_sgd()

# %% [markdown]
# **DiLoCo** treats the ranks' average movement as a gradient. This **pseudogradient** is the shared parameter minus
# the mean of the ranks' parameters. An *outer* optimizer takes a step with it: SGD with a learning rate of 0.7 and a
# Nesterov momentum of 0.9. With momentum 0 and a learning rate of 1, this would be local SGD. In the paper, eight
# replicas of a language model exchanged parameters every H = 500 steps, and reached about the perplexity of data
# parallelism (Douillard et al. 2023).
#
# What does that buy on a link of 1 Gbit/s? There, data parallelism in bf16 needs 212 s for *every* step of 4.2 s, if
# it trains the 7B model above. An exchange in float32 sends 53 GB and takes twice as long, 424 s. But it is needed
# only once in 500 steps, which compute for 2,100 s, so it adds a fifth. How large must H be for the exchange to cost
# a tenth of the computing?
#
# <details><summary>Answer</summary>
#
# 424 s / (0.1 · 4.25 s) = 1,000 steps.
#
# </details>
#
# INTELLECT-1, with 10B parameters, was trained like this on up to 14 hosts on three continents. It exchanged in INT8
# every H = 100 steps. Compared with fp32 gradients in every step, it sent 4 · 100 times fewer bytes (Jaghouar et al.
# 2024, arXiv 2412.01152).
#
# ### Found in the wild
#
# Real code has had two silent mistakes here (torchft pull request 233). The pseudogradient had the wrong sign, which
# the loss shows soon. And `p.data.lerp(…)`, which should mix the shared and the rank's own parameters, discarded its
# result, because only `lerp_` works in place. That one hides: the loss falls, because each rank trains a model of its
# own. Only comparing the ranks' parameters shows it.

# %% [markdown]
# ## The production version
#
# | here | in production |
# |---|---|
# | `Bf16` | `bf16_compress_hook`, `fp16_compress_hook`, without error feedback |
# | `Int8` | ZeRO++ in DeepSpeed (`zero_quantized_gradients`), for ZeRO-3; 1-bit Adam (momentum, both errors) |
# | `PowerSGD` | `powerSGD_hook` |
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
# With INT8 and PowerSGD, only the first collective of a bucket overlaps with backward. The second needs its result,
# so it starts in `wait()`, and nothing hides it. Compression pays if t + exposed(S′) < exposed(S), where exposed(S)
# is at least max(0, 2(N−1)α + 2fSβ − T).
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
