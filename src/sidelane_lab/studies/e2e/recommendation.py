"""Recommendation at the shapes of the fused operators paper (section IV, Figure 8): DLRM between GPUs of one node.

``batch x tables``: samples of all ranks, and tables of a rank. Rows have 256 elements. The number of a bag's rows is
uniform between 1 and twice its mean, as DLRM's data generator draws it (``generate_uniform_input_batch``, which draws a
bag's rows without repeats: among so many rows they are rare). MLP layers are those of the paper's Table II.

Tables lie whole on one rank each, or in shards of rows on all ranks, whose partial bags are summed.

====================  ==================================================================================================
nccl                  one ``embedding_bag`` of all tables, ``all_to_all_single`` next to the bottom MLP, a copy
nccl, a bag a table   the same with a kernel for each table, as DLRM has it
nccl, our bags        the same with the operator's loop in one kernel, which only stores locally
copies                "nccl, our bags", by the communicator
operators             ``embedding_all_to_all``, and its backward
none                  the bags of "our bags" (on CPU ranks of "nccl"), of which nothing is exchanged
====================  ==================================================================================================

With shards of rows ``nccl`` is one ``embedding_bag`` and a reduce-scatter. Training has dense gradients of the tables:
PyTorch's fast way for tables as small as these. Ways are those with gradients: the first and the operators.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from sidelane import ops
from sidelane.ops import library
from sidelane.program.collective import Kind
from sidelane.session import Communicator
from sidelane_lab.baselines.candidate import reduce_scatter
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import library_us
from sidelane_lab.model.operators import Embedding, predict_fused
from sidelane_lab.model.split import ours_us
from sidelane_lab.studies.e2e.workload import EndToEndWorkload, Prepared, moved_us
from sidelane_lab.studies.fused.single_rank import BagKernel

INFERENCE, TRAINING, ROWS = "inference", "training", "rows"
LEARNING_RATE = 1e-6

SAMPLED = 37
"""Distance of the elements of bags that are compared: it divides no width."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecommendationSize:
    """Parameters of a recommender.

    Attributes:
        batch: number of samples of all ranks.
        tables: number of tables of a rank; with shards of rows, of all ranks, each of which has a shard of each.
        pooling: mean number of rows of a bag.
        part: inference or training, or inference with shards of rows.
        dim: number of elements of a row.
        rows: number of rows that a rank has of a table.
        bottom: number of layers of the MLP next to the exchange.
        top: number of layers of the MLP behind it.
        width: number of features of a layer.
        dense: number of dense features of a sample.
    """

    batch: int
    tables: int
    pooling: int
    part: str = INFERENCE
    dim: int = 256
    rows: int = 1 << 17
    bottom: int = 8
    top: int = 35
    width: int = 682
    dense: int = 13

    def pooled_rows(self, ranks: int) -> int:
        """Return the mean number of rows of a bag that a rank has."""
        return max(1, self.pooling // ranks) if self.part == ROWS else self.pooling


class Dlrm(nn.Module):
    """Layers that all ranks have: for dense features, and for products of all pairs of features."""

    def __init__(self, size: RecommendationSize, features: int) -> None:
        super().__init__()
        self.bottom = _layers(size.dense, size.width, size.bottom, size.dim)
        self.top = _layers(size.dim + features * (features + 1) // 2, size.width, size.top, 1)
        pairs = torch.tril_indices(features + 1, features + 1, -1)
        self.pairs: Tensor
        self.register_buffer("pairs", pairs[0] * (features + 1) + pairs[1])

    def forward(self, x: Tensor, pooled: Tensor) -> Tensor:
        """Return scores [b] of dense features behind the bottom, [b, D], and bags, [b, features * D]."""
        features = torch.cat((x[:, None], pooled.view(len(x), -1, x.shape[1])), dim=1)
        products = (features @ features.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        scores: Tensor = self.top(torch.cat((x, products), dim=1))[:, 0]
        return scores


def _layers(first: int, width: int, count: int, last: int) -> nn.Sequential:
    widths = [first, *[width] * (count - 1), last]
    layers = (layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU()))
    return nn.Sequential(*list(layers)[:-1])


class Lookups:
    """Bags of all samples in this rank's tables, in the order of tables and in that in which results leave."""

    def __init__(self, size: RecommendationSize, comm: Communicator, device: torch.device) -> None:
        n, part = comm.world_size, size.batch // comm.world_size
        pooling = size.pooled_rows(n)
        draw = torch.Generator(device).manual_seed(20 + comm.rank)
        uniform = torch.rand(size.tables, size.batch, device=device, generator=draw)
        lengths = (uniform * 2 * pooling).round().clamp(min=1).long()
        self.offsets = functional.pad(lengths.flatten().cumsum(0), (1, 0))
        self.indices = torch.randint(size.rows, (int(self.offsets[-1]),), device=device, generator=draw)
        # Bags by rank, then table: the first bag of each, and for each row its distance from that.
        bags = (
            torch.arange(size.tables * size.batch, device=device).view(size.tables, n, part).transpose(0, 1).flatten()
        )
        sent_lengths = lengths.flatten()[bags]
        self.sent_offsets = functional.pad(sent_lengths.cumsum(0), (1, 0))
        row = torch.arange(len(self.indices), device=device)
        row += (self.offsets[bags] - self.sent_offsets[:-1]).repeat_interleave(sent_lengths)
        first_rows = (bags // size.batch * size.rows).repeat_interleave(sent_lengths)
        self.sent_indices = self.indices[row] + first_rows
        """Rows of all tables as one."""


class Exchanged(torch.autograd.Function):
    """All-to-all of equal parts by the process group of a step, which waits for it where it needs the result."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, step: Recommender) -> Tensor:
        ctx.step = step
        came = torch.empty_like(sent)
        step.work = dist.all_to_all_single(came, sent, group=step.group, async_op=True)
        return came

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = torch.empty_like(grads[0])
        work = dist.all_to_all_single(back, grads[0].contiguous(), group=ctx.step.group, async_op=True)
        ctx.step.reduction = dist.all_reduce(ctx.step.flat, group=ctx.step.group, async_op=True)
        assert work is not None
        work.wait()  # the reduction goes on beside the gradients of tables
        return back, None


class Recommender:
    """Steps of a size by several ways, on the same tables, model and samples.

    Attributes:
        work: exchange by the process group that is under way.
        reduction: all-reduce of the layers' gradients that is under way.
        flat: gradients of all layers.
    """

    work: Any
    reduction: Any = None

    def __init__(
        self, size: RecommendationSize, group: dist.ProcessGroup, comm: Communicator, device: torch.device
    ) -> None:
        n = comm.world_size
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.size, self.group, self.comm, self.ranks, self.part = size, group, comm, n, size.batch // n
        self.lookups = Lookups(size, comm, device)
        draw = torch.Generator(device).manual_seed(30 + comm.rank)
        shape = size.tables * size.rows, size.dim
        self.whole = torch.empty(shape, dtype=dtype, device=device).normal_(std=0.1, generator=draw)
        self.tables = list(self.whole.view(size.tables, size.rows, size.dim))
        self.table_count = size.tables if size.part == ROWS else n * size.tables
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Dlrm(size, self.table_count).to(dtype)
        self.dense = torch.empty(self.part, size.dense, dtype=dtype, device=device).normal_(generator=draw)
        self.clicks = (self.dense.sum(1) > 0).float()
        self.x = self.dense
        if size.part == TRAINING:  # leaves of their own for each way, in the same memory
            self.tables = [table.detach().requires_grad_() for table in self.tables]
            self.whole.requires_grad_()
            self.flat = comm.empty(sum(parameter.numel() for parameter in self.model.parameters()), dtype=dtype)
            parts = self.flat.split([parameter.numel() for parameter in self.model.parameters()])
            for parameter, part in zip(self.model.parameters(), parts, strict=True):
                parameter.grad = part.view_as(parameter)
        else:
            self.model.requires_grad_(False)

    def steps(self) -> dict[str, Callable[[], Tensor]]:
        """Return steps by way."""
        if self.size.part == TRAINING:
            by_group = functools.partial(self.train, self.by_group, [self.whole])
            return {
                "nccl": by_group,
                "operators": functools.partial(self.train, self.by_operators, self.tables),
                "none": functools.partial(self.train, self.alone, [self.whole]),
            }
        if self.size.part == ROWS:
            bags = {"nccl": self.rows_by_group, "operators": self.rows_by_operators, "none": self.rows_alone}
        else:
            pool = BagKernel(self.comm, self.tables, self.size.batch)
            shape = self.ranks, self.part, self.size.tables, self.size.dim
            sent, came = (self.comm.empty(*shape, dtype=self.whole.dtype) for _ in range(2))
            out = torch.empty(shape, dtype=self.whole.dtype, device=self.whole.device)

            def pooled(out: Tensor) -> Tensor:
                return pool(self.lookups.indices, self.lookups.offsets, out).view(self.ranks, -1)

            def by_copies() -> Tensor:
                pooled(sent)
                work = self.comm.all_to_all(came, sent, async_op=True)
                self.run_bottom()
                assert work is not None
                work.wait()
                return self.by_sample(came)

            bags = {
                "nccl": self.by_group,
                "nccl, a bag a table": lambda: self.by_table(self.exchanged(self.table_by_table())),
                "nccl, our bags": lambda: self.by_sample(self.exchanged(pooled(out))),
                "copies": by_copies,
                "operators": self.by_operators,
                # Our kernel is interpreted on CPU ranks, a thousand times slower than PyTorch's.
                "none": self.alone
                if self.whole.device.type == "cpu"
                else lambda: self.by_sample(self.run_beside(pooled(out))),
            }
        return {name: functools.partial(self.infer, make) for name, make in bags.items()}

    def infer(self, bags: Callable[[], Tensor]) -> Tensor:
        """Return this rank's scores, and some of the bags: scores behind so many layers hardly depend on them."""
        with torch.no_grad():
            pooled = bags()
            return torch.cat((self.model(self.x, pooled), pooled[:, ::SAMPLED].flatten()))

    def train(self, bags: Callable[[], Tensor], tables: list[Tensor]) -> Tensor:
        """Make a step with gradients of everything; return those of a table, and norms, by which gradients are clipped.

        Layers' gradients are added up where nothing else travels: by the process group behind the gradients of bags,
        by the communicator at the end. Weights change by so little that ways in turn still agree.
        """
        self.flat.zero_()
        pooled = bags()
        leaf = pooled.detach().requires_grad_()
        functional.binary_cross_entropy_with_logits(self.model(self.x, leaf).float(), self.clicks).backward()
        self.reduction = None
        pooled.backward(leaf.grad)
        gradients = [gradient_of(table) for table in tables]
        if self.reduction is not None:
            self.reduction.wait()
        elif bags == self.by_operators:
            self.comm.all_reduce(self.flat)
        with torch.no_grad():
            weights: list[Tensor] = list(self.model.parameters())
            torch._foreach_add_(weights, [gradient_of(one) for one in weights], alpha=-LEARNING_RATE)
            torch._foreach_add_(tables, gradients, alpha=-LEARNING_RATE)
        for table in tables:
            table.grad = None
        parts = gradients if len(gradients) > 1 else gradients[0].view(self.size.tables, self.size.rows, -1).unbind()
        norms = torch.stack([*torch._foreach_norm(list(parts)), self.flat.norm()])
        return torch.cat((parts[-1].flatten(), norms)).float()

    def run_bottom(self) -> None:
        """Run the MLP that needs no bags."""
        self.x = self.model.bottom(self.dense)

    def run_beside(self, bags: Tensor) -> Tensor:
        """Run the bottom MLP, and return the bags."""
        self.run_bottom()
        return bags

    def at_once(self) -> Tensor:
        """Pool all bags by one kernel of PyTorch, in the order in which they leave."""
        lookups = self.lookups
        options: dict[str, Any] = {"mode": "sum", "include_last_offset": True}
        found = functional.embedding_bag(lookups.sent_indices, self.whole, lookups.sent_offsets, **options)
        return found.view(self.ranks, -1)

    def table_by_table(self) -> Tensor:
        """Pool by a kernel for each table."""
        lookups, batch = self.lookups, self.size.batch
        options: dict[str, Any] = {"mode": "sum", "include_last_offset": True}
        pooled = []
        for number, table in enumerate(self.tables):
            first, stop = self.cuts[number : number + 2]
            starts = lookups.offsets[number * batch : (number + 1) * batch + 1] - first
            bags = functional.embedding_bag(lookups.indices[first:stop], table, starts, **options)
            pooled.append(bags.view(self.ranks, self.part, -1))
        return torch.stack(pooled, dim=1).view(self.ranks, -1)

    @functools.cached_property
    def cuts(self) -> list[int]:
        """Places where the rows of each table's bags begin, and the end."""
        found: list[int] = self.lookups.offsets[:: self.size.batch].tolist()
        return found

    def exchanged(self, sent: Tensor) -> Tensor:
        """Exchange parts of equal size by the process group, with the bottom MLP beside."""
        apply: Callable[..., Tensor] = Exchanged.apply
        came = apply(sent, self)
        self.run_bottom()
        self.work.wait()
        return came

    def by_table(self, came: Tensor) -> Tensor:
        """Copy bags that lie by table into the layout by sample."""
        return came.view(-1, self.part, self.size.dim).transpose(0, 1).reshape(self.part, -1)

    def by_sample(self, came: Tensor) -> Tensor:
        """Copy bags that lie by rank and sample into the layout by sample."""
        return came.view(self.ranks, self.part, -1).transpose(0, 1).reshape(self.part, -1)

    def by_group(self) -> Tensor:
        """Pool at once, and exchange by the process group."""
        return self.by_table(self.exchanged(self.at_once()))

    def alone(self) -> Tensor:
        """Pool at once, and exchange nothing."""
        return self.by_table(self.run_beside(self.at_once()))

    def by_operators(self) -> Tensor:
        """Pool and exchange in one kernel."""
        self.run_bottom()
        lookups, tables = self.lookups, self.tables
        if not torch.is_grad_enabled():
            return ops.embedding_all_to_all(self.comm, tables, lookups.indices, lookups.offsets)
        number, count = library.number_of(self.comm), self.table_count
        found: Tensor = library.embedding_all_to_all(
            number, tables, lookups.indices, lookups.offsets, None, "sum", count
        )
        return found

    def rows_by_group(self) -> Tensor:
        """Pool partial bags of all samples at once, and add them by a reduce-scatter of the process group."""
        partial = self.at_once().flatten()
        own = partial.new_empty(len(partial) // self.ranks)
        work = reduce_scatter(own, partial, group=self.group, async_op=True)
        self.run_bottom()
        work.wait()
        return self.by_table(own)

    def rows_by_operators(self) -> Tensor:
        """Pool and exchange partial bags in one kernel, and add those of the ranks."""
        partial = self.by_operators().view(self.part, self.ranks, -1)
        return partial.sum(1)

    def rows_alone(self) -> Tensor:
        """Pool as many partial bags, of which nothing is exchanged."""
        return self.by_table(self.run_beside(self.at_once())[0])


def gradient_of(leaf: Tensor) -> Tensor:
    """Return the gradient that a backward left."""
    assert leaf.grad is not None
    return leaf.grad


_TINY = RecommendationSize(12, 2, 3, dim=8, rows=20, bottom=2, top=2, width=8)
SIZES = {
    "tiny": _TINY,
    "tiny, training": dataclasses.replace(_TINY, part=TRAINING),
    "tiny, rows": dataclasses.replace(_TINY, part=ROWS),
    "2048 x 256": RecommendationSize(2048, 256, 70),
    "1024 x 256": RecommendationSize(1024, 256, 70),
    "1024 x 256, pooling 8": RecommendationSize(1024, 256, 8),
    "2048 x 256, training": RecommendationSize(2048, 256, 70, TRAINING, rows=1 << 14),
    "1024 x 256, training": RecommendationSize(1024, 256, 70, TRAINING, rows=1 << 14),
    "1024 x 256, rows": RecommendationSize(1024, 256, 70, ROWS, rows=1 << 16),
}
"""Parameters by name."""


def prepare(size: RecommendationSize, group: dist.ProcessGroup, comm: Communicator, device: torch.device) -> Prepared:
    """Make the steps of a size; collective."""
    step = Recommender(size, group, comm, device)
    element = step.whole.element_size()
    pooled = (comm.world_size - 1) * step.part * size.tables * size.dim * element
    return Prepared(
        step.steps(),
        tolerance=1e-4 if step.whole.dtype == torch.float32 else 2e-2,
        units=size.batch,
        facts={
            "bags_leaving_bytes": pooled,
            "rows_read_bytes": len(step.lookups.indices) * size.dim * element,
            "table_bytes": step.whole.nbytes,
            "layer_parameters": parameters_of(step.model),
        },
    )


def predicted_us(size: RecommendationSize, machine: Machine) -> Mapping[str, float]:
    """See :class:`EndToEndWorkload`. The model has no backward, so that in training only transfers are predicted.

    "none" pools by our kernel, and in training and with shards of rows by PyTorch's, as ``nccl`` does.
    """
    ranks, element = machine.gpus, torch.bfloat16.itemsize
    pooling = size.pooled_rows(ranks)
    bags = Embedding(size.batch, size.tables, pooling, size.dim, element, at_once=True)
    nbytes = round(bags.collective_bytes(ranks))
    exchange = library_us(machine, Kind.ALL_TO_ALL, nbytes)
    if size.part == TRAINING:
        with torch.device("meta"):
            parameters = parameters_of(Dlrm(size, ranks * size.tables))
        return {"nccl": 2 * exchange + library_us(machine, Kind.ALL_REDUCE, parameters * element)}
    fused, by_sample = predict_fused(machine, bags).fused.time_us, moved_us(machine, 2 * nbytes)
    if size.part == ROWS:
        came = moved_us(machine, nbytes + nbytes / ranks) - moved_us(machine, 2 * nbytes / ranks)
        return {
            "nccl": library_us(machine, Kind.REDUCE_SCATTER, nbytes),
            "operators": fused - bags.compute_us(machine) + came,
        }
    alone, separate = bags.alone_us(machine), dataclasses.replace(bags, at_once=False)
    return {
        "nccl": bags.compute_us(machine) - alone + exchange,
        "nccl, a bag a table": separate.compute_us(machine) - alone + exchange,
        "nccl, our bags": exchange,
        "copies": ours_us(machine, Kind.ALL_TO_ALL, nbytes),
        "operators": fused - alone - by_sample,  # bags come in the layout by sample
    }


def parameters_of(model: nn.Module) -> int:
    """Return the number of a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


WORKLOAD = EndToEndWorkload("recommendation", "samples", SIZES, prepare, predicted_us)
