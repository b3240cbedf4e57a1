# ---
# jupyter:
#   course:
#     module: checkpoints
#     minutes: 15
# ---

# %% [markdown]
# # 12 · Checkpoints
#
# **15 minutes.** You will be able to
#
# - save a sharded model without putting it together on any rank,
# - tell a complete checkpoint from what a killed run leaves behind,
# - resume a run on another number of ranks.
#
# You need `ZeRO3` (chapters 09 and 10) and `fully_shard` (chapter 11).

# %% [markdown]
# ## What is wasted
#
# In chapter 11 you trained one model in twelve ways, and chose the fastest that fits. A real run takes days or weeks,
# and something will kill it: a GPU that fails, the end of its time in the cluster's queue, somebody's Ctrl-C. So a run
# saves a **checkpoint** every hour or so: the parameters, the optimizer state and the number of the step. After a kill,
# somebody starts the script again, and it resumes from there.
#
# Your `ZeRO3` can save already: its `full_state_dict()` puts the whole model together, on every rank. How much memory
# does a rank need for that?

# %% tags=["nbval-ignore-output"]
from shared import ranks, tables

ranks.start(world_size=4, detect_mismatch=False)

# %%
# %%ranks
from shared import memory
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from solutions.zero3 import ZeRO3

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=4, width=256)


def new_model():
    return TinyGPT(config).to(device)


model = ZeRO3(new_model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
samples = text.windows(range(1000 * rank, 1000 * rank + 200, 100), length=32)
model(*(tensor.to(device) for tensor in samples)).backward()
model.finish_gradient_sync()
optimizer.step()
optimizer.zero_grad()
with memory.peak(model, optimizer) as peak:
    whole = model.full_state_dict()
at_rest_bytes, peak_bytes = peak.samples[0].held.total_bytes, peak.peak_bytes
psi = sum(parameter.numel() for parameter in new_model().parameters())
model = optimizer = whole = peak = None

# %%
psi = ranks.pull("psi")[0]
at_rest_bytes, peak_bytes = ranks.pull("at_rest_bytes")[0], ranks.pull("peak_bytes")[0]
rows = [
    ["a rank holds between steps", f"{at_rest_bytes / (4 * psi):.2f}"],
    ["… while full_state_dict() puts the model together", f"{peak_bytes / (4 * psi):.2f}"],
]
assert peak_bytes > at_rest_bytes + 4 * psi
note = f"""Ψ = {psi:,} parameters in fp32.
Between steps: a quarter of the parameters and moments, and no gradients."""
tables.Table(["", "× 4Ψ bytes"], rows, note)

# %% [markdown]
# You sharded the model because a rank cannot hold all of it. While `full_state_dict()` runs, every rank holds all of it
# twice, and the moments are not even saved yet. It is better if each rank writes its own shard: a **sharded
# checkpoint**. We also need to know what is left of it when a run is killed *while it saves*.
#
# ## A job that saves shards
#
# The job of this lesson is a file that every rank runs. It trains with `fully_shard`, and it saves and loads with
# `torch.distributed.checkpoint`, in which each rank writes and reads only its own shards.

# %%
import os
import tempfile
from pathlib import Path

place = tempfile.TemporaryDirectory()
os.chdir(place.name)
folder = Path(place.name)

# %%
# %%writefile job.py
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT

text = CharTokens()


def new_job():
    """Build a model and its optimizer. On one rank nothing is sharded."""
    model = TinyGPT(GPTConfig(vocab_size=text.vocab_size, layers=4, width=256)).to(device)
    if world_size > 1:
        mesh = init_device_mesh(device.type, (world_size,))
        for unit in (*model.blocks, model):
            fully_shard(unit, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model, optimizer, numbers):
    """Take the steps of these numbers. Returns their losses, the mean over the ranks."""
    losses = []
    for number in numbers:
        batch = text.windows(range(1000 * number, 1000 * number + 800, 100), length=32)
        optimizer.zero_grad()
        loss = model(*(tensor[rank::world_size].to(device) for tensor in batch))
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() / world_size)
    return losses


