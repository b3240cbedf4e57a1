"""End a rank as soon as a student's code reaches for what measures it, or uses what it should build.

A student's code runs in the process that records its collectives. It cannot be kept from everything there, but a
process that has ended cannot take anything back: its exit status reaches the judge, who makes the exercise void. What
is watched:

- the interpreter's audit events, which no code can switch off: frames, the garbage collector, code that it writes, C
- modules of the course that measure, and the names in `TABOO`, also if they are put together while the code runs
- torch's ready-made wrappers in labs in which students build their own
- collectives of a backend, which bypass the dispatcher and so the record. These are removed, since torch needs none
"""

import _operator
import builtins
import operator
import os
import sys
import sysconfig
import threading
from functools import wraps
from pathlib import Path
from types import ModuleType

TRIPPED = 117  # the exit status of such a rank
MARK = "VOID: "  # begins the line in its log that says why
COURSE = str(Path(__file__).resolve().parents[2]) + os.sep
STANDARD = tuple(sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "platstdlib"))
PACKAGES = tuple(sysconfig.get_paths()[key] + os.sep for key in ("purelib", "platlib"))
TRUSTED = (COURSE, *STANDARD, *PACKAGES, "<frozen ")
# These run code that they write, for whoever defines a data class or a named tuple. Other modules run what they get.
WRITING = ("dataclasses.py", "collections/__init__.py", "typing.py", "enum.py")
WRITERS = tuple(f"{folder}{name}" for folder in STANDARD for name in WRITING)
INSPECTING = tuple(f"{folder}inspect.py" for folder in STANDARD)
WALKS = ("walk_tb", "walk_stack")  # generators of traceback.py that hand out frames

# Names that lead from any object to the interpreter's insides, or to the record
TABOO = {"__globals__", "__closure__", "__builtins__", "__getattribute__", "__subclasses__", "__code__"}
TABOO |= {"cell_contents", "__mro__", "__base__", "__bases__", "tb_frame", "gi_frame", "cr_frame", "ag_frame", "f_back"}
TABOO |= {"f_globals", "f_locals", "f_builtins", "_getframe", "_current_frames", "settrace", "setprofile"}
TABOO |= {"addaudithook", "get_referrers", "get_referents", "get_objects", "_get_backend", "_get_default_store"}
TABOO |= {"_listeners", "before_launch", "work_wrappers"}

GUARDED = ("shared.checks", "shared.ranks", "shared.wire", "instructor")
FREE = ("shared.wire", "shared.ranks", "shared.wire.clock", "shared.wire.sizes")  # students' own code may use these
IMPORTING = ("__spec__", "__path__", "__name__", "__file__", "__loader__", "__package__", "__doc__", "__class__")

