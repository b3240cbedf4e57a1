# ---
# jupyter:
#   course:
#     module: zero2
#     minutes: 25
# ---

# %% [markdown]
# # 08 · ZeRO-2
#
# **25 minutes.** You will be able to
#
# - say what is gained by freeing gradients after backward, and what by freeing them during it,
# - bound the bytes of gradients at every moment of a backward, and name the wait that keeps the bound,
# - settle from the ledger whether ZeRO-2 sends more than data parallelism, with one micro-batch and with several,
# - tell what gloo makes of a reduce-scatter, and how much of the sending still hides behind backward.
#
# You need buckets and hooks (chapters 03 and 04), and from lab 07 `FlatParameter`: parameters that are views of one
# flat tensor, of which rank r owns the r-th of N equal shards.

# %% [markdown]
# ## What is wasted
#
# The `ZeRO1` of lab 07 has run backward and reduced the gradients. What does a rank hold now, and what of it does it
# need for its part of the step?

# %% tags=["nbval-ignore-output"]
from shared import formulas, plots, ranks, tables
from shared.plots import zero as zero_plots

ranks.start(world_size=4, backend="gloo:cpu", detect_mismatch=False)

# %% [markdown]
# (On the CPU even where there are GPUs: further down we look into gloo, and put a slow link under it.)

# %%
# %%ranks
from functools import partial
from itertools import pairwise

from shared import memory, wire
from shared.c10d import all_gather_single, reduce_scatter_single
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from solutions.bucketed_ddp import assign_buckets
from solutions.zero1 import FlatParameter, ZeRO1

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=6, width=128)
inputs, targets = text.windows(range(rank, 200, 100), length=16)
AdamW, settings = torch.optim.AdamW, {"lr": 1e-3}
model = TinyGPT(config)
zero1 = ZeRO1(model.parameters(), AdamW, **settings)
for _ in range(2):
    zero1.zero_grad()
    model(inputs, targets).backward()
    zero1.reduce_gradients()
    held = memory.held(model, zero1)  # the second time AdamW has its state
    zero1.step()

