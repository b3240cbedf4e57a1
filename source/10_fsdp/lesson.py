# ---
# jupyter:
#   course:
#     module: zero3
# ---

# %% [markdown]
# # 10 · FSDP
#
# **40–60 minutes.** After this lesson, you will be able to:
#
# - say which rows of a parameter a rank holds, and what that costs on the wire,
# - explain why frozen layers and fp8 are hard with a flat parameter, and easy without one,
# - follow a step of FSDP2 through its hooks, its streams and its last callback,
# - create a model that is never whole on any rank,
# - explain why a GPU needs more than 16Ψ/N bytes.
#
# You need units, the root and unsharding (chapter 09). Ψ is the number of parameters, and N that of ranks.

# %% [markdown]
# ## Where we are
#
# In chapter 09, you trained a GPT of which each rank keeps only a shard. PyTorch calls this **fully sharded data
# parallelism**, or **FSDP**. Its first version worked like yours, with a flat parameter for each unit. In 2023, people
# who fine-tuned large models with it ran into this error (PyTorch issue 104690):
#
# ```text
# ValueError: `FlatParameter` requires uniform `requires_grad`
# ```
#
# They had frozen a layer and trained a small correction beside it. But a flat parameter is *one* tensor, with one
# `requires_grad`, one dtype and one gradient. The design of FSDP2 names two more limits, fp8 and state dicts, and drops
# flat parameters (issue 114299). In this lesson, we take FSDP2 apart and build a small one.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks, tables
from shared.dryrun import peaks
from shared.plots import diagrams
from shared.predictions import predicted

ranks.start(world_size=4, detect_mismatch=False)

# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
# Imports, a GPT, and a training loop. You have seen most of it in chapter 09.
import zlib
from functools import partial

from torch import nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from shared import memory, wire
from shared.c10d import all_gather_single, reduce_scatter_single
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT

text = CharTokens()
config = GPTConfig(vocab_size=800, layers=6, width=128)
batch = [tokens.to(device) for tokens in text.windows(range(rank, 400, 100), length=32)]


# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
def mesh_of(n):
    """Return this rank's mesh of n ranks."""
    groups = torch.arange(world_size, device="cpu").view(-1, n)
    return DeviceMesh(device.type, groups, mesh_dim_names=("groups", "shards"))["shards"]


def new_model():
    return TinyGPT(config).to(device)


