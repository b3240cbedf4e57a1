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
# - measure whether compression makes a step faster, or slower,
# - train with local SGD and with DiLoCo, and recognize two mistakes that raise no error.
#
# You need the all-to-all and the ring (chapter 01), `OverlappedDDP` (chapter 04), and α and β (chapter 05). N is the
# number of ranks, and Ψ the number of parameters.

# %% [markdown]
# ## Where we are
#
# Unless the switches do the adding, an all-reduce of S bytes sends at least 2(N−1)/N · S bytes per rank, on average
# (chapter 01). Chapter 04 hides what it can behind backward. On a slow link, the rest stays exposed. The next cells
# record a step of `OverlappedDDP` behind an emulated link of 1 Gbit/s. As before, each block of the GPT sleeps as a
# stand-in for a GPU.

# %% tags=["nbval-ignore-output"]
from shared import measure, plots, ranks, tables
from shared.plots import compression as compression_plots
from shared.plots import diagrams
from shared.predictions import predicted

ranks.start(world_size=4, backend="gloo:cpu", detect_mismatch=False)

# %% tags=["nbval-ignore-output"]
# %%ranks
from functools import partial

from torch import nn

from shared import measure, timeline, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT, stand_in_for_gpu
from solutions.async_collectives import launch_all_gather
from solutions.bucketed_ddp import Bucket
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
# The gradients take 10.8 MB, because each element has 32 bits. But a gradient is an estimate from a few samples, so its
# last digits are mostly noise. **Gradient compression** sends an approximation that needs fewer bits.

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
# about two decimal digits. Either way it is the same all-reduce, with half the bytes.
#
# `OverlappedDDP` has an argument `compressor`, which makes buckets that send something else. The next cell defines one.
# Its function `exchange` decides what is sent. It is a *generator*: it yields each collective's handle, and continues
# when that collective is complete. `unsent` holds what earlier steps have not sent. `memory` holds whatever else a
# method keeps.


# %%
# %%ranks
class Compressed(Bucket):
    """A bucket that sends what exchange(bucket) chooses of everything that is still unsent."""

    def __init__(self, exchange, parameters, group=None):
        super().__init__(parameters, group)
        self.exchange, self.unsent, self.memory = exchange, torch.zeros_like(self.flat), {}

    def launch(self):
        self.unsent += self.flat
        self.stages = self.exchange(self)
        self.handle = next(self.stages)  # runs the generator up to its first collective

    def wait(self):
        self.handle.wait()
        for handle in self.stages:
            handle.wait()


class Compressor:
    def __init__(self, exchange):
        self.new_bucket = partial(Compressed, exchange)


def bf16(bucket):
    sent = bucket.unsent.bfloat16()
    bucket.unsent -= sent
    yield dist.all_reduce(sent, async_op=True)
    bucket.flat.copy_(sent)


# %% [markdown]
# ## Eight bits
#
# To **quantize** means to round to a few values. Each element becomes an integer from −127 to 127, in one byte. An
# element approximately equals its integer times a **scale**: the largest absolute value, divided by 127. If one scale
# served all gradients, a single large element would turn all small ones into zeros. So each *block* of 256 elements has
# its own.
#
# **Predict.** It is commonly claimed that INT8 gradients need 4 times fewer bytes. But each block also sends a 4-byte
# scale. By what factor does INT8 really shrink an fp32 gradient, and a bf16 one?

# %%
my_prediction = {"fp32": None, "bf16": None}


# %%
# %%ranks
BLOCK = 256


def quantize(values):
    """Return one tensor of bytes: an integer per element, followed by a float32 scale per block."""
    blocks = values.unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-37)
    integers = (blocks / scales).round().to(torch.int8)
    return torch.cat([integers.flatten(-2), scales.squeeze(-1).view(torch.int8)], -1)


