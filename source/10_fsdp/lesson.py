# ---
# jupyter:
#   course:
#     module: zero3
#     minutes: 30
# ---

# %% [markdown]
# # 10 · FSDP
#
# **30 minutes.** After this lesson you can
#
# - explain how FSDP knows that backward is done with a unit,
# - shard models with frozen, tied and unused parameters and with activation checkpointing, and say what each costs,
# - halve the bytes on the wire with bf16, and keep fp32 shards,
# - save a model on 4 ranks and train on with 2,
# - explain why 16Ψ/N bytes are not what a GPU must have room for.
#
# You need chapter 09: units, unshard and reshard.

# %% [markdown]
# ## What is wasted
#
# The model of chapter 09 counts: when as many gradients have come as a unit has parameters, backward is done there. So
# how many gradients do come? We count them for block 1 of a GPT, in three versions of it. In the last one, each rank
# uses one of two feed-forward layers, as in a mixture of experts.

# %% tags=["nbval-ignore-output"]
from shared import formulas, ranks, tables

ranks.start(world_size=4, detect_mismatch=False)

# %%
# %%ranks
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from shared import memory, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT

text = CharTokens()
config = GPTConfig(vocab_size=800, layers=6, width=128)


class Experts(nn.Module):
    """Two feed-forward layers, of which ranks take turns to use one."""

    def __init__(self, first, second, index=rank):
        super().__init__()
        self.layers, self.index = nn.ModuleList([first, second]), index

    def forward(self, x):
        return self.layers[self.index % 2](x)


# %%
# %%ranks
def new_model():
    return TinyGPT(config).to(device)


def frozen(model):
    for block in model.blocks:
        block.norm_1.requires_grad_(False)
    return model


def unused(model):
    others = TinyGPT(model.config, seed=1).to(device, model.norm.weight.dtype).blocks
    for block, other in zip(model.blocks, others, strict=True):
        block.up = Experts(block.up, other.up)
    return model


def own_batch(of_rank=rank):
    windows = text.windows(range(of_rank, 400, 100), length=32)
    return [tokens.to(device) for tokens in windows]


def count(model):
    """Count the parameters of block 1, and the gradients that come for them."""
    model(*own_batch()).backward()
    parameters = list(model.blocks[1].parameters())
    return len(parameters), sum(p.grad is not None for p in parameters)


counts = {
    "plain": count(new_model()),
    "frozen norms": count(frozen(new_model())),
    "two experts": count(unused(new_model())),
}

# %%
counts = ranks.pull("counts")[0]
assert (
    counts["plain"][0] == counts["plain"][1] and counts["two experts"][0] > counts["two experts"][1]
)
rows = [[name, *map(str, numbers)] for name, numbers in counts.items()]
tables.Table(["", "parameters", "gradients"], rows, "block 1, rank 0")

# %% [markdown]
# In the second and third version the count never ends. The gradients of those blocks would never be reduced, and their
# parameters would stay unsharded. Counting only the trained parameters helps with frozen ones. But with two experts,
# the ranks miss *different* gradients, and no rank knows which ones will come.

# %% [markdown]
# ## When is backward done with a unit?
#
# Autograd computes the gradients of a unit's *inputs* last, when everything inside the unit is done. So we pass the
# inputs through a function that changes nothing, and whose backward tells us. FSDP2 does the same.


# %%
# %%ranks
class AfterBackward(torch.autograd.Function):
    """The identity on a unit's inputs. Its backward runs when backward is done with the unit."""

    @staticmethod
    def forward(ctx, post_backward, *inputs):
        ctx.post_backward = post_backward
        return inputs

    @staticmethod
    def backward(ctx, *gradients):
        ctx.post_backward()
        return None, *gradients


# %% [markdown]
# **Predict.** A unit computes `output = x * weight`, and its input `x` comes through `AfterBackward`. In which order
# are the three lines below printed?

# %%
my_prediction = ""  # <- the letters in order, "abc" for one

# %%
# %%ranks 0
x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
(inside,) = AfterBackward.apply(lambda: print("a: backward is done with the unit"), x)
weight.register_hook(lambda _: print("b: the gradient of the weight is complete"))
output = inside * weight
output.register_hook(lambda _: print("c: the gradient of the output is complete"))
output.sum().backward()

