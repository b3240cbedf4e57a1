# ---
# jupyter:
#   course:
#     module: units
#     minutes: 30
#     gpu_per_rank: true
# ---

# %% [markdown]
# # 09 · ZeRO-3
#
# **30 minutes.** You will be able to
#
# - let parameters exist only while a layer computes with them, and say why that needs units,
# - predict the parameters' peak to the byte,
# - predict how much more than data parallelism such a step sends,
# - explain what prefetching and keeping parameters after forward gain you, and what they cost.
#
# You need chapter 01 (reduce-scatter, all-gather), flat tensors of chapter 07, and chapter 08's gradients that travel
# while backward computes.

# %% [markdown]
# ## What is wasted
#
# Chapter 08 left each of four ranks with a quarter of the gradients and of the optimizer's state. Weigh a rank before
# it steps.

# %% tags=["nbval-ignore-output"]
from shared import formulas, plots, ranks, tables, widgets
from shared.plots import lifetimes as lifetime_plots

ranks.start(world_size=4, detect_mismatch=False)

# %%
# %%ranks
from torch import nn

from shared import memory, timeline, wire
from shared.data import CharTokens
from shared.memory import lifetimes
from shared.models import GPTConfig, TinyGPT
from solutions.zero2 import ZeRO2

text = CharTokens()
config = GPTConfig(vocab_size=800, layers=6, width=128)
inputs, targets = (batch.to(device) for batch in text.windows(range(rank, 400, 100), length=32))
AdamW, settings = torch.optim.AdamW, {"lr": 1e-3}


def new_model():
    return TinyGPT(config).to(device)


# %%
# %%ranks
def backward(model, optimizer):
    """Leave each shard its part of the mean gradient. → this rank's loss"""
    optimizer.zero_grad()
    loss = model(inputs, targets)
    loss.backward()
    if hasattr(model, "finish_gradient_sync"):
        model.finish_gradient_sync()
    return loss.item()


def step_of(model, optimizer):
    loss = backward(model, optimizer)
    optimizer.step()
    return loss


# %%
# %%ranks
zero2 = ZeRO2(new_model(), AdamW, bucket_cap_mb=0.5, **settings)
step_of(zero2, zero2)
backward(zero2, zero2)
held = memory.held(zero2)
numbers = {name: p.numel() for name, p in zero2.module.named_parameters()}


def alone(model):
    with timeline.record(model) as line:
        model(inputs, targets).backward()
    return line


rounds = 5 if rank == 0 else 0  # the others leave it the cores
lines = [alone(new_model()) for _ in range(rounds)]

# %%
numbers, of_ranks = ranks.pull("numbers")[0], ranks.pull("held")
psi = sum(numbers.values())
block = sum(numbers[name] for name in numbers if name.startswith("blocks.0."))
root = psi - 6 * block  # what is in no block
share = of_ranks[0].parameters_bytes / of_ranks[0].total_bytes
print(f"Ψ = {psi:,}; a block {block / psi:.0%} of it; parameters {share:.0%} of what a rank holds")
plots.memory_by_component({f"rank {n}": each.by_component() for n, each in enumerate(of_ranks)})

# %% [markdown]
# Four whole copies of the parameters are most of what is left. When does a rank need them? Forward and
# backward of the model alone:

# %% tags=["nbval-ignore-output"]
line = min(ranks.pull("lines")[0], key=lambda line: line.ended_s - line.began_s)
used_s = sum(span.ended_s - span.began_s for span in line.spans if span.name == "blocks.3")
print(f"block 3 computes for {used_s / (line.ended_s - line.began_s):.0%} of the time")
assert used_s < 0.5 * (line.ended_s - line.began_s)
plots.timeline([line])

# %% [markdown]
# Twice, for a moment: once in forward, once in backward. In between, and for the rest of the step, three quarters of
# its parameters could be with the other ranks, and come when they are called.

# %% [markdown]
# ## Memory that goes and comes back
#
# A tensor is a window on a *storage*. A storage can be resized to nothing, and back. The windows stay, also those which
# autograd keeps for backward:

