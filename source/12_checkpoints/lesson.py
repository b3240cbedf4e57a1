# ---
# jupyter:
#   course:
#     module: checkpoints
#     minutes: [35, 50]
# ---

# %% [markdown]
# # 12 · Checkpoints
#
# **35–50 minutes.** After this lesson, you will be able to:
#
# - save a model that no rank can hold as a whole, and resume on another number of ranks,
# - say what a kill leaves behind at each moment of a save, and make sure that it is never loaded,
# - save in the background with `async_save`, and say what that costs and what you have to wait for,
# - compute how often a run should save.
#
# You need `ZeRO3` (chapters 09 and 10) and `fully_shard` (chapters 10 and 11).

# %% [markdown]
# ## Where we are
#
# In chapter 11, you chose the fastest strategy that fits. But a large run takes weeks, and it needs all its GPUs: when
# one of them fails, the whole job stops. While Meta trained Llama 3 405B on 16,384 GPUs, 419 unexpected interruptions
# happened in 54 days (The Llama 3 Herd of Models, §3.3.4). How far apart were they, on average?

# %% tags=["nbval-ignore-output"]
from shared import ranks, tables
from shared.plots import costs, diagrams
from shared.predictions import predicted

ranks.start(world_size=4, detect_mismatch=False)

# %%
hours_between_failures = 54 * 24 / 419
print(f"one interruption every {hours_between_failures:.1f} hours")

# %% [markdown]
# So a run saves a **checkpoint** at regular intervals: everything it needs to resume. This includes the parameters, the
# optimizer state, the step, and whatever else changes as the run goes on. After a failure, the same script starts again
# and loads the newest checkpoint. Activation checkpointing (chapter 06) only shares the name.

# %% [markdown]
# ## What is wasted
#
# Your `ZeRO3` can already save: `full_state_dict()` gathers the full model on every rank. How much memory does that
# take?

# %%
# %%ranks
from shared import measure, memory
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from solutions.zero3 import ZeRO3


def new_model():
    return TinyGPT(GPTConfig(vocab_size=128, layers=4, width=128)).to(device)


def train(model, optimizer, steps):
    """Train for these steps, on eight samples each. Returns their losses, averaged over the ranks."""
    text, losses = CharTokens(), []
    for step in steps:
        batch = text.windows(range(200 * step, 200_000, 25_000), length=32)
        own = [tensor[rank::world_size].to(device) for tensor in batch]
        loss = torch.tensor(measure.train_step(model, optimizer, *own), device=device)
        dist.all_reduce(loss)
        losses.append(loss.item() / world_size)
    return losses


def copies_to_save(model, optimizer, save):
    """Return what a rank holds at the peak of save(), beyond what it held before, as a multiple of 4Ψ bytes."""
    optimizer.zero_grad()
    with memory.peak(model, optimizer) as peak:
        save()
    more_bytes = peak.peak_bytes - peak.samples[0].held.total_bytes
    return more_bytes / (4 * sum(parameter.numel() for parameter in new_model().parameters()))


# %% [markdown]
# **Predict.** One full copy of Ψ parameters in fp32 takes 4Ψ bytes. How much more than before does a rank hold at the
# peak of `full_state_dict()`, as a multiple of 4Ψ? 1 would mean one full copy and nothing else.

# %%
my_prediction = None


# %%
# %%ranks
def gather_after_a_step():
    model = ZeRO3(new_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, range(1))
    return copies_to_save(model, optimizer, model.full_state_dict)


# %%
copies = ranks.run(lambda: gather_after_a_step())[0]
print(f"{predicted(my_prediction, '{} × 4Ψ bytes')}measured {copies:.2f} × 4Ψ bytes")
assert 1.9 < copies < 2.1

# %% [markdown]
# We sharded the model because no rank can hold all of it. Now every rank holds *two* full copies on top of its shards,
# because lab 10's `full_state_dict()` gathers the flat parameters on all ranks, and then copies each parameter. And the
# optimizer's moments are not even saved yet.
#
# torch can spare the GPUs: with `full_state_dict` and `cpu_offload` in `StateDictOptions`, it gathers one parameter at
# a time into the CPU memory of rank 0. But for Llama 3 405B, that one host would need 4.9 TB, and thousands of GPUs
# would wait while it writes.

# %% [markdown]
# ## Each rank saves its shard
#
# In a **sharded checkpoint**, each rank writes its own shards, and a list says which shard is in which file.
# `torch.distributed.checkpoint` (DCP for short) does this. We use it on a GPT that torch's `fully_shard` has sharded,
# so that `get_state_dict` returns `DTensor`s, which know which rows of the full tensor their rank holds.

