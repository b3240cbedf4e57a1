"""How the course measures communication: the time of a job, α and β, and how training scales.

    times = measure.collectives({"ring": ring_all_reduce, "torch": dist.all_reduce})    # in a %%ranks cell
    times = ranks.pull("times")[0]                                                      # in the notebook
    line = times.fit("torch", sends="ring all-reduce")
    line.alpha_s, line.beta_s_per_byte

`collectives` times collectives over a range of sizes, `jobs` times anything else, such as a `training_step`, `recorded`
keeps the ledger or the timeline of a typical round, `recorded_step` the timeline of a typical training step,
`ready_fractions` measures when gradients are ready, and `scaling` measures steps on 1, 2 and 4 ranks. `costs` measures
what a step needs besides time: memory and communication.

Functions that measure run on all ranks together. They exchange what each rank saw, so every rank returns the same
result, and it is enough to look at one.

What is estimated
    The time of a job lasts from the moment when the last rank enters it until the last rank leaves it. The ranks meet
    at a barrier first, but they leave the barrier at different times, and those that leave it early wait inside the
    job. That wait is not part of the job, so it does not count. (What an early rank finishes before the last one enters
    does not count either. The barrier keeps that small.)

    The estimate is the **median** of the rounds. Disturbances only ever make a round longer, so the fastest round shows
    what the machine can do when nothing disturbs it. But predictions add up many collectives, and in a training step
    not all of them will be as lucky as in the fastest round. The median also has an uncertainty that can be computed.
    The fastest round is available as a lower bound: `fastest_s`.

How it is measured
    The first two rounds are for warming up and do not count: they set up connections and allocate memory. The next 20
    rounds count. In each round, every job runs once, in an order that is shuffled in the same way on all ranks. So a
    busy moment of the machine affects all jobs, and `ratio()` compares two of them round by round.

    The times of entering and leaving are read from the machine's monotonic clock. All its processes share this clock,
    even when each rank runs on its own host (`shared/hosts`). Several machines have no such clock: nccl-tests, for
    example, lets each rank time many calls in a row instead.

    On a GPU, a call returns when it has launched its work, and NCCL's synchronous collectives return before they are
    complete: only the current stream waits for them. So both readings of the clock wait for the current stream first.
    CUDA events would not include the time of the launch, and could not be compared between GPUs.

    Mismatch detection is paused, because it adds a small all-reduce to each collective. The course's hook on each
    collective stays. It takes less than 30 µs (benchmarks/README.md).

α and β
    `fit()` finds the latency α of a message and the time β of a byte by least squares of the relative error, so that a
    size of 1 KB counts as much as one of 10 MB. `Fit` says what its intervals and residuals mean.

Where
    Every result says where it was measured (`where`): over loopback, behind a shaped link, behind an emulated link, or
    over NCCL. Over loopback, all ranks share this machine's cores and memory, and no rank has a link of its own:
    `loopback_and_link()` shows what that does to a comparison.
"""

from shared.measure.claims import expect
from shared.measure.fitting import Fit
from shared.measure.links import behind_link, start_behind_link, where
from shared.measure.rounds import Job, Measured, Times, jobs, now_s, recorded
from shared.measure.steps import Costs, costs, ready_fractions, recorded_step, train_step, training_step
from shared.measure.sweeps import SIZES_BYTES, Sweep, collectives, loopback_and_link
from shared.measure.worlds import Scaling, scaling
