# ---
# jupyter:
#   course:
#     module: pipeline
# ---

# %% [markdown]
# # 15 · Pipeline parallelism
#
# **40–60 minutes.** After this lesson, you will be able to:
#
# - compute the bubble of a schedule, and measure it,
# - choose a schedule by its bubble, memory and communication,
# - write a schedule of your own, and know before it runs whether it would hang,
# - say when to split a model by depth, and when tensor parallelism or ZeRO-3 is the better choice.
#
# You need sends and receives (chapter 00) and the activations that backward needs (chapter 06). Throughout, p is the
# number of stages, and m the number of micro-batches.

# %% [markdown]
# ## Where we are
#
# Let the eight GPUs of a host split every layer of Llama 3 405B, as in chapter 13. At 16 bytes per parameter, each of
# them still holds 810 GB of parameters, gradients and optimizer state, ten times what fits. More hosts could split the
# layers further, but then all-reduces would cross slow links in every layer.
#
# So Meta also split the model by depth, into 16 **stages** of a few consecutive layers (Grattafiori et al. 2024, table
# 4). That leaves 51 GB per GPU. A stage sends its outputs to the next stage, and later receives their gradients: little
# enough for slow links. In this chapter, each stage is one rank. The catch: while one stage computes, what do the
# others do?

# %% tags=["nbval-ignore-output"]
from shared import measure, ranks, schedules, tables, widgets
from shared.data import published_schedules
from shared.measure.pipelines import fastest_run
from shared.planner.shapes import SHAPES
from shared.plots import pipeline as pipeline_plots
from shared.predictions import predicted
from shared.schedules import Action

ranks.start(world_size=4)

# %% [markdown]
# ## What is wasted
#
# A *schedule* lists each stage's actions: `F0` is the forward of batch 0, and `B0` its backward, which takes twice as
# long. In the next cell, one batch goes through four stages. The ranks share this machine's cores, so they cannot all
# compute at once, as GPUs would. Instead, each stage sleeps: 640 ms in total for its forwards, and 1,280 ms for its
# backwards. Only the messages are real. In the figure, how many stages work at the same time?

# %% tags=["nbval-ignore-output"]
one_batch = [[Action("F", 0), Action("B", 0)] for _ in range(4)]
naive = fastest_run(one_batch, rounds=1)
pipeline_plots.schedule({"one batch": naive})

# %% tags=["claims"] jupyter={"source_hidden": true}
measure.expect(abs(naive.bubble_of_total - 0.75) < 0.02, "a stage is idle for 75% of the time")

# %% [markdown]
# Only one stage works at any time, so four stages are no faster than one: each is idle for 75% of the time.

# %% [markdown]
# ## The idea: micro-batches
#
# We cut the batch into m micro-batches (chapter 02). While stage 1 computes the first one, stage 0 computes the second.
# At the beginning and at the end, stages still wait. This idle time is the **bubble**.
#
# In **GPipe**, every stage runs all forwards and then all backwards (Huang et al. 2019, §2.3). In **1F1B** (one
# forward, one backward), stage s starts with p − s forwards, and then alternates between one backward and one forward.
# If the next gradient has not arrived yet, the stage waits instead of starting another forward (Narayanan et al. 2021,
# §2.2.1). Both are synchronous: the optimizer waits for the last backward. Asynchronous pipelines do not wait, so they
# compute some gradients with older weights (PipeDream, Narayanan et al. 2019).
#
# A micro-batch is *in flight* on a stage from its forward to its backward. Until then, the stage must hold the
# micro-batch's activations.
#
# **Predict.** With four stages and eight micro-batches, for what fraction of the *total* time is a stage idle: 0.05,
# 0.27, 0.37 or 0.75? And with 1F1B, how many micro-batches does stage 0 hold at most?

# %%
my_bubble, my_in_flight = None, None


# %%
def gpipe(stages, micro_batches):
    every = range(micro_batches)
    actions = [Action("F", index) for index in every] + [Action("B", index) for index in every]
    return [actions for _ in range(stages)]


def one_f_one_b(stages, micro_batches):
    schedule = []
    for stage in range(stages):
        ahead = min(stages - stage, micro_batches)
        actions = [Action("F", index) for index in range(ahead)]
        for index in range(micro_batches):
            actions.append(Action("B", index))
            if ahead + index < micro_batches:
                actions.append(Action("F", ahead + index))
        schedule.append(actions)
    return schedule