# %% [markdown]
# First comes the gradient of the output, then that of the weight, and then autograd leaves the unit. The first event
# tells us to unshard, the last one to reduce and reshard. Neither depends on which gradients come in between.

# %% [markdown]
# ## The short version
#
# With the `Unit` of lab 09 and the `ShardedBucket` of lab 08, four hooks are enough for any model. They have the names
# that they have in FSDP2. A gradient that is missing counts as zeros.


# %%
# %%ranks
from solutions.units import UnitState, shard_into_units
from solutions.zero2 import ShardedBucket


def pre_forward(unit, _submodule, inputs):
    if unit.state is not UnitState.BACKWARD:  # otherwise checkpointing runs this forward again
        unit.wait_for_unshard()
        if torch.is_grad_enabled() and inputs[0].requires_grad:
            return AfterBackward.apply(partial(post_backward, unit), *inputs)


def post_forward(unit, _submodule, _inputs, output):
    if unit.state is not UnitState.BACKWARD:
        if output.requires_grad:
            output.register_hook(lambda _gradient: pre_backward(unit))
        if unit.reshard_after_forward:  # false for the root
            unit.reshard()


def pre_backward(unit):
    unit.wait_for_unshard()
    unit.state = UnitState.BACKWARD


def post_backward(unit):
    for flat_parameter in unit.flat_parameters:
        if flat_parameter.shard.requires_grad:
            bucket = ShardedBucket(flat_parameter)
            for index in range(len(bucket.parameters)):
                bucket.pack(index)
            bucket.launch()
            bucket.wait()
    unit.reshard()


# %% [markdown]
# A unit whose inputs need no gradient has no `AfterBackward`: the root, for example, whose inputs are tokens. Its
# `post_backward` runs at the end.


# %%
# %%ranks
class ShortFSDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.units = module, shard_into_units(module)
        for submodule, unit in self.units.items():
            submodule.register_forward_pre_hook(partial(pre_forward, unit))
            submodule.register_forward_hook(partial(post_forward, unit))

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_sync(self):
        for unit in self.units.values():
            if unit.state is UnitState.BACKWARD:
                post_backward(unit)
            unit.reshard()

    def parameters(self, recurse=True):
        flat_parameters = (flat for unit in self.units.values() for flat in unit.flat_parameters)
        return (flat_parameter.shard for flat_parameter in flat_parameters)


# %% [markdown]
# Does it train what chapter 09 could not? Three steps of AdamW in float64 on a small GPT, compared with one process
# that computes the loss of all four ranks' batches. Beside it runs torch's `fully_shard`.


# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

AdamW, settings = torch.optim.AdamW, {"lr": 1e-3}


def in_fsdp2(model, **options):
    mesh = init_device_mesh(device.type, (world_size,))
    for block in dict.fromkeys(model.blocks):  # each once, also one that is called twice
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def checkpointed(model):
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def called_twice(model):
    model.blocks.append(model.blocks[0])
    return model


# %%
# %%ranks
def new_small_model():
    small = GPTConfig(vocab_size=text.vocab_size, layers=3, width=32)
    return TinyGPT(small).to(device, torch.float64)


def train(model, of_ranks):
    """Return the losses of three steps on the batches of some ranks."""
    optimizer, losses = AdamW(model.parameters(), **settings), []
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    for _ in range(3):
        optimizer.zero_grad()
        loss = 0.0
        for of_rank in of_ranks:
            for each in experts:
                each.index = of_rank
            loss += model(*own_batch(of_rank)) / len(of_ranks)
        loss.backward()
        if hasattr(model, "finish_gradient_sync"):
            model.finish_gradient_sync()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


# %%
# %%ranks
def difference(change, wrap):
    """Return by how much the losses differ from one process's."""
    alone = train(change(new_small_model()), range(world_size))
    losses = train(wrap(change(new_small_model())), [rank])
    dist.all_reduce(losses)
    return (losses / world_size - alone).abs().max().item()


