"""Judge what the lab gives: forward and full state dicts of a ZeRO3 that is somebody's own.

Forward is judged by its values, and by the state of every unit during and after it. A ZeRO3 whose units are written
differently is judged by its backward alone. Full state dicts equal what a plain module saves, and any number of ranks
can load them.
"""

from dataclasses import dataclass, field

import torch

from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.sharded import unit_forward
from shared.checks.engine.sharded.state import in_world_of
from shared.checks.engine.sharded.training import Causes, judge_states, plain
from shared.checks.engine.sharded.unit_training import UnitPlan, has_memory, new_optimizer, shard, take_step
from shared.checks.engine.training import Draw
from shared.checks.models import awkward, unit_models
from shared.checks.models.unit_blocks import WIDTH
from shared.checks.zero3.backward import units_are_unsharded_when_they_compute

STEPS = 2
# A state has full precision, because the shards have it.
_IN_BF16 = UnitPlan("Blocks", steps=0, dtype=torch.float32, options={"compute_dtype": torch.bfloat16})


@dataclass
class Saved:
    rejected: list[tuple[str, str]] = field(default_factory=list)  # the error of each foreign state: type and message
    stored_bytes: tuple[int, int] = (0, 0)  # before and after loading a state
    moved: bool = False  # whether the shards have other memory after loading
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)  # before the first step, and after every one
    again: dict[str, torch.Tensor] = field(default_factory=dict)  # the first one, saved twice


def probe_full(wrapper, plan: UnitPlan, loaded: dict | None, foreign: list[dict], seed: int, x, y) -> Saved:
    """Load a state, if there is one, train, and save.

    Args:
        plan: What is trained, and how.
        loaded: A state to load after a backward and a forward whose output is not used, or None.
        foreign: States that must be rejected.
        seed: For the model.
    """
    module = unit_models.build(plan.model, seed, plan.dtype).to(device_here())
    wrapped = shard(wrapper, module, plan)
    optimizer = new_optimizer(plan, wrapped)
    x, y = x.to(device_here(), plan.dtype), y.to(device_here(), plan.dtype)
    found = Saved()
    for each in foreign:
        try:
            wrapped.load_full_state_dict(each)
        except Exception as error:
            found.rejected.append((type(error).__name__, str(error)))
        else:
            found.rejected.append(("nothing", ""))
    if loaded is not None:
        before_bytes, addresses = _stored_bytes(wrapped), [each.data_ptr() for each in wrapped.parameters()]
        awkward.loss_of(wrapped, x, y).backward()
        wrapped.finish_gradient_sync()
        optimizer.zero_grad()
        wrapped(x)
        given = {name: value.clone() for name, value in loaded.items()}
        wrapped.load_full_state_dict(given)
        found.stored_bytes = before_bytes, _stored_bytes(wrapped)
        found.moved = addresses != [each.data_ptr() for each in wrapped.parameters()]
        for value in given.values():
            value.zero_()  # The wrapper must have copied it.
    saved = wrapped.full_state_dict()
    found.states.append(_copied(saved))
    for value in saved.values():
        value.zero_()  # The wrapper must not share this memory either.
    found.again = _copied(wrapped.full_state_dict())
    for _ in range(plan.steps):
        take_step(wrapped, optimizer, plan, x, y)
        found.states.append(_copied(wrapped.full_state_dict()))
    return found


def _stored_bytes(wrapped) -> int:
    """Count the memory that this rank's shards keep alive, which is more than theirs if they are views."""
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in wrapped.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


