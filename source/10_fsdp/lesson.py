# ---
# jupyter:
#   course:
#     module: zero3
#     minutes: 20
#     gpu_per_rank: true
# ---

# %% [markdown]
# # 10 · FSDP
#
# The sharded model of chapter 09 trains a plain GPT: every parameter is used once, and nobody saves anything. Real
# training asks for more. It computes in bf16, evaluates between steps, recomputes activations, and writes checkpoints.
# This lesson looks at what each of these costs when the parameters are sharded, with PyTorch's `fully_shard` (FSDP2),
# and you build the same into `ZeRO3` in the lab.
#
# After this lesson, you will be able to:
#
# - predict which bytes are halved when a sharded model computes in bf16,
# - predict how many all-gathers an evaluation, a checkpointed block and a block that is called twice need,
# - save a model as shards on 4 ranks, and resume training on 2,
# - explain why a GPU must hold more than 16Ψ/N bytes.
#
# You need units, unsharding and resharding (chapter 09), and activation checkpointing (chapter 06). As before, Ψ is the
# number of parameters and N is the number of ranks.

# %% tags=["nbval-ignore-output"]
from shared import formulas, ranks, tables

ranks.start(world_size=4, detect_mismatch=False)

# %%
# %%ranks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shared import memory, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT

text = CharTokens()
config = GPTConfig(vocab_size=800, layers=6, width=128)
inputs, targets = (batch.to(device) for batch in text.windows(range(rank, 400, 100), length=32))


def new_model():
    return TinyGPT(config).to(device)


numbers = {name: parameter.numel() for name, parameter in new_model().named_parameters()}

# %%
numbers = ranks.pull("numbers")[0]
psi = sum(numbers.values())
print(f"Ψ = {psi:,}")

# %% [markdown]
# The model is wrapped as in chapter 09: every block is a unit, and the rest is the root.


