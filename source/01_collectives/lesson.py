# ---
# jupyter:
#   course:
#     module: collectives
# ---

# %% [markdown]
# # 01 · Collectives by hand
#
# **40–60 minutes.** After this lesson, you will be able to:
#
# - build an all-reduce from a reduce-scatter and an all-gather, on a ring of ranks,
# - compute how many bytes each rank sends for any number of ranks, and check the result in the ledger,
# - measure the latency α and the bandwidth 1/β of a link, and predict times that you have not measured,
# - estimate from a table of real links how long an all-reduce takes on a cluster, and when a tree beats a ring,
# - launch a collective, compute while it is in flight, and wait for the result.
#
# You need `all_reduce`, `send`, `recv` and the wire ledger (chapter 00). In this lesson, the ranks run on the CPU even
# if you have GPUs, because you will emulate a link between them. Mismatch detection is off, because it sends messages
# of its own.

# %% tags=["nbval-ignore-output"]
from functools import partial

from shared import formulas, measure, plots, ranks, widgets
from shared.plots import costs as cost_plots
from shared.plots import diagrams
from shared.predictions import predicted

ranks.start(world_size=4, backend="gloo:cpu", detect_mismatch=False)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What is wasted
#
# How few bytes must each rank send to sum a tensor? In chapter 00's all-reduce, rank 0 does all the work: on 64 ranks,
# it sends 63 tensors, and the others one each. This is a **star**: all messages go through one rank, the **root**. Its
# first half is a **reduce**: the sum of all tensors ends up on the root. Look at what rank 0 holds before and after:

# %% slideshow={"slide_type": "-"}
diagrams.collective("reduce")

# %% [markdown]
# The second half is a broadcast of the sum. In 2017, TensorFlow averaged gradients through such roots, called parameter
# servers. At Uber, that wasted about half of 128 GPUs. A ring, which you will now build, lowered the waste to 12%
# (Horovod paper, 2018).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Reduce-scatter, then all-gather
#
# To share the work, we cut the tensor into one **chunk** per rank, and let every rank be the root of one chunk. The
# first half is then a **reduce-scatter**: each rank ends up with a different chunk of the sum, which is called its
# **shard**. In the diagrams, a chunk is one element.

# %% slideshow={"slide_type": "-"}
diagrams.collective("reduce_scatter")

# %% [markdown] slideshow={"slide_type": "slide"}
# The second half is an **all-gather**: every rank ends up with the shards of all ranks.

# %% slideshow={"slide_type": "-"}
diagrams.collective("all_gather")

# %% [markdown]
# A reduce-scatter followed by an all-gather is an all-reduce. In total, the ranks send as many bytes as in a star, but
# now each of them sends an equal share.
#
# ## A ring
#
# Who sends what, and when? If all ranks send their chunks straight to the roots, N−1 messages meet at each root, from
# all over the cluster. But a sum does not have to be computed in one place: the ranks can compute it on the way.
# Arrange them in a **ring**, where each rank sends only to its right neighbor, and the last one sends to rank 0. Follow
# chunk A in the picture. It starts on rank 1, every rank adds its own chunk A, and after three steps, the sum is
# complete on the rank that chunk A belongs to:

# %% slideshow={"slide_type": "slide"}
diagrams.ring()

# %% [markdown]
# At the same time, chunk B starts on rank 2, chunk C on rank 3 and chunk D on rank 0, so every rank always has
# something to send.
#
# **Predict.** On a ring of three ranks with the chunks A, B and C, the reduce-scatter takes two steps. Which chunk must
# rank 0 send first, so that the sums of A, B and C end up on ranks 0, 1 and 2? Write its letter.

# %%
my_prediction = None

# %% [markdown]
# The next cell contains the whole ring. In each step, the function looks up in a string who sends what: letter *r* is
# the chunk that rank *r* sends. On four ranks, the reduce-scatter follows the strings `DABC`, `CDAB` and `BCDA`, so
# rank 0 sends D, then C, then B. From string to string, each letter moves one place to the right, because after step 1,
# every rank sends what it has just received and added to. The all-gather goes on in the same way, with `ABCD`, `DABC`
# and `CDAB`. The ring step, `pass_right`, is from lab 00.