# %%
# %%writefile -a job.py
def states_of(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def load(model, optimizer, path):
    states = states_of(model, optimizer)  # something to load into
    dcp.load(states, checkpoint_id=path)
    loaded = {"model_state_dict": states["model"], "optim_state_dict": states["optimizer"]}
    set_state_dict(model, optimizer, **loaded)


# %%
def start_job():
    ranks.run(lambda script: exec(script, globals()), Path("job.py").read_text())


start_job()

# %% [markdown]
# We also need a writer with which something goes wrong in the middle of a save:


# %%
# %%ranks
class Interrupted(dcp.FileSystemWriter):
    """Writes a rank's shard. On rank 3, something happens instead, when the others have written theirs."""

    def __init__(self, path, happens):
        super().__init__(path)
        self.happens = happens

    def write_data(self, plan, planner):
        written = super().write_data(plan, planner) if dist.get_rank() != 3 else None
        dist.barrier()
        return self.happens() if written is None else written


# %% [markdown]
# ## Saving over the last checkpoint
#
# The job takes two steps and saves into the folder `latest`. It takes two more steps and saves into the same folder,
# but now the disk of rank 3 is full. (torch warns that it overwrites files. We hide the warning.)


# %%
# %%ranks
import warnings


def is_full():
    raise OSError("No space left on device")


def first_column(model):
    """Return the first column of the token embedding. Rank 0 has its first rows, and so on."""
    return model.token_embedding.weight.full_tensor()[:, 0].tolist()


def saved_with_peak(states, folder, around):
    """Save. Returns the bytes that this takes beyond what is held anyway."""
    with memory.peak(*around) as peak:
        dcp.save(states, checkpoint_id=folder)
    return peak.peak_bytes - peak.samples[0].held.total_bytes


# %%
# %%ranks
def over_the_last_one(folder):
    """Return the bytes that a save takes; the column at step 2, at step 4 and as loaded; the error."""
    model, optimizer = new_job()
    train(model, optimizer, range(2))
    at_2 = first_column(model)
    optimizer.zero_grad()
    save_bytes = saved_with_peak(states_of(model, optimizer), folder, (model, optimizer))
    train(model, optimizer, range(2, 4))
    at_4 = first_column(model)
    try:
        with warnings.catch_warnings(action="ignore"):
            dcp.save(states_of(model, optimizer), storage_writer=Interrupted(folder, is_full))
    except dcp.CheckpointException as caught:
        error = str(caught.failures[3][0])
    load(model, optimizer, folder)
    return save_bytes, at_2, at_4, first_column(model), error


# %% [markdown]
# **Predict.** Rank 3 could not write its shard of step 4. What do you get when you load `latest`: an error, step 2,
# step 4 or something else?

# %%
my_prediction = ""

# %%
latest = str(folder / "latest")
save_bytes, at_2, at_4, loaded, error = ranks.run(lambda path: over_the_last_one(path), latest)[0]
print(f"to save takes {save_bytes / (4 * psi):.1f} × 4Ψ bytes more than is held anyway")
print("rank 3:", error)
rows = -(-len(loaded) // 4)  # a rank's; the last has fewer
for number in range(4):
    shard = slice(number * rows, (number + 1) * rows)
    of_step = 4 if loaded[shard] == at_4[shard] else 2
    assert loaded[shard] == (at_4 if number < 3 else at_2)[shard]
    print(f"rank {number}'s rows of the embedding, loaded: of step {of_step}")
print("your prediction:", my_prediction or "none")

# %% [markdown]
# The first line answers the question from the beginning: each rank writes its own shard, and no rank puts the model
# together.
#
# But what is in `latest` now loads without an error, and it is a model that never existed: three quarters of it are
# from step 4, and one quarter is from step 2. The good checkpoint of step 2 is gone. So never write over the last
# complete checkpoint.
#
# ## A folder for each step
#
# Now each step gets a folder of its own, and rank 3 is killed in the middle of saving step 4.

# %%
# %%ranks
import os
import signal


def uninterrupted():
    return train(*new_job(), range(6))


def killed_at_4(folder):
    model, optimizer = new_job()
    train(model, optimizer, range(2))
    dcp.save(states_of(model, optimizer), checkpoint_id=f"{folder}/step_2")
    train(model, optimizer, range(2, 4))
    kill = Interrupted(f"{folder}/step_4", lambda: os.kill(os.getpid(), signal.SIGKILL))
    dcp.save(states_of(model, optimizer), storage_writer=kill)


# %% tags=["nbval-ignore-output"]
expected = ranks.run(lambda: uninterrupted())[0]
try:
    ranks.run(lambda folder: killed_at_4(folder), str(folder))
except ranks.CellFailed as failed:
    print(failed)

# %% [markdown]
# One process is gone, and with it the process group. There are four new ranks, which know nothing. What is in the
# folder?

# %%
rows = []
for path in sorted(folder.glob("step_*")):
    shards = [file.name for file in path.glob("*.distcp")]
    rows.append([path.name, str(len(shards)), "yes" if (path / ".metadata").exists() else "no"])
assert [row[2] for row in rows] == ["yes", "no"]
tables.Table(["", "shards", ".metadata"], rows)

# %% [markdown]
# The file `.metadata` lists which shard contains which slice of which tensor. torch writes it last, when all ranks have
# said that their shard is written. So a folder without `.metadata` is no checkpoint, and the newest complete one is
# step
# 2. (`latest` still had the `.metadata` of step 2. This is why it loaded.)
#
# In the lab you build a way that needs to know nothing about torch's files: a complete checkpoint has a name that an
# incomplete one can never have.
#
# ## Resuming on fewer ranks
#
# Start the job again, first on 2 ranks and then on one rank, where nothing is sharded. The shards on disk are from 4
# ranks. `.metadata` tells each rank which slices it must read.

# %%
start_job()


# %%
# %%ranks
def resumed(path):
    model, optimizer = new_job()
    load(model, optimizer, path)
    return train(model, optimizer, range(2, 6))


# %%
whole = [path.parent for path in folder.glob("step_*/.metadata")]
print("complete:", *(path.name for path in whole))
print(f"never interrupted, 4 ranks: {[f'{loss:.4f}' for loss in expected[2:]]}")
for count in (2, 1):
    with ranks.world(count):
        losses = ranks.run(lambda path: resumed(path), str(whole[0]))[0]
    print(f"resumed on {count}:               {[f'{loss:.4f}' for loss in losses]}")
    assert all(abs(one - other) < 1e-4 for one, other in zip(losses, expected[2:], strict=True))

# %% [markdown]
# The losses are those of the run that was never interrupted. Only the steps since the last checkpoint had to be
# repeated.

# %% [markdown]
# ## Recap
#
# Ψ parameters in fp32 with AdamW, N ranks.
#
# | | memory per rank, beside what it holds | left after a kill while saving | loads on |
# |---|---|---|---|
# | `full_state_dict()` | 8Ψ, on every rank | depends on who writes, and where | any number of ranks |
# | sharded, over the last checkpoint | none | a mixture of two steps, which loads | any number of ranks |
# | sharded, a folder per step | none | the last complete checkpoint | any number of ranks |
#
# The terms of this chapter: a **checkpoint** is all that a run needs to resume, and in a **sharded checkpoint** each
# rank has written its own shard.

# %% [markdown]
# ## What is still wasted
#
# While a checkpoint is written, training stands still. torch's `async_save` copies the shards first, and writes the
# copy while training goes on. What counts as complete is the same.
#
# And whatever you save: each rank still computes *whole layers*. Chapter 13 splits a layer itself.
#
# In the lab you write checkpoints that no crash can spoil.

# %%
ranks.stop()
