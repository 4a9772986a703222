"""Speed targets: the case that measures each, whom it is compared with, and why some are missed.

`scripts/timing_table.py` writes them with what was measured into docs/benchmarks.md.
"""

from typing import Any, NamedTuple

_DECODE, _ROWS, _EXPERTS = "paged_attention", "16384x7168", "A6-E{}-M4096-F2048"
FA3, CUDA = "FlashAttention 3", "(CUDA)"


class Target(NamedTuple):
    """Time of a case, at most `limit` of the peer's, or of that of another case of ours."""

    title: str
    mechanism: str
    case: str
    peer: str
    """Part of the peer's name, or the name of another case of the mechanism."""
    limit: float
    why: str = ""
    """Where the rest is lost, if the target was missed; at most a sentence or two."""
    own: bool = False
    """`peer` is a case."""
    fixed: float | None = None
    """Microseconds of a peer that does not run here, from another run on the same kind of card."""


def _b(case: str, experts: int) -> str:
    return f"{case}-{_EXPERTS.format(experts)}"


_AT_CEILING = "at the copy ceiling of the run"
_PRODUCTS = "85 % of the ceiling, which is XLA's product of two matrices; not profiled"
TARGETS = (
    Target("decode B32 S8192 H32/8 D128", _DECODE, "decode-B32-S8192-H32-K8-D128", FA3, 0.92, _AT_CEILING),
    Target("... lengths S/8 to S", _DECODE, "decode-B32-S8192-H32-K8-D128-ragged", FA3, 0.95),
    Target("decode B4 S32768 H64/8 D128", _DECODE, "decode-B4-S32768-H64-K8-D128", FA3, 0.88, _AT_CEILING),
    Target("... lengths S/8 to S", _DECODE, "decode-B4-S32768-H64-K8-D128-ragged", FA3, 0.95),
    Target("decode B64, lengths 1 to 512", _DECODE, "decode-B64-lens-1-to-512", FA3, 1.0),
    Target(
        "decode B64 S4096 H64/8 D64, pages of 16, sinks",
        _DECODE,
        "decode-B64-S4096-H64-K8-D64-page16-sinks",
        FA3,
        0.85,
        "0.86 would be the copy ceiling; copies of 2 KB leave 12 % of it",
    ),
    Target("... window 128", _DECODE, "decode-B64-S4096-H64-K8-D64-page16-sinks-window128", "Triton", 0.6),
    Target("decode, FP8 cache", _DECODE, "decode-B32-S8192-H32-K8-D128-fp8", "Triton", 0.31),
    Target("paged prefill, causal, B1 S8192 H32/8 D128", _DECODE, "prefill-B1-S8192-H32-K8-D128", FA3, 0.95),
    Target("packed prefill, causal, B4 S4096", "attention", "varlen-B4-S4096-H32-K8-D128", FA3, 1.0),
    Target(
        "MLA prefill 192/128 H128 S8192",
        "attention",
        "mla-B1-S8192-H128-D192-Dv128",
        FA3,
        1.0,
        "3577 us, 0.95 of the time beside it, since consumers take no turns: a later run without the peer",
    ),
    Target(
        "prefill, window 128, S16384 H64/8 D64",
        "attention",
        "window128-B1-S16384-H64-K8-D64",
        FA3,
        0.8,
        "not profiled; a tile has three blocks of keys, so that its beginning and end count",
    ),
    Target("cascade B128, 8192 shared + 256 own", "cascade_attention", "decode-B128-shared8192-own256", "cascade", 0.8),
    Target("merge of states T8192 H32 D128", "merge_states", "T8192-H32-D128", CUDA, 0.9, _AT_CEILING),
    Target("FP8 per token", "quantize_fp8", f"token-{_ROWS}", CUDA, 0.75, "95 % of the copy ceiling"),
    Target("FP8 in groups of 128", "quantize_fp8", f"group-{_ROWS}", CUDA, 0.36, "98 % of the copy ceiling"),
    Target(
        "RMSNorm + FP8 per token",
        "rms_norm_quant",
        f"token-{_ROWS}",
        CUDA,
        0.24,
        "89 % of the copy ceiling: a row's maximum is known only after its sum of squares",
    ),
    Target("RMSNorm", "rms_norm_quant", f"none-{_ROWS}", CUDA, 0.92, "97 % of the copy ceiling"),
    Target("SiLU-mul with clamp", "silu_mul_quant", "clamp-16384x4096", CUDA, 0.9, "92 % of the copy ceiling"),
    Target(
        "FP8 block GEMM 4096x4096x7168",
        "scaled_matmul",
        "fp8-block-N4096-M7168-F4096",
        "DeepGEMM",
        1.0,
        "within the noise: 173.0 and 172.7 us in the run before",
    ),
    Target(
        "FP8 block GEMM, 64 rows",
        "scaled_matmul",
        "fp8-block-N64-M7168-F4096",
        "DeepGEMM",
        0.7,
        "DeepGEMM takes 11 us here, 17 in the run that set the target; 69 % of the copy ceiling",
    ),
    Target("FP8 grouped GEMM, 8 x 4096 rows", "grouped_matmul", "fp8-E8-R4096-M4096-F4096", "DeepGEMM", 1.0, _PRODUCTS),
    Target("... 32 x 256 rows", "grouped_matmul", "fp8-E32-R256-M4096-F4096", "DeepGEMM", 1.0, "within the noise"),
    Target(
        "W4A16 8192x8192, 1 row",
        "weight_only_matmul",
        "gptq-tiled-N1-M8192-F8192",
        "marlin",
        0.7,
        "Marlin takes 15.5 us here, 23 in the run that set the target; 69 % of the copy ceiling",
    ),
    Target("... 16 rows", "weight_only_matmul", "gptq-tiled-N16-M8192-F8192", "marlin", 0.7, "as with 1 row"),
    Target("... 128 rows", "weight_only_matmul", "gptq-tiled-N128-M8192-F8192", "marlin", 0.75),
    Target("... 2048 rows", "weight_only_matmul", "gptq-tiled-N2048-M8192-F8192", "dense", 1.05, fixed=405.0),
    Target("TurboQuant decode k8v4", "turboquant_attention", "decode-B32-S8192-k8v4", "triton", 0.12),
    Target("... 4 bits", "turboquant_attention", "decode-B32-S8192-4bit_nc", "triton", 0.12),
    Target("... 3 bits", "turboquant_attention", "decode-B32-S8192-3bit_nc", "triton", 0.075),
    Target("TurboQuant store, 4 bits, T8192", "turboquant_write", "T8192-K8-D128-4bit_nc", "triton", 0.15),
    Target("experts, bf16, E64, T16", "experts", _b("bf16-T16", 64), "fused", 0.97, _AT_CEILING),
    Target("... T256", "experts", _b("bf16-T256", 64), "fused", 0.95, "92 % of the copy ceiling"),
    Target(
        "... T4096",
        "experts",
        _b("bf16-T4096", 64),
        "fused",
        0.68,
        "69 % of the product ceiling; vLLM takes 2650 us here, 3040 in the run that set the target",
    ),
    Target("experts, FP8 blocks, E256, T16", "experts", _b("fp8_block-T16", 256), "fused", 0.96, "92 % of the ceiling"),
    Target("... T256", "experts", _b("fp8_block-T256", 256), "fused", 0.93),
    Target("... T4096", "experts", _b("fp8_block-T4096", 256), "fused", 0.6, "78 % of the product ceiling"),
    Target(
        "experts, MXFP4, T16, beside our FP8",
        "experts",
        _b("mxfp4-T16", 256),
        _b("fp8_block-T16", 256),
        0.6,
        "69 % of the copy ceiling; not profiled",
        own=True,
    ),
    Target(
        "... T4096",
        "experts",
        _b("mxfp4-T4096", 256),
        _b("fp8_block-T4096", 256),
        1.11,
        "products in bfloat16, whose ceiling is half of FP8's; FP8 products of codes decoded in registers take 2515 us",
        own=True,
    ),
    Target("router, sqrt(softplus), T8192 E256 k6", "router", "V4-T8192-E256", CUDA, 1.0),
    Target("router, grouped sigmoid, T8192 E256 k8", "router", "V3-T8192-E256", CUDA, 0.8),
    Target("MLA decode B64 S8192 H128", "mla", "B64-S8192-H128", "FlashMLA", 1.05),
    Target("MLA decode B128 S4096 H16", "mla", "B128-S4096-H16", "FlashMLA", 0.95, "within the noise"),
    Target("MLA decode B1 S65536 H128", "mla", "B1-S65536-H128", "FlashMLA", 1.0),
    Target("sparse prefill T4096 H64 d512 topk 640", "sparse_mla", "N4096-H64-D512-K640", "FlashMLA", 1.1),
    Target("sparse prefill T4096 H128 d576 topk 2048", "sparse_mla", "N4096-H128-D576-K2048", "FlashMLA", 1.1),
    Target("V4 sparse decode B128 H64 128+512", "sparse_mla", "N128-H64-v4-128+512", "FlashMLA", 1.0),
    Target("V4 sparse decode B32 H128 128+1024", "sparse_mla", "N32-H128-v4-128+1024", "FlashMLA", 1.0),
    Target("indexer's logits T4096 S4096 H64", "indexer", "N4096-H64-S4096-logits", "DeepGEMM", 1.1),
    Target("top-512 of 4096, 4096 rows", "indexer_topk", "N4096-S4096-top512", "vllm", 1.0),
    Target("inverse RoPE + FP8 T4096 H64", "inv_rope_fp8_quant", "N4096-H64", "vllm", 0.36),
    Target(
        "q-norm + RoPE + insert T4096 H64",
        "qnorm_rope_kv_insert",
        "N4096-H64-v4",
        "vllm",
        0.95,
    ),
    Target(
        "mHC pre T4096 D4096",
        "mhc_pre",
        "N4096-C4-M4096",
        "TileLang",
        0.65,
        fixed=92.6,
    ),
    Target("mHC post, same", "mhc_post", "N4096-C4-M4096", "TileLang", 0.95, "93 % of the copy ceiling", fixed=79.2),
)


