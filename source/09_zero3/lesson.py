# ---
# jupyter:
#   course:
#     module: units
#     minutes: 30
# ---

# %% [markdown]
# # 09 · ZeRO-3
#
# **30 minutes.** After this lesson you can
#
# - give a layer its parameters only while it computes, and explain why that needs *units*,
# - predict the peak of the parameters to the byte,
# - predict how much more than data parallelism such a step sends,
# - say what prefetching and keeping parameters gain, and what they cost.
#
# You need reduce-scatter and all-gather (chapter 01), flat parameters (chapter 07), and gradients that are
# reduce-scattered during backward (chapter 08).

# %% [markdown]
# ## What is wasted
#
# After chapter 08, each of four ranks holds a quarter of the gradients and of the optimizer state. What does a rank
# hold just before it steps?

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
    """Give each shard its mean gradient. Returns this rank's loss."""
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
numels = {name: p.numel() for name, p in zero2.module.named_parameters()}


def alone(model):
    with timeline.record(model) as line:
        model(inputs, targets).backward()
    return line


rounds = 5 if rank == 0 else 0  # the other ranks leave the cores to it
lines = [alone(new_model()) for _ in range(rounds)]

# %%
numels, of_ranks = ranks.pull("numels")[0], ranks.pull("held")
psi = sum(numels.values())
block = sum(numels[name] for name in numels if name.startswith("blocks.0."))
root = psi - 6 * block  # what is in no block
share = of_ranks[0].parameters_bytes / of_ranks[0].total_bytes
print(
    f"Ψ = {psi:,}; a block has {block / psi:.0%} of it; parameters are {share:.0%} of what a rank holds"
)
plots.memory_by_component({f"rank {n}": each.by_component() for n, each in enumerate(of_ranks)})

# %% [markdown]
# Most of what is left are four full copies of the parameters. When does a rank need them? Here are forward and backward
# of the model alone:

# %% tags=["nbval-ignore-output"]
line = min(ranks.pull("lines")[0], key=lambda line: line.ended_s - line.began_s)
used_s = sum(span.ended_s - span.began_s for span in line.spans if span.name == "blocks.3")
print(f"block 3 computes for {used_s / (line.ended_s - line.began_s):.0%} of the time")
assert used_s < 0.5 * (line.ended_s - line.began_s)
plots.timeline([line])

# %% [markdown]
# A block needs its parameters twice per step, for a short time each: once in forward and once in backward. For the rest
# of the step, each rank could keep a quarter of them and get the other three quarters when they are needed.

# %% [markdown]
# ## Freeing a parameter, and filling it again
#
# A tensor is a view of a *storage*, and a storage can be resized to zero bytes and back. The views stay valid, also the
# ones that autograd saves for backward:

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
# Backward did not notice. It would not have noticed other values either, so it is up to us to bring the right ones
# back. Nothing checks that there is memory at all: reading a freed tensor, in a `print` for example, may end the
# process with a segmentation fault. (The notebook then tells you so, and starts new ranks.)

# %% [markdown]
# ## Unsharding the whole model
#
# With this trick, sharding parameters takes a few lines. To **unshard** parameters means to give their flat tensor
# memory and to all-gather every rank's shard into it. To **reshard** them means to free that memory. The rank's own
# shard has memory of its own, and stays.


# %%
# %%ranks
from torch.nn.functional import pad

from shared.c10d import all_gather_single
from solutions.collectives import ring_reduce_scatter


def flatten(tensors):
    """Concatenate copies of tensors, padded with zeros to a multiple of the number of ranks."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return pad(flat, (0, -flat.numel() % world_size))


# %%
# %%ranks
class ShardedFlat:
    """Parameters of which this rank keeps one shard, and all of them from unshard() to reshard()."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.flat = flatten(self.parameters)
        sizes = [p.numel() for p in self.parameters]
        for p, view in zip(self.parameters, self.flat[: sum(sizes)].split(sizes), strict=True):
            p.data = view.view_as(p)
        self.shard = nn.Parameter(self.flat.chunk(world_size)[rank].clone())
        self.reshard()

    def unshard(self):
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        self.here = True
        all_gather_single(self.flat, self.shard.data)

    def reshard(self):
        self.flat.untyped_storage().resize_(0)
        self.here = False

    def reduce_gradients(self):
        gradient = flatten(p.grad for p in self.parameters)
        mean = ring_reduce_scatter(gradient) / world_size
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
        for p in self.parameters:
            p.grad = None