def _copied(state: dict) -> dict:
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def _run(attempt: Attempt, plan: UnitPlan, loaded: dict | None = None, what: str = "", foreign=None) -> list[Saved]:
    """Train on fresh data. Return what probe_full found, per rank.

    Raises:
        Wrong: Unless every state is what one process would save.
    """
    draw, context = Draw(attempt), f"{plan}{what}"
    found = attempt.run(
        probe_full, plan, loaded, list((foreign or {}).values()), per_rank=draw.per_rank, context=context
    )
    _judge_rejections(found, foreign or {})
    _judge_copies(found, context)
    module = unit_models.build(plan.model, draw.seeds[0], plan.dtype)
    if loaded is not None:
        module.load_state_dict(loaded)
        _judge_stored(found, context)
    alone = plain(plan, module)
    before: dict[int, dict] = {}
    for number in range(plan.steps + 1):
        if number:
            alone.step(number - 1, draw.x.to(plan.dtype), draw.y.to(plan.dtype))
        expected = module.state_dict()
        states = {rank: result.states[number] for rank, result in enumerate(found)}
        moment = f"{context}, full_state_dict() after {number} steps"
        _judge_names(states, expected, moment)
        causes = _LoadCauses(plan, draw, 0) if loaded is not None and number == 0 else None
        judge_states(states, _copied(expected), before, moment, causes, hint=_HINT_ON_STATE)
        before = states
    return found


class _LoadCauses(Causes):
    """Find the mistake in a state that differs right after it was loaded."""

    def of(self, rank: int, found: torch.Tensor, name: str, members: list[int], tolerance: float) -> str:
        if name in dict(unit_models.build(self.plan.model, 0).named_buffers()):
            return "It is a buffer. Hint: which tensors of a full state belong to no flat parameter?"
        if torch.equal(found, found.bfloat16().to(found.dtype)):
            return "It is rounded to bfloat16. Hint: which dtype do the shards have?"
        return "Hint: where in the flat tensor does each given value belong, and which shard is this rank's?"


def _judge_stored(found: list[Saved], context: str) -> None:
    for rank, result in enumerate(found):
        before_bytes, after_bytes = result.stored_bytes
        if after_bytes > before_bytes:
            evidence = f"{context}: this rank's shards keep {after_bytes:,} bytes of memory alive"
            hint = "Hint: which tensor owns the memory of a slice, and for how long does it exist?"
            raise Wrong({rank: f"{evidence}; before loading, {before_bytes:,}"}, hint)
        if result.moved:
            hint = "Tensors of an earlier sharded_state_dict() would be stale. Hint: how do you copy into a tensor?"
            raise Wrong({rank: f"{context}: the shards have other memory than before; expected the same"}, hint)


def _judge_copies(found: list[Saved], context: str) -> None:
    for rank, result in enumerate(found):
        for name, value in result.again.items():
            if not torch.equal(value, result.states[0][name]):
                hint = "Hint: does a saved state share memory with the model?"
                raise Wrong({rank: f"{context}: writing into {name} of a saved state changes the model"}, hint)


def _judge_rejections(found: list[Saved], foreign: dict[str, dict]) -> None:
    for rank, result in enumerate(found):
        for what, (kind, message) in zip(foreign, result.rejected, strict=True):
            if kind != "ValueError" or not message.strip():
                does = "is accepted" if kind == "nothing" else f"raises {kind}({message[:80]!r})"
                evidence = f"a state {what} {does}; expected a ValueError with a message"
                raise Wrong({rank: evidence}, "Hint: which names and shapes must a state share with the module?")


_HINT_ON_STATE = "Hint: which shards are concatenated, in which order, and where does each parameter's slice begin?"


def _judge_names(states: dict[int, dict], expected: dict, moment: str) -> None:
    for rank, state in states.items():
        if list(state) != list(expected):
            odd = sorted(set(state) ^ set(expected)) or ["their order"]
            evidence = f"{moment}: the names differ from module.state_dict()'s in {', '.join(odd[:3])}"
            hint = "A tied parameter has two names. Hint: under which names does a plain module save its tensors?"
            raise Wrong({rank: evidence}, hint)
        for name, value in expected.items():
            if state[name].dtype != value.dtype or state[name].shape != value.shape:
                evidence = f"{moment}: {name} is {state[name].dtype} {list(state[name].shape)}"
                raise Wrong({rank: f"{evidence}; expected {value.dtype} {list(value.shape)}"}, "")