def dequantize(message):
    numel = message.shape[-1] * BLOCK // (BLOCK + 4)
    blocks = message[..., :numel].unflatten(-1, (-1, BLOCK))
    scales = message[..., numel:].view(torch.float32)
    return (blocks * scales.unsqueeze(-1)).flatten(-2)


fp32 = torch.randn(100 * BLOCK)
ratios = [nbytes / quantize(fp32).nbytes for nbytes in (fp32.nbytes, fp32.bfloat16().nbytes)]
overflow = torch.tensor(100, dtype=torch.int8) + torch.tensor(100, dtype=torch.int8)

# %%
ratios = [round(ratio, 2) for ratio in ranks.pull("ratios")[0]]
print(f"{predicted((*my_prediction.values(),), '{} and {}')}measured {ratios}")
print(f"100 + 100 in int8: {ranks.pull('overflow')[0].item()}")
assert ratios == [3.94, 1.97]

# %% [markdown]
# Against bf16, INT8 saves only a factor of two. And an all-reduce cannot add it up: 100 + 100 overflows, and every rank
# has its own scales. Ranks have to dequantize before they add. So we build the all-reduce from two collectives that
# only move bytes. In the diagram, follow the first shard:

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
    lossy += dequantize(quantize(gradient))
    unsent += gradient
    sent = dequantize(quantize(unsent))
    unsent -= sent
    kept += sent
print(f"quantized gradients: {lossy[1]:.3f}, with what was not sent: {kept[1]:.3f}")
assert lossy[1] == 0 and abs(kept[1] - 0.3) < 0.004

# %% [markdown]
# The scale is 1/127 = 0.008, so 0.003 is always rounded to zero. For the second sum, the rank keeps what it has not
# sent, and adds it to the next gradient. After two steps, 0.006 is rounded to 0.008. This is called **error feedback**.
# Everything applied plus everything unsent equals the sum of all gradients. Our `bf16` loses a little, because its
# all-reduce rounds the sums, too.
#
# Now we can write `int8`. It rounds twice, so there are two errors. Each stays on the rank that made it:


