"""Cases of TurboQuant: keys and values stored in few bits, and a decoding step over them."""

import numpy as np
from _capture_vllm import Arrays, Tensors, case, to_gpu

LENGTHS, K, H, PAGE = (1, 17), 1, 4, 16
PAGES = 4
"""Of which one belongs to no request."""


def turboquant(preset: str, D: int, key_bits: int, value_bits: int, key_bytes: int, slot: int) -> None:
    """Add `turboquant/PRESET_dD_short`; one key is zero, one value constant."""

    def inputs(rng: np.random.Generator) -> Arrays:
        order, table, slots, first = rng.permutation(PAGES).astype(np.int32), [], [], 0
        for length in LENGTHS:
            count = -(-length // PAGE)
            pages, first = order[first : first + count], first + count
            table.append(np.pad(pages, (0, 2 - count)))
            slots.append(pages[np.arange(length) // PAGE] * PAGE + np.arange(length) % PAGE)
        k, v = (rng.standard_normal((sum(LENGTHS), K, D)) for _ in range(2))
        k[3], v[4] = 0, 1.5
        q = rng.standard_normal((len(LENGTHS), H, D))
        arrays = {name: x.astype("bfloat16") for name, x in (("k", k), ("v", v), ("q", q))}
        arrays |= {"slot_mapping": np.concatenate(slots).astype(np.int32)}
        return arrays | {"block_table": np.stack(table).astype(np.int32), "seq_lens": np.array(LENGTHS, np.int32)}

    float8 = key_bits == 0
    params = {"kernel": "triton_turboquant_store + decode", "preset": preset, "head_dim": D, "slot_bytes": slot}
    params |= {"key_bits": key_bits, "value_bits": value_bits, "key_packed_size": key_bytes, "key_fp8": float8}
    params |= {"norm_correction": not float8, "scale": D**-0.5, "page": PAGE}
    outputs = {
        "cache": ("uint8", PAGES, PAGE, K, slot),
        "o": ("bfloat16", len(LENGTHS), H, D),
        "centroids": ("float32", 2 ** (key_bits or 4)),
    }

    @case("turboquant", f"{preset}_d{D}_short", params, inputs, outputs)
    def call(t: Tensors) -> Tensors:
        import torch
        from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
        from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
        from vllm.v1.attention.ops.triton_turboquant_decode import triton_turboquant_decode_attention
        from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store

        how = TurboQuantConfig.from_cache_dtype(preset, D)
        found = how.slot_size_aligned, how.key_mse_bits, how.effective_value_quant_bits, how.key_packed_size
        if (*found, how.key_fp8, how.norm_correction) != (slot, key_bits, value_bits, key_bytes, float8, not float8):
            raise ValueError(f"vLLM's configuration of {preset} is {how}, not that of the case")
        signs = [[(-1.0) ** (i & j).bit_count() for j in range(D)] for i in range(D)]
        rotation = to_gpu((np.array(signs) * D**-0.5).astype(np.float32))
        centroids = get_centroids(D, how.centroid_bits).to("cuda")
        bits = how.key_mse_bits, how.key_packed_size, how.effective_value_quant_bits
        cache = torch.zeros(PAGES, PAGE, K, slot, dtype=torch.uint8, device="cuda")
        borders = (centroids[:-1] + centroids[1:]) / 2
        triton_turboquant_store(t["k"], t["v"], cache, t["slot_mapping"], rotation, borders, *bits, key_fp8=how.key_fp8)
        given = t["q"], cache, t["block_table"], t["seq_lens"], rotation, centroids, D**-0.5, *bits
        o = triton_turboquant_decode_attention(
            *given, key_fp8=how.key_fp8, norm_correction=how.norm_correction, PiT=rotation, max_num_kv_splits=4
        )
        return {"cache": cache, "o": o, "centroids": centroids}


turboquant("turboquant_k8v4", 128, 0, 4, 128, 196)
turboquant("turboquant_4bit_nc", 128, 4, 4, 66, 134)
turboquant("turboquant_k3v4_nc", 128, 3, 4, 50, 118)
turboquant("turboquant_3bit_nc", 128, 3, 3, 50, 102)
turboquant("turboquant_4bit_nc", 64, 4, 4, 34, 70)
