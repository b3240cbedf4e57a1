# ---
# jupyter:
#   course:
#     module: collectives
#     minutes: 25
# ---

# %% [markdown]
# # 01 · Collectives by hand
#
# **25 minutes.** You will be able to
#
# - build broadcast, reduce, reduce-scatter, all-gather and all-reduce from `send` and `recv`,
# - say how many bytes each rank sends in them, for any number of ranks, and show it in the ledger,
# - fit what a message and a byte cost on your machine, and predict times that you have not measured,
# - say when a ring beats a tree, and why a ring of blocking sends hangs.
#
# You need chapter 00: ranks, `send` and `recv`, the doctor.

# %% [markdown]
# ## What is wasted
#
# Chapter 00 ended with a sum that rank 0 makes for everyone. It has two halves. All tensors are added up at one rank,
# the *root*: a **reduce**. Then the root hands the sum out: a **broadcast**. You wrote the second in lab 00.

# %% tags=["nbval-ignore-output"]
from shared import formulas, ranks, tables, widgets
from shared.plots import costs as cost_plots

ranks.start(world_size=4, detect_mismatch=False)


# %%
# %%ranks
from shared import wire
from solutions.first_collectives import broadcast_by_hand


def reduce_to(tensor, root):
    """Add up tensor over the ranks; root gets the sum, in place."""
    if rank != root:
        dist.send(tensor, dst=root)
        return
    arrived = torch.empty_like(tensor)
    for other in range(world_size):
        if other != root:
            dist.recv(arrived, src=other)
            tensor += arrived


def star_all_reduce(tensor):
    reduce_to(tensor, root=0)
    broadcast_by_hand(tensor, src=0)


# %% [markdown]
# A tensor of 4.8 MB, summed. What does the ledger of each rank say?

# %%
# %%ranks
tensor = torch.full((1_200_000,), rank + 1.0, device=device)
with wire.ledger() as log:
    star_all_reduce(tensor)
print(log.summary())

# %% [markdown]
# Rank 0 sends three tensors, the others one each: six in all. While rank 0 works, the others wait.
#
# **Predict.** Let the four share these six equally. How many tensors does each of them send?

# %%
my_prediction = 0.0

# %% [markdown]
# ## Cut it up
#
# Cut the tensor into four chunks, A to D. Rank 0 looks after A, rank 1 after B, and so on. First each chunk is added
# up at its own rank: a **reduce-scatter**. Then each rank hands its sum to everyone: an **all-gather**.


# %%
# %%ranks
def cut(tensor):
    """→ world_size equal chunks, by name"""
    return dict(zip("ABCD", tensor.chunk(world_size), strict=False))


def reduce_scatter_in_turns(chunks):
    for root, name in enumerate(chunks):
        reduce_to(chunks[name], root)


def all_gather_in_turns(chunks):
    for src, name in enumerate(chunks):
        broadcast_by_hand(chunks[name], src)


# %% [markdown]
# To see who is in a sum, let rank 0 bring 1000 in each chunk, rank 1 0100, rank 2 0010 and rank 3 0001:


# %%
# %%ranks
def digits(chunks):
    return {name: f"{int(chunk[0]):0{world_size}d}" for name, chunk in chunks.items()}


chunks = cut(torch.full((4,), 10 ** (3 - rank), device=device))
reduce_scatter_in_turns(chunks)
print(digits(chunks))

# %% [markdown]
# Each rank has one complete chunk, its own. After the second half:

# %%
# %%ranks
all_gather_in_turns(chunks)
print(digits(chunks))

# %% [markdown]
# Is the work shared now? Back to the 4.8 MB:


# %%
# %%ranks
def all_reduce_in_turns(tensor):
    chunks = cut(tensor)
    reduce_scatter_in_turns(chunks)
    all_gather_in_turns(chunks)