# %%
# %%ranks
from solutions.first_collectives import pass_right


def ring_all_reduce(tensor):
    """Sum a tensor over the ranks, in place. Returns what this rank sent and held after each step."""
    names, steps = "ABCD"[:world_size], world_size - 1
    chunks = dict(zip(names, tensor.chunk(world_size), strict=True))  # views of the tensor
    log = [{"sent": None, "holds": held(chunks)}]
    for step in range(2 * steps):
        adds = step < steps  # the reduce-scatter adds, and the all-gather copies
        turn = step + 1 if adds else step - steps
        sends = names[-turn:] + names[:-turn]
        name, received_name = sends[rank], sends[rank - 1]
        received = pass_right(chunks[name])
        chunks[received_name].copy_(received + chunks[received_name] if adds else received)
        log.append({"sent": name, "holds": held(chunks)})
    return log


def held(chunks):  # the first element of each chunk, for the figure below
    return {name: f"{int(chunk[0]):0{world_size}d}" for name, chunk in chunks.items()}


# %% [markdown]
# This ring needs chunks of equal length. If the number of ranks N does not divide the tensor's length, you append
# **padding**: at most N−1 zeros, which make the length a multiple of N.
#
# Now run the ring on three ranks, which contribute 100, 10 and 1, so the digits of a sum tell who has added to it. The
# figure lists these ranks: the sum 011 is drawn as 12, because ranks 1 and 2 have added to it. Follow row A from panel
# to panel. An arrow is a message, and a dotted one continues at rank 0. A thick frame marks what has just arrived, and
# bold digits mark a complete sum. In JupyterLab and on the website, you get a slider.

# %% slideshow={"slide_type": "slide"}
with ranks.world(3):  # rank 0 contributes 100, rank 1 contributes 10, and rank 2 contributes 1
    logs = ranks.run(lambda: ring_all_reduce(torch.full((3,), 10 ** (2 - rank), device=device)))
assert all(entry == "111" for log in logs for entry in log[-1]["holds"].values())
print(f"{predicted(my_prediction)}rank 0 first sent {logs[0][1]['sent']}")
widgets.ring_stepper(logs)

# %% [markdown] slideshow={"slide_type": "-"}
# Chunk C starts on rank 0, so its sum is complete on rank 2. After the two steps of the reduce-scatter, each rank holds
# one complete sum. In the two steps of the all-gather, the complete sums are copied around the ring.
#
# ## How many bytes does a ring send?
#
# **Predict.** In a ring of 1,000 ranks, each rank sends many small chunks. How many whole tensors do they amount to:
# about 1, 2 or 1,000?

# %%
my_prediction = None

# %%
# %%ranks
from shared import wire


def tensors_sent(all_reduce):
    """Sum a tensor of 4.8 MB over the ranks. Returns the bytes that this rank sent, in multiples of 4.8 MB."""
    tensor = torch.ones(1_200_000, device=device)
    with wire.ledger() as log:
        all_reduce(tensor)
    return log.sent_bytes / tensor.nbytes


# %%
sent, formula = {}, partial(formulas.all_reduce_sent_bytes, 1)
for size in (2, 3, 4):
    with ranks.world(size):
        sent[size] = ranks.run(lambda: tensors_sent(ring_all_reduce))
    print(f"{size} ranks: each sends {sent[size][0]:.2f} tensors, formula {formula(size):.2f}")
print(f"1,000 ranks: {predicted(my_prediction)}formula {formula(1000):.3f}")
assert all(abs(each - formula(size)) < 1e-9 for size in sent for each in sent[size])