def measured(target: Target, lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What the newest lines say of a target, or None: our time, `us`, and the peer's, `beside`."""
    ours = [x for x in lines if (x["mechanism"], x["case"]) == (target.mechanism, target.case)]
    if not ours:
        return None
    newest = max(x["date"] for x in ours)
    ours = [x for x in ours if x["date"] == newest]
    if target.fixed is not None:
        return {"us": ours[0]["us"], "beside": target.fixed}
    if target.own:
        others = [x for x in lines if (x["mechanism"], x["case"]) == (target.mechanism, target.peer)]
        return {"us": min(x["us"] for x in ours), "beside": min(x["us"] for x in others)} if others else None
    found = [x for x in ours if x["peer"] is not None and target.peer in x["peer"]]
    if not found:
        return None
    best = min(found, key=lambda x: x["peer_us"])
    return {"us": best["us"], "beside": best["peer_us"]}


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: every target, what was measured and, where it was missed, why."""
    rows = [
        "| target | mechanism | case | beside | at most | measured | us | |",
        "| --- | --- | --- | --- | --: | --: | --: | --- |",
    ]
    met = 0
    for target in TARGETS:
        found = measured(target, lines)
        peer = f"our {target.peer}" if target.own else target.peer.strip("()")
        cells = [target.title, target.mechanism, target.case, peer, f"{target.limit:g}"]
        if found is None:
            rows.append(f"| {' | '.join([*cells, '-', '-', 'not measured'])} |")
            continue
        ratio = round(found["us"] / found["beside"], 2)
        good = ratio <= target.limit
        met += good
        verdict = "met" if good else f"missed: {target.why}" if target.why else "missed"
        if target.fixed is not None:
            verdict += f"; the peer's {target.fixed} us are of another run"
        rows.append(f"| {' | '.join([*cells, f'{ratio:.2f}', f'{found["us"]:.1f}', verdict])} |")
    return f"{met} of {len(TARGETS)} targets are met, by ratios rounded to two digits.\n\n" + "\n".join(rows)