built = {"GPipe": gpipe(4, 8), "1F1B": one_f_one_b(4, 8)}

# %% tags=["nbval-ignore-output"]
runs = {name: fastest_run(schedule) for name, schedule in built.items()}
print(predicted((my_bubble, my_in_flight), "{} and {}", "\n"), end="")
for name, run in runs.items():
    in_flight = [schedules.most_in_flight(actions) for actions in built[name]]
    print(f"{name}: bubble {run.bubble_of_total:.3f}, in flight {in_flight}")
pipeline_plots.schedule(runs)

# %% tags=["claims"] jupyter={"source_hidden": true}
assert in_flight == [4, 3, 2, 1]
for run in runs.values():
    measure.expect(abs(run.bubble_of_total - 3 / 11) < 0.02, "the bubble is as the formula says")

# %% [markdown]
# Both schedules have the same bubble. Every stage is idle for as long as p − 1 forwards and p − 1 backwards take. The
# last stage, say, begins p − 1 forwards late, and is done p − 1 backwards before the end.
#
# The *ideal* time is what a stage spends computing: m forwards and m backwards. As a fraction of it, the bubble is
# (p − 1)/m, here 3/8 = 0.375. As a fraction of the *total* time, it is (p − 1)/(m + p − 1) = 3/11 = 0.273. Papers use
# either fraction, so always look for the denominator.
#
# The two schedules differ in memory. With GPipe, every stage holds all m micro-batches. With 1F1B, stage s holds at
# most p − s. So with micro-batches of a fixed size, the activations of GPipe grow with m. Those of 1F1B do not, so you
# can choose a large m for a small bubble. GPipe as published pays with time instead. It keeps only a stage's inputs for
# each micro-batch, and recomputes the rest (§2.3).

# %% [markdown]
# ## Interleaved stages
#
# The last stage waits until the first micro-batch has gone through all stages before it. The wait is shorter if each
# stage computes fewer layers at a time. So give each stage v **chunks** of layers, and let each micro-batch go through
# all stages v times. For example, eight layers are placed like this:
#
# ```
#                   stage 0   stage 1   stage 2   stage 3
# v = 1               0 1       2 3       4 5       6 7
# v = 2, chunk 0       0         1         2         3
#        chunk 1       4         5         6         7
# ```
#
# Such a schedule is called **interleaved**. In exchange for the shorter waits, it sends about v times as many messages,
# and m must be a multiple of p (Narayanan et al. 2021, §2.2.2).
#
# ## Zero bubble
#
# Why does a backward take twice as long as a forward? For a linear layer y = xWᵀ, it computes two things from the
# gradient g of the output, and only one of them is urgent:
#
# - `B`: the gradient of the input, gW. The previous stage is waiting for it.
# - `W`: the gradient of the weights, gᵀx. Nothing needs it before the optimizer step.
#
# So a stage can postpone `W` until it would otherwise be idle. A schedule that does this is called **zero-bubble**.
# Ours is the simplest one (Qi et al. 2023, §2, schedule ZB-H1), and despite the name, some bubble remains. The stage
# must keep x and g until the postponed `W` has run.
#
# In the lab, you write functions for both schedules. Here, we read them as text. In a schedule with `W`, all three
# actions take the same time: B and W are half a backward each, and a backward takes twice as long as F.
#
# **Predict.** With p = 4, m = 8 and v = 2, what fraction of the *total* time is the bubble of each new schedule? Ask
# how late the last stage begins, and how long before the end it is done.

# %%
my_interleaved, my_zero_bubble = None, None

# %% tags=["nbval-ignore-output"]
built["interleaved"] = schedules.parse(published_schedules.INTERLEAVED)
built["zero bubble"] = schedules.parse(published_schedules.ZERO_BUBBLE)
runs |= {name: fastest_run(built[name]) for name in ("interleaved", "zero bubble")}
print(predicted((my_interleaved, my_zero_bubble), "{:.3f} and {:.3f}", "\n"), end="")
for name, run in runs.items():
    print(f"{name}: bubble {run.bubble_of_total:.3f}")
pipeline_plots.schedule({name: runs[name] for name in ("1F1B", "interleaved")})

# %% tags=["claims"] jupyter={"source_hidden": true}
for name, expected in {"interleaved": 3 / 19, "zero bubble": 1 / 9}.items():
    off = abs(runs[name].bubble_of_total - expected)
    measure.expect(off < 0.02, "the bubble is as the formula says")

