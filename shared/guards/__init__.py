"""Guards of our wrappers: they train as one process would, or raise an error on every rank that says what to do.

A wrapper of chapters 02 to 08 is guarded by the line `@guarded(…)`, and ZeRO1 by a Guard of its own:

- When a module is wrapped, `tensors` looks at its parameters and buffers, and `alarms` compares the ranks' models. That
  costs one all-gather of two integers.
- At the first gradient of a step, and when gradients are averaged, `guard` looks for changes since then: a loop
  over layers and parameters, without communication.
- When a gradient is complete, or in finish_gradient_sync(), `tensors` rejects what a bucket cannot hold.
- From chapter 04 on, `backwards` lets the wrapper average gradients at the end of backward(), and completes what an
  exception has interrupted.
- When gradients have been averaged, `alarms` reads one element of a mean, because another rank may have a problem, and
  `unused` looks at gradients that are None on this rank, because they may be None on all.
- Before a sharded optimizer's step, `pieces` does the same, and lets the optimizer leave out what is None on all.
- After a sharded optimizer's step, `in_flight` lets whoever reads a parameter wait until it is complete.
- In torch's optimizers and clipping, `calls` looks for gradients that are not the mean yet. Usually there are none,
  and that takes a microsecond.

If a check fails while other ranks wait in a collective, all ranks raise the error: see [Note: raising on every rank] in
`alarms`. On GPUs, only the rank that finds a problem in a step raises it, and the others wait until their collective
times out. To notice it earlier, their CPUs would have to wait for the GPU in every step.
"""

from shared.guards.backwards import at_end_of_backward
from shared.guards.calls import reject_altered, reject_grad_scaler, stale_gradient
from shared.guards.exchanges import AtStep, InBackward, Joint, Overlapped, PerBucket, PerParameter, Sharded
from shared.guards.guard import Guard
from shared.guards.optimizers import all_parameters_of, reject_other_settings, reject_whole_tensor_updates, unshared
from shared.guards.pieces import Pieces
from shared.guards.tensors import contiguous
from shared.guards.unused import UNUSED
from shared.guards.wrappers import call_hook, complete_interrupted_sync, guarded, synchronizes