# %%
# %%ranks 0
weight, x = nn.Parameter(torch.zeros(3)), torch.ones(3, requires_grad=True)
flat = torch.tensor([2.0, 4.0, 6.0])
weight.data = flat  # its memory is flat's, as in chapter 07
y = (weight * x).sum()  # backward will need weight
storage = flat.untyped_storage()
storage.resize_(0)
print(f"weight: shape {list(weight.shape)}, {storage.nbytes()} bytes")
storage.resize_(flat.nbytes)
flat.copy_(torch.tensor([2.0, 4.0, 6.0]))
y.backward()
print("gradient of x:", x.grad.tolist())

# %% [markdown]
# Backward did not notice. It would not have noticed other values either: what must be back is up to us. And nobody
# checks that there *is* memory. A read of a parameter without any, a `print` for one, ends the process with a
# segmentation fault (on the ranks you are told so, and get new ones).

# %% [markdown]
# ## The whole model at a time
#
# With that, sharding parameters is a few lines. They lie in one flat tensor, as in chapter 07, but this rank's part has
# memory of its own, and the flat tensor has some only while somebody computes.


# %%
# %%ranks
from torch.nn.functional import pad

from shared.c10d import all_gather_single
from solutions.collectives import ring_reduce_scatter


def one_piece(tensors):
    """→ a flat copy, filled up with zeros to a multiple of the number of ranks"""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return pad(flat, (0, -flat.numel() % world_size))


# %%
# %%ranks
class Part:
    """Parameters of which this rank keeps an N-th, and has the rest from gather() to free()."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.flat = one_piece(self.parameters)
        sizes = [p.numel() for p in self.parameters]
        for p, piece in zip(self.parameters, self.flat[: sum(sizes)].split(sizes), strict=True):
            p.data = piece.view_as(p)
        self.shard = nn.Parameter(self.flat.chunk(world_size)[rank].clone())
        self.free()

    def gather(self):
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        self.here = True
        all_gather_single(self.flat, self.shard.data)

    def free(self):
        self.flat.untyped_storage().resize_(0)
        self.here = False

    def reduce_gradients(self):
        gradient = one_piece(p.grad for p in self.parameters)
        mean = ring_reduce_scatter(gradient) / world_size
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
        for p in self.parameters:
            p.grad = None


# %% [markdown]
# The model gathers before forward, and frees after backward. (`units` comes below; for now there are none, and
# all parameters are the *root's*.) An optimizer gets the shards.


# %%
# %%ranks
class Sharded(nn.Module):
    """A model whose parameters are in units; what is in none is the root's, which is here for the whole step."""

    def __init__(self, module, units=(), **options):
        super().__init__()
        self.module = module
        inside = {p for unit in units for p in unit.parameters()}
        self.root = Part(p for p in module.parameters() if p not in inside)
        self.units = {unit: Part(unit.parameters()) for unit in units}
        self.shards = nn.ParameterList(part.shard for part in (self.root, *self.units.values()))
        for unit, part in self.units.items():
            come_and_go(unit, part, **options)

    def forward(self, *inputs):
        self.root.gather()
        return self.module(*inputs)

    def finish_gradient_sync(self):
        self.root.reduce_gradients()
        self.root.free()


# %% [markdown]
# **Predict.** Ψ parameters, 4 ranks. What is the most that parameters take in a step, as a part of Ψ? ZeRO-2: 1.

# %%
my_prediction = 0.0


# %%
# %%ranks
def followed(model, optimizer):
    """→ the most bytes that parameters have in a step, when which unit has memory, bytes sent"""
    parts = {f"block {place}": part for place, part in enumerate(model.units.values())}
    parts["root"] = model.root

    def state_of(part):
        size = part.flat.untyped_storage().nbytes()
        return "UNSHARDED" if part.here else "UNSHARDING" if size else "SHARDED", size

    def look():
        return {name: state_of(part) for name, part in parts.items()}

    with memory.peak(model, optimizer) as peak, wire.ledger() as log:
        with lifetimes.follow(look) as life:
            step_of(model, optimizer)
    return max(sample.held.parameters_bytes for sample in peak.samples), life, log.sent_bytes