# %%
held = ranks.pull("held")[0].by_component()
parameters = held["parameters"] // 4
assert held["gradients"] == 4 * parameters
needed = held | {"gradients": held["gradients"] // 4}
wasted_mb = (held["gradients"] - needed["gradients"]) / 1e6
print(f"Ψ = {parameters:,}; gradients for nothing: {wasted_mb:.2f} MB")
plots.memory_by_component({"holds": held, "needs": needed}, decimals=2)

# %% [markdown]
# Three quarters of the gradients belong to parts that other ranks step. They had to be *made* here, from this rank's
# samples. They need not be *kept*.

# %% [markdown]
# ## Free them after backward
#
# First we need a reduce-scatter that returns at once. This one is `direct_reduce_scatter` of chapter 01, cut in two: it
# returns a function that waits, and then returns this rank's shard of the sum. (Lab 01's `launch_reduce_scatter` does
# the same with less memory, and returns an object with `wait()`.)


# %%
# %%ranks
def directly(flat):
    """Launch sending each rank its shard of flat. Returns a function that waits, and adds up what came."""
    arrived = torch.empty_like(flat)
    handle = dist.all_to_all_single(arrived, flat, async_op=True)

    def finish():
        handle.wait()
        return arrived.view(world_size, -1).sum(0)

    return finish


# %% [markdown]
# Then we need buckets, as in chapter 03. Each has a `FlatParameter` of its own, so a rank owns a quarter of *every
# bucket*. If it owned a contiguous quarter of the model instead, the first bucket would belong to one rank, and all
# others would send to that rank. (Here a bucket is packed when it is sent. The lab's packs each gradient when it
# comes.)


# %%
# %%ranks
class Bucket:
    """A flat parameter, and its gradients in flight: of their mean this rank keeps its shard."""

    def __init__(self, parameters, begin):
        self.flat_parameter, self.begin, self.finish = FlatParameter(parameters), begin, None

    def send(self):
        layout = self.flat_parameter.layout
        flat = layout.new_flat()
        for parameter, view in zip(layout.parameters, layout.views(flat), strict=True):
            view.copy_(parameter.grad)
            parameter.grad = None
        self.finish = self.begin(flat)

    def wait(self):
        if self.finish is not None:
            mean, shard = self.finish() / world_size, self.flat_parameter.shard
            shard.grad = mean if shard.grad is None else shard.grad + mean
            self.finish = None  # and with it goes what was sent and what arrived


# %%
# %%ranks
class FreesAfter:
    """ZeRO-2 at first sight: when backward is over, bucket after bucket is sent and freed."""

    def __init__(self, model, begin=directly, cap_mb=0.25, **settings):
        assigned = assign_buckets(model.parameters(), cap_mb)
        self.buckets = [Bucket(parameters, begin) for parameters in assigned]
        self.inner = AdamW([bucket.flat_parameter.shard for bucket in self.buckets], **settings)

    def finish_gradient_sync(self):
        for bucket in self.buckets:
            bucket.send()
            bucket.wait()

    def step(self):
        self.inner.step()
        self.inner.zero_grad()
        for bucket in self.buckets:
            flat_parameter = bucket.flat_parameter
            all_gather_single(flat_parameter.flat_param, flat_parameter.shard.data)


# %% [markdown]
# **Predict.** Between backward and step a rank now keeps a quarter of the gradients. How much of them does it hold at
# most, at any moment of a step? (1 is all.)

# %%
my_prediction = 0.0


# %%
# %%ranks
def one_step(model, optimizer):
    loss = model(inputs, targets)
    loss.backward()
    optimizer.finish_gradient_sync()
    optimizer.step()
    return loss.item()


def begun(kind, **options):
    """→ a new model and its optimizer, after a first step: AdamW has its state"""
    model = TinyGPT(config)
    optimizer = kind(model, **settings, **options)
    one_step(model, optimizer)
    return model, optimizer


def watched(model, optimizer):
    with memory.peak(model, optimizer) as peak:
        one_step(model, optimizer)
    return peak


after = watched(*begun(FreesAfter))

# %%
after = ranks.pull("after")[0]
kept = next(sample.held for sample in after.samples if sample.phase == "step")
most = max(sample.held.gradients_bytes for sample in after.samples) / (4 * parameters)
print(f"kept for the step: {kept.gradients_bytes / (4 * parameters):.2f} of the gradients")
print(f"at most: predicted {my_prediction:g}, measured {most:.2f}")
assert most >= 1 and after.phase == "backward"
figure = plots.memory_over_step(after.samples)
figure.axes[0].set_xlabel("operators since the start (backward: with finish_gradient_sync())")
figure

# %% [markdown]
# All of them. The first gradient goes only when the last one has come, and just there lies the peak. A device must have
# room for the peak; what it keeps afterwards does not help it.

# %% [markdown]
# ## Free them during backward
#
# A bucket can go when it is full. Chapter 04 has the means, a hook that is called when a parameter's gradient is
# complete. One thing is new: before a bucket is sent, the one before it must have arrived.


# %%
# %%ranks
class FreesDuring(FreesAfter):
    """A bucket is sent, and freed, when its last gradient has come."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.sends, self.before = True, {after: before for before, after in pairwise(self.buckets)}
        for bucket in self.buckets:
            bucket.missing = len(bucket.flat_parameter.layout.parameters)
            for parameter in bucket.flat_parameter.layout.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self.came, bucket))

    def came(self, bucket, parameter):
        bucket.missing -= 1 if self.sends else 0
        if bucket.missing == 0:
            if bucket in self.before:
                self.before[bucket].wait()
            bucket.send()
            bucket.missing = len(bucket.flat_parameter.layout.parameters)

    def finish_gradient_sync(self):
        for bucket in self.buckets:
            bucket.wait()


# %% [markdown]
# (All ranks fill this GPT's buckets in one order. Where they might not, it takes the queue of lab 04.)
#
# What is alive at one moment? A bucket on its way, what arrives of it, and gradients that wait until their own bucket
# is full: three buckets. Besides these, this rank's part of all that have left:
#
# $$\text{gradients and buckets} \le \frac{4\Psi}{N} + 3 \cdot \text{bucket}$$


# %%
# %%ranks
def of_backward(peak):
    """→ bytes of gradients and buckets, at every moment of a backward"""
    backward = (sample.held for sample in peak.samples if sample.phase == "backward")
    return [held.gradients_bytes + held.buckets_bytes for held in backward]


def curve_of(kind):
    """As of_backward; gloo's threads may let go of a message late, so the least of three steps at each moment."""
    model, optimizer = begun(kind)
    steps = [of_backward(watched(model, optimizer)) for _ in range(3)]
    return [min(moment) for moment in zip(*steps, strict=True)]


curves = {"freed after backward": curve_of(FreesAfter), "freed during it": curve_of(FreesDuring)}
largest_bytes = max(bucket.flat_parameter.flat_param.nbytes for bucket in FreesAfter(model).buckets)

# %%
bound_bytes = 4 * parameters / 4 + 3 * ranks.pull("largest_bytes")[0]
for curves in ranks.pull("curves"):
    assert max(curves["freed during it"]) <= bound_bytes
    assert max(curves["freed after backward"]) >= 4 * parameters
levels = {"4Ψ": 4 * parameters, "4Ψ/N": parameters, "4Ψ/N + 3 buckets": bound_bytes}
zero_plots.over_backward(ranks.pull("curves")[0], levels)

# %% [markdown]
# Where the dashed line falls, a bucket has arrived and gone. Smaller buckets would bring it nearer to 4Ψ/N, at the
# price of more messages (chapter 03).

# %% [markdown]
# ## One line less
#
# **Predict.** Let backward never stand still: leave out the wait for the bucket before, and wait for all at the end, as
# `OverlappedDDP` does. How many times 4Ψ are held at most?

# %%
my_prediction = 0.0


# %%
# %%ranks
class NeverWaits(FreesDuring):
    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.before = {}


most_bytes = max(curve_of(NeverWaits))

# %%
times = ranks.pull("most_bytes")[0] / (4 * parameters)
print(f"predicted {my_prediction:g}, measured {times:.1f} times")
assert times > 1.9

# %% [markdown]
# Twice, worse than freeing nothing: of every bucket what was sent and what arrived, until somebody has waited. DDP can
# afford that, for its buckets are its gradients. (To let go only of what happens to have arrived would be no bound: on
# a slow link, nothing has.)

# %% [markdown]
# ## What it saves
#
# Between backward and step, on N ranks, fp32 is down from 16 bytes per parameter to 4 + 12/N, and mixed precision
# (chapter 06) to 2 + 14/N.

# %%
held_bytes = kept.parameters_bytes + kept.gradients_bytes + kept.optimizer_bytes
formula_bytes = formulas.model_state_bytes(parameters, 4, 2, formulas.FP32_ADAM)
assert 0 <= held_bytes - formula_bytes < 1000  # AdamW's step counters, 4 bytes each
print(f"fp32, 4 ranks: {held_bytes / parameters:.2f} bytes per parameter")
rows, counts = [], (2, 4, 8, 64, 10**9)
for name, each in {"fp32": formulas.FP32_ADAM, "mixed": formulas.MIXED_ADAM}.items():
    rows.append([name, *(f"{formulas.memory_saving(n, 2, each):.2f}" for n in counts)])
tables.Table(["times less, on ranks", "2", "4", "8", "64", "→ ∞"], rows)

# %% [markdown]
# "8 times" is a limit, as ZeRO-1's "4 times" was. Nor does it carry 70 billion parameters on devices of 80 GB, as is
# told: 2Ψ bytes of parameters stay whole in mixed precision, so on any number of ranks 80/2 = 40 billion are the end.

# %% [markdown]
# ## What it sends
#
# One often reads that data parallelism costs Ψ per step, and ZeRO-2 "a moderate 2Ψ". **Predict:** how many times the
# bytes of data parallelism does a step of `FreesDuring` send? And how many if a bucket is all-reduced, and this rank's
# part sliced out?

# %%
my_prediction, my_prediction_sliced = 0.0, 0.0


# %%
# %%ranks
def all_reduced(flat):
    """Begin to add flat up on every rank. → a function that waits, and slices out this rank's part"""
    handle = dist.all_reduce(flat, async_op=True)

    def finish():
        handle.wait()
        return flat.chunk(world_size)[rank].clone()

    return finish


def ledger_of(model, optimizer):
    with wire.ledger() as log:
        one_step(model, optimizer)
    return log


logs = [ledger_of(*begun(FreesDuring, begin=begin)) for begin in (directly, all_reduced)]
print("\n".join(log.summary() for log in logs))

# %%
ddp_bytes = formulas.step_sent_bytes(parameters, ranks=4, stage=0, bytes_each=4)
log, sliced = ranks.pull("logs")[0]
log.assert_volume(sent_bytes=formulas.step_sent_bytes(parameters, ranks=4, stage=2, bytes_each=4))
times, times_sliced = log.sent_bytes / ddp_bytes, sliced.sent_bytes / ddp_bytes
print(f"predicted {my_prediction:g}, measured {times:.2f} times data parallelism")
print(f"all-reduce, then slice: predicted {my_prediction_sliced:g}, measured {times_sliced:.2f}")
assert times == 1 and times_sliced == 1.5

# %% [markdown]
# Both cost 2f numbers per parameter, f = (N−1)/N: an all-reduce is a reduce-scatter and an all-gather, and here the
# optimizer steps between the two. (Rajbhandari et al. 2020, "ZeRO", §7.) Whoever all-reduces and slices has ZeRO-2's
# memory, and pays half as much again.

# %% [markdown]
# ## What gloo makes of it
#
# That was what must be sent. What was sent, each rank asks its own sockets, for one flat tensor of S bytes and four
# ways to have it added up. They take turns, and the fastest round of each counts.


# %%
# %%ranks
from solutions.collectives import ring_reduce_scatter


def by_backend(flat):
    mine = flat.new_empty(flat.numel() // world_size)
    handle = reduce_scatter_single(mine, flat, async_op=True)

    def finish():
        handle.wait()
        return mine

    return finish


def around_ring(flat):
    mine = ring_reduce_scatter(flat)  # it waits in each of its steps
    return lambda: mine


# %%
# %%ranks
import time

from shared.wire import sockets


def wire_of(step):
    """→ messages, bytes that must be sent, and that were, on this rank"""
    before_bytes = sockets.sent_bytes()
    with wire.ledger() as log:
        step()
        dist.barrier()  # until what was sent has left the sockets' queues
    sent_bytes = float("nan")
    if before_bytes is not None:  # some systems do not tell
        sent_bytes = sockets.sent_bytes() - before_bytes
    return log.messages - 1, log.sent_bytes, sent_bytes


def timed_ms(begin):
    dist.barrier()
    began_s = time.perf_counter()
    begin(flat)()
    return 1e3 * (time.perf_counter() - began_s)


# %%
# %%ranks
flat, ways = torch.ones(2**21), [all_reduced, by_backend, around_ring, directly]
wires = [wire_of(lambda: begin(flat)()) for begin in ways]  # noqa: B023 - called at once
rounds = [[timed_ms(begin) for begin in ways] for _ in range(12)]

# %% tags=["nbval-ignore-output"]
import torch

names = [
    "all-reduce, then slice",
    "gloo's reduce-scatter",
    "the ring of chapter 01",
    "sent directly",
]
times_ms = torch.tensor(ranks.pull("rounds")).amax(0).amin(0)  # the slowest rank's
part_bytes = formulas.reduce_scatter_sent_bytes(4 * 2**21, ranks=4)
bytes_of = torch.tensor(ranks.pull("wires")).mean(0)[:, 1:] / part_bytes  # mean over ranks
rows = []
for name, (must, sent), ms in zip(names, bytes_of.tolist(), times_ms, strict=True):
    rows.append([name, f"{must:.2f}", f"{sent:.2f}", f"{ms / times_ms[1]:.2f}"])
assert not bytes_of[1, 1] < 1.9 and not bytes_of[2:, 1].max() > 1.1  # or the system does not tell
tables.Table(["", "must send, in f · S", "sent, in f · S", "time / gloo's"], rows)

# %% [markdown]
# gloo's reduce-scatter is an all-reduce that throws three quarters away, so with it ZeRO-2 sends what all-reduce and
# slice sends. NCCL's is a real one; on gloo the one that you built in chapter 01 is. Where the link is all that is
# slow, half the bytes are half the time. Within one machine adding up takes its share, and the last column says how
# much is gained.
#
# Why not the ring, which sends as little? The ring has to wait between its steps, so it cannot run behind backward;
# direct sending can.

# %% [markdown]
# ## Is it still hidden?
#
# Here the link is one of 1 Gbit/s (emulated: a message ends only when such a link would have carried it), the blocks
# take time as on a GPU, without a core (chapter 04), and a bucket holds a block.


# %%
# %%ranks
class OnDevice(torch.autograd.Function):
    """Stands in for an accelerator: time passes, and no core is used."""

    @staticmethod
    def forward(ctx, output):
        time.sleep(0.006)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.012)
        return gradient


class Around:
    """An AdamW as one_step wants it, for a model that averages its gradients itself."""

    def __init__(self, model, **settings):
        self.inner = AdamW(model.parameters(), **settings)

    def finish_gradient_sync(self):
        pass

    def step(self):
        self.inner.step()
        self.inner.zero_grad()


# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel

from shared import timeline
from shared.hosts import emulated


def in_ddp():
    views = {"gradient_as_bucket_view": True}
    model = DistributedDataParallel(TinyGPT(config), bucket_cap_mb=0.8, **views)
    return model, Around(model, **settings)


def in_buckets(kind, **options):
    model = TinyGPT(config)
    return model, kind(model, cap_mb=0.8, **settings, **options)


# %%
# %%ranks
def lines_of(model, optimizer):
    """→ timelines of five steps"""
    for block in getattr(model, "module", model).blocks:
        block.register_forward_hook(lambda block, inputs, output: OnDevice.apply(output))
    lines = []
    for _ in range(8):
        dist.barrier()
        with timeline.record(model, optimizer.inner) as line:
            one_step(model, optimizer)
        lines.append(line)
    return lines[3:]  # DDP settles its buckets in the first steps


with emulated.link("1gbit", latency_ms=0.1):
    lines = {"DDP": lines_of(*in_ddp())}
    for kind in (FreesAfter, FreesDuring):
        lines[kind.__name__] = lines_of(*in_buckets(kind))

# %% tags=["nbval-ignore-output"]
fastest = {
    name: min(lines, key=lambda line: line.ended_s - line.began_s)
    for name, lines in ranks.pull("lines")[0].items()
}
for name, line in fastest.items():
    share = line.exposed_ms / line.communication_ms
    print(f"{name:12} {share:4.0%} of the time on the wire is exposed")
assert fastest["FreesAfter"].overlap < 0.1 < fastest["FreesDuring"].overlap
zero_plots.both_halves(fastest["FreesDuring"])

# %% [markdown]
# The reduce-scatters lie under backward, as DDP's messages do. (A message that begins before the last one has ended is
# drawn in a row of its own.) Where a bucket has arrived before the next one is full, the new wait costs nothing. Where
# the link is slower, backward waits. Nothing is lost: the link is busy all the time, and the last bucket arrives when
# the link is through, with or without the wait.
#
# DDP hides both halves of its all-reduce, though, and ZeRO-2 only one: the all-gather comes after the step, in the
# open. It could travel while the next forward begins. Chapter 09 gathers parameters just before a layer needs them.

# %% [markdown]
# ## Several micro-batches
#
# Chapter 04 sent gradients after the last micro-batch only, and let them add up until then. Where? In whole gradients,
# on every rank. With `sends = False`, `FreesDuring` does the same. Or every micro-batch sends, and what adds up is this
# rank's part.
#
# **Predict.** Four micro-batches, each of which sends: how many times f · 4Ψ in a step?

# %%
my_prediction = 0


# %%
# %%ranks
def accumulated(model, optimizer, micro_batches, last_only):
    """→ bytes sent in a step of several micro-batches, and of gradients and buckets at every moment"""
    with wire.ledger() as log, memory.peak(model, optimizer) as peak:
        for number in range(1, micro_batches + 1):
            optimizer.sends = not last_only or number == micro_batches
            (model(inputs, targets) / micro_batches).backward()
            optimizer.finish_gradient_sync()
        optimizer.step()
    return log.sent_bytes, of_backward(peak)


kinds = [(1, False), (2, False), (4, False), (2, True), (4, True)]
results = []
for kind in kinds:
    model, optimizer = begun(FreesDuring)
    sent_bytes, curves = zip(*(accumulated(model, optimizer, *kind) for _ in range(3)), strict=True)
    most_bytes = max(min(moment) for moment in zip(*curves, strict=True))  # as in curve_of
    results.append((*kind, max(sent_bytes), most_bytes))

# %% tags=["nbval-ignore-output"]
rows = []
for g, last_only, sent_bytes, most_bytes in ranks.pull("results")[0]:
    stage, name = (1, "the last one") if last_only else (2, "every one")
    assert sent_bytes == formulas.step_sent_bytes(parameters, 4, stage, 4, micro_batches=g)
    assert (most_bytes > 4 * parameters) == last_only
    sent = sent_bytes / (ddp_bytes / 2)
    rows.append([f"{g}", name, f"{sent:g}", f"{most_bytes / (4 * parameters):.2f}"])
print(f"predicted {my_prediction}, measured {rows[2][2]}")
tables.Table(["micro-batches", "sends", "must send, f · 4Ψ", "gradients at most, in 4Ψ"], rows)

# %% [markdown]
# (g + 1) times f · 4Ψ: a reduce-scatter for each micro-batch, one all-gather after the step. Sending the last time only
# costs 2 times f · 4Ψ, and the memory of ZeRO-1 and a bucket more. "Moderately more" is right here, and only here.
# Where gradients do not fit, every micro-batch must send; where they do, ZeRO-1 with `no_sync()` sends less.
# DeepSpeed's stage 2 leaves no choice: its `no_sync()` refuses (issue 6793).

# %% [markdown]
# ## Is it the same training?
#
# Six steps of AdamW in float64, on 1 to 4 ranks, against one process that has the full batch. Most buckets' sizes are
# no multiples of the number of ranks.
#
# torch's `fully_shard` gets a **mesh**: the ranks that it shards over, and the type of device that they compute on.
# Without a mesh, it would choose a GPU on any machine that has one, even for a job on the CPU.

# %%
# %%ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shared.data import digits
from shared.models import MLP

images, labels = digits(torch.float64)


def trained(optimizer_of, part=0, parts=1):
    """→ the parameters after six steps on one part of the batch"""
    model = MLP().double()
    optimizer = optimizer_of(model)
    for _ in range(6):
        outputs = model(images[:120].chunk(parts)[part])
        nn.functional.cross_entropy(outputs, labels[:120].chunk(parts)[part]).backward()
        optimizer.finish_gradient_sync()
        optimizer.step()
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in parameters])


