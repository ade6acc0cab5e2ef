"""Pictures drawn by Pillow, saved as PNG/JPEG at odd sizes, re-read and letterboxed:
a small held-out set for train.py that never passed through raster.py."""

import io
import json
import random

import numpy as np
import talk
from PIL import Image
from shapes import draw_pil, letterbox_pil, sample_scene


def draw_file(rng, n, min_side=64):
    """-> (scene, bytes, extension, (W, H))"""
    while True:
        W, H = rng.choice(
            [
                (300, 200),
                (200, 300),
                (256, 256),
                (64, 64),
                (640, 480),
                (333, 251),
                (97, 131),
                (512, 384),
                (480, 270),
                (224, 224),
                (1000, 600),
                (150, 150),
                (128, 128),
                (400, 500),
            ]
        )
        if rng.random() < 0.5:
            W, H = rng.randint(min_side, 700), rng.randint(min_side, 700)
        if 0.5 <= W / H <= 2.0:
            break
    sc = sample_scene(rng, n=n, W=W, H=H)
    im = draw_pil(sc, W, H, antialias=rng.random() < 0.5)
    buf = io.BytesIO()
    if rng.random() < 0.5:
        im.save(buf, "PNG")
        ext = "png"
    else:
        im.save(buf, "JPEG", quality=rng.randint(50, 95))
        ext = "jpg"
    return sc, buf.getvalue(), ext, (W, H)


if __name__ == "__main__":
    rng = random.Random(777)
    imgs, info = [], []
    for i in range(384):
        n = 1 + i % 2
        sc, data, ext, _ = draw_file(rng, n)
        imgs.append(np.asarray(letterbox_pil(Image.open(io.BytesIO(data)))))
        info.append({"n": len(sc["objs"]), "answer": talk.see(sc)})
    np.savez_compressed("pil_eval.npz", img=np.stack(imgs), info=json.dumps(info))
    print(len(imgs))
