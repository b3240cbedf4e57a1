# ---
# jupyter:
#   course:
#     module: zero1
#     minutes: 25
# ---

# %% [markdown]
# # 07 · ZeRO-1
#
# **25 minutes.** You will be able to
#
# - share the optimizer's state out, by parameter or by range, and say which of them balances,
# - predict what such a step sends, and settle from the ledger what is told about it,
# - predict what it saves on N ranks: "4 times" is a limit,
# - name what else in a training loop must know that the state is in N parts.
#
# You need chapter 01 (reduce-scatter, all-gather), `OverlappedDDP` of chapter 04, and the 16 bytes per parameter of
# chapter 06.

# %% [markdown]
# ## What is wasted
#
# Chapter 06 ended with AdamW's memory, the same on four ranks to the last bit. Weigh it. (The vocabulary is larger than
# the text needs: so the embedding has 31% of the numbers, as in the smallest GPT-2.)

# %% tags=["nbval-ignore-output"]
from shared import formulas, plots, ranks, tables
from shared.plots import zero as zero_plots

ranks.start(world_size=4, detect_mismatch=False)

# %%
# %%ranks
from torch import nn

from shared import memory, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from solutions.overlapped_ddp import OverlappedDDP

text = CharTokens()
config = GPTConfig(vocab_size=2800, layers=4, width=128)
inputs, targets = (batch.to(device) for batch in text.windows(range(rank, 200, 100), length=32))


def new_model():
    return TinyGPT(config).to(device)


def backward(model):
    """Leave this rank's gradients in the parameters. → its loss"""
    model.zero_grad()
    loss = model(inputs, targets)
    loss.backward()
    return loss.item()


# %%
# %%ranks
AdamW, settings = torch.optim.AdamW, {"lr": 1e-3}
ddp = OverlappedDDP(new_model())
adamw = AdamW(ddp.parameters(), **settings)


def ddp_step():
    loss = backward(ddp)
    ddp.finish_gradient_sync()
    adamw.step()
    return loss


with wire.ledger() as log:
    ddp_step()
print(log.summary())
held = memory.held(ddp.module, adamw)
sizes = {n: p.numel() for n, p in ddp.module.named_parameters()}

# %%
of_ranks, sizes = ranks.pull("held"), ranks.pull("sizes")[0]
parameters = sum(sizes.values())
print(f"Ψ = {parameters:,}; embedding {sizes['token_embedding.weight'] / parameters:.0%} of it")
assert all(each == of_ranks[0] for each in of_ranks)
optimizer_mb = of_ranks[0].optimizer_bytes / 1e6
wasted_mb = formulas.redundant_copies(4) * optimizer_mb
print(f"optimizer: {optimizer_mb:.2f} MB on each rank, {wasted_mb:.2f} MB of copies")
plots.memory_by_component({f"rank {n}": each.by_component() for n, each in enumerate(of_ranks)})

# %% [markdown]
# Half of each bar is the optimizer, and three of the four copies are for nothing. So is the computing: each rank
# works out the same update of the same numbers. AdamW needs a parameter's momentum and variance once per step, to
# update that parameter. So let somebody *own* it.

# %% [markdown]
# ## Each parameter has an owner
#
# The simplest way: sort parameters by size, and give each, the largest first, to the rank that owns least. A rank has
# an AdamW for what it owns, and after the step everybody gets every parameter from its owner.


# %%
# %%ranks
def by_parameter(sizes, world_size):
    """Give each parameter, the largest first, to the rank that owns least. → {name: rank}"""
    owned, owner = [0] * world_size, {}
    for name in sorted(sizes, key=sizes.get, reverse=True):
        owner[name] = owned.index(min(owned))
        owned[owner[name]] += sizes[name]
    return owner


owners = {n: by_parameter(sizes, n) for n in (2, 4, 8, 64)}
owner = owners[world_size]

# %%
# %%ranks
owned_ddp = OverlappedDDP(new_model())
named = dict(owned_ddp.module.named_parameters())
own_adamw = AdamW([p for name, p in named.items() if owner[name] == rank], **settings)


def step_by_parameter():
    loss = backward(owned_ddp)
    owned_ddp.finish_gradient_sync()
    own_adamw.step()
    for name, parameter in named.items():
        dist.broadcast(parameter.data, src=owner[name])
    return loss


with wire.ledger() as log:
    step_by_parameter()
print(log.ops)

# %% [markdown]
# Is it the same step?