def in_fsdp2(model, **options):
    mesh = mesh_of(world_size)
    for block in dict.fromkeys(model.blocks):  # each once, also one that is called twice
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def checkpointed(model):
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def trained(model, shards=None):
    """Train for three steps. Returns the last loss, and the ledger and the memory of the last step."""
    optimizer = torch.optim.AdamW(shards or model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        with wire.ledger() as log, memory.peak(model, optimizer) as peak:
            loss = model(*batch)
            loss.backward()
            optimizer.step()
    return loss.item(), log, peak.samples


# %% [markdown]
# ## Sharding each parameter by its rows
#
# If one flat tensor is the problem, shard each parameter by itself. FSDP2 cuts it along its first dimension with
# `torch.chunk`, and describes the result as a **DTensor**: a tensor of which each rank holds a shard, with a
# description of the whole. Its *placement* is `Shard(0)`.
#
# Compare that with the flat parameter at the top of the picture.

# %%
diagrams.per_parameter()

# %% [markdown]
# A flat parameter needs no copies: the parameters are slices of what the all-gather returns. FSDP2's shards do not lie
# side by side, and an all-gather for each of them would pay the latency α each time. So FSDP2 copies. Before an
# all-gather, *copy-in* puts a rank's shards into one slot of a buffer. After it, *copy-out* collects each parameter
# from the slots of all ranks. Gradients are copied in, too, before each reduce-scatter.
#
# Here is a layer that FSDP1 rejects by default, in the style of LoRA (Hu et al. 2021): frozen weights, and a trained
# correction through a bottleneck. With `use_orig_params=True`, FSDP1 accepts it, but then the whole flat parameter has
# a gradient, frozen elements included (PyTorch issue 91167). We shard the layer over two ranks, and over four.


# %%
# %%ranks
class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


# %% [markdown]
# Look at what rank 3 of 4 holds:


# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
def shards_over(n):
    """Shard the layer over groups of n ranks. Returns the placement and the shapes of each parameter."""
    named = fully_shard(LoRA().to(device), mesh=mesh_of(n)).named_parameters()
    return {name: (*p.placements, list(p.shape), list(p.to_local().shape)) for name, p in named}


found = {n: shards_over(n) for n in (2, 4)}

# %% tags=["claims"] jupyter={"source_hidden": true}
found = ranks.pull("found")
assert all(shard[-1][0] == 0 for shard in found[3][4].values())
columns = [(r, n) for n in (2, 4) for r in range(n)]
rows = [
    [name, f"Shard({placement.dim})", str(shape), *(str(found[r][n][name][-1]) for r, n in columns)]
    for name, (placement, shape, _) in found[0][4].items()
]
tables.Table(["", "placement", "shape", *(f"rank {r} of {n}" for r, n in columns)], rows)

# %% [markdown]
# Rank 3 holds nothing of any parameter! `torch.chunk` rounds up: six rows over four ranks are two rows each, and after
# three ranks, none are left. Rank 3 has nothing to update, but it takes part in every collective, with a slot of
# padding.
#
# ## What a unit sends
#
# **Predict.** The layer has 82 parameters, and a flat parameter would have 84 elements. Sharded over four ranks by
# rows, how many elements does FSDP2's all-gather carry? Count the padding, too.

# %%
my_elements = None

# %%
# %%ranks
layer = fully_shard(LoRA().to(device), mesh=mesh_of(4))
with wire.ledger() as log:
    layer(torch.ones(1, 8, device=device)).sum().backward()

# %% tags=["claims"] jupyter={"source_hidden": true}
print(predicted(my_elements, "{} elements", "\n"), end="")
for entry in ranks.pull("log")[0].entries:
    print(f"{entry.op}: {entry.elements} elements")
assert [entry.elements for entry in ranks.pull("log")[0].entries] == [120, 48]

# %% [markdown]
# One all-gather carries all four parameters and 38 elements of padding. One reduce-scatter carries the 28 gradients of
# `down` and `up`, and 20 elements of padding. The frozen weights are all-gathered like the others, but they send no
# gradients, and nobody had to ask for that.

# %% [markdown]
# The `ValueError` of 2023 is gone, and so are the other two limits:
#
# - **Frozen parameters and LoRA.** Each parameter has its own `requires_grad`. `post_backward` reduces those that have
#   a gradient (`_fsdp_param_group.py` in `torch/distributed/fsdp/_fully_shard/`).
# - **fp8.** An fp8 weight needs a dtype and a scale of its own, but a flat tensor has one dtype. Here, a weight can be
#   a tensor of its own class: `fsdp_pre_all_gather` decides what is sent, and `fsdp_post_all_gather` rebuilds the
#   weight (`_fsdp_param.py`).
# - **State dicts.** A shard of rows has a name and a position in the whole. So `state_dict()` is already a **sharded
#   state dict**, in which each rank has only its shards. A **full state dict**, with every parameter in full, needs
#   room for the model. In the lab, you build a sharded one.
#
# The price is padding. Most weights have more rows than there are ranks. But on 16,384 ranks, a weight with 4,096 rows
# is padded to 16,384, so its all-gather sends four times its size. A flat parameter is padded by at most N − 1
# elements.

# %% [markdown]
# ## When is backward done with a unit?
#
# Chapter 09 counts the gradients of a unit until it has them all. If a rank does not use one of the unit's experts,
# the count is never complete.
#
# Autograd knows better. It goes through a unit from its outputs to its inputs, so the gradients of the *inputs* come
# last. As FSDP2 does in `RegisterPostBackwardFunction`, we pass the inputs through a function that changes nothing, but
# whose backward calls our own code.


# %%
# %%ranks
class AfterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, post_backward, *inputs):
        ctx.post_backward = post_backward
        return inputs

    @staticmethod
    def backward(ctx, *gradients):
        ctx.post_backward()
        return None, *gradients