# %%
# %%ranks
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from solutions.production import fully_sharded


def new_run():
    model = fully_sharded(new_model())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def state_of(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def save_ten_steps(path):
    """Save after ten steps. Returns how much more memory that took, as a multiple of 4Ψ bytes."""
    model, optimizer = new_run()
    train(model, optimizer, range(10))
    state = state_of(model, optimizer)
    return copies_to_save(model, optimizer, lambda: dcp.save(state, checkpoint_id=path))


# %% tags=["nbval-ignore-output"]
import tempfile
from pathlib import Path

place = tempfile.TemporaryDirectory()
folder = Path(place.name)
copies = ranks.run(lambda path: save_ten_steps(path), folder / "latest")[0]
print(f"{copies:.2f} × 4Ψ bytes more than before")
for file in sorted((folder / "latest").iterdir()):
    print(f"{file.name:15}{file.stat().st_size / 1e6:.2f} MB")

# %% tags=["claims"]
assert copies < 0.2 and len(list((folder / "latest").iterdir())) == 5

# %% [markdown]
# Each rank has written one file: 2.44 MB of shards (a quarter of the parameters and of both moments, 0.75 · 4Ψ bytes),
# and a header for each tensor. The save took almost no extra memory. The list is in the file `.metadata`: for each
# tensor, it says which rows are in which file. So any number of ranks can load this checkpoint. Each one looks up the
# rows that it needs, and reads the shards that hold them. The next cell defines `load`. It is folded, because you write
# it in the lab.


# %% jupyter={"source_hidden": true}
# %%ranks
def load(model, optimizer, path):
    state = state_of(model, optimizer)  # the tensors to load into
    dcp.load(state, checkpoint_id=path)
    loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    # Tensors are loaded in place. Settings such as the learning rate are not tensors, so they are set here.
    set_state_dict(model, optimizer, **loaded)


# %% [markdown]
# ## Saving over the last checkpoint
#
# We called the folder `latest`. It is tempting to save into this folder every time, because then the script always
# knows which folder to load. But what if something goes wrong in the middle of a save?
#
# In the next cells, the run resumes from step 10, trains until step 20, and saves into `latest` again. But the disk of
# rank 3 is full.


# %%
# %%ranks
import warnings


class Interrupted(dcp.FileSystemWriter):
    """Calls interrupt(path) before this rank writes its shards."""

    def __init__(self, path, interrupt):
        super().__init__(path)
        self.interrupt = interrupt

    def write_data(self, plan, planner):
        self.interrupt(self.path)
        return super().write_data(plan, planner)


def disk_is_full(path):
    if rank == 3:
        raise OSError("No space left on device")


def own_rows(model):
    return model.token_embedding.weight.to_local().clone()


def save_over(path):
    """Load step 10, save step 20, and load again. Returns the steps whose rows this rank then has."""
    model, optimizer = new_run()
    load(model, optimizer, path)
    rows = {10: own_rows(model)}
    train(model, optimizer, range(10, 20))
    rows[20] = own_rows(model)
    try:
        with warnings.catch_warnings(action="ignore"):
            dcp.save(state_of(model, optimizer), storage_writer=Interrupted(path, disk_is_full))
    except dcp.CheckpointException as failed:
        print(failed.failures[3][0])
    load(model, optimizer, path)
    return [step for step, at_step in rows.items() if own_rows(model).equal(at_step)]


# %% [markdown]
# **Predict.** All ranks learn that the save has failed, and they load `latest` to go on from there. What do they get:
# "an error", "step 10", "step 20", or something else?

# %%
my_prediction = None

# %% tags=["nbval-ignore-output"]
steps = ranks.run(lambda path: save_over(path), folder / "latest")
print(f"{predicted(my_prediction)}found rows of the embedding of these steps, by rank: {steps}")
assert steps == [[20], [20], [20], [10]]

# %% [markdown]
# `latest` loads without an error, but this model never existed: the shards of three ranks are from step 20, and those
# of rank 3 from step 10. `.metadata` is still the list from step 10. The new shards have the same names and sizes as
# the old ones, so the mixture goes unnoticed. And the good checkpoint of step 10 is gone.
#
# torch only warns that it overwrites a checkpoint, and our cell hides the warning. With `overwrite=False`, its writer
# raises an error instead.

# %% [markdown]
# So there are two rules:
#
# - **Never write into the last complete checkpoint.** Each step gets a folder of its own, and the previous one is
#   deleted only when the new one is complete.
# - **"Latest" means the newest *complete* checkpoint**, not the folder that was written last. How can a script know
#   that a checkpoint is complete?

# %% [markdown]
# ## A name for complete checkpoints
#
# Writing many files can stop halfway. Renaming a folder within a file system cannot. Such an operation is **atomic**:
# others see either its full effect or none, even if it is interrupted. So we write into a folder with a temporary name,
# and rename it when everything is written. In the diagram's example, step 2 is already saved and step 4 is being saved.
# Look at what a kill leaves behind at each moment:

# %%
diagrams.atomic_save()

# %% [markdown]
# Two things have to happen before the rename:
#
# - **All ranks have written.** `dcp.save` returns only when they have, and if one of them fails, it raises an error on
#   all.
# - **The files are on the disk.** The operating system keeps written data in memory for a while, and in a power failure
#   they are lost. To **flush** a file means to wait until its data are on the disk. torch's writer flushes each file
#   (its option `sync_files`, on by default).
#
# After the rename, the parent folder has to be flushed as well (`os.fsync` on the open folder), or a power failure can
# undo the rename. Here is a short version, without that flush.


# %%
# %%ranks
def save_atomically(folder, step, model, optimizer, writer=dcp.FileSystemWriter):
    unfinished = folder / f"step_{step}.half"
    dcp.save(state_of(model, optimizer), storage_writer=writer(unfinished))
    if rank == 0:
        unfinished.rename(folder / f"step_{step}")
    dist.barrier()  # no rank returns before the rename


# %% [markdown]
# ## A kill in the middle of a save
#
# Now we kill a process without a warning, as happens when a host fails or runs out of memory. The run saves after 10
# and after 20 steps. During the second save, rank 3 is killed once the other three have begun to write.

# %%
# %%ranks
import os
import signal
import time
from functools import partial


def kill_rank_3(path):
    if rank == 3:
        while len(list(path.glob("*.distcp"))) < 3:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)


