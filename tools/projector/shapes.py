"""The little world the projector learns to see: scenes of 0-3 coloured shapes.

A scene is sampled on the encoder's own canvas (CANVAS x CANVAS pixels) *after*
the letterboxing that llama.cpp's mtmd does for projector type "mlp": the picture
is scaled to fit, and the rest is filled with PAD_COLOR.  All coordinates below
are pixels of the scaled picture (w x h), so the same scene can be

  * rasterised in batches on a GPU for training   (raster.py), or
  * drawn with Pillow at any size into a PNG/JPEG (draw_pil here) for testing.

Nothing in here needs torch.
"""

import math

import numpy as np

CANVAS = 128  # encoder input, pixels per side
PATCH = 16  # pixels per patch side -> (128/16)^2 = 64 tokens
PAD_COLOR = (122, 116, 104)  # hard-coded in clip.cpp for projector type "mlp"
MAX_OBJ = 3
MAX_VERT = 12

SHAPES = ["circle", "square", "triangle", "star", "cross", "ring"]

# A few typical RGB values for each name; sampling adds a small jitter on top.
COLORS = {
    "red": [(255, 0, 0), (220, 20, 60), (205, 25, 25), (235, 50, 45)],
    "orange": [(255, 165, 0), (255, 140, 0), (240, 125, 20)],
    "yellow": [(255, 255, 0), (255, 225, 25), (240, 220, 40)],
    "green": [(0, 128, 0), (0, 255, 0), (34, 139, 34), (60, 180, 75), (50, 205, 50)],
    "blue": [(0, 0, 255), (0, 70, 200), (65, 105, 225), (30, 60, 170), (30, 130, 230)],
    "purple": [(128, 0, 128), (148, 0, 211), (138, 43, 226), (110, 40, 150)],
    "pink": [(255, 192, 203), (255, 105, 180), (255, 150, 190)],
    "brown": [(139, 69, 19), (121, 72, 40), (101, 67, 33), (150, 85, 45)],
    "black": [(0, 0, 0), (18, 18, 18)],
    "white": [(255, 255, 255), (245, 245, 245)],
    "gray": [(128, 128, 128), (160, 160, 160), (100, 100, 100), (185, 185, 185)],
}
COLOR_NAMES = list(COLORS)  # index = class id
SHAPE_COLORS = [c for c in COLOR_NAMES if c != "gray"]  # gray: background only
CHROMATIC = [c for c in SHAPE_COLORS if c not in ("black", "white")]

ZONE_PHRASE = {
    ("center", "center"): "in the center",
    ("left", "center"): "on the left",
    ("right", "center"): "on the right",
    ("center", "top"): "at the top",
    ("center", "bottom"): "at the bottom",
    ("left", "top"): "in the top left",
    ("right", "top"): "in the top right",
    ("left", "bottom"): "in the bottom left",
    ("right", "bottom"): "in the bottom right",
}


def pick_rgb(rng, name, jitter=10):
    base = rng.choice(COLORS[name])
    return tuple(min(255, max(0, v + rng.randint(-jitter, jitter))) for v in base)


def _dist(a, b):
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b)))


def fit(W, H):
    """Size of a W x H picture inside the canvas, exactly as mtmd computes it."""
    s = np.float32(min(np.float32(CANVAS) / np.float32(W), np.float32(CANVAS) / np.float32(H)))
    w = min(int(math.ceil(np.float32(W) * s)), CANVAS)
    h = min(int(math.ceil(np.float32(H) * s)), CANVAS)
    return w, h


def _polygon(rng, shape, R):
    """Vertices around the origin (y down); R is about the half extent."""
    if shape == "square":
        s = R * rng.uniform(0.72, 0.88)
        pts, rot = [(-s, -s), (s, -s), (s, s), (-s, s)], rng.gauss(0, 4)
    elif shape == "triangle":
        if rng.random() < 0.5:
            pts = [
                (R * math.cos(a), R * math.sin(a))
                for a in (-math.pi / 2, math.pi / 6, 5 * math.pi / 6)
            ]
        else:  # the way people type it: apex and base
            k = R * 0.88
            pts = [(0, -k), (k, k), (-k, k)]
        u = rng.random()
        rot = (
            rng.gauss(0, 6)
            if u < 0.75
            else (180 + rng.gauss(0, 6) if u < 0.85 else rng.uniform(0, 360))
        )
    elif shape == "star":
        q = rng.uniform(0.36, 0.5)
        pts = []
        for k in range(10):
            r = R if k % 2 == 0 else R * q
            a = -math.pi / 2 + k * math.pi / 5
            pts.append((r * math.cos(a), r * math.sin(a)))
        rot = rng.gauss(0, 8)
    else:  # cross (a plus sign)
        t, L = R * rng.uniform(0.2, 0.36), R * 0.95
        pts = [
            (-t, -L),
            (t, -L),
            (t, -t),
            (L, -t),
            (L, t),
            (t, t),
            (t, L),
            (-t, L),
            (-t, t),
            (-L, t),
            (-L, -t),
            (-t, -t),
        ]
        rot = rng.gauss(0, 5)
    sx, sy = rng.uniform(0.94, 1.06), rng.uniform(0.94, 1.06)
    c, s = math.cos(math.radians(rot)), math.sin(math.radians(rot))
    return [((x * c - y * s) * sx, (x * s + y * c) * sy) for x, y in pts]