# %% [markdown]
# Less than two tensors, no matter how large the ring is. Let N be the number of ranks and S the size of the tensor in
# bytes. Each half of the all-reduce has N−1 steps, and in each step a rank sends one chunk of S/N bytes. So each rank
# sends
#
# $$2\,(N-1)\cdot\frac{S}{N} = \frac{2(N-1)}{N}\,S$$
#
# You cannot do better: unless the switches do the adding, some rank has to send at least as much (Patarasuk and Yuan
# 2009). Keep the short form in mind: an all-reduce costs about **2S divided by the bandwidth**, on 8 ranks as on 8,000,
# as long as latency plays no part.
#
# ## The cost of a message: α and β
#
# How long does an all-reduce take? The **α–β model** assumes that sending S bytes takes α + βS seconds: a fixed latency
# α plus β seconds per byte. So the bandwidth is 1/β. In the star, rank 0 sends or receives 2(N−1) whole tensors, one
# after the other. The ring has 2(N−1) steps, each with a chunk of S/N bytes:
#
# $$T_\text{star} = 2(N-1)\,(\alpha + \beta S) \qquad T_\text{ring} = 2(N-1)\left(\alpha + \beta\,\frac{S}{N}\right)$$
#
# Let's find α and β by timing ring steps. The next cell puts each rank behind a link of 1 Gbit/s with a latency of 5
# ms, as through 1,000 km of fiber, because this machine's own delays would hide the latency of a link within one
# building. This is an **emulated link**: the bytes are copied within the machine, but an operation lasts at least as
# long as a real link needs for its bytes. `measure` times each size in 20 rounds, and reports the median.

# %%
# %%ranks
from shared import measure

message_sizes = (64, 4_096, 16_384, 65_536, 262_144, 1_048_576)
with measure.behind_link("1gbit", latency_ms=5):
    steps = measure.collectives({"a ring step": pass_right}, message_sizes, repeats=5)

# %% [markdown]
# `fit` finds the α and β for which α + βS is closest to the measurements. At 1 Gbit/s, a byte takes 8 ns, so β should
# be close to that. To see how sure we can be, `fit` repeats the fit many times, each time with rounds drawn at
# random: nine of ten results lie in the ranges. In the figure, look for the size at which the curve starts to rise, and
# for the dotted line, where bytes and latency cost the same.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
steps = ranks.pull("steps")[0]
line = steps.fit("a ring step")
display(line)
where = "behind the emulated link"
equal_bytes = line.alpha_s / line.beta_s_per_byte
cost_plots.predicted_against_measured(
    {"a ring step": line.message_s},
    steps.measured_s,
    f"bytes sent {where}",
    lines_are="fitted",
    mark=(equal_bytes, f"α/β = {equal_bytes / 1e3:.0f} KB"),
)

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
measure.expect(line.alpha_s > 5e-3 and 0.5 < line.gbit_per_s < 2, "α and β are those of the link")

# %% [markdown] slideshow={"slide_type": "-"}
# The curve rises where βS is no longer small compared with α. The two are equal at S = **α/β**: 5 ms / 8 ns = 625 KB.
# The fitted α, and usually β, exceed the link's, because a step also takes time on the rank: Python launches two
# transfers and waits for both, and their bytes are copied.
#
# **Predict.** How many milliseconds does our ring take for 4 MB on four ranks? Use the formula with the α and β above.

# %%
my_prediction_ms = None

# %% [markdown]
# The next cell times our ring, chapter 00's star and `dist.all_reduce`, first without the link and then behind it. The
# figure shows the times behind the link: compare the markers with the lines. This time, the lines are predictions,
# because α and β were fitted to ring steps.


# %%
# %%ranks
from solutions.first_collectives import broadcast_by_hand


def star_all_reduce(tensor):
    if rank != 0:
        dist.send(tensor, dst=0)
    else:
        received = torch.empty_like(tensor)
        for other in range(1, world_size):
            dist.recv(received, src=other)
            tensor += received
    broadcast_by_hand(tensor, src=0)


algorithms = {"ring": ring_all_reduce, "star": star_all_reduce, "torch": dist.all_reduce}
both = measure.loopback_and_link(algorithms, rate="1gbit", latency_ms=5, rounds=10)