def killed_while_saving(folder):
    model, optimizer = new_run()
    train(model, optimizer, range(10))
    save_atomically(folder, 10, model, optimizer)
    train(model, optimizer, range(10, 20))
    save_atomically(folder, 20, model, optimizer, partial(Interrupted, interrupt=kill_rank_3))


# %% tags=["nbval-ignore-output"]
run = folder / "run"
try:
    ranks.run(lambda path: killed_while_saving(path), run)
except ranks.CellFailed as failed:
    print(failed)

# %% [markdown]
# One process is gone. Ranks that lost their connection to it failed, too, and the course has stopped those that were
# still waiting. It has started four new ranks, as a cluster would, and defined your functions there again. What is on
# the disk, and from which step will the run resume?

# %%
files = {path.name: sorted(file.name for file in path.iterdir()) for path in run.iterdir()}
for name in sorted(files):
    print(f"{name:13}", *files[name])

# %% tags=["claims"]
assert {name: len(inside) for name, inside in files.items()} == {"step_10": 5, "step_20.half": 3}
assert ".metadata" in files["step_10"]

# %% [markdown]
# It will resume from step 10. The folder `step_20.half` has three of the four files with shards, and its name says that
# it is not complete.
#
# torch leaves a mark, too: it writes `.metadata` last, when all ranks have reported that their shards are written. So a
# *new* folder without `.metadata` is not complete. torchtitan, for instance, resumes from the folder with the largest
# step that contains this file. Our overwritten folder `latest` had the mark, too, left over from step 10.
#
# An object store such as S3 cannot rename a folder. There, only such a mark shows that a checkpoint is complete.

# %% [markdown]
# ## Resuming on fewer ranks
#
# Suppose that two of the four GPUs are no longer available. We resume on two ranks, and compare the losses with those
# of a run that was not interrupted:


# %%
# %%ranks
def resumed(path):
    model, optimizer = new_run()
    load(model, optimizer, path)
    return train(model, optimizer, range(10, 30))


# %% tags=["nbval-ignore-output"]
expected = ranks.run(lambda: train(*new_run(), range(30)))[0]
with ranks.world(2):
    losses = ranks.run(lambda path: resumed(path), run / "step_10")[0]
difference = max(abs(x - y) for x, y in zip(losses, expected[10:], strict=True))
print(f"largest difference of the losses in steps 11 to 30: {difference:.0e}")

# %% tags=["claims"]
assert difference < 0.01 and expected[-1] < expected[0] - 0.5

# %% [markdown]
# Apart from rounding, the losses are the same. Only ten steps had to be repeated.
#
# In this run, the step alone says which samples come next. A real run has more to save:
#
# - the state of the learning rate schedule and of the gradient scaler,
# - the position in the data set. Without it, samples are repeated or skipped, and nothing raises an error. torchdata's
#   `StatefulDataLoader` has a `state_dict()` for this: put it into the same checkpoint.
# - the state of the random number generators, for dropout and shuffling. There is one state per rank, so with a
#   different number of ranks, you have to seed again.