# %% [markdown]
# The model unshards its parameters before forward, and reshards them after backward. The optimizer gets the shards.
# (`units` comes below. For now there are none, and all parameters belong to the *root*.)


# %%
# %%ranks
class Sharded(nn.Module):
    """A model in units. What is in no unit belongs to the root, which is here for the whole step."""

    def __init__(self, module, units=(), **options):
        super().__init__()
        self.module = module
        inside = {p for unit in units for p in unit.parameters()}
        self.root = ShardedFlat(p for p in module.parameters() if p not in inside)
        self.units = {unit: ShardedFlat(unit.parameters()) for unit in units}
        everything = (self.root, *self.units.values())
        self.shards = nn.ParameterList(sharded.shard for sharded in everything)
        for unit, sharded in self.units.items():
            register_hooks(unit, sharded, **options)

    def forward(self, *inputs):
        self.root.unshard()
        return self.module(*inputs)

    def finish_gradient_sync(self):
        self.root.reduce_gradients()
        self.root.reshard()


# %% [markdown]
# **Predict.** Ψ parameters, 4 ranks. What is the most that parameters take on a rank during a step, as a fraction of Ψ?
# For ZeRO-2 it is 1.

# %%
my_prediction = 0.0


# %%
# %%ranks
def followed(model, optimizer):
    """Return the most bytes of parameters in a step, when each unit has memory, and the bytes sent."""
    named = {f"block {index}": sharded for index, sharded in enumerate(model.units.values())}
    named["root"] = model.root

    def state_of(sharded):
        size = sharded.flat.untyped_storage().nbytes()
        return "UNSHARDED" if sharded.here else "UNSHARDING" if size else "SHARDED", size

    def look():
        return {name: state_of(sharded) for name, sharded in named.items()}

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
# That is more than ZeRO-2 needs: the shard, and all parameters on top of it. Between steps a rank holds little, but a
# GPU must have room for the *peak*. You get the same result from code that wraps a model in FSDP and does not say what
# its units are (in FSDP1: no wrap policy). The losses are right, and the parameters' peak is higher than without
# sharding them.

# %% [markdown]
# ## Unsharding one unit at a time
#
# A **unit** is a part of the model that is unsharded and resharded together: one block of the GPT. Three kinds of hooks
# do it:
#
# - Before the unit's forward, unshard it. After its forward, reshard it.
# - When the gradient of its output is complete, its backward begins, so unshard it again.
# - When the gradients of all its parameters have come, its backward is done. Reduce-scatter them, and reshard the unit.


# %%
# %%ranks
def register_hooks(unit, sharded, reshard_after_forward=True):
    """Unshard a unit for its forward and for its backward."""

    def after_forward(_unit, _inputs, output):
        if reshard_after_forward:
            sharded.reshard()
        output.register_hook(lambda _gradient: sharded.unshard())  # its backward begins

    def on_gradient(_parameter):
        if all(p.grad is not None for p in sharded.parameters):
            sharded.reduce_gradients()
            sharded.reshard()

    unit.register_forward_pre_hook(lambda _unit, _inputs: sharded.unshard())
    unit.register_forward_hook(after_forward)
    for p in sharded.parameters:
        p.register_post_accumulate_grad_hook(on_gradient)


# %% [markdown]
# The **root** is what is in no block: the embeddings and the final norm. The token embedding is *tied* to the output
# layer, so the root is needed first and last, in forward and in backward. It stays unsharded for the whole step.
#
# **Predict** the peak of the parameters again, as a fraction of Ψ. Each of the six blocks has 15% of Ψ, and the root
# has the rest.

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
# The formula is right to the byte: the shards, the root and one block. (The FSDP paper counts the root as a unit like
# any other: Σψᵢ/N + max ψᵢ; Zhao et al. 2023, §3.2.1.) The figure shows both runs. In its lower half, each row is a
# unit, and a bar means that the unit is unsharded.

# %%
expected_bytes = {"one unit": 4 * (psi / 4 + psi), "a unit per block": peak_bytes}
lives = ranks.pull("whole_life")[0], ranks.pull("by_unit_life")[0]
lifetime_plots.lifetimes(dict(zip(expected_bytes, lives, strict=True)), psi, expected_bytes)

# %% [markdown]
# On the right, blocks are unsharded from first to last in forward, and from last to first in backward. There are never
# two at once.
#
# ## Padding
#
# Each unit is a flat tensor, so each is padded to a multiple of N. Here is the padding for the small MLP of chapter 02,
# with a unit per layer:

