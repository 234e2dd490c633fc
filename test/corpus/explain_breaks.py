#!/usr/bin/env python
"""python explain_breaks.py [NAME ...]: what ``dynamo_dist.explain`` says of programs that break; one JSON line each.

All programs by default that upstream does not pass and ``gained.txt`` does not name. A program that has several breaks has them all in one line."""
import contextlib, io, json, os, sys

NAMES, sys.argv[1:] = sys.argv[1:], []
import run as R
import dynamo_dist

HERE = os.path.dirname(os.path.abspath(__file__))


def open_names():
    upstream = [json.loads(line) for line in open(os.path.join(HERE, "upstream_2.13.0.jsonl"))]
    gained = set(open(os.path.join(HERE, "gained.txt")).read().split())
    return [r["name"] for r in upstream if r["status"] not in ("pass", "eager-fails") and r["name"] not in gained]


def explained(case):
    R.torch.compiler.reset(); R.clear_dtensor()
    setup = R.build(case)
    report, error = None, ""
    from dynamo_dist.diagnostics import collect
    with collect() as seen:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                report = dynamo_dist.explain(setup["fn"], backend="aot_eager")(*setup["args_list"][0])
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}".splitlines()[0]
    breaks = report.breaks if report is not None else seen.report().breaks
    kept = ("kind", "user_line", "explanation", "fix", "cause", "effect")
    return dict(name=case["name"], error=error, breaks=[{key: getattr(each, key) for key in kept} for each in breaks])


def main():
    dynamo_dist.enable()
    names = set(NAMES or open_names())
    for case in R.C.CASES:
        if case["name"] in names:
            print(json.dumps(explained(case)), flush=True)


if __name__ == "__main__":
    main()