# %% [markdown]
# ## Saving in the background
#
# While a checkpoint is written, training is blocked. `dcp.async_save` avoids much of that: a thread writes while
# training goes on. The call returns a future, which is a handle for the result of the save.
#
# The thread communicates, because the ranks have to agree on what each of them writes. If it used training's process
# group, its collectives could mix with those of training in a different order on each rank (chapter 04). So we give it
# a gloo group of its own, as torchtitan does.
#
# But training changes the parameters all the time. So what does the thread write? The next cell calls `async_save`
# after step 10. Its writer waits until the ranks have trained to step 20, so no shard is on the disk before then.


# %%
# %%ranks
import threading


def save_in_background(path):
    """Call async_save after step 10, train on, and load. Returns the steps whose rows this rank then has."""
    model, optimizer = new_run()
    own_group = dist.new_group(backend="gloo")
    train(model, optimizer, range(10))
    rows, trained = {10: own_rows(model)}, threading.Event()
    writer = Interrupted(path, lambda _: trained.wait())
    state = state_of(model, optimizer)
    future = dcp.async_save(state, storage_writer=writer, process_group=own_group)
    train(model, optimizer, range(10, 20))
    rows[20] = own_rows(model)
    trained.set()  # now the thread may write
    future.result()  # waits until all ranks have written
    load(model, optimizer, path)
    return [step for step, at_step in rows.items() if own_rows(model).equal(at_step)]


# %% [markdown]
# **Predict.** Which step is in the checkpoint: 10, 20 or a mixture?

# %%
my_prediction_step = None

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
steps = ranks.run(lambda path: save_in_background(path), folder / "background")
assert steps == 4 * [[10]]
print(f"{predicted(my_prediction_step)}found, by rank: {steps}")

# %% [markdown]
# The checkpoint holds the values at the moment of the call. Before `async_save` returns, it copies the shards into CPU
# memory, which is called **staging**, and training changes the parameters but not the copy. The price is this copy: a
# quarter of the parameters and of both moments. With GPUs, it takes CPU memory, of which there is usually more.
#
# In the diagram's example, compare how long training is blocked, and when the checkpoint gets its final name:

# %%
diagrams.background_save()

# %% [markdown]
# Three rules keep asynchronous saves safe:
#
# - **Give them a process group of their own**, as above.
# - **Allow only one at a time.** Call `future.result()` before the next save. Otherwise, a second copy takes memory,
#   and you do not learn that a save has failed, because its error is raised by `result()`.
# - **Rename after `future.result()`**, not when `async_save` returns, and delete the previous checkpoint only then. The
#   opposite happened in a real project: for about a minute, `latest` pointed to a 7B checkpoint that was still being
#   written ([KempnerForge issue 102](https://github.com/KempnerInstitute/KempnerForge/issues/102)).

# %% [markdown]
# ## How often to save
#
# If you save too often, you lose time to saving. If you save too rarely, you lose more work in each failure. Let δ be
# the time for which a save stops training, τ the time between two saves, and M the mean time between failures. On
# average, a failure comes halfway between two saves, so it costs τ/2 of work. The share of the time that is lost is
#
# $$\frac{\delta}{\tau} + \frac{\tau}{2M}, \qquad \text{which is smallest at} \qquad \tau = \sqrt{2 \delta M}$$
#
# (Young, 1974). A restart takes time, too, but the same for every τ, so it does not change the best one.
#
# **Predict.** A save stops training for one minute, and failures come as often as in Meta's run. How many minutes
# should pass between two saves?

# %%
my_prediction_min = None

# %%
failure_s = 3600 * hours_between_failures
best_s = {save_s: (2 * save_s * failure_s) ** 0.5 for save_s in (60, 2)}
rows = []
for save_s, every_s in ((60, 300), (60, best_s[60]), (60, 7200), (2, best_s[2])):
    lost = save_s / every_s + every_s / (2 * failure_s)
    rows.append([f"{save_s}", f"{every_s / 60:.1f}", f"{lost:.1%}"])
print(f"{predicted(my_prediction_min, '{} minutes')}computed {best_s[60] / 60:.0f}")
tables.Table(["a save stops training for, s", "every, minutes", "lost"], rows)

