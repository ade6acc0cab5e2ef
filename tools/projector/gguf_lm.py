"""Read a (quantised) Llama GGUF with numpy alone, and run it frozen in torch.

Weights are used exactly as stored: GGUF keeps Llama's Q/K rows permuted, which
goes with rotating *adjacent* pairs of a head (llama.cpp's "NORM" rope).
"""

import struct

import numpy as np
import torch
import torch.nn.functional as F

F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8
_BLOCK = {F32: (1, 4), F16: (1, 2), Q4_0: (32, 18), Q4_1: (32, 20), Q8_0: (32, 34)}
_SCALAR = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


def read_gguf(path):
    """-> (metadata dict, {name: (shape, type, raw uint8 array)})"""
    buf = np.memmap(path, np.uint8, "r")
    at = 0

    def take(fmt):
        nonlocal at
        n = struct.calcsize("<" + fmt)
        v = struct.unpack("<" + fmt, buf[at : at + n].tobytes())
        at += n
        return v[0]

    def string():
        nonlocal at
        n = take("Q")
        s = buf[at : at + n].tobytes().decode("utf-8")
        at += n
        return s

    def value(t):
        if t == 8:
            return string()
        if t == 9:
            et, n = take("I"), take("Q")
            return [value(et) for _ in range(n)]
        return take(_SCALAR[t])

    assert buf[:4].tobytes() == b"GGUF"
    at = 4
    take("I")
    n_tensor, n_kv = take("Q"), take("Q")
    meta = {}
    for _ in range(n_kv):
        k = string()
        meta[k] = value(take("I"))
    info = []
    for _ in range(n_tensor):
        nm = string()
        dims = [take("Q") for _ in range(take("I"))]
        info.append((nm, dims[::-1], take("I"), take("Q")))
    align = meta.get("general.alignment", 32)
    base = (at + align - 1) // align * align
    out = {}
    for nm, shape, t, off in info:
        per, size = _BLOCK[t]
        n = int(np.prod(shape)) // per * size
        out[nm] = (shape, t, buf[base + off : base + off + n])
    return meta, out


def dequantise(shape, t, raw):
    if t == F32:
        return raw.view(np.float32).reshape(shape).copy()
    if t == F16:
        return raw.view(np.float16).astype(np.float32).reshape(shape)
    per, size = _BLOCK[t]
    b = raw.reshape(-1, size)
    if t == Q8_0:
        d = b[:, :2].copy().view(np.float16).astype(np.float32)
        return (b[:, 2:].view(np.int8).astype(np.float32) * d).reshape(shape)
    head = 4 if t == Q4_1 else 2
    d = b[:, :2].copy().view(np.float16).astype(np.float32)
    q = np.concatenate([b[:, head:] & 15, b[:, head:] >> 4], 1).astype(np.float32)
    if t == Q4_1:
        return (q * d + b[:, 2:4].copy().view(np.float16).astype(np.float32)).reshape(shape)
    return ((q - 8) * d).reshape(shape)


def rms(x, w, eps):
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * w


def rotate(x, cos, sin):
    """x [B,T,H,D]; adjacent pairs; cos/sin [B,T,1,D/2]"""
    y = x.float().unflatten(-1, (-1, 2))
    a, b = y[..., 0], y[..., 1]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)


def layer(x, cos, sin, mask, n1, wq, wk, wv, wo, n2, wg, wu, wd, n_head, n_kv, eps):
    B, T, _ = x.shape
    h = rms(x, n1, eps)
    q = rotate(F.linear(h, wq).view(B, T, n_head, -1), cos, sin).transpose(1, 2)
    k = rotate(F.linear(h, wk).view(B, T, n_kv, -1), cos, sin)
    v = F.linear(h, wv).view(B, T, n_kv, -1)
    r = n_head // n_kv
    k = k.repeat_interleave(r, 2).transpose(1, 2)
    v = v.repeat_interleave(r, 2).transpose(1, 2)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    x = x + F.linear(o.transpose(1, 2).reshape(B, T, -1), wo)
    h = rms(x, n2, eps)
    return x + F.linear(F.silu(F.linear(h, wg)) * F.linear(h, wu), wd)


class FrozenLlama:
    def __init__(self, path, device="cpu", dtype=torch.bfloat16, compile=False):
        meta, t = read_gguf(path)
        self.meta = meta
        g = lambda n: torch.from_numpy(dequantise(*t[n])).to(device, dtype)
        self.embd = g("token_embd.weight")
        self.norm = g("output_norm.weight")
        self.head = g("output.weight") if "output.weight" in t else self.embd
        self.layers = [
            [
                g(f"blk.{i}.{n}.weight")
                for n in (
                    "attn_norm",
                    "attn_q",
                    "attn_k",
                    "attn_v",
                    "attn_output",
                    "ffn_norm",
                    "ffn_gate",
                    "ffn_up",
                    "ffn_down",
                )
            ]
            for i in range(meta["llama.block_count"])
        ]
        self.n_head, self.n_kv = (
            meta["llama.attention.head_count"],
            meta["llama.attention.head_count_kv"],
        )
        self.eps = meta["llama.attention.layer_norm_rms_epsilon"]
        d = meta["llama.rope.dimension_count"]
        self.freq = 1.0 / meta["llama.rope.freq_base"] ** (
            torch.arange(0, d, 2, device=device).float() / d
        )
        self.fn = layer
        if compile:
            from torch import _dynamo

            _dynamo.config.suppress_errors = True  # fall back to eager
            self.fn = torch.compile(layer, dynamic=False)

    def hidden(self, x, pos, mask):
        """x [B,T,D] embeddings; pos [B,T]; mask [B,1,T,T] additive or bool -> final normed states"""
        ang = pos[..., None].float() * self.freq
        cos, sin = ang.cos()[:, :, None], ang.sin()[:, :, None]
        for n1, wq, wk, wv, wo, n2, wg, wu, wd in self.layers:
            x = self.fn(
                x,
                cos,
                sin,
                mask,
                n1,
                wq,
                wk,
                wv,
                wo,
                n2,
                wg,
                wu,
                wd,
                self.n_head,
                self.n_kv,
                self.eps,
            )
        return rms(x, self.norm, self.eps)
