"""What a model is made of, as names: chains of blocks and the regions inside each block.

Plain values without torch, so that a stored profile can be read and a schedule resolved in milliseconds.
All names are qualified module names as `model.get_submodule` takes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Block:
    """One repeated unit of a model (a transformer block, a UNet residual or transformer micro-block)."""

    name: str
    """Qualified name, e.g. ``transformer_blocks.3``."""
    kind: str
    """Class name plus whatever else tells it from its neighbours; blocks of one kind cost the same."""
    feed_forward: tuple[tuple[str, ...], ...] = ()
    """Feed-forward sides: each entry is a run of qualified names called one after the other, each fed only with the
    previous one's output, so that the run can be put into one checkpoint. Empty: no clean feed-forward boundary."""
    attention: tuple[str, ...] = ()
    """Qualified names of the attention submodules."""
    trainer_ffn_start: str | None = None
    """Child at which a trainer's feed-forward scope starts (it then reaches to the end of the block), where that is
    wider than the submodule itself. Only the estimator uses it."""


@dataclass(frozen=True)
class Chain:
    """Blocks of one list, in call order."""

    path: str
    """Qualified name of the list, e.g. ``single_transformer_blocks``."""
    blocks: tuple[Block, ...]
    linked: bool | None
    """True: every block's outputs are, unchanged, the next one's inputs, so several blocks fit into one checkpoint.
    False: something happens between the blocks. None: not known before a forward pass has been watched."""
    groupable: bool = True
    """False where a trainer never groups or skips these blocks (refiners): each is its own checkpoint."""


@dataclass(frozen=True)
class Structure:
    """All chains of a model, in call order."""

    chains: tuple[Chain, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(b for c in self.chains for b in c.blocks)

    def without_regions(self) -> Structure:
        """The same blocks, with nothing to reach inside them."""
        return Structure(
            tuple(
                replace(
                    c,
                    blocks=tuple(replace(b, feed_forward=(), attention=(), trainer_ffn_start=None) for b in c.blocks),
                )
                for c in self.chains
            )
        )

    @property
    def has_feed_forward(self) -> bool:
        return any(b.feed_forward for b in self.blocks)
