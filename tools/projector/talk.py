"""Conversations about scenes, laid out and tokenised as llama.cpp + mtmd would.

The chat template is SmolLM2's own.  mtmd splits the rendered prompt at the media
marker and tokenises every text piece by itself, so that is what `encode` does:
text pieces -> token ids, each picture -> N_IMG_TOKENS slots (projector type "mlp"
puts no begin/end tokens around the picture).
"""

import re
from functools import lru_cache

from shapes import CANVAS, PATCH, SHAPE_COLORS, SHAPES, ZONE_PHRASE

N_IMG_TOKENS = (CANVAS // PATCH) ** 2
IMG = "\x00"  # stands for one picture in a text

# ----------------------------------------------------------------- tokeniser


class Tokenizer:
    """Byte-level BPE with SmolLM2's pre-tokeniser; ASCII text only, which is all we use."""

    SPECIAL = re.compile(r"(<\|im_start\|>|<\|im_end\|>|<\|endoftext\|>)")
    # llama.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM: digits one by one, then the GPT-2 pattern
    WORDS = re.compile(
        r"\d|'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s+(?=\d)|\s+(?!\S)|\s+"
    )

    def __init__(self, tokens, merges):
        self.ids = {t: i for i, t in enumerate(tokens)}
        self.rank = {tuple(m.split(" ")): i for i, m in enumerate(merges)}
        bs = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
        cs, n = bs[:], 0
        for b in range(256):
            if b not in bs:
                bs.append(b)
                cs.append(256 + n)
                n += 1
        self.byte = {b: chr(c) for b, c in zip(bs, cs)}
        self.unbyte = {v: k for k, v in self.byte.items()}
        self.tokens = tokens
        self.word = lru_cache(maxsize=None)(self._word)

    def _word(self, w):
        p = [self.byte[b] for b in w.encode()]
        while len(p) > 1:
            r, i = min((self.rank.get((p[i], p[i + 1]), 1 << 30), i) for i in range(len(p) - 1))
            if r == 1 << 30:
                break
            p[i : i + 2] = [p[i] + p[i + 1]]
        return [self.ids[t] for t in p]

    def __call__(self, text):
        out = []
        for part in self.SPECIAL.split(text):
            if part in self.ids and part.startswith("<|"):
                out.append(self.ids[part])
            else:
                for w in self.WORDS.findall(part):
                    out += self.word(w)
        return out

    def decode(self, ids):
        s = "".join(self.tokens[i] for i in ids)
        return bytes(self.unbyte.get(c, 63) for c in s).decode("utf-8", "replace")


# ------------------------------------------------------------------- answers

NUMBER = ["no", "one", "two", "three"]


def a(phrase):
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def name(o):
    return o["color"] + " " + o["shape"]


def join(parts):
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def places(sc):
    n = len(sc["objs"])
    if sc["layout"] == "single":
        return [ZONE_PHRASE[sc["zone"]]]
    ends = (
        ("on the left", "on the right")
        if sc["layout"] == "row"
        else ("at the top", "at the bottom")
    )
    return [ends[0], ends[1]] if n == 2 else [ends[0], "in the middle", ends[1]]


def things(sc):
    """'a red circle and a blue square' - or the plain picture."""
    if not sc["objs"]:
        return "a plain " + sc["bg"] + " picture with no shapes"
    return join([a(name(o)) for o in sc["objs"]])


def see(sc):
    if not sc["objs"]:
        return "I see " + things(sc) + "."
    return "I see " + things(sc) + " on " + a(sc["bg"] + " background") + "."


def detail(sc):
    if not sc["objs"]:
        return "The picture is plain " + sc["bg"] + " and has no shapes."
    return (
        "The picture shows "
        + join([a(name(o)) + " " + p for o, p in zip(sc["objs"], places(sc))])
        + ". The background is "
        + sc["bg"]
        + "."
    )


# ----------------------------------------------------------------- questions

Q = {
    "see": [
        "What do you see?",
        "What do you see in this image?",
        "What do you see in the picture?",
        "What is in this image?",
        "What is in the picture?",
        "What's in this image?",
        "What's in this picture?",
        "What is this?",
        "What does this image show?",
        "What does the picture show?",
        "What is shown in the image?",
        "What can you see?",
        "What can you see here?",
        "Tell me what you see.",
        "Can you tell me what is in this image?",
        "Describe this image.",
        "Describe the picture.",
        "Describe this picture briefly.",
        "Describe the image in one sentence.",
        "Give a short description of this image.",
        "What am I looking at?",
        "What objects are in the image?",
        "Caption this image.",
        "Write a caption for this picture.",
        "What is depicted here?",
        "Please describe what you see.",
        "Can you see the image?",
        "What did I draw?",
        "Look at this. What is it?",
        "What's this?",
    ],
    "detail": [
        "Describe this image in detail.",
        "Describe the picture in detail.",
        "Give a detailed description of the image.",
        "What do you see, and where?",
        "Describe everything in the image.",
        "Explain what is in the image and where it is.",
        "Describe the layout of this picture.",
        "Tell me everything about this picture.",
        "Please describe the image in full detail.",
        "Describe the scene and where things are.",
    ],
    "color_it": [
        "What color is it?",
        "What color is this?",
        "What colour is it?",
        "Which color is it?",
        "Tell me its color.",
        "What is its color?",
        "Its color?",
    ],
    "color_shape": [
        "What color is the shape?",
        "What colour is the shape?",
        "Which color is the shape?",
        "What is the color of the shape?",
        "What color does the shape have?",
    ],
    "color_x": [
        "What color is the {s}?",
        "What colour is the {s}?",
        "Which color is the {s}?",
        "What is the color of the {s}?",
        "What's the color of the {s}?",
        "Tell me the color of the {s}.",
        "Is the {s} red, blue or something else?",
        "The {s} is what color?",
        "And what color is the {s}?",
        "Can you tell me what color the {s} is?",
        "What color does the {s} have?",
    ],
    "shape_it": [
        "What shape is it?",
        "What shape is this?",
        "Which shape is it?",
        "What is the shape?",
        "Name the shape.",
        "What kind of shape is this?",
        "Which shape is shown?",
        "What shape do you see?",
    ],
    "shape_x": [
        "What shape is the {c} object?",
        "What shape is the {c} one?",
        "Which shape is {c}?",
        "What is the {c} shape?",
        "What is {c}?",
        "What is the {c} thing?",
        "Which object is {c}?",
        "What kind of shape is the {c} one?",
        "Name the {c} shape.",
    ],
    "count": [
        "How many shapes are there?",
        "How many shapes do you see?",
        "How many objects are in the image?",
        "Count the shapes.",
        "How many shapes are in the picture?",
        "What is the number of shapes?",
        "How many things are there?",
        "Can you count the shapes?",
        "How many objects do you see?",
        "Number of shapes?",
    ],
    "where": [
        "Where is the {o}?",
        "Where is the {o} in the picture?",
        "Where do you see the {o}?",
        "What is the position of the {o}?",
        "In which part of the image is the {o}?",
        "Where can I find the {o}?",
        "Where's the {o}?",
        "Tell me where the {o} is.",
        "Is the {o} on the left or on the right?",
    ],
    "there": [
        "Is there {o}?",
        "Is there {o} in the image?",
        "Do you see {o}?",
        "Can you see {o}?",
        "Does the picture show {o}?",
        "Does the image contain {o}?",
        "Is {o} in the picture?",
        "Do you see {o} anywhere?",
    ],
    "bg": [
        "What color is the background?",
        "What colour is the background?",
        "What is the background color?",
        "What is the background?",
        "Which color is the background?",
        "Describe the background.",
        "And the background?",
    ],
    "side": [
        "What is {p}?",
        "What do you see {p}?",
        "Which shape is {p}?",
        "What shape is {p}?",
        "Tell me what is {p}.",
        "What object is {p}?",
    ],
    "size": [
        "Is it big or small?",
        "Is the shape big or small?",
        "How big is the shape?",
        "How large is it?",
        "Is the {s} large or small?",
        "What size is the {s}?",
        "How big is the {s}?",
    ],
    "shapes": [
        "Which shapes do you see?",
        "What shapes are there?",
        "List the shapes.",
        "Name the shapes.",
        "What shapes are in the picture?",
        "Which shapes are in the image?",
    ],
    "colors": [
        "Which colors do you see?",
        "What colors are the shapes?",
        "List the colors of the shapes.",
        "What colours do you see?",
        "Which colors are used for the shapes?",
    ],
    "json": [
        'Describe the shapes as JSON with the keys "color" and "shape".',
        'Answer in JSON with the keys "color" and "shape".',
        "Return the color and shape as JSON.",
        "Give me the color and the shape in JSON.",
        'Reply with JSON: {"color": ..., "shape": ...}',
    ],
}
ONE_WORD = [
    " Answer in one word.",
    " Answer with one word.",
    " One word only.",
    " Reply with a single word.",
    " Just one word, please.",
]
BEFORE = [
    "Please answer: ",
    "Hi! ",
    "Look at this picture. ",
    "Here is an image. ",
    "Hello, ",
    "Okay. ",
    "Please look carefully. ",
    "Question: ",
    "I have a question. ",
]
AFTER = [
    " Be brief.",
    " Answer briefly.",
    " Please.",
    " Thanks!",
    " Be concise.",
    " Answer in one sentence.",
]

# Ordinary questions asked while a picture is in the context; the answers are what the
# language model itself says to them without a picture (smalltalk.json, made by smalltalk.py).
SMALLTALK = []


def ask(rng, kind, **kw):
    """A question of the given kind, lightly varied."""
    q = rng.choice(Q[kind]).format(**kw) if kind != "json" else rng.choice(Q[kind])
    u = rng.random()
    if u < 0.10:
        q = rng.choice(BEFORE) + q
    elif u < 0.20:
        q = q + rng.choice(AFTER)
    v = rng.random()
    if v < 0.08:
        q = q[0].lower() + q[1:]
    elif v < 0.13:
        q = q.rstrip("?.")
    return q


KINDS = {
    "see": 22,
    "detail": 8,
    "color_it": 4,
    "color_shape": 3,
    "color_x": 14,
    "shape_it": 5,
    "shape_x": 10,
    "count": 8,
    "where": 9,
    "there": 12,
    "bg": 6,
    "side": 7,
    "size": 3,
    "shapes": 3,
    "colors": 3,
    "json": 4,
    "word": 6,
    "small": 4,
}


def turn(rng, sc, kind=None):
    """(kind, question, answer) about one scene; retries until the question makes sense."""
    objs, n = sc["objs"], len(sc["objs"])
    shapes, colors = [o["shape"] for o in objs], [o["color"] for o in objs]
    for _ in range(40):
        k = kind or rng.choices(list(KINDS), list(KINDS.values()))[0]
        o = rng.choice(objs) if objs else None
        if k == "see":
            return k, ask(rng, k), see(sc)
        if k == "detail":
            return k, ask(rng, k), detail(sc)
        if k == "count":
            return (
                k,
                ask(rng, k),
                ("There is one shape." if n == 1 else "There are " + NUMBER[n] + " shapes."),
            )
        if k == "bg":
            return k, ask(rng, k), "The background is " + sc["bg"] + "."
        if k == "small" and SMALLTALK:
            q, ans = rng.choice(SMALLTALK)
            return k, q, ans
        if k == "there":
            u = rng.random()
            if n and u < 0.5:
                s, c = o["shape"], o["color"]
            elif n and u < 0.62:
                s, c = o["shape"], rng.choice(SHAPE_COLORS)
            elif n and u < 0.74:
                s, c = rng.choice(SHAPES), o["color"]
            elif n > 1 and u < 0.88:
                s, c = o["shape"], rng.choice(colors)
            else:
                s, c = rng.choice(SHAPES), rng.choice(SHAPE_COLORS)
            form = rng.random()
            if form < 0.6:
                what, yes = c + " " + s, (c, s) in [(x["color"], x["shape"]) for x in objs]
            elif form < 0.85:
                what, yes = s, s in shapes
            else:
                what, yes = c + " shape", c in colors
            return (
                k,
                ask(rng, k, o=a(what)),
                ("Yes, there is " + a(what) + "." if yes else "No, there is no " + what + "."),
            )
        if not n:
            if k in ("color_it",):
                return k, ask(rng, k), "It is " + sc["bg"] + "."
            continue
        if k == "color_it" and n == 1:
            return k, ask(rng, k), "It is " + o["color"] + "."
        if k == "color_shape" and n == 1:
            return k, ask(rng, k), "The shape is " + o["color"] + "."
        if k == "color_x" and shapes.count(o["shape"]) == 1:
            return k, ask(rng, k, s=o["shape"]), "The " + o["shape"] + " is " + o["color"] + "."
        if k == "shape_it" and n == 1:
            return k, ask(rng, k), "It is " + a(o["shape"]) + "."
        if k == "shape_x" and colors.count(o["color"]) == 1:
            return (
                k,
                ask(rng, k, c=o["color"]),
                "The " + o["color"] + " shape is " + a(o["shape"]) + ".",
            )
        if k == "where":
            p = places(sc)[objs.index(o)]
            what = name(o)
            if shapes.count(o["shape"]) == 1 and rng.random() < 0.5:
                what = o["shape"]
            return k, ask(rng, k, o=what), "The " + what + " is " + p + "."
        if k == "side" and n > 1:
            p = places(sc)[objs.index(o)]
            return k, ask(rng, k, p=p), "There is " + a(name(o)) + " " + p + "."
        if k == "size" and n == 1 and sc["size"] != "medium":
            return k, ask(rng, k, s=o["shape"]), "The " + o["shape"] + " is " + sc["size"] + "."
        if k == "shapes":
            return k, ask(rng, k), "I see " + join([a(s) for s in shapes]) + "."
        if k == "colors":
            return k, ask(rng, k), "I see " + join(list(dict.fromkeys(colors))) + "."
        if k == "json" and n < 3:
            items = ['{"color": "%s", "shape": "%s"}' % (x["color"], x["shape"]) for x in objs]
            return k, ask(rng, k), items[0] if n == 1 else "[" + ", ".join(items) + "]"
        if k == "word":
            if rng.random() < 0.5 and shapes.count(o["shape"]) == 1:
                q = (
                    rng.choice(Q["color_it"] + Q["color_shape"])
                    if n == 1 and rng.random() < 0.5
                    else rng.choice(Q["color_x"]).format(s=o["shape"])
                )
                return k, q + rng.choice(ONE_WORD), o["color"].capitalize() + "."
            if colors.count(o["color"]) == 1:
                q = (
                    rng.choice(Q["shape_it"])
                    if n == 1 and rng.random() < 0.5
                    else rng.choice(Q["shape_x"]).format(c=o["color"])
                )
                return k, q + rng.choice(ONE_WORD), o["shape"].capitalize() + "."
    return "see", ask(rng, "see"), see(sc)


# --------------------------------------------------------------- conversations

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SYSTEMS = [
    "You are a helpful assistant.",
    "You are a helpful vision assistant.",
    "Answer in one short sentence.",
    "You are a test model. Be brief.",
    "You are Bob, a friendly robot.",
    "You can see images.",
    "You are an assistant that describes pictures.",
    "Be concise.",
]
NEXT = "<|im_end|>\n<|im_start|>user\n"
REPLY = "<|im_end|>\n<|im_start|>assistant\n"
LEADS = [
    "Here is a picture: ",
    "Image: ",
    "Look at this: ",
    "Picture:\n",
    "Here is my drawing.\n",
    "This is the image:\n",
]


def system(rng):
    u = rng.random()
    if u < 0.65:
        s = DEFAULT_SYSTEM
    elif u < 0.92:
        s = rng.choice(SYSTEMS)
    else:
        return ""  # no system turn at all
    return "<|im_start|>system\n" + s + "<|im_end|>\n"


def place_image(rng, q, img_first=None):
    """One user message holding one picture and the question q."""
    u = rng.random()
    if img_first or (img_first is None and u < 0.72):
        v = rng.random()
        if v < 0.5:
            return IMG + q
        if v < 0.8:
            return IMG + "\n" + q
        if v < 0.86:
            return IMG + " " + q
        return rng.choice(LEADS) + IMG + rng.choice(["", "\n", " "]) + q
    return q + rng.choice(["", "\n", " ", "\n\n"]) + IMG


def tree(rng, sc):
    """One picture, many independent question/answer branches (each sees only the trunk)."""
    v = rng.random()
    lead = rng.choice(LEADS) if v > 0.86 else ""
    sep = "" if v < 0.5 else "\n" if v < 0.8 else " " if v < 0.86 else rng.choice(["", "\n", " "])
    trunk = [(system(rng) + "<|im_start|>user\n" + lead + IMG, False)]

    def branch():
        k, q, ans = turn(rng, sc)
        br, kinds = [(sep + q + REPLY, False), (ans + "<|im_end|>", True)], [k]
        if rng.random() < 0.25:  # a follow-up in the same branch
            k, q, ans = turn(rng, sc)
            br += [("\n<|im_start|>user\n" + q + REPLY, False), (ans + "<|im_end|>", True)]
            kinds.append(k + "@2")
        return br, kinds

    return trunk, branch


ORD = ["first", "second"]


def about(rng, scs):
    """A question about one of two pictures by its ordinal."""
    i = rng.randrange(2)
    sc, u = scs[i], rng.random()
    pic = rng.choice(["picture", "image"])
    if u < 0.5 or not sc["objs"]:
        q = rng.choice(
            [
                "What is in the %s %s?",
                "What did the %s %s show?",
                "Describe the %s %s.",
                "What do you see in the %s %s?",
                "What was in the %s %s?",
            ]
        ) % (ORD[i], pic)
        return "pair_see", q, "The %s %s shows %s." % (ORD[i], pic, things(sc))
    o = rng.choice(sc["objs"])
    if u < 0.8 and [x["shape"] for x in sc["objs"]].count(o["shape"]) == 1:
        q = rng.choice(
            ["What color is the %s in the %s %s?", "What color was the %s in the %s %s?"]
        ) % (o["shape"], ORD[i], pic)
        return "pair_color", q, "The %s in the %s %s is %s." % (o["shape"], ORD[i], pic, o["color"])
    q = rng.choice(["How many shapes are in the %s %s?", "How many shapes did the %s %s show?"]) % (
        ORD[i],
        pic,
    )
    n = len(sc["objs"])
    return (
        "pair_count",
        q,
        "The %s %s shows %s shape%s." % (ORD[i], pic, NUMBER[n], "" if n == 1 else "s"),
    )


def line(rng, scs):
    """A plain conversation, turn after turn; one or two pictures.  Yields (text, is_answer, kind)."""
    if len(scs) == 1:
        k, q, ans = turn(rng, scs[0])
        yield system(rng) + "<|im_start|>user\n" + place_image(rng, q) + REPLY, False, None
        yield ans + "<|im_end|>", True, k
        while True:
            k, q, ans = turn(rng, scs[0])
            yield "\n<|im_start|>user\n" + q + REPLY, False, None
            yield ans + "<|im_end|>", True, k + "@2"
    elif rng.random() < 0.4:  # both pictures in one message
        v = rng.random()
        if v < 0.4:
            q = rng.choice(
                [
                    "What do you see in these two pictures?",
                    "Describe both images.",
                    "What is in these pictures?",
                    "What do the two images show?",
                    "Describe these two pictures.",
                ]
            )
            ans = "The first picture shows %s. The second picture shows %s." % (
                things(scs[0]),
                things(scs[1]),
            )
            k = "pair_both"
        else:
            k, q, ans = about(rng, scs)
        w = rng.random()
        if w < 0.5:
            body = IMG + rng.choice(["", "\n"]) + IMG + rng.choice(["", "\n"]) + q
        elif w < 0.75:
            body = "Picture 1: " + IMG + "\nPicture 2: " + IMG + "\n" + q
        else:
            body = q + rng.choice(["", "\n"]) + IMG + rng.choice(["", "\n"]) + IMG
        yield system(rng) + "<|im_start|>user\n" + body + REPLY, False, None
        yield ans + "<|im_end|>", True, k
        while True:
            k, q, ans = about(rng, scs)
            yield "\n<|im_start|>user\n" + q + REPLY, False, None
            yield ans + "<|im_end|>", True, k
    else:  # second picture in a later turn
        k, q, ans = turn(rng, scs[0])
        yield system(rng) + "<|im_start|>user\n" + place_image(rng, q) + REPLY, False, None
        yield ans + "<|im_end|>", True, k
        if rng.random() < 0.3:
            k, q, ans = turn(rng, scs[0])
            yield "\n<|im_start|>user\n" + q + REPLY, False, None
            yield ans + "<|im_end|>", True, k + "@2"
        if rng.random() < 0.4:
            k, q, ans = (
                "see",
                rng.choice(
                    [
                        "And what about this one?",
                        "And this one?",
                        "What do you see now?",
                        "Here is another picture. What is it?",
                        "What about this picture?",
                    ]
                ),
                see(scs[1]),
            )
        else:
            k, q, ans = turn(rng, scs[1])
        yield "\n<|im_start|>user\n" + place_image(rng, q) + REPLY, False, None
        yield ans + "<|im_end|>", True, k + "@img2"
        while True:
            k, q, ans = about(rng, scs)
            yield "\n<|im_start|>user\n" + q + REPLY, False, None
            yield ans + "<|im_end|>", True, k


# ------------------------------------------------------------------- encoding


class Sample:
    """Token row of fixed length: ids, picture slots, labels, positions, branch numbers."""

    def __init__(self, T):
        self.T = T
        self.ids, self.slot, self.label, self.pos, self.branch, self.kind = [], [], [], [], [], []
        self.n_img = 0

    def put(self, tok, ids, answer, branch, kind=-1):
        for i in ids:
            self.ids.append(i)
            self.slot.append(-1)
            self.label.append(i if answer else -100)
            self.kind.append(kind if answer else -1)
            self.branch.append(branch)
        return len(ids)

    def put_text(self, tok, text, answer, branch, pos, kind=-1):
        """Append text (IMG marks pictures) starting at position pos; returns the next position."""
        n = 0
        for j, piece in enumerate(text.split(IMG)):
            if j:
                for p in range(N_IMG_TOKENS):
                    self.ids.append(0)
                    self.slot.append(self.n_img * N_IMG_TOKENS + p)
                    self.label.append(-100)
                    self.kind.append(-1)
                    self.branch.append(branch)
                self.n_img += 1
                n += N_IMG_TOKENS
            if piece:
                n += self.put(tok, tok(piece), answer, branch, kind)
        self.pos += range(pos, pos + n)
        return pos + n

    def full(self):
        pad = self.T - len(self.ids)
        return (
            self.ids + [0] * pad,
            self.slot + [-1] * pad,
            self.label + [-100] * pad,
            self.pos + [0] * pad,
            self.branch + [-1] * pad,
            self.kind + [-1] * pad,
        )


KIND_NAMES = [k + s for k in KINDS for s in ("", "@2", "@img2")] + [
    "pair_see",
    "pair_color",
    "pair_count",
    "pair_both",
]
KIND_ID = {k: i for i, k in enumerate(KIND_NAMES)}


def text_len(tok, text):
    return sum(len(tok(p)) for p in text.split(IMG) if p) + N_IMG_TOKENS * text.count(IMG)


def encode_tree(rng, tok, sc, T, max_branches=12):
    s = Sample(T)
    trunk, branch = tree(rng, sc)
    pos = 0
    for text, ans in trunk:
        pos = s.put_text(tok, text, ans, 0, pos)
    b, miss = 0, 0
    while b < max_branches and miss < 3:
        br, kinds = branch()
        if len(s.ids) + sum(text_len(tok, t) for t, _ in br) > T:
            miss += 1
            continue
        b += 1
        p = pos
        it = iter(kinds)
        for text, ans in br:
            p = s.put_text(tok, text, ans, b, p, KIND_ID[next(it)] if ans else -1)
    return s


def encode_line(rng, tok, scs, T):
    s = Sample(T)
    pos, held = 0, None
    for text, ans, kind in line(rng, scs):
        if not ans:
            held = text
            continue
        if len(s.ids) + text_len(tok, held) + text_len(tok, text) > T:
            break
        pos = s.put_text(tok, held, False, 0, pos)
        pos = s.put_text(tok, text, True, 0, pos, KIND_ID[kind])
    return s
