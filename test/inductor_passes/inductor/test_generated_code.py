from inductor_passes.inductor.generated_code import order_kept, read_order

GATHERS = """
        buf0 = torch.ops._c10d_functional.all_gather_into_tensor.default(arg1_1, 2, '0')
        assert_size_stride(buf0, (64, 64), (64, 1), 'torch.ops._c10d_functional')
        # Topologically Sorted Source Nodes: [wait], Original ATen: [_c10d_functional.wait_tensor]
        torch.ops._c10d_functional.wait_tensor.default(buf0)
        buf4 = torch.ops._c10d_functional.all_gather_into_tensor.default(arg2_1, 2, '0')
        extern_kernels.mm(arg0_1, reinterpret_tensor(buf0, (64, 64), (64, 1), 0), out=buf3)
        torch.ops._c10d_functional.wait_tensor.default(buf4)
        buf9 = buf4; del buf4  # reuse
        cpp_fused_relu_0(buf3)
        extern_kernels.addmm(buf1, buf3, buf9, alpha=1, beta=1, out=buf8)
"""
EXPECTED = ["launch all_gather 0", "wait 0", "launch all_gather 0", "kernel", "wait 1", "kernel"]


def test_events_are_read_in_order():
    assert read_order(GATHERS) == [
        "launch all_gather",
        "wait 0",
        "launch all_gather",
        "kernel",
        "wait 1",
        "kernel",
    ]


def test_a_reduction_in_place_is_followed_through_reuse():
    code = """
        torch.ops._c10d_functional.all_reduce_.default(buf1, 'sum', '0')
        buf2 = buf1; del buf1  # reuse
        extern_kernels.mm(buf7, buf8, out=buf9)
        torch.ops._c10d_functional.wait_tensor.default(buf2)
    """
    assert read_order(code) == ["launch all_reduce", "kernel", "wait 0"]


def test_kept_and_not_kept():
    assert order_kept(EXPECTED, GATHERS) is True
    moved = [EXPECTED[i] for i in (0, 1, 3, 2, 4, 5)]
    assert order_kept(moved, GATHERS) is False


def test_a_second_wait_of_a_launch_is_no_other_order():
    twice = GATHERS.replace(
        "        buf9 = buf4",
        "        torch.ops._c10d_functional.wait_tensor.default(buf4)\n        buf9 = buf4",
    )
    assert read_order(twice).count("wait 1") == 2
    assert order_kept(EXPECTED, twice) is True
    assert order_kept([*EXPECTED, "wait 1"], GATHERS) is True
    late = ["launch all_gather 0", "launch all_gather 0", "wait 0", "kernel", "wait 1", "kernel"]
    assert order_kept(late, twice) is False


def test_kernels_do_not_count_where_their_number_changed():
    without = GATHERS.replace("extern_kernels.addmm", "triton_addmm")
    assert order_kept(EXPECTED, without) is True
    assert order_kept([e for e in EXPECTED if e != "wait 1"], without) is False


def test_nothing_to_read_is_not_an_answer():
    assert order_kept(EXPECTED, None) is None
    assert order_kept(EXPECTED, "extern C code") is None
    assert order_kept([], GATHERS) is None