# %% [markdown]
# The best τ need not be exact: half or twice as long costs only a quarter more. If a save blocks training for only two
# seconds, as in the last row, you can save every 3.5 minutes, and lose 2% instead of 10%. But the thread must have
# finished writing by then, because only one save may be in flight. And until a save is complete, a failure goes back to
# the one before: a write of one minute adds another 0.5%.
#
# On N times as many GPUs, failures come N times as often. So the best τ falls as 1/√N, and the lost share grows as √N.
# On 8 of Meta's 16,384 GPUs, one-minute saves would cost 0.2% of the time. On all 16,384, they cost 10%.
#
# In the figure, look at how flat each curve is around its best interval:

# %%
costs.saving_intervals((60, 2), failure_s)

# %% [markdown]
# ## The production version
#
# | | the newest complete checkpoint | in the background |
# |---|---|---|
# | `torch.distributed.checkpoint` | you decide; a complete one has `.metadata` | `async_save`: a thread or a process |
# | torchtitan | the largest `step-N` with `.metadata` | `async_mode`: `"async"`, `"async_with_pinned_mem"` |
# | DeepSpeed | the folder named in a text file, `latest` | `DecoupledCheckpointEngine`: a process |
# | lab 12 | the largest `step_N`, a name that only complete ones have | `BackgroundSaver`, by the three rules above |
#
# - **Deleting old checkpoints:** torchtitan's `keep_latest_k` must not be 1, because the newest one may still be
#   incomplete.
# - **Your `ZeRO3`** has `sharded_state_dict(optimizer)`, which DCP can save and load.
# - **A single file for others:** `dcp_to_torch_save` in `torch.distributed.checkpoint.format_utils` converts a sharded
#   checkpoint. One process needs memory for the whole checkpoint, but no GPU. `HuggingFaceStorageWriter` writes
#   `safetensors` files, which it can put together from the ranks' shards (`enable_consolidation`).
# - **Without storage:** Gemini saves into the CPU memory of other hosts, after every step, and reads storage only as a
#   last resort (Wang et al., SOSP 2023).
#
# A save takes at least as long as its bytes divided by the storage's bandwidth. Llama 3 405B has 4.9 TB of fp32
# parameters and moments. The storage of Meta's cluster sustains 2 TB/s (The Llama 3 Herd of Models, §3.3.1), so they
# take 2.4 seconds at that rate. At 50 GB/s, δ is 97 seconds if training waits for the storage. Even with the best
# interval, that would cost such a run 13% of its time.

# %% [markdown]
# ## Recap
#
# Ψ parameters in fp32 with AdamW on N ranks.
#
# | | memory per rank, beyond what it holds | after a kill during a save | training is blocked |
# |---|---|---|---|
# | `full_state_dict()` | 8Ψ bytes (parameters) | depends on who writes, and where | while it gathers and writes |
# | sharded, into the last checkpoint | almost none | perhaps a mixture of two steps, which loads | while it writes |
# | sharded, renamed when complete | almost none | the last complete checkpoint | while it writes |
# | the same with `async_save` | 12Ψ/N bytes of CPU memory | the last complete checkpoint | at least while it stages |
#
# **Terms**
#
# - **checkpoint**: everything that a run needs to resume, on a disk.
# - **sharded checkpoint**: a checkpoint for which each rank has written its own shards, with a list of what is where.
# - **atomic**: an operation is atomic if others see either its full effect or none, even if it is interrupted.
# - **flush**: to wait until the data of a written file are on the disk, and not only in memory.
# - **staging**: copying the state into CPU memory, so that it can be written while training changes the original.

# %% [markdown]
# ## Further reading
#
# - [On a real cluster](../docs/cluster.md): shared file systems, warnings and restarts.
# - [Asynchronous Saving with Distributed
#   Checkpoint](https://docs.pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html): pinned memory.
# - Mohan et al., [CheckFreq: Frequent, Fine-Grained DNN
#   Checkpointing](https://www.usenix.org/conference/fast21/presentation/mohan), FAST 2021: staging and writing as a
#   pipeline, and choosing the interval during the run.
# - Llama Team, [The Llama 3 Herd of Models](https://arxiv.org/abs/2407.21783), §3.3: what fails on 16,384 GPUs.
# - Young, A first order approximation to the optimum checkpoint interval, CACM 1974: the formula.

# %% [markdown]
# ## What is still wasted
#
# Your run now survives a failure. But whatever you shard and save, each rank still computes *whole layers*: it unshards
# all parameters of a layer before it can use them. If a single layer becomes too large, or if the batch cannot be
# divided among more ranks, sharding no longer helps. Chapter 13 splits the layers themselves.
#
# First, in the lab, you write checkpoints that are either complete or not there.

# %%
ranks.stop()
place.cleanup()
