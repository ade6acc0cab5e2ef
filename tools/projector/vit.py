"""The eyes: a small ViT and LLaVA's two-layer projector, in the exact form that
llama.cpp's clip graph for projector type "mlp" evaluates:

  conv patches + bias + learned positions (no class token, no pre-norm)
  -> pre-norm blocks (LayerNorm, attention, GELU-tanh MLP) -> post_ln
  -> mm.0 -> GELU-tanh -> mm.2
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from shapes import CANVAS, COLOR_NAMES, PATCH, SHAPES

CFG = dict(
    image_size=CANVAS,
    patch_size=PATCH,
    n_embd=192,
    n_head=6,
    n_ff=768,
    n_layer=6,
    n_out=576,
    eps=1e-5,
)


class Block(nn.Module):
    def __init__(self, d, heads, ff, eps):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d, eps), nn.LayerNorm(d, eps)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x):
        B, N, D = x.shape
        h = self.ln1(x)
        q, k, v = (
            f(h).view(B, N, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, D))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Eyes(nn.Module):
    def __init__(self, cfg=CFG):
        super().__init__()
        d, n = cfg["n_embd"], (cfg["image_size"] // cfg["patch_size"]) ** 2
        self.patch = nn.Conv2d(3, d, cfg["patch_size"], cfg["patch_size"])
        self.pos = nn.Parameter(torch.randn(n, d) * 0.02)
        self.blocks = nn.ModuleList(
            Block(d, cfg["n_head"], cfg["n_ff"], cfg["eps"]) for _ in range(cfg["n_layer"])
        )
        self.post_ln = nn.LayerNorm(d, cfg["eps"])
        self.mm0, self.mm2 = nn.Linear(d, cfg["n_out"]), nn.Linear(cfg["n_out"], cfg["n_out"])
        # warm-up heads (not exported): which shape / colour covers each patch
        self.aux_shape, self.aux_color = (
            nn.Linear(d, len(SHAPES) + 1),
            nn.Linear(d, len(COLOR_NAMES) + 1),
        )
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.trunc_normal_(
                    m.weight, std=0.02 if m not in (self.mm0, self.mm2) else m.in_features**-0.5
                )
                nn.init.zeros_(m.bias)
        for b in self.blocks:
            for m in (b.o, b.down):
                m.weight.data /= (2 * cfg["n_layer"]) ** 0.5

    def features(self, img):
        """img [B,3,S,S] in [-1,1] -> [B,N,d]"""
        x = self.patch(img).flatten(2).transpose(1, 2) + self.pos
        for b in self.blocks:
            x = b(x)
        return self.post_ln(x)

    def project(self, f):
        return self.mm2(F.gelu(self.mm0(f), approximate="tanh"))

    def forward(self, img):
        return self.project(self.features(img))
