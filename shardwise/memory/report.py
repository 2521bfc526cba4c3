"""What a plan's recomputation saves and costs, as a table."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.memory.choice import Costs, Option, peak


@dataclass(frozen=True)
class Report:
    """What one rank computes again, chosen from measurements.

    Args:
        how: `plan.recompute`.
        blocks: what each block's choices cost.
        chosen: by block, how it is treated.
    """

    how: str
    blocks: Sequence[Costs]
    chosen: Sequence[Option]

    @property
    def kept_bytes(self) -> int:
        """Bytes that the blocks keep for backward and W, at most at once."""
        return peak(self.blocks, [option.size for option in self.chosen])

    @property
    def without_bytes(self) -> int:
        """Bytes that they would keep if nothing was computed again."""
        return peak(self.blocks, [costs.without for costs in self.blocks])

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that a step computes again instead of keeping them."""
        return sum((c.without - o.size) * c.runs for c, o in zip(self.blocks, self.chosen, strict=True))

    @property
    def seconds(self) -> float:
        """What computing them again takes of a step."""
        return sum(o.seconds * costs.runs for costs, o in zip(self.blocks, self.chosen, strict=True))

    def table(self) -> str:
        """Every block's choice, what it saves and costs, for people; alike neighbours share a line."""
        rows = [("block", "kept", "bytes", "saved", "of", "ms a microbatch")]
        pairs = zip(self.blocks, self.chosen, strict=True)
        for _, group in itertools.groupby(pairs, lambda pair: (pair[0].without, pair[1].kept, pair[0].items)):
            members = list(group)
            (first, option), (last, _) = members[0], members[-1]
            name = first.path if first is last else f"{first.path} to {last.path}"
            saved = first.without - option.size
            share = f"{saved / first.without:.0%}" if first.without else "-"
            cost = f"{1000 * option.seconds:.2f}"
            rows.append((name, _named(first, option), shown_bytes(option.size), shown_bytes(saved), share, cost))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        share = f"{self.kept_bytes / self.without_bytes:.0%} of " if self.without_bytes else ""
        for_weights = ", what W needs included" if any(costs.put_off for costs in self.blocks) else ""
        lines.append(
            f"recompute = {self.how}: blocks keep at most {shown_bytes(self.kept_bytes)} at once, {share}"
            f"{shown_bytes(self.without_bytes)}{for_weights}; a step computes "
            f"{shown_bytes(self.recomputed_bytes)} again in {1000 * self.seconds:.1f} ms"
        )
        return "\n".join(lines)


def _named(costs: Costs, option: Option) -> str:
    if option.kept is None:
        return "everything"
    kept = [item.path for item in costs.items if item.path in option.kept]
    return ", ".join(["input", *kept])


def shown_bytes(size: float) -> str:
    """Bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
