"""End a rank as soon as a student's code reaches for what measures it, or uses what it should build.

A student's code runs in the process that records its collectives. It cannot be kept from everything there, but a
process that has ended cannot take anything back: its exit status reaches the judge, who makes the exercise void. What
is watched:

- the interpreter's audit events, which no code can switch off: frames, the garbage collector, code that it writes, C
- modules of the course that measure, the globals of their functions, and the names in `TABOO`, also if they are put
  together while the code runs
- torch's ready-made wrappers in labs in which students build their own
- ways past the dispatcher, and so past the record. The collectives of a backend are removed, since torch needs none

Libraries do much of this, too. They may, unless a student's code made them do it: by passing them a function or a code
object, or by starting a thread. A library's function that acts on its own contains the name of what it does.
"""

import _operator
import _thread
import builtins
import ctypes
import gc
import operator
import os
import sys
import threading
from types import CodeType, FrameType, FunctionType, ModuleType

from instructor.grade import attribution
from instructor.grade.attribution import STANDARD, by_student, is_students, through_student

TRIPPED = 117  # the exit status of such a rank
MARK = "VOID: "  # begins the line in its log that says why
IMPORTER = "<frozen importlib._bootstrap>"
# These run code that they write, for whoever defines a data class or a named tuple.
WRITING = ("dataclasses.py", "collections/__init__.py", "typing.py", "enum.py")
WRITERS = tuple(f"{folder}{name}" for folder in STANDARD for name in WRITING)
TRACEBACKS = tuple(f"{folder}traceback.py" for folder in STANDARD)

# Names that lead from any object to the interpreter's insides, or to the record
TABOO = {"__globals__", "__closure__", "__builtins__", "__getattribute__", "__subclasses__", "__code__"}
TABOO |= {"cell_contents", "__mro__", "__base__", "__bases__", "tb_frame", "gi_frame", "cr_frame", "ag_frame", "f_back"}
TABOO |= {"f_globals", "f_locals", "f_builtins", "_getframe", "_current_frames", "settrace", "setprofile"}
TABOO |= {"addaudithook", "get_referrers", "get_referents", "get_objects", "_get_backend", "_get_default_store"}
TABOO |= {"_listeners", "before_launch", "work_wrappers"}

GUARDED = ("shared.checks", "shared.ranks", "shared.wire", "instructor")
RAW = ("ctypes", "_ctypes", "zmq.backend")  # give their users memory, or sockets
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

# Names of torch._C that lead past the record: no collective is recorded while its key is excluded.
PAST_THE_RECORD = ("_ExcludeDispatchKeyGuard", "_IncludeDispatchKeyGuard", "_ForceDispatchKeyGuard")
PAST_THE_RECORD += ("_dispatch_tls_set_dispatch_key_excluded", "_dispatch_tls_set_dispatch_key_included")
PAST_THE_RECORD += ("_dispatch_library", "_jit_get_operation", "_get_operation_overload")
# Modules in C that reach into the interpreter, or that call C
INSIDES = ("_cffi_backend", "_testcapi", "_testinternalcapi", "_xxsubinterpreters", "_ctypes_test")

NEVER = (
    *("sys.settrace", "sys.setprofile", "sys.monitoring.register_callback", "sys.addaudithook"),
    *("gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._current_frames", "sys._current_exceptions"),
    *("ctypes.addressof", "ctypes.cdata", "ctypes.string_at", "ctypes.call_function"),
    *("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"),
)
# Events, and the names that a library's function contains which causes one of them on its own
NAMED = {
    "sys._getframe": ("_getframe",),
    "code.__new__": ("CodeType", "replace"),
    "function.__new__": ("FunctionType",),
}
STARTING = ("start_new_thread", "start_new", "start_joinable_thread")
FRAMES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
CODE = ("__code__", "__defaults__", "__kwdefaults__")
PROTECTED = ((FunctionType, "__globals__"), (FunctionType, "__closure__"))
PROTECTED += ((FrameType, "f_globals"), (FrameType, "f_locals"))
_getframe, _exit, _write = sys._getframe, os._exit, os.write
_globals_of = {FunctionType: FunctionType.__dict__["__globals__"], FrameType: FrameType.__dict__["f_globals"]}
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
    _close_ways_past_the_record()
    _close_library_sockets()
    _guard_modules()
    for name in ("attrgetter", "methodcaller"):
        operator.__dict__[name] = _operator.__dict__[name] = _checking_parts(operator.__dict__[name])
    _note_threads()
    for owner, name in PROTECTED:
        _protect(owner, name)
    builtins.__class__ = Builtins
    sys.addaudithook(_hook())


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
    """Stands in for a module of the course that measures.

    Its own dictionary is empty, so nothing can be read past `__getattribute__`. The course's own modules refer to the
    real ones.
    """

    def __getattribute__(self, name):
        if name == "__class__":
            return Guarded
        if name not in IMPORTING:
            _reached(self, name)
        content = _content[id(self)]
        if name == "__dict__":
            return content
        if name in content:
            return content[name]
        if "__getattr__" in content:
            return content["__getattr__"](name)
        raise AttributeError(f"module {content['__name__']!r} has no attribute {name!r}")

    def __setattr__(self, name, value):
        _reached(self, name)
        _content[id(self)][name] = value

    def __delattr__(self, name):
        _reached(self, name)
        del _content[id(self)][name]