def tensors_sent(all_reduce):
    """Sum 4.8 MB over the ranks. → how many tensors' bytes this rank sent"""
    tensor = torch.full((1_200_000,), rank + 1.0, device=device)
    with wire.ledger() as log:
        all_reduce(tensor)
    assert (tensor == sum(range(world_size + 1))).all()
    return log.sent_bytes / tensor.nbytes


sent = tensors_sent(all_reduce_in_turns)

# %%
print(f"predicted {my_prediction:g}, measured {ranks.pull('sent')}")

# %% [markdown]
# One and a half each: as many bytes as before, fairly shared. Not so the time. It takes 24 messages (4 chunks, 3
# messages in each half), and the loops send them one after the other: while rank 0 adds up A, the other chunks wait.

# %% [markdown]
# ## All at once: a ring
#
# A sum need not be made in one place. It can be made on its way. Let the ranks stand in a circle, each sending to its
# right neighbour. Chunk A starts as rank 1's part, comes to rank 2, which adds its own, then to rank 3, then to
# rank 0, where it is complete: that is its own rank. B starts one place further on, at the same time.
#
# **Predict.** With three ranks and chunks A, B and C, there are two steps. A must end at rank 0, B at rank 1, C at
# rank 2. Which chunk does rank 0 send first?

# %%
my_prediction = "?"

# %%
plan = ["CAB", "BCA"]  # in step 1 rank 0 sends C, rank 1 sends A, rank 2 sends B
print(f"predicted {my_prediction}, rank 0 sends {plan[0][0]}, and then {plan[1][0]}")

# %% [markdown]
# A rank sends next what it has just received. So each row of the plan is the one before, turned by one place. That
# makes a plan for any number of ranks:


# %%
# %%ranks
def turned(names, places):
    return names[-places:] + names[:-places]


def plans(size):
    """→ one for the reduce-scatter, one for the all-gather"""
    names, steps = "ABCD"[:size], range(size - 1)
    return [turned(names, step + 1) for step in steps], [turned(names, step) for step in steps]


print(plans(3), plans(4), sep="\n")

# %% [markdown]
# The way back, the all-gather, begins where the first half ended: each rank sends the chunk that it has completed, and
# what comes is copied, not added. `pass_right` is yours, from lab 00.


# %%
# %%ranks
from solutions.first_collectives import pass_right


def follow(plan, chunks, add, log):
    for sends in plan:
        sent, came = sends[rank], sends[rank - 1]
        arrived = pass_right(chunks[sent])
        chunks[came].copy_(arrived + chunks[came] if add else arrived)
        if log is not None:
            log.append({"sent": sent, "holds": digits(chunks)})


def ring_by_plan(tensor, log=None):
    chunks = cut(tensor)
    reduce_scatter_plan, all_gather_plan = plans(world_size)
    follow(reduce_scatter_plan, chunks, add=True, log=log)
    follow(all_gather_plan, chunks, add=False, log=log)


# %% [markdown]
# Run it on the four ranks, each bringing its digit, and keep the log:

# %%
# %%ranks
tensor = torch.full((4,), 10 ** (3 - rank), device=device)
log = [{"sent": None, "holds": digits(cut(tensor))}]
ring_by_plan(tensor, log)
print(tensor.tolist())

# %%
widgets.ring_stepper(ranks.pull("log"))

# %% [markdown]
# (In JupyterLab, run the cell: a slider takes you through the steps.) Follow row A from left to right. In every step
# every rank sends one chunk and receives another: nobody waits for a turn. After three steps the diagonal is complete;
# that was the reduce-scatter. Three more steps send the complete chunks on to all.
#
# ## How many bytes?
#
# The same plan carries tensors. There are 2(N−1) steps, each of one chunk, S/N bytes. So each rank sends
#
# $$2\,(N-1)\cdot\frac{S}{N} = \frac{2(N-1)}{N}\,S$$
#
# **Predict** what a rank sends when there are a thousand: 1, 2 or 1000 tensors? Then see 2, 3 and 4 in the ledger.

# %%
my_prediction = 0

