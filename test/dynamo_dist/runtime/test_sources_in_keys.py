"""Where inputs come from, as AOTAutograd's key has it: the same in each process."""

import pytest
from torch._dynamo.source import AttrSource, GlobalSource, LocalSource
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCachePickler
from torch._functorch._aot_autograd.schemas import AOTConfig

import dynamo_dist
from dynamo_dist.torch_compat import inductor_code


def member(installed, name):
    return AttrSource(GlobalSource(installed), name)


def test_addresses_are_numbered_as_they_come():
    one, other = (
        [
            member(f"__dynamo_dist_{a}_c0", "mesh"),
            member(f"__dynamo_dist_weak_{b}_c7", "mesh"),
            member(f"__dynamo_dist_{a}_c0", "group"),
        ]
        for a, b in ((139634606493776, 5), (140231575475536, 9))
    )
    assert one != other
    assert inductor_code.numbered(one) == inductor_code.numbered(other)
    assert len(set(inductor_code.numbered(one))) == 3


@pytest.mark.parametrize(
    "changed",
    [
        ("__dynamo_dist_1_c0", "__dynamo_dist_1_c0"),
        ("__dynamo_dist_1_c0", "x"),
        ("x", "__dynamo_dist_1_c0"),
    ],
)
def test_other_objects_make_another_key(changed):
    two = [member(name, "mesh") for name in ("__dynamo_dist_1_c0", "__dynamo_dist_2_c0")]
    assert inductor_code.numbered(two) != inductor_code.numbered(
        [member(name, "mesh") for name in changed]
    )


def test_sources_without_our_globals_stay_torchs():
    assert inductor_code.numbered([LocalSource("x"), GlobalSource("weights_1_c0")]) is None
    assert inductor_code.numbered([]) is None


def test_keys_of_an_enabled_process_have_the_numbers():
    def key(address):
        sources = [member(f"__dynamo_dist_{address}_c0", "mesh")]
        config = AOTConfig(
            None, None, None, {}, 0, 0, False, aot_autograd_arg_pos_to_source=sources
        )
        return repr(AOTAutogradCachePickler._reduce_aot_config(None, config)[1])

    assert key(139634606493776) != key(140231575475536)
    dynamo_dist.enable()
    assert key(139634606493776) == key(140231575475536)
