"""A student's code that reaches for what measures it ends its rank, directly or through a library. Other code does not.

None of these needs a sandbox, so all of them take a few seconds together.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from instructor.grade import fingerprints, tripwire
from shared.deadlines import scaled

ROOT = Path(__file__).parent.parent
FAKE = "compile('print(1)', torch.__file__, 'exec')"
GLOBALS = "'__glo' + 'bals__'"
# by name: the code, and why it ends its rank
ATTACKS = {
    "getattr of builtins": (f"import builtins\nbuiltins.getattr(dist.send, {GLOBALS})", "uses __globals__"),
    "the dictionary of builtins": (f"import builtins\nvars(builtins)['getattr'](dist.send, {GLOBALS})", "__globals__"),
    "getattr in a pickle": (f"import pickle\npickle.loads(b'cbuiltins\\ngetattr\\n.')(dist.send, {GLOBALS})", "__glob"),
    "the descriptor of functions": (f"vars(type(run))[{GLOBALS}].__get__(shared.wire._entry_of)", "of shared.wire"),
    "a formatter": (
        f"import string\nstring.Formatter().get_field('0.' + {GLOBALS}, (shared.wire._entry_of,), {{}})",
        "uses __globals__ of shared.wire",
    ),
    "type hints": (
        "import typing\nf = shared.wire._entry_of\nf.__annotations__ = {'x': 'instrumentation'}\n"
        "typing.get_type_hints(f)",
        "uses __globals__ of shared.wire",
    ),
    "a module past its class": (
        "find = vars(object)['__getattri' + 'bute__']\n"
        "found = find(sys.modules['shared.wire.instrumentation'], '_lis' + 'teners')",
        "AttributeError",
    ),
    "a module's dictionary past its class": (
        "assert vars(type(sys))['__dict__'].__get__(sys.modules['shared.wire.instrumentation'])",
        "AssertionError",
    ),
    "objects, in a thread": (
        "import gc\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "ThreadPoolExecutor().submit(vars(gc)['get_' + 'objects']).result()",
        "uses gc.get_objects",
    ),
    "a thread below the class": ("import _thread\n_thread.start_new_thread(print, ())", "starts a thread without"),
    "objects, through torch": (
        "import gc\nfrom torch.utils._pytree import tree_map\ntree_map(vars(gc)['get_' + 'referrers'], dist)",
        "uses gc.get_referrers",
    ),
    "frames, through torch": (
        "from torch.utils._pytree import tree_map\ntree_map(vars(sys)['_get' + 'frame'], 0)",
        "uses sys._getframe",
    ),
    "frames, through logging": ("import logging\nlogging.currentframe()", "uses sys._getframe"),
    "the frame of a generator, through a formatter": (
        "import string\nstring.Formatter().get_field('0.gi_' + 'frame', ((x for x in ()),), {})",
        "uses gi_frame",
    ),
    "code under a library's name, through torch": (
        f"from torch.utils._pytree import tree_map\ntree_map(exec, {FAKE})",
        "runs code under the name",
    ),
    "code under a library's name, in a thread": (
        f"import threading\nthread = threading.Thread(target=exec, args=({FAKE},))\nthread.start()\nthread.join()",
        "runs code under the name",
    ),
    "code under a library's name, imported": (
        "import importlib.machinery as m, importlib.util as u\n"
        "class Loader(m.SourceFileLoader):\n"
        f"    def get_code(self, name):\n        return {FAKE}\n"
        "spec = u.spec_from_file_location('x', torch.__file__, loader=Loader('x', torch.__file__))\n"
        "spec.loader.exec_module(u.module_from_spec(spec))",
        "runs code under the name",
    ),
    "code in a library's module": (
        "import numpy.testing\n"
        "numpy.testing.runstring('x = sys.modules[\"shared.wire.instrumentation\"]._listeners', {'sys': sys})",
        "uses shared.wire.instrumentation._listeners",
    ),
    "C through cffi": ("import cffi\ncffi.FFI().dlopen(None)", "imports _cffi_backend"),
    "the interpreter's tests": ("import _testcapi", "imports _testcapi"),
    "memory": ("import ctypes\nctypes.cast(id(run), ctypes.POINTER(ctypes.c_long))", "uses ctypes.cast"),
    "memory, through numpy": ("import numpy\nnumpy.zeros(2).ctypes._ctypes.cast", "uses ctypes.cast"),
    "a library of its own": ("torch.ops.load_library('/tmp/own.so')", "loads /tmp/own.so"),
    "a key that is excluded": (
        "key = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)\n"
        "with torch._C._ExcludeDispatchKeyGuard(key): pass",
        "uses _ExcludeDispatchKeyGuard",
    ),
    "another kernel": ("torch.library.Library('c10d', 'IMPL')", "uses Library"),
    "a kernel below the record": (
        "operator = torch.ops.c10d.allreduce_.default\n"
        "operator._handle.redispatch_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU))",
        "uses redispatch_boxed",
    ),
    "a library's sockets": ("from tornado.netutil import bind_sockets\nbind_sockets(0, '127.0.0.1')", "socket.bind"),
    "the sockets of IPython's library": (
        "import zmq\nzmq.Context().socket(zmq.PULL).bind('tcp://127.0.0.1:*')",
        "uses bind",
    ),
}
HONEST = {
    "classes": """
        import collections, dataclasses, enum, typing
        @dataclasses.dataclass(frozen=True)
        class Data:
            a: int = 1
            b: list = dataclasses.field(default_factory=list)
        class Tuple(typing.NamedTuple):
            a: int
        class Choice(enum.Enum):
            A = 1
        return collections.namedtuple("P", "a b")(1, 2), Tuple(1), Data(), Choice.A
        """,
    "errors": """
        import logging, traceback, warnings
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
            logging.exception("divided")
        warnings.warn("careful")
        return traceback.format_stack()
        """,
    "threads": """
        import threading
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda x: x + 1, [1, 2]))
        thread = threading.Thread(target=found.append, args=(4,))
        thread.start()
        thread.join()
        return found
        """,
    "torch": """
        import importlib
        for name in ("tensor", "fsdp", "checkpoint", "pipelining", "algorithms.join"):
            importlib.import_module(f"torch.distributed.{name}")
        module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
        torch.func.functional_call(module, dict(module.named_parameters()), torch.ones(1, 3))
        torch.func.grad(lambda x: (x * x).sum())(torch.ones(2))
        torch.func.vmap(lambda x: x * 2)(torch.ones(2, 2))
        with torch.autograd.set_detect_anomaly(True):
            module(torch.ones(1, 3)).sum().backward()
        torch.fx.symbolic_trace(module)(torch.ones(1, 3))
        torch.optim.AdamW(module.parameters()).step()
        # FSDP uses this, too. It once ended the ranks of a right load_checkpoint, because it evaluates strings.
        from torch.fx.operator_schemas import get_signature_for_torch_op
        assert get_signature_for_torch_op(torch.ops.aten.add.Tensor)
        from torch.utils.checkpoint import checkpoint
        checkpoint(module, torch.ones(1, 3, requires_grad=True), use_reentrant=False).sum().backward()
        """,
    "files": """
        import copy, io, tempfile
        import torch.distributed.checkpoint as dcp
        state = copy.deepcopy(torch.nn.Linear(2, 2)).state_dict()
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state, folder + "/x")
            torch.load(folder + "/x", mmap=True)
            dcp.save(state, checkpoint_id=folder, no_dist=True)
            dcp.load(state, checkpoint_id=folder, no_dist=True)
        """,
    "the ledger": """
        from shared import wire
        with wire.ledger() as log:
            pass
        return log.entries
        """,
}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="grading needs Linux")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each piece of code did: its rank's exit status, and the end of what was printed."""
    cases = tmp_path_factory.mktemp("cases") / "cases.json"
    cases.write_text(json.dumps({name: body for name, (body, _) in ATTACKS.items()} | HONEST))
    done = subprocess.run(
        [sys.executable, "-m", "tests.tripped", str(cases)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=scaled(250),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ATTACKS)
def test_a_rank_ends_whose_code_reaches_for_what_measures_it(found, name):
    status, printed = found[name]
    _, why = ATTACKS[name]
    assert "returned" not in printed and why in printed
    assert why.endswith("Error") or (status == tripwire.TRIPPED and tripwire.MARK in printed)


@pytest.mark.parametrize("name", HONEST)
def test_honest_code_ends_no_rank(found, name):
    status, printed = found[name]
    assert status == 0 and "returned" in printed, printed


def test_a_property_in_a_class_of_the_course_is_found():
    """`payload_bytes` of a call is an attribute of its instances, which a property of the class would hide."""
    before = {"shared.x.Call": fingerprints.CLASS, "shared.x.Call.lane": "1"}
    after = before | {"shared.x.Call.payload_bytes": "2", "shared.y.new": "3"}
    assert fingerprints.replaced(before, after) == ["shared.x.Call.payload_bytes"]