# %%
# %%ranks
def apart(optimizer_of):
    alone = trained(lambda model: Around(model, lr=1e-2))
    return (trained(optimizer_of, rank, world_size) - alone).abs().max().item()


def ours(model, begin=directly):
    return FreesDuring(model, begin=begin, cap_mb=0.02, lr=1e-2)


def fsdp2(model):
    mesh = init_device_mesh(device.type, (world_size,))
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return Around(model, lr=1e-2)


def unsent(model):
    return ours(model, lambda flat: lambda: flat.chunk(world_size)[rank])


# %%
for n in (1, 2, 3, 4):
    with ranks.world(n):
        largest = max(ranks.run(lambda: apart(ours))[:n])
    print(f"N = {n}: apart by less than 1e-10: {largest < 1e-10}")
    assert largest < 1e-10
of_torch = max(ranks.run(lambda: apart(fsdp2)))
of_unsent = max(ranks.run(lambda: apart(unsent)))
print(f"torch's FSDP2, N = 4: by less than 1e-10: {of_torch < 1e-10}")
print(f"ours without messages, for comparison: by more than 1e-3: {of_unsent > 1e-3}")
assert of_torch < 1e-10 and of_unsent > 1e-3

# %% [markdown]
# ## The production version
#
# The nearest that torch has is FSDP2, `fully_shard(..., reshard_after_forward=False)`. Train the GPT with it, with DDP
# and with ours.