# %%
from shared.models import MLP

rows = []
for name, layer in MLP().layers.named_children():
    if size := sum(p.numel() for p in layer.parameters()):
        rows.append([f"layer {name}", f"{size:,}", *(f"{-size % n}" for n in (2, 3, 4, 64, 1000))])
header = ["", "elements", *(f"N = {n}" for n in (2, 3, 4, 64, 1000))]
tables.Table(header, rows, "elements of padding")

# %% [markdown]
# A unit has at most N − 1 elements of padding. So why not make every parameter a unit? Because each unit also costs
# three collectives per step. Smaller units lower the peak, but each collective costs the latency α (chapter 03). A
# block is the usual choice.
#
# torch's `fully_shard` (FSDP2) cuts each parameter by rows instead of flattening a unit, and still launches one
# all-gather per unit. Parameters keep their names and shapes. A parameter with fewer rows than ranks leaves some ranks
# without any of it.

# %% [markdown]
# ## What a step sends
#
# It is commonly claimed that ZeRO-3 sends 3 times, or 2.5 times, what data parallelism sends.
#
# **Predict.** An all-gather of Ψ elements sends f · 4Ψ bytes per rank, with f = (N−1)/N, and so does a reduce-scatter.
# Data parallelism sends 2f · 4Ψ. How many times that does a step send here? 1 would mean: as much as data parallelism.

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
note = "g micro-batches per step. Stages 0 and 1 add them up before they send: no_sync."
tables.Table(["in f · 4Ψ", *(f"g = {g}" for g in counts)], rows, note)

# %% [markdown]
# A unit is all-gathered for forward, all-gathered for backward, and its gradients are reduce-scattered: 3f · 4Ψ, which
# is **1.5 times** data parallelism (Rajbhandari et al. 2020, §7). Ours is a little below that, because the root is
# gathered once only. "3 times" would be true if an all-reduce were a single pass, but it is two.
#
# With g micro-batches per step, ZeRO-3 sends 3g against 2. Each micro-batch must gather the parameters again, and
# gradients that waited for the last one would take all of Ψ.
#
# A cheaper way sends 2f · 4Ψ: do not reshard after forward, so that backward need not gather again. The peak is then
# that of the whole model. FSDP calls this choice `reshard_after_forward`.

# %% [markdown]
# ## Prefetching the next unit
#
# Our model launches an all-gather, and waits until it is complete. The remedy is the one of chapter 04: launch earlier.
# While block 2 computes, the all-gather of block 3 is in flight. This is called **prefetching**, and it costs the
# memory of one more unsharded unit. So we need to launch an all-gather before anybody waits for it. (From here on,
# `Sharded` is made of this new class.)


# %%
# %%ranks
from itertools import pairwise

from solutions.async_collectives import launch_all_gather


class ShardedFlat(ShardedFlat):
    def launch(self):
        storage = self.flat.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.flat.nbytes)
            self.in_flight = launch_all_gather(self.flat, self.shard.data)

    def unshard(self):
        self.launch()
        if not self.here:
            self.in_flight.wait()
            self.here = True


def prefetch_each_other(before, after, sharded):
    """Let each of two neighbors launch the other's all-gather when it begins to compute."""

    def after_forward(_unit, _inputs, output):
        output.register_hook(lambda _gradient: sharded[before].launch())

    before.register_forward_pre_hook(lambda _unit, _inputs: sharded[after].launch())
    after.register_forward_hook(after_forward)


# %% [markdown]
# A unit is now in one of three states. It is SHARDED when it has this rank's shard only. It is UNSHARDING while an
# all-gather fills its memory, and UNSHARDED when that is complete. In the lab an `Enum` has these names, and a fourth
# state for backward.
#
# **Predict** three peaks of the parameters as fractions of Ψ: without prefetching, with prefetching, and with
# prefetching and `reshard_after_forward=False`.

# %%
my_predictions = 0.0, 0.0, 0.0


# %%
# %%ranks
def in_blocks(prefetch=True, **options):
    model, optimizer = sharded(lambda model: model.blocks, **options)
    if prefetch:
        for before, after in pairwise(model.units):
            prefetch_each_other(before, after, model.units)
    return model, optimizer


ways = {
    "no prefetch": in_blocks(prefetch=False),
    "prefetch": in_blocks(),
    "… kept after forward": in_blocks(reshard_after_forward=False),
}
seen = {name: followed(*built) for name, built in ways.items()}

