"""Files that come from outside: one reader for every format, which ends soon whatever it is given.

``text_of`` reads a file, plain or gzipped, up to a size; ``parsed`` makes JSON values of it; ``checked`` holds
these against a schema; ``load`` does all three. What is wrong is one line: file, field, value, fix.
"""

from inductor_passes.files.check import checked
from inductor_passes.files.form import Form, Schema
from inductor_passes.files.read import load, parsed
from inductor_passes.files.text import text_of

__all__ = ["Form", "Schema", "checked", "load", "parsed", "text_of"]