# %%
# %%ranks
def int8(bucket):
    unsent, n = bucket.unsent, bucket.unsent.numel()
    shard = -(-n // (world_size * BLOCK)) * BLOCK  # rounded up to whole blocks
    rows = nn.functional.pad(unsent, (0, world_size * shard - n)).view(world_size, shard)
    sent = quantize(rows)
    unsent -= dequantize(sent).flatten()[:n]  # the first error stays
    received = torch.empty_like(sent)
    yield dist.all_to_all_single(received, sent, async_op=True)

    total = dequantize(received).sum(0)
    own, gathered = quantize(total), torch.empty_like(sent)
    kept = unsent[rank * shard : (rank + 1) * shard]
    kept += (total - dequantize(own))[: len(kept)]  # and the second error, too
    yield launch_all_gather(gathered.view(-1), own)
    bucket.flat.copy_(dequantize(gathered).flatten()[:n])


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
def top_k(bucket, share):
    unsent = bucket.unsent
    k = max(1, round(share * unsent.numel()))
    indices = unsent.abs().topk(k).indices
    values = unsent[indices]
    unsent[indices] = 0
    all_values = values.new_empty(world_size, k)
    all_indices = indices.new_empty(world_size, k, dtype=torch.int32)
    handles = (
        launch_all_gather(all_values.view(-1), values),
        launch_all_gather(all_indices.view(-1), indices.int()),
    )
    yield from handles
    bucket.flat.zero_()
    for values, indices in zip(all_values, all_indices.long(), strict=True):
        bucket.flat[indices] += values  # rank by rank, so that all ranks get the same bits


def sent_bytes(exchange):
    """Return the bytes that a rank sends for one bucket of 100,000 elements."""
    bucket = Compressed(exchange, [nn.Parameter(torch.zeros(100_000))])
    bucket.flat.normal_()
    with wire.ledger() as log:
        bucket.launch()
        bucket.wait()
    return log.sent_bytes


def fp32(bucket):
    bucket.unsent.zero_()
    yield dist.all_reduce(bucket.flat, async_op=True)


by_share = {share: sent_bytes(partial(top_k, share=share)) for share in (0.01, 0.1, 0.25, 0.5)}
of_fp32 = sent_bytes(fp32)

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
# P is linear in M, so it can be all-reduced, and so can Q afterwards. In between, P's columns are made orthonormal, so
# that P·Qᵀ is the closest matrix to ΣM that they can form. An n × m matrix costs r(n + m) elements. Biases are sent as
# they are. In the code, `others` are the parameters that are not worth compressing. A bucket without any matrix sends a
# zero in place of Q. In the lab, you leave out this message.


# %%
# %%ranks
def power_sgd(bucket, r):
    views = bucket.unsent.split([p.numel() for p in bucket.parameters])
    views = [view.view(p.shape) for view, p in zip(views, bucket.parameters, strict=True)]
    matrices = [v for v in views if v.dim() == 2 and r * sum(v.shape) < v.numel()]
    others = [v for v in views if all(v is not m for m in matrices)]
    seeded = torch.Generator().manual_seed(0)  # the same Q on every rank
    qs = bucket.memory.get("qs") or [torch.randn(m.shape[1], r, generator=seeded) for m in matrices]
    parts = [m @ q for m, q in zip(matrices, qs, strict=True)] + others
    message = torch.cat([part.flatten() for part in parts])
    yield dist.all_reduce(message, async_op=True)

    sums = split_like(message, parts)
    ps = [torch.linalg.qr(p).Q for p in sums[: len(matrices)]]
    own_qs = [m.T @ p for m, p in zip(matrices, ps, strict=True)]
    message = torch.cat([q.flatten() for q in own_qs] or [torch.zeros(1)])
    yield dist.all_reduce(message, async_op=True)
    bucket.memory["qs"] = split_like(message, own_qs)

    totals = dict(zip(map(id, others), sums[len(matrices) :], strict=True))
    for m, p, own_q, q in zip(matrices, ps, own_qs, bucket.memory["qs"], strict=True):
        totals[id(m)] = p @ q.T
        m -= p @ own_q.T  # this is what this rank has sent
    for other in others:
        other.zero_()
    bucket.flat.copy_(torch.cat([totals[id(view)].flatten() for view in views]))


def split_like(message, tensors):
    parts = message.split([tensor.numel() for tensor in tensors])[: len(tensors)]
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


# %% [markdown]
# ## What the loss costs in bytes
#
# Does a network still learn? We train a small one on digits, with SGD and momentum. One of the runs is top-k without
# error feedback.


# %%
# %%ranks
from shared.data import digits
from shared.models import MLP

images, labels = digits()


class Classifier(MLP):
    def forward(self, images, labels):
        return nn.functional.cross_entropy(super().forward(images), labels)


def forgetful(bucket, exchange):
    bucket.unsent.copy_(bucket.flat)  # drops what the steps before have not sent
    return exchange(bucket)


def batches(steps):
    draws = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        picked = torch.randint(len(images), (24,), generator=draws)
        yield images[picked], labels[picked]


sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def trained(model, steps=200, optimizer_of=sgd):
    """Return the bytes that a rank has sent per step, and the mean loss of each step."""
    optimizer = optimizer_of(model.parameters())
    with wire.ledger() as log:
        losses = [measure.train_step(model, optimizer, *batch) for batch in batches(steps)]
    return log.sent_bytes / steps, mean_over_ranks(losses)


def mean_over_ranks(losses):
    total = torch.tensor(losses)
    dist.all_reduce(total)
    return (total / world_size).tolist()


# %%
# %%ranks --timeout 300
one_percent = partial(top_k, share=0.01)
exchanges = {
    "fp32": fp32,
    "bf16": bf16,
    "INT8": int8,
    "top 1%": one_percent,
    "top 1%, no feedback": partial(forgetful, exchange=one_percent),
    "PowerSGD, r = 2": partial(power_sgd, r=2),
}
runs = {
    name: trained(OverlappedDDP(Classifier(), compressor=Compressor(exchange)))
    for name, exchange in exchanges.items()
}

# %% [markdown]
# In the figure, all lines end after 200 steps. How far to the left of fp32 does each of them end, and how much higher?

# %% tags=["nbval-ignore-output"]
runs = ranks.pull("runs")[0]
last = {name: sum(losses[-20:]) / 20 for name, (_, losses) in runs.items()}
rows = [
    [name, f"{nbytes / 1e3:.1f}", f"{runs['fp32'][0] / nbytes:.1f}", f"{last[name]:.2f}"]
    for name, (nbytes, _) in runs.items()
]
print(tables.Table(["", "kB sent per step", "times fewer", "last loss"], rows))
assert max(last[name] for name in ("bf16", "INT8")) < last["fp32"] + 0.05
assert last["top 1%"] < last["top 1%, no feedback"]
compression_plots.loss_against_bytes(runs)

# %% [markdown]
# bf16 and INT8 reach the loss of fp32. With 1% of the elements, training is slower, and without error feedback, it is
# slower still. How much compression a model tolerates also depends on the optimizer: the theory of error feedback is
# about SGD. Adam divides each element by its recent size. Error feedback breaks that: an element that is 0 for nine
# steps and then carries ten gradients at once gets the wrong scale. 1-bit Adam therefore begins without compression.
# Then it fixes Adam's variance, and compresses the momentum (Tang et al. 2021).

# %% [markdown]
# ## When compression makes a step slower
#
# Compression pays if its own computing, plus the communication that stays exposed, takes less time than the
# communication that was exposed before. The next cell times a step of the large GPT behind links of 0.2 and 1 Gbit/s,
# and over loopback.
#
# **Predict.** By what factor does INT8 change the time of a step on each link? 1 would mean no change.

# %%
my_prediction = {"0.2 Gbit/s": None, "1 Gbit/s": None, "loopback": None}

# %%
# %%ranks --timeout 300
jobs, sent_mb = {}, {}
for name in ("fp32", "bf16", "INT8", "top 1%", "PowerSGD, r = 2"):
    model, jobs[name] = step_of(Compressor(exchanges[name]))
    with wire.ledger() as log:
        model(*sample).backward()
        model.finish_gradient_sync()
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
# In our run, everything saved time on the slowest link, and bf16 also at 1 Gbit/s. Why did INT8 lose there? It
# quantizes on cores that four ranks share, which costs about 50 ms over loopback. On a GPU, it would take microseconds.
# And its second collective starts in `wait()`, where nothing hides it. In data centers, links are fast, most
# communication is hidden already, and some methods cannot use an all-reduce: only 6 of more than 200 setups became
# faster than optimized data parallelism (Agarwal et al., MLSys 2022).

# %% [markdown]
# ## Sending less often
#
# You can also send the same bytes less often. Accumulating g micro-batches (chapter 02) sends 1/g of the bytes per
# sample, but the batch becomes g times as large. In **local SGD**, each rank takes H optimizer steps by itself, on its
# own batches. Only then do the ranks average their parameters:

# %%
diagrams.local_sgd()

# %% [markdown]
# **DiLoCo** treats the ranks' average movement as a gradient. This **pseudogradient** is the shared parameter minus the
# mean of the ranks' parameters. An *outer* optimizer takes a step with it: SGD with a learning rate of 0.7 and a
# Nesterov momentum of 0.9 (Douillard et al. 2023). With momentum 0 and a learning rate of 1, this would be local SGD.
#
# Real code has had two silent mistakes here (torchft pull request 233). The pseudogradient had the wrong sign. And
# `p.data.lerp(…)`, which should mix the shared and the rank's own parameters, discarded its result, because only
# `lerp_` works in place. In our code, the weight of the shared parameters is 1, so `lerp_` copies them.
#
# We run local SGD, DiLoCo, and DiLoCo with each of the mistakes. `every_step` is data parallelism with the same inner
# optimizer:


# %%
# %%ranks --timeout 300
adamw = partial(torch.optim.AdamW, lr=1e-3)


def local_steps(inner_steps=10, steps=200, sign=1, in_place=True, **outer_options):
    """Return the bytes sent per step, the mean losses, and a sum that tells this rank's parameters from others."""
    model = Classifier()
    inner = adamw(model.parameters())
    shared = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    outer, losses = torch.optim.SGD(shared, **outer_options), []
    with wire.ledger() as log:
        for step, batch in enumerate(batches(steps), 1):
            losses.append(measure.train_step(model, inner, *batch))
            if step % inner_steps == 0:
                for p, s in zip(model.parameters(), shared, strict=True):
                    s.grad = sign * (s - p).detach() / world_size
                    dist.all_reduce(s.grad)
                outer.step()
                for p, s in zip(model.parameters(), shared, strict=True):
                    p.data.lerp_(s.data, 1.0) if in_place else p.data.lerp(s.data, 1.0)
    total = sum(p.double().sum().item() for p in model.parameters())
    return log.sent_bytes / steps, mean_over_ranks(losses), total


every_step = trained(OverlappedDDP(Classifier()), optimizer_of=adamw)
diloco = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
local = {
    "local SGD": local_steps(lr=1.0),
    "DiLoCo": local_steps(**diloco),
    "wrong sign": local_steps(**diloco, sign=-1),
    "discarded lerp": local_steps(**diloco, in_place=False),
}

# %% tags=["nbval-ignore-output"]
of_ranks, every_step = ranks.pull("local"), ranks.pull("every_step")[0]
print(f"every step: loss {sum(every_step[1][-20:]) / 20:.2f}")
for name in of_ranks[0]:
    sums = {each[name][2] for each in of_ranks}
    print(f"{name}: loss {sum(of_ranks[0][name][1][-20:]) / 20:.2f}, ranks agree: {len(sums) == 1}")
    assert (len(sums) == 1) == (name != "discarded lerp")
curves = {"every step": every_step, **{name: found[:2] for name, found in of_ranks[0].items()}}
assert sum(curves["wrong sign"][1][-20:]) > 1.2 * sum(curves["DiLoCo"][1][-20:])
compression_plots.loss_against_bytes(curves)

# %% [markdown]
# With H = 10, a rank sends 10 times fewer bytes than with gradients in every step, but the loss ends higher. DiLoCo is
# ahead of local SGD at first. Then its momentum overshoots, and local SGD reaches a lower loss. But 20 outer steps are
# too few to judge DiLoCo: in the paper, it trained language models as well as data parallelism did, with H = 500.
#
# The wrong sign is easy to see. The discarded result is not: the loss falls, because each rank trains a model of its
# own. Only comparing the ranks' parameters shows it.

# %% [markdown]
# ## The production version
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
torchs, ours = ranks.pull("torchs")[0], runs["PowerSGD, r = 2"]
print(f"last loss: ours {last['PowerSGD, r = 2']:.2f}, torch's {sum(torchs[1][-20:]) / 20:.2f}")
assert abs(sum(torchs[1][-20:]) / 20 - last["PowerSGD, r = 2"]) < 0.15

# %% [markdown]
# | here | in production |
# |---|---|
# | `bf16` | `bf16_compress_hook`, `fp16_compress_hook`, without error feedback |
# | `int8` | ZeRO++ in DeepSpeed (`zero_quantized_gradients`), for ZeRO-3; 1-bit Adam (momentum, both errors) |
# | `power_sgd` | `powerSGD_hook` |
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
# With INT8 and PowerSGD, only the first collective of a bucket overlaps with backward. The second needs its result, so
# it starts in `wait()`, and nothing hides it.
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
# But first, in the lab, you build `Int8`, `TopK` and `PowerSGD`, for any parameters and groups.

# %%
ranks.stop()
