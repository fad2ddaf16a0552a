"""Kernel names of libraries in words: those of the sample run, of imported traces, and what must tell nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import nanalyze.analysis as na
from nanalyze.analysis.report.decode import decoded

SAMPLE = Path(__file__).parent.parent / "examples" / "h200-sample"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_bias_TNT",
         "cuBLAS matrix product, BF16, tile 192×128×64, 5 stages"),
        ("nvjet_sm90_hsh_64x48_64x15_1x1_v_bz_NNT", "cuBLAS matrix product, FP16, tile 64×48×64, 15 stages"),
        ("nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_TNT",
         "cuBLAS matrix product, tile 128×128×128, 6 stages"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize256x128x8_stage3_warpsize4x2x1_ffma_aligna4_alignc4_execute",
         "cuBLAS or cuDNN matrix product, FP32, tile 256×128×8, 3 stages"),
        ("sm90_xmma_gemm_f64f64_f64f64_f64_nn_n_tilesize128x64x16_stage3_warpsize2x2x1_tensor16x8x8_execute_kernel",
         "cuBLAS or cuDNN matrix product, FP64, tile 128×64×16, 3 stages"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off", ""),
        ("ampere_sgemm_128x64_tn", "cuBLAS matrix product, FP32, tile 128×64"),
        ("volta_dgemm_64x64_nn", "cuBLAS matrix product, FP64, tile 64×64"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn",
         "cuBLAS matrix product on the tensor pipe, BF16, tile 128×128"),
        ("ampere_h16816gemm_64x64_ldg8_stages_64x5_nn", "cuBLAS matrix product on the tensor pipe, FP16, tile 64×64"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_nn_align8>(cutlass::Params)",
         "CUTLASS matrix product on the tensor pipe, BF16, tile 128×256×32, 3 stages"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(cutlass::Params)",
         "CUTLASS matrix product, FP32, tile 128×32×8, 5 stages"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0",
         "cuDNN attention backward, FP16 or BF16, tile 64×64×64"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0",
         "cuDNN attention forward, FP16 or BF16, tile 64×128×64"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<Traits, true>(Params)", "FlashAttention forward"),
        ("triton_poi_fused_add_17", "Inductor pointwise, of add"),
        ("triton_red_fused__softmax_12", "Inductor reduction, of _softmax"),
        ("triton_per_fused_add_native_layer_norm_3", "Inductor persistent reduction, of add_native_layer_norm"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
         "NCCL all-reduce, sum of FP32, ring, protocol LL"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "NCCL send and receive"),
        ("triton_softmax_kernel", ""),
        ("triton_silu_duration_only", ""),
        ("my_nvjet", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_a_name_says_operation_types_and_tile(name: str, expected: str) -> None:
    assert decoded(name) == expected


def test_every_library_kernel_of_the_sample_is_decoded() -> None:
    with na.open(SAMPLE, verify=False) as run:
        names = list(run.kernel_classes()["name"])
    libraries = [name for name in names if name.startswith(("nvjet", "sm80_xmma", "sm90_xmma", "cudnn_generated"))]
    assert len(libraries) >= 15
    assert [name for name in libraries if not decoded(name)] == []
    assert {decoded(name).split(", ")[1] for name in libraries if name.startswith("nvjet")} == {"BF16"}
    others = [name for name in names if "at::native" in name]
    assert len(others) > 10
    assert not any(decoded(name) for name in others)


def test_a_hostile_name_takes_no_time() -> None:
    assert decoded("nvjet_sm90_" + "t" * 100_000) == ""
    assert decoded("cutlass" * 20_000) == ""
