"""Judging what overlap is made of: who is told of a gradient, and in which order buckets leave."""

import torch

from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import close, describe_calls, first_difference, tolerance_of
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.wire import instrumentation

BACKWARDS = 2
TRIES = 6

# -- on_gradients


def probe_told(on_gradients, model: str, seed: int, x, y) -> dict:
    """Backward twice with hooks, once more without. → per backward: who was told, and .grad as it was then"""
    module = awkward.build(model, seed).to(device_here())
    twin = awkward.twin_of(model, module)
    x, y = x.to(device_here()), y.to(device_here())
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    told, others = [], []
    module.second.bias.register_post_accumulate_grad_hook(lambda _: others.append(True))

    def tell(parameter) -> None:
        name = names.get(id(parameter), f"a {type(parameter).__name__} that is none of the parameters")
        told.append((name, None if parameter.grad is None else parameter.grad.detach().cpu().clone()))

    found = {"rounds": []}
    with instrumentation.listening() as calls:
        end = on_gradients(list(module.parameters()), tell)
        for place in range(BACKWARDS + 1):
            if place == BACKWARDS:
                end()
            told.clear()
            for each in (module, twin):
                awkward.loss_of(each, x * (place + 1), y).backward()
            found["rounds"].append(
                {"told": told[:], "gradients": awkward.gradients_of(module), "want": awkward.gradients_of(twin)}
            )
    return found | {"calls": calls, "others": len(others)}


def _try_told(attempt: Attempt, model: str) -> list[dict]:
    draw = Draw(attempt)
    return attempt.run(probe_told, model, per_rank=[(draw.seeds[0], x, y) for x, y in draw.shares])


def told_once_when_complete(attempt: Attempt) -> None:
    for model in ("Tied", "Frozen", "Unused", "Mixed", "TwoRoads"):
        for rank, result in enumerate(_try_told(attempt, model)):
            if result["calls"]:
                raise Wrong({rank: f"{describe_calls(result['calls'])}; expected none"})
            for number, one in enumerate(result["rounds"][:BACKWARDS], 1):
                _judge_round(rank, one, f"{awkward.said(model)}, backward {number}")


def _judge_round(rank: int, one: dict, said: str) -> None:
    tolerance = tolerance_of(one["want"].values())
    told = [name for name, _ in one["told"]]
    strange = [name for name in told if name not in one["want"]]
    if strange:
        hint = "Look at: what does this kind of hook receive, and what is tell(…) to be given?"
        raise Wrong({rank: f"{said}: told of {strange[0]}; expected a parameter"}, hint)
    for name, want in one["want"].items():
        times = told.count(name)
        if times != (want is not None):
            hint = "Look at: which parameters have a gradient to wait for, and how long does a hook stay?"
            raise Wrong({rank: f"{said}: told {times} times of {name}; expected {int(want is not None)}"}, hint)
    for name, seen in one["told"]:
        want = one["want"][name]
        if seen is None or not close(seen, want, tolerance):
            was = "was None" if seen is None else first_difference(seen, want, tolerance)
            hint = "Look at: is this hook called before or after the new gradient is added to .grad?"
            raise Wrong({rank: f"{said}: when told of {name}, its .grad {was}"}, hint)
    for name, want in one["want"].items():
        got = one["gradients"][name]
        if want is not None and (got is None or not close(got, want, tolerance)):
            was = "None" if got is None else first_difference(got, want, tolerance)
            raise Wrong({rank: f"{said}: in the end the gradient of {name}: {was}"}, "Who else writes into a gradient?")


def hooks_can_be_taken_away(attempt: Attempt) -> None:
    for model in ("Tied", "Frozen"):
        for rank, result in enumerate(_try_told(attempt, model)):
            last = result["rounds"][-1]
            if last["told"]:
                names = ", ".join(name for name, _ in last["told"])
                hint = "Look at: what does registering a hook give back, for each one of them?"
                raise Wrong({rank: f"{awkward.said(model)}: after the end, still told of {names}"}, hint)
            if result["others"] != BACKWARDS + 1:
                said = f"somebody else's hook ran {result['others']} times in {BACKWARDS + 1} backwards"
                raise Wrong({rank: said}, "Look at: which hooks are yours to take away?")


# -- LaunchQueue


class Bucket:  # its name stands in the errors that a student reads
    """A bucket that carries nothing, and writes down what is done with it."""

    def __init__(self, number: int, size: int, diary: list[tuple]):
        self.number, self.diary = number, diary
        self.parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(size)]

    def __getattr__(self, name: str):
        raise AttributeError(f"a bucket in this check has parameters, pack, launch and wait, but no {name}")

    def pack(self, place: int) -> None:
        self.diary.append(("pack", self.number, place))

    def launch(self) -> None:
        self.diary.append(("launch", self.number))

    def wait(self) -> None:
        self.diary.append(("wait", self.number))