def sharded(units=lambda model: (), **options):
    model = new_model()
    model = Sharded(model, units(model), **options)
    return model, AdamW(model.shards, **settings)


whole_peak_bytes, whole_life, _ = followed(*sharded())

# %%
peak_bytes = ranks.pull("whole_peak_bytes")[0]
print(f"predicted {my_prediction:g}, measured {peak_bytes / (4 * psi):.2f} Ψ")
assert peak_bytes == 4 * (psi / 4 + psi)

# %% [markdown]
# More than with ZeRO-2: the shard, and on top of it the whole. Between steps a rank holds little, but a card must have
# room for the *peak*. One gather for the whole model is also what you get from code that wraps a model in FSDP and does
# not say what its units are ("no wrap policy"). Losses are right, and the parameters' peak is higher than if nobody had
# sharded them.

# %% [markdown]
# ## A unit at a time
#
# A **unit** is gathered and freed as one: a block of the GPT. Four hooks. Before its forward: gather. After it: free.
# When backward brings the gradient of its output: gather again. When the gradients of all its parameters are there:
# reduce-scatter them, and free.


# %%
# %%ranks
def come_and_go(unit, part, reshard_after_forward=True):
    """Let a unit's parameters be there for its forward and for its backward."""

    def after_forward(_unit, _inputs, output):
        if reshard_after_forward:
            part.free()
        output.register_hook(lambda _gradient: part.gather())  # its backward begins

    def on_gradient(_parameter):
        if all(p.grad is not None for p in part.parameters):
            part.reduce_gradients()
            part.free()

    unit.register_forward_pre_hook(lambda _unit, _inputs: part.gather())
    unit.register_forward_hook(after_forward)
    for p in part.parameters:
        p.register_post_accumulate_grad_hook(on_gradient)


# %% [markdown]
# What is in no block is the root: the embeddings and the last norm. The token embedding is *tied*, it is the output
# layer too. It is needed first and last, in forward and in backward, so the root stays for the whole step.
#
# **Predict** the peak of the parameters again: six blocks of 15% of Ψ each, the root has the rest.

# %%
my_prediction = 0.0

# %%
# %%ranks
by_unit, by_unit_adamw = sharded(lambda model: model.blocks)
by_unit_peak_bytes, by_unit_life, _ = followed(by_unit, by_unit_adamw)

# %%
peak_bytes = ranks.pull("by_unit_peak_bytes")[0]
print(f"predicted {my_prediction:g}, measured {peak_bytes / (4 * psi):.2f} Ψ")
print(f"Ψ/N + root + a block = {psi / 4 / psi:.2f} + {root / psi:.2f} + {block / psi:.2f} Ψ")
assert peak_bytes == 4 * (psi / 4 + root + block)

# %% [markdown]
# To the byte. (FSDP's paper, §3.2.1, counts the root as a unit like any other: Σψᵢ/N + max ψᵢ.) The run itself, both
# ways:

# %%
expected_bytes = {"one unit": 4 * (psi / 4 + psi), "a unit per block": peak_bytes}
lives = ranks.pull("whole_life")[0], ranks.pull("by_unit_life")[0]
lifetime_plots.lifetimes(dict(zip(expected_bytes, lives, strict=True)), psi, expected_bytes)

# %% [markdown]
# Below, each row is a unit. In forward blocks come and go from first to last, in backward from last to first, and never
# two at once.
#
# ## What fills up
#
# Each unit is a flat tensor, so each is filled up to a multiple of N. The small MLP of digits, a unit per layer:

# %%
from shared.models import MLP

rows = []
for name, layer in MLP().layers.named_children():
    if size := sum(p.numel() for p in layer.parameters()):
        rows.append([f"layer {name}", f"{size:,}", *(f"{-size % n}" for n in (2, 3, 4, 64, 1000))])
tables.Table(["", "numbers", *(f"N = {n}" for n in (2, 3, 4, 64, 1000))], rows, "zeros at the end")

