"""Train the eyes against the frozen language model.

    python train.py --lm SmolLM2-135M-Instruct.Q4_1.gguf --out DIR --aux-seconds 45 --seconds 720

Phase 1 (aux): the ViT alone learns which shape and colour covers each patch.
Phase 2 (lm):  ViT + projector are trained through the frozen, dequantised language
model with cross-entropy on the answer tokens only.
Both phases run for a wall-clock time; the learning rate follows the fraction used.
Writing a number into DIR/seconds changes phase 2's length while it runs.
"""

import argparse
import json
import math
import os
import random
import time

import numpy as np
import talk
import torch
import torch.nn.functional as F
from gguf_lm import FrozenLlama
from raster import normalise, rasterise
from shapes import pack, sample_scene
from vit import Eyes

ap = argparse.ArgumentParser()
ap.add_argument("--lm", required=True)
ap.add_argument("--out", required=True)
ap.add_argument("--smalltalk", default="smalltalk.json")
ap.add_argument("--pil-eval", default="pil_eval.npz")
ap.add_argument("--aux-seconds", type=float, default=45)
ap.add_argument("--seconds", type=float, default=720)
ap.add_argument("--batch", type=int, default=128)
ap.add_argument("--T", type=int, default=288)
ap.add_argument("--lr", type=float, default=8e-4)
ap.add_argument("--floor", type=float, default=0.02)
ap.add_argument("--warm", type=float, default=0.03)
ap.add_argument("--eval-every", type=float, default=75)
ap.add_argument("--eval-batches", type=int, default=6)
ap.add_argument("--workers", type=int, default=12)
ap.add_argument("--seed", type=int, default=1)
ap.add_argument("--resume", default="")
ap.add_argument("--no-compile", action="store_true")
args = ap.parse_args()

TWO = 0.2  # share of two-picture conversations
TREE = 0.6  # share of one-picture trees (the rest: plain one-picture conversations)
EVAL_SEED = 10_000_019


def make_batch(rng, tok, B, T):
    """numpy arrays of one training batch; always B + TWO*B pictures."""
    n_two = int(B * TWO)
    rows, heads, objs, verts, nobj = [], [], [], [], []
    for i in range(B):
        if i < n_two:
            scs = [sample_scene(rng), sample_scene(rng)]
            s = talk.encode_line(rng, tok, scs, T)
        else:
            scs = [sample_scene(rng)]
            s = (
                talk.encode_tree(rng, tok, scs[0], T)
                if i < n_two + B * TREE
                else talk.encode_line(rng, tok, scs, T)
            )
        base = len(heads) * talk.N_IMG_TOKENS
        ids, slot, label, pos, branch, kind = s.full()
        rows.append((ids, [x + base if x >= 0 else -1 for x in slot], label, pos, branch, kind))
        nobj.append(len(scs[0]["objs"]))
        for sc in scs:
            h, o, v = pack(sc)
            heads.append(h)
            objs.append(o)
            verts.append(v)
    text = np.asarray(rows, np.int32).transpose(1, 0, 2)  # [6,B,T]
    return text, np.stack(heads), np.stack(objs), np.stack(verts), np.asarray(nobj, np.int64)