# %%
seen = ranks.pull("seen")[0]
unsharded = {
    "no prefetch": block + root,
    "prefetch": 2 * block + root,
    "… kept after forward": psi,
}
expected_bytes = {name: 4 * (psi / 4 + numel) for name, numel in unsharded.items()}
for name, predicted in zip(seen, my_predictions, strict=True):
    peak_bytes, _, sent_bytes = seen[name]
    measured = f"{peak_bytes / (4 * psi):.2f} Ψ, sent {sent_bytes / half:.2f} f · 4Ψ"
    print(f"{name:20} predicted {predicted:g}, measured {measured}")
    assert peak_bytes == expected_bytes[name]
lives = {name: life for name, (_, life, _) in seen.items()}
widgets.lifetime_stepper(lives, psi, expected_bytes, of="prefetch")

# %% [markdown]
# With prefetching, a bar begins hatched: the all-gather is in flight while the block before still computes. In forward
# that is the next block, in backward the *previous* one. Here the list of blocks says which one is next; `ZeRO3` of lab
# 10 remembers the order of calls. Keeping the parameters saves the second all-gather, and the peak is then that of a
# single unit. (In JupyterLab you can step through the middle one.)
#
# Does it help? We emulate a link of 1 Gbit/s between two ranks, so that each rank has a core of its own:


# %%
# %%ranks
import contextlib

from shared.hosts import emulated


def behind_a_link(rounds=12):
    """Return the shortest step's timeline without and with prefetching, and messages per all-gather."""
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
    lines, per_all_gather = ranks.run(lambda: behind_a_link())[0]
lines = [bundled(line, per_all_gather) for line in lines]  # over gloo, a send and a receive
ended_s = [[span.ended_s for span in line.spans if "blocks" in span.name][:6] for line in lines]
for line, blocks_ended_s, ahead in zip(lines, ended_s, (0, 1), strict=True):
    begun_s = [began_s for began_s, _ in line.lane("communication")]
    begun = [sum(at_s < block_s for at_s in begun_s) for block_s in blocks_ended_s]
    assert begun == [min(7, 2 + block + ahead) for block in range(6)]  # when a block's forward ends
plots.timeline(lines, ["no prefetch", "prefetch"])

# %% [markdown]
# Above, without prefetching, the model waits for each all-gather of forward (number 1 is the root's). Below, from the
# second block on, the all-gather is in flight while the block before computes. Backward has an all-gather *and* a
# reduce-scatter per block to hide. Ours waits for the reduce-scatter; lab 10 does not. An all-gather that takes longer
# than the block before it cannot be hidden. Then only larger micro-batches help.
#
# ## Is it the same training?
#
# We compare six steps of AdamW in float64 with one process that has the full batch. Beside ours we run torch's own
# ZeRO-3, `fully_shard` (FSDP2). It wants a call for each unit, and one for the rest. Each call gets the mesh of all
# ranks on their type of device, because without a mesh, torch would choose a GPU on any machine that has one.

# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shared.data import digits
from shared.models import MLP

images, labels = (tensor[:120].to(device) for tensor in digits(torch.float64))


def in_fsdp2(model, units):
    mesh = init_device_mesh(device.type, (world_size,))
    for unit in units:
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def losses_of(model, parameters, images, labels):
    """Return the losses of six steps on these samples."""
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


own = images.chunk(world_size)[rank], labels.chunk(world_size)[rank]
one, net = mlp(), mlp()
# The last layer, with 1,290 elements, belongs to the root and needs padding.
ours = Sharded(net, [net.layers[0], net.layers[2]])
prefetch_each_other(*ours.units, ours.units)
net = mlp()
fsdp2 = in_fsdp2(net, [net.layers[0], net.layers[2]])
of_one = losses_of(one, one.parameters(), images, labels)
for name, model in {"ours": ours, "FSDP2": fsdp2}.items():
    losses = losses_of(model, ours.shards if model is ours else model.parameters(), *own)
    dist.all_reduce(losses)
    largest = (losses / world_size - of_one).abs().max().item()
    print(f"{name}: differs from one process by less than 1e-10: {largest < 1e-10}")
    assert largest < 1e-10

# %% [markdown]
# ## The ladder, measured
#
# Here are all stages in one run: the solutions of the labs so far, and our ZeRO-3 with prefetching. Beside it runs
# torch's `fully_shard`, once with the blocks as units, and once without units.