def it_is_a_plain_state(attempt: Attempt) -> None:
    models = ("Tied", "Frozen", "Mixed", "Few", "Buffered", "Nested", "Whole")
    for model in models if attempt.world_size == 2 else attempt.random.sample(models, 2):
        _run(attempt, UnitPlan(model, "AdamW", steps=STEPS))
    _run(attempt, _IN_BF16)


def any_number_of_ranks_can_load_it(attempt: Attempt) -> None:
    """Load also a plain module's state, and load while units are unsharded, which must not keep their old values."""
    plain = unit_models.build(_IN_BF16.model, attempt.draw_seed(), _IN_BF16.dtype).state_dict()
    _run(attempt, _IN_BF16, _copied(plain), ", after loading the state of a plain module")
    for model in ("Mixed", "Buffered", "Tied"):
        plan = UnitPlan(model, steps=STEPS, options={"reshard_after_forward": False} if model == "Tied" else {})
        plain = unit_models.build(model, attempt.draw_seed()).state_dict()
        saved = _run(attempt, plan, _copied(plain), ", after loading the state of a plain module")[0].states[-1]
        for size in range(1, attempt.world_size):
            with in_world_of(attempt, size) as smaller:
                _run(smaller, plan, saved, f", saved on {attempt.world_size} ranks and loaded on {size}")


def states_of_other_modules_are_rejected(attempt: Attempt) -> None:
    state = unit_models.build("Blocks", 0).state_dict()
    name = "blocks.1.up.weight"
    foreign = {
        f"without {name}": {key: value for key, value in state.items() if key != name},
        "with an additional tensor": state | {"stranger": torch.ones(1)},
        f"with a transposed {name}": state | {name: state[name].t()},
    }
    _run(attempt, UnitPlan("Blocks", steps=1), None, "", foreign)


# -- judge forward alone: its values, and that each unit is unsharded while it computes and resharded afterwards


MODELS = ("Blocks", "Tied", "Frozen", "Few", "Mixed", "Buffered", "Nested", "Twice", "Checkpointed", "Bundles", "Whole")
MODELS += ("Dropped",)


def a_plain_model_computes(attempt: Attempt) -> None:
    units_are_unsharded_when_they_compute(attempt)
    unit_forward.judge_outputs(attempt, UnitPlan("Blocks", options={"prefetch": 0}))


def outputs_equal_one_process(attempt: Attempt) -> None:
    units_are_unsharded_when_they_compute(attempt)
    for model in MODELS if attempt.world_size == 2 else attempt.random.sample(MODELS, 3):
        unit_forward.judge_outputs(attempt, UnitPlan(model))


def parameters_are_shards(attempt: Attempt) -> None:
    for model in ("Blocks", "Mixed", "Few"):
        plan, draw = UnitPlan(model), Draw(attempt)
        found = attempt.run(unit_forward.probe_forward, plan, (False,), per_rank=draw.per_rank, context=str(plan))
        elements = sum(p.numel() for p in unit_models.build(model, 0).parameters())
        padding = 8 * (attempt.world_size - 1)  # at most eight flat tensors
        owned = [result.owned for result in found]
        if not elements <= sum(owned) <= elements + padding or max(owned) > (elements + padding) / attempt.world_size:
            evidence = (
                f"{plan}: parameters() has {owned} elements on the ranks; expected about equal shares of the "
                f"model's {elements}"
            )
            raise Wrong(evidence, "Hint: which tensors should the optimizer get from parameters()?")


each_unit_is_gathered_once = on_each(
    unit_forward.judge_forward_wire, *(UnitPlan(model) for model in ("Blocks", "Mixed", "Frozen", "Whole"))
)


