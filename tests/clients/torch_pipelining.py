"""torch: ``torch.distributed.pipelining`` by four schedules, a stage or two on a rank.

torchrun --nproc-per-node 2 tests/clients/torch_pipelining.py sidelane
"""

import torch
import torch.distributed as dist
from client import BACKEND, DEVICE, RANK, RANKS, finish, model, sums
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

dist.init_process_group(BACKEND)  # the line
values = []
for schedule in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
    several = schedule not in (ScheduleGPipe, Schedule1F1B)
    count = 2 * RANKS if several else RANKS
    nets = [model().to(DEVICE) for _ in range(RANK, count, RANKS)]
    numbers = range(RANK, count, RANKS)
    stages = [PipelineStage(net, number, count, DEVICE) for net, number in zip(nets, numbers, strict=True)]
    run = schedule(stages if several else stages[0], 4, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.AdamW([parameter for net in nets for parameter in net.parameters()], lr=1e-2)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for _ in range(4):
        losses: list[torch.Tensor] = []
        if RANK == 0:
            run.step(x)
        elif RANK == RANKS - 1:
            run.step(target=x, losses=losses)
        else:
            run.step()
        optimizer.step()
        optimizer.zero_grad()
        values += [loss.item() for loss in losses]
    values += sums(parameter for net in nets for parameter in net.parameters())
finish(values)
