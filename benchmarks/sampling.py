"""Measures the cost of sampling in compiled code and in NumPy, compared with llama.cpp's chain.

Run it with `python -m benchmarks.sampling`. Each sampler gets each row in turn, ten times. The time
of the chain includes copying its candidates, in place of building them from logits, and
`llama_sampler_apply`.

Then it measures whole steps by rows and threads (`--steps`: only these, without llama.cpp). Rows
are rewritten before each step, like an engine does, and there are more than fit into the caches.
Threads are woken before that, like for a step on a GPU. CPU time of all threads shows the cost of a
step when other programs use the cores. Waiting for the interpreter's lock is not part of it.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from ctypes import c_bool, c_float, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any, ClassVar

import numpy as np

from rekindle.engine.base import Row
from rekindle.engine.llamacpp.bindings import declare, load_library
from rekindle.engine.sampling import native
from rekindle.engine.sampling.sampler import StepSampler, TokenSampler
from rekindle.protocol.requests import SamplingParams

ROUNDS = 5
STEPS = 30
STEP_ROWS = (1, 8, 32, 64)
STEP_KINDS = ("peaked", "flat")
STEP_WAYS = ("greedy", "temperature 0.8, top-p 0.9", "0.8, top-k 40, 0.95, 0.05")
THREADS = (1, 2, 4, 8)
VOCABULARIES = (49_152, 151_936)
COMPILED = native.load()
CHOOSERS = {"compiled": COMPILED, "NumPy": None} if COMPILED else {"NumPy": None}
WAYS = {
    "greedy": SamplingParams(temperature=0),
    "temperature 0.8, top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    "temperature 1, top-p 0.9": SamplingParams(temperature=1, top_p=0.9, seed=1),
    "temperature 2, top-p 0.9": SamplingParams(temperature=2, top_p=0.9, seed=1),
    "temperature 0.8": SamplingParams(temperature=0.8, top_p=1, seed=1),
    "temperature 0.8, top-k 40": SamplingParams(temperature=0.8, top_p=1, top_k=40, seed=1),
    "temperature 0.8, min-p 0.05": SamplingParams(temperature=0.8, top_p=1, min_p=0.05, seed=1),
    "0.8, top-k 40, 0.95, 0.05": SamplingParams(
        temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1
    ),  # llama.cpp's own defaults
}

Candidate = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class ChainParams(ctypes.Structure):
    _fields_: ClassVar = [("no_perf", c_bool)]


class CandidateArray(ctypes.Structure):
    _fields_: ClassVar = [
        ("data", c_void_p), ("size", c_size_t), ("selected", c_int64), ("sorted", c_bool),
    ]  # fmt: skip


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_sampler_chain_default_params": (ChainParams, []),
    "llama_sampler_chain_init": (c_void_p, [ChainParams]),
    "llama_sampler_chain_add": (None, [c_void_p, c_void_p]),
    "llama_sampler_apply": (None, [c_void_p, ctypes.POINTER(CandidateArray)]),
    "llama_sampler_free": (None, [c_void_p]),
    "llama_sampler_init_greedy": (c_void_p, []),
    "llama_sampler_init_dist": (c_void_p, [c_uint32]),
    "llama_sampler_init_top_k": (c_void_p, [c_int32]),
    "llama_sampler_init_top_p": (c_void_p, [c_float, c_size_t]),
    "llama_sampler_init_min_p": (c_void_p, [c_float, c_size_t]),
    "llama_sampler_init_temp": (c_void_p, [c_float]),
}


class Chain:
    """llama.cpp's samplers in their default order."""

    def __init__(self, library: Any, sampling: SamplingParams) -> None:
        self._library = library
        params = library.llama_sampler_chain_default_params()
        self._native = library.llama_sampler_chain_init(params)
        for sampler in self._samplers(sampling):
            library.llama_sampler_chain_add(self._native, sampler)

    def _samplers(self, sampling: SamplingParams) -> list[int]:
        library = self._library
        if sampling.temperature == 0:
            return [library.llama_sampler_init_greedy()]
        chain = []
        if sampling.top_k:
            chain.append(library.llama_sampler_init_top_k(sampling.top_k))
        if sampling.top_p < 1:
            chain.append(library.llama_sampler_init_top_p(sampling.top_p, 1))
        if sampling.min_p:
            chain.append(library.llama_sampler_init_min_p(sampling.min_p, 1))
        chain.append(library.llama_sampler_init_temp(sampling.temperature))
        return [*chain, library.llama_sampler_init_dist(sampling.seed)]

    def measure_us(self, row: Row) -> float:
        ready = np.zeros(row.size, Candidate)
        ready["id"], ready["logit"] = np.arange(row.size), row
        candidates = ready.copy()
        array = CandidateArray(candidates.ctypes.data, row.size, -1, False)
        started = time.perf_counter()
        ctypes.memmove(candidates.ctypes.data, ready.ctypes.data, ready.nbytes)
        self._library.llama_sampler_apply(self._native, ctypes.byref(array))
        return (time.perf_counter() - started) * 1e6

    def close(self) -> None:
        self._library.llama_sampler_free(self._native)