def only_computing_units_are_unsharded(attempt: Attempt) -> None:
    """Try a model with a small root, and one whose root is large enough to show."""
    for model, more in (("Deep", {}), ("Deep", {"reshard_after_forward": False}), ("DeepWhole", {})):
        unit_forward.judge_forward_memory(attempt, UnitPlan(model, dtype=torch.float32, options={"prefetch": 0} | more))


_HINT_ON_STATES = "Hint: which unit's parameters does backward need first, and which ones can be freed until then?"
_HINT_ON_CALLS = "Hint: for which units, and when, must _watch_outputs() be called?"
_HINT_ON_BACKWARD = "Hint: activation checkpointing repeats a forward during backward. What may that forward do?"


def _observe(units: list) -> list[tuple[str, int]]:
    """Return, for each unit, the name of its state and its number of open calls."""
    return [(unit.state.name, len(unit.open_calls)) for unit in units]


def probe_states(wrapper, plan: UnitPlan, seed: int, x, y) -> dict[str, list[tuple[str, int]]] | None:
    """Run a forward without gradients, with gradients, and in BACKWARD. Return every unit's state at each moment."""
    module = unit_models.build(plan.model, seed).to(device_here())
    wrapped, x = shard(wrapper, module, plan), x.to(device_here())
    units = list(getattr(wrapped, "units", []))
    if not all(hasattr(unit, "state") and hasattr(unit, "open_calls") for unit in units) or not units:
        return None
    with torch.no_grad():
        wrapped(x)
    found = {"without gradients": _observe(units)}
    output = wrapped(x)
    found["with gradients"] = _observe(units)
    first = units[0]
    first.wait_for_unshard()
    first.state = type(first.state).BACKWARD
    again = module.blocks[0](x.new_zeros(2, WIDTH))
    has_parameters = all(has_memory(each) for each in module.blocks[0].parameters())
    found["while its unit is in BACKWARD"] = [*_observe(units[:1]), ("unsharded" if has_parameters else "freed", 0)]
    del output, again
    return found


def forward_leaves_what_backward_needs(attempt: Attempt) -> None:
    units_are_unsharded_when_they_compute(attempt)
    calls = {"Blocks": [1, 1, 1], "Twice": [2, 2, 1]}
    for model, kept in (("Blocks", False), ("Blocks", True), ("Twice", False)):
        plan = UnitPlan(model, options={"prefetch": 0, "reshard_after_forward": not kept})
        found = attempt.run(probe_states, plan, per_rank=Draw(attempt).per_rank, context=str(plan))
        blocks = "UNSHARDED" if kept else "SHARDED"
        expected = {
            "without gradients": [("SHARDED", 0)] * 4,
            "with gradients": [*((blocks, each) for each in calls[model]), ("UNSHARDED", 1)],
            "while its unit is in BACKWARD": [("BACKWARD", calls[model][0]), ("unsharded", 0)],
        }
        for rank, result in enumerate(found):
            for moment, states in expected.items() if result else ():
                _judge(rank, f"{plan}, after a forward {moment}", result[moment], states)


def _judge(rank: int, context: str, found: list[tuple[str, int]], expected: list[tuple[str, int]]) -> None:
    in_backward = "in BACKWARD" in context
    for index, ((state, calls), (its_state, its_calls)) in enumerate(zip(found, expected, strict=True)):
        which = "the root" if index == 3 else f"block {0 if in_backward else index}"
        if state != its_state:
            hint = _HINT_ON_BACKWARD if in_backward else _HINT_ON_STATES
            raise Wrong({rank: f"{context}: {which} is {state}; expected {its_state}"}, hint)
        if calls != its_calls:
            hint = _HINT_ON_BACKWARD if in_backward else _HINT_ON_CALLS
            raise Wrong({rank: f"{context}: {which} has {calls} open calls; expected {its_calls}"}, hint)