_content: dict[int, dict] = {}  # what the real modules contain, by the id of what stands in for them


def is_guarded(name) -> bool:
    """Return whether a module measures, or is one of RAW."""
    return isinstance(name, str) and any(f"{name}.".startswith(f"{guarded}.") for guarded in (*GUARDED, *RAW))


def _guard_modules() -> None:
    """Let all modules that do not measure see the ones that do only through a Guarded."""
    stand_ins = {}
    for name, module in list(sys.modules.items()):
        if name not in FREE and is_guarded(name) and isinstance(module, ModuleType):
            stand_in = ModuleType(name)
            vars(stand_in).clear()
            _content[id(stand_in)] = vars(module)
            stand_ins[id(module)] = (module, stand_in)  # This keeps the ids.
            sys.modules[name] = stand_in
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (name in FREE or not is_guarded(name)):
            content = vars(module)
            content |= {key: stand_ins[id(value)][1] for key, value in content.items() if id(value) in stand_ins}
    for _, stand_in in stand_ins.values():
        stand_in.__class__ = Guarded


def _reached(module: ModuleType, name: str) -> None:
    frame = attribution.innermost(attribution.is_standard)
    file = attribution.file_of(frame) if frame else ""
    ours = file.startswith(attribution.COURSE) and not file.startswith(attribution.SOLUTIONS)
    owner = _content[id(module)]["__name__"]
    own_use = owner in RAW and frame is not None and name in frame.f_code.co_names and not is_students(frame)
    if not ours and not own_use and through_student(frame):
        void(f"the code uses {owner}.{name}" + ", which measures it" * (owner not in RAW))


def _like(function, checked):
    """Give a function the name of another one, but unlike functools.wraps no way to it."""
    checked.__name__, checked.__qualname__, checked.__doc__ = function.__name__, function.__name__, function.__doc__
    return checked


def _checking(function):
    """Return a built-in function that refuses names in TABOO."""

    def checked(owner, *names):
        if names and isinstance(names[0], str) and str.__str__(names[0]) in TABOO:
            void(f"the code uses {str.__str__(names[0])}")
        return function(owner, *names)

    return _like(function, checked)


CHECKED = {name: _checking(getattr(builtins, name)) for name in ("getattr", "hasattr", "setattr", "delattr")}
_given = vars(builtins) | CHECKED


def builtins_for_students() -> dict:
    """Return the built-in names for a student's module. With these, no name in TABOO can be put together."""
    return _given


class Builtins(ModuleType):
    """The module `builtins`, whose functions refuse names in TABOO when a student's code takes them from it.

    What compiled code finds without a module is not affected.
    """

    def __getattribute__(self, name):
        if (name in CHECKED or name == "__dict__") and through_student():
            return _given if name == "__dict__" else CHECKED[name]
        return ModuleType.__getattribute__(self, name)


class Protected:
    """Stands in for an attribute of a type that leads into a module, such as a function's globals."""

    def __init__(self, owner: type, name: str):
        self.__name__, self.__objclass__, self.__doc__ = name, owner, None

    def __get__(self, each, kind=None):
        if each is None:
            return self
        name = _globals_of[self.__objclass__].__get__(each).get("__name__")
        if is_guarded(name) and through_student():
            frame = attribution.innermost()
            shows = frame is not None and attribution.file_of(frame).startswith(TRACEBACKS)
            if not shows or self.__name__ != "f_globals":
                void(f"the code uses {self.__name__} of {name}, which measures it")
        return _originals[self.__objclass__, self.__name__].__get__(each)

    def __set__(self, each, value):
        raise AttributeError("readonly attribute")


_originals = {(owner, name): owner.__dict__[name] for owner, name in PROTECTED}


def _protect(owner: type, name: str) -> None:
    """Replace an attribute of one of the interpreter's own types, which Python does not let us set."""
    (content,) = gc.get_referents(owner.__dict__)
    content[name] = Protected(owner, name)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))


def _checking_parts(function):
    """Return attrgetter or methodcaller, which refuses names in TABOO."""

    def checked(*names, **options):
        parts = {part for name in names if isinstance(name, str) for part in str.__str__(name).split(".")}
        if parts & TABOO and by_student():
            void(f"the code uses {min(parts & TABOO)}")
        return function(*names, **options)

    return _like(function, checked)


def _refusing(construct, name: str):
    """Return the constructor of ready-made code, which no student's code may use in any way."""

    def constructed(self, *args, **kwargs):
        if through_student():
            void(f"the code uses {name}, which the lab does not ask for")
        construct(self, *args, **kwargs)

    return _like(construct, constructed)


def _refusing_by_name(function, name: str, passed=lambda file: False):
    """Return a function that only libraries may call that name it."""

    def called(*args, **kwargs):
        if by_student(name, passed=passed):
            void(f"the code uses {name}, which leads past what measures it")
        return function(*args, **kwargs)

    return _like(function, called)