changes = {
    "frozen norms": frozen,
    "blocks checkpointed": checkpointed,
    "block 0 called twice": called_twice,
    "two experts, one per rank": unused,
}
differ = {name: [difference(change, ShortFSDP)] for name, change in changes.items()}
for name, change in list(changes.items())[:3]:
    differ[name].append(difference(change, in_fsdp2))

# %% tags=["nbval-ignore-output"]
differ = ranks.pull("differ")[0]
assert all(each < 1e-10 for found in differ.values() for each in found)
rows = [[name, *(f"{each:.0e}" for each in found)] for name, found in differ.items()]
tables.Table(
    ["", "ours", "FSDP2"],
    [row + ["not tried"] * (3 - len(row)) for row in rows],
    "difference of the losses",
)

# %% [markdown]
# All of them train as one process does. The embedding of this GPT is tied to its output layer, and that works because
# both belong to the root. The last row was not tried with FSDP2: it reduces only the gradients that a rank has, so all
# ranks must use the same parameters.
#
# ## What it costs
#
# What does each case cost with FSDP2? We count the collectives of one step, and measure the most bytes that parameters
# take. Evaluation is in the table as well.


# %%
# %%ranks
def with_adamw(model):
    return model, AdamW(model.parameters(), **settings)


def step_of(model, optimizer):
    optimizer.zero_grad()
    loss = model(*own_batch())
    loss.backward()
    optimizer.step()
    return loss.item()


def evaluate(model, optimizer):
    with torch.no_grad():
        return model(*own_batch()).item()


def watched(model, optimizer, step=step_of):
    """Return, for a second step, the most bytes that parameters have, the ledger, and the loss."""
    step(model, optimizer)
    with memory.peak(model, optimizer) as peak, wire.ledger() as log:
        loss = step(model, optimizer)
    return max(sample.held.parameters_bytes for sample in peak.samples), log, loss


cases = {
    "a step": watched(*with_adamw(in_fsdp2(new_model()))),
    "evaluation": watched(*with_adamw(in_fsdp2(new_model())), evaluate),
    "a step, blocks checkpointed": watched(*with_adamw(in_fsdp2(checkpointed(new_model())))),
    "a step, block 0 called twice": watched(*with_adamw(in_fsdp2(called_twice(new_model())))),
}
psi = sum(p.numel() for p in new_model().parameters())

# %%
rows, psi = [], ranks.pull("psi")[0]
for name, (peak_bytes, log, _) in ranks.pull("cases")[0].items():
    counts = [log.ops.get(op, 0) for op in ("all_gather", "reduce_scatter")]
    sent_mb, peak_mb = log.sent_bytes / 1e6, peak_bytes / 1e6
    rows.append([name, *map(str, counts), f"{sent_mb:.2f}", f"{peak_mb:.2f}"])
header = ["", "all-gathers", "reduce-scatters", "sent, MB", "peak, MB"]
tables.Table(header, rows, "peak: of the parameters")

# %% [markdown]
# - A step gathers six blocks twice, and the root once.
# - Evaluation gathers each block once. (The root was still here from an evaluation before: FSDP2 reshards it in
#   backward.)
# - Activation checkpointing costs no all-gather, because a block is computed again when backward has unsharded it
#   anyway. The two belong together: one makes activations smaller, the other the model's state.
# - A block that is called twice is gathered for each call, in forward and in backward. It is reduced once, because
#   autograd adds up the gradients of both calls first.
#
# ## Half the bytes
#
# Chapter 06 kept fp32 master weights beside bf16 parameters. With ZeRO-3 the shards *are* the master weights. An
# all-gather rounds to bf16 before it sends, and the unsharded parameters are bf16:

# %%
# %%ranks
in_bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
seen = {
    "fp32": watched(*with_adamw(in_fsdp2(new_model()))),
    "bf16": watched(*with_adamw(in_fsdp2(new_model(), mp_policy=in_bf16))),
}

# %%
seen, rows = ranks.pull("seen")[0], []
for name, (peak_bytes, log, loss) in seen.items():
    in_mb = [f"{size / 1e6:.2f}" for size in (log.sent_bytes, psi, peak_bytes - psi)]
    rows.append([name, *in_mb, f"{loss:.1f}"])
