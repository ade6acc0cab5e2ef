"""Runs llama.cpp's own server with its default prompt caches until stdin closes."""

from __future__ import annotations

import argparse
import sys

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--mmproj", default="")
    for number in ("port", "slots", "threads", "context"):
        parser.add_argument(f"--{number}", type=int, required=True)
    server = xllamacpp.Server(parameters(parser.parse_args()))
    print(server.listening_address, flush=True)
    sys.stdin.read()  # returns when the parent has ended


def parameters(arguments: argparse.Namespace) -> xllamacpp.CommonParams:
    params = xllamacpp.CommonParams()
    params.model.path = arguments.model
    params.mmproj.path = arguments.mmproj
    params.port = arguments.port
    params.n_ctx = arguments.context
    params.n_parallel = arguments.slots
    params.kv_unified = True  # llama-server's default, where slots share one context
    params.cpuparams.n_threads = arguments.threads
    params.cpuparams_batch.n_threads = arguments.threads
    return params


if __name__ == "__main__":
    main()
