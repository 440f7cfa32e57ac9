"""Bucket plans, as drawings and as properties."""

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from trainkit.strategies.reducer.bucket_plan import DEFAULT_CAP_BYTES, MIB, GradientSpec, plan_buckets, ring_bytes


def spec(numel: int, kind: str = "f32", *, sparse: bool = False) -> GradientSpec:
    return GradientSpec(numel, 4, kind, sparse)


def test_buckets_fill_in_reverse_order_and_close_at_the_cap():
    plan = plan_buckets([spec(10) for _ in range(6)], cap_bytes=80, first_cap_bytes=40)
    assert plan.draw() == "[5] [4 3] [2 1] [0]"
    #                      small  up to 80 bytes  rest


def test_caps_are_those_of_torch():
    assert (dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20) == (MIB, DEFAULT_CAP_BYTES)


def test_a_parameter_larger_than_the_cap_is_not_split():
    plan = plan_buckets([spec(10), spec(1000), spec(10)], cap_bytes=41, first_cap_bytes=41)
    assert plan.draw() == "[2 1] [0]"


def test_kinds_fill_side_by_side_and_sparse_gradients_have_their_own_bucket():
    specs = [spec(10), spec(10, "f64"), spec(10, sparse=True), spec(10), spec(10, "f64")]
    plan = plan_buckets(specs, cap_bytes=80, first_cap_bytes=80)
    assert plan.draw() == "[2*] [4 1] [3 0]"


def test_unused_parameters_come_last_in_separate_buckets():
    plan = plan_buckets([spec(10) for _ in range(5)], cap_bytes=4000, order=[0, 1, 2, 3, 4], apart={1, 3})
    assert plan.draw() == "[0 2 4] [1 3]"


def test_unused_parameters_fill_buckets_of_the_last_cap():
    plan = plan_buckets([spec(10) for _ in range(6)], cap_bytes=80, first_cap_bytes=40, apart={0, 1, 2, 3})
    assert plan.draw() == "[5] [4] [3 2] [1 0]"


def test_a_ring_sends_all_bytes_but_a_shard_twice():
    assert [ring_bytes(4096, world_size) for world_size in (1, 2, 4)] == [0, 4096, 6144]


def test_offsets_leave_no_gap():
    (bucket,) = plan_buckets([spec(3), spec(0), spec(5)], cap_bytes=MIB).buckets
    assert (bucket.parameters, bucket.offsets, bucket.numel) == ((2, 1, 0), (0, 5, 5), 8)


def test_an_order_that_omits_a_parameter_is_rejected():
    with pytest.raises(ValueError, match="each of the 2 parameters once"):
        plan_buckets([spec(1), spec(1)], cap_bytes=8, order=[0, 0])


specs_lists = st.lists(
    st.builds(
        GradientSpec,
        numel=st.integers(0, 50),
        element_bytes=st.just(4),
        kind=st.sampled_from(["f32 cpu", "f64 cpu", "f32 cuda"]),
        sparse=st.booleans(),
    ),
    min_size=1,
    max_size=30,
)


@given(specs=specs_lists, cap=st.integers(1, 400), first=st.integers(1, 400), picks=st.data())
def test_every_parameter_is_in_exactly_one_bucket_and_offsets_leave_no_gap(specs, cap, first, picks):
    order = picks.draw(st.permutations(range(len(specs))))
    apart = picks.draw(st.sets(st.integers(0, len(specs) - 1)))
    plan = plan_buckets(specs, cap_bytes=cap, first_cap_bytes=first, order=order, apart=apart)
    assert sorted(i for bucket in plan.buckets for i in bucket.parameters) == list(range(len(specs)))
    for bucket in plan.buckets:
        assert {specs[i].kind for i in bucket.parameters} == {bucket.kind}
        assert len({i in apart for i in bucket.parameters}) == 1
        assert all(specs[i].sparse == bucket.sparse for i in bucket.parameters)
        ends = [o + specs[i].numel for o, i in zip(bucket.offsets, bucket.parameters, strict=True)]
        assert list(bucket.offsets) == [0, *ends[:-1]]
        assert bucket.numel == ends[-1]


@given(specs=specs_lists, cap=st.integers(1, 400))
def test_only_the_last_parameter_of_a_bucket_passes_the_cap(specs, cap):
    buckets = [b for b in plan_buckets(specs, cap_bytes=cap, first_cap_bytes=cap).buckets if not b.sparse]
    last = {bucket.kind: bucket for bucket in buckets}
    for bucket in buckets:
        assert sum(specs[i].numel for i in bucket.parameters[:-1]) * 4 < cap
        assert bucket.numel * 4 >= cap or bucket is last[bucket.kind]


def test_each_bucket_has_its_own_cap_and_the_last_cap_is_that_of_all_others():
    specs = [GradientSpec(1, 4, "float32") for _ in range(9)]
    assert plan_buckets(specs, cap_bytes=1, caps_bytes=[4, 12, 8]).draw() == "[8] [7 6 5] [4 3] [2 1] [0]"