# %%
rows = []
for size in (2, 3, 4):
    with ranks.world(size):
        star = ranks.run(lambda: tensors_sent(star_all_reduce))
        ring = ranks.run(lambda: tensors_sent(ring_by_plan))
    formula = formulas.all_reduce_sent_bytes(1, size)
    assert all(abs(sent - formula) < 1e-9 for sent in ring) and max(star) == size - 1
    rows.append([str(size), *(f"{each:.2f}" for each in (max(star), max(ring), formula))])
tables.Table(["N", "star: the busiest sends", "ring: each sends", "2(N−1)/N"], rows)

# %%
print(f"predicted {my_prediction}, formula {formulas.all_reduce_sent_bytes(1, 1000):.3f} tensors")

# %% [markdown]
# The ring's share hardly grows with N: never more than two tensors. Where ranks do the adding, no all-reduce can do
# with less from its busiest rank (Patarasuk and Yuan, 2009). NVIDIA's nccl-tests count in the same way, see their
# PERFORMANCE.md.

# %% [markdown]
# ## A ring that hangs
#
# `pass_right` sends and receives at the same time. In a course on the web, each rank of a ring sends first and then
# receives. The circle of chapter 00 hung because everybody *received* first, and nobody began. Here everybody begins.
# **Predict**: does it run, for one number of 4 bytes?

# %% tags=["raises-exception"]
# %%ranks
outgoing = torch.ones(1, device=device)
incoming = torch.empty(1, device=device)
dist.send(outgoing, dst=(rank + 1) % world_size)
dist.recv(incoming, src=(rank - 1) % world_size)

# %% [markdown]
# All four wait in `send`, for a `recv` on the next line of a rank that is waiting itself. Read the table as a circle:
# 0 → 1 → 2 → 3 → 0.
#
# | | is `send` done before the receiver has come? |
# |---|---|
# | gloo | no, not even for 4 bytes: you have just seen it |
# | NCCL | do not rely on it: the GPU runs the `recv` only after the `send` is complete |
# | MPI | small messages often are, large ones not: such a ring passes its test and hangs in the training |
#
# Two ways out work everywhere: **batch the send and the receive** (`batch_isend_irecv`, as in `pass_right`), or **let
# the ranks take turns**, so that some of them receive first. The lab asks you how. With gloo, you can also launch both
# (`isend`, `irecv`) and then wait. With NCCL, that can still hang: it runs the sends and receives of a rank one after
# the other, unless they come in one batch (NCCL's user guide, *Point-to-point communication*).

# %% [markdown]
# ## What if N does not divide the size?
#
# `pass_right` makes room for as much as it sends, so our chunks must be equally long. torch has two ways to cut:

# %%
import torch

for elements in (12, 10, 9):
    tensor = torch.arange(elements)
    by_split = [len(chunk) for chunk in tensor.tensor_split(4)]
    by_chunk = [len(chunk) for chunk in tensor.chunk(4)]
    print(f"{elements:3} elements: tensor_split {by_split}, chunk {by_chunk}")

# %% [markdown]
# Look at the last one: `chunk` gave three, and rank 3 has none. There are two cures. Either every rank works out how
# long each chunk is, which all can do from the tensor's size. Or the tensor is filled up with zeros until N divides
# it, as torch's own all-gather and reduce-scatter of one tensor want it. What does that cost?

# %%
for elements in (10, 1_000, 1_000_001):
    padding = -elements % 4
    print(f"{elements:>9,} elements: {padding} more, {100 * padding / elements:.2g} % of the bytes")

# %% [markdown]
# At most N − 1 elements: next to nothing for a large tensor, much for a tiny one.

# %% [markdown]
# ## How long does it take?
#
# Say that a message costs α seconds for being one, and β more for each byte. In a star all messages are rank 0's, one
# after the other. A ring has 2(N−1) steps of S/N bytes:
#
# $$T_\text{star} = 2(N-1)\,(\alpha + S\beta)$$
# $$T_\text{ring} = 2(N-1)\left(\alpha + \frac{S}{N}\beta\right)$$
#
# To know α and β, time ring steps of a few sizes.