# %%
# %%ranks
pairs = zip(ddp.parameters(), owned_ddp.parameters(), strict=True)
print("as with DDP:", all(torch.allclose(one, other, atol=1e-6) for one, other in pairs))
held = memory.held(owned_ddp, own_adamw)

# %% [markdown]
# **Predict.** A quarter of the state on each rank would be ideal. How many times that does the fullest rank hold?

# %%
my_prediction = 1.0

# %%
held_bytes = [held.optimizer_bytes for held in ranks.pull("held")]
print("optimizer, MB:", [f"{each / 1e6:.2f}" for each in held_bytes])
print(f"predicted {my_prediction:g}, measured {max(held_bytes) / (sum(held_bytes) / 4):.2f}")
owners, fullest = ranks.pull("owners")[0], {}
for n, owner in owners.items():
    owned = [sum(sizes[name] for name in sizes if owner[name] == rank) for rank in range(n)]
    fullest[n] = max(owned) / (parameters / n)
rows = [["fullest / ideal", *(f"{ratio:.2f}" for ratio in fullest.values())]]
assert abs(max(held_bytes) / (sum(held_bytes) / 4) - fullest[4]) < 0.01
tables.Table(["ranks", *map(str, fullest)], rows)

# %% [markdown]
# Whoever owns the embedding owns 31%, on 4 ranks or on 64. A parameter is the smallest thing that can be given away,
# and the memory that must be bought is that of the *fullest* rank. The table gets worse with N.
#
# There were 36 broadcasts, too, one per parameter. You know from chapter 03 what that costs.

# %% [markdown]
# ## Each number has an owner
#
# AdamW treats each number by itself; it does not know where a parameter ends. So put all parameters into one flat
# tensor, fill it up to a multiple of N, cut it into N equal parts, and rank r owns part r. A cut may run through
# a parameter.

# %%
groups = {}
for name, size in sizes.items():
    label = ".".join(name.split(".")[:2]) if name.startswith("blocks") else name.split(".")[0]
    groups[label] = groups.get(label, 0) + size