# %% tags=["nbval-ignore-output"]
on_loopback, on_link = ranks.pull("both")[0].values()
ring_ms = 1e3 * on_link.measured_s["ring"][4_000_000]
formula_ms = 1e3 * line.ring_all_reduce_s(4_000_000, 4)
print(f"{predicted(my_prediction_ms, '{} ms')}measured {ring_ms:.1f}, formula {formula_ms:.1f} ms")
link_ratio = on_link.ratio("star", "ring")[4_000_000]
loopback_ratio = on_loopback.ratio("star", "ring")[4_000_000]
print(f"star / ring for 4 MB: {link_ratio:.1f} behind links, {loopback_ratio:.1f} without them")
models = {
    "ring": lambda size: line.ring_all_reduce_s(size, 4),
    "star": lambda size: 6 * line.message_s(size),
}
cost_plots.predicted_against_measured(models, on_link.measured_s, f"bytes summed {where}")

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
measure.expect(0.6 < ring_ms / formula_ms < 2, "the ring takes about as long as predicted")
measure.expect(link_ratio > 1.3, "the ring is faster behind the link")
measure.expect(loopback_ratio < link_ratio, "the ring gains less over loopback")

# %% [markdown]
# For 4 MB, the star takes longer than the ring, because all bytes have to go through rank 0's link. For small tensors,
# both take 2(N−1) latencies, so the ring is no faster. The ring's markers may lie a few milliseconds above their line:
# the line knows only messages, but the ring also adds and copies chunks, and one late rank delays all others. The
# star's markers may lie below their line, because α and β were fitted to ring steps, in which every rank sends *and*
# receives.
#
# Our ring is measured step by step: six separately delayed messages add up to what you see. `dist.all_reduce` is
# different. The emulated link delays it once, as a whole, *by the ring's formula* with the link's own α. Its markers
# follow the ring's line, a little below it, but that only says that we computed the same thing twice.
#
# ## Why loopback misleads
#
# Without a link, the ranks of one machine communicate over **loopback**: the operating system copies the bytes from
# process to process. All copies share the machine's cores and memory, and both algorithms copy the same number of bytes
# in total. But the ring needs 24 messages and the star 6. So the ring gains less, or even loses: compare the two ratios
# above the figure. To compare algorithms on one machine, measure behind links.
#
# ## Real links
#
# How fast is a link? The obvious measure, S/t, falls when ranks are added, because each rank then sends more of the
# tensor. So NVIDIA's benchmark, nccl-tests, reports the **bus bandwidth**: the bytes that each rank must send, divided
# by the time. For an all-reduce, this is 2(N−1)/N · S/t, which you can compare with the link's rate for any N.
#
# In the clusters of the next table, NVLink connects the GPUs of one host, and InfiniBand or Ethernet connects hosts.
# Newer racks extend NVLink to 72 GPUs in 18 hosts. α is the latency of one ring step, and "GPUs" is the ring's size:
#
# - Rows 1 and 2: all GPUs are in one host.
# - Row 3: 8 hosts of 8 GPUs, so α is the mean of seven NVLink steps and one InfiniBand step. NCCL runs several rings
#   at once, each through a different adapter. Together, the eight adapters carry about as much as NVLink.
# - Row 4: 2 hosts of 4 GPUs, so α is the mean of three NVLink steps and one InfiniBand step.
# - Rows 5 to 9: each GPU is in a different host. RoCE is Ethernet whose adapters, like InfiniBand's, bypass the CPU.
#
# How many times as long does an all-reduce of 1 GB take in the last row as in the first?

# %%
from shared.planner.links import REAL_LINKS, link_table

link_table()

# %% [markdown]
# The same GB takes 1.5 s instead of 5 ms: 300 times as long. So later chapters keep asking which ranks share a host.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Ring or tree?
#
# A ring of 1,000 ranks takes 1,998 latencies, even for the smallest tensor. A **tree** takes fewer: every rank that
# already has the tensor helps to send it on, so the number of copies doubles in each round.

# %% slideshow={"slide_type": "-"}
diagrams.tree_broadcast()

# %% [markdown]
# A broadcast to N ranks takes ⌈log₂N⌉ rounds. So does a reduce, which is a broadcast in reverse. In each round, whole
# tensors are sent:
#
# $$T_\text{tree} = 2\,\lceil\log_2 N\rceil\,(\alpha + \beta S)$$
#
# A third algorithm, *halving and doubling*, has few rounds *and* few bytes: pairs of ranks exchange halves, then
# quarters, then eighths (Thakur et al. 2005). If N is a power of two, it takes 2 log₂N · α + 2(N−1)/N · βS. The next
# cell evaluates the formulas for hosts with one InfiniBand adapter of 400 Gbit/s each. The dotted line marks the size
# above which the ring is faster than the tree. How does it move from panel to panel?

