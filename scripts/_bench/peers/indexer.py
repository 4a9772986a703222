"""DeepGEMM's logits of the indexer, as vLLM calls them: keys side by side, or in pages."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _only_logits(args: dict[str, Any]) -> None:
    if args.get("q_scale") is not None:
        raise Unsupported("vLLM's MXFP4 indexer needs a Blackwell GPU")
    if args["topk"] is not None:
        raise Unsupported("vLLM's choice has no order to compare; logits are timed alone, in cases without topk")


def _dense(args: dict[str, Any], clean: bool) -> Call:
    from vllm.utils.deep_gemm import fp8_fp4_mqa_logits

    _only_logits(args)
    if args["page"] is not None:
        raise Unsupported("these logits are of keys outside of pages")
    t = _torch.tensors(args)
    N, S = t["q"].shape[0], t["k"].shape[0]
    outside = None
    if not clean:
        import torch

        entry = torch.arange(S, device=t["q"].device)
        outside = (entry < t["starts"][:, None]) | (entry >= t["ends"][:, None])
    first = [True]

    def call():
        keys = (t["k"], t["k_scale"])
        logits = fp8_fp4_mqa_logits((t["q"], None), keys, t["weights"], t["starts"], t["ends"], clean_logits=clean)
        logits = logits[:N, :S]
        if outside is not None and first[0]:  # the call that is compared
            first[0] = False
            logits = logits.masked_fill(outside, float("-inf"))
        return {"logits": logits}

    return call


def _chosen(args: dict[str, Any]) -> Call:
    """Logits, then the radix selection, as vLLM's indexer launches them; the order of what it chooses is undefined."""
    import torch

    if args["topk"] is None or args["return_logits"]:
        raise Unsupported("only the chosen entries, without logits")
    logits, topk = _dense(args | {"topk": None}, clean=False), args["topk"]
    t, N = _torch.tensors({name: args[name] for name in ("starts", "ends")}), args["q"].shape[0]
    out = torch.full((N, topk), -1, dtype=torch.int32, device="cuda")
    ends = t["ends"].clamp(max=args["k"].shape[0])

    def call():
        found = logits()["logits"]
        torch.ops._C.top_k_per_row_prefill(found, t["starts"], ends, out, N, *found.stride(), topk)
        return {"indices": out}

    return call


def _paged(args: dict[str, Any]) -> Call:
    import torch
    from vllm.utils.deep_gemm import fp8_fp4_paged_mqa_logits, get_paged_mqa_logits_metadata

    _only_logits(args)
    if args["page"] != 64:
        raise Unsupported("these logits are of keys in pages of 64")
    t = _torch.tensors(args)
    if bool((t["starts"] != 0).any()):
        raise Unsupported("DeepGEMM's paged logits begin with the first entry")
    N, S = t["q"].shape[0], t["page_table"].shape[1] * 64
    q, cache = t["q"][:, None], t["k"].view(-1, 64, 1, 132)
    lengths, tables = t["ends"][:, None].contiguous(), t["page_table"][t["requests"].long()].contiguous()
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    schedule = get_paged_mqa_logits_metadata(lengths, 64, sms)
    outside = torch.arange(S, device=q.device) >= t["ends"][:, None]
    first = [True]

    def call():  # lengths of a token each, as vLLM has them, are never cleaned
        logits = fp8_fp4_paged_mqa_logits(
            (q, None), cache, t["weights"], lengths, tables, schedule, max_model_len=S, clean_logits=False
        )[:N, :S]
        if first[0]:  # the call that is compared
            first[0] = False
            logits = logits.masked_fill(outside, float("-inf"))
        return {"logits": logits}

    return call


PEERS = {
    "vllm": (
        Peer("DeepGEMM, cleaned", lambda args: _dense(args, clean=True)),
        Peer("DeepGEMM", lambda args: _dense(args, clean=False)),
        Peer("DeepGEMM, paged", _paged),
        Peer("DeepGEMM and top_k_per_row_prefill", _chosen),
    )
}