# %% [markdown]
# At most N − 1 zeros per unit. So why not a unit per parameter? Because a unit is also a *message*, twice gathered and
# once reduced: smaller units lower the peak, and cost α each (chapter 03). A block is the usual choice. torch's
# `fully_shard` cuts each parameter by rows instead, gathers a unit's together all the same, and so keeps names and
# shapes; a parameter of fewer rows than ranks leaves some ranks without any.

# %% [markdown]
# ## What it sends
#
# You may read that ZeRO-3 communicates 3 times (or 2.5 times) what data parallelism does.
#
# **Predict.** A gather of Ψ numbers sends f · 4Ψ bytes per rank, f = (N−1)/N, and so does a reduce-scatter. Data
# parallelism sends 2f · 4Ψ. How many times that does a step send here?

# %%
my_prediction = 0.0


# %%
# %%ranks
def sent_bytes(model, micro_batches):
    by_unit_adamw.zero_grad()
    with wire.ledger() as log:
        for _ in range(micro_batches):
            model(inputs, targets).backward()
            model.finish_gradient_sync()
        by_unit_adamw.step()
    return log.sent_bytes


sent = {g: sent_bytes(by_unit, g) for g in (1, 2, 4)}

# %%
sent, counts = ranks.pull("sent")[0], (1, 2, 4)
half = formulas.all_gather_sent_bytes(4 * psi, ranks=4)  # f · 4Ψ
rows = [["measured", *(f"{sent[g] / half:.2f}" for g in counts)]]
for stage in (3, 2, 1, 0):
    by_formula = [formulas.step_sent_bytes(psi, 4, stage, 4, micro_batches=g) for g in counts]
    rows.append([f"formula, stage {stage}", *(f"{each / half:g}" for each in by_formula)])
assert all(sent[g] == g * (3 - root / psi) * half for g in counts)
print(f"predicted {my_prediction:g}, measured {sent[1] / (2 * half):.2f} times data parallelism")
note = "Stages 0 and 1 add micro-batches up before they send: no_sync."
tables.Table(["in f · 4Ψ", *(f"g = {g}" for g in counts)], rows, note)

# %% [markdown]
# Gather for forward, gather for backward, reduce-scatter: 3f · 4Ψ, which is **1.5 times** data parallelism (ZeRO,
# §7). Ours is a little below, for the root is gathered once. "3 times" takes an all-reduce for one pass; it is two.
# What is true: with g micro-batches per step it is 3g against 2. Each must gather anew, and gradients that waited for
# the last one would need room for all of Ψ.
#
# There is a cheaper way, 2f: do not free after forward, and backward need not gather. The peak is then that of the
# whole model. FSDP calls this choice `reshard_after_forward`.

# %% [markdown]
# ## Ahead of time
#
# The inline version gathers, and stands still until all has come. Chapter 04's remedy: begin earlier. While block 2
# computes, block 3's parameters travel, at the price of one more gathered unit. So a gather must be able to begin
# before somebody waits for it. (`Sharded` makes parts of this new class from now on.)


# %%
# %%ranks
from itertools import pairwise

from solutions.collectives import launch_all_gather


class Part(Part):
    def begin(self):
        storage = self.flat.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.flat.nbytes)
            self.handle = launch_all_gather(self.flat, self.shard.data)

    def gather(self):
        self.begin()
        if not self.here:
            self.handle.wait()
            self.here = True


def look_ahead(before, after, parts):
    """Let each of two neighbours, when it begins to compute, send for the other."""

    def after_forward(_unit, _inputs, output):
        output.register_hook(lambda _gradient: parts[before].begin())

    before.register_forward_pre_hook(lambda _unit, _inputs: parts[after].begin())
    after.register_forward_hook(after_forward)


# %% [markdown]
# A unit is now in one of three states. SHARDED means that the rank holds only its shard, UNSHARDING that an all-gather
# is filling the unit's memory, and UNSHARDED that all of its parameters are here. In the lab these are the members of
# an `Enum`, with a fourth state for backward and its gradients.
#
# **Predict** the three peaks as parts of Ψ: without prefetching; with; with it and `reshard_after_forward=False`.