# %% [markdown] tags=["introduction"]
# With interleaved stages, stage 3 waits for three half forwards instead of three whole ones. In the next figure, look
# at what the stages do where they waited before:

# %% tags=["nbval-ignore-output"]
pipeline_plots.schedule({name: runs[name] for name in ("1F1B", "zero bubble")})

# %% [markdown]
# With interleaved stages, all waits are 1/v as long, so the bubble is (p − 1)/(v·m) of the ideal time (Narayanan et al.
# 2021, §2.2.2). With zero bubble, stage 3 still begins three forwards late, but the postponed `W` actions keep it busy
# until the end. If F, B and W take the same time, that leaves a third of 1F1B's bubble: (p − 1)/(3m) (Qi et al. 2023,
# §2).
#
# A fraction b of the ideal time is b/(1 + b) of the total time. So 3/16 and 3/24 become 3/19 = 0.158 and 1/9 = 0.111.
# The measured fractions are a little larger, because messages take time, too.

# %% [markdown]
# What does a smaller bubble cost? The next table counts the most micro-batches that each stage holds, and the messages
# between stages. If a stage holds a micro-batch for only one of its two chunks, we count one half.

# %%
rows = []
for name, schedule in built.items():
    chunks = schedules.chunks_of(schedule)
    held = [f"{schedules.most_in_flight(actions) / chunks:g}" for actions in schedule]
    rows.append([name, *held, str(2 * 8 * (4 * chunks - 1))])
tables.Table(["in flight at most", *(f"stage {stage}" for stage in range(4)), "messages"], rows)

# %% tags=["claims"] jupyter={"source_hidden": true}
assert [row[1:5] for row in rows[2:]] == [["5.5", "4.5", "3.5", "2.5"], ["4"] * 4]

# %% [markdown]
# The interleaved schedule pays with more messages. They are tiny here, but take time on a network. On 512 H100s,
# torchtitan's Llama 3.1 405B still gained: 1F1B trained 100 tokens/s per GPU, and interleaved 128, with p = 8
# (torchtitan, `llama3_h100_202412`, table 5). By our count, interleaving also costs memory, because a stage starts more
# micro-batches before its first backward. But a GPU holds more than activations, so measure its peak: in torchtitan's
# table, it even fell, from 82.5 GiB to 72.7.
#
# Zero bubble sends as much as 1F1B, and no stage holds more micro-batches than stage 0 of 1F1B. But now all four stages
# hold 4, because stage s postpones s `W` actions.
#
# Two published schedules have no bubble at all, if F, B and W take the same time, and if no stage waits for the others
# before its optimizer step. ZB-H2 pays for that with twice 1F1B's activations, ZB-V with twice the messages (Qi et al.
# 2023 and 2024). DeepSeek's DualPipe feeds micro-batches into the pipeline from both ends (chapter 16).
#
# In the next figure, choose p, m, v and the schedule. With four stages, how large must m be before 1F1B's bubble falls
# below 5% of the total time? And with the interleaved schedule and v = 4?
#
# <details><summary>Answer</summary>
#
# 3/(m + 3) is below 5% for m above 57, so 64 is the first m in the figure. With the interleaved schedule, it is 16.
#
# </details>

# %% tags=["nbval-ignore-output"]
builders = {
    "GPipe": lambda p, m, v: gpipe(p, m),
    "1F1B": lambda p, m, v: one_f_one_b(p, m),
    "interleaved": published_schedules.interleaved,
    "zero bubble": lambda p, m, v: published_schedules.zero_bubble(p, m),
}
widgets.schedule_chooser(builders, schedule="1F1B", stages=4, micro_batches=8, chunks=2)