# %% [markdown]
# That leaves the root. Its inputs are tokens, which need no gradient, so its `AfterBackward` never runs. But autograd
# also knows when backward is over: a function that a hook passes to `queue_callback` runs after the last gradient.
#
# **Predict.** A unit computes `output = x * weight`, and its input `x` passes through `AfterBackward`. In which order
# does the next cell note its four events? Write their letters, such as `"abcd"`.

# %%
my_order = None

# %%
# %%ranks
events = []
x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
(inside,) = AfterBackward.apply(lambda: events.append("a: backward is done with the unit"), x)
weight.register_hook(lambda _: events.append("b: the gradient of the weight is complete"))
output = inside * weight
output.register_hook(lambda _: events.append("c: the gradient of the output is complete"))
queue_callback = Variable._execution_engine.queue_callback
output.register_hook(lambda _: queue_callback(lambda: events.append("d: backward is over")))
output.sum().backward()

# %% tags=["claims"] jupyter={"source_hidden": true}
events = ranks.pull("events")[0]
order = "".join(event[0] for event in events)
print(f"{predicted(my_order)}the order is {order}", *events, sep="\n")
assert order == "cbad"

# %% [markdown]
# Backward starts at the output (c). The multiplication then yields two gradients at once. Autograd always stores a
# parameter's gradient first (b), and only then goes on to `AfterBackward` (a). The callback comes last (d).
#
# FSDP2 uses three of these events. In the drawing below, c calls hook 3, a calls hook 4, and d calls hook 5. Follow the
# root: its hook 4 never runs, so hook 5 does the work.

# %%
diagrams.fsdp_hooks()

# %% [markdown]
# FSDP2 queues hook 5 in the first `pre_backward` of each `backward()` (`_fsdp_state.py`), so it needs no
# `finish_gradient_sync()`. The lab's `ZeRO3` keeps that call, and uses the callback only to look for mistakes
# (`shared/sharded/backward.py`). The catch: if the loss of one rank does not depend on the model's output, this rank
# runs no hooks and launches no collectives, and the others hang.

# %% [markdown]
# ## The short version
#
# Put the hooks together, and you have a small FSDP2. An `FSDPParamGroup` of FSDP2 is our `SmallUnit`, with the same
# hooks. Find copy-in and copy-out in `unshard`. They stay this short because all rows of our GPT divide by 4. In the
# lab, you write them for rows that do not.


# %%
# %%ranks
def in_slots(tensor):  # the rows as [world_size, elements of a shard]
    assert len(tensor) % world_size == 0, "this small version cannot pad"
    return tensor.reshape(world_size, -1)


class SmallUnit:
    def __init__(self, module, parameters, is_root=False):
        self.is_root, self.own = is_root, {}  # this rank's shard of each parameter
        for p in parameters:
            self.own[p] = nn.Parameter(in_slots(p.detach())[rank].clone(), p.requires_grad)
        self.reshard()
        module.register_forward_pre_hook(self.pre_forward)
        module.register_forward_hook(self.post_forward)

    def unshard(self):
        if not self.is_unsharded:
            shards = [shard.detach() for shard in self.own.values()]
            slot = torch.cat(shards)  # copy-in
            buffer = slot.new_empty(world_size * len(slot))
            all_gather_single(buffer, slot)
            slots = buffer.view(world_size, -1).split([len(shard) for shard in shards], dim=1)
            for p, slots_of_p in zip(self.own, slots, strict=True):  # copy-out
                p.untyped_storage().resize_(p.nbytes)
                p.data.copy_(slots_of_p.reshape(p.shape))
            self.is_unsharded = True

    def reshard(self):
        for p in self.own:
            p.untyped_storage().resize_(0)
        self.is_unsharded = False


