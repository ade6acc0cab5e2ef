"""Draw the sample pictures by hand-written coordinates (not with the training sampler),
and write samples.json: what to ask and what must come back.

    python make_samples.py samples        then: python check_samples.py LM MMPROJ samples
"""

import json
import math
import os
import sys

import numpy as np
import talk
from PIL import Image, ImageDraw, ImageFilter


def draw(d, shape, color, x, y, r, bg):
    if shape == "circle":
        d.ellipse([x - r, y - r, x + r, y + r], fill=color)
    elif shape == "ring":
        d.ellipse([x - r, y - r, x + r, y + r], fill=color)
        d.ellipse([x - 0.62 * r, y - 0.62 * r, x + 0.62 * r, y + 0.62 * r], fill=bg)
    elif shape == "square":
        d.rectangle([x - r, y - r, x + r, y + r], fill=color)
    elif shape == "triangle":
        d.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=color)
    elif shape == "cross":
        d.rectangle([x - r, y - r / 3, x + r, y + r / 3], fill=color)
        d.rectangle([x - r / 3, y - r, x + r / 3, y + r], fill=color)
    elif shape == "star":
        d.polygon(
            [
                (
                    x + (r if k % 2 == 0 else 0.42 * r) * math.sin(k * math.pi / 5),
                    y - (r if k % 2 == 0 else 0.42 * r) * math.cos(k * math.pi / 5),
                )
                for k in range(10)
            ],
            fill=color,
        )


def photo(im, seed, angle):
    """Turn a drawing into something like a phone picture of it: tilt, uneven light, noise, soft focus."""
    rs = np.random.RandomState(seed)
    bg = im.getpixel((1, 1))
    im = im.rotate(angle, Image.BICUBIC, fillcolor=bg).filter(ImageFilter.GaussianBlur(1.6))
    a = np.asarray(im).astype(np.float32)
    h, w, _ = a.shape
    yy, xx = np.mgrid[0:h, 0:w]
    light = 1.0 - 0.16 * ((xx / w - 0.3) ** 2 + (yy / h - 0.4) ** 2)
    a = a * light[..., None] * np.array([1.0, 0.985, 0.955]) + rs.normal(0, 6, a.shape)
    return Image.fromarray(a.clip(0, 255).astype(np.uint8))


# file, W, H, background (name, rgb), shapes (shape, colour name, rgb, x, y, r in pixels), layout, zone, photo?
S = [
    (
        "red_circle_224.png",
        224,
        224,
        ("white", (255, 255, 255)),
        [("circle", "red", (255, 0, 0), 112, 112, 60)],
        "single",
        ("center", "center"),
        0,
    ),
    (
        "blue_square_300x200.png",
        300,
        200,
        ("white", (255, 255, 255)),
        [("square", "blue", (0, 0, 255), 60, 100, 40)],
        "single",
        ("left", "center"),
        0,
    ),
    (
        "green_triangle_97x131.jpg",
        97,
        131,
        ("black", (0, 0, 0)),
        [("triangle", "green", (0, 200, 0), 48, 65, 30)],
        "single",
        ("center", "center"),
        0,
    ),
    (
        "yellow_star_640x480.jpg",
        640,
        480,
        ("gray", (128, 128, 128)),
        [("star", "yellow", (255, 230, 0), 510, 110, 90)],
        "single",
        ("right", "top"),
        0,
    ),
    (
        "purple_cross_64.png",
        64,
        64,
        ("white", (255, 255, 255)),
        [("cross", "purple", (128, 0, 128), 32, 32, 20)],
        "single",
        ("center", "center"),
        0,
    ),
    (
        "orange_ring_333x251.png",
        333,
        251,
        ("black", (0, 0, 0)),
        [("ring", "orange", (255, 150, 0), 166, 190, 50)],
        "single",
        ("center", "bottom"),
        0,
    ),
    (
        "white_star_on_red_180x240.png",
        180,
        240,
        ("red", (220, 20, 30)),
        [("star", "white", (255, 255, 255), 90, 120, 60)],
        "single",
        ("center", "center"),
        0,
    ),
    ("plain_blue_32.png", 32, 32, ("blue", (0, 0, 255)), [], "plain", None, 0),
    (
        "red_circle_blue_square_300x200.png",
        300,
        200,
        ("white", (255, 255, 255)),
        [
            ("circle", "red", (255, 0, 0), 75, 100, 42),
            ("square", "blue", (0, 0, 255), 225, 100, 38),
        ],
        "row",
        None,
        0,
    ),
    (
        "yellow_triangle_purple_star_500x333.jpg",
        500,
        333,
        ("black", (0, 0, 0)),
        [
            ("triangle", "yellow", (255, 225, 0), 130, 170, 70),
            ("star", "purple", (150, 40, 200), 370, 160, 80),
        ],
        "row",
        None,
        0,
    ),
    (
        "pink_ring_green_cross_251x400.jpg",
        251,
        400,
        ("white", (255, 255, 255)),
        [
            ("ring", "pink", (255, 105, 180), 125, 110, 62),
            ("cross", "green", (0, 140, 0), 125, 300, 62),
        ],
        "column",
        None,
        0,
    ),
    (
        "green_circle_orange_square_red_star_600x250.png",
        600,
        250,
        ("white", (255, 255, 255)),
        [
            ("circle", "green", (0, 150, 0), 110, 125, 60),
            ("square", "orange", (255, 150, 0), 300, 125, 52),
            ("star", "red", (230, 0, 0), 490, 125, 72),
        ],
        "row",
        None,
        0,
    ),
    (
        "photo_red_square_803x601.jpg",
        803,
        601,
        ("white", (243, 240, 232)),
        [("square", "red", (205, 32, 38), 400, 300, 150)],
        "single",
        ("center", "center"),
        5,
    ),
    (
        "photo_blue_circle_yellow_triangle_1024x683.jpg",
        1024,
        683,
        ("gray", (150, 150, 150)),
        [
            ("circle", "blue", (25, 60, 190), 290, 350, 150),
            ("triangle", "yellow", (240, 215, 30), 740, 350, 140),
        ],
        "row",
        None,
        -4,
    ),
]


