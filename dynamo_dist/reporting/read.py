"""Reports read from disk, held against their schema before anything is made of them."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

from dynamo_dist.errors import ReportError
from dynamo_dist.reporting.records import RunReport
from dynamo_dist.reporting.schema import schema_of_rank
from inductor_passes.files import Form, checked, load
from inductor_passes.report.figures import SCHEMA_VERSION

_FORM = Form(
    name="report",
    error=ReportError,
    fix="Pass a report.json that write_report() wrote, or what explain --json printed.",
)


def read_report(path: str | os.PathLike[str]) -> RunReport:
    """Read a ``report.json`` of one rank back. Raises ReportError, a ValueError, if it is none."""
    return _report(load(path, _FORM), os.fspath(path), ())


def read_reports(path: str | os.PathLike[str]) -> list[RunReport]:
    """The ranks of a ``report.json``, or of a merged report such as ``explain --json`` prints."""
    data, file = load(path, _FORM), os.fspath(path)
    if not isinstance(data, dict) or "reports" not in data:
        return [_report(data, file, ())]
    if not isinstance(data["reports"], list):
        raise _FORM.wrong(file, ("reports",), data["reports"], "must be a list")
    return [_report(item, file, ("reports", i)) for i, item in enumerate(data["reports"])]


def _report(data: Any, file: str, at: tuple[str | int, ...]) -> RunReport:
    version = data.get("schema") if isinstance(data, dict) else None
    if type(version) is int and version != SCHEMA_VERSION:
        raise ReportError(
            f"{file!r} has schema {version}, but this version reads schema {SCHEMA_VERSION}.",
            "",
            "Write the report anew, or read it with the version that wrote it.",
        )
    return RunReport.from_json(checked(data, _form(), file, at))


@functools.cache
def _form() -> Form:
    return dataclasses.replace(_FORM, schema=schema_of_rank())
