import importlib.util
import json
import tempfile
from pathlib import Path

from torch.testing._internal.common_utils import TestCase, run_tests

from inductor_passes.cost import load_topology
from inductor_passes.cost.topology_file import dump_topology

SOURCE = Path(__file__).parents[2] / "tools" / "calibrate.py"
# Microseconds of two repetitions each; the better one counts.
TIMES = {
    "matmul float32 512": [9000.0, 2 * 512**3 / 1e5],  # 0.1 TFLOPS
    "matmul bfloat16 128": [2 * 128**3 / 1e4, 9000.0],  # 0.01 TFLOPS
    "attention": [4 * 4 * 512 * 512 * 64 / 2.5e4] * 2,  # a quarter of float32's rate
    "copy": [2 * 64 * 2**20 / 1e4] * 2,  # 10 GB/s
    "small kernel": [1.5, 2.0],
    "all_gather small": [100.0, 150.0],
    "all_gather large": [100.0 + 16 * 2**20 / 1e3] * 2,  # 1 GB/s
    "all_reduce small": [130.0, 170.0],
    "all_reduce large": [130.0 + 16 * 2**20 / 2e3] * 2,  # 2 GB/s
}


class TestCalibrate(TestCase):
    def setUp(self):
        super().setUp()
        spec = importlib.util.spec_from_file_location("calibrate", SOURCE)
        self.tool = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.tool)

    def load(self, times, folder):
        path = Path(folder) / "host.json"
        path.write_text(dump_topology(self.tool.topology(times, 0.125)))
        return load_topology(path)

    def test_figures_follow_from_the_times(self):

        with tempfile.TemporaryDirectory() as folder:
            topology = self.load(TIMES, folder)
        self.assertEqual(topology.matmul_rate("float32").peak_tflops, 0.1)
        self.assertEqual(topology.matmul_rate("bfloat16").peak_tflops, 0.01)
        self.assertEqual((topology.attention_efficiency, topology.memory_gb_per_s), (0.25, 10.0))
        self.assertEqual((topology.kernel_us, topology.intra_gb_per_s), (1.5, 1.0))
        (tcp,) = topology.protocols
        self.assertEqual((tcp.launch_us, tcp.intra_step_us), (70.0, 30.0))
        own = topology.all_reduce_in_node
        self.assertEqual((own.launch_us, own.gb_per_s), (130.0, 2.0))
        self.assertTrue(all("measured" in s or "choice" in s or "peak" in s or "rate" in s
                            for _, s in topology.sources))  # fmt: skip

    def test_noise_cannot_make_a_figure_impossible(self):

        noisy = {**TIMES, "all_reduce small": [60.0, 60.0]}
        with tempfile.TemporaryDirectory() as folder:
            (tcp,) = self.load(noisy, folder).protocols
        self.assertGreater(tcp.intra_step_us, 0)
        self.assertGreater(tcp.launch_us, 0)

    def test_one_line_a_figure(self):
        text = dump_topology({"a": {"value": 1, "source": "x"}, "b": [{"c": "d"}]})
        self.assertEqual(json.loads(text), {"a": {"value": 1, "source": "x"}, "b": [{"c": "d"}]})
        self.assertIn('  "a": {"value": 1, "source": "x"},\n', text)


if __name__ == "__main__":
    run_tests()
