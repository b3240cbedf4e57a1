# ---
# jupyter:
#   course:
#     module: checkpoints
# ---

# %% [markdown]
# # 12 · Checkpoints
#
# **55–85 minutes.** After this lesson, you will be able to:
#
# - save a model that no rank can hold as a whole, and resume on another number of ranks,
# - say what a kill leaves behind at each moment of a save, and make sure that it is never loaded,
# - save in the background with `async_save`, and say what that costs and what you have to wait for,
# - compute how often a run should save.
#
# You need `ZeRO3` (chapters 09 and 10) and `fully_shard` (chapter 11).

# %% [markdown]
# ## Where we are
#
# In chapter 11, you chose the fastest strategy that fits. But a large run takes weeks, and it needs all its GPUs: when
# one of them fails, the whole job stops. While Meta trained Llama 3 405B on 16,384 GPUs, 419 unexpected interruptions
# happened in 54 days (The Llama 3 Herd of Models, §3.3.4). How far apart were they, on average?

# %% tags=["nbval-ignore-output"]
from shared import measure, plots, ranks, tables
from shared.plots import diagrams
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
#
# **Predict.** One full copy of Ψ parameters in fp32 takes 4Ψ bytes. Between steps, each of four ranks holds a quarter
# of the parameters and of AdamW's two moments, which is 0.75 · 4Ψ bytes. What does a rank hold at the peak of
# `full_state_dict()`, as a multiple of 4Ψ? 1 would mean one full copy and nothing else.

# %%
my_prediction = None

# %%
# %%ranks
from functools import cache

from shared import memory
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from solutions.zero3 import ZeRO3


@cache
def text():
    return CharTokens()


def new_model():
    return TinyGPT(GPTConfig(vocab_size=text().vocab_size, layers=4, width=128)).to(device)


def batch_of(step):
    """Return this rank's share of the eight samples of a step."""
    batch = text().windows(range(200 * step, 200_000, 25_000), length=32)
    return [tensor[rank::world_size].to(device) for tensor in batch]


