"""Judge what attention on shards sends, in which order it launches, computes and waits, and how much it computes."""

import torch

from shared.checks.context_parallel import probes
from shared.checks.context_parallel.attention import judge_results, try_it
from shared.checks.context_parallel.probes import ALL_TO_ALL, COMPUTE, Setting
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.wire import sent_bytes_of

MOST_BLOCKS = 2.5  # an output, a more precise copy of it, and a few numbers per query
HINT_ON_LAUNCH = "Hint: when does the transfer start, and what does this rank compute before it waits?"
HINT_ON_WORK = "Hint: which pairs of chunks does the mask hide entirely, and are they computed anyway?"


def phases_of(setting: Setting) -> tuple[str, ...]:
    return ("forward", "backward") if setting.differentiates else ("forward",)


def neighbors_send_few_bytes(attempt: Attempt) -> None:
    """A ring: each rank sends to one rank only, and as many bytes as the formula says."""
    size = attempt.world_size
    for balanced in (True, False):
        setting = Setting(attempt.piece, tokens=2 * attempt.random.randint(2, 5), balanced=balanced)
        whole, found = try_it(attempt, setting)
        judge_results(setting, whole, found)
        block = 2 * whole.tensors[1].nbytes // size  # keys and values of one rank
        most = {"forward": (size - 1) * block, "backward": (2 * size - 1) * block if size > 1 else 0}
        for rank, each in found.items():
            for phase in phases_of(setting):
                _judge_ring(rank, each.phases[phase].calls, most[phase], f"{setting}: {phase}")


def _judge_ring(rank: int, calls: list, most_bytes: int, context: str) -> None:
    if others := [call for call in calls if call.op not in ("send", "recv")]:
        message = f"{context} has {describe_calls(others)}; expected only transfers between neighbors"
        raise Wrong({rank: message}, "Hint: how many ranks' keys does a rank hold at a time in the ring?")
    for op, preposition in (("send", "to"), ("recv", "from")):
        partners = sorted({call.partner for call in calls if call.op == op})
        if len(partners) > 1:
            message = f"{context} has messages {preposition} ranks {partners}; expected one neighbor"
            raise Wrong({rank: message}, "Hint: which rank is this rank's neighbor on each side of the ring?")
    sent_bytes = sum(call.payload_bytes for call in calls if call.op == "send")
    if sent_bytes > most_bytes:
        message = f"{context} sends {sent_bytes:,} bytes; expected at most {most_bytes:,}"
        raise Wrong({rank: message}, "Hint: how many hops do keys and values need, and how many do gradients?")


def swaps_send_few_bytes(attempt: Attempt) -> None:
    """Each rank sends (N − 1)/N of its queries, keys, values and outputs."""
    size = attempt.world_size
    setting = Setting(ALL_TO_ALL, tokens=attempt.random.randint(3, 9), heads=2 * size)
    whole, found = try_it(attempt, setting)
    judge_results(setting, whole, found)
    own_bytes = whole.tensors[0].nbytes / size
    most_bytes = 4 * own_bytes * (size - 1) / size
    for rank, each in found.items():
        for phase in phases_of(setting):
            calls = each.phases[phase].calls
            sent_bytes = sum(sent_bytes_of(call, rank) for call in calls)
            if sent_bytes > most_bytes + 1:
                message = f"{setting}: {phase} sends {sent_bytes:,.0f} bytes; expected at most {most_bytes:,.0f}"
                raise Wrong(
                    {rank: message}, "Hint: which part of its tokens does each rank need from every other rank?"
                )


def transfers_overlap(attempt: Attempt) -> None:
    """Between the launch of a transfer and the wait for it, there is a product of matrices."""
    setting = Setting(attempt.piece, causal=False, watched=True)
    _whole, found = try_it(attempt, setting)
    for rank, each in found.items():
        for phase in phases_of(setting):
            if message := _exposed(each.phases[phase].events, exempts_last=phase == "backward"):
                raise Wrong({rank: f"{setting}: {phase}: {message}"}, HINT_ON_LAUNCH)


def _exposed(events: list, exempts_last: bool) -> str:
    """Describe the first transfer during which nothing is computed, or return ""."""
    kinds = [event.kind for event in events]
    launches = [position for position, kind in enumerate(kinds) if kind in ("send", "recv")]
    if not launches:
        return "no transfer was launched with isend, irecv or batch_isend_irecv"
    last_product = max((position for position, kind in enumerate(kinds) if kind == COMPUTE), default=-1)
    for number, launched in enumerate(launches):
        waits = (
            position
            for position in range(launched + 1, len(events))
            if kinds[position] == "wait" and events[position].launched in (None, number)
        )
        waited = next(waits, len(events))
        if COMPUTE not in kinds[launched:waited] and not (exempts_last and launched > last_product):
            return f"transfer {number + 1} of {len(launches)} is waited for before anything else is computed"
    return ""


def hidden_pairs_are_skipped(attempt: Attempt) -> None:
    """With the mask, a rank computes only a part of what it computes without it."""
    size = attempt.world_size
    for balanced in (True, False):
        multiplications = {}
        for causal in (True, False):
            setting = Setting(attempt.piece, causal=causal, balanced=balanced, counts=True)
            _whole, found = try_it(attempt, setting)
            multiplications[causal] = [done.flops for each in found.values() for done in each.phases.values()]
        phases = len(phases_of(setting))
        for number, (masked, every) in enumerate(zip(multiplications[True], multiplications[False], strict=True)):
            index, phase = divmod(number, phases)
            share = (2 * size + 2) / (4 * size) if balanced else (index + 1) / size
            if masked > (share + 0.01) * every:
                context = f"{setting}: with the mask, {phases_of(setting)[phase]} computes {masked / every:.0%}"
                message = f"{context} of what it computes without; expected at most {share:.0%}"
                raise Wrong({list(found)[index]: message}, HINT_ON_WORK)


def only_own_blocks_are_kept(attempt: Attempt) -> None:
    """Between forward and backward, a rank keeps its output and two numbers per query, but no keys of other ranks."""
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    own = [
        tuple(torch.randn(2, 2, 32, 16, generator=generator, dtype=torch.float64) for _ in range(3))
        for _ in range(attempt.world_size)
    ]
    block_bytes = own[0][0].nbytes
    most_bytes = int(MOST_BLOCKS * block_bytes)
    for rank, kept_bytes in enumerate(attempt.run(probes.kept, most_bytes, per_rank=own)):
        if kept_bytes > most_bytes:
            message = f"forward leaves {kept_bytes:,} bytes for backward, besides q, k and v; expected at most"
            message += f" {most_bytes:,}, for the output and the log-sum-exp"
            raise Wrong({rank: message}, "Hint: whose keys does backward need, and do they come around again?")