# %% [markdown]
# ## A schedule of your own
#
# You can write a schedule as text, with one line per stage. Before it runs, `check_schedule` looks for missing actions,
# for messages in the wrong order, and for stages that would wait forever.
#
# Suppose that memory has room for only two micro-batches per stage. The next schedule is 1F1B under that limit. The
# limit alone does not explain its bubble: stage 2 waits for `F2`, although it could run `B1`, and until it does, stage
# 1 cannot run its own `B1`. So let one stage run `B1` before `F2`. Try it on stage 1 alone, and read what
# `check_schedule` says. Then try it on stage 2 alone. How small a bubble can you reach if each stage may hold two
# micro-batches, and how small with three?
#
# <details><summary>Answer</summary>
#
# If stage 1 alone changes, it waits for stage 2, and stage 2 waits for it: a deadlock. If stage 2 alone runs `B1`
# before `F2`, the bubble falls only from 0.65 of the total time to 0.64. But if stages 1 and 2 both run
# `F0 F1 B0 B1 F2 F3 B2 B3` and so on, it falls to 0.53. Holding three costs 0.385, if each stage runs a backward as
# soon as it can. 1F1B holds four on stage 0, and costs 0.273. In the lab, you write a function that finds such
# schedules.
#
# </details>

# %% tags=["nbval-ignore-output"]
mine = schedules.parse("""
    F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
    F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
    F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
    F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
""")
schedules.check_schedule(mine)
compared = {"1F1B": runs["1F1B"], "mine": fastest_run(mine)}
print(f"bubble of mine: {compared['mine'].bubble_of_total:.3f} of the total time")
pipeline_plots.schedule(compared)

# %% [markdown]
# ## Stages of different lengths
#
# Real stages are never equal: the first one has the embedding, and the last one the output layer. In the next cell,
# stage 3 takes 1.5 times as long as each of the others. With m = 8 and p = 4, a step took as long as 11 micro-batches:
# 8 on the last stage, and one on each of the 3 others.
#
# **Predict.** How many times as long does a step with 1F1B take now? (1 would mean: as long as before.)

# %%
my_factor = None

# %% tags=["nbval-ignore-output"]
slow = fastest_run(built["1F1B"], slowdowns={3: 1.5})
factor = slow.total / runs["1F1B"].total
print(f"{predicted(my_factor)}measured {factor:.2f}, by the formula {(8 * 1.5 + 3) / 11:.2f}")
pipeline_plots.schedule({"equal stages": runs["1F1B"], "stage 3 is slower": slow})

# %% tags=["claims"] jupyter={"source_hidden": true}
measure.expect(abs(factor - 15 / 11) < 0.03, "the slowest stage sets the pace")

# %% [markdown]
# The slowest stage sets the pace. If it is the last one, a step takes m times this stage's time for one micro-batch,
# plus the time of each other stage for one. So count the embedding and the output layer as layers when you divide a
# model. In Llama 3, the first and the last stage have one layer fewer (Grattafiori et al. 2024, §3.3.2).

# %% [markdown]
# ## The short version
#
# So far, the ranks slept. To train, a stage receives an input, computes, and sends its output. Later it receives the
# gradient of that output, computes, and sends the gradient of its input. The last stage divides each loss by m, because
# the gradients of m micro-batches add up. The `tag` of a message says what it is, 0 for an output and 1 for a gradient:
# with gloo, `recv` takes only messages with its own tag. In this function, a micro-batch is in flight while it is in
# `kept`:


# %%
# %%ranks
from torch import nn


def run_stage(layer, actions, inputs, targets):
    """Run a stage's actions. inputs and targets have one tensor per micro-batch."""
    is_first, is_last, kept, sent = rank == 0, rank == world_size - 1, {}, []
    for action in actions:
        index = action.micro_batch
        if action.kind == "F":
            x = inputs[index].clone()
            if not is_first:
                dist.recv(x, src=rank - 1, tag=0)
            y = layer(x.requires_grad_())
            if is_last:
                y = nn.functional.mse_loss(y, targets[index]) / len(inputs)
            else:
                sent.append(dist.isend(y.detach(), dst=rank + 1, tag=0))
            kept[index] = x, y
        else:
            x, y = kept.pop(index)
            gradient = None if is_last else torch.empty_like(y)
            if not is_last:
                dist.recv(gradient, src=rank + 1, tag=1)
            y.backward(gradient)
            if not is_first:
                sent.append(dist.isend(x.grad, dst=rank - 1, tag=1))
    for work in sent:
        work.wait()


# %% [markdown]
# Each rank has one layer of a small model. Are its gradients those of one process?


# %%
# %%ranks
import copy

torch.manual_seed(0)
whole = nn.Sequential(*(nn.Linear(32, 32) for _ in range(world_size)))
batch, goals = torch.randn(16, 32), torch.randn(16, 32)
nn.functional.mse_loss(whole(batch), goals).backward()


