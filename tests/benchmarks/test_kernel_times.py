from benchmarks.kernel_times import exclusive_times


def test_a_kernel_that_waits_for_the_one_before_counts_from_its_end() -> None:
    ran = [(10.0, 14.0, "second"), (0.0, 12.0, "first"), (11.0, 11.5, "hidden"), (20.0, 21.0, "later")]
    assert exclusive_times(ran) == [("first", 0.012), ("second", 0.002), ("hidden", 0.0), ("later", 0.001)]