COLLECTIVES = ("broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "_allgather_base", "gather")
COLLECTIVES += ("allgather_coalesced", "scatter", "reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base")
COLLECTIVES += ("send", "recv", "recv_anysource", "barrier", "monitored_barrier")
# What a submission may not construct, unless its lab asks for it: the name, and the class that is constructed then.
READY_MADE = {
    "DistributedDataParallel": ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    "FullyShardedDataParallel": ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    "ZeroRedundancyOptimizer": ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"),
    "fully_shard": ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState"),
    "Reducer": ("torch._C._distributed_c10d", "Reducer"),
    "DistributedSampler": ("torch.utils.data.distributed", "DistributedSampler"),
    "TCPStore": ("torch._C._distributed_c10d", "TCPStore"),
    "init_rpc": ("torch.distributed.rpc", "TensorPipeAgent"),
}

# Events that only code of these kinds causes, and where the first frame counts that is not of the given files
BY_ANYBODY_BUT_THE_LIBRARY = (
    *("sys.settrace", "sys.setprofile", "sys.monitoring.register_callback", "sys.addaudithook"),
    *("gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._current_frames", "sys._current_exceptions"),
    *("ctypes.dlopen", "ctypes.dlsym", "ctypes.addressof", "ctypes.cdata", "ctypes.string_at", "ctypes.call_function"),
    *("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"),
)
BY_THE_CODE_ITSELF = ("sys._getframe", "code.__new__", "function.__new__")
FRAMES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
CODE = ("__code__", "__defaults__", "__kwdefaults__")
_getframe, _exit, _write = sys._getframe, os._exit, os.write
_log = 2  # the file descriptor of this rank's log


def install(allowed: tuple[str, ...]) -> None:
    """Watch this process from now on.

    Args:
        allowed: The names of READY_MADE that the lab asks for.
    """
    global _log
    _log = os.dup(2)  # because ipykernel replaces 2
    _remove_collectives_of_backends()
    for name, (module, attribute) in READY_MADE.items():
        found = getattr(sys.modules.get(module), attribute, None)
        if name not in allowed and found is not None:
            found.__init__ = _refusing(found.__init__, name)
    for name, module in list(sys.modules.items()):
        if name not in FREE and any(f"{name}.".startswith(f"{guarded}.") for guarded in GUARDED):
            module.__class__ = Guarded
    for name in ("attrgetter", "methodcaller"):
        operator.__dict__[name] = _operator.__dict__[name] = _checking_parts(operator.__dict__[name])
    sys.addaudithook(_hook())


def builtins_for_students() -> dict:
    """Return the built-in names for a student's module. With these, no name in TABOO can be put together."""
    guarded = {name: _checking(getattr(builtins, name)) for name in ("getattr", "hasattr", "setattr", "delattr")}
    return vars(builtins) | guarded


def void(what: str) -> None:
    """End this rank, and leave in its log what the code did."""
    _write(_log, f"\n{MARK}{what}{_place()}\n".encode(errors="replace"))
    _exit(TRIPPED)


def _place() -> str:
    frame = _getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith("candidate.py"):
        frame = frame.f_back
    return f" (candidate.py, line {frame.f_lineno})" if frame else ""


class Guarded(ModuleType):
    """A module of the course that the ranks' own code uses, and no student's code."""

    def __getattribute__(self, name):
        value = ModuleType.__getattribute__(self, name)
        if name not in IMPORTING:
            _reached(self, name)
        return value

    def __setattr__(self, name, value):
        _reached(self, name)
        ModuleType.__setattr__(self, name, value)

    def __delattr__(self, name):
        _reached(self, name)
        ModuleType.__delattr__(self, name)


def _reached(module: ModuleType, name: str) -> None:
    if _is_students(_caller(STANDARD)):
        void(f"the code uses {ModuleType.__getattribute__(module, '__name__')}.{name}, which measures it")


def _is_students(filename: str) -> bool:
    return not filename.startswith(TRUSTED)


def _caller(passed: tuple[str, ...]) -> str:
    """Return the file of the innermost frame that is not of this module or of the files to be passed over."""
    frame = _getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        library = file.startswith(passed) and not file.startswith(PACKAGES)
        if file != __file__ and not library:
            break
        frame = frame.f_back
    return frame.f_code.co_filename


def _checking(function):
    """Return a built-in function that refuses names in TABOO."""

    @wraps(function)
    def checked(owner, *names):
        if names and isinstance(names[0], str) and str.__str__(names[0]) in TABOO:
            void(f"the code uses {str.__str__(names[0])}")
        return function(owner, *names)

    return checked


def _checking_parts(function):
    """Return attrgetter or methodcaller, which refuses names in TABOO."""

    @wraps(function)
    def checked(*names, **options):
        parts = {part for name in names if isinstance(name, str) for part in str.__str__(name).split(".")}
        if parts & TABOO and _is_students(_caller(())):
            void(f"the code uses {min(parts & TABOO)}")
        return function(*names, **options)

    return checked


def _refusing(construct, name: str):
    @wraps(construct)
    def constructed(self, *args, **kwargs):
        if _is_students(_caller(PACKAGES + STANDARD)):
            void(f"the code uses {name}, which the lab does not ask for")
        construct(self, *args, **kwargs)

    return constructed


def _remove_collectives_of_backends() -> None:
    from torch._C import _distributed_c10d as c10d

    for owner in [c10d.Backend, *c10d.Backend.__subclasses__()]:
        for name in COLLECTIVES:
            if name in vars(owner):
                delattr(owner, name)


def _hook():
    """Return the function that the interpreter calls at each audit event. Nothing else refers to it."""
    busy = threading.local()
    names = {
        *BY_ANYBODY_BUT_THE_LIBRARY,
        *BY_THE_CODE_ITSELF,
        "object.__getattr__",
        "object.__setattr__",
        "open",
        "exec",
    }

    def reason(event: str, args: tuple) -> str:
        if event in BY_ANYBODY_BUT_THE_LIBRARY:
            return f"the code uses {event}" if _is_students(_caller(STANDARD)) else ""
        if event == "sys._getframe" and _getframe(2).f_code.co_filename == __file__:
            return ""
        if event in BY_THE_CODE_ITSELF:
            return f"the code uses {event}" if _is_students(_caller(INSPECTING)) else ""
        if event == "exec":
            writes = _caller(()).startswith(WRITERS)
            return "the code uses exec" if not writes and _is_students(_caller(STANDARD)) else ""
        if event == "open":
            inside = isinstance(args[0], (str, bytes)) and str(args[0]).strip("b'").startswith("/proc/")
            memory = inside and str(args[0]).strip("b'").endswith(("/mem", "/maps"))
            return "the code opens its own memory" if memory and _is_students(_caller(STANDARD)) else ""
        owner, name = args[0], args[1]
        if event == "object.__getattr__":
            handed = name in FRAMES and (_is_students(_caller(INSPECTING)) or _is_walked())
            return f"the code uses {name}" if handed else ""
        if (name in CODE or isinstance(owner, Guarded)) and _is_students(_caller(STANDARD)):
            return f"the code sets {name}"
        return ""

    def hook(event: str, args: tuple) -> None:
        if event not in names or getattr(busy, "on", False):
            return
        busy.on = True
        try:
            why = reason(event, args)
            if why:
                void(why)
        finally:
            busy.on = False

    return hook


def _is_walked() -> bool:
    """Return whether the student's code itself takes frames from a generator of traceback.py."""
    frame = _getframe(0)
    while frame is not None and frame.f_code.co_name not in WALKS:
        frame = frame.f_back
    return frame is not None and frame.f_back is not None and _is_students(frame.f_back.f_code.co_filename)
