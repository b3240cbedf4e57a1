"""Draw two of the README's figures: the planner's errors (chapter 18), and compressed training (chapter 19).

python -m benchmarks.gallery    # writes source/images/planner.png and compression.png
"""

import contextlib
import io

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.ladder import README
from shared import ranks, wire
from shared.data import digits
from shared.models import MLP
from shared.planner import scores
from shared.plots import compression as compression_plots
from shared.ranks import rankside
from solutions.compression import Int8, PowerSGD, TopK
from solutions.overlapped_ddp import OverlappedDDP

IMAGES = README.parent.parent / "source" / "images"
COMPRESSORS = {"float32": None, "Int8()": Int8(), "TopK(0.01)": TopK(0.01), "PowerSGD(2)": PowerSGD(2)}
WORLD_SIZE, STEPS, SAMPLES = 4, 200, 24


def trained(compressor) -> tuple[float, list[float]]:
    """Return the bytes that this rank sends per step, and the mean loss of each step. Runs on every rank."""
    device = torch.device(rankside.here.device)
    images, labels = (each.to(device) for each in digits())
    torch.manual_seed(0)
    model = OverlappedDDP(MLP().to(device), compressor=compressor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    draws, losses = torch.Generator().manual_seed(dist.get_rank()), torch.zeros(STEPS, device=device)
    with wire.ledger() as log:
        for step in range(STEPS):
            picked = torch.randint(len(images), (SAMPLES,), generator=draws)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[picked]), labels[picked])
            loss.backward()
            model.finish_gradient_sync()
            optimizer.step()
            losses[step] = loss.detach()
    dist.all_reduce(losses)
    return log.sent_bytes / STEPS, (losses / dist.get_world_size()).tolist()


def main() -> None:
    from benchmarks.gallery import trained  # a function of __main__ could not be sent to the ranks

    scores.figure().savefig(IMAGES / "planner.png", dpi=150)
    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(WORLD_SIZE)
    try:
        runs = {name: ranks.run(trained, compressor)[0] for name, compressor in COMPRESSORS.items()}
    finally:
        ranks.stop()
    compression_plots.loss_against_bytes(runs).savefig(IMAGES / "compression.png", dpi=150)
    for name, (step_bytes, losses) in runs.items():
        print(f"{name:12} {runs['float32'][0] / step_bytes:5.1f} × fewer bytes, last loss {sum(losses[-10:]) / 10:.3f}")


if __name__ == "__main__":
    main()
