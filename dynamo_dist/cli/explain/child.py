"""Inside an explained process: listen from the first ``torch.compile`` on, and write down what is seen.

``import torch`` calls ``install()`` where the environment names a folder; so processes that the script
starts are explained too. The script's own behaviour stays: without ``BACKEND`` Inductor's configuration
has one more pass, which looks at graphs and changes none.
"""

from __future__ import annotations

import logging
import os

from dynamo_dist.torch_compat.dynamo_compiler import before_first_compile

FOLDER = "DYNAMO_DIST_EXPLAIN"
BACKEND = "DYNAMO_DIST_EXPLAIN_BACKEND"

log = logging.getLogger(__name__)


def install() -> None:
    """Start to listen when the script first compiles. Called once, at the end of ``import torch``."""
    before_first_compile(_listen)


def _listen() -> None:
    """Start to listen; whatever is wrong with us, the script goes on."""
    try:
        from dynamo_dist.cli.explain.listener import Listener
        from dynamo_dist.torch_compat import dynamo_compiler

        if backend := os.environ.get(BACKEND, ""):
            dynamo_compiler.compile_by_default_with(backend)
        else:
            from inductor_passes.inductor.options import observer

            dynamo_compiler.observe_inductor(observer())
        Listener(os.environ[FOLDER]).start()
    except Exception as error:
        log.warning("This process is not explained: %s: %s", type(error).__name__, error)
