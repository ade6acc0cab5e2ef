"""Minimal chat through llama.cpp's mtmd (llama-cpp-python's ctypes bindings), greedy, on CPU.

Keeps to the low-level calls on purpose, so that what is measured is llama.cpp itself
and not a chat handler's template or sampling defaults.
"""

import ctypes

import numpy as np
from llama_cpp import Llama, llama_cpp, mtmd_cpp

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
MARK = mtmd_cpp.mtmd_default_marker().decode()


def render(messages):
    """SmolLM2's chat template, with the generation prompt."""
    out = ""
    if messages[0]["role"] != "system":
        out = "<|im_start|>system\n" + SYSTEM + "<|im_end|>\n"
    for m in messages:
        out += "<|im_start|>" + m["role"] + "\n" + m["content"] + "<|im_end|>\n"
    return out + "<|im_start|>assistant\n"


class Chat:
    def __init__(self, lm, mmproj, n_ctx=2048, n_threads=2, verbose=False):
        self.llm = Llama(
            lm,
            n_ctx=n_ctx,
            n_batch=512,
            n_threads=n_threads,
            n_threads_batch=n_threads,
            verbose=verbose,
        )
        if not verbose:
            cb = llama_cpp.llama_log_callback(lambda level, text, user: None)
            self._cb = cb
            for f in ("mtmd_log_set", "mtmd_helper_log_set"):
                try:
                    getattr(mtmd_cpp, f)(cb, ctypes.c_void_p(0))
                except Exception:
                    pass
        p = mtmd_cpp.mtmd_context_params_default()
        p.use_gpu, p.n_threads, p.print_timings = False, n_threads, False
        self.ctx = mtmd_cpp.mtmd_init_from_file(mmproj.encode(), self.llm.model, p)
        assert self.ctx, "mmproj did not load"
        self.n_past = 0

    def bitmap(self, data):
        buf = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        b = mtmd_cpp.mtmd_helper_bitmap_init_from_buf(self.ctx, buf, len(data), False)
        assert b, "picture did not decode"
        return b

    def chunks(self, text, images):
        raw = text.encode()
        it = mtmd_cpp.mtmd_input_text()
        it.text, it.add_special, it.parse_special = raw, True, True
        if hasattr(it, "text_len"):
            it.text_len = len(raw)
        bms = [self.bitmap(d) for d in images]
        ch = mtmd_cpp.mtmd_input_chunks_init()
        arr = (mtmd_cpp.mtmd_bitmap_p_ctypes * len(bms))(*bms)
        rc = mtmd_cpp.mtmd_tokenize(self.ctx, ch, ctypes.byref(it), arr, len(bms))
        for b in bms:
            mtmd_cpp.mtmd_bitmap_free(b)
        assert rc == 0, f"mtmd_tokenize: {rc}"
        return ch

    def embed(self, image):
        """The projector's output for one picture, [n_tokens, n_embd]."""
        ch = self.chunks(MARK, [image])
        try:
            for i in range(mtmd_cpp.mtmd_input_chunks_size(ch)):
                c = mtmd_cpp.mtmd_input_chunks_get(ch, i)
                if mtmd_cpp.mtmd_input_chunk_get_type(c) == mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_IMAGE:
                    n = mtmd_cpp.mtmd_input_chunk_get_n_tokens(c)
                    assert mtmd_cpp.mtmd_encode_chunk(self.ctx, c) == 0
                    e = mtmd_cpp.mtmd_get_output_embd(self.ctx)
                    return np.ctypeslib.as_array(e, (n * self.llm.n_embd(),)).reshape(n, -1).copy()
        finally:
            mtmd_cpp.mtmd_input_chunks_free(ch)

    def prefill(self, text, images, at=0):
        """Evaluate a prompt from position `at` (0 clears everything)."""
        mem = llama_cpp.llama_get_memory(self.llm.ctx)
        if at == 0:
            llama_cpp.llama_memory_clear(mem, True)
        else:
            llama_cpp.llama_memory_seq_rm(mem, 0, at, -1)
        ch = self.chunks(text, images)
        new = llama_cpp.llama_pos(0)
        try:
            rc = mtmd_cpp.mtmd_helper_eval_chunks(
                self.ctx, self.llm.ctx, ch, at, 0, 512, True, ctypes.byref(new)
            )
        finally:
            mtmd_cpp.mtmd_input_chunks_free(ch)
        assert rc == 0, f"eval_chunks: {rc}"
        self.n_past = new.value
        return self.n_past

    def generate(self, max_tokens=48):
        """Greedy until <|im_end|>."""
        ctx, n_vocab, out = self.llm.ctx, self.llm.n_vocab(), []
        self.margin = float("inf")  # smallest gap between best and second-best logit
        for _ in range(max_tokens):
            lg = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(ctx, -1), (n_vocab,))
            t = int(lg.argmax())
            top = np.partition(lg, -2)[-2:]
            self.margin = min(self.margin, float(top[1] - top[0]))
            if t in (0, 2):  # <|endoftext|>, <|im_end|>
                break
            out.append(t)
            arr = (llama_cpp.llama_token * 1)(t)
            batch = llama_cpp.llama_batch_get_one(arr, 1)
            assert llama_cpp.llama_decode(ctx, batch) == 0
            self.n_past += 1
        return self.llm.detokenize(out).decode("utf-8", "replace")

    def ask(self, messages, images, max_tokens=48):
        """messages with MARK where the pictures go."""
        self.prefill(render(messages), images)
        return self.generate(max_tokens)