def _make_object(rng, shape, color, rgb, x, y, R):
    o = {"shape": shape, "color": color, "rgb": rgb, "x": x, "y": y, "R": R}
    if shape in ("circle", "ring"):
        o["rx"], o["ry"] = R * rng.uniform(0.92, 1.0), R * rng.uniform(0.92, 1.0)
        o["inner"] = rng.uniform(0.5, 0.75) if shape == "ring" else 0.0
    else:
        o["poly"] = [(x + px, y + py) for px, py in _polygon(rng, shape, R)]
    return o


def _place_one(rng, w, h):
    m = min(w, h)
    if rng.random() < 0.3:
        zx = zy = "center"
    else:
        zx, zy = rng.choice(["left", "center", "right"]), rng.choice(["top", "center", "bottom"])
    # size classes with a gap between them, so that "small"/"large" is well defined
    size = rng.choice(["small", "medium", "large"])
    r = {"small": (0.11, 0.165), "medium": (0.20, 0.27), "large": (0.31, 0.46)}[size]
    R = rng.uniform(*r) * m
    if zx != "center":
        R = min(R, 0.34 * w)
    if zy != "center":
        R = min(R, 0.34 * h)
    f = R / m
    size = "small" if f < 0.17 else "large" if f > 0.30 else "medium"

    def along(zone, n):
        lo, hi = R * 1.03, n - R * 1.03
        if zone in ("left", "top"):
            return rng.uniform(lo, max(lo, 0.36 * n))
        if zone in ("right", "bottom"):
            return rng.uniform(min(hi, 0.64 * n), hi)
        return n * rng.uniform(0.46, 0.54)

    return [(along(zx, w), along(zy, h), R)], (zx, zy), size


def _place_many(rng, w, h, n):
    """n shapes in a clear row (told apart left to right) or column (top to bottom)."""
    m = min(w, h)
    for _ in range(60):
        p_row = 0.6 if 0.75 < w / h < 1.34 else (0.88 if w > h else 0.15)
        row = rng.random() < p_row
        major, minor = (w, h) if row else (h, w)
        if n == 2:
            a = [rng.uniform(0.17, 0.36), rng.uniform(0.64, 0.83)]
        else:
            a = [
                0.19 + rng.uniform(-0.04, 0.04),
                0.5 + rng.uniform(-0.04, 0.04),
                0.81 + rng.uniform(-0.04, 0.04),
            ]
        spread = 0.22 if row else 0.05
        b = [0.5 + rng.uniform(-spread, spread) for _ in range(n)]
        if rng.random() < 0.4:
            b = [b[0]] * n
        pos = [(u * major, v * minor) for u, v in zip(a, b)]
        if not row:
            pos = [(y, x) for x, y in pos]
        R0 = rng.uniform(0.13, 0.30 if n == 2 else 0.22) * m
        out = []
        for x, y in pos:
            R = R0 * rng.uniform(0.8, 1.25)
            out.append([x, y, min(R, 0.97 * x, 0.97 * (w - x), 0.97 * y, 0.97 * (h - y))])
        for i in range(n):
            for j in range(i + 1, n):
                d = math.hypot(out[i][0] - out[j][0], out[i][1] - out[j][1])
                s = out[i][2] + out[j][2]
                if s > 0.88 * d:
                    k = 0.88 * d / s
                    out[i][2] *= k
                    out[j][2] *= k
        if min(o[2] for o in out) >= max(6.0, 0.09 * m):
            return [tuple(o) for o in out], "row" if row else "column"
    return None, None


