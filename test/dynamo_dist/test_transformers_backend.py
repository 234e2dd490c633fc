"""What docs/how-to/trainers.md says of transformers' Trainer: which backend its arguments name, and
that it is ours.
"""

import pytest

import dynamo_dist
from dynamo_dist import graph_compile

pytest.importorskip("transformers", reason="the extra demo brings it")
utils = pytest.importorskip("accelerate.utils", reason="the extra demo brings it")


def test_accelerate_has_no_name_for_ours():
    with pytest.raises(ValueError, match="not a valid DynamoBackend"):
        utils.TorchDynamoPlugin(backend="dynamo_dist")


def test_trainer_compiles_by_inductor_with_our_passes(tmp_path):
    """That a graph of it is ours, accelerate's plugin shows in
    ``test/e2e/accelerate_worker.py``.
    """
    from transformers import TrainingArguments

    dynamo_dist.enable(inductor=True)
    arguments = TrainingArguments(str(tmp_path), torch_compile=True, use_cpu=True)
    plugin = utils.TorchDynamoPlugin(backend=arguments.torch_compile_backend)
    assert plugin.to_kwargs()["backend"] == "inductor"
    assert graph_compile.taken() is not None
