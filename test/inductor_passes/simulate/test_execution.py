import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from inductor_passes.simulate.execution import Program, execute


def program(*entries):
    """Entries: a number computes, ``(channel, us)`` launches, ``[i, ...]`` waits for launches i."""
    compute, channel, link, awaits = [], [], [], []
    for entry in entries:
        launches, waits = isinstance(entry, tuple), isinstance(entry, list)
        compute.append(0.0 if launches or waits else float(entry))
        channel.append(entry[0] if launches else "")
        link.append(float(entry[1]) if launches else 0.0)
        awaits.append(entry if waits else [])
    return Program(compute, channel, link, awaits)


@st.composite
def programs(draw):
    """Any program: launches on two channels, waits for some of the launches before them."""
    entries, launches = [], []
    for i in range(draw(st.integers(0, 25))):
        what = draw(st.sampled_from(("compute", "launch", "wait")))
        if what == "launch":
            launches.append(i)
            entries.append((draw(st.sampled_from("ab")), draw(st.integers(0, 40))))
        elif what == "wait" and launches:
            entries.append([draw(st.sampled_from(launches))])
        else:
            entries.append(draw(st.integers(0, 40)))
    return program(*entries)


class TestRules(TestCase):
    def test_communication_behind_compute_is_hidden(self):
        run = execute(program(("a", 10), 30, [0], 5))
        self.assertEqual((run.makespan_us, run.exposed_us), (35.0, 0.0))
        self.assertEqual((run.compute_us, run.communication_us), (35.0, 10.0))

    def test_a_wait_blocks_until_its_launch_has_finished(self):
        run = execute(program(("a", 50), 30, [0], 5))
        self.assertEqual((run.makespan_us, run.exposed_us), (55.0, 20.0))
        self.assertEqual((run.start[3], run.blocked[2], run.exposed[0]), (50.0, 20.0, 20.0))

    def test_a_launch_waits_for_the_compute_before_it(self):
        run = execute(program(30, ("a", 10), [1]))
        self.assertEqual((run.start[1], run.end[1], run.makespan_us), (30.0, 40.0, 40.0))

    def test_one_channel_is_first_in_first_out(self):
        run = execute(program(("a", 50), ("a", 10), [1], [0]))
        self.assertEqual((run.start[1], run.end[1]), (50.0, 60.0))
        # The second wait is free: its launch was done before the first wait ended.
        self.assertEqual((run.blocked[2], run.blocked[3]), (60.0, 0.0))

    def test_collective_slows_compute_for_as_long_as_it_lasts(self):
        beside = dataclasses.replace(program(("a", 30), 20, 20, [0]), slowdown=2.0)
        run = execute(beside)
        # 15 of the first 20 are done when the channel is free: 30 us, then at full pace.
        self.assertEqual((run.start[2], run.end[2], run.makespan_us), (35.0, 55.0, 55.0))
        self.assertEqual((run.compute_us, run.exposed_us), (55.0, 0.0))

    def test_any_busy_channel_stretches(self):
        run = execute(dataclasses.replace(program(("a", 10), ("b", 40), 20, 10), slowdown=2.0))
        self.assertEqual((run.end[2], run.end[3]), (40.0, 50.0))

    def test_two_channels_run_side_by_side(self):
        run = execute(program(("a", 50), ("b", 10), [0, 1]))
        self.assertEqual((run.makespan_us, run.communication_us), (50.0, 60.0))

    def test_a_launch_that_nobody_waits_for_ends_the_program(self):
        run = execute(program(("a", 50), ("b", 70), 30))
        self.assertEqual((run.makespan_us, run.exposed_us), (70.0, 40.0))
        self.assertEqual(run.exposed[:2], (20.0, 20.0))

    def test_a_blocking_collective_awaits_itself(self):
        blocking = Program([5.0, 0.0, 5.0], ["", "a", ""], [0.0, 20.0, 0.0], [[], [1], []])
        run = execute(blocking)
        self.assertEqual((run.makespan_us, run.exposed_us, run.start[2]), (30.0, 20.0, 25.0))

    def test_nothing_takes_no_time(self):
        self.assertEqual(execute(program()).makespan_us, 0.0)


class TestProperties(TestCase):
    @given(programs())
    def test_bounds(self, program):
        run = execute(program)
        per_channel = dict.fromkeys(program.channel, 0.0)
        for channel, us in zip(program.channel, program.link_us, strict=True):
            per_channel[channel] += us
        self.assertGreaterEqual(run.makespan_us, run.compute_us)
        self.assertGreaterEqual(run.makespan_us, max(per_channel.values(), default=0.0))
        self.assertEqual(run.makespan_us, run.compute_us + run.exposed_us)
        self.assertGreaterEqual(run.communication_us, run.exposed_us)
        self.assertTrue(all(us >= 0 for us in (*run.exposed, *run.blocked)))

    @given(programs(), st.data())
    def test_dropping_a_wait_never_takes_longer(self, program, data):
        # True here because channels serve in program order: an earlier start never delays another.
        kept = [[] if waits and data.draw(st.booleans()) else waits for waits in program.awaits]
        fewer = Program(program.compute_us, program.channel, program.link_us, kept)
        self.assertLessEqual(execute(fewer).makespan_us, execute(program).makespan_us)

    @given(programs(), st.floats(0.5, 4.0))
    def test_time_scales(self, program, factor):
        scaled = Program(
            [us * factor for us in program.compute_us],
            program.channel,
            [us * factor for us in program.link_us],
            program.awaits,
        )
        self.assertEqual(execute(scaled).makespan_us, execute(program).makespan_us * factor)


if __name__ == "__main__":
    run_tests()
