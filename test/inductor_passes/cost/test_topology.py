import json

import pytest
from torch.testing._internal.common_utils import TestCase, run_tests

from inductor_passes.cost import default_topology, load_topology, shipped_topologies
from inductor_passes.cost.topology import (
    forget_topologies,
    register_topology,
    registered_topologies,
)
from inductor_passes.errors import TopologyError


def figure(value):
    return {"value": value, "source": "a test"}


def small_topology():
    return {
        "name": "small",
        "description": "As small as a topology can be.",
        "ranks_per_node": figure(4),
        "device": {
            "matmul": {"float32": {"peak_tflops": figure(10.0), "efficiency": figure(0.5)}},
            "attention_efficiency": figure(0.25),
            "memory_gb_per_s": figure(100.0),
            "kernel_us": figure(2.0),
        },
        "links": {
            "intra_node_gb_per_s": figure(10.0),
            "inter_node_gb_per_s": figure(1.0),
            "protocols": [
                {
                    "name": "only",
                    "launch_us": figure(5.0),
                    "intra_node": {"step_us": figure(1.0), "bandwidth_share": figure(1.0)},
                    "inter_node": {"step_us": figure(3.0), "bandwidth_share": figure(0.5)},
                }
            ],
        },
    }


class TestLoad(TestCase):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.path = tmp_path / "mine.json"

    def write(self, content):
        self.path.write_text(content if isinstance(content, str) else json.dumps(content))
        return self.path

    def message(self, content):
        with pytest.raises(TopologyError) as caught:
            load_topology(self.write(content))
        return str(caught.value).replace(str(self.path), "FILE")

    def changed(self, value, *path):
        """The message for a small topology with one value replaced, or removed if it is None."""
        data = small_topology()
        at = data
        for key in path[:-1]:
            at = at[key]
        if value is None:
            del at[path[-1]]
        else:
            at[path[-1]] = value
        return self.message(data)

    def test_every_shipped_file_loads_and_names_itself(self):
        self.assertEqual(shipped_topologies(), ("cpu-gloo", "h100x8", "h200x8"))
        for name in shipped_topologies():
            topology = load_topology(name)
            self.assertEqual(topology.name, name)
            self.assertGreater(len(topology.sources), 15)

    def test_measured_tables(self):
        data = small_topology()
        entry = {
            "kind": "all_gather",
            "ranks": 4,
            "nodes": 1,
            "source": "a test",
            "points": [[8, 5]],
        }
        data["links"]["measured"] = [entry]
        self.assertEqual(load_topology(self.write(data)).collectives[0].us(16), 10)
        for change, said in (
            ({"points": []}, "'links.measured[0].points' is an empty list"),
            ({"points": [[8, 0]]}, "'links.measured[0].points[0][1]' is 0"),
            ({"points": [[8.5, 1]]}, "'links.measured[0].points[0][0]' is 8.5"),
            ({"points": [[8]]}, "'links.measured[0].points[0]' is a list of 1"),
            ({"ranks": 0}, "must have minimum 1"),
            ({"gb_per_s": 1}, "'links.measured[0].gb_per_s' is"),
        ):
            data["links"]["measured"] = [{**entry, **change}]
            self.assertIn(said, self.message(data))
        data["links"]["measured"] = [entry, entry]
        self.assertIn("must have one entry of each kind, ranks, nodes", self.message(data))

    def test_own_file(self):
        topology = load_topology(self.write(small_topology()))
        self.assertEqual((topology.name, topology.ranks_per_node), ("small", 4))
        self.assertEqual(topology.matmul_rate("float32").flops_per_us, 5e6)
        self.assertEqual(topology.memory_bytes_per_us, 1e5)
        self.assertIsNone(topology.all_reduce_in_node)
        self.assertEqual(dict(topology.sources)["device.kernel_us"], "a test")

    def test_a_registered_name(self):
        path, other = self.write(small_topology()), self.path.with_name("other.json")
        self.addCleanup(forget_topologies, registered_topologies())
        register_topology("ours", path)
        register_topology("ours", path)  # the same again is nothing new
        self.assertEqual(load_topology("ours"), load_topology(path))
        for name in ("ours", "h100x8"):
            with self.assertRaisesRegex(TopologyError, "is there already"):
                register_topology(name, other)
        with self.assertRaisesRegex(TopologyError, r"other\.json"):
            register_topology("other", other)
        with self.assertRaisesRegex(TopologyError, "Known topologies: .*h200x8, ours;"):
            load_topology("other")

    def test_rates_of_other_dtypes(self):
        topology = load_topology("h100x8")
        self.assertEqual(topology.matmul_rate("float8_e4m3fn"), topology.matmul_rate("float8"))
        self.assertEqual(topology.matmul_rate("complex64"), topology.matmul_rate("float32"))

    def test_default_goes_by_device_type_alone(self):
        self.assertEqual(default_topology("cuda"), "h100x8")
        self.assertEqual(default_topology("cpu"), "cpu-gloo")

    def test_missing_file(self):
        with pytest.raises(TopologyError) as caught:
            load_topology("h100x9")
        self.assertExpectedInline(
            str(caught.value),
            """Cannot read topology 'h100x9': No such file or directory. Known topologies: cpu-gloo, h100x8, h200x8; or give the path of a JSON file of the same form.""",
        )

    def test_folder_instead_of_a_file(self):
        with pytest.raises(TopologyError, match="Is a directory"):
            load_topology(self.path.parent)

    def test_not_text(self):
        self.path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(TopologyError, match="not UTF-8"):
            load_topology(self.path)

    def test_not_json(self):
        self.assertExpectedInline(
            self.message('{"name": "x",}'),
            """Topology file 'FILE' is not JSON: Expecting property name enclosed in double quotes at line 1, column 14. Correct the file. Known topologies: cpu-gloo, h100x8, h200x8; or give the path of a JSON file of the same form.""",
        )

    def test_not_an_object(self):
        self.assertExpectedInline(
            self.message([1]),
            """Topology file 'FILE': the whole file is a list of 1, but it must have type "object". Correct the file. Known topologies: cpu-gloo, h100x8, h200x8; or give the path of a JSON file of the same form.""",
        )

    def test_missing_field(self):
        self.assertExpectedInline(
            self.changed(None, "device", "memory_gb_per_s"),
            """Topology file 'FILE' lacks the field 'device.memory_gb_per_s'. Add it. Known topologies: cpu-gloo, h100x8, h200x8; or give the path of a JSON file of the same form.""",
        )

    def test_missing_rate_of_float32(self):
        self.assertIn(
            "lacks the field 'device.matmul.float32'", self.changed({}, "device", "matmul")
        )

    def test_unknown_field(self):
        self.assertExpectedInline(
            self.changed(figure(1.0), "links", "gigabytes"),
            """Topology file 'FILE': field 'links.gigabytes' is an object of 2 fields, but it must not be there; known are intra_node_gb_per_s, inter_node_gb_per_s, host_gb_per_s, protocols, all_reduce_in_node, coalesced_start_share, reduce_scatter_rounds, measured. Correct the file. Known topologies: cpu-gloo, h100x8, h200x8; or give the path of a JSON file of the same form.""",
        )

    def test_negative_rate(self):
        self.assertExpectedInline(
            self.changed(figure(-3.0), "links", "inter_node_gb_per_s"),
            """Topology file 'FILE': field 'links.inter_node_gb_per_s.value' is -3.0, but it must have exclusiveMinimum 0. Correct the file. Known topologies: cpu-gloo, h100x8, h200x8; or give the path of a JSON file of the same form.""",
        )

    def test_impossible_numbers(self):
        for value in (0, float("nan"), float("inf"), True, "fast", [1]):
            with self.subTest(value=value):
                self.assertIn(
                    "field 'device.kernel_us.value' is",
                    self.changed(figure(value), "device", "kernel_us"),
                )

    def test_share_above_one(self):
        self.assertIn(
            "must have maximum 1",
            self.changed(figure(1.5), "device", "attention_efficiency"),
        )

    def test_broken_rank_count(self):
        self.assertIn("must have multipleOf 1", self.changed(figure(2.5), "ranks_per_node"))

    def test_figure_without_source(self):
        self.assertIn(
            "lacks the field 'device.kernel_us.source'",
            self.changed({"value": 1.0}, "device", "kernel_us"),
        )
        self.assertIn(
            "field 'device.kernel_us' is 1.0, but it must have type",
            self.changed(1.0, "device", "kernel_us"),
        )

    def test_no_protocols(self):
        self.assertIn(
            "'links.protocols' is an empty list, but it must",
            self.changed([], "links", "protocols"),
        )

    def test_mistake_inside_a_protocol(self):
        self.assertIn(
            "'links.protocols[0].intra_node.step_us.value' is -1",
            self.changed(figure(-1), "links", "protocols", 0, "intra_node", "step_us"),
        )

    def test_empty_name(self):
        self.assertIn("field 'name' is", self.changed(" ", "name"))


if __name__ == "__main__":
    run_tests()
