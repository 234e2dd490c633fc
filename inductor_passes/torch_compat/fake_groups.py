"""Process groups that move no data, and say of themselves what those of a job say."""

from __future__ import annotations

import contextlib
import datetime
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

_OF_ONE_RANK = re.compile(r"/\d+$")


class StoreOfAlikeRanks:
    """A job's store as one rank sees it whose peers do all that it does: what it has written of itself, each of them has."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}

    def get(self, key: str) -> bytes:
        return self._held[_OF_ONE_RANK.sub("/each", key)]

    def set(self, key: str, value: str | bytes) -> object:
        self._held[_OF_ONE_RANK.sub("/each", key)] = _bytes(value)
        return None

    def add(self, key: str, amount: int) -> int:
        number = int(self._held.get(key, b"0")) + amount
        self._held[key] = str(number).encode()
        return number

    def check(self, keys: list[str]) -> bool:
        return all(_OF_ONE_RANK.sub("/each", key) in self._held for key in keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> object:
        """Raise DistStoreError at once for what is not there: nobody else will write it."""
        from torch.distributed import DistStoreError

        if not self.check(keys):
            raise DistStoreError(f"nobody writes {', '.join(keys)}")
        return None

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        key = _OF_ONE_RANK.sub("/each", key)
        if self._held.get(key, b"") == _bytes(expected):
            self._held[key] = _bytes(desired)
        return self._held.get(key, _bytes(expected))


_stores: list[StoreOfAlikeRanks] = []


def store() -> StoreOfAlikeRanks | None:
    """Return what stands in for the job's store; None where groups are those of a job."""
    return _stores[-1] if _stores else None


@contextlib.contextmanager
def standing_in(world_size: int, rank: int) -> Iterator[None]:
    """In the block ``init_process_group`` and ``new_group`` make fake groups of rank ``rank`` that carry the backend asked for.

    So ``get_backend`` and meshes are what they are in the job, and so is what a trace depends on; what ranks settle
    through the job's store is settled as if all were alike, and so are Python objects that they gather. Tensors that
    others would fill are left as they are. A group's names and ranks
    are torch's own doing. ``rendezvous``, ``_new_process_group_helper``, ``_world.pg_map`` and ``pg_backend_config`` were
    seen in 2.11 to 2.14.
    """
    from unittest import mock

    import torch.distributed
    from torch.distributed import distributed_c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    c10d: Any = distributed_c10d

    def rendezvous(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        yield FakeStore(), rank, world_size

    _stores.append(StoreOfAlikeRanks())
    try:
        with (
            mock.patch.object(c10d, "rendezvous", rendezvous),
            mock.patch.object(
                c10d, "_new_process_group_helper", _of_fakes(c10d._new_process_group_helper, c10d)
            ),
            mock.patch.multiple(c10d, **_OBJECTS),
            mock.patch.multiple(torch.distributed, **_OBJECTS),
        ):
            yield
    finally:
        _stores.pop()


def _of_fakes(stock: Callable[..., Any], c10d: Any) -> Callable[..., Any]:
    @functools.wraps(stock)
    def helper(
        size: int, rank: int, ranks: list[int], backend: str, *args: Any, **kwargs: Any
    ) -> Any:
        asked = c10d.Backend(backend)
        devices = c10d.BackendConfig(asked).get_device_backend_map()
        fakes = ",".join(f"{device}:fake" for device in devices)
        kwargs.update(dict.fromkeys({"backend_options", "device_id"} & kwargs.keys()))
        made = stock(size, rank, ranks, fakes, *args, **kwargs)
        if (group := made[0]) in c10d._world.pg_map:
            c10d._world.pg_map[group] = (asked, c10d._world.pg_map[group][1])
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(asked))
        return made

    return helper


def _all_gather_object(object_list: list[Any], obj: Any, *rest: Any, **options: Any) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(
    obj: Any, object_gather_list: list[Any] | None = None, *rest: Any, **options: Any
) -> None:
    if object_gather_list is not None:
        _all_gather_object(object_gather_list, obj)


def _broadcast_object_list(*args: Any, **options: Any) -> None:
    """What the source holds is what this rank holds."""


#: Of ``torch.distributed``; elsewhere they would read sizes and bytes that nobody has sent.
_OBJECTS: dict[str, Any] = {
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "broadcast_object_list": _broadcast_object_list,
}


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
