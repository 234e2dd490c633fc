"""Run the programs of one launch as if at once, in Triton's interpreter, in an order drawn by a
seed.

The interpreter runs the programs of a grid one after the other: one that waits for another would
wait for ever. Under ``Schedule`` each program is a thread, one of which runs at a time, and every
look at a flag and every signal is a point where another may go on. Ranks are an axis of the grid,
so this is the protocol itself under random arrival orders; a wait that nobody ends gives up as it
would on a device.
"""

import random
import threading

from triton.runtime import interpreter

from inductor_passes.fused.kernels import device
from inductor_passes.fused.kernels.workspace import virtual_workspace

HOOKS = ("load_flag", "load_flags", "signal", "signal_add", "signal_all")


class Schedule:
    """A context manager: inside, launches interleave. ``plant`` maps a helper's name to its
    stand-in.
    """

    def __init__(self, seed=0, plant=None):
        self.random = random.Random(seed)
        self.plant = plant or {}
        self.switches = 0

    def __enter__(self):
        self._saved = {name: getattr(device, name) for name in HOOKS}
        self._call = interpreter.GridExecutor.__call__
        schedule = self

        def call(executor, *args, **kwargs):
            builder = interpreter.interpreter_builder

            def set_grid_dim(*dims):  # called once the language is patched and arguments are bound
                del builder.set_grid_dim
                builder.set_grid_dim(*dims)
                executor.fn = _Collected(executor.fn, schedule)

            builder.set_grid_dim = set_grid_dim
            return schedule._call(executor, *args, **kwargs)

        interpreter.GridExecutor.__call__ = call
        for name, helper in self._saved.items():
            setattr(device, name, self._yielding(self.plant.get(name, helper)))
        return self

    def __exit__(self, *_):
        interpreter.GridExecutor.__call__ = self._call
        for name, helper in self._saved.items():
            setattr(device, name, helper)

    def _yielding(self, helper):
        def hooked(*args):
            self.switch()
            return helper(*args)

        return hooked

    def run(self, fn, programs, args):
        self._ready = []
        self._errors = []
        self._main = threading.Semaphore(0)
        threads = []
        for grid_idx in programs:
            turn = threading.Semaphore(0)
            entry = (turn, grid_idx)
            self._ready.append(entry)
            thread = threading.Thread(target=self._program, args=(fn, args, entry), daemon=True)
            threads.append(thread)
            thread.start()
        self._hand_over()
        self._main.acquire()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _program(self, fn, args, entry):
        entry[0].acquire()
        self._resume(entry)
        try:
            fn(**args)
        except BaseException as error:
            self._errors.append(error)
        self._ready.remove(entry)
        self._hand_over()

    def _resume(self, entry):
        self._current = entry
        interpreter.interpreter_builder.set_grid_idx(*entry[1])

    def _hand_over(self):
        if self._ready:
            self.random.choice(self._ready)[0].release()
        else:
            self._main.release()

    def switch(self):
        self.switches += 1
        entry = self._current
        self._hand_over()
        entry[0].acquire()
        self._resume(entry)


class _Collected:
    """Stands for the kernel: notes which program is called, and runs all when the last one is."""

    def __init__(self, fn, schedule):
        self._fn, self._schedule = fn, schedule
        self._programs = []

    def __call__(self, **args):
        builder = interpreter.interpreter_builder
        self._programs.append(tuple(builder.grid_idx))
        if self._programs[-1] == tuple(size - 1 for size in builder.grid_dim):
            self._schedule.run(self._fn, self._programs, args)


def workspace(family, world, programs=2, data_bytes=1 << 15, mode=1, spin_limit=2000):
    """Virtual ranks on the CPU, data poisoned with NaN; ``mode`` 1 is the interpreter's, 2
    checks.
    """
    return virtual_workspace(
        family, world, data_bytes, "cpu", programs=programs, spin_limit=spin_limit, mode=mode
    )
