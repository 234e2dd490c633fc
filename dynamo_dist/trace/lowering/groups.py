"""A program's group argument and ranks, as the group's name and ranks within it."""

from __future__ import annotations

import torch.distributed as dist

Group = dist.ProcessGroup | None


def member(group: Group) -> dist.ProcessGroup:
    """The group itself; the default one for None."""
    return dist.group.WORLD if group is None else group  # type: ignore[return-value]


def rank_in(group: dist.ProcessGroup, global_rank: int | None, group_rank: int | None) -> int:
    """A root or peer as a rank of the group, given as either; ValueError for both or none."""
    if group_rank is not None:
        if global_rank is not None:
            raise ValueError("Can't specify both group_rank and global_rank")
        return group_rank
    if global_rank is None:
        raise ValueError("Must specify global_rank or group_rank")
    return dist.get_group_rank(group, global_rank)
