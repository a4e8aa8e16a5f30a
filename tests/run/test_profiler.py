"""Where the time goes: shares of a step from the kernels that ran."""

import pytest

from common.run.profiler import draw_step, kind_of, merge, shares_table, time_shares

KERNELS = [  # ms of a step of 20: (name, begin, end), in microseconds
    ("nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NNN", 0, 4000),
    ("void pytorch_flash::flash_fwd_kernel<...>", 4000, 6000),
    ("triton_poi_fused_gelu_0", 6000, 9000),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", 8000, 10000),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 7000, 13000),
    ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", 14000, 20000),
]


def test_kinds_of_kernels():
    assert [kind_of(name) for name, _, _ in KERNELS] == [
        "GEMM", "attention", "elementwise", "elementwise", "communication", "optimizer",
    ]  # fmt: skip
    assert kind_of("Memcpy HtoD (Pinned -> Device)") == "elementwise"
    assert kind_of("void cublasLt::splitKreduce_kernel<32, 16>") == "GEMM"
    step = "multi_tensor_apply_kernel<TensorListMetadata<{}>, {}>"  # of lists of gradients, weights, norms
    assert kind_of(step.format(1, "BinaryOpScalarTensorFunctor<float, 1, 1, 0>, std::multiplies<float>")) == "optimizer"
    assert (
        kind_of(step.format(2, "CopyFunctor<c10::BFloat16, float, 2, 1, 1>, Copy<c10::BFloat16, float>"))
        == "elementwise"
    )
    assert kind_of(step.format(2, "UnaryOpFunctor<float, 2, 1, 1>, Copy<float, float>")) == "elementwise"


def test_shares_add_up():
    found = time_shares(KERNELS)
    assert found == {
        "GEMM": 4000,
        "attention": 2000,
        "elementwise": 4000,  # two that overlap count once
        "optimizer": 6000,
        "communication, hidden": 3000,
        "communication, exposed": 3000,
        "idle": 1000,
        "all": 20000,
    }
    visible = sum(value for kind, value in found.items() if kind not in ("communication, hidden", "all"))
    assert visible == found["all"]
    table = shares_table(found, steps=2)
    assert "idle" in table and "10.00" in table and "100.0%" in table


def test_merge_takes_spans_in_any_order():
    assert merge([(5, 6), (0, 3), (2, 4), (4, 4.5)]) == [(0, 4.5), (5, 6)]
    assert merge([]) == []


def test_a_step_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    draw_step(KERNELS, 2, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 5000