def rows(size: int) -> dict[str, Row]:
    """Rows of logits, from a model that is sure of some fifty tokens to an untrained one."""
    chance = np.random.default_rng(1)
    flat, wide = chance.normal(0, 1, size), chance.normal(0, 3, size)
    peaked = chance.normal(0, 2, size)
    peaked[chance.choice(size, 50, replace=False)] += 15
    made = {"peaked": peaked, "wide": wide, "flat": flat}
    return {name: row.astype(np.float32) for name, row in made.items()}


def compare_us(library: Any, sampling: SamplingParams, row: Row) -> list[float]:
    """Median times of compiled code, NumPy and the chain, in turns."""
    chain = Chain(library, sampling)
    sides = [*(OneRow(sampling, each).measure_us for each in CHOOSERS.values()), chain.measure_us]
    measured: list[list[float]] = [[] for _ in sides]
    for _ in range(ROUNDS):
        for times, measure_us in zip(measured, sides, strict=True):
            times += [measure_us(row) for _ in range(10)]
    chain.close()
    return [median(times) for times in measured]


class OneRow:
    """A single reply."""

    def __init__(self, sampling: SamplingParams, compiled: ctypes.CDLL | None) -> None:
        self._step = StepSampler(1, compiled)
        self._samplers = [TokenSampler(sampling, ())]

    def measure_us(self, row: Row) -> float:
        own = row[None].copy()
        started = time.perf_counter()
        self._step.sample(self._samplers, own)
        return (time.perf_counter() - started) * 1e6


def measure_step_us(
    sampling: SamplingParams, row: Row, count: int, step: StepSampler
) -> tuple[int, int]:
    """Median wall time and CPU time of a step."""
    samplers = [TokenSampler(replace(sampling, seed=seed), ()) for seed in range(count)]
    given = np.stack([np.roll(row, shift) for shift in range(count)])
    logits = given.copy()
    walls, cpus = [], []
    for _ in range(STEPS):
        step.arm(samplers, row.size)
        logits[:] = given
        started, started_cpu = time.perf_counter(), time.process_time()
        step.sample(samplers, logits)
        walls.append(time.perf_counter() - started)
        cpus.append(time.process_time() - started_cpu)
    return round(median(walls) * 1e6), round(median(cpus) * 1e6)


def compare_with_chain() -> None:
    library = load_library()
    declare(library, _SIGNATURES)
    kinds = "".join(f"{kind:>24}" for kind in ("peaked", "wide", "flat"))
    sides = ", ".join([*CHOOSERS, "llama.cpp"])
    print(f"{'µs a token: ' + sides:38}{kinds}")
    for size in VOCABULARIES:
        for label, sampling in WAYS.items():
            times = [compare_us(library, sampling, row) for row in rows(size).values()]
            cells = "".join(f"{each:8.0f}" for three in times for each in three)
            print(f"{size:7}  {label:29}{cells}")


def measure_steps() -> None:
    print(f"\n{'µs a step: wall, CPU; threads:':50}" + "".join(f"{each:>16}" for each in THREADS))
    for (name, compiled), label in product(CHOOSERS.items(), STEP_WAYS):
        for kind, count in product(STEP_KINDS, STEP_ROWS):
            row = rows(VOCABULARIES[0])[kind]
            steps = [StepSampler(threads, compiled) for threads in THREADS]
            pairs = [measure_step_us(WAYS[label], row, count, step) for step in steps]
            for step in steps:
                step.close()
            cells = "".join(f"{wall:8}{cpu:8}" for wall, cpu in pairs)
            print(f"{name:9}{label:27}{kind:7}{count:3} rows{cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", action="store_true", help="measure only whole steps")
    if not parser.parse_args().steps:
        compare_with_chain()
    measure_steps()


if __name__ == "__main__":
    main()