# %%
# %%ranks
import statistics
import time

from solutions.overlapped_ddp import OverlappedDDP
from solutions.zero1 import ZeRO1


def with_adamw(model):
    return model, AdamW(model.parameters(), **settings)


def rungs():
    """Return a model and an optimizer for each stage."""
    for_zero1, zero2 = new_model(), ZeRO2(new_model(), AdamW, bucket_cap_mb=0.5, **settings)
    for_fsdp2 = new_model()
    return {
        "0: data parallelism": with_adamw(OverlappedDDP(new_model(), bucket_cap_mb=0.5)),
        "1: ZeRO-1": (for_zero1, ZeRO1(for_zero1.parameters(), AdamW, **settings)),
        "2: ZeRO-2": (zero2, zero2),
        "3: ZeRO-3": in_blocks(),
        "3: FSDP2": with_adamw(in_fsdp2(for_fsdp2, for_fsdp2.blocks)),
        "3: FSDP2, one unit": with_adamw(in_fsdp2(new_model(), [])),
    }


# %%
# %%ranks
def measured(model, optimizer):
    """Return the bytes held before a step, at its peak, and sent; and the loss."""
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
for _ in range(5):  # in turns, so that a busy moment slows all of them
    for name, each in built.items():
        dist.barrier()
        began_s = time.perf_counter()
        step_of(*each)
        if device.type == "cuda":
            torch.cuda.synchronize()  # a GPU still works when a call has returned
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
    assert 0 <= held_bytes - formula_bytes < 10_000  # AdamW's step counters, and padding
    sizes = (held_bytes, formula_bytes, peak_bytes)
    rows.append([name, *(f"{size / 1e6:.2f}" for size in sizes)])
    rows[-1] += [f"{sent_bytes / half:.2f}", f"{times:.1f}"]
header = ["", "held, MB", "formula, MB", "peak, MB", "sent, in f · 4Ψ", "time"]
tables.Table(header, rows, "rank 0; time as a multiple of the first row's, median of 5 steps")

# %% [markdown]
# The losses are the same in every row. *Held* is measured between backward and the optimizer's step. *Peak* includes
# the activations, which no stage makes smaller, and the units or buckets of the moment.
#
# `fully_shard` does what ours does, unit by unit, and sends the same bytes. If you leave out the call for each block,
# you get the last row. FSDP1, torch's older wrapper, keeps one flat tensor per unit as ours does, and learns its units
# from an `auto_wrap_policy`. DeepSpeed's stage 3 shards each parameter by itself, gathers those of a module before it
# runs, and records in an early step which come next.

# %% [markdown]
# ## Recap
#
# New terms: **unit**, **root**, **unshard**, **reshard**, **prefetching**.
#
# Ψ parameters in fp32, AdamW, N ranks, f = (N−1)/N, g micro-batches.
#
# | | memory per rank | sent per rank and step | overlap |
# |---|---|---|---|
# | data parallelism | 4Ψ + 4Ψ + 8Ψ | 2f · 4Ψ | backward |
# | ZeRO-1 | 4Ψ + 4Ψ + 8Ψ/N | 2f · 4Ψ | none in ours |
# | ZeRO-2 | 4Ψ + 12Ψ/N, + buckets | (g+1)f · 4Ψ | backward |
# | ZeRO-3, one unit | 16Ψ/N + 4Ψ¹ | 2gf · 4Ψ | none |
# | ZeRO-3, units | 16Ψ/N + root + a unit¹ | 3gf · 4Ψ² | none here, gradients in lab 10 |
# | … with prefetching | + another unit | 3gf · 4Ψ² | the all-gathers too, in forward and backward |
# | … kept after forward | 16Ψ/N + 4Ψ¹ | 2gf · 4Ψ | forward; gradients in lab 10 |
#
# ¹ Plus the gradients of the units in backward, which are as large again, until they are reduced. ² Less one all-gather
# of the root.

# %% [markdown]
# ## What is still wasted
#
# Apart from the root, no parameter is on two ranks for longer than it is needed. But our model trains only if
# everything is plain:
#
# - **It counts gradients.** A frozen parameter, or one that some samples do not use, and the count never ends.
# - **It knows the order of its units** from a list.
# - **It cannot be saved.** No rank holds the model.
#
# In the lab you build this model from better parts. Chapter 10 makes it usable for any model: that is what FSDP is.

# %%
ranks.stop()