# %% slideshow={"slide_type": "slide"}
infiniband = REAL_LINKS[4]  # one adapter of 400 Gbit/s per host
costs = {"alpha_s": infiniband.alpha_s, "beta_s": infiniband.beta_s_per_byte}
algorithms = {
    "ring": partial(formulas.ring_all_reduce_s, **costs),
    "tree": partial(formulas.tree_all_reduce_s, **costs),
    "halving and doubling": partial(formulas.halving_doubling_all_reduce_s, **costs),
}
cost_plots.all_reduce_costs(algorithms, world_sizes=[4, 64, 1024])

# %% [markdown] slideshow={"slide_type": "-"}
# Small tensors favor the tree, and large ones the ring. From 4 ranks to 1,024, the line moves from 0.53 MB to 74 MB. By
# default, PyTorch's DDP sums about 25 MB per all-reduce: the ring would win on 64 ranks, and the tree on 1,024. By its
# formula, halving and doubling is never slower than either. In a real network, however, the two ranks of a pair are up
# to half the cluster apart, and all pairs compete for the same links.
#
# ## Launching now, waiting later
#
# In all measurements so far, the rank waited until the all-reduce was complete. With `async_op=True`, as in chapter 00,
# the call returns a handle immediately. How much time does that save if the rank computes in the meantime?
#
# **Predict.** Assume α = 5 ms and β = 8 ns per byte, as for torch's all-reduce on our link. Then a chunk of 1 MB takes
# 13 ms, so the all-reduce of 4 MB below takes 6 · 13 = 78 ms. Computing takes 60 ms. How many milliseconds do the two
# take if they run at the same time?

# %%
my_prediction_ms = None

# %%
# %%ranks
import time

tensor = torch.zeros(1_000_000, device=device)


def one_after_the_other():
    dist.all_reduce(tensor)
    time.sleep(0.06)  # computing on a GPU, which does not need this machine's cores


def at_the_same_time():
    handle = dist.all_reduce(tensor, async_op=True)  # returns immediately
    time.sleep(0.06)
    handle.wait()  # returns when the sum is complete


ways = {"one after the other": one_after_the_other, "at the same time": at_the_same_time}
with measure.behind_link("1gbit", latency_ms=5):
    times = measure.jobs(ways, rounds=5)

# %% tags=["nbval-ignore-output"]
times = ranks.pull("times")[0]
print(f"{predicted(my_prediction_ms, '{} ms')}measured {times['at the same time'].time_ms:.0f} ms")
plots.bars(times.ms(), f"ms {where} (median of 5)")

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
ratio = times.ratio("one after the other", "at the same time")
measure.expect(ratio > 1.3, "both at the same time take less time")

# %% [markdown]
# They take 78 ms: the shorter of the two is hidden behind the longer one.

# %% [markdown]
# Three rules apply to handles:
#
# - Until `wait()` returns, do not read or change the tensor: its values are undefined.
# - Keep every handle and wait for it. Otherwise you do not know when the result is complete.
# - All ranks must launch the same collectives in the same order, with and without handles.
#
# On a GPU, `wait()` does not block Python. It only makes the GPU's current stream (its queue of kernels) wait, so
# kernels that you launch afterwards see the result.
#
# ## What torch calls it
#
# In torch, each collective is one call. The functions with `single` in their names take one tensor instead of a list of
# chunks. Before torch 2.13, `reduce_scatter_single` was `reduce_scatter_tensor`, and `all_gather_single` was
# `all_gather_into_tensor`.
#
# | collective | function in `torch.distributed` | result |
# |---|---|---|
# | broadcast | `broadcast(tensor, src)` | in place |
# | reduce | `reduce(tensor, dst)` | in place on `dst`; on other ranks, do not use the tensor afterwards |
# | all-reduce | `all_reduce(tensor)` | in place |
# | reduce-scatter | `reduce_scatter_single(shard, tensor)` | in `shard` |
# | all-gather | `all_gather_single(tensor, shard)` | in `tensor` |
# | scatter | `scatter(shard, shards, src)` | in `shard` |
# | gather | `gather(shard, shards, dst)` | in the list `shards` |
# | all-to-all | `all_to_all_single(received, tensor)` | in `received` |
#
# The last three rows are new. In a **scatter**, the root gives each rank a different chunk, and a **gather** does the
# reverse. In an **all-to-all**, every rank scatters its tensor. Chapter 16 is built on the all-to-all.