assert seen["bf16"][1].sent_bytes == seen["fp32"][1].sent_bytes / 2
assert seen["bf16"][0] - psi == (seen["fp32"][0] - psi) / 2
assert abs(seen["bf16"][2] - seen["fp32"][2]) < 0.05
tables.Table(["", "sent, MB", "shards, MB", "unsharded at most, MB", "loss of step 2"], rows)

# %% [markdown]
# (Gradients are added up in bf16 as well, unless `reduce_dtype=torch.float32` lets them travel in full size.)

# %% [markdown]
# ## Saving shards
#
# No rank holds the model. One rank may put it together, as lab 10's `full_state_dict()` does, but then it must have
# room for all of it. The other way is that each rank writes what it has. The shards are `DTensor`s, which say where
# they belong in the whole. So `torch.distributed.checkpoint` can hand them to any other number of ranks.
#
# We train 3 steps on 4 ranks, save, and train 3 more. From the file, we then train the same 3 steps on 2 ranks.

# %%
# %%ranks
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def train_on(model, optimizer, numbers):
    """Return the losses of the steps with these numbers. A batch has 8 samples on any number of ranks."""
    losses = []
    for number in numbers:
        batch = text.windows(range(1000 * number, 1000 * number + 800, 100), length=32)
        x, y = (tensor[rank::world_size].to(device) for tensor in batch)
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() / world_size)
    return losses


# %%
# %%ranks
def states_of(model, optimizer):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def saved_at_4(folder):
    model, optimizer = with_adamw(in_fsdp2(new_model()))
    train_on(model, optimizer, range(3))
    dcp.save(states_of(model, optimizer), checkpoint_id=folder)
    return train_on(model, optimizer, range(3, 6))


def resumed(folder):
    model, optimizer = with_adamw(in_fsdp2(new_model()))
    states = states_of(model, optimizer)  # something to load into
    dcp.load(states, checkpoint_id=folder)
    loaded = {"model_state_dict": states["model"], "optim_state_dict": states["optimizer"]}
    set_state_dict(model, optimizer, **loaded)
    return train_on(model, optimizer, range(3, 6))


numels = {name: p.numel() for name, p in new_model().named_parameters()}

# %% tags=["nbval-ignore-output"]
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    on_4 = ranks.run(lambda folder: saved_at_4(folder), folder)[0]
    written = {file.name: file.stat().st_size for file in sorted(Path(folder).glob("*.distcp"))}
    with ranks.world(2):
        on_2 = ranks.run(lambda folder: resumed(folder), folder)[0]
numels = ranks.pull("numels")[0]
rows = [[f"rank {rank}", f"{size / 1e6:.2f}"] for rank, size in enumerate(written.values())]
rows.append(["for comparison: all of it, 12Ψ", f"{12 * psi / 1e6:.2f}"])
print("on 4:", [f"{loss:.4f}" for loss in on_4], " resumed on 2:", [f"{loss:.4f}" for loss in on_2])
assert all(abs(one - other) < 1e-4 for one, other in zip(on_4, on_2, strict=True))
quarter = 12 * (psi + numels["token_embedding.weight"]) / 4  # saved under both its names
assert all(quarter < size < 1.05 * quarter for size in written.values())
tables.Table(["written by", "MB"], rows)

# %% [markdown]
# Each rank wrote a quarter of 12Ψ bytes, the parameters and AdamW's two states, at the same time as the others. No rank
# ever held more. (The tied embedding is written twice, under each of its names.) The padding of flat tensors must not
# be saved, because it depends on N.

# %% [markdown]
# ## 16Ψ/N is not the peak
#
# It is commonly claimed that with ZeRO-3 a rank needs 16Ψ/N bytes, so that any model fits on enough ranks. We ask for
# Llama-2 70B in mixed precision, one sequence of 2,048 tokens per rank, all layers checkpointed. No cluster is needed:
# tensors on the `meta` device have shapes but no memory, and a fake process group sends nothing. So rank 0 of N runs a
# finished `ZeRO3` through a step, and its bytes are counted.

# %% tags=["needs-solution"]
from shared import dryrun

shape = dryrun.MODELS["llama-70b"]