def is_right(schedule):
    layer = copy.deepcopy(whole[rank])
    run_stage(layer, schedule[rank], batch.chunk(8), goals.chunk(8))
    return torch.allclose(layer.weight.grad, whole[rank].weight.grad, atol=1e-6)


# %%
right = {name: ranks.run(lambda it: is_right(it), built[name]) for name in ("GPipe", "1F1B")}
print(right)

# %% tags=["claims"] jupyter={"source_hidden": true}
assert all(map(all, right.values()))

# %% [markdown]
# Both schedules are right on all four ranks. A stage that forgets to divide by m, or that clips its gradients by its
# own norm, raises no error. In the lab, you make both mistakes, and find out what exposes them.
#
# ### Found in the wild
#
# Who divides by m? In DeepSpeed's pipeline, every stage did. The last stage divided its gradients and sent them back,
# the stage before divided what had arrived once more, and so on. On the first of four stages, gradients were divided by
# m four times: with m = 8, they were 512 times too small. The test that now guards this switches clipping off, because
# clipping could hide the mistake (pull request 8154, 2026).

# %% [markdown]
# ## Two stages that both send first
#
# In 1F1B, a stage sends an output to the next stage while that stage sends a gradient back. What if both use `send`,
# which returns only when the message has been received, or when buffers can hold it? In the next cell, pairs of ranks
# try it with 4 MB. The cell gives up after ten seconds, and reports where each rank was.

# %% tags=["raises-exception"]
# %%ranks --timeout 10
neighbor = rank ^ 1
output, gradient = torch.ones(1 << 20), torch.empty(1 << 20)
dist.send(output, dst=neighbor)
dist.recv(gradient, src=neighbor)

# %% [markdown]
# Each rank waits for the other to receive. That is why `run_stage` uses `isend`, and waits only at the end. NCCL has a
# second trap: within a process group, it runs the messages between two ranks in launch order. So even an `isend` blocks
# the receive launched after it, and two stages that both send first can still deadlock. You can launch both directions
# in one `batch_isend_irecv`, let neighbors take turns, or use a group for each kind of message and direction, as the
# lab does.

# %% [markdown]
# ## When to split by depth
#
# A pipeline sends only the activations at the boundaries between stages, and their gradients. That is sbh elements per
# micro-batch in each direction, for b sequences of s tokens, and a width of h. Tensor parallelism needs four
# all-reduces of sbh elements per layer (chapter 13), and ZeRO-3 sends three times the parameters (chapter 09).
#
# **Predict.** Eight GPUs train a 70B model in bf16, on eight sequences of 4,096 tokens per step. The model has 80
# layers of width 8,192. How many GB does a GPU send in each of the three cases? In the pipeline, take a middle stage.

# %%
my_pipeline_gb, my_tensor_gb, my_zero3_gb = None, None, None

# %%
sbh_bytes = 2 * 8 * 4096 * 8192
sent_gb = {
    "pipeline": 2 * sbh_bytes / 1e9,
    "tensor": 4 * 80 * 2 * 7 / 8 * sbh_bytes / 1e9,
    "ZeRO-3": 3 * 7 / 8 * 2 * SHAPES["Llama-2 70B"].parameters / 1e9,
}
print(predicted((my_pipeline_gb, my_tensor_gb, my_zero3_gb), "{}, {} and {} GB", "\n"), end="")
tables.Table(["", "GB per GPU and step"], [[name, f"{gb:.1f}"] for name, gb in sent_gb.items()])

# %% [markdown]
# A pipeline sends about 300 times less than the others, so it is the choice for slow links, such as those between
# hosts. But someone has to balance its stages, and it needs many micro-batches: with eight sequences on eight stages,
# the bubble is 7/15 of the total time. ZeRO-3 needs neither, and the bytes that it sends do not grow with the batch:
# with enough tokens per GPU, its messages hide behind computation.

# %% [markdown]
# Can a pipeline's replicas use ZeRO? With ZeRO-2, a stage would reduce-scatter its gradients in every micro-batch. With
# ZeRO-3, it would also gather its weights up to 2m times per step. So pipelines are usually combined with ZeRO-1, and
# DeepSpeed's rejects the other two. Llama 3 sharded its gradients all the same (Grattafiori et al. 2024, §3.3.2).
#
# Large runs do use pipelines: MT-NLG had p = 35 (Smith et al. 2022), Llama 3 405B p = 16, interleaved (Grattafiori et
# al. 2024, §3.3.2), and DeepSeek-V3 p = 16 with DualPipe (DeepSeek-AI 2024, §3.2).