def gather_all():
    """Return Ψ, and what a rank holds between steps and at the peak of full_state_dict()."""
    model = ZeRO3(new_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(*batch_of(0)).backward()
    model.finish_gradient_sync()
    optimizer.step()
    optimizer.zero_grad()
    with memory.peak(model, optimizer) as peak:
        model.full_state_dict()
    return sum(parameter.numel() for parameter in new_model().parameters()), {
        "between steps": peak.samples[0].held.by_component(),
        "at the peak of full_state_dict()": peak.held.by_component(),
    }


# %%
psi, held = ranks.run(lambda: gather_all())[0]
copies = {name: sum(parts.values()) / (4 * psi) for name, parts in held.items()}
print(f"Ψ = {psi:,} parameters in fp32")
print(*(f"{name}: {count:.2f} × 4Ψ bytes" for name, count in copies.items()), sep="\n")
print(predicted(my_prediction, "{} × 4Ψ bytes", "\n"), end="")
assert 1.9 < copies["at the peak of full_state_dict()"] - copies["between steps"] < 2.1
plots.memory_by_component(held)

# %% [markdown]
# We sharded the model because no rank can hold all of it. At the peak, every rank holds *two* full copies on top of its
# shards, because lab 10's `full_state_dict()` gathers the flat parameters on all ranks (*buckets* in the figure), and
# then copies each parameter (*other*). And the moments are not even saved yet.
#
# torch can spare the GPUs: with `full_state_dict` and `cpu_offload` in `StateDictOptions`, it gathers one parameter at
# a time into the CPU memory of rank 0. But for Llama 3 405B, that one host would need 4.9 TB, and thousands of GPUs
# would wait while it writes them.

# %% [markdown]
# ## Each rank saves its shard
#
# In a **sharded checkpoint**, each rank writes its own shards, and a list says which shard is in which file.
# `torch.distributed.checkpoint` (DCP for short) does this. We use it on a GPT that torch's `fully_shard` has sharded.
# `get_state_dict` returns the state of the model and of the optimizer, in which the sharded tensors are `DTensor`s. A
# `DTensor` knows which rows of the full tensor its rank holds.

# %%
# %%ranks
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def new_run():
    """Build a sharded model and its optimizer. On one rank, nothing is sharded."""
    model = new_model()
    if world_size > 1:
        mesh = init_device_mesh(device.type, (world_size,))
        for unit in (*model.blocks, model):
            fully_shard(unit, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model, optimizer, steps):
    """Train for these steps. Returns their losses, averaged over the ranks."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(*batch_of(step))
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() / world_size)
    return losses


def state_of(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


# %% [markdown]
# The next two cells train ten steps and save. How much memory does a rank need on top of what it holds anyway?


# %%
# %%ranks
def bytes_to_save(path):
    """Save after ten steps. Returns the bytes held at the peak, beyond those held before."""
    model, optimizer = new_run()
    train(model, optimizer, range(10))
    optimizer.zero_grad()
    state = state_of(model, optimizer)
    with memory.peak(model, optimizer) as peak:
        dcp.save(state, checkpoint_id=path)
    return peak.peak_bytes - peak.samples[0].held.total_bytes


# %% tags=["nbval-ignore-output"]
import tempfile
from pathlib import Path

place = tempfile.TemporaryDirectory()
folder = Path(place.name)
more_bytes = ranks.run(lambda path: bytes_to_save(path), folder / "latest")[0]
print(f"{more_bytes / (4 * psi):.2f} × 4Ψ bytes more than between steps")
assert more_bytes < 0.2 * 4 * psi
files = sorted((folder / "latest").iterdir())
rows = [[file.name, f"{file.stat().st_size / 1e6:.2f}"] for file in files]
tables.Table(["file", "MB"], rows)

# %% [markdown]
# Each rank has written one file: 2.43 MB of shards (0.75 · 4Ψ bytes), and a header for each tensor. That took almost no
# extra memory. The list is in the file `.metadata`. Here is its entry for one weight:

# %%
metadata = ranks.run(lambda path: dcp.FileSystemReader(path).read_metadata(), folder / "latest")[0]
name = "model.blocks.0.up.weight"
file_of = {
    index.offset: stored.relative_path
    for index, stored in metadata.storage_data.items()
    if index.fqn == name
}
rows = []
for chunk in metadata.state_dict_metadata[name].chunks:
    first, count = chunk.offsets[0], chunk.sizes[0]
    rows.append([f"{first} to {first + count - 1}", file_of[chunk.offsets]])
assert len(rows) == 4
tables.Table([f"rows of {name}", "file"], rows)

# %% [markdown]
# Any number of ranks can load this: each one looks up the rows that it needs, and reads the shards that hold them.


# %%
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
# knows which folder to load. But what if something goes wrong in the middle of a save? The next cell defines a writer
# that lets us interrupt a save:

# %%
# %%ranks
import warnings


class Interrupted(dcp.FileSystemWriter):
    """Writes this rank's shards. On rank 3, calls interrupt() when the others have written theirs."""

    def __init__(self, path, interrupt):
        super().__init__(path)
        self.interrupt = interrupt

    def write_data(self, plan, planner):
        if dist.get_rank() == 3:
            dist.barrier()
            self.interrupt()
        written = super().write_data(plan, planner)
        if dist.get_rank() != 3:
            dist.barrier()
        return written


def disk_is_full():
    raise OSError("No space left on device")


def first_column(model):
    """Return the first column of the token embedding, of which rank r's shard is the r-th block of rows."""
    return model.token_embedding.weight.full_tensor()[:, 0].tolist()


# %% [markdown]
# The run resumes from the checkpoint of step 10 and trains until step 20. Then it saves into `latest` again, but the
# disk of rank 3 is full.


# %%
# %%ranks
def save_over(path):
    """Return the column at step 10, at step 20 and as loaded, and the error of the save."""
    model, optimizer = new_run()
    load(model, optimizer, path)
    at_10 = first_column(model)
    train(model, optimizer, range(10, 20))
    at_20 = first_column(model)
    error = ""
    try:
        with warnings.catch_warnings(action="ignore"):
            dcp.save(state_of(model, optimizer), storage_writer=Interrupted(path, disk_is_full))
    except dcp.CheckpointException as caught:
        error = str(caught.failures[3][0])
    load(model, optimizer, path)
    return at_10, at_20, first_column(model), error


# %% [markdown]
# **Predict.** All ranks learn that the save has failed, and they load `latest` to go on from there. What do they get:
# "an error", "step 10", "step 20", or something else?

# %%
my_prediction = None

# %%
at_10, at_20, loaded, error = ranks.run(lambda path: save_over(path), folder / "latest")[0]
print("rank 3:", error)
per_rank = -(-len(loaded) // 4)  # rows per rank; the last rank may have fewer
for rank in range(4):
    shard = slice(rank * per_rank, (rank + 1) * per_rank)
    assert loaded[shard] == (at_20 if rank < 3 else at_10)[shard]
    step = 20 if loaded[shard] == at_20[shard] else 10
    print(f"rank {rank}'s rows of the embedding: of step {step}")
print(predicted(my_prediction, then="\n"), end="")

# %% [markdown]
# `latest` loads without an error, but this model never existed: the shards of three ranks are from step 20, and those
# of rank 3 from step 10. `.metadata` is still the list from step 10. The new shards have the same names and sizes as
# the old ones, so the mixture goes unnoticed. And the good checkpoint of step 10 is gone.
#
# torch only warns that it overwrites a checkpoint, and our cell hides the warning. With `overwrite=False`, its writer
# raises an error instead.
#
# So there are two rules:
#
# - **Never write into the last complete checkpoint.** Each step gets a folder of its own, and the previous one is
#   deleted only when the new one is complete.
# - **"Latest" means the newest *complete* checkpoint**, not the folder that was written last. How can a script know
#   that a checkpoint is complete?

# %% [markdown]
# ## A name for complete checkpoints
#
# An operation is **atomic** if others see either its full effect or none, even if it is interrupted. Writing many files
# is not atomic, but renaming a folder is, as long as it stays on the same file system. So we write into a folder with a
# temporary name, and rename it when everything is written. In the diagram's example, step 2 is already saved and step 4
# is being saved. Look at what a kill leaves behind at each moment:

# %%
diagrams.atomic_save()

# %% [markdown]
# Two things have to happen before the rename:
#
# - **All ranks have written.** `dcp.save` takes care of that: it returns only when all ranks have written, and if one
#   of them fails, it raises on all ranks.
# - **The files are on the disk.** The operating system keeps written data in memory for a while. If only the process is
#   killed, these data still reach the disk, but in a power failure they are lost. To **flush** a file means to wait
#   until its data are on the disk. torch's writer flushes each file (its option `sync_files`, on by default).
#
# After the rename, the parent folder has to be flushed as well (`os.fsync` on the open folder), or a power failure can
# undo the rename. Here is a short version, which leaves this out.


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
# and after 20 steps. During the second save, rank 3 is killed once the other three have written their shards.

# %%
# %%ranks
import os
import signal


def uninterrupted():
    return train(*new_run(), range(30))


def killed_while_saving(folder):
    model, optimizer = new_run()
    train(model, optimizer, range(10))
    save_atomically(folder, 10, model, optimizer)
    train(model, optimizer, range(10, 20))

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    save_atomically(folder, 20, model, optimizer, lambda path: Interrupted(path, kill))


# %% [markdown]
# **Predict.** From which step will the run resume? What will its folder contain besides that checkpoint?

# %%
my_prediction_step = None
my_prediction_folders = None

# %% tags=["nbval-ignore-output"]
run = folder / "run"
expected = ranks.run(lambda: uninterrupted())[0]
try:
    ranks.run(lambda path: killed_while_saving(path), run)
except ranks.CellFailed as failed:
    print(failed)

# %% [markdown]
# One process is gone. Ranks that noticed the broken connection failed by themselves; the course stopped those that were
# still waiting. It has started four new ranks, as a cluster would, and defined your functions there again. What is on
# the disk?

# %%
rows = []
for path in sorted(run.iterdir()):
    shards = len(list(path.glob("*.distcp")))
    rows.append([path.name, f"{shards}", "yes" if (path / ".metadata").exists() else "no"])
assert rows == [["step_10", "4", "yes"], ["step_20.half", "3", "no"]]
print(predicted((my_prediction_step, my_prediction_folders), "step {}, and {}", "\n"), end="")
tables.Table(["folder", "files with shards", ".metadata"], rows)

# %% [markdown]
# The run will resume from step 10. The folder `step_20.half` has three of the four files with shards, and its name says
# that it is not complete.
#
# torch leaves a mark, too: it writes `.metadata` last, when all ranks have reported that their shards are written. So a
# *new* folder without `.metadata` is not complete. torchtitan, for instance, resumes from the folder with the largest
# step that contains this file. Our overwritten folder `latest` had the mark, too, left over from step 10.
#
# An object store such as S3 cannot rename a folder. There, only such a mark shows that a checkpoint is complete.

# %% [markdown]
# ## Resuming on fewer ranks
#
# Suppose that two of the four GPUs are no longer available. We resume on two ranks, and then on a single one, where
# nothing is sharded.


# %%
# %%ranks
def resumed(path):
    model, optimizer = new_run()
    load(model, optimizer, path)
    return train(model, optimizer, range(10, 30))


# %% tags=["nbval-ignore-output"]
unknown = [float("nan")] * 10  # these steps are not repeated
curves = {"4 ranks, not interrupted": expected}
for count in (2, 1):
    with ranks.world(count):
        losses = ranks.run(lambda path: resumed(path), run / "step_10")[0]
    difference = max(abs(x - y) for x, y in zip(losses, expected[10:], strict=True))
    print(f"resumed on {count}: largest difference of the losses {difference:.0e}")
    assert difference < 0.01
    curves[f"resumed on {count}"] = unknown + losses
assert expected[-1] < expected[0] - 0.5

# %% [markdown]
# In the figure, the lines of the resumed runs begin at step 10. Do they lie on the first line?

# %% tags=["nbval-ignore-output"]
plots.loss_curves(curves)

# %% [markdown]
# They do, apart from rounding: with a different number of ranks, sums are computed in a different order. Only ten steps
# had to be repeated.
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
# While a checkpoint is written, training is blocked. `dcp.async_save` avoids much of that. It first copies the shards
# into CPU memory, which is called **staging**. Then it returns a future, which is a handle for the result of the save.
# A thread writes the copy while training goes on. In the diagram's example, compare how long training is blocked, and
# when the checkpoint gets its final name:

# %%
diagrams.background_save()

# %% [markdown]
# The thread communicates too: the ranks have to agree on what each of them writes. If it used the process group of
# training, its collectives could mix with those of training in a different order on each rank (chapter 04). So it needs
# a process group of its own. We give it a gloo group, as torchtitan does.
#
# The next cell calls `async_save` after step 10. Its writer waits until the ranks have trained to step 20, so no shard
# is on the disk before then.


# %%
# %%ranks
import threading


class Delayed(dcp.FileSystemWriter):
    """Calls a function before this rank writes its shards, and counts the bytes that are staged."""

    def __init__(self, path, before):
        super().__init__(path)
        self.before = before

    def stage(self, state):
        staged = super().stage(state)
        self.staged_bytes = memory.held(extra={"other": [staged]}).total_bytes
        return staged

    def write_data(self, plan, planner):
        self.before()
        return super().write_data(plan, planner)


def save_in_background(path):
    """Return the bytes that are staged, and the column at step 10, at step 20 and as loaded."""
    model, optimizer = new_run()
    own_group = dist.new_group(backend="gloo")
    train(model, optimizer, range(10))
    at_10, state = first_column(model), state_of(model, optimizer)
    trained = threading.Event()
    writer = Delayed(path, trained.wait)
    future = dcp.async_save(state, storage_writer=writer, process_group=own_group)
    train(model, optimizer, range(10, 20))
    at_20 = first_column(model)
    trained.set()  # now the thread may write
    future.result()  # waits until all ranks have written
    load(model, optimizer, path)
    return writer.staged_bytes, at_10, at_20, first_column(model)


# %% [markdown]
# **Predict.** Which step is in the checkpoint: 10, 20 or a mixture? And how many bytes does a rank need for staging, as
# a multiple of 4Ψ bytes? 1 would mean as much as one full copy of the parameters.

# %%
my_prediction_step = None
my_prediction = None

# %% jupyter={"source_hidden": true}
background = ranks.run(lambda path: save_in_background(path), folder / "background")[0]
staged_bytes, at_10, at_20, loaded = background
assert loaded == at_10 != at_20
print(f"step: {predicted(my_prediction_step)}loaded 10")
print(f"bytes: {predicted(my_prediction, '{} × 4Ψ')}measured {staged_bytes / (4 * psi):.2f} × 4Ψ")
assert 0.6 < staged_bytes / (4 * psi) < 1

# %% [markdown]
# The checkpoint holds the values at the moment of the call, because training changes the parameters and not the copy.
# The price is a copy of the rank's shards: a quarter of the parameters and of both moments. With GPUs, the copy takes
# CPU memory, which is usually larger.
#
# What do you gain? On a cluster, thousands of ranks share the storage, so a save may take a long time. Here, the writer
# imitates that by sleeping for half a second. In each round, the ranks save once and then train ten steps.


# %%
# %%ranks
import time

from shared import measure


def times_of_saving(path):
    model, optimizer = new_run()
    own_group = dist.new_group(backend="gloo")
    futures = []

    def writer():
        return Delayed(path, lambda: time.sleep(0.5))

    def steps():
        train(model, optimizer, range(10))

    def save():
        dcp.save(state_of(model, optimizer), storage_writer=writer())

    def async_save():
        state, to = state_of(model, optimizer), {"storage_writer": writer()}
        futures.append(dcp.async_save(state, process_group=own_group, **to))

    def wait():
        futures.pop().result()

    ways = {
        "no save": measure.Job({"steps": steps}),
        "save": measure.Job({"save": save, "steps": steps}),
        "async_save": measure.Job({"save": async_save, "steps": steps, "wait": wait}),
    }
    train(model, optimizer, range(1))
    with warnings.catch_warnings(action="ignore"):
        return measure.jobs(ways, rounds=5, warm_up_rounds=1)


# %% [markdown]
# In the figure, compare whole rounds: what does each way of saving add to ten steps? The lines above it say how long
# training is blocked. For `async_save`, this is the time of the call plus the wait for the future at the end of the
# round.

# %% tags=["nbval-ignore-output"]
times = ranks.run(lambda path: times_of_saving(path), folder / "timed", timeout_s=180)[0]
parts_ms = times.parts_ms()
for way, parts in parts_ms.items():
    print(f"{way}: {sum(parts.values()):.0f} ms, of which the steps take {parts['steps']:.0f} ms")
blocked_ms = {
    "save": parts_ms["save"]["save"],
    "async_save": parts_ms["async_save"]["save"] + parts_ms["async_save"]["wait"],
}
for way, ms in blocked_ms.items():
    print(f"{way} blocks training for {ms:.0f} ms")
shorter = blocked_ms["async_save"] < 0.7 * blocked_ms["save"]
measure.expect(shorter, "async_save blocks training for less time")
round_ms = {way: sum(parts.values()) for way, parts in parts_ms.items()}
plots.bars(round_ms, "ms of a round of ten steps (medians of 5 rounds)")

# %% [markdown]
# If the steps last long enough, they hide the writing, and only staging is left: `async_save` blocks training for a
# small part of the time that `save` does. Its rounds are still longer than those without a save. The thread needs CPU
# cores, too, and here, four ranks share two of them. Even in the rounds of `save`, which has no thread, the steps do
# not always take equally long. That is why we compare whole rounds.
#
# Three rules keep asynchronous saves safe:
#
# - **Give them a process group of their own**, as above.
# - **Allow only one at a time.** Call `future.result()` before the next save. Otherwise, a second copy takes memory,
#   and you do not learn that a save has failed, because its error is raised by `result()`.
# - **Rename after `future.result()`**, not when `async_save` returns, and delete the previous checkpoint only then. The
#   opposite happened in a real project: for about a minute, `latest` pointed to a 7B checkpoint that was still being
#   written (KempnerForge issue 102).

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
def lost_share(save_s, every_s, failure_s):
    return save_s / every_s + every_s / (2 * failure_s)


failure_s = 3600 * hours_between_failures
best_s = {save_s: (2 * save_s * failure_s) ** 0.5 for save_s in (60, 2)}
rows = []
for save_s, every_s in ((60, 300), (60, best_s[60]), (60, 7200), (2, best_s[2])):
    lost = lost_share(save_s, every_s, failure_s)
    rows.append([f"{save_s}", f"{every_s / 60:.1f}", f"{lost:.1%}"])
print(f"{predicted(my_prediction_min, '{} minutes')}computed {best_s[60] / 60:.0f}")
tables.Table(["a save stops training for, s", "every, minutes", "lost"], rows)

# %% [markdown]
# If a save blocks training for only two seconds, as in the last row, you can save every 3.5 minutes, and lose 2%
# instead of 10%.
#
# On N times as many GPUs, failures come N times as often. So the best τ falls as 1/√N, and the lost share grows as √N.
# On 8 of Meta's 16,384 GPUs, a failure would come once in 264 days, and one-minute saves would cost 0.2% of the time.
# On all 16,384, they cost 10%.

# %% [markdown]
# ## The production version
#
# | | the newest complete checkpoint | in the background |
# |---|---|---|
# | `torch.distributed.checkpoint` | you decide; a complete one has `.metadata` | `async_save`: a thread or a process¹ |
# | torchtitan | the largest `step-N` with `.metadata` | `async_mode`: `"async"`, `"async_with_pinned_mem"` |
# | DeepSpeed | the folder named in a text file, `latest` | `DecoupledCheckpointEngine`: a process |
# | lab 12 | the largest `step_N`, a name that only complete ones have | `BackgroundSaver`, by the three rules above |
#
# ¹ `async_checkpointer_type=AsyncCheckpointerType.PROCESS`. A process does not compete with training for Python's
# global interpreter lock.
#
# - **Deleting old checkpoints:** torchtitan's `keep_latest_k` says how many to keep. It must not be 1, because the
#   newest one may still be incomplete.
# - **Your `ZeRO3`** has `sharded_state_dict(optimizer)`, which DCP can save and load.
# - **A single file for others:** `dcp_to_torch_save` in `torch.distributed.checkpoint.format_utils` converts a sharded
#   checkpoint. One process needs memory for the whole checkpoint, but no GPU. `HuggingFaceStorageWriter` writes
#   `safetensors` files, which it can put together from the ranks' shards (`enable_consolidation`).
# - **Without storage:** Gemini saves into the CPU memory of other hosts, after every step, and reads storage only as a
#   last resort (Wang et al., SOSP 2023).
#
# A save takes at least as long as its bytes divided by the storage's bandwidth. For Llama 3 405B, that is:

# %%
checkpoint_bytes = 405e9 * 12  # fp32 parameters and both moments
for where, bytes_per_s in {"2 TB/s": 2e12, "50 GB/s": 5e10}.items():
    print(f"{checkpoint_bytes / 1e12:.2f} TB at {where}: {checkpoint_bytes / bytes_per_s:.0f} s")

# %% [markdown]
# 2 TB/s is what the storage of Meta's cluster sustains (The Llama 3 Herd of Models, §3.3.1). At 50 GB/s, δ is 97
# seconds if training waits for the storage. Even with the best interval, that would cost such a run 13% of its time.

# %% [markdown]
# ## Recap
#
# Ψ parameters in fp32 with AdamW on N ranks.
#
# | | memory per rank, beyond what it holds | after a kill during a save | training is blocked |
# |---|---|---|---|
# | `full_state_dict()` | 8Ψ bytes | depends on who writes, and where | while it gathers and writes |
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
# - [torch.distributed.checkpoint](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html): `save`,
#   `async_save`, and the functions for state dicts.
# - [Asynchronous Saving with Distributed
#   Checkpoint](https://docs.pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html): pinned memory, and
#   why to allow only one save at a time.
# - Mohan et al., [CheckFreq: Frequent, Fine-Grained DNN
#   Checkpointing](https://www.usenix.org/conference/fast21/presentation/mohan), FAST 2021: staging and writing as a
#   pipeline, and choosing the interval during the run.
# - Llama Team, [The Llama 3 Herd of Models](https://arxiv.org/abs/2407.21783), §3.3: what fails on 16,384 GPUs.
# - Young, A first order approximation to the optimum checkpoint interval, CACM 1974: the formula, on two pages.
# - [KempnerForge issue 102](https://github.com/KempnerInstitute/KempnerForge/issues/102): a `latest` that was not
#   complete.

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