# %%
# %%ranks
def finished(model, **options):
    for block in dict.fromkeys(model.blocks):  # a block that is called twice is one unit
        fully_shard(block, **options)
    model = fully_shard(model, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step_of(model, optimizer):
    optimizer.zero_grad()
    loss = model(inputs, targets)
    loss.backward()
    optimizer.step()
    return loss.item()


def watched(model, optimizer, step=step_of):
    """Return the most bytes that parameters take in a second step, its ledger, and its loss."""
    step(model, optimizer)
    with memory.peak(model, optimizer) as peak, wire.ledger() as log:
        loss = step(model, optimizer)
    return max(sample.held.parameters_bytes for sample in peak.samples), log, loss


# %% [markdown]
# ## Half the bytes
#
# Chapter 06 kept fp32 master weights beside bf16 parameters. With ZeRO-3 the shards *are* the masters. A gather rounds
# to bf16 before it sends, and what is gathered is bf16:

# %%
# %%ranks
in_bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
seen = {
    "fp32": watched(*finished(new_model())),
    "bf16": watched(*finished(new_model(), mp_policy=in_bf16)),
}

# %%
seen, rows = ranks.pull("seen")[0], []
for name, (peak_bytes, log, loss) in seen.items():
    in_mb = [f"{size / 1e6:.2f}" for size in (log.sent_bytes, psi, peak_bytes - psi)]
    rows.append([name, *in_mb, f"{loss:.1f}"])
assert seen["bf16"][1].sent_bytes == seen["fp32"][1].sent_bytes / 2
assert seen["bf16"][0] - psi == (seen["fp32"][0] - psi) / 2
assert abs(seen["bf16"][2] - seen["fp32"][2]) < 0.05
tables.Table(["", "sent, MB", "shards, MB", "gathered at most, MB", "loss of step 2"], rows)

# %% [markdown]
# (Gradients are summed up in bf16 too, on the way, unless `reduce_dtype=torch.float32` lets them travel in full size.)

# %% [markdown]
# ## What else a model does
#
# Evaluation has no backward that would free anything. A checkpointed block runs forward twice (chapter 06). A block may
# be called twice, with the same parameters. All of them work, and what each costs is told by counting messages.


# %%
# %%ranks
from functools import partial

from torch.utils.checkpoint import checkpoint


def evaluate(model, optimizer):
    with torch.no_grad():
        return model(inputs, targets).item()


def with_checkpoints(model):
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def called_twice(model):
    model.blocks.append(model.blocks[0])
    return model


cases = {
    "a step": watched(*finished(new_model())),
    "evaluation": watched(*finished(new_model()), evaluate),
    "a step, blocks checkpointed": watched(*finished(with_checkpoints(new_model()))),
    "a step, block 0 called twice": watched(*finished(called_twice(new_model()))),
}

# %%
rows = []
for name, (peak_bytes, log, _) in ranks.pull("cases")[0].items():
    counts = [log.ops.get(op, 0) for op in ("all_gather", "reduce_scatter")]
    sent_mb, peak_mb = log.sent_bytes / 1e6, peak_bytes / 1e6
    rows.append([name, *map(str, counts), f"{sent_mb:.2f}", f"{peak_mb:.2f}"])
header = ["", "all-gathers", "reduce-scatters", "sent, MB", "peak, MB"]
tables.Table(header, rows, "peak: of the parameters")

# %% [markdown]
# A step gathers six blocks twice, and the root once. Evaluation gathers each block once (the root was still here, from
# an evaluation before: FSDP2 frees it in backward). A checkpoint costs no gather: a block is computed again when
# backward has gathered it anyway. Checkpoints and sharding belong together, one for the activations, one for the state.
# The block that is called twice is gathered for each call, in forward and in backward, and reduced once: autograd adds
# up the gradients of both calls first.

# %% [markdown]
# ## A checkpoint, in parts
#
# No rank has the model. Somebody may put it together (the lab's `full_state_dict()`), where there must be room for all
# of it. Or each rank writes what it has. The parts carry, as `DTensor`s, where they belong, so that
# `torch.distributed.checkpoint` can hand them to any other number of ranks. Train 3 steps on 4 ranks, save, train 3
# more; and from the file, the same 3 on 2.

# %%
# %%ranks
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def train(model, optimizer, numbers):
    """→ losses of the steps of these numbers; a batch has 8 samples, on any number of ranks"""
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
    model, optimizer = finished(new_model())
    train(model, optimizer, range(3))
    dcp.save(states_of(model, optimizer), checkpoint_id=folder)
    return train(model, optimizer, range(3, 6))


def resumed(folder):
    model, optimizer = finished(new_model())
    states = states_of(model, optimizer)  # something to load into
    dcp.load(states, checkpoint_id=folder)
    loaded = {"model_state_dict": states["model"], "optim_state_dict": states["optimizer"]}
    set_state_dict(model, optimizer, **loaded)
    return train(model, optimizer, range(3, 6))


# %% tags=["nbval-ignore-output"]
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    on_4 = ranks.run(lambda folder: saved_at_4(folder), folder)[0]
    written = {file.name: file.stat().st_size for file in sorted(Path(folder).glob("*.distcp"))}
    with ranks.world(2):
        on_2 = ranks.run(lambda folder: resumed(folder), folder)[0]
rows = [[f"rank {rank}", f"{size / 1e6:.2f}"] for rank, size in enumerate(written.values())]
rows.append(["for comparison: all of it, 12Ψ", f"{12 * psi / 1e6:.2f}"])
print("on 4:", [f"{loss:.4f}" for loss in on_4], " resumed on 2:", [f"{loss:.4f}" for loss in on_2])
assert all(abs(one - other) < 1e-4 for one, other in zip(on_4, on_2, strict=True))
quarter = 12 * (psi + numbers["token_embedding.weight"]) / 4  # saved under both its names
assert all(quarter < size < 1.05 * quarter for size in written.values())
tables.Table(["written by", "MB"], rows)

# %% [markdown]
# Each wrote a fourth of 12Ψ, parameters and AdamW's two states, all at the same time, and nobody ever held more. (The
# tied embedding is written twice, under each of its names.) What fills up flat tensors at the end must not be saved:
# it depends on N.

# %% [markdown]
# ## 16Ψ/N is not the peak
#
# "With ZeRO-3 a rank needs 16Ψ/N bytes, so any model fits on enough ranks." Ask for Llama-2 70B in mixed precision,
# one sequence of 2,048 tokens per rank, all layers checkpointed. It takes no cluster: with tensors on `meta`, which
# have shapes and no memory, and a process group that only pretends, rank 0 of N runs a finished `ZeRO3` through a
# step, and its bytes are counted.

# %% tags=["needs-solution"]
from shared import dryrun

shape = dryrun.MODELS["llama-70b"]


def of_rank_0(n):
    """→ what rank 0 of n holds at its peak, in GB"""
    run = dryrun.dry_run(shape, "zero3", n)
    assert run.gathered_bytes == dryrun.expected_gathered_bytes(shape)
    peak, state_bytes = run.at_peak, formulas.model_state_bytes(shape.parameters, n, stage=3)
    other_bytes = peak.activations_bytes + peak.other_bytes
    sizes = state_bytes, run.gathered_bytes, peak.buckets_bytes, other_bytes, peak.total_bytes
    return [f"{n:,}", *(f"{size / 1e9:.2f}" for size in sizes)]


header = ["N", "16Ψ/N", "gathered", "gradients on the way", "activations etc.", "peak"]
rows = [of_rank_0(8), of_rank_0(64)]
tables.Table(header, rows, "GB")

# %% [markdown]
# On 8 GPUs the state is nearly all of the peak, and it does not fit into 80 GB. On 64 GPUs there is room.
#
# **Predict** the peak on 1,024, where 16Ψ/N is 1.1 GB.

# %%
my_prediction_gb = 0.0

# %% tags=["needs-solution"]
rows.append(of_rank_0(1024))
print(f"predicted {my_prediction_gb:g} GB, counted {rows[-1][-1]} GB")
assert float(rows[-1][-1]) > 10 * float(rows[-1][1])
tables.Table(header, rows, "GB")

# %% [markdown]
# The state is now next to nothing. The peak is what does *not* shrink with N: two layers and the root in bf16, as much
# of gradients, and the activations of one sequence. (Where the state is large, the peak comes when backward ends and
# nearly all gradients are there. Here it comes when backward begins, and all that the checkpoints keep is still there.)

# %% [markdown]
# ## Recap
#
# Ψ parameters, AdamW, N ranks.
#
# | | what it costs when parameters are sharded |
# |---|---|
# | computing in bf16 | nothing: the fp32 shards are the master weights, and half the bytes are sent and unsharded |
# | evaluation | one all-gather per block |
# | activation checkpointing | no extra all-gather, because backward has unsharded the block anyway |
# | a block that is called twice | an all-gather for each call, and one reduce-scatter |
# | a sharded checkpoint | each rank writes 12Ψ/N bytes, and any number of ranks can read it |
# | the peak | 16Ψ/N, the root, two units, their gradients, and the activations of one sequence |
#
# ## What is still wasted
#
# Every rank still computes whole layers. For the largest models, two unsharded layers and the activations of one
# sequence are most of the peak, and more ranks do not make them smaller. Splitting the layers themselves is tensor
# parallelism, chapter 13. Before that, chapter 11 puts these classes beside the production wrappers.
#
# In the lab, you build `ZeRO3` for models like these, and for parameters that are tied, frozen, or unused on some
# ranks.

# %%
ranks.stop()