# %%
my_predictions = 0.0, 0.0, 0.0


# %%
# %%ranks
def in_blocks(prefetch=True, **options):
    model, optimizer = sharded(lambda model: model.blocks, **options)
    if prefetch:
        for before, after in pairwise(model.units):
            look_ahead(before, after, model.units)
    return model, optimizer


ways = {
    "no prefetch": in_blocks(prefetch=False),
    "prefetch": in_blocks(),
    "… kept after forward": in_blocks(reshard_after_forward=False),
}
seen = {name: followed(*built) for name, built in ways.items()}

# %%
seen = ranks.pull("seen")[0]
gathered = {
    "no prefetch": block + root,
    "prefetch": 2 * block + root,
    "… kept after forward": psi,
}
expected_bytes = {name: 4 * (psi / 4 + numbers) for name, numbers in gathered.items()}
for name, predicted in zip(seen, my_predictions, strict=True):
    peak_bytes, _, sent_bytes = seen[name]
    measured = f"{peak_bytes / (4 * psi):.2f} Ψ, sent {sent_bytes / half:.2f} f · 4Ψ"
    print(f"{name:20} predicted {predicted:g}, measured {measured}")
    assert peak_bytes == expected_bytes[name]
lives = {name: life for name, (_, life, _) in seen.items()}
widgets.lifetime_stepper(lives, psi, expected_bytes, of="prefetch")

# %% [markdown]
# With prefetching a bar begins hatched, on its way, while the one before still computes: the next block in forward, the
# *previous* one in backward. Here the list of blocks says which is next; the lab's `ZeRO3` notes the order of calls.
# Kept parameters spare the second gather, and the peak is that of one unit. (In JupyterLab, step through the middle
# one.)
#
# Does it help? Emulate a link of 1 Gbit/s, as in chapter 04, between two ranks, so that each has a core of its own:


# %%
# %%ranks
import contextlib

from shared.hosts import emulated


def behind_a_link(rounds=12):
    """→ the timelines of the shortest steps, without and with prefetching; messages per gather"""
    built = [in_blocks(prefetch) for prefetch in (False, True)]
    is_gloo, lines = dist.get_backend() == "gloo", ([], [])
    link = emulated.link("1gbit", latency_ms=0.1) if is_gloo else contextlib.nullcontext()
    with link:
        for (model, optimizer), recorded in rounds * list(zip(built, lines, strict=True)):
            with timeline.record(model, optimizer) as line:
                optimizer.zero_grad()
                model(inputs.repeat(4, 1), targets.repeat(4, 1)).backward()
                model.finish_gradient_sync()
                optimizer.step()
            recorded.append(line)
    shortest = [min(each[1:], key=lambda line: line.ended_s - line.began_s) for each in lines]
    return shortest, 2 if is_gloo else 1


# %% tags=["nbval-ignore-output"]
from shared.timeline.bundles import bundled

with ranks.world(2):
    lines, of_a_gather = ranks.run(lambda: behind_a_link())[0]
lines = [bundled(line, of_a_gather) for line in lines]  # over gloo, a send and a receive
ended_s = [[span.ended_s for span in line.spans if "blocks" in span.name][:6] for line in lines]
for line, blocks_ended_s, ahead in zip(lines, ended_s, (0, 1), strict=True):
    begun_s = [began_s for began_s, _ in line.lane("communication")]
    begun = [sum(at_s < block_s for at_s in begun_s) for block_s in blocks_ended_s]
    assert begun == [min(7, 2 + block + ahead) for block in range(6)]  # when a block's forward ends
plots.timeline(lines, ["gathered late", "prefetched"])