def _close_ways_past_the_record() -> None:
    """Keep students' code from calling collectives below the dispatcher's key that records them, or replacing it."""
    import torch

    for name in PAST_THE_RECORD:
        found = getattr(torch._C, name, None)
        if isinstance(found, type):
            found.__init__ = _refusing_by_name(found.__init__, name)
        elif found is not None:
            setattr(torch._C, name, _refusing_by_name(found, name))
    torch.library.Library.__init__ = _refusing_by_name(torch.library.Library.__init__, "Library")
    handle = type(torch.ops.c10d.allreduce_.default._handle)
    for owner, name in ((torch._ops.OpOverload, "redispatch"), (handle, "redispatch_boxed")):
        setattr(owner, name, _refusing_by_name(getattr(owner, name), name))


def _close_library_sockets() -> None:
    """Keep students' code from using the sockets of IPython's library, which audit events do not tell."""
    import zmq

    folder = os.path.dirname(zmq.__file__) + os.sep

    def own(file: str) -> bool:
        return file.startswith(folder)

    for name in ("bind", "connect"):
        setattr(zmq.Socket, name, _refusing_by_name(getattr(zmq.Socket, name), name, own))


def _note_threads() -> None:
    """Note which threads a student's code starts. Most versions of Python have no audit event for that."""

    def noting(start):
        def started(function, *args, **kwargs):
            if through_student() and not attribution.note_thread(function):
                void("the code starts a thread without the class Thread")
            return start(function, *args, **kwargs)

        return _like(start, started)

    for name in STARTING:
        if start := getattr(_thread, name, None):
            setattr(_thread, name, noting(start))
        if start := getattr(threading, f"_{name}", None):
            setattr(threading, f"_{name}", noting(start))


def _remove_collectives_of_backends() -> None:
    from torch._C import _distributed_c10d as c10d

    for owner in [c10d.Backend, *c10d.Backend.__subclasses__()]:
        for name in COLLECTIVES:
            if name in vars(owner):
                delattr(owner, name)


def _hook():
    """Return the function that the interpreter calls at each audit event. Nothing else refers to it."""
    busy = threading.local()
    reasons = dict.fromkeys(NEVER, _reason_for_never) | dict.fromkeys(NAMED, _reason_for_named)
    reasons |= {"exec": _reason_for_exec, "import": _reason_for_import, "ctypes.dlopen": _reason_for_loading}
    reasons |= {"object.__getattr__": _reason_for_reading, "object.__setattr__": _reason_for_writing}

    def hook(event: str, args: tuple) -> None:
        if event not in reasons or getattr(busy, "on", False):
            return
        busy.on = True
        try:
            why = reasons[event](event, args)
            if why:
                void(f"the code {why}")
        finally:
            busy.on = False

    return hook


def _reason_for_never(event: str, args: tuple) -> str:
    return f"uses {event}" if through_student() else ""


def _reason_for_named(event: str, args: tuple) -> str:
    if _getframe(2).f_code.co_filename in attribution.OWN:
        return ""
    return f"uses {event}" if by_student(*NAMED[event]) else ""


def _reason_for_exec(event: str, args: tuple) -> str:
    """Refuse code under the name of a library's file, and code that a student's code runs itself."""
    name = args[0].co_filename if isinstance(args[0], CodeType) else ""
    if name.startswith(attribution.TRUSTED):
        frame = attribution.innermost()
        imports = frame is not None and attribution.file_of(frame) == IMPORTER
        return "" if imports and attribution.is_genuine(args[0]) else f"runs code under the name {name}"
    runs, user = attribution.innermost(), attribution.innermost(attribution.is_standard)
    if runs is not None and attribution.file_of(runs).startswith(WRITERS):
        return ""
    if runs is None or user is None:
        return "uses exec"
    passed_on = attribution.file_of(runs) != IMPORTER and not {"exec", "eval"} & {*runs.f_code.co_names}
    return "uses exec" if is_students(user) or passed_on else ""


def _reason_for_import(event: str, args: tuple) -> str:
    """Refuse modules in C that lead out of Python. `args[1]` is the file of a module in C, and None for all others."""
    name, file = args[0], args[1]
    known = file is None or attribution.is_library(str(file))
    return f"imports {name}" if (not known or name in INSIDES) and through_student() else ""


def _reason_for_loading(event: str, args: tuple) -> str:
    """Refuse libraries that do not belong to Python or to a package. The system's own ones have no folder."""
    path = str(args[0] or "")
    known = os.sep not in path or attribution.is_library(path)
    return "" if known or not through_student() else f"loads {path}"


def _reason_for_reading(event: str, args: tuple) -> str:
    name = args[1]
    return f"uses {name}" if name in FRAMES and by_student(name) else ""


def _reason_for_writing(event: str, args: tuple) -> str:
    owner, name = args[0], args[1]
    if name in CODE or isinstance(owner, Guarded):
        return f"sets {name}" if by_student(name) else ""
    return ""