# %%
# %%ranks
def in_fsdp2():
    model, mesh = TinyGPT(config), init_device_mesh(device.type, (world_size,))
    for each in (*model.blocks, model):
        fully_shard(each, mesh=mesh, reshard_after_forward=False)
    return model, Around(model, **settings)


# %%
# %%ranks
kinds = {
    "DDP": in_ddp(),
    "ours, gloo's own": in_buckets(FreesDuring, begin=by_backend),
    "ours, directly": in_buckets(FreesDuring),
    "FSDP2": in_fsdp2(),
}
losses = {name: [one_step(*kind) for _ in range(4)][-1] for name, kind in kinds.items()}
wires = {name: wire_of(lambda: one_step(*kind)) for name, kind in kinds.items()}  # noqa: B023
peaks = {name: watched(*kind).peak_bytes for name, kind in kinds.items()}
between = {name: memory.held(*kind).total_bytes for name, kind in kinds.items()}

# %% tags=["nbval-ignore-output"]
losses, peaks, between, rows = *(ranks.pull(n)[0] for n in ("losses", "peaks", "between")), []
for name, loss in losses.items():
    assert abs(loss - losses["DDP"]) < 1e-3
    of_ranks = torch.tensor([wires[name] for wires in ranks.pull("wires")]).double().mean(0)
    messages, must_bytes, sent_bytes = of_ranks.tolist()
    assert abs(must_bytes / ddp_bytes - 1) < 0.01
    row = [name, f"{loss:.4f}", f"{messages:.0f}"]
    mb = [must_bytes, sent_bytes, between[name], peaks[name]]
    rows.append(row + [f"{each / 1e6:.2f}" for each in mb])