# %%
# %%ranks
class SmallUnit(SmallUnit):
    def reduce_gradients(self):
        reduced = [p for p in self.own if p.grad is not None]
        if not reduced:
            return
        slots = torch.cat([in_slots(p.grad) for p in reduced], dim=1)
        sums = torch.empty_like(slots[0])
        reduce_scatter_single(sums, slots.flatten())
        for p, own_sum in zip(
            reduced, sums.split([len(self.own[p]) for p in reduced]), strict=True
        ):
            self.own[p].grad, p.grad = own_sum / world_size, None

    def pre_forward(self, _module, inputs):
        self.unshard()
        if inputs[0].requires_grad:
            return AfterBackward.apply(self.post_backward, *inputs)

    def post_forward(self, _module, _inputs, output):
        output.register_hook(self.pre_backward)
        if not self.is_root:
            self.reshard()

    def pre_backward(self, _gradient):
        if self.is_root:  # the first hook that backward reaches
            queue_callback(self.post_backward)
        self.unshard()

    def post_backward(self):
        self.reshard()
        self.reduce_gradients()


# %%
# %%ranks
def in_small_units(model):  # returns this rank's shards, for the optimizer
    units = [SmallUnit(block, block.parameters()) for block in model.blocks]
    inside = {p for unit in units for p in unit.own}
    rest = [p for p in model.parameters() if p not in inside]
    units.append(SmallUnit(model, rest, is_root=True))
    return [shard for unit in units for shard in unit.own.values()]


# %% [markdown]
# Is this FSDP2? We train chapter 09's GPT with both, and compare the third step. The third row checkpoints FSDP2's
# blocks (chapter 06). The fourth sends its parameters in bf16, and computes in bf16.

