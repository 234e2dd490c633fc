import itertools
import json

import torch
from torch.testing._internal.common_utils import TestCase, run_tests

from inductor_passes.simulate import chrome_trace, joined_traces, simulate
from inductor_passes.testing import FixedCost, trace

c10d = torch.ops._c10d_functional
REQUIRED = {
    "C": {"name", "pid", "ts", "args"},
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "bp", "pid", "tid", "ts"},
}


def program(x, w):
    w_full = c10d.wait_tensor(c10d.all_gather_into_tensor(w, 8, "0"))
    return (x @ x) @ w_full + c10d.wait_tensor(c10d.all_reduce(x, "sum", "1"))


def events_of(content, ph):
    return [event for event in content["traceEvents"] if event["ph"] == ph]


class TestChromeTrace(TestCase):
    def setUp(self):
        super().setUp()
        record = simulate(trace(program, [16, 16], [2, 16]), FixedCost(8.0, mm=10.0)).record()
        self.record = record
        self.content = chrome_trace({"before": record, "after": record}, rank=3)

    def test_joined_ranks_keep_processes_and_arrows_apart(self):
        other = chrome_trace({"before": self.record}, rank=4)
        content = json.loads(json.dumps(joined_traces([self.content, other])))
        for event in content["traceEvents"]:
            self.assertEqual(set(event) - {"ph"}, REQUIRED[event["ph"]])
        names = {
            e["pid"]: e["args"]["name"]
            for e in events_of(content, "M")
            if e["name"] == "process_name"
        }
        self.assertEqual(list(names), [0, 1, 2])
        self.assertEqual([name[-7:] for name in names.values()], ["rank 3)", "rank 3)", "rank 4)"])
        starts = events_of(content, "s")
        self.assertEqual(len({event["id"] for event in starts}), len(starts))
        ends = {event["id"]: event["pid"] for event in events_of(content, "f")}
        self.assertEqual(ends, {event["id"]: event["pid"] for event in starts})
        self.assertEqual([of["rank"] for of in content["otherData"]["ranks"]], [3, 4])
        self.assertEqual(joined_traces([])["traceEvents"], [])

    def test_memory_is_a_curve_up_to_the_peak(self):
        curve = [
            (e["ts"], e["args"]["bytes"]) for e in events_of(self.content, "C") if not e["pid"]
        ]
        self.assertEqual(curve, list(self.record.memory))
        self.assertEqual(max(size for _, size in curve), self.record.peak_bytes)
        self.assertEqual(sorted(at for at, _ in curve), [at for at, _ in curve])

    def test_is_json_of_the_documented_form(self):
        content = json.loads(json.dumps(self.content))
        self.assertEqual(set(content), {"traceEvents", "displayTimeUnit", "otherData"})
        for event in content["traceEvents"]:
            self.assertEqual(set(event) - {"ph"}, REQUIRED[event["ph"]])
        for event in events_of(content, "X"):
            self.assertGreaterEqual(event["ts"], 0)
            self.assertGreater(event["dur"], 0)

    def test_a_process_per_timeline_and_a_thread_per_lane(self):
        names = [
            (event["name"], event["pid"], event["tid"], event["args"]["name"])
            for event in events_of(self.content, "M")
            if event["name"].endswith("_name")
        ]
        self.assertEqual(
            names,
            [
                ("process_name", 0, 0, "before (simulated, rank 3)"),
                ("thread_name", 0, 0, "compute"),
                ("thread_name", 0, 1, "group 0"),
                ("thread_name", 0, 2, "group 1"),
                ("process_name", 1, 0, "after (simulated, rank 3)"),
                ("thread_name", 1, 0, "compute"),
                ("thread_name", 1, 1, "group 0"),
                ("thread_name", 1, 2, "group 1"),
            ],
        )

    def test_every_span_is_an_event_on_its_lane(self):
        first = [event for event in events_of(self.content, "X") if event["pid"] == 0]
        self.assertEqual(len(first), len(self.record.spans))
        for event, span in zip(first, self.record.spans, strict=True):
            self.assertEqual((event["name"], event["cat"]), (span.name, span.kind))
            self.assertEqual((event["ts"], event["dur"]), (span.start_us, span.duration_us))
            self.assertEqual(event["tid"], {"compute": 0, "0": 1, "1": 2}[span.lane])

    def test_spans_of_a_lane_do_not_overlap(self):
        lanes = {}
        for event in events_of(self.content, "X"):
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
        for events in lanes.values():
            for one, two in itertools.pairwise(events):
                self.assertLessEqual(one["ts"] + one["dur"], two["ts"])

    def test_arrows_lead_from_a_collective_to_the_wait_it_held_up(self):
        starts, ends = events_of(self.content, "s"), events_of(self.content, "f")
        self.assertEqual([event["id"] for event in starts], [event["id"] for event in ends])
        self.assertEqual(len({event["id"] for event in starts}), 4)
        self.assertEqual(
            [
                (s["name"], s["pid"], s["tid"], s["ts"], f["tid"], f["ts"])
                for s, f in zip(starts, ends, strict=True)
            ],
            [
                ("all_gather_into_tensor", 0, 1, 0.0, 0, 8.0),
                ("all_reduce", 0, 2, 28.0, 0, 36.0),
                ("all_gather_into_tensor", 1, 1, 0.0, 0, 8.0),
                ("all_reduce", 1, 2, 28.0, 0, 36.0),
            ],
        )

    def test_totals_are_in_the_file(self):
        self.assertEqual(self.content["otherData"]["rank"], 3)
        totals = self.content["otherData"]["timelines"]["after"]
        self.assertEqual((totals["makespan_us"], totals["exposed_us"]), (36.0, 16.0))

    def test_no_timelines(self):
        self.assertEqual(chrome_trace({})["traceEvents"], [])


if __name__ == "__main__":
    run_tests()
