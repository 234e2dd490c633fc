"""A trial of a vector unit that succeeded is not made again on this host."""

import pytest
from torch._inductor.cpu_vec_isa import VecAMX, VecAVX2, VecAVX512, VecISA

import dynamo_dist
from dynamo_dist.torch_compat import inductor_cpp


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def trials(monkeypatch):
    """Units and codes that were tried, by an upstream that says what it is asked to."""
    made = []

    def check_build(self, code):
        made.append((str(self), code))
        return code != "bad"

    monkeypatch.setattr(VecISA, "check_build", check_build)
    dynamo_dist.enable()
    yield made
    dynamo_dist.disable()  # before the attribute is set back, which is ours until then


def test_what_has_succeeded_is_not_tried_again(trials):
    assert all(VecAVX2().check_build(code) for code in ("good", "good", "other"))
    assert trials == [("avx2", "good"), ("avx2", "other")]


def test_what_has_failed_is(trials):
    assert not any(VecAVX2().check_build("bad") for _ in range(2))
    assert len(trials) == 2


def test_nor_is_it_taken_from_another_host(trials, monkeypatch):
    assert VecAVX2().check_build("good")
    monkeypatch.setattr(inductor_cpp, "_host", lambda: ("another",))
    assert VecAVX2().check_build("good")
    assert len(trials) == 2


def test_unwritable_folder_costs_a_process_the_trial(trials, folder):
    (folder / "dynamo_dist").write_text("a file where a folder should be")
    assert all(VecAVX2().check_build("good") for _ in range(2))
    assert len(trials) == 1 and not (folder / "dynamo_dist").is_dir()


@pytest.mark.parametrize("code", ["good", "bad"])
def test_unit_inside_a_built_one_is_not_tried(trials, code):
    found = [unit().check_build(code) for unit in (VecAMX, VecAVX512, VecAVX2)]
    tried = [unit for unit, _ in trials]
    if code == "bad":
        assert not any(found) and len(tried) == 3
    else:
        assert all(found) and tried == [str(VecAMX()), "avx2"]


def test_a_wider_unit_is_tried_after_its_part(trials):
    assert all(unit().check_build("good") for unit in (VecAVX512, VecAMX))
    assert len(trials) == 2
