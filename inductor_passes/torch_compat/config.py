"""Inductor's configuration."""

from __future__ import annotations

from typing import Any


def inductor_config() -> Any:
    """``torch._inductor.config``, imported on first use. Seen in 2.11 to 2.15."""
    from torch._inductor import config

    return config


def has_config(key: str) -> bool:
    """Return whether this torch's Inductor knows the dotted configuration key."""
    return key in inductor_config().get_config_copy()


def get_config(key: str) -> Any:
    """The current value of a dotted key, under whatever patch is active."""
    value: Any = inductor_config()
    for part in key.split("."):
        value = getattr(value, part)
    return value


def config_keys() -> frozenset[str]:
    """Every dotted key of this torch's Inductor configuration."""
    return frozenset(inductor_config().get_config_copy())


def is_config_set(key: str) -> bool:
    """Return whether the dotted key has another value in this process than torch gives it.

    Torch's own record of who set what is no help: a patch leaves behind that everything in it was set.
    ``_config`` was seen in 2.11 to 2.15.
    """
    return bool(get_config(key) != inductor_config()._config[key].default)


def values_set() -> dict[str, str]:
    """What is set otherwise than torch has it, by dotted key; no functions and objects, which have no stable text."""
    texts = {key: repr(get_config(key)) for key in config_keys() if is_config_set(key)}
    return {key: text for key, text in texts.items() if " at 0x" not in text}


def digests() -> dict[str, str]:
    """What Inductor's configuration has set, and AOTAutograd's whole one, as text. ``get_config_copy`` was seen in 2.11 to 2.15."""
    from torch._functorch import config

    texts = {key: repr(value) for key, value in config.get_config_copy().items()}
    return {**values_set(), **{key: text for key, text in texts.items() if " at 0x" not in text}}


def is_inductor_key(key: str) -> bool:
    """Return whether torch.compile would take ``key`` in ``options``; dashes count as underscores."""
    return key.replace("-", "_") in config_keys()


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor configuration of a ``mode=``. Raises RuntimeError, naming the known, for another."""
    import torch._inductor

    return dict(torch._inductor.list_mode_options(mode)) if mode not in (None, "default") else {}