header = ["", "loss", "messages", "must send", "sent", "between steps", "peak"]
tables.Table(header, rows, "In MB, of rank 0; sent: mean of four ranks.")

# %% [markdown]
# The same losses and the same bytes to send. Where gloo's own reduce-scatter is used, half as much again was sent, by
# FSDP2 too.
#
# FSDP2 is not quite ZeRO-2. Between steps it shards the *parameters* too (the table's last column but one), and gathers
# them in forward instead of after the step. From then until backward has used them they are whole, and so its peak is
# like ours, whose size its buckets decide. The FSDP before it calls this `SHARD_GRAD_OP`, which is often put down as
# "ZeRO-2". Its `no_sync()` is called `set_requires_gradient_sync(False)` in FSDP2. DeepSpeed's stage 2 keeps parameters
# whole between steps, as ours does. (`HYBRID_SHARD` and `_HYBRID_SHARD_ZERO2` share among the ranks of one host:
# scatters and gathers stay inside it, and between hosts each rank all-reduces its part only. Zhao et al. 2023, "PyTorch
# FSDP", §3.2; lab 11.)

# %% [markdown]
# ## Recap
#
# Ψ parameters in fp32, AdamW, N ranks, g micro-batches, f = (N−1)/N.
#
# | | memory per rank | sent per rank and step | overlap |
# |---|---|---|---|
# | data parallelism | 4Ψ + 4Ψ + 8Ψ | 2f · 4Ψ | both halves, in backward |
# | ZeRO-1 | 4Ψ + 4Ψ + 8Ψ/N | 2f · 4Ψ | none in chapter 07 |
# | freed after backward | 4Ψ + 4Ψ/N + 8Ψ/N; **in backward 4Ψ + 4Ψ** + 8Ψ/N | 2f · 4Ψ | none |
# | ZeRO-2 | 4Ψ + 4Ψ/N + 8Ψ/N; in backward three buckets more | (g+1)f · 4Ψ | reduce-scatters, not the all-gather |
# | ZeRO-2, the last one sends | as ZeRO-1 and a bucket more, when g > 1 | 2f · 4Ψ | the same |
# | all-reduce, then slice | as ZeRO-2 | (2g+1)f · 4Ψ | all-reduces, not the all-gather |

