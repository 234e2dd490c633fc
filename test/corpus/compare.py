#!/usr/bin/env python
"""python compare.py BEFORE.jsonl AFTER.jsonl [--lost]: the programs whose records differ; exits with 1 if any does.

With --lost only programs count that pass in BEFORE and not in AFTER. Times and the words of torch's messages that differ from process to
process (addresses, names of temporary files) do not count."""
import json, re, sys

VOLATILE = re.compile(r"0x[0-9a-f]+|/tmp/\S+|\b\d{6,}\b")


def read(path):
    found = {}
    for line in open(path):
        if line.startswith("{"):
            record = json.loads(line)
            record.pop("t", None)
            found[record["name"]] = {key: VOLATILE.sub("~", str(value)) for key, value in record.items()}
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