def main(out):
    os.makedirs(out, exist_ok=True)
    items, by = [], {}
    for f, W, H, (bgn, bg), objs, layout, zone, tilt in S:
        im = Image.new("RGB", (W, H), bg)
        d = ImageDraw.Draw(im)
        for s, _, rgb, x, y, r in objs:
            draw(d, s, rgb, x, y, r, bg)
        if tilt:
            im = photo(im, 7, tilt)
        im.save(os.path.join(out, f), **({"quality": 85} if f.endswith("jpg") else {}))
        sc = {
            "objs": [{"shape": o[0], "color": o[1]} for o in objs],
            "bg": bgn,
            "layout": layout,
            "zone": zone,
        }
        by[f] = sc
        q = [
            ["What do you see?", talk.see(sc)],
            ["Describe this image.", talk.see(sc)],
            [
                "How many shapes are there?",
                "There is one shape."
                if len(objs) == 1
                else "There are %s shapes." % talk.NUMBER[len(objs)],
            ],
            ["What color is the background?", "The background is %s." % bgn],
        ]
        if objs:
            o = sc["objs"][-1]
            q += [
                ["What color is the %s?" % o["shape"], "The %s is %s." % (o["shape"], o["color"])],
                [
                    "Where is the %s?" % o["shape"],
                    "The %s is %s." % (o["shape"], talk.places(sc)[-1]),
                ],
                ["Is there a %s?" % o["shape"], "Yes, there is a %s." % o["shape"]],
            ]
        if len(objs) == 1:
            q += [
                ["What color is it? Answer in one word.", o["color"].capitalize() + "."],
                ["What shape is it?", "It is a %s." % o["shape"]],
                [
                    'Answer in JSON with the keys "color" and "shape".',
                    '{"color": "%s", "shape": "%s"}' % (o["color"], o["shape"]),
                ],
            ]
        items.append(
            {
                "file": f,
                "width": W,
                "height": H,
                "background": bgn,
                "shapes": [[o["color"], o["shape"]] for o in sc["objs"]],
                "questions": [{"ask": a, "expect": b} for a, b in q],
            }
        )
    A, B, C = (
        by["red_circle_224.png"],
        by["blue_square_300x200.png"],
        by["red_circle_blue_square_300x200.png"],
    )
    conv = [
        {
            "name": "follow-up about the same picture",
            "turns": [
                {
                    "images": ["red_circle_blue_square_300x200.png"],
                    "ask": "What do you see?",
                    "expect": talk.see(C),
                },
                {"images": [], "ask": "What color is the square?", "expect": "The square is blue."},
                {
                    "images": [],
                    "ask": "Where is the circle?",
                    "expect": "The circle is on the left.",
                },
            ],
        },
        {
            "name": "a second picture in the second turn",
            "turns": [
                {
                    "images": ["red_circle_224.png"],
                    "ask": "What do you see?",
                    "expect": talk.see(A),
                },
                {
                    "images": ["blue_square_300x200.png"],
                    "ask": "What do you see now?",
                    "expect": talk.see(B),
                },
                {
                    "images": [],
                    "ask": "What was in the first picture?",
                    "expect": "The first picture shows a red circle.",
                },
            ],
        },
        {
            "name": "two pictures in one message",
            "turns": [
                {
                    "images": ["red_circle_224.png", "blue_square_300x200.png"],
                    "ask": "What do you see in these two pictures?",
                    "expect": "The first picture shows a red circle. The second picture shows a blue square.",
                },
                {
                    "images": [],
                    "ask": "What was in the second picture?",
                    "expect": "The second picture shows a blue square.",
                },
            ],
        },
    ]
    json.dump(
        {
            "note": "Pictures go before the text of their message, with nothing in between, under SmolLM2's own chat "
            "template (default system prompt); greedy decoding.",
            "pictures": items,
            "conversations": conv,
        },
        open(os.path.join(out, "samples.json"), "w"),
        indent=1,
    )
    print(len(items), "pictures")


if __name__ == "__main__":
    main(sys.argv[1])
