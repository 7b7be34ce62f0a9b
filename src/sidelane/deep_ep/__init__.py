"""DeepEP's interface on one node: programs that call ``deep_ep.Buffer`` run on Sidelane, without RDMA, NVSHMEM, build.

::

    # CPU ranks: TRITON_INTERPRET=1 in the environment before triton is imported
    from sidelane import deep_ep

    buffer = deep_ep.Buffer(group)
    per_rank, _, per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(chosen, experts)
    rows, chosen_there, gates_there, numbers, handle, _ = buffer.dispatch(
        x, topk_idx=chosen, topk_weights=gates, num_tokens_per_rank=per_rank,
        num_tokens_per_expert=per_expert, is_token_in_rank=is_token_in_rank)
    ...
    y, _, _ = buffer.combine(results, handle)

Names, arguments and results are those of DeepEP's first interface. What has no meaning on one node (bytes that are set
aside, queue pairs, chunks of tokens, ``allocate_on_comm_stream``) is accepted and has no effect; what is missing is
refused by its value before any rank moves a byte. DeepEP's second interface, ``ElasticBuffer``, is missing on purpose:
servers look for it to choose between the two. docs/guide/deep-ep.md has a program that runs.
"""

from sidelane.deep_ep.buffer import DeepEpBuffer as Buffer
from sidelane.deep_ep.settings import DeepEpConfig as Config
from sidelane.deep_ep.settings import EventOverlap
from sidelane.deep_ep.settings import install_deep_ep as install
from sidelane.deep_ep.tokens import DispatchHandle, LowLatencyHandle

__all__ = ["Buffer", "Config", "DispatchHandle", "EventOverlap", "LowLatencyHandle", "install"]
