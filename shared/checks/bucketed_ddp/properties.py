"""Check properties of chapter 03: views of one tensor, messages in flight, and gradients that must be rejected."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here, error_of
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.checks.engine.late_ranks import PATIENCE_S
from shared.checks.engine.steps import Event
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.wire import instrumentation

# -- check that flat_and_slices returns views of one tensor, by writing into one and reading the other


SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 2), (0, 3), (4, 1), (2, 3, 2, 2)]
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@dataclass
class Slices:
    """A flat tensor and its slices, before and after writing into them. It writes only if the types are right."""

    flat: torch.Tensor
    records: bool  # whether any of the tensors requires a gradient
    memory_bytes: int  # of the flat tensor's storage
    types: list[tuple[tuple[int, ...], torch.dtype]]  # of the slices
    calls: list[instrumentation.Call]
    gradients: int  # how many parameters have a .grad
    read: list[torch.Tensor] = field(init=False)  # the slices after flat was written to
    written: torch.Tensor = field(init=False)  # flat after the slices were written to


def probe_slices(flat_and_slices, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Slices:
    """Call the function, then write into flat and into the slices."""
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype, device=device_here())) for shape in shapes]
    with instrumentation.listening() as calls:
        result = flat_and_slices(parameters)
    flat, slices = _unpacked(result)
    found = Slices(
        flat=flat.detach().cpu().clone(),
        records=any(tensor.requires_grad for tensor in (flat, *slices)),
        memory_bytes=flat.untyped_storage().nbytes(),
        types=[(tuple(piece.shape), piece.dtype) for piece in slices],
        calls=calls,
        gradients=sum(p.grad is not None for p in parameters),
    )
    if found.types == [(tuple(shape), dtype) for shape in shapes] and flat.dim() == 1 and not found.records:
        with torch.no_grad():
            flat.copy_(torch.arange(flat.numel(), device=flat.device) % 251)
            found.read = [piece.cpu().clone() for piece in slices]
            for index, piece in enumerate(slices):
                piece.fill_(index + 1)
            found.written = flat.cpu().clone()
    return found


def probe_devices(flat_and_slices) -> list[str]:
    """Return the devices of the flat tensor and the slices, for parameters on the meta device."""
    flat, slices = _unpacked(flat_and_slices([nn.Parameter(torch.empty(3, device="meta")) for _ in range(2)]))
    return [str(tensor.device) for tensor in (flat, *slices)]


def _unpacked(result) -> tuple[torch.Tensor, list[torch.Tensor]]:
    if not isinstance(result, tuple | list) or len(result) != 2 or not isinstance(result[0], torch.Tensor):
        raise AssertionError(f"flat_and_slices() returned {type(result).__name__}; expected (flat, slices)")
    flat, slices = result
    if not isinstance(slices, list | tuple):
        raise AssertionError(f"flat_and_slices() returned its slices as a {type(slices).__name__}; expected a list")
    if any(not isinstance(piece, torch.Tensor) for piece in slices):
        raise AssertionError("flat_and_slices() returned a slice that is not a tensor")
    return flat, list(slices)


def slices_lie_in_one_tensor(attempt: Attempt) -> None:
    draws = [
        (SHAPES, torch.float64),
        (attempt.random.sample(SHAPES, 4), attempt.random.choice(DTYPES)),
        ([attempt.random.choice(SHAPES[2:5])], torch.float32),
        ([(), ()], torch.bfloat16),
        ([(2, 3, 2, 2), (3,), (4, 5, 1, 3)], torch.float32),
    ]
    for shapes, dtype in draws:
        for rank, found in enumerate(attempt.run(probe_slices, shapes, dtype)):
            message = f"parameters of shapes {', '.join(str(list(shape)) for shape in shapes)} in {_name(dtype)}"
            _judge_types(rank, found, shapes, dtype, message)
            _judge_places(rank, found, shapes, dtype, message)
    for rank, devices in enumerate(attempt.run(probe_devices, context="parameters on the device meta")):
        if set(devices) != {"meta"}:
            message = f"parameters on the device meta: flat and slices are on {', '.join(sorted(set(devices)))}"
            raise Wrong({rank: f"{message}; expected meta"}, "Hint: on which device will the gradients be?")


def _judge_types(rank: int, found: Slices, shapes: list, dtype: torch.dtype, context: str) -> None:
    flat, elements = found.flat, sum(torch.Size(shape).numel() for shape in shapes)
    if flat.shape != (elements,):
        raise Wrong({rank: f"{context}: flat has the shape {list(flat.shape)}, expected [{elements}]"})
    if flat.dtype != dtype:
        evidence = f"{context}: flat is {_name(flat.dtype)}, expected {_name(dtype)}"
        raise Wrong({rank: evidence}, "Hint: which dtype do the gradients have?")
    expected = [(tuple(shape), dtype) for shape in shapes]
    if found.types != expected:
        shapes_of = [list(shape) for shape, _ in found.types]
        evidence = f"{context}: the slices have the shapes {shapes_of}; expected those of the parameters"
        raise Wrong({rank: evidence})
    if flat.any():
        index = int(flat.nonzero()[0])
        raise Wrong(
            {rank: f"{context}: element {index} of flat is {flat[index].item():g}; expected all elements to be 0"}
        )
    if found.records:
        raise Wrong({rank: f"{context}: flat or one of the slices has requires_grad=True; expected False"})
    if found.memory_bytes != flat.nbytes:
        sizes = f"flat has {flat.nbytes} bytes, but its storage has {found.memory_bytes}"
        raise Wrong({rank: f"{context}: {sizes}"}, "Hint: is flat a view of a larger tensor?")
    if found.calls:
        raise Wrong({rank: f"{context}: {describe_calls(found.calls)}; expected none"})
    if found.gradients:
        evidence = f"{context}: afterwards, {found.gradients} of them have a .grad; expected None, as before"
        raise Wrong({rank: evidence}, "Hint: which line sets .grad, and does this function have to?")


def _judge_places(rank: int, found: Slices, shapes: list, dtype: torch.dtype, context: str) -> None:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    indices = [sum(sizes[:number]) for number in range(len(sizes))]
    slices = [f"{context}: slice {number}, of shape {list(shape)}," for number, shape in enumerate(shapes)]
    for which, index, size, piece in zip(slices, indices, sizes, found.read, strict=True):
        expected = ((torch.arange(size) + index) % 251).to(dtype)
        if torch.equal(piece.flatten(), expected):
            continue
        if not piece.any():
            evidence, hint = "does not change when flat is written to", "Hint: is the slice a view or a copy?"
        elif torch.equal(piece.flatten().sort().values, expected.sort().values):
            evidence = "has the right elements of flat, but in another order"
            hint = "Hint: in which order does the lab's example list the elements of a slice?"
        else:
            first = int((piece.flatten() != expected).nonzero()[0])
            evidence = f"does not have flat[{index + first}] as its element {first}"
            hint = "Hint: what decides where a parameter's slice begins?"
        raise Wrong({rank: f"{which} {evidence}"}, hint)
    for number, (which, index, size) in enumerate(zip(slices, indices, sizes, strict=True)):
        if not bool((found.written[index : index + size] == number + 1).all()):
            evidence = f"was written to, but flat[{index}:{index + size}] does not hold the new values"
            raise Wrong({rank: f"{which} {evidence}"}, "Hint: is the slice a view or a copy?")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- check that several messages are in flight at once, from a rank's launches and waits. No clock is involved


_HINT_ON_TRAVEL = "Hint: what can this rank do while the first bucket is in flight?"


def launched_before_waiting(events: list[Event]) -> int:
    """Count the messages that were launched before the first wait."""
    kinds = [event.kind for event in events]
    return kinds.index("wait") if "wait" in kinds else len(kinds)


def judge_in_flight(rank: int, events: list[Event], context: str) -> None:
    """Check that all messages are launched before the first wait.

    Raises:
        Wrong: If they are not.
    """
    messages = sum(event.kind != "wait" for event in events)
    in_flight = launched_before_waiting(events)
    if in_flight < messages:
        evidence = f"{context}: only {in_flight} of {messages} collectives were launched before the first wait"
        raise Wrong({rank: evidence}, _HINT_ON_TRAVEL)


def judge_late_rank(late: int, missing: list[int], messages: int, context: str) -> None:
    """Check that all other ranks launched all of their messages while one rank had launched none.

    Raises:
        Wrong: If a rank did not.
    """
    if missing:
        evidence = (
            f"{context}: while rank {late} had launched nothing, this rank launched fewer than {messages} collectives"
        )
        raise Wrong(dict.fromkeys(missing, f"{evidence} in {PATIENCE_S:g} s"), _HINT_ON_TRAVEL)


def probe_differentiable(bucket_class) -> str:
    """Pack a gradient that is part of a graph. Returns the type of the error, or "" for none."""
    parameter = nn.Parameter(torch.ones(4, dtype=torch.float64, device=device_here()))
    bucket = bucket_class([parameter])
    (parameter**3).sum().backward(create_graph=True)
    try:
        return _kind_of_error(lambda: bucket.pack(0))
    finally:
        parameter.grad = None  # it refers to its own graph


def _kind_of_error(call: Callable[[], object]) -> str:
    return error_of(call).partition(":")[0]


def probe_refusal(wrapper, options: dict, seed: int, x, y) -> str:
    """Run backward(create_graph=True) in a wrapper. Returns the type of the error, or "" for none."""
    module = awkward.build("Plain", seed).to(device_here())
    wrapped = wrapper(module, **options)

    def train() -> None:
        awkward.loss_of(wrapped, x.to(device_here()), y.to(device_here())).backward(create_graph=True)
        wrapped.finish_gradient_sync()

    try:
        return _kind_of_error(train)
    finally:
        module.zero_grad()  # such a gradient refers to its own graph


def judge_rejection(attempt: Attempt, options: dict) -> None:
    """Check that a wrapper rejects create_graph=True with a RuntimeError.

    Raises:
        Wrong: If it does not.
    """
    for rank, error in enumerate(attempt.run(probe_refusal, options, per_rank=Draw(attempt).per_rank)):
        if error != "RuntimeError":
            message = f"{error} was raised" if error else "no error was raised"
            raise Wrong(
                {rank: f"after backward(create_graph=True), {message}; expected a RuntimeError that says why"},
                "Hint: can autograd differentiate through an all-reduce?",
            )


def probe_waits(bucket_class) -> list[str]:
    """Wait before the first launch, and once more after each of two steps. Returns the types of the errors."""
    parameter = nn.Parameter(torch.ones(4, dtype=torch.float64, device=device_here()))
    bucket = bucket_class([parameter])
    errors = [_kind_of_error(bucket.wait)]
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        bucket.pack(0)
        bucket.launch()
        bucket.wait()
        errors.append(_kind_of_error(bucket.wait))
    return errors


def bucket_rejects_a_wait_for_nothing(attempt: Attempt) -> None:
    moments = ("before the first launch()", "after the wait() of step 1", "after the wait() of step 2")
    for rank, errors in enumerate(attempt.run(probe_waits)):
        for moment, error in zip(moments, errors, strict=True):
            if error == "RuntimeError":
                continue
            message = f"raised {error}" if error else "raised no error"
            hint = "Hint: how does the bucket know whether an all-reduce is in flight, and when does that change?"
            raise Wrong({rank: f"{moment}, wait() {message}; expected a RuntimeError"}, hint)


def bucket_rejects_graphs(attempt: Attempt) -> None:
    for rank, error in enumerate(attempt.run(probe_differentiable)):
        if error != "RuntimeError":
            message = f"pack() raised {error}" if error else "pack() raised no error"
            hint = "Hint: can autograd differentiate through an all-reduce?"
            raise Wrong({rank: f"for a gradient that is part of a graph, {message}; expected a RuntimeError"}, hint)