def sample_scene(rng, n=None, W=None, H=None):
    """One scene.  rng: random.Random.  W, H: picture size (else a random aspect)."""
    if W is None:
        u = rng.random()
        if u < 0.35:
            W = H = 128
        elif u < 0.55:
            a = rng.choice([4 / 3, 3 / 2, 16 / 9, 3 / 4, 2 / 3, 9 / 16])
            W, H = 1000 * a, 1000
        else:
            W, H = 1000 * math.exp(rng.uniform(math.log(0.45), math.log(2.2))), 1000
    w, h = fit(W, H)
    if n is None:
        n = rng.choices([0, 1, 2, 3], [4, 40, 40, 16])[0]

    while True:
        u = rng.random()
        if n == 0:
            bg = rng.choice(COLOR_NAMES)
        else:
            bg = (
                "white"
                if u < 0.42
                else "black"
                if u < 0.6
                else "gray"
                if u < 0.76
                else rng.choice(CHROMATIC)
            )
        bg_rgb = pick_rgb(rng, bg, 6)
        if n == 0:
            return {"w": w, "h": h, "bg": bg, "bg_rgb": bg_rgb, "objs": [], "layout": "plain"}

        zone = size = None
        if n == 1:
            places, zone, size = _place_one(rng, w, h)
            layout = "single"
        else:
            places, layout = _place_many(rng, w, h, n)
            if places is None:
                n -= 1
                continue
        kinds, names = [], []
        for _ in range(50):
            kinds, names = [], []
            for k in range(n):
                # now and then repeat a shape or a colour on purpose
                s = rng.choice(SHAPES) if not kinds or rng.random() > 0.12 else rng.choice(kinds)
                c = (
                    rng.choice(SHAPE_COLORS)
                    if not names or rng.random() > 0.12
                    else rng.choice(names)
                )
                kinds.append(s)
                names.append(c)
            if len(set(zip(kinds, names))) == n and bg not in names:
                break
        else:
            continue
        rgbs = [pick_rgb(rng, c) for c in names]
        if min(_dist(r, bg_rgb) for r in rgbs) < 75:
            continue
        objs = [
            _make_object(rng, s, c, r, x, y, R)
            for s, c, r, (x, y, R) in zip(kinds, names, rgbs, places)
        ]
        return {
            "w": w,
            "h": h,
            "bg": bg,
            "bg_rgb": bg_rgb,
            "objs": objs,
            "layout": layout,
            "zone": zone,
            "size": size,
        }


def pack(scene):
    """Scene -> flat float32 arrays for the batch rasteriser."""
    head = np.zeros(5, np.float32)
    head[:] = (scene["w"], scene["h"], *scene["bg_rgb"])
    obj = np.zeros((MAX_OBJ, 11), np.float32)  # kind, rgb, x, y, rx, ry, inner, shape id, colour id
    vert = np.zeros((MAX_OBJ, MAX_VERT, 2), np.float32)
    for i, o in enumerate(scene["objs"]):
        kind = 1 if o["shape"] == "circle" else 2 if o["shape"] == "ring" else 3
        obj[i] = (
            kind,
            *o["rgb"],
            o["x"],
            o["y"],
            o.get("rx", 0),
            o.get("ry", 0),
            o.get("inner", 0),
            SHAPES.index(o["shape"]) + 1,
            COLOR_NAMES.index(o["color"]) + 1,
        )
        if kind == 3:
            p = o["poly"]
            for k in range(MAX_VERT):
                vert[i, k] = p[min(k, len(p) - 1)]
    return head, obj, vert


def draw_pil(scene, W, H, antialias=True):
    """Draw the scene at W x H with Pillow (an independent path from raster.py)."""
    from PIL import Image, ImageDraw

    k = 4 if antialias else 1
    im = Image.new("RGB", (W * k, H * k), tuple(scene["bg_rgb"]))
    d = ImageDraw.Draw(im)
    fx, fy = W * k / scene["w"], H * k / scene["h"]
    for o in scene["objs"]:
        if "poly" in o:
            d.polygon([(x * fx, y * fy) for x, y in o["poly"]], fill=tuple(o["rgb"]))
        else:

            def box(f):
                return [
                    (o["x"] - o["rx"] * f) * fx,
                    (o["y"] - o["ry"] * f) * fy,
                    (o["x"] + o["rx"] * f) * fx,
                    (o["y"] + o["ry"] * f) * fy,
                ]

            d.ellipse(box(1.0), fill=tuple(o["rgb"]))
            if o["shape"] == "ring":
                d.ellipse(box(o["inner"]), fill=tuple(scene["bg_rgb"]))
    if k > 1:
        im = im.resize((W, H), Image.BOX)
    return im


def letterbox_pil(im):
    """What mtmd does to a picture before the encoder: bicubic fit + pad, uint8."""
    from PIL import Image

    W, H = im.size
    out = Image.new("RGB", (CANVAS, CANVAS), PAD_COLOR)
    w, h = fit(W, H)
    if (W, H) == (CANVAS, CANVAS):
        return im.convert("RGB")
    r = im.convert("RGB").resize((w, h), Image.BICUBIC)
    out.paste(r, ((CANVAS - w) // 2, (CANVAS - h) // 2))
    return out
