"""All that saved artefacts depend on beside the program, by names that people understand; and how two of them differ."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import torch
import torch.distributed as dist

from dynamo_dist.config import DistConfig
from dynamo_dist.errors import ArtefactError
from dynamo_dist.plugins import read_plugins
from dynamo_dist.sharding import registration
from dynamo_dist.torch_compat.inductor import vector_units
from inductor_passes import registry
from inductor_passes.attach.hooks import third_party_digest
from inductor_passes.pass_options import PassOptions
from inductor_passes.plugins import digest_of_sources
from inductor_passes.torch_compat import caches

Facts = dict[str, Any]
_DIGITS = 12


def of_process() -> Facts:
    """What this process is: torch, Python, our sources, plugins, job, devices. Raises ArtefactError before the job has its ranks."""
    read_plugins()
    return {
        "torch": caches.torch_version(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "sources": {
            name: digest_of_sources(name)[:_DIGITS] for name in ("dynamo_dist", "inductor_passes")
        },
        "plugins": {
            pass_.name: third_party_digest(pass_)
            for pass_ in registry.ordered_passes()
            if (pass_ if isinstance(pass_, type) else type(pass_)) not in registry.DEFAULT_PASSES
        },
        "strategies": registration.digests(),
        "trackers_off": sorted(DistConfig.from_env().trackers_off),
        "job": _job(),
        "cpu": {
            "machine": platform.machine(),
            "vector_units": torch.backends.cpu.get_cpu_capability(),
            "model": vector_units.model(),
            "flags": vector_units.flags_digest()[:_DIGITS],
            "libc": " ".join(platform.libc_ver()),
        },
        "gpus": _gpus(),
    }


def of_options(own: PassOptions, inductor: Mapping[str, Any]) -> Facts:
    """Options of one compile, as far as they change its graphs: ours, and under ``inductor`` those of Inductor."""
    ours = {name: getattr(own, name) for name in own.parts()}
    facts = {
        name: asdict(each) if is_dataclass(each) and not isinstance(each, type) else each
        for name, each in ours.items()
    }
    return plain({**facts, "inductor": dict(inductor)})


def plain(value: Any) -> Any:
    """``value`` as JSON has it; an object is its type, a function its name."""
    return json.loads(json.dumps(value, default=_named, sort_keys=True))


def differences(then: object, now: object, at: str = "") -> Iterator[str]:
    """Lines of what differs, as ``options.schedule.effort: high -> default``."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in sorted({*then, *now}):
            place = f"{at}.{key}" if at else str(key)
            yield from differences(then.get(key), now.get(key), place)
    elif then != now:
        yield f"{at}: {_shown(then)} -> {_shown(now)}"


def _job() -> Facts:
    if dist.is_available() and dist.is_initialized():
        return {
            "backend": dist.get_backend(),
            "world_size": dist.get_world_size(),
            "rank": dist.get_rank(),
        }
    if (size := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ArtefactError(
            f"This process is one of {size} ranks, and has no process group yet.",
            "Each rank has artefacts of its own.",
            "Save and load after torch.distributed.init_process_group().",
        )
    return {"backend": None, "world_size": 1, "rank": 0}


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"{each.name} {each.major}.{each.minor}" for each in found]


def _named(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, (list, dict)):
        return json.dumps(value)
    return str(value)
