"""Judge the default mesh, and a mesh of hosts × ranks per host: its layout, and what hybrid training sends on it."""

import contextlib
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map_only

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here, error_of
from shared.checks.engine.failures import Wrong
from shared.checks.engine.hints import begin_at
from shared.checks.engine.sharded.dtensors import loss_of
from shared.checks.engine.training import Draw
from shared.checks.models import unit_models
from shared.checks.production.training import NAMES, Sharding
from shared.checks.production.wire import judge_wire
from shared.wire.instrumentation import listening

_HINT_ON_ORDER = "Hint: are the ranks of one host in a row or in a column of the mesh?"
_HINT_ON_DEVICE = "Hint: on which device does this rank compute?"
_HINT_ON_DEFAULT = "Hint: on which device does fully_shard compute if it gets no mesh?"
_HINT_ON_TYPE = "Hint: where does the device type of your default mesh come from?"


class _Asked(Exception):
    """Raised instead of making a mesh, because only the requested device type matters."""


class _Elsewhere(torch.Tensor):
    """A tensor that says it is on a device of another type than this rank's."""

    @property
    def device(self) -> torch.device:
        return torch.device(_other_type())

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if (getattr(func, "__module__", "") or "").startswith("torch.distributed"):  # sends it as what it really is
            args, kwargs = tree_map_only(cls, lambda each: each.as_subclass(torch.Tensor), (args, kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _other_type() -> str:
    return "cpu" if device_here().type == "cuda" else "cuda"


@contextlib.contextmanager
def _asking_for_a_mesh(on_cuda: bool):
    """Stop at the first mesh, as if this rank computed on that device. Yields a list for the mesh's device type."""
    asked, was = [], (DeviceMesh.__init__, torch.cuda.is_initialized)

    def init(self, device_type: str, *_, **__):
        asked.append(device_type)
        raise _Asked

    DeviceMesh.__init__, torch.cuda.is_initialized = init, lambda: on_cuda
    try:
        with contextlib.suppress(_Asked):
            yield asked
    finally:
        DeviceMesh.__init__, torch.cuda.is_initialized = was


def probe_default_mesh(fully_sharded, seed: int) -> tuple[str, set[str]]:
    """Shard a module without a mesh, as if torch preferred a device that this rank does not use.

    Returns:
        The type of the module's device, and the device types of all meshes.
    """
    module, here = unit_models.build("Blocks", seed).to(device_here()), device_here().type
    asked, was = set(), (DeviceMesh.__init__, torch._C._get_accelerator)

    def init(self, device_type: str, *args, **options):
        asked.add(device_type)
        if device_type != here:
            raise _Asked
        was[0](self, device_type, *args, **options)

    preferred = torch.device(_other_type())
    DeviceMesh.__init__, torch._C._get_accelerator = init, lambda *_: preferred
    try:
        with contextlib.suppress(_Asked):
            fully_sharded(module)
    finally:
        DeviceMesh.__init__, torch._C._get_accelerator = was
    return here, asked


def probe_module_elsewhere(fully_sharded, seed: int) -> tuple[str, str | None]:
    """Shard a module without a mesh, as if the module were on a device of another type.

    Returns:
        That type, and the device type of the mesh.
    """
    module, elsewhere = unit_models.build("Blocks", seed).to(device_here()), _other_type()
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False):
            setattr(each, name, torch.nn.Parameter(parameter.detach().as_subclass(_Elsewhere)))
    with _asking_for_a_mesh(on_cuda=elsewhere == "cuda") as asked:
        fully_sharded(module)
    return elsewhere, asked[0] if asked else None


def the_default_is_on_the_modules_device(attempt: Attempt) -> None:
    for rank, (here, asked) in enumerate(attempt.run(probe_default_mesh, attempt.draw_seed())):
        for other in asked - {here}:
            evidence = f"if it gets no mesh, it shards on the device type {other}; expected {here}, the module's"
            raise Wrong({rank: evidence}, _HINT_ON_DEFAULT)
    for rank, (expected, found) in enumerate(attempt.run(probe_module_elsewhere, attempt.draw_seed())):
        if found != expected:
            context = f"if the module is on the device type {expected} and no mesh is given"
            raise Wrong({rank: f"{context}, it shards on {found}; expected {expected}"}, _HINT_ON_TYPE)


@dataclass
class Mesh:
    ranks: list
    names: tuple[str, ...] | None
    device_type: str
    own_device_type: str  # where this rank computes


def probe_mesh(host_mesh, ranks_per_host: int) -> Mesh:
    mesh = host_mesh(ranks_per_host)
    if not isinstance(mesh, DeviceMesh):
        raise AssertionError(f"host_mesh() returned a {type(mesh).__name__}; expected a DeviceMesh")
    return Mesh(mesh.mesh.tolist(), mesh.mesh_dim_names, mesh.device_type, device_here().type)


def ranks_are_laid_out(attempt: Attempt) -> None:
    size = attempt.world_size
    for ranks_per_host in (each for each in range(1, size + 1) if size % each == 0):
        context = f"host_mesh({ranks_per_host}) of {size} rank{'s' * (size > 1)}"
        expected = torch.arange(size).view(-1, ranks_per_host).tolist()
        for rank, found in enumerate(attempt.run(probe_mesh, ranks_per_host, context=context)):
            if found.ranks != expected:
                raise Wrong({rank: f"{context} is {found.ranks}; expected {expected}"}, _HINT_ON_ORDER)
            if tuple(found.names or ()) != NAMES:
                evidence = f"{context}: its dimensions are called {found.names}; expected {NAMES}"
                raise Wrong({rank: evidence}, "Hint: which dimension replicates, and which one shards?")
            if found.device_type != found.own_device_type:
                evidence = (
                    f"{context} has device type {found.device_type}; expected {found.own_device_type}, where "
                    "this rank's tensors are"
                )
                raise Wrong({rank: evidence}, _HINT_ON_DEVICE)
    if size == 2:
        _judge_device_type(attempt)


def probe_device_type(host_mesh, on_cuda: bool) -> str | None:
    """Make a mesh as if this rank computed on that device. Return the device type that is requested."""
    with _asking_for_a_mesh(on_cuda) as asked:
        host_mesh(1)
    return asked[0] if asked else None


def _judge_device_type(attempt: Attempt) -> None:
    """Judge the device type as on a machine with a GPU, and as on one without.

    Raises:
        Wrong: If it is another.
    """
    for on_cuda, expected in ((True, "cuda"), (False, "cpu")):
        context = f"with torch.cuda.is_initialized() returning {on_cuda}"
        for rank, found in enumerate(attempt.run(probe_device_type, on_cuda, context=context)):
            if found != expected:
                evidence = f"{context}, host_mesh() has device type {found}; expected {expected}"
                raise Wrong({rank: evidence}, _HINT_ON_DEVICE)


def probe_rejection(host_mesh, ranks_per_host: int) -> str:
    """Return the error that it raises, or an empty string."""
    return error_of(lambda: host_mesh(ranks_per_host))


def uneven_hosts_are_rejected(attempt: Attempt) -> None:
    size = attempt.world_size
    for ranks_per_host in (each for each in range(2, 2 * size + 1) if size % each):
        for rank, found in enumerate(attempt.run(probe_rejection, ranks_per_host)):
            context = f"host_mesh({ranks_per_host}) of {size} ranks"
            if not found:
                raise Wrong(
                    {rank: f"{context} is accepted; expected a ValueError"}, "Hint: how many hosts would that be?"
                )
            kind, _, message = found.partition(": ")
            if kind != "ValueError":
                evidence = f"{context} raises {found[:120].rstrip(': ')}; expected a ValueError"
                raise Wrong(
                    {rank: evidence}, "Hint: what should happen if ranks_per_host does not divide the number of ranks?"
                )
            if not message.strip():
                evidence = f"{context} raises a ValueError without a message; expected one that says why"
                raise Wrong({rank: evidence}, "Hint: which numbers would tell the user what is wrong?")


def probe_hybrid(host_mesh, ranks_per_host: int, plan: Sharding, seed: int, x, y) -> list:
    """Train one step with torch's own fully_shard on the student's mesh. Return what was sent."""
    mesh, module = host_mesh(ranks_per_host), unit_models.build(plan.model, seed).to(device_here())
    for each in (*module.blocks, module):
        fully_shard(each, mesh=mesh, reshard_after_forward=each is not module)
    with listening() as calls:
        loss_of(module, x.to(device_here()), y.to(device_here())).backward()
    return calls


@begin_at(ranks_are_laid_out, "mesh")
def only_gradients_leave_a_host(attempt: Attempt) -> None:
    for ranks_per_host in (2, attempt.world_size):
        plan = Sharding("Blocks", mesh=(attempt.world_size // ranks_per_host, ranks_per_host))
        context = f"trained on host_mesh({ranks_per_host}) of {attempt.world_size} ranks"
        found = attempt.run(probe_hybrid, ranks_per_host, plan, per_rank=Draw(attempt).per_rank, context=context)
        for rank, calls in enumerate(found):
            judge_wire(plan, rank, calls, attempt.world_size, context)
