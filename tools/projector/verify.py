"""Measure the projector through llama.cpp itself: exported GGUF + quantised LM, CPU, greedy.

    python verify.py LM.gguf MMPROJ.gguf HELDOUT_DIR [--limit N] [--threads N] [--out results.json]

Needs llama-cpp-python (with mtmd); no torch, no Pillow: llama.cpp decodes and resizes the files.
For every item the conversation is played turn by turn; from the second turn on only the new
text (and new pictures) is evaluated on top of the cached context, as a server would do.
"""

import argparse
import json
import os
import re
import time

from mtmd_chat import MARK, SYSTEM, Chat

SHAPES = "circle|square|triangle|star|cross|ring"
PAIR = re.compile(
    r"\b(red|orange|yellow|green|blue|purple|pink|brown|black|white|gray|grey) (%s)\b" % SHAPES
)
IMG = "\x00"


def play(chat, item, root):
    """Answers of all turns; context kept between turns."""
    imgs = [open(os.path.join(root, f), "rb").read() for f in item["images"]]
    at, used, out, said = 0, 0, [], ""
    for i, (q, _) in enumerate(item["turns"]):
        n = q.count(IMG)
        text = "<|im_start|>system\n" + SYSTEM + "<|im_end|>\n" if i == 0 else "<|im_end|>\n"
        text += "<|im_start|>user\n" + q.replace(IMG, MARK) + "<|im_end|>\n<|im_start|>assistant\n"
        at = chat.prefill(text, imgs[used : used + n], at)
        used += n
        said = chat.generate(64)
        at = chat.n_past
        out.append(said)
    return out


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("lm")
    ap.add_argument("mmproj")
    ap.add_argument("dir")
    ap.add_argument("--limit", type=int, default=10**9, help="at most this many items per test")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--only", default="")
    ap.add_argument("--show", type=int, default=0, help="print this many mistakes per test")
    ap.add_argument("--out", default="")
    a = ap.parse_args()
    chat = Chat(a.lm, a.mmproj, n_threads=a.threads)
    items = json.load(open(os.path.join(a.dir, "heldout.json")))
    res, shown, t0, n_done = {}, {}, time.time(), 0

    def tally(name, ok):
        r = res.setdefault(name, [0, 0])
        r[0] += bool(ok)
        r[1] += 1

    seen = {}
    for it in items:
        t = it["test"]
        if a.only and t not in a.only.split(","):
            continue
        seen[t] = seen.get(t, 0) + 1
        if seen[t] > a.limit:
            continue
        got = play(chat, it, a.dir)
        n_done += 1
        want = [w for _, w in it["turns"]]
        if t.startswith("see"):
            pairs = [list(p) for p in PAIR.findall(got[0])]
            ok = sorted(pairs) == sorted(it["facts"])
            tally(t + " colour+shape", ok)
            tally(t + " colour+shape " + it["images"][0].split(".")[1], ok)
            tally(t + " whole sentence", got[0] == want[0])
        elif t in ("followup", "two_images"):
            ok = got == want
            for i in range(len(want)):
                tally(f"{t} turn {i + 1}", got[i] == want[i])
            tally(t + " all turns", ok)
        else:
            ok = got[0] == want[0]
            tally(t, ok)
        if not ok and shown.get(t, 0) < a.show:
            shown[t] = shown.get(t, 0) + 1
            print(
                "MISS",
                t,
                it["images"],
                it["size"],
                "| Q",
                repr(it["turns"][-1][0]),
                "| want",
                want,
                "| got",
                got,
                flush=True,
            )
    for k in res:
        print(f"{k:40s} {res[k][0]:4d}/{res[k][1]:<4d} {100 * res[k][0] / res[k][1]:6.1f}%")
    print(f"{n_done} conversations in {time.time() - t0:.0f}s")
    if a.out:
        json.dump({k: v for k, v in res.items()}, open(a.out, "w"), indent=1)


if __name__ == "__main__":
    main()