def of_rank_0(n):
    """Return what rank 0 of n holds at its peak, in GB."""
    run = dryrun.dry_run(shape, "zero3", n)
    assert run.gathered_bytes == dryrun.expected_gathered_bytes(shape)
    peak, state_bytes = run.at_peak, formulas.model_state_bytes(shape.parameters, n, stage=3)
    other_bytes = peak.activations_bytes + peak.other_bytes
    sizes = state_bytes, run.gathered_bytes, peak.buckets_bytes, other_bytes, peak.total_bytes
    return [f"{n:,}", *(f"{size / 1e9:.2f}" for size in sizes)]


header = ["N", "16Ψ/N", "unsharded", "gradients in flight", "activations etc.", "peak"]
rows = [of_rank_0(8), of_rank_0(64)]
tables.Table(header, rows, "GB")

# %% [markdown]
# On 8 GPUs the state is nearly all of the peak, and it does not fit into 80 GB. On 64 there is room.
#
# **Predict** the peak on 1,024 GPUs, where 16Ψ/N is 1.1 GB.

# %%
my_prediction_gb = 0.0

# %% tags=["needs-solution"]
rows.append(of_rank_0(1024))
print(f"predicted {my_prediction_gb:g} GB, counted {rows[-1][-1]} GB")
assert float(rows[-1][-1]) > 10 * float(rows[-1][1])
tables.Table(header, rows, "GB")

# %% [markdown]
# The state is now next to nothing. The peak is what does *not* shrink with N: two layers and the root in bf16, as many
# bytes of gradients, and the activations of one sequence. (Where the state is large, the peak comes when backward ends
# and nearly all gradients are there. Here it comes when backward begins, and all that the checkpoints keep is still
# there.)
#
# ## What torch calls it
#
# | here and in lab 10 | FSDP2 | how it differs |
# |---|---|---|
# | `ZeRO3(model, units)` | `fully_shard(unit)` for each unit, then for the model | FSDP2 changes the modules in place |
# | `Unit` | `FSDPParamGroup` | |
# | `ShardedFlatParameter` | `FSDPParam` | each parameter is a `DTensor`, sharded by rows |
# | `compute_dtype` | `MixedPrecisionPolicy(param_dtype=…)` | gradients may have a `reduce_dtype` |
# | `prefetch` | `set_modules_to_forward_prefetch` | in backward always one unit ahead |
# | `finish_gradient_sync()` | a callback at the end of backward | |
#
# FSDP1, torch's older wrapper, keeps one flat parameter per unit, as lab 10 does. With the `DTensor`s of FSDP2, names,
# frozen parameters and state dicts need no special care.

# %% [markdown]
# ## Recap
#
# New terms: `AfterBackward`, `pre_backward` and `post_backward` as the ends of a unit's backward; a *full* and a
# *sharded* state dict.
#
# | | memory | wire | overlap |
# |---|---|---|---|
# | frozen parameters | no gradient, no optimizer state | gathered, not reduced | as before |
# | unused parameters | as others | reduced as zeros | as before |
# | checkpointed units | activations of one unit | no more | as before |
# | `compute_dtype=torch.bfloat16` | unsharded units halved | halved | as before |
# | evaluation | no unit stays | one all-gather per unit | prefetching |

# %% [markdown]
# ## What is still wasted
#
# Apart from the root, no parameter is on two ranks for longer than it is needed. Here is what data parallelism cannot
# do, even when it is sharded:
#
# - **Make one layer smaller.** A rank that computes holds a whole unit, and the activations of at least one sequence.
#   On 1,024 ranks of the dry run, these two are nearly all of the peak. Splitting the layer itself is tensor
#   parallelism, chapter 13.
# - **Keep the batch small.** Each rank needs a sequence of its own. With 2,048 tokens each, 1,024 ranks process 2.1
#   million tokens per step, whether the training wants so many or not.
# - **Send less per step than the model's size**, g times over. Chapter 11 compares the production wrappers, and shows
#   how to choose between stages by such numbers.
#
# But first build `ZeRO3` in the lab, with nested units, prefetching, and checkpoints for any number of ranks.

# %%
ranks.stop()