ways = {
    "by parameter": [(size, owners[4][name]) for name, size in sizes.items()],
    "by range": [(-(-parameters // 4), rank) for rank in range(4)],
}
zero_plots.ownership(groups, ways)

# %% [markdown]
# By range the fullest rank has at most one number more than Ψ/N, whatever the model: filling, at most N − 1 numbers in
# all. And what a rank must hand around is *one* piece, in its place: an all-gather.
#
# As in chapter 03, a parameter becomes a view: `p.data` is a window on the flat tensor, and so is the shard. An AdamW
# that steps the shard moves the model.


# %%
# %%ranks
from torch.nn.functional import pad

from shared.c10d import all_gather_single, reduce_scatter_single


def one_piece(tensors):
    """→ a flat copy, filled up with zeros to a multiple of the number of ranks"""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return pad(flat, (0, -flat.numel() % world_size))


def all_reduced(gradient):
    """→ the mean over the ranks, of this rank's part"""
    dist.all_reduce(gradient)
    return gradient.chunk(world_size)[rank] / world_size


# %%
# %%ranks
class ByRange:
    """All parameters in one flat tensor, of which this rank's AdamW steps the r-th N-th."""

    def __init__(self, parameters, my_mean, optimizer_cls=AdamW, **settings):
        self.parameters, self.my_mean = list(parameters), my_mean
        self.flat = one_piece(self.parameters)
        sizes = [p.numel() for p in self.parameters]
        for p, piece in zip(self.parameters, self.flat[: sum(sizes)].split(sizes), strict=True):
            p.data = piece.view_as(p)
        self.shard = nn.Parameter(self.flat.chunk(world_size)[rank])
        self.inner = optimizer_cls([self.shard], **settings)

    def step(self):
        self.shard.grad = self.my_mean(one_piece(p.grad for p in self.parameters))
        self.inner.step()
        self.shard.grad = None
        all_gather_single(self.flat, self.shard.data)


# %% [markdown]
# `my_mean` is how this rank comes by the mean gradient of its part. `all_reduced` above does what data parallelism
# does, and then takes its part.
#
# **Predict.** Data parallelism sent 2f · 4Ψ bytes per rank, f = (N−1)/N: the MB of the first ledger. How many does a
# step by range send?

# %%
my_prediction_mb = 0.0

# %%
# %%ranks
model = new_model()
by_range = ByRange(model.parameters(), all_reduced, **settings)
backward(model)
with wire.ledger() as log:
    by_range.step()
print(log.summary())

# %%
log, state_bytes = ranks.pull("log")[0], 4 * parameters
all_reduce_bytes = formulas.all_reduce_sent_bytes(state_bytes, ranks=4)
all_gather_bytes = formulas.all_gather_sent_bytes(state_bytes, ranks=4)
log.assert_volume(sent_bytes=all_reduce_bytes + all_gather_bytes)
print(f"predicted {my_prediction_mb:g} MB, measured {log.sent_bytes / 1e6:.2f} MB")
print(f"{log.sent_bytes / all_reduce_bytes:.2f} times data parallelism")

# %% [markdown]
# 2f for the gradients, f for the parameters: 3f · 4Ψ. That is where "ZeRO-1 costs 3Ψ" comes from, and "sharding always
# costs more". It is what this *program* costs.

# %% [markdown]
# ## Who needs which gradient?
#
# Rank r steps part r. It needs the mean gradient of part r, and throws the other three quarters of the all-reduce away.
# An all-reduce is a reduce-scatter, after which each rank has the sum of its part, and an all-gather of sums (chapter
# 01). So leave that all-gather out.


# %%
# %%ranks
from solutions.collectives import ring_reduce_scatter


def reduce_scattered(gradient):
    """→ the mean over the ranks, of this rank's part"""
    return ring_reduce_scatter(gradient) / world_size


# %% [markdown]
# (The ring of chapter 01, for a reason that comes below.) **Predict** the MB that a rank sends now.

# %%
my_prediction_mb = 0.0

# %%
# %%ranks
model = new_model()
by_range = ByRange(model.parameters(), reduce_scattered, **settings)
backward(model)
with wire.ledger() as log:
    by_range.step()

# %%
log = ranks.pull("log")[0]
log.assert_volume(sent_bytes=formulas.step_sent_bytes(parameters, ranks=4, stage=1, bytes_each=4))
assert log.sent_bytes == all_reduce_bytes
print(f"predicted {my_prediction_mb:g} MB, measured {log.sent_bytes / 1e6:.2f} MB")
for entry in log.entries:
    if entry.op != "recv":
        sent_mb = entry.sent_bytes / 1e6
        print(f"{entry.op:10} {entry.elements:9,} numbers, must send {sent_mb:.2f} MB")

# %% [markdown]
# As many bytes as data parallelism, to the last one, and a quarter of the state. The all-gather that was left out
# after the gradients is the one that brings the parameters. ZeRO-1 is the all-reduce cut in two, with the optimizer's
# step in between: sums are scattered, parameters gathered. (Rajbhandari et al. 2020, "ZeRO", §5.1 and §7: the paper's
# "2Ψ" counts numbers, with f → 1.)
#
# `must send` is what the algorithm needs. What a rank really sent, it asks its own sockets. (The network interface,
# which chapter 01 asked, counts everybody's traffic.) gloo's reduce-scatter is an all-reduce inside, so put it beside
# the ring:


# %%
# %%ranks
from shared.wire import sockets


def by_backend(gradient):
    mine = gradient.new_empty(gradient.numel() // world_size)
    reduce_scatter_single(mine, gradient)
    return mine / world_size


def wire_of(step):
    """→ messages, bytes that must be sent, and that were, of one step on this rank"""
    before_bytes = sockets.sent_bytes()
    with wire.ledger() as log:
        step()
        dist.barrier()  # until what was sent has left the sockets' queues
    sent_bytes = float("nan")
    if before_bytes is not None and dist.get_backend() == "gloo":  # NCCL goes other ways
        sent_bytes = sockets.sent_bytes() - before_bytes
    messages = [entry for entry in log.entries if entry.op not in ("recv", "barrier")]
    return len(messages), log.sent_bytes, sent_bytes


# %%
# %%ranks
def trained_by_range(my_mean):
    """→ a function that trains a step, its model and its optimizer"""
    model = new_model()
    optimizer = ByRange(model.parameters(), my_mean, **settings)

    def step():
        loss = backward(model)
        optimizer.step()
        return loss

    return step, model, optimizer


steps = {
    "data parallelism": ddp_step,
    "by parameter": step_by_parameter,
    "by range, all-reduce": trained_by_range(all_reduced)[0],
    "by range, gloo's own": trained_by_range(by_backend)[0],
    "by range, our ring": trained_by_range(reduce_scattered)[0],
}
wires = {name: wire_of(step) for name, step in steps.items()}

# %% tags=["nbval-ignore-output"]
rows, sent, of_ranks = [], {}, ranks.pull("wires")
for name in of_ranks[0]:
    must_bytes, sent[name] = (sum(wires[name][which] for wires in of_ranks) / 4 for which in (1, 2))
    rows.append([name, f"{of_ranks[0][name][0]}", f"{must_bytes / all_gather_bytes:.2f}"])
    rows[-1] += [f"{must_bytes / 1e6:.2f}", f"{sent[name] / 1e6:.2f}"]
*_, gloo, ring = sent.values()
assert not gloo < 1.4 * ring
note = "Per rank, mean of four. A reduce-scatter by the ring of chapter 01 is three messages."
tables.Table(["", "messages", "in f · 4Ψ", "must send, MB", "sent, MB"], rows, note)

# %% [markdown]
# Read the last column as a warning about CPUs, not about ZeRO: with gloo's own call ZeRO-1 sends as much as with the
# all-reduce. NCCL's reduce-scatter is an honest one.
#
# | told | what the ledger says |
# |---|---|
# | "data parallelism costs Ψ" | 2fΨ numbers: an all-reduce is two halves |
# | "ZeRO-1 costs 3Ψ" | 3fΨ with an all-reduce of gradients, 2fΨ with a reduce-scatter |
# | "sharding always costs more" | not here; with one micro-batch per step, only stage 3 must (chapters 08, 09) |

# %% [markdown]
# ## States never move
#
# It is told, too, that ZeRO-1 gathers (or broadcasts) the optimizer's states before the step. Look at the list of
# messages above once more: three that sum up gradients, and one all-gather of Ψ numbers *after* the step, the
# parameters. What would it cost to gather momentum and variance as well?

# %%
gathered_bytes = formulas.all_gather_sent_bytes(2 * state_bytes, ranks=4)
print(f"a step sends {log.sent_bytes / 1e6:.2f} MB")
print(f"gathered states would add {gathered_bytes / 1e6:.2f} MB")
assert log.entries[-1].op == "all_gather" and log.entries[-1].payload_bytes == state_bytes
assert gathered_bytes == 2 * all_gather_bytes

# %% [markdown]
# As much again as the whole step, for numbers that no other rank needs; and each rank would need room for all of them,
# which is what was saved. Only a checkpoint moves them, see below.

# %% [markdown]
# ## Is it the same training?
#
# Six steps of AdamW in float64, against one process that has the full batch. The model's size is no multiple of 4.

# %%
# %%ranks
from shared.data import digits
from shared.models import MLP

images, labels = (tensor[:120].to(device) for tensor in digits(torch.float64))


def train(model, optimizer, images, labels):
    for _ in range(6):
        model.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def apart(my_mean):
    """→ the largest difference between the parameters of one process and of the ranks"""
    alone, together = (MLP().to(device, torch.float64) for _ in range(2))
    assert sum(p.numel() for p in alone.parameters()) % world_size > 0
    sharded = ByRange(together.parameters(), my_mean, lr=1e-2)
    train(alone, AdamW(alone.parameters(), lr=1e-2), images, labels)
    train(together, sharded, images.chunk(world_size)[rank], labels.chunk(world_size)[rank])
    pairs = zip(alone.parameters(), together.parameters(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


# %%
# %%ranks
for my_mean in (all_reduced, reduce_scattered):
    largest = apart(my_mean)
    print(f"{my_mean.__name__}: apart by less than 1e-10: {largest < 1e-10}")
    assert largest < 1e-10
no_mean = apart(lambda gradient: gradient.chunk(world_size)[rank])
print(f"without a mean, for comparison: by more than 1e-3: {no_mean > 1e-3}")

# %% [markdown]
# ## What it saves
#
# **Predict.** "ZeRO-1 saves 4 times." In fp32 and on your four ranks: how many times less does a rank hold between
# steps?

# %%
my_prediction = 0.0


# %%
# %%ranks
def held_by_stage():
    """→ what stage 0 and stage 1 hold after a step, on the ranks of the present group"""
    plain, model = new_model(), new_model()
    all_of_it = AdamW(plain.parameters())
    part_of_it = ByRange(model.parameters(), reduce_scattered)
    for each, optimizer in ((plain, all_of_it), (model, part_of_it)):
        backward(each)
        optimizer.step()
    return memory.held(plain, all_of_it), memory.held(model, part_of_it)


# %%
at = {}
for n in (1, 2, 4):
    with ranks.world(n):
        at[n] = ranks.run(lambda: held_by_stage())[0]
    for stage, held in enumerate(at[n]):
        formula_bytes = formulas.model_state_bytes(parameters, n, stage, formulas.FP32_ADAM)
        assert 0 <= held.total_bytes - formula_bytes < 1000  # AdamW's step counters, 4 bytes each
saved = at[4][0].total_bytes / at[4][1].total_bytes
print(f"predicted {my_prediction:g}, measured {saved:.2f} times")
bars = {"data parallelism": at[4][0].by_component()}
plots.memory_by_component(bars | {f"ZeRO-1, {n} ranks": at[n][1].by_component() for n in (2, 4)})

# %% [markdown]
# The updating is shared out with it: AdamW steps a quarter of the numbers. Parameters and gradients stay whole. On N
# ranks fp32 goes from 16 bytes per parameter to 8 + 8/N, and mixed precision, with 12 bytes of optimizer (chapter 06),
# to 4 + 12/N:

# %%
counts, kinds = (1, 2, 4, 8, 16, 32, 64), {"fp32": formulas.FP32_ADAM, "mixed": formulas.MIXED_ADAM}
formula = {
    name: {n: formulas.model_state_bytes(1, n, stage=1, bytes_per_parameter=each) for n in counts}
    for name, each in kinds.items()
}
measured = {"fp32": {n: held[1].total_bytes / parameters for n, held in at.items()}}
limits = {name: each.parameter + each.gradient for name, each in kinds.items()}
zero_plots.bytes_per_parameter(formula, measured, limits)

# %% [markdown]
# For the 7.5 billion parameters of the ZeRO paper's figure 1:

# %%
rows, counts = [], (1, 2, 4, 8, 64, 10**9)
for name, each in kinds.items():
    sizes_gb = [
        formulas.model_state_bytes(7.5, n, stage=1, bytes_per_parameter=each) for n in counts
    ]
    rows.append([f"{name}, GB", *(f"{size_gb:.4g}" for size_gb in sizes_gb)])
    rows.append(["times less", *(f"{sizes_gb[0] / size_gb:.2f}" for size_gb in sizes_gb)])
assert rows[2][5] == "31.41"  # the paper's 31.4 GB
tables.Table(["ranks", "1", "2", "4", "8", "64", "→ ∞"], rows)

# %% [markdown]
# "4 times" is mixed precision on infinitely many ranks; on 8 it is 2.9 times, and in fp32 never more than twice. The
# first few ranks bring most of it.

# %% [markdown]
# ## What sharding breaks
#
# An optimizer in N parts is right, and some lines around it become wrong. Save `optimizer.state_dict()` on rank 0, as
# ever:

# %%
# %%ranks
import io


def saved_bytes(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.tell()


files = saved_bytes(adamw.state_dict()), saved_bytes(by_range.inner.state_dict())
shape = list(by_range.inner.state[by_range.shard]["exp_avg"].shape)

# %% tags=["nbval-ignore-output"]
whole_bytes, part_bytes = ranks.pull("files")[0]
print(f"data parallelism {whole_bytes / 1e6:.2f} MB, ZeRO-1 {part_bytes / 1e6:.2f} MB")
print("exp_avg:", ranks.pull("shape")[0])
assert 0.24 < part_bytes / whole_bytes < 0.27

# %% [markdown]
# A quarter of the state, of a shape that fits no parameter, and no other number of ranks. For a checkpoint, states must
# be collected, per parameter: *there* they do move. What else in a training loop takes the optimizer for whole?
#
# | in the loop | what goes wrong | so |
# |---|---|---|
# | a checkpoint | one N-th, and only for N ranks | collect it, per parameter (lab) |
# | clipping | each rank would scale by its own part's norm, with no error | the norm of all parts (lab) |
# | a scheduler | it writes to the outer optimizer, an inner one steps | pass settings on before each step (lab) |
# | weight decay for some parameters only | a shard has one setting | a flat tensor per group |
# | LAMB, Adafactor, Muon | they need a parameter's norm, rows or matrix | range cuts parameters: own by parameter |
# | a log of `p.grad` | it is this rank's own, never the mean | reduce what you log |
# | more ranks than numbers | the last ranks own filling only | an empty or zero part must still take part |

# %% [markdown]
# ## The production version
#
# torch has `ZeroRedundancyOptimizer`, to be used under its DDP. Train the GPT with it, and with ours.

# %%
# %%ranks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def under_ddp(optimizer_of):
    model = DistributedDataParallel(new_model(), gradient_as_bucket_view=True)
    optimizer = optimizer_of(model.parameters())

    def step():
        loss = backward(model)
        optimizer.step()
        return loss

    return step, model, optimizer


def zero_of(parameters, **options):
    return ZeroRedundancyOptimizer(parameters, AdamW, **options, **settings)


# %%
# %%ranks
kinds = {
    "DDP, AdamW": under_ddp(lambda parameters: AdamW(parameters, **settings)),
    "DDP, torch's": under_ddp(zero_of),
    "… as bucket views": under_ddp(lambda p: zero_of(p, parameters_as_bucket_view=True)),
    "by range, our ring": trained_by_range(reduce_scattered),
}
losses = {name: [step() for _ in range(4)][-1] for name, (step, *_) in kinds.items()}
wires = {name: wire_of(step) for name, (step, *_) in kinds.items()}
held = {name: memory.held(*rest) for name, (_, *rest) in kinds.items()}

# %% tags=["nbval-ignore-output"]
losses, wires, held = ranks.pull("losses")[0], ranks.pull("wires"), ranks.pull("held")
rows = []
for name, loss in losses.items():
    sent_mb = sum(of_rank[name][1] for of_rank in wires) / 4e6
    fullest_mb = max(of_rank[name].optimizer_bytes for of_rank in held) / 1e6
    assert abs(loss - losses["DDP, AdamW"]) < 1e-3
    messages = f"{wires[0][name][0]}"
    rows.append([name, f"{loss:.4f}", messages, f"{sent_mb:.2f}", f"{fullest_mb:.2f}"])
header = ["", "loss", "messages", "send, MB", "optimizer, MB"]
tables.Table(header, rows, "Loss of rank 0; optimizer: the fullest rank.")

# %% [markdown]
# The same losses. torch's is our first version: it owns by *parameter*, largest first, so its fullest rank has the
# embedding; DDP all-reduces the gradients, and the parameters are broadcast, one by one or a rank's all together. That
# is 3f. In exchange DDP's two thirds overlap with backward, and any optimizer may be in it, LAMB too. Ours waits until
# backward is over and copies all gradients into one piece. (The lab spares the copy, chapter 08 the waiting.) For a
# checkpoint, torch's `consolidate_state_dict` collects the states.
#
# (DeepSpeed's stage 1 owns by range, as ours, and all-gathers parameters. But read its ledger before you count on 2f:
# unless told otherwise, it *all-reduces* buckets of gradients, and each rank keeps its part: `allreduce_and_scatter` in
# `stage_1_and_2.py`; issues 5758 and 7059.)

# %% [markdown]
# ## Recap
#
# Ψ parameters in fp32, AdamW, N ranks, f = (N−1)/N.
#
# | | memory per rank | sent per rank and step¹ | collectives² | overlap |
# |---|---|---|---|---|
# | data parallelism | 4Ψ + 4Ψ + 8Ψ | 2f · 4Ψ | one per bucket | backward |
# | by parameter, all-reduce | 4Ψ + 4Ψ + 8 · (the fullest rank's) | 3f · 4Ψ | + one per parameter | backward |
# | by range, all-reduce | 4Ψ + 4Ψ + 8Ψ/N | 3f · 4Ψ | 2 | none here |
# | by range, reduce-scatter | 4Ψ + 4Ψ + 8Ψ/N | 2f · 4Ψ | 2 | none here³ |
#
# ¹ With gradient accumulation, still once per step. ² The three messages of our ring count as one collective. ³ A
# bucket's reduce-scatter could leave during backward, as in chapter 04; chapter 08 lets it. Parameters could be
# gathered while the next forward begins.

# %% [markdown]
# ## What is still wasted
#
# After the reduce-scatter a rank needs the gradients of its own part, and holds those of all:

# %%
# %%ranks
held = memory.held(*kinds["by range, our ring"][1:])
needed = by_range.shard.nbytes
print(f"gradients held {held.gradients_bytes / 1e6:.2f} MB, needed {needed / 1e6:.2f} MB")
assert held.gradients_bytes == world_size * needed

# %% [markdown]
# Three quarters of them for nothing; in mixed precision, on many ranks, gradients are by now half of all that is held.
# They could be let go of, each as soon as its sum has left. That is ZeRO-2, chapter 08.
#
# But first build `ZeRO1`: a real `torch.optim.Optimizer`, without the second copy of the gradients that `one_piece`
# makes, that clips, follows a scheduler, and writes checkpoints for any number of ranks.

# %%
ranks.stop()
