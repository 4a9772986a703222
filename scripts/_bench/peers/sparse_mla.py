"""vLLM's FlashMLA: sparse prefill of bfloat16 rows, and sparse decoding of V4's packed caches."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _outputs(args: dict[str, Any], o, lse, top) -> dict[str, Any]:
    names = {"o": o}
    return names | ({"lse": lse, "max_logits": top} if args["return_lse"] else {})


def _prefill(args: dict[str, Any]) -> Call:
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_sparse_fwd

    if args["format"] != "plain" or args["extra_cache"] is not None:
        raise Unsupported("FlashMLA's sparse prefill reads one cache of bfloat16 rows")
    t = _torch.tensors(args)
    kv, indices = t["cache"][:, None], t["indices"][:, None]

    def call():
        o, top, lse = flash_mla_sparse_fwd(
            t["q"], kv, indices, args["scale"], args["value_dim"], t["sinks"], t["counts"]
        )
        return _outputs(args, o, lse, top)

    return call


def _decode(args: dict[str, Any]) -> Call:
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

    if args["format"] != "v4":
        raise Unsupported("FlashMLA's sparse decoding is called for caches of format v4 only")
    if args["return_lse"]:
        raise Unsupported("FlashMLA's sparse decoding gives no largest scores")
    t = _torch.tensors(args)

    def rows(x, page):
        stride = x.shape[1]
        return x.as_strided((x.shape[0], page, 1, 584), (stride, 584, 584, 1))

    more: dict[str, Any] = {}
    if args["extra_cache"] is not None:
        more["extra_k_cache"] = rows(t["extra_cache"], args["extra_page"])
        more["extra_indices_in_kvcache"] = t["extra_indices"][:, None]
        more["extra_topk_length"] = t["extra_counts"]
    cache, q, indices = rows(t["cache"], args["page"]), t["q"][:, None], t["indices"][:, None]
    schedule = get_mla_metadata()[0]

    def call():
        o, _ = flash_mla_with_kvcache(
            q,
            cache,
            None,
            None,
            args["value_dim"],
            schedule,
            None,
            args["scale"],
            False,
            True,
            indices,
            t["sinks"],
            topk_length=t["counts"],
            **more,
        )
        return {"o": o[:, 0]}

    return call


PEERS = {
    "vllm": (
        Peer("FlashMLA, sparse prefill", _prefill),
        Peer("FlashMLA, sparse decoding", _decode),
    )
}
