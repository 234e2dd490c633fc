#!/usr/bin/env python
"""python compare.py BEFORE.jsonl AFTER.jsonl [--lost]: the programs whose records differ; exits with 1 if any does.

With --lost only programs count that pass in BEFORE and not in AFTER. What differs from process to process does not count: times, addresses,
paths, the order of a printed set."""
import json, re, sys

COMPARED = ("status", "detail", "graphs", "gb", "note", "nondet", "fullgraph_false")
VOLATILE = re.compile(r"0x[0-9a-f]+|/\S+|\b\d{6,}\b|\{u\d+.*")


def read(path):
    found = {}
    for line in open(path):
        if line.startswith("{"):
            record = json.loads(line)
            found[record["name"]] = {key: VOLATILE.sub("~", str(record.get(key, ""))) for key in COMPARED}
    return found


def main():
    lost = "--lost" in sys.argv
    before, after = (read(path) for path in [a for a in sys.argv[1:] if not a.startswith("--")])
    bad = []
    for name in sorted({*before, *after}):
        a, b = before.get(name), after.get(name)
        if a == b or lost and (not a or a["status"] != "pass" or b and b["status"] == "pass"):
            continue
        keys = sorted(key for key in {*(a or {}), *(b or {})} if (a or {}).get(key) != (b or {}).get(key))
        bad.append(name)
        print(json.dumps(dict(name=name, before={k: (a or {}).get(k) for k in keys}, after={k: (b or {}).get(k) for k in keys})))
    print(f"{len(before)} programs before, {len(after)} after, {len(bad)} {'lost' if lost else 'differ'}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
