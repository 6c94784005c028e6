"""What a runtime has done so far. Bytes are `int` bytes."""

from __future__ import annotations

from dataclasses import dataclass


class RuntimeRefused(Exception):
    """The runtime cannot do what was asked on this model, or cannot do it correctly. The message says what to do instead."""


@dataclass
class Counters:
    """Counts since `apply`, over all steps."""

    checkpoint_calls: int = 0
    """Checkpoints made in a forward pass; a segment of several blocks is one."""
    blocks_checkpointed: int = 0
    """Calls of blocks or feed-forward submodules that ran inside a checkpoint."""
    units_recomputed: int = 0
    """Checkpoints replayed in a backward pass."""
    blocks_recomputed: int = 0
    """Calls of blocks or feed-forward submodules replayed in a backward pass (the last one of a checkpoint only in part)."""
    attention_calls: int = 0
    """Calls of attention submodules whose saved tensors went to the host."""
    attention_skipped: int = 0
    """Calls of attention submodules that a replay took from the host instead of running them again."""
    tensors_offloaded: int = 0
    bytes_offloaded: int = 0
    """Copied to the host in forward passes."""
    tensors_fetched: int = 0
    bytes_fetched: int = 0
    """Copied back in backward passes."""
    fetched_ahead: int = 0
    """Of the tensors fetched: those whose copy was started before they were asked for."""
    weights_brought: int = 0
    """Times that a swapped block's weights were copied to the device."""
    weight_bytes_brought: int = 0
    weights_ahead: int = 0
    """Of those times: copies that were started before the block was asked for."""
    host_bytes: int = 0
    """Host copies alive now."""
    host_bytes_peak: int = 0
    pinned_bytes: int = 0
    """Page-locked memory that the pool holds now."""
    pinned_bytes_peak: int = 0
    pageable_copies: int = 0
    """Host copies of a GPU tensor that got no page-locked memory."""
