"""Trained weights (eyes.pt) -> mmproj GGUF for llama.cpp's mtmd, projector type "mlp".

python export.py eyes.pt mmproj-shapes.gguf
"""

import sys

import gguf
import numpy as np
import torch
from shapes import SHAPES
from vit import CFG


def export(state, path):
    w = gguf.GGUFWriter(path, "clip")
    w.add_type("mmproj")
    w.add_name("Shapes eyes for SmolLM2-135M-Instruct")
    w.add_description(
        "Tiny ViT + MLP projector that lets SmolLM2-135M-Instruct see simple coloured shapes "
        "(%s). For tests." % ", ".join(SHAPES)
    )
    w.add_license("apache-2.0")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    w.add_bool("clip.has_vision_encoder", True)
    w.add_string("clip.projector_type", "mlp")
    w.add_bool("clip.use_gelu", True)  # tanh GELU in the ViT's MLPs
    w.add_uint32("clip.vision.image_size", CFG["image_size"])
    w.add_uint32("clip.vision.patch_size", CFG["patch_size"])
    w.add_uint32("clip.vision.embedding_length", CFG["n_embd"])
    w.add_uint32("clip.vision.feed_forward_length", CFG["n_ff"])
    w.add_uint32("clip.vision.block_count", CFG["n_layer"])
    w.add_uint32("clip.vision.attention.head_count", CFG["n_head"])
    w.add_float32("clip.vision.attention.layer_norm_epsilon", CFG["eps"])
    w.add_uint32("clip.vision.projection_dim", CFG["n_out"])
    w.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    w.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    # without this, llama.cpp's LLaVA graph leaves out the last block (it takes the
    # features of the second to last one)
    w.add_array("clip.vision.feature_layer", [CFG["n_layer"]])

    def put(name, key, half):
        t = state[key].float().cpu().numpy()
        w.add_tensor(name, t.astype(np.float16) if half else t.astype(np.float32))

    put("v.patch_embd.weight", "patch.weight", True)
    put("v.patch_embd.bias", "patch.bias", False)
    put("v.position_embd.weight", "pos", False)
    put("v.post_ln.weight", "post_ln.weight", False)
    put("v.post_ln.bias", "post_ln.bias", False)
    for i in range(CFG["n_layer"]):
        for a, b in (
            ("attn_q", "q"),
            ("attn_k", "k"),
            ("attn_v", "v"),
            ("attn_out", "o"),
            ("ffn_up", "up"),
            ("ffn_down", "down"),
        ):
            put(f"v.blk.{i}.{a}.weight", f"blocks.{i}.{b}.weight", True)
            put(f"v.blk.{i}.{a}.bias", f"blocks.{i}.{b}.bias", False)
        for a in ("ln1", "ln2"):
            put(f"v.blk.{i}.{a}.weight", f"blocks.{i}.{a}.weight", False)
            put(f"v.blk.{i}.{a}.bias", f"blocks.{i}.{a}.bias", False)
    for a, b in (("mm.0", "mm0"), ("mm.2", "mm2")):
        put(a + ".weight", b + ".weight", True)
        put(a + ".bias", b + ".bias", False)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    ck = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
    export(ck["eyes"], sys.argv[2])
    import os

    print(sys.argv[2], os.path.getsize(sys.argv[2]), "bytes")
