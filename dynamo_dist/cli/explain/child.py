"""Inside an explained process: listen from the first ``torch.compile`` on, and write down what is seen.

``import torch`` calls ``install()`` where the environment names a folder; so processes that the script
starts are explained too. The script's own behaviour stays: without ``BACKEND`` its compiles
get one more Inductor pass, which looks at graphs and changes none.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

from dynamo_dist.torch_compat import explained

FOLDER = "DYNAMO_DIST_EXPLAIN"
BACKEND = "DYNAMO_DIST_EXPLAIN_BACKEND"

log = logging.getLogger(__name__)


def install() -> None:
    """Start to listen when ``torch.compile`` is first called. Called once, at the end of ``import torch``."""
    adapt = functools.partial(_adapted, os.environ.get(BACKEND, ""))
    lock = threading.Lock()

    def listen() -> None:
        with lock:
            _listen_once()

    explained.on_compile_call(listen, adapt)


@functools.cache
def _listen_once() -> None:
    """Start to listen; whatever is wrong with us, the script goes on."""
    try:
        from dynamo_dist.cli.explain.listener import Listener

        Listener(os.environ[FOLDER]).start()
    except Exception as error:
        log.warning("This process is not explained: %s: %s", type(error).__name__, error)


def _adapted(backend: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of one ``torch.compile``: another backend, or stock's with our look at its graphs."""
    mode, options = kwargs.get("mode"), kwargs.get("options")
    wrong = mode is not None and options is not None  # torch says so
    if kwargs.get("backend") not in (None, "inductor") or kwargs.get("disable") or wrong:
        return dict(kwargs)
    if backend:
        return {**kwargs, "backend": backend}
    from inductor_passes.attach.options import observed

    return {**kwargs, "mode": None, "options": observed(options or {}, mode)}