# %%
# %%ranks
import time


def seconds(work, tensor):
    dist.barrier()
    began_s = time.perf_counter()
    work(tensor)
    tensor[0].item()  # a GPU still works when a call has returned
    return time.perf_counter() - began_s


def fastest_s(jobs, rounds=12):
    """Time jobs, by name, in turn: what disturbs one disturbs all. → the fastest of each"""
    for work, tensor in jobs.values():
        work(tensor)  # the first call also sets up
    times = [[seconds(*job) for job in jobs.values()] for _ in range(rounds)]
    return dict(zip(jobs, map(min, zip(*times, strict=True)), strict=True))


# %% [markdown]
# Steps are for the fit. Sums, of other sizes and made in three ways, are for the test of it.


# %%
# %%ranks
def five_steps(tensor):
    for _ in range(5):
        tensor = pass_right(tensor)


jobs = {}
for size in (64, 4_096, 16_384, 65_536, 262_144, 1_048_576, 4_194_304):
    jobs["five steps", size] = five_steps, torch.zeros(size // 4, device=device)
for size in (400, 40_000, 200_000, 800_000, 4_000_000, 12_000_000):
    tensor = torch.zeros(size // 4, device=device)
    jobs["our ring", size] = ring_by_plan, tensor
    jobs["torch", size] = dist.all_reduce, tensor
    jobs["star", size] = star_all_reduce, tensor
times_s = fastest_s(jobs)

# %% tags=["nbval-ignore-output"]
of_ranks = ranks.pull("times_s")


def last_rank_s(name):
    """→ {bytes: the time of the rank that needed longest}"""
    sizes = [size for job, size in of_ranks[0] if job == name]
    return {size: max(times_s[name, size] for times_s in of_ranks) for size in sizes}


step_s = {size: time_s / 5 for size, time_s in last_rank_s("five steps").items()}
for size, time_s in step_s.items():
    print(f"{size:>9,} bytes: {1e3 * time_s:.2f} ms")

# %% [markdown]
# The fit: least squares of (α + β · bytes) / measured − 1.


# %% tags=["nbval-ignore-output"]
def fit(times_s):
    """→ α, β"""
    sizes = torch.tensor(list(times_s), dtype=torch.float64)
    measured = torch.tensor(list(times_s.values()), dtype=torch.float64)
    columns = torch.stack([torch.ones_like(sizes), sizes], dim=1) / measured[:, None]
    return torch.linalg.lstsq(columns, torch.ones_like(columns[:, :1])).solution.flatten().tolist()


alpha_s, beta_s = fit(step_s)
print(f"α = {1e6 * alpha_s:.0f} µs, β = {1e9 * beta_s:.2f} ms per MB")
assert alpha_s > 0 and beta_s > 0
name, model = "a ring step", lambda size: alpha_s + beta_s * size
cost_plots.predicted_against_measured({name: model}, {name: step_s}, "bytes in a message")

# %% [markdown]
# Two numbers for seven sizes: flat while α is the larger part, rising with the bytes from there on.
#
# **Predict.** How many milliseconds does our ring take for 4 MB on four ranks? Put your α and β into the formula.

# %%
my_prediction_ms = 0.0

# %% tags=["nbval-ignore-output"]
measured_s = {name: last_rank_s(name) for name in ("our ring", "star", "torch")}
models = {
    "our ring": lambda size: formulas.ring_all_reduce_s(size, 4, alpha_s, beta_s),
    "star": lambda size: 2 * (4 - 1) * (alpha_s + beta_s * size),
}
measured_ms = 1e3 * measured_s["our ring"][4_000_000]
print(f"predicted {my_prediction_ms:.1f} ms, measured {measured_ms:.1f} ms")

off = sorted(time_s / models["our ring"](size) for size, time_s in measured_s["our ring"].items())
print(f"our ring, measured / predicted: from {off[0]:.1f} to {off[-1]:.1f}")
assert 1 / 3 < off[len(off) // 2] < 3
cost_plots.predicted_against_measured(models, measured_s, "bytes in the tensor")

# %% [markdown]
# The ring comes out near its line, though no all-reduce was in the fit; gloo's own, a ring too, is not far from it.
#
# **The star does not.** On the machine that made this page it took a third of the predicted time, and no longer than
# the ring. Why? Here four ranks share two cores and one memory. A ring step keeps all four busy at once, so α and β
# were measured on a busy machine; a star's message has it almost to itself. And in all, both move the same 2(N−1)·S
# bytes. The model speaks of ranks that have a link each, as GPUs and hosts do. There the busiest link sets the pace:
# rank 0's. Chapter 20 gives each rank such a link.

# %% [markdown]
# ## Ring or tree?
#
# A thousand ranks make a ring of 2 · 999 steps: 1998 α, however small the tensor. A **tree** needs fewer. Whoever has
# the tensor helps to spread it, so that in every round twice as many have it. A reduce is the same backwards. That is
# 2⌈log₂N⌉ messages in a row, each of the whole tensor:
#
# $$T_\text{tree} = 2\,\lceil\log_2 N\rceil\,(\alpha + S\beta)$$
#
# **Halving and doubling** has few messages *and* few bytes: ranks swap halves, then quarters, then eighths, adding up;
# then they gather the parts on the same way back (Thakur, Rabenseifner and Gropp, 2005). With your α and β, on more
# ranks than you have, predicted only:


# %% tags=["nbval-ignore-output"]
def priced(formula):
    return lambda size_bytes, world_size: formula(size_bytes, world_size, alpha_s, beta_s)


algorithms = {
    "ring": priced(formulas.ring_all_reduce_s),
    "tree": priced(formulas.tree_all_reduce_s),
    "halving and doubling": priced(formulas.halving_doubling_all_reduce_s),
}
cost_plots.all_reduce_costs(algorithms, world_sizes=[4, 64, 1024])

# %% [markdown]
# At the dotted line ring and tree change places. Left of it the tree wins, right of it the ring; and the more ranks,
# the further right. Halving and doubling is never worse than either, in this model. What the model does not see:
# its partners are up to half the cluster apart, and their messages meet on the same links, while a ring's go to a
# neighbour. And it wants a power of two.

# %% [markdown]
# ## The production version
#
# torch has all five. Two of them got new names in torch 2.13:


# %%
# %%ranks
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

tensor = torch.full((4,), 10 ** (3 - rank), device=device)
shard, gathered = torch.empty_like(tensor[:1]), torch.empty_like(tensor)
with wire.ledger() as log:
    reduce_scatter(shard, tensor)
    all_gather(gathered, shard)
    dist.all_reduce(tensor)
    dist.reduce(tensor, dst=0)
    dist.broadcast(tensor, src=0)
print(shard.tolist(), gathered.tolist())

# %%
ranks.pull("log")[0].table(times=False)

# %% [markdown]
# The ledger's *must send* is the ring's share. For `reduce` and `broadcast` the ring is cut: its last rank, here
# rank 0 in the reduce, has nothing to send.
#
# What does the backend really send? `carried_bytes` is what the network interface counted meanwhile: all ranks, and
# everything else on this machine. **Predict** how it compares with what all ranks must send, for gloo's
# reduce-scatter of 16 MB: the same (1), half of it (0.5), twice (2)?

# %%
my_prediction = 0.0


# %%
# %%ranks
def carried_over_must_send(collective, *tensors):
    with wire.ledger() as log:
        dist.barrier()  # nobody sends before all ledgers are open
        collective(*tensors)
        dist.barrier()
    if log.carried_bytes is None or dist.get_backend() != "gloo":
        return float("nan")  # NCCL goes other ways
    return log.carried_bytes / (world_size * log.sent_bytes)


# %%
# %%ranks
tensor = torch.zeros(4_000_000, device=device)
shard = torch.zeros(4_000_000 // world_size, device=device)
calls = {
    "all_reduce": (dist.all_reduce, tensor),
    "reduce_scatter": (reduce_scatter, shard, tensor),
    "all_gather": (all_gather, tensor, shard),
}
ratios = {name: [carried_over_must_send(*call) for _ in range(5)] for name, call in calls.items()}

# %% tags=["nbval-ignore-output"]
least = {name: min(tries) for name, tries in ranks.pull("ratios")[0].items()}
print(f"predicted {my_prediction:g}, measured {least['reduce_scatter']:.1f}")
for name, ratio in least.items():
    print(f"{name:15} carried / must send = {ratio:.1f}")
assert not (least["reduce_scatter"] < 1.7 or least["all_reduce"] > 1.5)

# %% [markdown]
# gloo's reduce-scatter **is** an all-reduce on the wire: every rank gets the whole sum and throws three quarters of
# it away. So with gloo a reduce-scatter saves no bytes, unless you write it yourself. Yours in the lab will.
#
# Where else ours differs from NCCL's:
#
# - it cuts chunks into slices, so that a rank sends on the first while it receives the second; ours waits for the end
#   of each step,
# - it has rings and trees, and chooses by size and by how the GPUs are wired,
# - `async_op=True` gives back a handle at once, to wait on later: chapter 04 lives from that.

# %% [markdown]
# ## Recap
#
# N ranks, a tensor X of S bytes on each, ΣX their sum.
#
# | | a rank has: before → after | sent per rank | time |
# |---|---|---|---|
# | broadcast, star | the root X → all X | the root (N−1)S | (N−1)(α + Sβ) |
# | broadcast, tree | | at most ⌈log₂N⌉S | ⌈log₂N⌉(α + Sβ) |
# | reduce, tree | its X → the root ΣX | S, the root nothing | ⌈log₂N⌉(α + Sβ) |
# | reduce-scatter, ring | its X → its chunk of ΣX | (N−1)/N·S | (N−1)(α + S/N·β) |
# | all-gather, ring | its chunk → all chunks | (N−1)/N·S | (N−1)(α + S/N·β) |
# | all-reduce, star | its X → ΣX | rank 0 (N−1)S, others S | 2(N−1)(α + Sβ) |
# | all-reduce, tree | | at most ⌈log₂N⌉S | 2⌈log₂N⌉(α + Sβ) |
# | all-reduce, ring | | 2(N−1)/N·S | 2(N−1)(α + S/N·β) |
#
# An all-reduce is a reduce-scatter and an all-gather. Remember that: ZeRO (chapters 07 to 09) is what you get when you
# do something between the two.

# %% [markdown]
# ## What is still wasted
#
# **Messages.** The small GPT of chapter 02 has 20 gradients, 0.44 MB together. Summed one by one, or as one tensor?

# %% tags=["nbval-ignore-output"]
one_by_one_s = 20 * formulas.ring_all_reduce_s(440_000 / 20, 4, alpha_s, beta_s)
together_s = formulas.ring_all_reduce_s(440_000, 4, alpha_s, beta_s)
print(f"predicted: one by one {1e3 * one_by_one_s:.0f} ms, together {1e3 * together_s:.0f} ms")
assert one_by_one_s > together_s

# %% [markdown]
# The same bytes; all the rest is α. Chapter 03 sends them together.
#
# **Waiting.** Nobody computes while the ring turns. Chapter 04 does both at once.
#
# But first those gradients: chapter 02 begins there, with one model on four ranks. Before it comes your lab: a ring
# and a tree of your own.
#
# Further reading: Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, Journal
# of Parallel and Distributed Computing 69 (2009). Thakur, Rabenseifner and Gropp, *Optimization of collective
# communication operations in MPICH*, International Journal of High Performance Computing Applications 19 (2005).

# %%
ranks.stop()