# %%
# %%ranks
small, in_bf16 = new_model(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
runs = {
    "ours": trained(small, in_small_units(small)),
    "FSDP2": trained(in_fsdp2(new_model())),
    "FSDP2, checkpointed": trained(in_fsdp2(checkpointed(new_model()))),
    "FSDP2, bf16": trained(in_fsdp2(new_model(), mp_policy=in_bf16)),
}

# %% tags=["claims"] jupyter={"source_hidden": true}
runs, rows = ranks.pull("runs")[0], []
for name, (loss, log, _) in runs.items():
    counts = [str(log.ops[op]) for op in ("all_gather", "reduce_scatter")]
    rows.append([name, *counts, f"{log.sent_bytes / 1e6:.2f}", f"{loss:.3f}"])
ours, theirs, again, low = runs.values()
assert abs(ours[0] - theirs[0]) < 1e-4
assert ours[1].ops == theirs[1].ops == {"all_gather": 13, "reduce_scatter": 7}
elements = [sorted((e.op, e.elements) for e in log.entries) for _, log, _ in (ours, theirs)]
assert elements[0] == elements[1]
assert again[1].sent_bytes == theirs[1].sent_bytes == 2 * low[1].sent_bytes
tables.Table(["", "all-gathers", "reduce-scatters", "sent, MB", "loss"], rows, "rank 0, one step")

# %% [markdown]
# In the first two rows, the losses, the bytes and the collectives are the same: six blocks are all-gathered twice and
# the root once, and seven units are reduced. In both, the optimizer is built after sharding, because sharding makes new
# parameters. And neither broadcasts: every rank must build the same values.
#
# - **Checkpointing** sends nothing more. A block's forward runs again while backward has the block unsharded.
# - **bf16** halves the bytes. The shards stay in fp32, as master weights (chapter 06), and copy-in rounds them.
#   Gradients are added up in bf16, too, unless you set `reduce_dtype`.
# - **Unused parameters** remain a trap. FSDP2 reduces the gradients that a rank *has*, as we do. If ranks use different
#   experts, the sizes of their reduce-scatters differ, or worse, agree, and gradients of different experts are added
#   up. `set_reduce_scatter_unused_params(True)` sends zeros instead. A unit that a rank does not call still hangs the
#   others.

# %% [markdown]
# ## Streams, and events instead of waits
#
# One thing is missing: our version hides nothing, because `unshard()` waits for its all-gather. Chapter 09 launched the
# next all-gather early, in forward and in backward. By default, FSDP2 does that only in backward. Why?
#
# In forward, it does not have to. Your Python program computes nothing on a GPU: it queues kernels, and is usually
# ahead of the GPU. FSDP2 gives copy-in and all-gather **streams** of their own: queues of the same GPU that run side by
# side. So the program simply reaches the next unit early, and queues its all-gather while the GPU still computes.
#
# In backward, being early is not enough. Each unit also queues a reduce-scatter, and in the same process group, an
# all-gather that is queued later has to wait for it. So FSDP2 queues the next all-gather first.
#
# For this, the program must never wait for the GPU. FSDP1's program did, to limit how many units were all-gathered
# ahead. FSDP2 sets that limit with **events**: marks in one stream for which another one waits.
# `stream.wait_event(event)` returns at once.
#
# In the upper half of the drawing, follow unit 1 from copy-in to computation, and in backward on to its reduce-scatter.

# %%
diagrams.streams()

# %% [markdown]
# - The copy-in and all-gather streams run ahead as far as events allow. In forward, unit 0 must be copied out before
#   unit 2 is copied in, so at most two all-gather buffers exist. In backward, the limit is one (`wait_for_unshard`).
# - The compute stream is the one that your model uses anyway. It waits for the all-gather's event, copies the unit out,
#   and computes. After the unit's backward, it copies the gradients into a buffer.
# - The reduce-scatter stream waits for that copy. By default, only one such buffer may be in flight, so before the
#   compute stream fills the next one, it waits for the previous unit's reduce-scatter (`post_backward`). You build the
#   same rule in lab 10. For the last reduce-scatter, the compute stream waits in the callback.
#
# Unit 2 is all-gathered twice in a row: FSDP2 reshards it after forward, and needs it again at once. To avoid that,
# give the last unit `reshard_after_forward=False` (chapter 09).
#
# Two waits are not drawn: copy-in waits for an earlier copy-out, and the compute stream for the previous unit's
# reduce-scatter. Although their streams differ, all-gathers and reduce-scatters take turns, because by default they
# share one process group.
#
# The program never stops, unless your code makes it wait: `loss.item()`, printing a tensor and indexing with a mask all
# wait for the GPU, and meanwhile, nothing is queued.
#
# And here, with gloo? A CPU has no streams. FSDP2 runs the same lines with this class:

# %% tags=["nbval-ignore-output"]
import inspect

from torch import cpu

print(inspect.getsource(cpu.Stream))

# %% tags=["claims"] jupyter={"source_hidden": true}
assert inspect.getsource(cpu.Stream.wait_stream).split()[-1] == "pass"
assert len(theirs[1].entries) == 20 and not any(entry.is_async for entry in theirs[1].entries)

# %% [markdown]
# Every method does nothing. The collectives are called with `async_op=False`: on a GPU, that only queues them, but with
# gloo, each of the 20 returned when it was complete, as in the lower half of the drawing. FSDP2 still prefetches in
# backward. That hides nothing here, but it takes memory:

# %% tags=["claims"] jupyter={"source_hidden": true}
held, block, root = [sample.held for sample in theirs[2]], 197_120, 110_848
parameters_bytes = max(each.parameters_bytes for each in held)
buffers_bytes = max(each.buckets_bytes for each in held)
print(f"parameters: {parameters_bytes / 1e6:.2f} MB at most: shards, root and one block")
print(f"buffers of collectives: {buffers_bytes / 1e6:.2f} MB at most: two blocks")
assert parameters_bytes == 4 * ((6 * block + root) / 4 + root + block)
assert buffers_bytes == 4 * 2 * block

# %% [markdown]
# Here is that step, operator by operator. The buffers of collectives are drawn as *buckets*. Look for them in forward:

# %%
plots.memory_over_step(theirs[2])

# %% [markdown]
# Chapter 09 counted two blocks of parameters with prefetching, and here there is only one. That looks better than it
# is, because the second block is counted as a bucket: until copy-out, a prefetched block lies in the all-gather's
# buffer. In backward, a buffer of gradients lies beside it. In forward, nothing is prefetched, yet two all-gather
# buffers exist for a moment, because FSDP2 keeps the previous unit's buffer until it waits for the next all-gather.

# %% [markdown]
# ## A unit that is called twice
#
# ALBERT uses one block for all of its layers (arXiv 1909.11942). What does such sharing cost in FSDP2? We call block 0
# once more, at the end of our GPT.
#
# **Predict.** How many all-gathers does a step have then, instead of 13? And how many with
# `reshard_after_forward=False`, which needs 7 without sharing?

# %%
my_counts = (None, None)


# %%
# %%ranks
def with_block_0_twice(**options):
    model = new_model()
    model.blocks.append(model.blocks[0])
    return trained(in_fsdp2(model, **options))[1].ops


ops = [with_block_0_twice(), with_block_0_twice(reshard_after_forward=False)]

# %% tags=["claims"] jupyter={"source_hidden": true}
ops = ranks.pull("ops")[0]
counts = [each["all_gather"] for each in ops]
print(f"{predicted(my_counts, '{} and {}')}counted {counts[0]} and {counts[1]} all-gathers,")
print(f"and {ops[0]['reduce_scatter']} reduce-scatters in both cases")
assert counts == [15, 8] and all(each["reduce_scatter"] == 7 for each in ops)

# %% [markdown]
# Each call costs an all-gather in forward and another one in backward, as if it were a block of its own: a unit that is
# called twelve times is all-gathered 24 times. Sharing saves memory, and all reduce-scatters but one.
#
# The 8 is the surprise. `reshard_after_forward=False` keeps a block unsharded until its backward. But `post_backward`
# reshards after *each* pass, so the second pass all-gathers again. The gradients are reduced once, because autograd
# completes them only in the last pass.
#
# A **tied parameter**, which several modules use, has to lie in one unit. Since torch 2.13, FSDP2 raises an error if it
# does not. Our GPT's token embedding is also its output layer, and both are in the root.

# %% [markdown]
# ## Creating a model that is never whole
#
# So far, every rank has created the whole model first. A model that needs 100 GPUs cannot be created like that.
# PyTorch's answer is the **meta device**, whose tensors have a shape and a dtype, but no memory and no values. With
# **deferred initialization**, we build and shard the model there. Afterwards, we **materialize** the shards: we give
# them memory and values. In the picture, watch the column on the right:

# %%
diagrams.deferred_init()

# %% [markdown]
# Which values? They should not depend on N, or you could not repeat an experiment on a larger cluster. But on GPUs,
# what torch's random operators draw for a DTensor does depend on N (PyTorch issue 168058). So each parameter gets a
# seed from its *name*. Every rank draws the parameter in full, and keeps its own rows:


# %%
# %%ranks
def drawn(name, shape):
    value = torch.full(shape, float(name.endswith("weight")), device=device)  # of a LayerNorm
    if len(shape) > 1:
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        nn.init.normal_(value, std=0.02, generator=generator)
    return value


@torch.no_grad()
def never_whole():
    with torch.device("meta"):
        model = in_fsdp2(TinyGPT(config))
    model.to_empty(device=device)  # memory for the shards alone
    for name, p in model.named_parameters():
        own = p.to_local()
        rows = -(-p.shape[0] // world_size)
        own.copy_(drawn(name, p.shape)[rows * rank :][: len(own)])


# %% [markdown]
# **Predict.** What is the most memory that a rank needs for this, as a multiple of Ψ elements? 1 means as much as the
# whole model. The largest parameter, the token embedding, has 8% of Ψ.

# %%
my_multiple = None


# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
def peak_bytes_of(create):
    # The empty tensor tells memory.peak which device to watch.
    with memory.peak(extra={"parameters": [torch.empty(0, device=device)]}) as peak:
        create()
    return peak.peak_bytes


psi = sum(p.numel() for p in new_model().parameters())
multiples = [peak_bytes_of(create) / (4 * psi) for create in (new_model, never_whole)]

# %% tags=["claims"] jupyter={"source_hidden": true}
whole, deferred = ranks.pull("multiples")[0]
print(f"{predicted(my_multiple)}measured {deferred:.2f}; with the whole model first, {whole:.2f}")
assert 0.32 < deferred < 0.35 and 1 <= whole < 1.1

# %% [markdown]
# The shards take a quarter, and the embedding 8% while it is drawn. With the whole model first, the peak is 1.08,
# because `TinyGPT` creates an output layer before it ties it to the embedding: another 8%. But in `never_whole`, every
# rank draws all parameters, and throws away three quarters. In the lab's optional exercise, a rank draws only the
# parameters that lie in its shard. That needs flat parameters: with shards of rows, nearly every rank has some of every
# parameter.

# %% [markdown]
# ## 16Ψ/N is not the peak
#
# If FSDP needed only 16Ψ/N bytes per rank, any model would fit on enough ranks. We have taken rank 0 through a step of
# `ZeRO3`, the wrapper of lab 10, on the meta device, with 2,048 tokens, mixed precision and checkpointed layers, and
# counted the bytes. Compare the formula with the last column:

# %%
models = [("llama-70b", 8), ("llama-70b", 64), ("llama-70b", 1024), ("llama-3-405b", 16_384)]
peaks.table("zero3", models)

# %% [markdown]
# On 1,024 GPUs, the shards are small, and what remains does *not* shrink with N: the root, two unsharded layers, their
# gradients, and activations. Each row shows the moment of its own peak. With N = 1,024, the peak comes early in
# backward, when all activations are still there; with N = 8 late, when most gradients have arrived.
#
# Llama 3 still needs 54.5 GB, although 16Ψ/N is only 0.4 GB:
#
# - 25.5 GB: two layers of 6.4 GB each, and their gradients,
# - 16.8 GB: the embedding and the output layer, which our root keeps unsharded, and their gradients,
# - 9.9 GB: activations,
# - 1.7 GB: the gradient of one MLP matrix, before it is packed into its bucket,
# - 0.6 GB: shards and temporary tensors.
#
# torchtitan makes units of the embedding and the output layer, so neither stays unsharded all through backward. Meta
# also split the layers (Llama 3 paper, Table 4).

# %% [markdown]
# ## Recap
#
# Three rules worth keeping:
#
# - **⌈rows/N⌉** rows of a parameter are on each rank, until none are left. An all-gather carries N times as many.
# - **2 and 1**: all-gathers and reduce-scatters per unit and step, but 1 and 1 for the root. Each further call of a
#   unit adds two all-gathers.
# - **Ψ/N + the largest parameter** is what a rank needs to create a model. Training takes 16Ψ/N, *plus* the root, two
#   units with their gradients, and activations.
#
# **Terms**
#
# - **FSDP**: fully sharded data parallelism, PyTorch's name for ZeRO stage 3.
# - **DTensor**: torch's tensor of which each rank holds a shard, together with a description of the whole.
# - **stream**: a queue of work on a GPU. Work in different streams can run at the same time.
# - **event**: a mark in a stream, for which another stream can wait without stopping the program.
# - **tied parameter**: a parameter that several modules of a model use.
# - **meta device**: a device on which tensors have shapes and dtypes, but no memory and no values.
# - **deferred initialization**: building and sharding a model on the meta device, and materializing only the shards.
# - **materialize**: to give a tensor on the meta device memory and values.
# - **full state dict**: a state dict that holds every parameter in full.
# - **sharded state dict**: a state dict in which each rank has only its shards, with their positions in the whole.

# %% [markdown]
# ## Further reading
#
# - `_fsdp_param_group.py` in PyTorch's source: read `unshard` to `post_backward`.
# - [Per-Parameter-Sharding FSDP](https://github.com/pytorch/pytorch/issues/114299): why the flat parameter had to go.
# - [Getting Started with FSDP2](https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html): how to use it.
# - [On a real cluster](../docs/cluster.md): random values, pretrained weights and skipped parameters.

# %% [markdown]
# ## What is still wasted
#
# FSDP cannot do three things:
#
# - **Make one layer smaller.** A rank needs room for a full unit and the activations of a sequence. Tensor parallelism
#   splits the layer itself (chapter 13).
# - **Keep the batch small.** Each rank brings its own tokens, so 1,024 ranks need a large batch.
# - **Send less without more memory.** By default, each micro-batch sends the parameters twice and the gradients once.
#   Chapter 11 chooses between wrappers by such numbers.
#
# Now do lab 10. There you shard parameters whose rows do not divide by the ranks, and build `ZeRO3`, with flat
# parameters, for models that are less tame than ours. The next cell stops the ranks.

# %%
ranks.stop()
