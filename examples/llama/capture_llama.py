"""A small Llama in plain PyTorch, and the capture of one call of it.

    python capture_llama.py [OUT]

writes `weights.npz`, `golden-float32.safetensors` and `golden-bfloat16.safetensors`. Runs beside `jaxattn/capture.py`
or with jaxattn installed. Names are those of Hugging Face's checkpoints; scores are scaled as in DeepSeek-V3, where
YaRN adds a factor mscale^2.
"""

import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

try:
    from capture import capture  # the file alone, copied here
except ImportError:
    from jaxattn.capture import capture

V, M, F, L, H, K, D = 64, 32, 48, 2, 4, 2, 8  # vocabulary, widths, layers, heads, key/value heads, head dim
MSCALE = 0.1 * math.log(4) + 1


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(M))

    def forward(self, hidden_states):
        x = hidden_states.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(hidden_states.dtype)


class RotaryEmbedding(nn.Module):
    def forward(self, position_ids):
        frequencies = 10000.0 ** (-torch.arange(0, D, 2) / D)
        angles = position_ids[..., None].float() * frequencies
        return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Rotate the two halves of each head against each other; x [B, T, H, D], cos and sin [B, T, D/2]."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(M, H * D, bias=False)
        self.k_proj = nn.Linear(M, K * D, bias=False)
        self.v_proj = nn.Linear(M, K * D, bias=False)
        self.o_proj = nn.Linear(H * D, M, bias=False)

    def forward(self, hidden_states, position_embeddings):
        B, T, _ = hidden_states.shape
        q = rotate(self.q_proj(hidden_states).view(B, T, H, D), *position_embeddings)
        k = rotate(self.k_proj(hidden_states).view(B, T, K, D), *position_embeddings)
        v = self.v_proj(hidden_states).view(B, T, K, D)
        k, v = (x.repeat_interleave(H // K, dim=2) for x in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) * (D**-0.5 * MSCALE**2)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        p = scores.float().masked_fill(future, -torch.inf).softmax(-1).to(v.dtype)
        return self.o_proj(torch.einsum("bhts,bshd->bthd", p, v).reshape(B, T, H * D))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(M, F, bias=False)
        self.up_proj = nn.Linear(M, F, bias=False)
        self.down_proj = nn.Linear(F, M, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = RMSNorm()
        self.self_attn = Attention()
        self.post_attention_layernorm = RMSNorm()
        self.mlp = MLP()

    def forward(self, hidden_states, position_embeddings):
        x = hidden_states + self.self_attn(self.input_layernorm(hidden_states), position_embeddings)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(V, M)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(L))
        self.norm = RMSNorm()
        self.rotary_emb = RotaryEmbedding()

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        rotation = self.rotary_emb(torch.arange(input_ids.shape[1])[None])
        for layer in self.layers:
            x = layer(x, rotation)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model()
        self.lm_head = nn.Linear(M, V, bias=False)

    def forward(self, input_ids):
        return {"logits": self.lm_head(self.model(input_ids))}


def make(dtype=torch.float32):
    """The model with fixed random weights, and its arguments."""
    torch.manual_seed(0)
    model = LlamaForCausalLM()
    for name, p in model.named_parameters():
        spread = 0.1 if "norm" in name else 1.0 if "embed" in name else p.shape[-1] ** -0.5
        nn.init.normal_(p, float("norm" in name), spread)
    return model.to(dtype).eval(), (torch.randint(0, V, (1, 12)),)


def main(out):
    out.mkdir(parents=True, exist_ok=True)
    model, _ = make()
    np.savez(out / "weights.npz", **{name: x.numpy() for name, x in model.state_dict().items()})
    for dtype in (torch.float32, torch.bfloat16):
        model, args = make(dtype)
        with torch.no_grad(), capture(model, out / f"golden-{str(dtype).removeprefix('torch.')}.safetensors"):
            model(*args)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
