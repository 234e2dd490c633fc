"""A process that is a rank of one program after another, until it is told to end."""

from __future__ import annotations

import gc
import logging
import os
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def serve(rank: int, port: int, connection: Connection, log: str) -> None:
    """Take (key, seed, meshes) from ``connection``; answer with beats and what came of it."""
    quiet = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    import torch
    import torch.distributed as dist
    from fuzzing._torch import without_timed_guards
    from fuzzing.unlike.draw import draw
    from fuzzing.unlike.job import take_part
    from fuzzing.without_cpp import without_cpp

    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    without_timed_guards()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # a compile makes many objects and few that are garbage
    client = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=600))
    connection.send(("ready", ""))
    with without_cpp():
        while (task := connection.recv()) is not None:
            key, seed, meshes, folder = task
            program = draw(seed, meshes)
            store = dist.PrefixStore(key, client)
            try:
                part: Any = take_part(
                    program, rank, store, Path(folder), lambda at: connection.send(("beat", at))
                )
                connection.send(("done", part))
            except Exception as error:
                chain: list[BaseException] = [error]  # what Dynamo wraps counts too
                while (inner := getattr(chain[-1], "inner_exception", None)) is not None:
                    chain.append(inner)
                names = [each.__name__ for one in chain for each in type(one).__mro__]
                said = "".join(traceback.format_exception(error))[-6000:]
                connection.send(("error", (names, str(error), said)))
    os._exit(0)
