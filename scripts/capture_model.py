"""Captures of transformers' models on the CPU: every module's inputs and outputs, logits and greedy tokens.

    python scripts/capture_model.py OUT [--family deepseek_v3] [--only GLOB] [--seed 0]

A family is a checkpoint of `make_tiny_checkpoints.py` in `parity/data/models/`. Its prompts run one by one, without
padding: the run `f32` or `bf16` holds the calls of all modules on the first, `f32.prompt1` that of the model on the
second; the cases `f32.generate0` and so on what each generates. Weights in MXFP4 are dequantized by transformers. Needs
the `torch` extra; runs on Python 3.11 or later.
"""

import hashlib
import json
import sys
from pathlib import Path

import _capture
import numpy as np
from _capture import CaseData, Machine, Recipes, captures

try:
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as e:
    sys.exit(f"capture_model needs PyTorch and transformers ({e}); install them with: pip install '.[torch]'")

TORCH = Recipes("torch")
CHECKPOINTS = Path(__file__).resolve().parents[1] / "parity" / "data" / "models"
NEW = 8
"""Greedy tokens of each prompt."""


def machine() -> Machine:
    """The torch and the processor at hand."""
    torch.set_num_threads(1)  # more threads sum in another order
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return Machine(versions, f"CPU, {torch.backends.cpu.get_cpu_capability()}", "none")


def load(folder: Path, dtype: torch.dtype):
    """The model of a checkpoint, in plain eager PyTorch."""
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = AutoConfig.from_pretrained(folder)
    if (getattr(config, "quantization_config", None) or {}).get("quant_method") == "mxfp4":
        how["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **how)
    problems = {kind: names for kind, names in found.items() if names}
    if problems:
        raise RuntimeError(f"{folder}: transformers did not take the checkpoint as it is: {problems}")
    for weight in model.parameters():
        if weight.dtype.itemsize < dtype.itemsize:
            weight.data = weight.data.to(dtype)  # transformers 5.17 leaves decoded MXFP4 in bfloat16
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            module.limit = config.swiglu_limit  # transformers 5.17 does not read it
    return model.eval()


def capture(family: str, name: str, dtype: torch.dtype):
    """The recipe of one checkpoint in one dtype."""

    @torch.no_grad()
    def run(rng: np.random.Generator) -> dict[str, CaseData]:
        del rng  # both dtypes run the checkpoint's prompts
        folder = CHECKPOINTS / family
        files = sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors"))
        digest = hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()
        model, found = load(folder, dtype), {}
        for b, prompt in enumerate(json.loads((folder / "prompts.json").read_text())):
            calls, tokens = [], torch.tensor(prompt)[None]
            with captures.hook.capture(model, calls.append, only=("",) if b else ("*",)):
                model(tokens, use_cache=False)
            wanted = [c for c in calls if not c.path.endswith("act_fn")]
            found |= _capture.module_cases(wanted, f"{name}.prompt{b}" if b else name, checkpoint=digest)
            greedy = model.generate(tokens, do_sample=False, max_new_tokens=NEW)[0, len(prompt) :]
            kernel = f"{type(model).__module__}.{type(model).__name__}.generate"
            arrays = (np.array(prompt, np.int32), greedy.numpy().astype(np.int32))
            case = CaseData({"kernel": kernel, "checkpoint": digest}, {"tokens": arrays[0]}, {"tokens": arrays[1]})
            found[f"{name}.generate{b}"] = case
        return found

    return run


for _family in ("deepseek_v3", "deepseek_v2", "deepseek_v2_lite", "gpt_oss"):
    for _name, _dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        TORCH.add(_family, _name)(capture(_family, _name, _dtype))

if __name__ == "__main__":
    sys.exit(_capture.main(TORCH, "scripts/capture_model.py", machine))