def probe_queue(queue_class, sizes: list[int], rounds: list[list[tuple[int, int]]]) -> list[list[list[tuple]]]:
    """→ per round: what each add did, and last what finish() did"""
    diary: list[tuple] = []
    queue = queue_class([Bucket(number, size, diary) for number, size in enumerate(sizes)])
    found = []
    for order in rounds:
        found.append([])
        for step in [*order, None]:
            diary.clear()
            queue.finish() if step is None else queue.add(*step)
            found[-1].append(diary[:])
    return found


def _try_queue(attempt: Attempt) -> tuple[list[int], list[list[tuple[int, int]]], list[list[list[tuple]]]]:
    """→ sizes of the buckets; per round, what was added; per round, what the queue did"""
    sizes = [
        attempt.random.randint(1, 2) for _ in range(attempt.random.randint(3, 4))
    ]  # short enough to be followed by hand
    every = [(number, place) for number, size in enumerate(sizes) for place in range(size)]
    rounds = []
    for left_out in (0, attempt.random.randint(1, len(every) - 1), len(every), 0):
        rounds.append(attempt.random.sample(every, len(every) - left_out))
    context = f"buckets of {sizes} gradients, {len(rounds)} rounds of add(…), each ended by finish()"
    return sizes, rounds, attempt.run(probe_queue, sizes, rounds, context=context)[0]


def _said(what: list[tuple]) -> str:
    if not what:
        return "nothing"
    return ", ".join(f"{verb} {number}" + "".join(f" ({place})" for place in rest) for verb, number, *rest in what)


def launched_in_order_and_early(attempt: Attempt) -> None:
    for _ in range(TRIES):
        sizes, rounds, found = _try_queue(attempt)
        for turn, (order, did) in enumerate(zip(rounds, found, strict=True), 1):
            missing, launched = list(sizes), 0
            for step, (number, place) in enumerate(order):
                want = [("pack", number, place)]
                missing[number] -= 1
                while launched < len(sizes) and not missing[launched]:
                    want.append(("launch", launched))
                    launched += 1
                if did[step] != want:
                    added = ", ".join(f"({number}, {place})" for number, place in order[: step + 1])
                    said = f"buckets of {sizes} gradients, round {turn}, after add of {added}: {_said(did[step])}"
                    raise Wrong(f"{said}; expected {_said(want)}", _why(did[step], want, turn))


def _why(did: list[tuple], want: list[tuple], turn: int) -> str:
    if turn > 1:  # the first round was right
        return "Look at: what must be forgotten when a round ends?"
    if any(event[0] == "wait" for event in did):
        return "Look at: who waits, and when? add(…) is called in the middle of backward()."
    if [event for event in did if event[0] == "pack"] != want[:1]:
        return "Look at: which gradient is ready? It is packed once, when it is added."
    if len(did) > len(want):
        return "Look at: is it this bucket's turn?"
    if len(did) < len(want):
        return "Look at: who else may go now that this one has?"
    return ""


def finish_completes_and_begins_anew(attempt: Attempt) -> None:
    for _ in range(TRIES):
        sizes, rounds, found = _try_queue(attempt)
        for turn, (order, did) in enumerate(zip(rounds, found, strict=True), 1):
            before, last = [event for events in did[:-1] for event in events], did[-1]
            said = f"buckets of {sizes} gradients, round {turn}, {len(order)} added: finish() did {_said(last)}"
            _judge_finish(sizes, before, last, said)


def _judge_finish(sizes: list[int], before: list[tuple], last: list[tuple], said: str) -> None:
    """The rest is packed, then launched in order; each is waited for once, when all are under way."""
    whole, numbers = before + last, range(len(sizes))
    every = [("pack", number, place) for number in numbers for place in range(sizes[number])]
    if sorted(event for event in whole if event[0] == "pack") != every:
        raise Wrong(f"{said}; expected every gradient packed once", "Look at: which places have not come?")
    launches = [event[1] for event in whole if event[0] == "launch"]
    if launches != list(numbers):
        raise Wrong(f"{said}; buckets were launched in the order {launches}", "Look at: what is still to be launched?")
    for number in numbers:
        if any(whole.index(("launch", number)) < whole.index(event) for event in every if event[1] == number):
            raise Wrong(f"{said}; bucket {number} was launched before all of it was packed")
    waits = [place for place, event in enumerate(whole) if event[0] == "wait"]
    if sorted(whole[place][1] for place in waits) != list(numbers):
        raise Wrong(f"{said}; expected one wait for each bucket", "Look at: who waits for those launched earlier?")
    if waits[0] < whole.index(("launch", len(sizes) - 1)):
        hint = "Look at: what could travel at the same time?"
        raise Wrong(f"{said}; it waited before the last bucket was launched", hint)
