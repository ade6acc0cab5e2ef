"""Ask llama.cpp everything in samples.json.  With --write, keep only what it answers as expected
and record how sure it was: margin = the smallest gap between best and second-best logit over
the answer's tokens (a large margin survives other CPUs, builds and quantisation of the cache).

    python check_samples.py LM.gguf MMPROJ.gguf samples [--write]
"""

import json
import os
import sys

from mtmd_chat import MARK, SYSTEM, Chat


def main(lm, mmproj, root, write):
    chat = Chat(lm, mmproj, n_threads=2)
    path = os.path.join(root, "samples.json")
    doc = json.load(open(path))
    load = lambda f: open(os.path.join(root, f), "rb").read()
    good = total = 0
    for it in doc["pictures"]:
        keep = []
        for q in it["questions"]:
            got = chat.ask([{"role": "user", "content": MARK + q["ask"]}], [load(it["file"])])
            ok, m = got == q["expect"], round(chat.margin, 2)
            total += 1
            good += ok
            if not ok:
                print(
                    "MISS", it["file"], repr(q["ask"]), "want", repr(q["expect"]), "got", repr(got)
                )
            elif m >= 1.0:
                keep.append({**q, "margin": m})
            else:
                print("weak", it["file"], repr(q["ask"]), m)
        if write:
            it["questions"] = keep
    for c in doc["conversations"]:
        at, fine = 0, True
        for i, t in enumerate(c["turns"]):
            text = "<|im_start|>system\n" + SYSTEM + "<|im_end|>\n" if i == 0 else "<|im_end|>\n"
            text += (
                "<|im_start|>user\n"
                + MARK * len(t["images"])
                + t["ask"]
                + "<|im_end|>\n<|im_start|>assistant\n"
            )
            chat.prefill(text, [load(f) for f in t["images"]], at)
            got = chat.generate(64)
            at = chat.n_past
            total += 1
            good += got == t["expect"]
            t["margin"] = round(chat.margin, 2)
            if got != t["expect"]:
                fine = False
                print("MISS", c["name"], i, "want", repr(t["expect"]), "got", repr(got))
        c["ok"] = fine
    if write:
        doc["conversations"] = [c for c in doc["conversations"] if c.pop("ok")]
        json.dump(doc, open(path, "w"), indent=1)
    print(f"{good}/{total} as expected")


if __name__ == "__main__":
    main(*sys.argv[1:4], "--write" in sys.argv)