# %% [markdown]
# ## The production version
#
# In torch, `torch.distributed.pipelining` has the same parts: a `PipelineStage` holds a stage's layers, and a schedule
# class such as `Schedule1F1B` runs them. Like ours, it divides by m:

# %%
# %%ranks
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

stage = PipelineStage(copy.deepcopy(whole[rank]), rank, world_size, torch.device("cpu"))
torchs = Schedule1F1B(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
inputs = (batch,) if rank == 0 else ()
torchs.step(*inputs, target=goals if rank == world_size - 1 else None)
print(torch.allclose(stage.submod.weight.grad, whole[rank].weight.grad, atol=1e-6))

# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
assert torch.allclose(stage.submod.weight.grad, whole[rank].weight.grad, atol=1e-6)

# %% [markdown]
# | here | torch | Megatron-LM |
# |---|---|---|
# | the lab's `Pipeline(layers, …)` | `PipelineStage`, and a schedule's class | `--pipeline-model-parallel-size` |
# | `gpipe`, `one_f_one_b` | `ScheduleGPipe`, `Schedule1F1B` | 1F1B only |
# | `interleaved` | `ScheduleInterleaved1F1B` | `--num-layers-per-virtual-pipeline-stage` |
# | `zero_bubble` | `ScheduleInterleavedZeroBubble`, one stage per rank | in a fork, by its authors |
#
# With one stage per rank, torch's zero-bubble schedule has exactly our actions. For several chunks per stage, it also
# has `ScheduleLoopedBFS` (like GPipe), `ScheduleZBVZeroBubble` and `ScheduleDualPipeV`.

# %% [markdown]
# ## Recap
#
# Bubbles are fractions of the ideal time. Memory is in units of the activations that one stage keeps for one
# micro-batch. For interleaved stages, the formula counts the chunks in flight, and divides by v.
#
# | | bubble | memory: activations on stage s | wire: messages | overlap |
# |---|---|---|---|---|
# | one batch | p − 1 | m, at once | 2(p − 1) | none |
# | GPipe | (p − 1)/m | m | 2m(p − 1) | with the next micro-batch |
# | 1F1B | (p − 1)/m | p − s, at most m | 2m(p − 1) | as before |
# | interleaved | (p − 1)/(vm) | (2(p − s − 1) + (v − 1)p + 1)/v, at most m | 2m(pv − 1) | as before |
# | zero bubble | (p − 1)/(3m) † | at most p ‡ | 2m(p − 1) | as before |
#
# † If F, B and W take the same time. ‡ Until its `W`, a micro-batch keeps only the inputs of linear layers and the
# gradients of their outputs.
#
# **Terms**
#
# - **stage**: the layers that one rank computes: consecutive ones, or several chunks.
# - **bubble**: the time during which stages of a pipeline wait for each other.
# - **GPipe**: a schedule of all forwards and then all backwards.
# - **1F1B**: a schedule in which each stage, after some forwards, alternates between one backward and one forward.
# - **chunk of layers**: consecutive layers that a stage computes at a time. An interleaved stage has several.
# - **interleaved**: a schedule for stages with several chunks of layers each.
# - **zero-bubble**: a schedule that postpones the gradients of the weights to fill the bubble.
#
# ## Further reading
#
# - [On a real cluster](../docs/cluster.md): where stages lie, and what hides their messages.
# - Huang et al., [GPipe](https://arxiv.org/abs/1811.06965), 2019, §2.3: micro-batches and the bubble.
# - Narayanan et al., [Megatron-LM](https://arxiv.org/abs/2104.04473), 2021, §2.2: 1F1B and interleaved stages.
# - Qi et al., [Zero Bubble Pipeline Parallelism](https://arxiv.org/abs/2401.10241), 2023, §2: B and W.
# - [Pipeline Parallelism](https://docs.pytorch.org/docs/stable/distributed.pipelining.html) in PyTorch's documentation.

# %% [markdown]
# ## What is still wasted
#
# Each way of splitting has its place: tensor parallelism within a host, pipelines between hosts, and data parallelism
# on top of both. All of them compute every parameter for every token. Does a token need them all? In chapter 16, each
# token chooses, and the ranks have to find out how much they send each other. After that, in chapter 17, a compiler
# decides where every collective goes.

# %%
ranks.stop()
