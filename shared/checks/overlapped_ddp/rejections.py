"""Judge what a wrapper must reject: gradients that belong to a graph."""

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Wrong
from shared.checks.engine.overlap_models import draw_sizes
from shared.checks.engine.overlap_probes import probe_graph
from shared.checks.engine.overlap_steps import draw_shares


def a_graph_is_rejected(attempt: Attempt) -> None:
    sizes, seed, shares = draw_sizes(attempt), attempt.draw_seed(), draw_shares(attempt)
    for rank, (kind, message) in enumerate(attempt.run(probe_graph, sizes, seed, per_rank=shares)):
        if kind is None:
            evidence = "backward(create_graph=True) is accepted; expected a RuntimeError"
            raise Wrong({rank: evidence}, "Hint: can autograd differentiate through an all-reduce?")
        if kind != "RuntimeError" or not message.strip():
            evidence = f"backward(create_graph=True) raises {kind}({message[:80]!r})"
            raise Wrong({rank: f"{evidence}; expected a RuntimeError that says why"})
