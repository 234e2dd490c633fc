"""Private names of torch, and nothing else: where they are, in which version, how they are changed
and restored.

By torch's own subsystems: ``dynamo``, ``aot`` (AOTAutograd), ``dtensor``, ``c10d``, ``inductor``.
What stands here knows how to look into torch and how to change it, not when or why. A name that a
torch lacks is None here, and what differs from version to version is made one shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # For annotations elsewhere; when the program runs, a name here would load the compiler.
    from torch._dynamo.bytecode_transformation import Instruction as Instruction
    from torch._dynamo.codegen import PyCodegen as PyCodegen
    from torch._dynamo.symbolic_convert import (
        InstructionTranslatorBase as InstructionTranslatorBase,
    )
    from torch._dynamo.variables.base import VariableTracker as VariableTracker
    from torch._guards import Guard as Guard
    from torch._guards import Source as Source
