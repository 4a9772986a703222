"""V4's grouped projection in vLLM's terms: DeepGEMM's FP8 block product, one for each group."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, scaled_matmul


def _deep_gemm(args: dict[str, Any]) -> Call:
    if args["x"].dtype != "float8_e4m3fn":
        raise Unsupported("takes float8_e4m3fn codes only")
    products = [
        scaled_matmul.deep_gemm(
            {
                "a": args["x"][:, g],
                "a_scale": args["x_scale"][:, g],
                "b": args["weight"][g],
                "b_scale": args["weight_scale"][g],
                "block": 128,
                "out_dtype": args["dtype"],
            }
        )
        for g in range(len(args["weight"]))
    ]

    def call():
        import torch

        return {"y": torch.stack([product()["o"] for product in products], 1)}

    return call


PEERS = {"vllm": (Peer("fp8_gemm_nt (DeepGEMM), one a group, stacked", _deep_gemm),)}