# %% [markdown]
# Above, without: each gather of forward (1 to 7, the first is the root's) is a wait. Below, with: from the second block
# on, it is under the block before. Backward has a gather *and* a reduce-scatter per block to hide; ours waits for the
# latter, the lab's queue (chapter 08) does not. What cannot be hidden is what takes longer than the computing: then
# only larger micro-batches help.
#
# ## The production version
#
# The inline version serves one kind of model, in one order of calls. The lab's `ZeRO3` will do more, and torch's
# `fully_shard` (FSDP2) does. You choose the units: a call for each, then one for the rest.


# %%
# %%ranks
from torch.distributed.fsdp import fully_shard


def in_fsdp2(model, units, **options):
    for unit in units:
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def with_adamw(model):
    return model, AdamW(model.parameters(), **settings)


def finished(model, **options):
    units = dict.fromkeys(model.blocks)  # each once
    return with_adamw(in_fsdp2(model, units, **options))


# %% [markdown]
# ## Is it the same training?
#
# Six steps of AdamW in float64, against one process that has the full batch; and beside torch's own, `fully_shard`.

# %%
# %%ranks
from shared.data import digits
from shared.models import MLP

images, labels = (tensor[:120].to(device) for tensor in digits(torch.float64))


def losses_of(model, parameters, images, labels):
    """→ six losses, of all ranks' samples"""
    optimizer, losses = AdamW(parameters, lr=1e-2), []
    for _ in range(6):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        if hasattr(model, "finish_gradient_sync"):
            model.finish_gradient_sync()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


# %%
# %%ranks
def mlp():
    return MLP().to(device, torch.float64)


mine = images.chunk(world_size)[rank], labels.chunk(world_size)[rank]
one, net = mlp(), mlp()
# The last layer, 1,290 numbers, is the root's, and must be filled up.
inline = Sharded(net, [net.layers[0], net.layers[2]])
look_ahead(*inline.units, inline.units)
net = mlp()
fsdp = in_fsdp2(net, [net.layers[0], net.layers[2]])
of_one = losses_of(one, one.parameters(), images, labels)
for name, model in {"inline": inline, "FSDP2": fsdp}.items():
    parameters = inline.shards if model is inline else model.parameters()
    losses = losses_of(model, parameters, *mine)
    dist.all_reduce(losses)
    largest = (losses / world_size - of_one).abs().max().item()
    print(f"{name}: apart by less than 1e-10: {largest < 1e-10}")
    assert largest < 1e-10

# %% [markdown]
# ## The ladder, measured
#
# All stages in one run: the solutions of the labs so far, and for stage 3 the inline version, which prefetches. Beside
# it torch's `fully_shard`, once with the blocks as units, and once as it is often wrapped, without.


# %%
# %%ranks
import statistics
import time

from solutions.overlapped_ddp import OverlappedDDP
from solutions.zero1 import ZeRO1


def rungs():
    """→ name: (model, optimizer)"""
    for_zero1, zero2 = new_model(), ZeRO2(new_model(), AdamW, bucket_cap_mb=0.5, **settings)
    return {
        "0: data parallelism": with_adamw(OverlappedDDP(new_model(), bucket_cap_mb=0.5)),
        "1: ZeRO-1": (for_zero1, ZeRO1(for_zero1.parameters(), AdamW, **settings)),
        "2: ZeRO-2": (zero2, zero2),
        "3: ZeRO-3": in_blocks(),
        "3: FSDP2": finished(new_model()),
        "3: FSDP2, one unit": with_adamw(in_fsdp2(new_model(), [])),
    }


# %%
# %%ranks
def measured(model, optimizer):
    """→ bytes held before a step, at its peak, and to send; loss"""
    backward(model, optimizer)
    held = memory.held(model, optimizer)
    optimizer.step()
    with wire.ledger() as log, memory.peak(model, optimizer) as peak:
        loss = step_of(model, optimizer)
    return held.total_bytes, peak.peak_bytes, log.sent_bytes, loss


built, times_s = rungs(), {}
for each in built.values():
    step_of(*each)
ladder = {name: measured(*each) for name, each in built.items()}
for _ in range(5):  # in turns, so that a busy moment meets all
    for name, each in built.items():
        dist.barrier()
        began_s = time.perf_counter()
        step_of(*each)
        times_s.setdefault(name, []).append(time.perf_counter() - began_s)
