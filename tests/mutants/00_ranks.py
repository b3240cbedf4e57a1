"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

import torch
import torch.distributed as dist


def sum_keeps_its_buffer():
    """Reuses one tensor for all calls and, on rank 0, adds to what the previous call left in it.

    caught by: sum_over_ranks · values
    """

    _total = torch.zeros(1, dtype=torch.float64)

    def sum_over_ranks(value: float) -> float:
        if dist.get_rank() == 0:
            _total.add_(value)
        else:
            _total.fill_(value)
        dist.all_reduce(_total)
        return _total.item()


def pass_without_waiting_for_recv():
    """Launches the send and the receive but waits only for the send: the result may not have been received yet.

    caught by: pass_right · waits
    """

    _in_flight = []

    def pass_right(tensor: torch.Tensor) -> torch.Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        if size == 1:
            return tensor.clone()
        received = torch.empty_like(tensor)
        sending = dist.isend(tensor, dst=(rank + 1) % size)
        _in_flight.append(dist.irecv(received, src=(rank - 1) % size))
        sending.wait()
        return received


def pass_without_waiting_for_send():
    """Never waits for `isend`: the caller may change the tensor before it has been sent.

    caught by: pass_right · waits
    """

    _in_flight = []

    def pass_right(tensor: torch.Tensor) -> torch.Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        if size == 1:
            return tensor.clone()
        received = torch.empty_like(tensor)
        _in_flight.append(dist.isend(tensor, dst=(rank + 1) % size))
        dist.recv(received, src=(rank - 1) % size)
        return received