# %% [markdown]
# ## What is still wasted
#
# Optimizer and gradients are shared out. What is most of the rest, and how much of that is needed at one moment?

# %%
# %%ranks
numbers = sum(p.numel() for p in model.blocks[0].parameters())
print(f"a block has {numbers / sum(p.numel() for p in model.parameters()):.0%} of the parameters")

# %%
held = kept.by_component()
whole = held["parameters"] / (held["parameters"] + held["gradients"] + held["optimizer"])
print(f"parameters are {whole:.0%} of what is kept for the step")
assert round(whole, 2) == round(4 / 7, 2)  # 4Ψ of 4Ψ + 4Ψ/4 + 8Ψ/4

# %% [markdown]
# All ranks hold all parameters, all the time, and one block computes at a time. The others' parameters could stay with
# their owners until it is their turn. That is ZeRO-3, chapter 09.
#
# Before that, the lab. One question is left to it: who knows that a step may begin? `one_step` calls
# `finish_gradient_sync()` itself. `ZeRO2` keeps a flag, so that `step()` can do it where the loop has not. It is an
# `nn.Module` that copes with unused parameters and any order of gradients, has `no_sync()`, clips, and can be saved and
# copied with `deepcopy`; and its messages take less room than those of `directly`.

# %%
ranks.stop()