took_s = {name: statistics.median(each) for name, each in times_s.items()}

# %% tags=["nbval-ignore-output"]
ladder, took_s, rows = ranks.pull("ladder")[0], ranks.pull("took_s")[0], []
losses = [loss for *_, loss in ladder.values()]
assert max(losses) - min(losses) < 1e-3
assert ladder["3: ZeRO-3"][2] == ladder["3: FSDP2"][2]  # bytes to send
for name, (held_bytes, peak_bytes, sent_bytes, _) in ladder.items():
    formula_bytes = formulas.model_state_bytes(psi, 4, int(name[0]), formulas.FP32_ADAM)
    times = took_s[name] / took_s["0: data parallelism"]
    assert 0 <= held_bytes - formula_bytes < 10_000  # AdamW's step counters; what fills up
    sizes = (held_bytes, formula_bytes, peak_bytes)
    rows.append([name, *(f"{size / 1e6:.2f}" for size in sizes)])
    rows[-1] += [f"{sent_bytes / half:.2f}", f"{times:.1f}"]
header = ["", "held, MB", "formula, MB", "peak, MB", "sent, in f · 4Ψ", "time"]
tables.Table(header, rows, "rank 0; time as a multiple of the first row's, median of 5 steps")

# %% [markdown]
# The same losses in every row. *Held* is between backward and step. *Peak* has the activations in it, which no stage
# makes smaller, and the units or buckets of the moment.
#
# torch's `fully_shard` (FSDP2) does what ours does, unit by unit, with the same bytes. Each parameter is a `DTensor` of
# its own, so that names, frozen parameters and state dicts need no care. Leave out the call for each block, and the
# last row is what you get. (FSDP1, the older wrapper, keeps one flat tensor per unit, as ours, and is told its units by
# an `auto_wrap_policy`. DeepSpeed's stage 3 cuts each parameter by itself, gathers a module's own ones before it runs,
# and records in an early step which come next.)

# %% [markdown]
# ## Recap
#
# Ψ parameters in fp32, AdamW, N ranks, f = (N−1)/N, g micro-batches.
#
# | | memory per rank | sent per rank and step | overlap |
# |---|---|---|---|
# | data parallelism | 4Ψ + 4Ψ + 8Ψ | 2f · 4Ψ | backward |
# | ZeRO-1 | 4Ψ + 4Ψ + 8Ψ/N | 2f · 4Ψ | none in ours |
# | ZeRO-2 | 4Ψ + 12Ψ/N, + buckets | (g+1)f · 4Ψ | backward |
# | ZeRO-3, one unit | 16Ψ/N + 4Ψ¹ | 2gf · 4Ψ | none |
# | ZeRO-3, units | 16Ψ/N + root + a unit¹ | 3gf · 4Ψ² | none here, gradients in the lab |
# | … with prefetching | + another unit | 3gf · 4Ψ² | the gathers too, forward and backward |
# | … kept after forward | 16Ψ/N + 4Ψ¹ | 2gf · 4Ψ | forward; gradients in the lab |
#
# ¹ And the gradients of what is in backward, as large again, until they are reduced. ² Less a gather of the root.

# %% [markdown]
# ## What is still wasted
#
# The root apart, nothing is on two ranks for longer than it is needed. What data parallelism cannot do, even sharded:
#
# - **Make one layer smaller.** Whoever computes has the whole of it, and the activations of at least one sequence. On
#   1,024 ranks of the dry run, the two are nearly all of the peak. Splitting the layer itself is tensor parallelism,
#   chapter 13.
# - **Keep the batch small.** Each rank needs a sequence of its own: 1,024 ranks with one of 2,048 tokens each are
#   2.1 million tokens per step, whether the training wants so many or not.
# - **Send less per step than the model's size**, g times over. Chapter 11 has the production wrappers, and how
#   to choose between stages by such numbers.
#
# But first build `ZeRO3`: in the lab, with units that may be nested, prefetching, and checkpoints for any N.

# %%
ranks.stop()