# %% [markdown] slideshow={"slide_type": "slide"}
# The backend decides which algorithm a collective uses. In torch, gloo's reduce-scatter *is* an all-reduce: every rank
# gets the whole sum, and throws away everything but its shard. In the lab, yours will send half as much.
#
# NCCL's all-reduce differs from ours in three ways. It cuts chunks into slices, and sends one slice while it receives
# the next. It runs several rings at once, to use all links of a GPU. And it chooses between rings, trees and other
# algorithms, depending on the size and the network. Its trees pass on slices, too, so they lose less than our formula
# says.
#
# ## Recap
#
# | algorithm | bytes that a rank sends | time |
# |---|---|---|
# | all-reduce, star | rank 0: (N−1)S, others: S | 2(N−1)(α + βS) |
# | all-reduce, tree | at most ⌈log₂N⌉S | 2⌈log₂N⌉(α + βS) |
# | all-reduce, ring | 2(N−1)/N · S | 2(N−1)(α + βS/N) |
# | reduce-scatter or all-gather, ring | (N−1)/N · S | (N−1)(α + βS/N) |
# | broadcast, tree | at most ⌈log₂N⌉S | ⌈log₂N⌉(α + βS) |
#
# **Terms**
#
# - **reduce**: one rank, the root, gets the sum of the tensors of all ranks.
# - **root**: the rank that a broadcast or scatter starts from, or that a reduce or gather ends on.
# - **reduce-scatter**: each rank gets a different chunk of the sum of all ranks' tensors.
# - **shard**: the chunk of a tensor that belongs to a rank.
# - **all-gather**: every rank gets the shards of all ranks, in rank order.
# - **scatter**: the root sends a different chunk of its tensor to each rank.
# - **gather**: the root gets the chunks of all ranks.
# - **all-to-all**: every rank sends a different chunk of its tensor to each rank.
# - **chunk**: one of the pieces, usually one per rank, into which a tensor is cut.
# - **star**: an algorithm in which all messages go through one rank.
# - **ring**: an algorithm in which each rank sends only to its right neighbor, and the last rank to the first.
# - **tree**: an algorithm in which every rank that has the tensor sends it on, so that the number of copies doubles in
#   each round.
# - **padding**: zeros appended to a tensor so that its length is a multiple of the number of ranks.
# - **α–β model**: sending S bytes takes α + βS seconds, where α is the latency and 1/β the bandwidth.
# - **bus bandwidth**: the bytes that each rank must send in a collective, divided by its time.
# - **emulated link**: delays that make each operation last at least as long as a given link needs for its bytes.
# - **loopback**: communication between processes of one machine, without a network.
#
# ## Further reading
#
# - [On a real cluster](../docs/cluster.md): which links and which algorithm NCCL uses, and how fast they are.
# - Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations* (2009): the ring, and the
#   proof that no algorithm sends fewer bytes.
# - Thakur, Rabenseifner and Gropp, *Optimization of collective communication operations in MPICH* (2005): the α–β model
#   in use, and how to choose an algorithm by size.
# - [nccl-tests, PERFORMANCE.md](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): where the factor
#   in each collective's bus bandwidth comes from.
# - Hu et al., [*Demystifying NCCL*](https://arxiv.org/abs/2507.04786) (2025): how NCCL's rings and trees work inside.
# - [*Horovod*](https://arxiv.org/abs/1802.05799) (2018): how the ring replaced the star.
#
# ## What is still wasted
#
# *Latency.* A model has many gradients. Summed one after the other, six of them take 36 ring steps on four ranks.
# Packed into one tensor, they take 6. Chapter 03 packs gradients together.
#
# *Waiting.* If gradients are summed after backward, no rank computes during an all-reduce. In chapter 04, you launch
# all-reduces early enough to change that.
#
# In [the lab](../labs/01_collectives_lab.ipynb), you build the ring, the tree and an asynchronous reduce-scatter
# yourself.

# %%
ranks.stop()