class Batches(torch.utils.data.IterableDataset):
    def __init__(self, meta, seed, B, T):
        self.tm, self.seed, self.B, self.T = (
            (meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.merges"]),
            seed,
            B,
            T,
        )

    def __iter__(self):
        w = torch.utils.data.get_worker_info()
        rng = random.Random(self.seed * 1000 + (w.id if w else 0))
        tok = talk.Tokenizer(*self.tm)
        while True:
            yield tuple(torch.from_numpy(x) for x in make_batch(rng, tok, self.B, self.T))


class Scenes(torch.utils.data.IterableDataset):
    """Pictures only, for phase 1."""

    def __init__(self, seed, B):
        self.seed, self.B = seed, B

    def __iter__(self):
        w = torch.utils.data.get_worker_info()
        rng = random.Random(self.seed * 1000 + 500 + (w.id if w else 0))
        while True:
            yield tuple(
                torch.from_numpy(np.stack(x))
                for x in zip(*[pack(sample_scene(rng)) for _ in range(self.B)])
            )


def loader(ds):
    return iter(
        torch.utils.data.DataLoader(
            ds,
            batch_size=None,
            num_workers=args.workers,
            pin_memory=dev == "cuda",
            prefetch_factor=4 if args.workers else None,
        )
    )


def attention_mask(branch, dtype):
    """Causal, and a branch sees only the trunk (0) and itself."""
    B, T = branch.shape
    i = torch.arange(T, device=branch.device)
    ok = (i[:, None] >= i[None, :]) & (
        (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    )
    ok |= i[:, None] == i[None, :]
    return torch.zeros(B, T, T, device=branch.device, dtype=dtype).masked_fill_(~ok, float("-inf"))[
        :, None
    ]


def run_lm(feats, text):
    """feats [n,64,D] -> final states [B,T,D]"""
    ids, slot, _, pos, branch, _ = text
    x = lm.embd[ids]
    flat = feats.reshape(-1, feats.shape[-1]).to(x.dtype)
    x = torch.where((slot >= 0)[..., None], flat[slot.clamp_min(0)], x)
    return lm.hidden(x, pos, attention_mask(branch, x.dtype))


def answer_states(h, label):
    """States that predict an answer token, and those tokens."""
    sel = (label[:, 1:] >= 0).nonzero(as_tuple=True)
    return h[:, :-1][sel], label[:, 1:][sel].long(), sel


def to_dev(b):
    return [x.to(dev, non_blocking=True) for x in b]


def see(img):
    with torch.autocast(dev, torch.bfloat16, enabled=dev == "cuda"):
        f = eyes.features(normalise(img))
        return f, eyes.project(f).float()


@torch.no_grad()
def evaluate(tag):
    """Exact-match (whole answer, argmax under teacher forcing = greedy decoding) by kind of question."""
    torch.manual_seed(0)
    rng, hits = random.Random(EVAL_SEED), {}
    for _ in range(args.eval_batches):
        b = to_dev(torch.from_numpy(x) for x in make_batch(rng, tok, args.batch, args.T))
        text, head, obj, vert, nobj = b
        img, _, _ = rasterise(head, obj, vert)
        _, feats = see(img)
        h = run_lm(feats, text.long())
        st, y, (r, c) = answer_states(h, text[2])
        ok = (st @ lm.head.T).argmax(-1) == y
        good = torch.ones_like(text[2], dtype=torch.bool)
        good[r, c + 1] = ok
        good, kind, nobj = good.cpu().numpy(), text[5].cpu().numpy(), nobj.cpu().numpy()
        label, branch = text[2].cpu().numpy(), text[4].cpu().numpy()
        for i in range(len(good)):
            t = 0
            while t < args.T:
                if label[i, t] < 0:
                    t += 1
                    continue
                e = t
                while e < args.T and label[i, e] >= 0 and branch[i, e] == branch[i, t]:
                    e += 1
                k = talk.KIND_NAMES[kind[i, t]]
                if k in ("see", "color_x", "shape_x", "there", "where", "detail"):
                    k += str(nobj[i])
                hits.setdefault(k, []).append(good[i, t:e].all())
                t = e
    torch.manual_seed(int(time.time() * 1000) % 2**31)
    allh = [x for v in hits.values() for x in v]
    line = " ".join(f"{k}={np.mean(v):.3f}" for k, v in sorted(hits.items()))
    print(f"EVAL {tag} all={np.mean(allh):.4f} n={len(allh)} | {line}", flush=True)
    if os.path.exists(args.pil_eval):
        print("     PIL files:", pil_eval(), flush=True)
    return float(np.mean(allh))


@torch.no_grad()
def pil_eval():
    """The same, on pictures drawn and saved by Pillow: 'What do you see?' only."""
    z = np.load(args.pil_eval)
    out = {}
    info = json.loads(str(z["info"]))
    for s in range(0, len(info), 64):
        part = info[s : s + 64]
        img = torch.from_numpy(z["img"][s : s + 64]).to(dev).permute(0, 3, 1, 2).float() / 255
        rows = []
        for j, it in enumerate(part):
            smp = talk.Sample(args.T)
            p = smp.put_text(
                tok,
                "<|im_start|>system\n"
                + talk.DEFAULT_SYSTEM
                + "<|im_end|>\n<|im_start|>user\n"
                + talk.IMG
                + "What do you see?"
                + talk.REPLY,
                False,
                0,
                0,
            )
            smp.put_text(tok, it["answer"] + "<|im_end|>", True, 0, p, 0)
            f = list(smp.full())
            f[1] = [x + j * talk.N_IMG_TOKENS if x >= 0 else -1 for x in f[1]]
            rows.append(f)
        text = torch.tensor(rows, dtype=torch.long).permute(1, 0, 2).to(dev)
        _, feats = see(img)
        st, y, (r, c) = answer_states(run_lm(feats, text), text[2])
        bad = (st @ lm.head.T).argmax(-1) != y
        wrong = set(r[bad].tolist())
        for j, it in enumerate(part):
            out.setdefault(it["n"], []).append(j not in wrong)
    return {k: round(float(np.mean(v)), 4) for k, v in out.items()}


if __name__ == "__main__":
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    os.makedirs(args.out, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    t00 = time.time()
    if os.path.exists(args.smalltalk):
        talk.SMALLTALK[:] = [tuple(x) for x in json.load(open(args.smalltalk)) if len(x[1]) < 110]
    lm = FrozenLlama(
        args.lm,
        dev,
        torch.bfloat16 if dev == "cuda" else torch.float32,
        compile=dev == "cuda" and not args.no_compile,
    )
    tok = talk.Tokenizer(lm.meta["tokenizer.ggml.tokens"], lm.meta["tokenizer.ggml.merges"])
    eyes = Eyes().to(dev)
    # start the projector where token embeddings live
    e = lm.embd.float()
    with torch.no_grad():
        eyes.mm2.bias.copy_(e.mean(0))
        eyes.mm2.weight.mul_(float(e.std(0).mean()) * 1.5)
    n_par = sum(p.numel() for n, p in eyes.named_parameters() if not n.startswith("aux"))
    print(
        f"loaded lm in {time.time() - t00:.1f}s on {dev}; eyes {n_par / 1e6:.2f}M parameters; "
        f"smalltalk {len(talk.SMALLTALK)}",
        flush=True,
    )

    batches = loader(
        Batches(lm.meta, args.seed, args.batch, args.T)
    )  # workers warm up during phase 1

    # ---------------------------------------------------------------- phase 1
    if args.resume:
        ck = torch.load(args.resume, map_location=dev, weights_only=True)
        eyes.load_state_dict(ck["eyes"])
        print("resumed", args.resume, flush=True)
    elif args.aux_seconds > 0:
        it = loader(Scenes(args.seed, 512 if dev == "cuda" else 8))
        opt = torch.optim.AdamW(eyes.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.05)
        t0, step = time.time(), 0
        while time.time() - t0 < args.aux_seconds:
            fr = (time.time() - t0) / args.aux_seconds
            for g in opt.param_groups:
                g["lr"] = (
                    1.5e-3
                    * min(1, (step + 1) / 200)
                    * (0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * fr)))
                )
            head, obj, vert = to_dev(next(it))
            with torch.no_grad():
                img, ys, yc = rasterise(head, obj, vert)
            with torch.autocast(dev, torch.bfloat16, enabled=dev == "cuda"):
                f = eyes.features(normalise(img))
                ls, lc = eyes.aux_shape(f).float(), eyes.aux_color(f).float()
            loss = F.cross_entropy(ls.flatten(0, 1), ys.flatten()) + F.cross_entropy(
                lc.flatten(0, 1), yc.flatten()
            )
            opt.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(eyes.parameters(), 1.0)
            opt.step()
            if step % 200 == 0:
                m = ys > 0
                print(
                    f"aux {step} {time.time() - t0:.0f}s loss {loss.item():.4f} shape acc "
                    f"{(ls.argmax(-1) == ys)[m].float().mean().item():.3f} colour acc "
                    f"{(lc.argmax(-1) == yc)[m].float().mean().item():.3f}",
                    flush=True,
                )
            step += 1
        print(f"aux done: {step} steps", flush=True)
        del it

    # ---------------------------------------------------------------- phase 2
    decay = [p for p in eyes.parameters() if p.ndim > 1]
    rest = [p for p in eyes.parameters() if p.ndim <= 1]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.98),
        fused=dev == "cuda",
    )
    t0, step, last, seconds, run = None, 0, 0.0, args.seconds, None
    tc = time.time()
    while True:
        el = time.time() - t0 if t0 else 0.0
        fr = el / seconds
        if fr >= 1:
            break
        lr = (
            args.lr
            * min(1, fr / args.warm + 1e-3)
            * (args.floor + (1 - args.floor) * 0.5 * (1 + math.cos(math.pi * fr)))
        )
        for g in opt.param_groups:
            g["lr"] = lr
        text, head, obj, vert, _ = to_dev(next(batches))
        text = text.long()
        with torch.no_grad():
            img, ys, yc = rasterise(head, obj, vert)
        f, feats = see(img)
        feats = feats + 0.02 * feats.detach().std() * torch.randn_like(feats)
        h = run_lm(feats, text)
        st, y, _ = answer_states(h, text[2])
        loss = F.cross_entropy((st @ lm.head.T).float(), y)
        aux_w = 0.2 * max(0.0, 1 - 2 * fr)
        total = loss
        if aux_w:
            total = loss + aux_w * (
                F.cross_entropy(eyes.aux_shape(f.float()).flatten(0, 1), ys.flatten())
                + F.cross_entropy(eyes.aux_color(f.float()).flatten(0, 1), yc.flatten())
            )
        opt.zero_grad(set_to_none=True)
        total.backward()
        gn = torch.nn.utils.clip_grad_norm_(eyes.parameters(), 1.0)
        opt.step()
        step += 1
        if step == 3:
            if dev == "cuda":
                torch.cuda.synchronize()
            print(f"compiled and warmed up in {time.time() - tc:.1f}s", flush=True)
            t0 = last = time.time()
        if step % 50 == 0 or dev == "cpu":
            l = loss.item()
            run = l if run is None else 0.7 * run + 0.3 * l
            print(
                f"lm {step} {time.time() - (t0 or tc):.0f}s loss {l:.4f} ({run:.4f}) lr {lr:.2e} grad {gn.item():.2f} "
                f"|feat| {feats.detach().norm(dim=-1).mean().item():.2f} answers {len(y)}",
                flush=True,
            )
            p = os.path.join(args.out, "seconds")
            if os.path.exists(p):
                seconds = float(open(p).read())
        if t0 and time.time() - last > args.eval_every:
            pause = time.time()
            evaluate(f"step {step} {time.time() - t0:.0f}s")
            torch.save({"eyes": eyes.state_dict(), "step": step}, os.path.join(args.out, "ckpt.pt"))
            last = time.time()
            t0 += last - pause  # evaluation does not use up the schedule
    torch.save(
        {"eyes": eyes.state_dict(), "step": step, "args": vars(args)},
        os.path.join(args.out, "eyes.pt"),
    )
    args.eval_batches *= 3
    evaluate("final")
    if dev == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    print(f"done: {step} steps, {time.time() - t00:.0f}s in all", flush=True)
    os._exit(0)  # do not wait for the loader's workers
