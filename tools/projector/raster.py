"""Batch rasteriser: packed scenes -> [B,3,128,128] pictures, on CPU or GPU.

Signed distances give anti-aliased edges; then the kind of damage real files
carry is added (blur, ringing, noise, uneven light, JPEG-like block coding), and
finally the letterbox padding that mtmd adds.  Also returns, per patch, which
shape / colour covers it most (targets of the warm-up loss).
"""

import math

import torch
import torch.nn.functional as F
from shapes import CANVAS, PAD_COLOR, PATCH


def _poly_sdf(px, py, vert):
    """px,py [1,1,S,S]; vert [B,O,V,2] -> signed distance [B,O,S,S] (negative inside)."""
    V = vert.shape[2]
    d2 = None
    inside = None
    for i in range(V):
        a, b = vert[:, :, i], vert[:, :, (i + 1) % V]
        ax, ay = a[..., 0, None, None], a[..., 1, None, None]
        ex, ey = b[..., 0, None, None] - ax, b[..., 1, None, None] - ay
        wx, wy = px - ax, py - ay
        t = ((wx * ex + wy * ey) / (ex * ex + ey * ey).clamp_min(1e-6)).clamp(0, 1)
        dx, dy = wx - ex * t, wy - ey * t
        q = dx * dx + dy * dy
        d2 = q if d2 is None else torch.minimum(d2, q)
        cross = (ay > py) != (b[..., 1, None, None] > py)
        left = (px - ax) * ey < (py - ay) * ex
        flip = cross & (left == (ey > 0))
        inside = flip if inside is None else inside ^ flip
    d = d2.clamp_min(1e-9).sqrt()
    return torch.where(inside, -d, d)


def _dct_matrix(dev):
    n = torch.arange(8, device=dev, dtype=torch.float32)
    m = torch.cos((2 * n[None] + 1) * n[:, None] * math.pi / 16) * 0.5
    m[0] *= 1 / math.sqrt(2)
    return m


def rasterise(head, obj, vert, clean=False):
    dev, B, S = head.device, head.shape[0], CANVAS

    def rand(*shape):
        return torch.rand(*shape, device=dev)

    w, h = head[:, 0], head[:, 1]
    ox, oy = torch.floor((S - w) / 2), torch.floor((S - h) / 2)
    grid = torch.arange(S, device=dev, dtype=torch.float32) + 0.5
    px, py = grid.view(1, 1, 1, S), grid.view(1, 1, S, 1)
    off = torch.stack([ox, oy], -1)

    cx = (obj[..., 4] + off[:, None, 0])[..., None, None]
    cy = (obj[..., 5] + off[:, None, 1])[..., None, None]
    rx, ry = obj[..., 6].clamp_min(1)[..., None, None], obj[..., 7].clamp_min(1)[..., None, None]
    rad = (((px - cx) / rx) ** 2 + ((py - cy) / ry) ** 2).clamp_min(1e-9).sqrt()
    rm = torch.minimum(rx, ry)
    sd_ell = (rad - 1) * rm
    inner = obj[..., 8][..., None, None]
    sd_ring = torch.maximum(sd_ell, (inner - rad) * rm)
    sd_poly = _poly_sdf(px, py, vert + off[:, None, None, :])
    kind = obj[..., 0][..., None, None]
    sd = torch.where(kind == 1, sd_ell, torch.where(kind == 2, sd_ring, sd_poly))

    soft = torch.ones(B, 1, 1, 1, device=dev)
    if not clean:
        soft = torch.where(rand(B, 1, 1, 1) < 0.5, soft, 1 + 2.0 * rand(B, 1, 1, 1))
    alpha = (0.5 - sd / soft).clamp(0, 1) * (kind > 0)

    img = (head[:, 2:5] / 255)[:, :, None, None].expand(B, 3, S, S).clone()
    for i in range(obj.shape[1]):
        a = alpha[:, i : i + 1]
        img = img * (1 - a) + (obj[:, i, 1:4] / 255)[:, :, None, None] * a

    if not clean:
        # uneven light, exposure
        g = (rand(B, 1, 1, 1) - 0.5) * (px / S - 0.5) + (rand(B, 1, 1, 1) - 0.5) * (py / S - 0.5)
        on = (rand(B, 1, 1, 1) < 0.3).float()
        img = img * (1 + 0.3 * g * on) * (0.94 + 0.1 * rand(B, 1, 1, 1))
        # ringing (bicubic/sharpened) or blur
        blur = F.avg_pool2d(F.pad(img, (1, 1, 1, 1), mode="replicate"), 3, 1)
        k = torch.where(
            rand(B, 1, 1, 1) < 0.5,
            torch.zeros(B, 1, 1, 1, device=dev),
            rand(B, 1, 1, 1) * 1.4 - 0.5,
        )  # <0 sharpen, >0 blur
        img = img + (blur - img) * k
        # sensor noise, fine or coarse
        n1 = torch.randn(B, 3, S, S, device=dev)
        n2 = F.interpolate(
            torch.randn(B, 3, S // 4, S // 4, device=dev), scale_factor=4, mode="nearest"
        )
        amp1 = 0.04 * rand(B, 1, 1, 1) * (rand(B, 1, 1, 1) < 0.5)
        amp2 = 0.02 * rand(B, 1, 1, 1) * (rand(B, 1, 1, 1) < 0.3)
        img = (img + n1 * amp1 + n2 * amp2).clamp(0, 1)
        # JPEG-like: quantise 8x8 DCT coefficients, the high ones more coarsely
        D = _dct_matrix(dev)
        sel = (rand(B) < 0.25).nonzero()[:, 0]
        if len(sel):
            x = img[sel].view(-1, 3, S // 8, 8, S // 8, 8).permute(0, 1, 2, 4, 3, 5)
            c = D @ x @ D.T
            f = torch.arange(8, device=dev, dtype=torch.float32)
            q = (1 + f[:, None] + f[None, :]) * (0.004 + 0.03 * rand(len(sel), 1, 1, 1, 1, 1))
            x = D.T @ (torch.round(c / q) * q) @ D
            img[sel] = x.permute(0, 1, 2, 4, 3, 5).reshape(-1, 3, S, S)

    gx, gy = grid.view(1, 1, 1, S), grid.view(1, 1, S, 1)
    keep = (
        (gx > ox[:, None, None, None])
        & (gx < (ox + w)[:, None, None, None])
        & (gy > oy[:, None, None, None])
        & (gy < (oy + h)[:, None, None, None])
    )
    pad = torch.tensor(PAD_COLOR, device=dev, dtype=torch.float32).view(1, 3, 1, 1) / 255
    img = torch.where(keep, img, pad)
    img = torch.round(img.clamp(0, 1) * 255) / 255

    cover = F.avg_pool2d(alpha, PATCH)  # [B,O,8,8]
    best, who = cover.max(1)
    hit = best > 0.06
    shape_id = torch.gather(obj[..., 9].long(), 1, who.flatten(1))
    color_id = torch.gather(obj[..., 10].long(), 1, who.flatten(1))
    shape_id, color_id = shape_id * hit.flatten(1), color_id * hit.flatten(1)
    return img, shape_id, color_id


def normalise(img):
    """image_mean = image_std = 0.5"""
    return img * 2 - 1
