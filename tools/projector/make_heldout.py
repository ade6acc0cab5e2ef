"""Draw the held-out test pictures (Pillow -> PNG/JPEG files of arbitrary sizes) and
the questions to ask about them.  Seeds are not used anywhere in training.

    python make_heldout.py DIR [n_single n_double n_triple n_per_kind]
"""

import json
import os
import random
import sys

import talk
from make_pil_eval import draw_file

KIND = [
    "detail",
    "color_it",
    "color_shape",
    "color_x",
    "shape_it",
    "shape_x",
    "count",
    "where",
    "there",
    "bg",
    "side",
    "size",
    "shapes",
    "colors",
    "json",
    "word",
]


def facts(sc):
    return [[o["color"], o["shape"]] for o in sc["objs"]]


def main(out, n1=200, n2=200, n3=60, per_kind=20):
    rng = random.Random(20_240_817)
    os.makedirs(out, exist_ok=True)
    items, k = [], 0

    def save(n):
        nonlocal k
        while True:
            sc, data, ext, wh = draw_file(rng, n)
            if len(sc["objs"]) == n:
                break
        f = f"h{k:04d}.{ext}"
        k += 1
        open(os.path.join(out, f), "wb").write(data)
        return sc, f, wh

    for n, count in ((1, n1), (2, n2), (3, n3)):
        for i in range(count):
            sc, f, wh = save(n)
            q = "What do you see?" if i % 2 == 0 else rng.choice(talk.Q["see"])
            items.append(
                {
                    "test": f"see{n}",
                    "images": [f],
                    "size": wh,
                    "facts": facts(sc),
                    "turns": [
                        [
                            talk.place_image(rng, q, img_first=True if i % 2 == 0 else None),
                            talk.see(sc),
                        ]
                    ],
                }
            )
    for kind in KIND:
        got = 0
        while got < per_kind:
            n = (
                1
                if kind in ("color_it", "color_shape", "shape_it", "size")
                else rng.choice([1, 2])
                if kind != "side"
                else 2
            )
            sc, f, wh = save(n)
            kk, q, ans = talk.turn(rng, sc, kind)
            if kk != kind:
                continue
            items.append(
                {
                    "test": kind,
                    "images": [f],
                    "size": wh,
                    "facts": facts(sc),
                    "turns": [[talk.IMG + q, ans]],
                }
            )
            got += 1
    for i in range(per_kind * 2):  # follow-ups: second and third turn, no new picture
        sc, f, wh = save(rng.choice([1, 2]))
        turns = [[talk.IMG + "What do you see?", talk.see(sc)]]
        for _ in range(2):
            turns.append(
                list(
                    talk.turn(
                        rng, sc, rng.choice(["color_x", "shape_x", "count", "where", "bg", "there"])
                    )[1:]
                )
            )
        items.append(
            {"test": "followup", "images": [f], "size": wh, "facts": facts(sc), "turns": turns}
        )
    for i in range(per_kind * 2):  # a second picture in the second turn, then a question back
        a, fa, wh = save(1)
        b, fb, _ = save(1)
        items.append(
            {
                "test": "two_images",
                "images": [fa, fb],
                "size": wh,
                "facts": facts(a),
                "turns": [
                    [talk.IMG + "What do you see?", talk.see(a)],
                    [talk.IMG + "What do you see now?", talk.see(b)],
                    [
                        "What was in the first picture?",
                        "The first picture shows " + talk.things(a) + ".",
                    ],
                ],
            }
        )
    json.dump(items, open(os.path.join(out, "heldout.json"), "w"), indent=0)
    print(len(items), "items,", k, "files")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
