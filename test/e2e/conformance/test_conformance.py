"""What DDP and FSDP2 are documented to do, on two real ranks: compiled whole and by blocks as in
eager mode.
"""

import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.main]
FOLDER = Path(__file__).parent
NAME = re.compile(r'^@program\("(\w+)"[^\n]*\)\ndef (\w+)\(', re.MULTILINE)
PROGRAMS = [
    f"{wrapper}_{name}"
    for file in ("ddp.py", "fsdp2.py")
    for wrapper, name in NAME.findall((FOLDER / file).read_text())
]
VARIANTS = ["sgd-alike", "adamw-unlike", "sgd-unlike", "adamw-alike"]
# Each check runs these, in one variant; all the others are a sweep.
ALWAYS = """
ddp_plain ddp_small_buckets ddp_static_graph ddp_batch_norm ddp_buffers_after_evaluation ddp_buffers_within_no_sync
ddp_no_sync ddp_no_sync_eager_then_compiled ddp_backward_outside_of_no_sync ddp_find_unused_everywhere
ddp_find_unused_by_rank ddp_find_unused_and_no_sync ddp_weight_outside_alone ddp_weight_outside_on_one_rank
ddp_loss_in_the_compiled_function ddp_parameter_hook_on_one_rank ddp_post_accumulate_hook ddp_module_backward_hook_late
ddp_two_forwards_in_one_graph ddp_backward_twice ddp_sparse_embedding ddp_autocast ddp_graph_break_inside
ddp_parameters_with_new_data replicate_synchronized_last fsdp2_plain fsdp2_ragged
fsdp2_gathered_parameter_hook fsdp2_synchronized_last_mixed_precision fsdp2_blocks_synchronize_last hsdp_all_reduced_last fsdp2_parameter_hook
fsdp2_post_accumulate_hook fsdp2_module_backward_hook_late fsdp2_weight_outside_alone fsdp2_autocast
fsdp2_evaluated_in_eager_mode
""".split()
CASES = [
    pytest.param(
        f"{name}-{variant}",
        marks=[] if name in ALWAYS and number % 4 == place else [pytest.mark.sweep],
    )
    for number, name in enumerate(PROGRAMS)
    for place, variant in enumerate(VARIANTS)
]


@pytest.fixture(scope="module")
def results(request, cases_on_ranks, tmp_path_factory):
    """What both ranks say of each program that was asked for."""
    asked = [
        item.callspec.params["case"]
        for item in request.session.items
        if "case" in getattr(getattr(item, "callspec", None), "params", {})
        and item.path == Path(__file__)
    ]
    folder = tmp_path_factory.mktemp("ranks")
    return cases_on_ranks(FOLDER / "worker.py", 2, asked, folder, timeout=1200)


@pytest.mark.parametrize("case", CASES)
def test_program(results, case):
    assert [each[case] for each in results] == ["ok", "ok"]


def test_there_are_many():
    assert set(ALWAYS) <= set(PROGRAMS) and len(set(PROGRAMS)) == len(PROGRAMS) > 110
