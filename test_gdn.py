"""Tests: every function against a plain oracle or a known answer, and the scripts as they are run.

    python -m pytest -q
"""
import functools
import gzip
import hashlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import typing
from pathlib import Path
from random import Random
from statistics import mean, stdev
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

import gdn

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)                    # several gain nothing here, and wait on a busy machine
HERE = Path(__file__).resolve().parent


def script(name):
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPTS = ("01_spectrum", "02_decay", "03_loss", "04_ruler", "05_report")
MODULES = spectrum, decay, loss, ruler, report = *map(script, SCRIPTS),

# ---- small models with random weights, of all four families --------------------------------------

SMALL = dict(vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
             layer_types=["linear_attention", "linear_attention", "full_attention"],
             num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=2,
             linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
             eos_token_id=0, pad_token_id=0)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
               shared_expert_intermediate_size=24)
FAMILIES = {"qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {}),
            "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", EXPERTS),
            "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", EXPERTS),
            "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig",
                            dict(linear_num_value_heads=2, linear_value_head_dim=24))}


def random_model(family="qwen3_5", **more):
    torch.manual_seed(0)
    model, config, own = FAMILIES[family]
    config = getattr(transformers, config)(**{**SMALL, **own, **more})
    net = getattr(transformers, model)(config).eval()
    for p in net.parameters():
        if p.ndim > 1:                          # with transformers' 0.02 the states hardly matter
            torch.nn.init.normal_(p, std=0.3)
    for m in net.modules():
        if hasattr(m, "A_log"):
            m.A_log.data.uniform_(-5, 1)        # horizons from a token to hundreds
    return net


@pytest.fixture(scope="module", params=FAMILIES)
def net(request):
    return random_model(request.param)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(HERE / "tiny" / "hybrid")


@pytest.fixture(scope="module")
def small(tmp_path_factory, tokenizer):
    """A saved checkpoint, with a tokenizer, that runs in no time: states 16 x 16."""
    folder = tmp_path_factory.mktemp("models") / "small"
    net = random_model(vocab_size=4096)
    net.generation_config.eos_token_id = [5, 9]
    net.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Eight documents, of 200 tokens each."""
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    words = "return self import value for in if not None def path name file".split()
    lines = [{"text": " ".join(Random(i).choices(words, k=200))} for i in range(8)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


def ids_of(n, rows=1):
    generator = torch.Generator().manual_seed(n)
    return torch.randint(1, 256, (1, n), generator=generator).expand(rows, -1)


def new_cache(net):
    return DynamicCache(config=net.config)


def run_of(net):
    """What a script's measure gets, of a model that is not in a folder."""
    return gdn.Run("a/m", None, None, net.config, None, "cpu", net.dtype, [0, 1],
                   [net.config.linear_value_head_dim, net.config.linear_key_head_dim], {}, net)


def cut_of(net, keep="top", store="float32", heads=None):
    H = net.config.linear_num_value_heads
    return gdn.Cut(keep, store, torch.ones(2, H, dtype=torch.bool) if heads is None else heads)


# ---- oracles ------------------------------------------------------------------------------------

FP8 = [m / 8 * 2.0 ** -6 for m in range(8)] + [(1 + m / 8) * 2.0 ** e for e in range(-6, 9)
                                               for m in range(8)][:-1]      # the last one is NaN
STORES = [*gdn.BITS]


def to_bfloat16(x):
    """The nearest number with 8 bits of mantissa, ties to even, by the bits of a float32."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000
    return bits.astype(np.uint32).view(np.float32)


def plain_stored(x, store):
    """A matrix [V, K] as it comes back from storage, column by column."""
    if store == "float32":
        return x
    if store == "bfloat16":
        return to_bfloat16(x).astype(x.dtype)
    if store == "float16":
        return np.clip(x, -65504, 65504).astype(np.float16).astype(x.dtype)
    levels = FP8 if store == "fp8" else [*range(2 ** (int(store[3:]) - 1))]
    back = np.zeros_like(x)
    for k, column in enumerate(x.T):
        scale = to_bfloat16(np.abs(column).max() / levels[-1]).astype(x.dtype)
        if scale > 0:
            distance = np.abs(np.abs(column / scale)[:, None] - np.array(levels, x.dtype))
            back[:, k] = np.sign(column) * np.array(levels)[distance.argmin(-1)] * scale
    return back


def plain_cut(state, rank, keep="top", store="float32", C=None):
    """A matrix with `rank` of its modes, its two factors stored, by a plain float64 SVD."""
    state = np.asarray(state, dtype=np.float64)
    M, K = min(state.shape), state.shape[1]
    if rank >= M:
        return plain_stored(state, store)
    A = np.eye(K) if C is None else np.linalg.cholesky(C / (np.trace(C) / K) + 1e-3 * np.eye(K))
    u, s, wh = np.linalg.svd(state @ A, full_matrices=False)
    kept = slice(M - rank, M) if keep == "bottom" else slice(0, rank)
    right = np.linalg.inv(A).T @ wh[kept].T
    return plain_stored(u[:, kept] * s[kept], store) @ plain_stored(right, store).T


def record(net, ids, segment=32):
    """The run's recorded calls [call of the model][GDN layer], and the states before each call."""
    cache, calls, states = new_cache(net), [], [None]
    with gdn.recorded_rule(net) as recorded:
        for _ in gdn.segments(net, ids, segment, cache):
            calls.append(list(recorded))
            states.append([state.clone() for state in gdn.states_in(cache)])
            recorded.clear()
    return calls, states


def plain_queries(call):
    """q~ [n, H, K] by multiplying the factors out: P <- P a (I - b k k^T), then P q."""
    _, q, k, v, others = call
    q, k = (qwen.l2norm(x)[0].double().numpy() for x in (q, k))             # [n, G, K]
    n, H, (G, K) = len(q), v.shape[2], k.shape[1:]
    a, b = others["g"][0].double().exp().numpy(), others["beta"][0].double().numpy()
    found = np.empty((n, H, K))
    for h in range(H):
        P, g = np.eye(K), h * G // H
        for t in range(n):
            P = P @ (a[t, h] * (np.eye(K) - b[t, h] * np.outer(k[t, g], k[t, g])))
            found[t, h] = P @ q[t, g] * K ** -0.5
    return found


@torch.inference_mode()
def plain_run(net, ids, segment, rank=None, keep="top", mask=None, store="float32"):
    """Logits [T, W], and the states [boundary][layer][head] as numpy [V, K], before the cut."""
    cache, logits, states, C = new_cache(net), [], [], None
    asked = [[plain_queries(call) for call in layers] for layers in record(net, ids, segment)[0]]
    for start in range(0, ids.shape[1], segment):
        if start:
            states.append([])
            for layer in (0, 1):
                there = cache.layers[layer].recurrent_states[0][0]          # [H, K, V]
                states[-1].append([head.T.double().numpy().copy() for head in there])
                for head, state in enumerate(states[-1][-1]):
                    if keep == "read":              # of the untouched run, up to this boundary
                        seen = [queries[layer][:, head] for queries in asked[:len(states)]]
                        C = sum(np.outer(q, q) for q in np.concatenate(seen))
                    if rank is not None and (mask is None or mask[layer, head]):
                        there[head] = torch.tensor(plain_cut(state, rank, keep, store, C)).T
        part = ids[:, start:start + segment]
        logits.append(net(part, cache=cache, use_cache=True).logits[0])
    return torch.cat(logits), states


# ---- 1. the recurrence ---------------------------------------------------------------------------

def random_inputs(T, G=2, H=4, K=8, V=12, dtype=torch.float64):
    g = torch.Generator().manual_seed(T)
    q, k = torch.randn(2, 2, T, G, K, generator=g, dtype=dtype)
    v = torch.randn(2, T, H, V, generator=g, dtype=dtype)
    b = torch.rand(2, T, H, generator=g, dtype=dtype)
    log_a = -torch.rand(2, T, H, generator=g, dtype=dtype) * torch.logspace(-4, 0, H)
    q = q / q.norm(dim=-1, keepdim=True) * K ** -0.5
    return q, k / k.norm(dim=-1, keepdim=True), v, log_a, b


def test_recurrence_is_the_posts_equation_written_with_explicit_outer_products():
    q, k, v, log_a, b = random_inputs(5)
    y, S = gdn.gated_delta_rule(q, k, v, log_a, b)
    for row in range(2):
        for head in range(4):
            want = torch.zeros(12, 8, dtype=torch.float64)
            for t in range(5):
                a, key = log_a[row, t, head].exp(), k[row, t, head // 2]
                missing = v[row, t, head] - a * want @ key
                want = a * want + b[row, t, head] * torch.outer(missing, key)
                assert_close(y[row, t, head], want @ q[row, t, head // 2])
            assert_close(S[row, head], want)


def test_recurrence_goes_on_from_a_given_state_without_changing_it():
    inputs = random_inputs(30)
    y, S = gdn.gated_delta_rule(*inputs)
    first, middle = gdn.gated_delta_rule(*(x[:, :11] for x in inputs))
    kept = middle.clone()
    second, end = gdn.gated_delta_rule(*(x[:, 11:] for x in inputs), state=middle)
    assert_close(torch.cat([first, second], 1), y)
    assert_close(end, S)
    assert torch.equal(middle, kept)


@pytest.mark.parametrize("rule", ["torch_chunk_gated_delta_rule",
                                  "torch_recurrent_gated_delta_rule"])
def test_recurrence_equals_both_kernels_of_transformers_with_grouped_heads_and_a_state(rule):
    q, k, v, log_a, b = random_inputs(150, dtype=torch.float32)
    _, state = gdn.gated_delta_rule(*random_inputs(9, dtype=torch.float32))
    y, S = gdn.gated_delta_rule(q, k, v, log_a, b, state)
    theirs, theirs_S = getattr(qwen, rule)(q * 8 ** 0.5, k, v, g=log_a, beta=b,
                                           initial_state=state.mT, output_final_state=True)
    assert_close(theirs, y, atol=1e-5, rtol=1e-5)
    assert_close(theirs_S.mT, S, atol=1e-5, rtol=1e-5)


def test_decay_horizon_inverts_a_mean_of_logarithms_and_a_head_without_decay_never_forgets():
    horizon = gdn.decay_horizon([-0.2505, 0.0, -0.0, -1.0])
    assert horizon.tolist() == [pytest.approx(1 / 0.2505), float("inf"), float("inf"), 1.0]
    with pytest.raises(gdn.Error, match="above 0"):
        gdn.decay_horizon(torch.tensor([-1.0, 1e-9]))


# ---- 2. the state --------------------------------------------------------------------------------

def spectra():
    """(name, matrices [4, 24, 24] in float64) of known spectra."""
    g = torch.Generator().manual_seed(1)
    left, right = torch.linalg.qr(torch.randn(2, 4, 24, 24, generator=g, dtype=torch.float64)).Q
    for name, sigma in {"flat": torch.linspace(1, 0.9, 24), "steep": torch.logspace(0, -12, 24),
                        "degenerate": torch.tensor([2.0] * 6 + [1.0] * 12 + [0.1] * 6),
                        "rank-deficient": torch.tensor([3.0, 2.0, 1.0] + [0.0] * 21),
                        "zero": torch.zeros(24)}.items():
        yield pytest.param(left * sigma.double() @ right.mT, id=name)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


SHAPES = pytest.mark.parametrize("shape", [(24, 24), (24, 10), (10, 24)])


@pytest.mark.parametrize("state", [*spectra()])
@SHAPES
@pytest.mark.parametrize("scale", [1, 1e-30, 1e30])
def test_modes_are_the_singular_values_and_vectors_of_a_float64_svd(state, shape, scale):
    state = scale * state[:, :shape[0], :shape[1]]
    sigma, vectors = gdn.modes(state)
    want = torch.linalg.svdvals(state)                                      # largest first
    M = min(shape)
    largest = want[:, :1]
    assert sigma.shape == (4, M) and vectors.shape == (4, shape[1], M)
    assert ((sigma - want).abs() <= 3e-8 * largest).all()                   # 2 sqrt(eps)
    assert (sigma.diff() <= 0).all()
    assert_close(vectors.mT @ vectors, torch.eye(M).double().expand(4, M, M), atol=1e-12, rtol=0)
    lengths = (state @ vectors).norm(dim=-2)
    assert ((lengths - want).abs() <= 3e-8 * largest).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_state_with_nan_or_infinity_is_an_error_that_says_so(bad):
    state = torch.randn(2, 5, 5)
    state[1, 2, 3] = bad
    for measure in (gdn.modes, lambda s: gdn.truncate(s, 2), lambda s: gdn.truncate(s, 5),
                    lambda s: gdn.truncate(s, 2, metric=torch.eye(5), store="int8")):
        with pytest.raises(gdn.Error, match="NaN or infinity"):
            measure(state)


def test_effective_rank_is_n_for_n_equal_values_one_for_one_and_zero_for_none():
    sigma = torch.tensor([[2.0, 2, 2, 2], [5, 0, 0, 0], [0, 0, 0, 0], [1e-38, 1e-38, 0, 0]])
    assert_close(gdn.effective_rank(sigma), torch.tensor([4.0, 1, 0, 2]))
    by_hand = np.exp(-(0.5 * np.log(0.5) + 0.3 * np.log(0.3) + 0.2 * np.log(0.2)))
    assert gdn.effective_rank(torch.tensor([3.5, 2.1, 1.4])).item() == pytest.approx(by_hand)


@pytest.mark.parametrize("state", [*spectra()])
@SHAPES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_truncation_is_as_near_to_the_state_as_a_float64_svd_gets(state, shape, dtype):
    state = state[:, :shape[0], :shape[1]].to(dtype)
    sigma = torch.linalg.svdvals(state.double())                            # [4, M]
    for rank in (1, 3, 9):
        cut = gdn.truncate(state, rank)
        assert cut.dtype == dtype and cut.shape == state.shape
        error = torch.linalg.matrix_norm(state.double() - cut.double())
        best = sigma[:, rank:].square().sum(-1).sqrt()                      # Eckart & Young
        rounding = 8 * torch.finfo(dtype).eps * torch.linalg.matrix_norm(state.double())
        assert (error <= best * (1 + 1e-6) + rounding).all()
        if dtype == torch.float64:
            assert (torch.linalg.matrix_rank(cut, rtol=1e-9) <= rank).all()
        gap = sigma[:, rank - 1] - sigma[:, rank] > 1e-4                    # the modes are unique
        for matrix in gap.nonzero()[:, 0]:
            want = torch.tensor(plain_cut(state[matrix].double(), rank))
            if dtype == torch.float64:
                assert_close(cut[matrix], want, atol=1e-9, rtol=0)
            if dtype in (torch.bfloat16, torch.float16):    # in float32, rounded once: but for ties
                assert (cut[matrix] == want.to(dtype)).double().mean() > 0.97


def test_rank_0_wipes_the_state_and_a_rank_of_all_modes_leaves_every_bit_of_it():
    state = normal(3, 2, 8, 6, dtype=torch.float32)
    for all_modes in (6, 99):
        assert torch.equal(gdn.truncate(state, all_modes), state)
    assert not gdn.truncate(state, 0).any()
    mixed = gdn.truncate(state, torch.tensor([[6], [0], [7]]))
    assert torch.equal(mixed[[0, 2]], state[[0, 2]]) and not mixed[1].any()
    assert not torch.equal(gdn.truncate(state, 5), state)


def test_a_single_matrix_has_the_modes_it_has_in_a_batch(two_threads):
    state = normal(2, 7, 5)
    for got, want in zip(gdn.modes(state[1]), gdn.modes(state)):
        assert_close(got, want[1])
    assert_close(gdn.truncate(state[1], 2), gdn.truncate(state, 2)[1])
    several = gdn.truncate(state[1], torch.tensor([2, 0, 5])[:, None])[:, 0]
    assert_close(several, gdn.truncate(state[1:], torch.tensor([[2], [0], [5]]))[:, 0])


@pytest.mark.parametrize("store", ["float32", "int8"])
def test_truncation_to_a_tensor_of_ranks_equals_one_call_a_rank_also_for_a_shared_state(store):
    ranks = torch.tensor([[4], [1], [9], [0]])                              # [4, 1] with [4, 3]
    state, half = normal(4, 3, 9, 9), normal(3, 9, 9, seed=1)
    more = {"place": torch.rand(3, 9).argsort(-1), "store": store,
            "metric": torch.linalg.cholesky(half @ half.mT + torch.eye(9))}
    cut = gdn.truncate(state, ranks, **more)
    shared = gdn.truncate(state[:1], ranks, **more)
    assert shared.shape == (4, 3, 9, 9)
    for row, rank in enumerate(ranks[:, 0].tolist()):
        assert_close(cut[row], gdn.truncate(state[row], rank, **more))
        assert_close(shared[row], gdn.truncate(state[0], rank, **more))


@pytest.mark.parametrize("rank", [-3, 1.5, 2.0, True, torch.tensor([2, -1])])
def test_truncation_refuses_what_is_no_rank(rank):
    with pytest.raises(gdn.Error, match="whole number"):
        gdn.truncate(torch.randn(2, 5, 5), rank)


def test_a_place_in_the_order_of_keeping_chooses_the_modes():
    state = normal(6, 6)
    u, s, wh = np.linalg.svd(state.numpy())
    cut = gdn.truncate(state, 2, torch.tensor([5, 1, 2, 0, 4, 3]))          # the fourth, the second
    assert_close(cut, torch.tensor((u[:, [3, 1]] * s[[3, 1]]) @ wh[[3, 1]]))


# ---- storage

@pytest.mark.parametrize("store", STORES)
def test_what_is_stored_comes_back_as_a_plain_loop_rounds_it_and_is_always_finite(store):
    x = 3 * normal(40, 9, dtype=torch.float32)
    x[:, 1] = 0
    for column, size in enumerate((1e-42, 1e-38, 1e-30, 1e-6, 1e5, 1e30), 2):
        x[:, column] *= size
    x[3, 8] = 3e38
    back = gdn.stored(x, store)
    assert back.dtype == x.dtype and torch.isfinite(back).all() and not back[:, 1].any()
    want = plain_stored(x.numpy(), store)
    np.testing.assert_array_equal(back.numpy(), want)
    if store == "float16":                                                  # it saturates
        assert set(back[:, 7].abs().tolist()) == {65504.0}
    assert torch.equal(gdn.stored(x.expand(2, 3, 40, 9), store)[1, 2], back)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("shape", [(9, 9), (12, 7), (7, 12)])
def test_fewer_modes_are_stored_as_two_factors_and_all_modes_as_the_state_itself(store, shape):
    state, half = normal(3, *shape), normal(3, shape[1], shape[1], seed=1)
    C = half @ half.mT
    A = gdn.read_metric(C)
    for rank in (0, 2, min(shape) - 1, min(shape), 99):
        for matrix in range(3):
            for C_, A_ in ((None, None), (C[matrix].numpy(), A[matrix])):
                got = gdn.truncate(state[matrix], rank, metric=A_, store=store)
                want = plain_cut(state[matrix], rank, "top", store, C_)
                np.testing.assert_allclose(got.numpy(), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rank, store, size", [
    (64, "float32", 16384), (64, "bfloat16", 8192), (64, "float16", 8192), (64, "int8", 4224),
    (64, "fp8", 4224), (64, "int4", 2176), (64, "int2", 1152), (32, "float32", 16384),
    (16, "float32", 8192), (16, "int8", 2112), (8, "int8", 1056), (0, "int8", 0), (0, "fp8", 0)])
def test_bytes_of_a_head_are_its_numbers_and_two_for_each_scale(rank, store, size):
    assert gdn.bytes_stored(64, 64, rank, store) == size


def test_bytes_of_a_head_that_is_not_square_are_rounded_up():
    assert gdn.bytes_stored(24, 16, 16, "int5") == 24 * 16 * 5 // 8 + 2 * 16
    assert gdn.bytes_stored(24, 16, 3, "int3") == 45 + 2 * 2 * 3
    assert gdn.bytes_stored(24, 15, 1, "int6") == 30 + 4                    # 29.25, and 2 scales


# ---- modes by what is read

def test_no_matrix_of_the_same_rank_reads_better_than_modes_in_the_metric_of_what_is_read():
    state, half = normal(5, 7), normal(7, 7, seed=1) * torch.logspace(0, -2, 7)
    C = half @ half.mT
    C /= C.diagonal().mean()
    C += 1e-3 * torch.eye(7)

    def error(X):
        return (((state - X) @ C) * (state - X)).sum().item()

    best = error(gdn.truncate(state, 2, metric=torch.linalg.cholesky(C)))
    found = []
    for seed in range(20):                                                  # X = L R^T, by turns
        R = normal(7, 2, seed=seed)
        for _ in range(300):
            L = state @ C @ R @ torch.linalg.inv(R.T @ C @ R)
            R = state.T @ L @ torch.linalg.inv(L.T @ L)
        found.append(error(L @ R.T))
    assert best <= min(found) * (1 + 1e-9) and best == pytest.approx(min(found), rel=1e-6)
    assert error(gdn.truncate(state, 2)) > 1.2 * best


def test_what_is_read_is_scaled_to_a_mean_of_one_and_nothing_is_read_of_no_direction():
    half = normal(3, 5, 5) * torch.tensor([1e-20, 1.0, 1e20])[:, None, None]
    C = half @ half.mT
    C[1, 2:] = C[1, :, 2:] = 0                                              # not read so far
    A = gdn.read_metric(C)
    for i in range(3):
        want = C[i] / C[i].trace() * 5 + 1e-3 * torch.eye(5).double()
        assert_close(A[i] @ A[i].T, want, rtol=1e-9, atol=1e-12)
    for nothing in (0 * C[0], 0 * C[0].float()):
        assert_close(gdn.read_metric(nothing), 1e-3 ** 0.5 * torch.eye(5).to(nothing))


# ---- eigenproblems

@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 1, 37])
def test_parts_are_solved_side_by_side_on_a_thread_each_and_the_number_of_threads_is_restored(
        count, two_threads, monkeypatch):
    half, eigh, threads = normal(count, 2, 12, 9), torch.linalg.eigh, []
    together = threading.Barrier(2, timeout=20)

    def solve(part):
        threads.append(torch.get_num_threads())
        if count > 1 and len(threads) < 3:
            together.wait()                                                 # two at the same time
        if fail:
            raise ValueError("broken")
        return eigh(part)

    def threads_of_a_new_thread():
        found = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return found

    fail, want = False, eigh(half.mT @ half)
    monkeypatch.setattr(torch.linalg, "eigh", solve)
    for got, values in zip(gdn.eigh(half.mT @ half), want):
        assert_close(got.abs(), values.abs(), atol=1e-9, rtol=1e-9)
    assert set(threads) == {1} and torch.get_num_threads() == 2
    assert threads_of_a_new_thread() == [2]
    fail = True
    with pytest.raises(ValueError, match="broken"):
        gdn.eigh(half.mT @ half)
    assert torch.get_num_threads() == 2 and threads_of_a_new_thread() == [2]


@pytest.mark.parametrize("fault", ["raises", "vectors", "values", "nan"])
def test_what_an_eigensolver_gets_wrong_without_a_word_is_solved_again_and_said(fault):
    half = normal(6, 9, 9)
    gram = half.mT @ half * torch.logspace(-20, 20, 6).double()[:, None, None]
    gram[2] = 0

    def solve(matrices):
        if fault == "raises":
            raise torch.linalg.LinAlgError("failed to converge")
        values, vectors = torch.linalg.eigh(matrices)
        vectors = -vectors                                                  # as good, but ours
        if fault == "vectors":
            vectors[[1, 4]] = torch.eye(9).double()
        if fault == "values":
            values[[1, 4]] *= 1.001
        if fault == "nan":
            vectors[[1, 4]] = torch.nan
        return values, vectors

    with pytest.warns(UserWarning, match="eigensolver of cpu failed"):
        values, vectors = gdn.checked_eigh(gram, solve)
    right, theirs = torch.linalg.eigh(gram)
    assert_close(values, right)
    assert_close(vectors.abs(), theirs.abs(), atol=1e-9, rtol=0)
    if fault != "raises":
        assert torch.equal(vectors[[0, 2, 3, 5]], -theirs[[0, 2, 3, 5]])


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_of_an_eigensolver_that_is_right():
    gram = normal(4, 9, 9) @ normal(4, 9, 9).mT
    assert torch.equal(gdn.checked_eigh(gram)[1], torch.linalg.eigh(gram)[1])


# ---- 3. the run ----------------------------------------------------------------------------------

@pytest.mark.parametrize("segment", [64, 50, 1])
def test_segments_continue_the_recurrence_and_the_convolution_as_one_call_does(net, segment):
    ids = ids_of(128 if segment > 1 else 40, rows=2)
    with torch.no_grad():
        want = net(ids).logits
    hidden, boundaries = [], []
    for start, part, boundary in gdn.segments(net, ids, segment, new_cache(net)):
        assert start == sum(x.shape[1] for x in hidden)
        hidden.append(part)
        if boundary:
            boundaries.append(start + part.shape[1])
    with torch.inference_mode():
        got = net.get_output_embeddings()(torch.cat(hidden, 1))
    assert_close(got, want, atol=2e-5 * want.abs().max().item(), rtol=0)
    assert boundaries == list(range(segment, ids.shape[1], segment))        # not at the very end


def test_a_run_that_goes_on_has_a_boundary_where_a_prompt_ends_on_one_and_keeps_its_rows():
    net, ids = random_model(), ids_of(100, rows=3)
    cache = new_cache(net)
    shown = []
    for feed in (ids[:1, :64], ids[:, 64:70], ids[:, 70:]):
        for start, hidden, boundary in gdn.segments(net, feed, 32, cache, end=100):
            shown.append((start, *hidden.shape[:2], boundary))
            if start == 0:
                cache.reorder_cache(torch.zeros(3, dtype=torch.long))       # one row becomes three
    assert shown == [(0, 1, 32, True), (32, 3, 32, True), (64, 3, 6, False), (70, 3, 26, True),
                     (96, 3, 4, False)]
    assert_close(hidden[2], net.base_model(ids).last_hidden_state[2, 96:], atol=1e-4, rtol=1e-4)


def test_overflow_and_a_release_that_ignores_the_cache_are_errors_not_results():
    net, ids = random_model(), ids_of(40)
    forgetful = SimpleNamespace(device="cpu",
                                base_model=lambda ids, cache, use_cache: net.base_model(ids))
    with pytest.raises(gdn.Error, match="install 5.24.0 or later"):
        next(gdn.segments(forgetful, ids, 32, new_cache(net)))
    net.model.embed_tokens.weight.data[ids[0, 31]] = torch.nan              # from there on
    with pytest.raises(gdn.Error, match="NaN or infinite by token 32"):
        next(gdn.segments(net, ids, 32, new_cache(net)))


def test_ids_are_fed_on_the_models_own_device():
    net, seen = random_model(), []

    def base_model(ids, **others):
        seen.append(ids.device.type)
        return net.base_model(ids_of(20), **others)

    elsewhere = SimpleNamespace(device="meta", base_model=base_model)
    next(gdn.segments(elsewhere, ids_of(20), 32, new_cache(net)))
    assert seen == ["meta"]


def test_states_read_from_the_cache_are_those_of_the_reference_on_the_recorded_inputs(net):
    ids = torch.cat([ids_of(71), ids_of(72)[:, :71]])                       # row 0 is recorded
    calls, states = record(net, ids)                                        # 32, 32 and 7 tokens
    assert [len(layers) for layers in calls] == [2, 2, 2]
    for before, layers, after in zip(states, calls, states[1:]):
        for i, (_, q, k, v, others) in enumerate(layers):
            assert {len(x) for x in (q, k, v, others["g"], others["beta"])} == {1}
            start = None if before is None else before[i][:1]
            _, want = gdn.gated_delta_rule(q, qwen.l2norm(k), v, others["g"], others["beta"], start)
            assert_close(after[i][:1], want, atol=1e-4 * want.abs().max().item(), rtol=0)


def own_gates(layer, x):
    """log a and b from the layer's own projections."""
    if hasattr(layer, "in_proj_ba"):                                        # grouped by key head
        both = layer.in_proj_ba(x).unflatten(-1, (layer.num_k_heads, 2, -1))
        b, a = both[..., 0, :].flatten(-2), both[..., 1, :].flatten(-2)
    else:
        b, a = (getattr(layer, f"in_proj_{x}", getattr(layer, f"{x}_proj", None)) for x in "ba")
        b, a = b(x), a(x)
    log_a = -layer.A_log.exp() * torch.nn.functional.softplus(a + layer.dt_bias)
    return log_a, b.sigmoid() * (2 if getattr(layer, "allow_neg_eigval", False) else 1)


def test_02_averages_what_every_layer_computes_from_its_own_projections(net):
    layers = [m for m in net.modules() if type(m).__name__.endswith("GatedDeltaNet")]
    module = sys.modules[type(layers[0]).__module__]
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    before, inputs = [getattr(module, name) for name in names], {0: [], 1: []}
    hooks = [layer.register_forward_pre_hook(lambda m, args, kwargs, i=i: inputs[i].append(
        kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]), with_kwargs=True)
        for i, layer in enumerate(layers)]
    found = decay.measure(run_of(net), ids_of(65), 32)                      # 32, 32, and 1
    for hook in hooks:
        hook.remove()
    assert [getattr(module, name) for name in names] == before
    with torch.inference_mode():
        for i, layer in enumerate(layers):
            log_a, b = own_gates(layer, torch.cat(inputs[i], 1))
            assert found["log_a"][i] == pytest.approx(log_a[0].mean(0).tolist(), rel=1e-4)
            assert found["write_strength"][i] == pytest.approx(b[0].mean(0).tolist(), rel=1e-4)


def test_effective_queries_are_products_of_factors_and_read_what_a_wiped_state_loses(net):
    calls, states = record(net, ids_of(65))
    for before, layers in zip(states[1:], calls[1:]):                       # 32 tokens, and 1
        for state, call in zip(before, layers):
            got = gdn.effective_queries([call])                             # [n, H, K]
            assert_close(got.double(), torch.tensor(plain_queries(call)), atol=1e-5, rtol=1e-4)
            rule, q, k, v, others = call
            whole = rule(q, k, v, **{**others, "initial_state": state.mT})[0]
            wiped = rule(q, k, v, **{**others, "initial_state": torch.zeros_like(state.mT)})[0]
            read = torch.einsum("hvk,nhk->nhv", state[0], got)
            assert_close(read, (whole - wiped)[0], atol=1e-4 * whole.abs().max().item(), rtol=1e-3)


def test_the_effective_queries_of_a_segment_in_several_calls_are_those_of_one_call(net):
    ids, cache = ids_of(64), new_cache(net)
    one = record(net, ids)[0][1]
    with torch.inference_mode(), gdn.recorded_rule(net) as calls:
        for stop in (32, 50, 51, 52, 64):                                   # also single tokens
            net(ids[:, cache.get_seq_length():stop], cache=cache)
            if stop == 32:
                calls.clear()
    for layer, call in enumerate(one):
        assert_close(gdn.effective_queries(calls[layer::2]), gdn.effective_queries([call]),
                     atol=1e-5, rtol=1e-3)
    want = torch.tensor(np.array([[sum(np.outer(q, q) for q in head) for head in
                                   plain_queries(call).swapaxes(0, 1)] for call in one]))
    for given in (one, calls):
        gram = gdn.query_gram(given, 2)                                     # [L, H, K, K]
        assert_close(gram, want, atol=1e-4 * want.max().item(), rtol=1e-3)


@pytest.mark.parametrize("keep, store", [("top", "float32"), ("bottom", "float32"),
                                         ("top", "float16"), ("bottom", "bfloat16")])
def test_rows_are_truncated_as_a_plain_loop_over_layers_rows_and_heads_would(net, keep, store):
    cache, ranks, calls = new_cache(net), [3, 0, 16], ["of the rule"]
    ids = torch.cat([ids_of(n)[:, :40] for n in (41, 42, 43, 44)])
    mask = cut_of(net).heads
    mask[0, 0] = mask[1, 1] = False
    for _ in gdn.segments(net, ids, 64, cache):
        before = [state.clone() for state in gdn.states_in(cache)]
        gdn.truncate_rows(cache, ranks, cut_of(net, keep, store, mask), 0, calls)
    assert calls == []
    after = gdn.states_in(cache)                                            # [1 + R, H, V, K] each
    for layer, head in np.ndindex(mask.shape):
        for row, rank in enumerate([None, *ranks]):
            old, new = before[layer][row, head], after[layer][row, head]
            if not mask[layer, head] or row == 0 or (rank, store) == (16, "float32"):
                assert torch.equal(new, old)
            else:
                want = torch.tensor(plain_cut(old, rank, keep, store)).float()
                step = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}[store]
                assert_close(new, want, atol=step * old.norm().item(), rtol=0)
                assert rank or not new.any()


@pytest.mark.parametrize("keep", typing.get_args(gdn.Keep))
def test_one_row_that_becomes_many_at_the_first_boundary_equals_many_from_the_start(net, keep):
    ranks, hidden = [12, 3, 0], {}
    for rows in (1, 4):
        cache, gram = new_cache(net), 0.0
        with gdn.recorded_rule(net) as calls:
            for start, hidden[rows], boundary in gdn.segments(net, ids_of(90, rows), 32, cache):
                if boundary:
                    gram = gdn.truncate_rows(cache, ranks, cut_of(net, keep), start, calls, gram)
    assert_close(hidden[1], hidden[4], atol=1e-4 * hidden[4].abs().max().item(), rtol=0)
    assert all((hidden[1][i] - hidden[1][j]).abs().max() > 1e-2 for i in range(4) for j in range(i))


def test_random_modes_differ_between_heads_and_layers_and_are_nested_for_all_ranks():
    net, chosen = random_model(), []
    cache = new_cache(net)
    list(gdn.segments(net, ids_of(40), 64, cache))
    state = normal(16, 16, dtype=torch.float32)
    u, s, wh = torch.linalg.svd(state)
    with torch.inference_mode():
        for there in gdn.states_in(cache):
            there.copy_(state)                                              # the same everywhere
    ranks = [8, 5, 2]
    gdn.truncate_rows(cache, ranks, cut_of(net, "random"), 3, [])
    for rows in gdn.states_in(cache):
        for head in range(4):
            kept = [((u.mT @ rows[row, head] @ wh.mT).diagonal() / s > 0.5) for row in (1, 2, 3)]
            assert [int(k.sum()) for k in kept] == ranks
            assert (kept[1] <= kept[0]).all() and (kept[2] <= kept[1]).all()
            chosen.append(tuple(kept[0].tolist()))
    assert len(set(chosen)) == 8 and tuple(s > s[8]) not in chosen


def test_random_modes_are_drawn_anew_at_each_boundary_and_in_each_document(monkeypatch):
    seeds, run = [], run_of(random_model())
    monkeypatch.setattr(gdn, "truncate_rows", lambda *args: seeds.append(args[3]) or 0.0)
    for document in (ids_of(100), ids_of(101)[:, :100]):
        for group in ([8, 3], [8], [3]):
            loss.measure(run, document, 32, group, cut_of(run.net, "random"))
    assert seeds[:3] == seeds[3:6] == seeds[6:9] and len(set(seeds)) == 6


@pytest.mark.parametrize("dtype, peaked", [(torch.float32, 3), (torch.float32, 12),
                                           (torch.bfloat16, 3)])
def test_the_kl_over_248320_words_is_exact_down_to_a_billionth_and_never_negative(dtype, peaked):
    W, noise = 248_320, [1.0, 1e-2, 1e-4, 4.5e-5] if dtype == torch.float32 else [1.0, 0.1]
    full = peaked * normal(9, W, dtype=torch.float32)
    change = normal(9, W, seed=1, dtype=torch.float32)
    rows = [full, full, full + 5 + 0.1 * change, *(full + x * change for x in noise)]
    logits = torch.stack(rows).to(dtype)                                    # [row, token, word]
    targets = torch.arange(9) * 27_000
    model = SimpleNamespace(get_output_embeddings=lambda: torch.nn.Identity())
    got = gdn.token_losses(model, logits, targets).numpy()
    assert got.dtype == np.float64 and (got[1] >= 0).all() and not got[1, :2].any()
    for row, found in zip(logits, got.swapaxes(0, 1)):
        log_p, log_full = (x.double().log_softmax(-1) for x in (row, logits[0]))
        kl = (log_full.exp() * (log_full - log_p)).sum(-1).numpy()
        np.testing.assert_allclose(found[0], -log_p[range(9), targets].numpy(), rtol=1e-6)
        np.testing.assert_allclose(found[1], kl, rtol=1e-4, atol=1e-14)
        assert found[2].tolist() == (row.argmax(-1) == logits[0].argmax(-1)).tolist()
    if dtype == torch.float32:
        assert 1e-10 < got[1, -1].mean() < 2e-9


def test_loss_kl_and_agreement_are_those_of_a_float64_softmax():
    net = random_model()
    hidden = normal(3, 7, 32, seed=2, dtype=torch.float32)
    hidden[1] = hidden[0] + 0.3 * hidden[1]
    targets = ids_of(7)[0]
    got = gdn.token_losses(net, hidden, targets)
    logits = hidden.double().numpy() @ net.lm_head.weight.detach().double().numpy().T
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    agree = p.argmax(-1) == p[0].argmax(-1)
    assert 0 < agree[1].sum() < 7                                           # both answers occur
    want = -np.log(p[:, range(7), targets]), (p[0] * np.log(p[0] / p)).sum(-1), agree
    for values, oracle in zip(got, want):
        np.testing.assert_allclose(values.numpy(), oracle, atol=2e-5)
    assert gdn.token_losses(net, hidden[:, :0], targets[:0]).shape == (3, 3, 0)


def test_of_words_that_are_equally_likely_each_is_the_most_likely():
    model = SimpleNamespace(get_output_embeddings=lambda: torch.nn.Identity())
    logits = torch.tensor([[0.0, 2, 1], [2, 2, 1], [2.5, 2, 1], [0, 2, 2]]).bfloat16()[:, None]
    got = gdn.token_losses(model, logits, torch.tensor([0]))
    assert got[2, :, 0].tolist() == [1, 1, 0, 1]


def of_heads(measure, *stacks):
    """[layer][head] of measure(one head's entry of each stack), where stacks are [layer][head]."""
    return np.array([[measure(*entries) for entries in zip(*layers)] for layers in zip(*stacks)])


def test_01_measures_what_plain_svds_of_a_plain_run_give(net):
    ids, ranks, T, run = ids_of(113), (3, 2, 1), 32, run_of(net)
    _, other = spectrum.measure(run, ids_of(70), T, ranks, None)
    found, last = spectrum.measure(run, ids, T, ranks, other)
    _, states = plain_run(net, ids, T)
    _, others = plain_run(net, ids_of(70), T)
    calls, _ = record(net, ids)

    def right(S, r):
        return np.linalg.svd(S)[2][:r].T                                    # [K, r]

    def sigma(S):
        return np.linalg.svd(S)[1]

    def effective_rank(S):
        p = sigma(S) / sigma(S).sum()
        return np.exp(-(p[p > 0] * np.log(p[p > 0])).sum())

    def same(values, want, tolerance=1e-4):
        np.testing.assert_allclose(np.array(values), want, atol=tolerance, rtol=tolerance)

    assert found["positions"] == [32, 64, 96]
    same(found["effective_rank"], [of_heads(effective_rank, S) for S in states], 1e-3)
    same(found["spectrum"], np.mean([of_heads(lambda S: sigma(S) / sigma(S).sum(), S)
                                     for S in states], 0))
    queries = [[plain_queries(call).swapaxes(0, 1) for call in layers] for layers in calls[1:]]
    for r in ranks:
        def energy(S):
            return (sigma(S)[:r] ** 2).sum() / (sigma(S) ** 2).sum()

        def readout(S, q):                                                  # [V, K] and [n, K]
            return np.square(q @ plain_cut(S, r).T).sum() / np.square(q @ S.T).sum()

        def overlap(S, S2):
            return np.square(right(S, r).T @ right(S2, r)).sum() / r

        same(found["energy"][str(r)], np.mean([of_heads(energy, S) for S in states], 0))
        same(found["readout"][str(r)],
             np.mean([of_heads(readout, S, q) for S, q in zip(states, queries)], 0))
        same(found["overlap"][str(r)],
             np.mean([of_heads(overlap, *pair) for pair in zip(states, states[1:])], 0), 2e-3)
        same(found["overlap_other"][str(r)],
             np.mean([of_heads(overlap, S, others[-1]) for S in states], 0), 2e-3)
    top = [[right(S, 1) for S in layer] for layer in states[-1]]            # [L, H, K, 1]
    same(np.abs(np.sum(last[..., :1].numpy() * top, 2)), 1)

    draws, null, want = torch.Generator().manual_seed(int(ids.sum())), [None, None], []
    for layers in calls[:3]:                            # the null: other keys, all else the same
        for i, (_, q, k, v, others) in enumerate(layers):
            keys = torch.randn(k.shape, generator=draws)
            keys = keys / keys.norm(dim=-1, keepdim=True)
            assert not (keys[0, 0, 0] == keys[0, 0, 1]).all()
            _, null[i] = gdn.gated_delta_rule(q, keys, v, others["g"], others["beta"], null[i])
        want.append(of_heads(effective_rank, [state[0].numpy() for state in null]))
    same(found["effective_rank_null"], want, 1e-3)


VARIANTS = [("top", "float32"), ("bottom", "float32"), ("read", "float32"), ("read", "int5"),
            ("top", "int8"), ("top", "int2"), ("bottom", "bfloat16"), ("top", "fp8")]


@pytest.mark.parametrize("keep, store", VARIANTS)
def test_03_measures_the_loss_kl_and_agreement_of_a_plain_truncated_run(net, keep, store):
    ids, T, ranks = ids_of(97), 32, [16, 12, 3, 0]                          # 3 x 32, and 1
    edges, bins = loss.after_bins(97, T)
    assert edges == [0, 1, 4, 16, 32]
    mask = torch.tensor([[True] * 3 + [False], [True] * 4])[:, :net.config.linear_num_value_heads]
    item = {"loss": {}, "kl": {}, "agree": {}, "after": {}}
    for group in (ranks[:3], ranks[3:]):
        rows = loss.measure(run_of(net), ids, T, group, cut_of(net, keep, store, mask))
        loss.summarise(item, group, rows, bins)
    tolerance = 1e-4 if store == "float32" else 1e-3            # at a tie, one step to either side
    log_p = {}
    for rank in (None, *ranks):
        name = "full" if rank is None else str(rank)
        logits = plain_run(net, ids, T, rank, keep, mask, store)[0]
        log_p[name] = logits[:-1].double().log_softmax(-1)                  # [T - 1, W]
        losses = -log_p[name][range(96), ids[0, 1:]]
        after = [[] for _ in range(5)]
        for t, value in enumerate(losses.tolist()):
            at = 0 if t < T else 1 + sum(t % T >= edge for edge in (1, 4, 16))
            after[at].append(value)
        assert item["loss"][name] == pytest.approx(losses.mean().item(), abs=tolerance)
        assert item["after"][name] == pytest.approx([np.mean(x) for x in after], abs=5 * tolerance)
        assert [len(x) for x in after] == bins.bincount().tolist()
        assert item["after"][name][0] == item["after"]["full"][0]           # no truncation yet
        if rank is not None:
            p, full = log_p[name], log_p["full"]
            kl = (full.exp() * (full - p)).sum(-1).mean().item()
            agree = (full.argmax(-1) == p.argmax(-1)).double().mean().item()
            assert item["kl"][name] == pytest.approx(kl, abs=tolerance, rel=10 * tolerance)
            assert item["agree"][name] == pytest.approx(agree, abs=100 * tolerance - 0.01 + 1e-9)
    assert list(item["kl"]) == ["16", "12", "3", "0"]
    assert (item["kl"]["16"] == 0) == (store == "float32")


@pytest.mark.parametrize("keep, store", [("read", "float32"), *[("top", x) for x in STORES[1:]]])
def test_a_boundary_after_every_token_works_with_every_store(keep, store):
    net, ids = random_model(), ids_of(14)
    found = loss.measure(run_of(net), ids, 1, [16, 4], cut_of(net, keep, store))
    assert found.shape == (3, 3, 13)
    full = plain_run(net, ids, 1)[0][:-1].double().log_softmax(-1)
    for row, rank in ((1, 16), (2, 4)):
        log_p = plain_run(net, ids, 1, rank, keep, None, store)[0][:-1].double().log_softmax(-1)
        kl = (full.exp() * (full - log_p)).sum(-1).mean().item()
        assert found[1, row].mean().item() == pytest.approx(kl, rel=0.02, abs=1e-6)


@pytest.mark.parametrize("tokens, segment, edges, counts", [
    (14, 1, [0, 1], [1, 12]), (10, 4, [0, 1, 4], [4, 2, 3]), (259, 256, [0, 1, 4, 16, 64, 256],
                                                             [256, 1, 1, 0, 0, 0])])
def test_bins_are_the_first_segment_and_then_by_tokens_since_the_last_boundary(
        tokens, segment, edges, counts):
    found, bins = loss.after_bins(tokens, segment)
    assert found == edges and bins.bincount(minlength=len(edges)).tolist() == counts


# ---- models --------------------------------------------------------------------------------------

def test_a_checkpoint_saved_with_its_vision_tower_loads_as_its_text_model(tmp_path, tokenizer):
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    whole = transformers.Qwen3_5ForConditionalGeneration(transformers.Qwen3_5Config(
        text_config={**SMALL, "vocab_size": 4096}, vision_config=vision)).eval()
    whole.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for outer, inner, dtype in ((None, None, torch.float32), ("bfloat16", None, torch.bfloat16),
                                ("float32", "bfloat16", torch.bfloat16)):
        config = json.loads((tmp_path / "config.json").read_text())
        edit(tmp_path / "config.json", dtype=outer, text_config={**config["text_config"],
                                                                 "dtype": inner})
        run = gdn.open_model(str(tmp_path))
        assert (run.layers, run.state, run.dtype) == ([0, 1], [16, 16], dtype)
    run = gdn.open_model(str(tmp_path), dtype="float32")
    gdn.load_model(run)
    assert type(run.net).__name__ == "Qwen3_5ForCausalLM"
    with torch.no_grad():
        assert_close(run.net(ids_of(20)).logits, whole(ids_of(20)).logits)


def copied(folder, to):
    return Path(shutil.copytree(folder, to))


def edit(path, **values):
    """Change values of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def retensor(folder, change):
    """Change a checkpoint's tensors, a dict by name."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_what_is_no_gdn_model_or_lacks_a_part_is_refused_with_its_reason(tmp_path, small):
    transformers.LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path / "llama")
    alone = copied(small, tmp_path / "a")
    edit(alone / "config.json", layer_types=["linear_attention"] * 3)
    wrong = copied(small, tmp_path / "c")
    edit(wrong / "config.json", vocab_size="many")
    for model, words in ((tmp_path / "llama", "no Gated DeltaNet layers"),
                         (small / "x/y", "hub id"), (alone, "GDN layers alone"),
                         (wrong, "Validation error for field 'vocab_size': .*int"),
                         (tmp_path, "cannot read the config.json")):
        with pytest.raises(gdn.Error, match=words):
            gdn.open_model(str(model))
    for device in ("warp", "cuda:99", "meta"):
        with pytest.raises(gdn.Error, match="not to be had"):
            gdn.open_model(str(small), device=device)
    broken = copied(small, tmp_path / "b")
    (broken / "model.safetensors").write_bytes(b"12345678" * 9)
    with pytest.raises(gdn.Error, match="b/model.safetensors: is it whole"):
        gdn.open_model(str(broken))
    (broken / "model.safetensors").unlink()
    with pytest.raises(gdn.Error, match="b/model.safetensors"):
        gdn.open_model(str(broken))
    edit(broken / "config.json", vocab_size=4095)
    with pytest.raises(gdn.Error, match="embeddings for 4095 tokens.* ids up to 4095"):
        gdn.open_model(str(broken))
    (broken / "tokenizer.json").unlink()
    with pytest.raises(gdn.Error, match="tokenizer"):
        gdn.open_model(str(broken))


def test_a_gpu_is_named_without_its_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", "AB".__getitem__)
    assert gdn.device_name("auto") == "cuda (A + B)"
    value = SimpleNamespace(item=lambda: 0, is_cuda=True, device=SimpleNamespace(index=1))
    monkeypatch.setattr(torch, "zeros", lambda *_, **options: value)
    assert gdn.device_name("cuda:1") == "cuda (B)"


@pytest.mark.parametrize("index", ["", "{}", "[]", '{"weight_map": null}',
                                   '{"weight_map": {"a": 1}}'])
def test_a_broken_index_of_shards_is_named(index, tmp_path, small):
    folder = copied(small, tmp_path / "a")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(gdn.Error, match="cannot read .*a/model.safetensors.index.json"):
        gdn.open_model(str(folder))


@pytest.mark.parametrize("values", [{"linear_num_key_heads": 3}, {"layer_types": [
    "linear_attention", "linear_attention", "sliding_attention"], "sliding_window": 8}])
def test_a_config_that_the_models_classes_cannot_run_is_a_sentence(values, tmp_path, small):
    net = random_model(vocab_size=4096, **values)
    net.save_pretrained(copied(small, tmp_path / "a"))
    with pytest.raises(gdn.Error, match="cannot read a token with .*config.json"):
        gdn.load_model(gdn.open_model(str(tmp_path / "a")))


A_LOG = "model.layers.1.linear_attn.A_log"


@pytest.mark.parametrize("change, words", [
    (lambda x: x.pop(A_LOG), f"lacks weights.*: {A_LOG}"),
    (lambda x: x.update({A_LOG: torch.ones(5)}), rf"other shapes.*{A_LOG}.*\[5\].*\[4\]"),
    (lambda x: x.update({A_LOG + "_scale_inv": torch.ones(1)}), f"not read: {A_LOG}_scale_inv"),
    (lambda x: x.update({"model.visual.patch.weight": torch.ones(1), "mtp.fc.weight": torch.ones(1),
                         "model.vision_tower.fc.weight": torch.ones(1)}), None)])
def test_weights_missing_misshapen_or_unread_are_named_but_for_a_vision_tower_and_mtp(
        change, words, tmp_path, small):
    folder = copied(small, tmp_path / "a")
    retensor(folder, change)
    run = gdn.open_model(str(folder))
    if words:
        with pytest.raises(gdn.Error, match=words):
            gdn.load_model(run)
    else:
        gdn.load_model(run)


@pytest.mark.parametrize("device, dtype, fast", [
    ("cuda (A)", "bfloat16", True), ("cuda (A)", "float16", True), ("cuda (A)", "float32", False),
    ("cpu", "bfloat16", False)])
def test_fast_kernels_are_used_on_a_gpu_in_half_precision_alone(device, dtype, fast, small,
                                                                monkeypatch, capsys):
    run = gdn.open_model(str(small), dtype=dtype)
    run.environment["device"] = device
    for package in ("fla", "causal_conv1d"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    gdn.load_model(run)
    for package in ("fla", "causal_conv1d"):                                # None: not to be had
        assert (package in sys.modules) != fast
        monkeypatch.delitem(sys.modules, package, raising=False)
    assert f"{dtype} on {device}, reference kernels" in capsys.readouterr().err


@pytest.mark.parametrize("change", [
    lambda x, name: x.pop(name), lambda x, name: x.update({name: x[name][:5].clone()}),
    lambda x, name: x.update({name.replace("experts.2.down_proj.weight", "experts.down_proj"):
                              torch.ones(4, 32, 24)})], ids=["missing", "misshapen", "twice"])
def test_experts_that_are_not_what_the_config_says_are_a_sentence(change, tmp_path, tokenizer):
    random_model("qwen3_next", vocab_size=4096).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    retensor(tmp_path, lambda x: change(x, "model.layers.0.mlp.experts.2.down_proj.weight"))
    run = gdn.open_model(str(tmp_path))
    with pytest.raises(gdn.Error, match="config.json") as error:
        gdn.load_model(run)
    assert "above" not in str(error.value)


def test_the_identity_tells_trained_weights_but_hangs_on_neither_dtype_nor_files(tmp_path, small):
    before = gdn.identity(small)
    made = gdn.open_model(str(small), dtype="bfloat16").environment
    assert {part: made[part] for part in before} == before and made["dtype"] == "bfloat16"
    net = AutoModelForCausalLM.from_pretrained(small)
    net.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    save_file({"x": torch.ones(3)}, tmp_path / "shards" / "consolidated.safetensors")   # not read
    assert gdn.identity(tmp_path / "shards")["weights"] == before["weights"]
    tensors, dealt = load_file(small / "model.safetensors"), copied(small, tmp_path / "dealt")
    (dealt / "model.safetensors").unlink()
    for i in (0, 1):                                                        # every other tensor
        save_file(dict([*tensors.items()][i::2]), dealt / f"{i}.safetensors")
    files = {"weight_map": {name: f"{i % 2}.safetensors" for i, name in enumerate(tensors)}}
    (dealt / "model.safetensors.index.json").write_text(json.dumps(files))
    assert gdn.identity(dealt) == before
    for columns in range(4):                                                # wherever they are
        other = copied(small, tmp_path / f"{columns}")
        retensor(other, lambda x: x["lm_head.weight"][:, columns::4].zero_())
        assert gdn.identity(other)["weights"] != before["weights"]
    net.lm_head.weight.data[1000:] *= 1.001
    net.save_pretrained(tmp_path / "trained")
    assert gdn.identity(tmp_path / "trained")["weights"] != before["weights"]


@pytest.fixture
def hub(small, monkeypatch, tmp_path):
    """A hub's cache with some/one-1.5B, and a hub with all of it: its folder, what was asked."""
    folder, asked = tmp_path / "cache" / "models--some--one-1.5B", []
    snapshot = folder / "snapshots" / ("0" * 40)
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    shutil.copytree(small, snapshot)
    for name in ("hf_hub_download", "snapshot_download"):
        def get(*names, real=getattr(gdn.huggingface_hub, name), kind=name, **options):
            if options.get("local_files_only"):
                return real(*names, **options)
            assert kind == "hf_hub_download" or "*.safetensors" in options["allow_patterns"]
            asked.append(kind)
            shutil.copytree(small, snapshot, dirs_exist_ok=True)
            return str(snapshot / "config.json" if len(names) == 2 else snapshot)
        monkeypatch.setattr(gdn.huggingface_hub, name, get)
    monkeypatch.setattr(gdn.huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return snapshot, asked


@pytest.mark.parametrize("lost, fetched", [
    ([], []), (["model.safetensors"], ["snapshot_download"]),
    (["tokenizer_config.json"], ["snapshot_download"]),
    (["."], ["hf_hub_download"])])
def test_a_hub_model_comes_from_the_cache_and_what_is_missing_there_from_the_hub(
        lost, fetched, hub, small, tmp_path, capsys):
    snapshot, asked = hub
    for name in lost:
        shutil.rmtree(snapshot) if name == "." else (snapshot / name).unlink()
    run = gdn.open_model("some/one-1.5B", results=str(tmp_path / "r"))
    assert asked == fetched
    assert capsys.readouterr().err.count("asking the Hugging Face hub for some") == len(fetched)
    assert (run.model, run.output) == ("some/one-1.5B", tmp_path / "r" / "one-1.5B")
    assert run.environment["weights"] == gdn.identity(small)["weights"]
    assert gdn.open_model(str(snapshot)).model == "some/one-1.5B"           # by its folder, too


def test_a_cached_index_whose_shards_are_not_all_there_is_completed(hub):
    snapshot, asked = hub
    (snapshot / "model.safetensors").rename(snapshot / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    gdn.open_model("some/one-1.5B")
    assert asked == ["snapshot_download"]


@pytest.mark.parametrize("model", ["no/such-model", "no--such", "nobody/" + "x" * 120, "a" * 400])
def test_no_hub_within_reach_and_an_impossible_hub_id_are_one_sentence(
        model, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(gdn.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(gdn.huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["02_decay.py", "--model", model])
    with pytest.raises(SystemExit, match="error: .") as end:
        gdn.command(decay.main)
    assert "\n" not in end.value.code


def test_layers_spread_over_memory_and_disk_give_the_losses_of_the_cpu(tmp_path, small):
    found = []
    for device, placement in (("cpu", {}), ("auto", dict(max_memory={"cpu": "1100KB"},
                                                         offload_folder=str(tmp_path)))):
        run = gdn.open_model(str(small), device=device)
        gdn.load_model(run, **placement)
        found.append(loss.measure(run, ids_of(100), 32, [3, 0], cut_of(run.net)))
    assert {"disk", "cpu"} <= {*run.net.hf_device_map.values()}
    assert_close(found[1], found[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["hybrid", "recurrent"])
def test_a_bundled_model_loads_like_any_checkpoint_is_small_and_knows_text(name):
    folder = HERE / "tiny" / name
    files = [path for path in folder.iterdir() if "checkpoint" not in path.name]
    assert sum(path.stat().st_size for path in files) < 5_000_000
    run = gdn.open_model(f"tiny/{name}")
    net = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert type(net).__name__ == "Qwen3_5ForCausalLM" and net.dtype == torch.float32
    assert len(run.layers) * run.config.linear_num_value_heads >= 12 and run.state == [64, 64]
    text = "def f(x):\n    return 12345"
    assert run.tokenizer.decode(gdn.tokenize(run.tokenizer, text)) == text
    assert len(gdn.tokenize(run.tokenizer, "12345")) == 5
    file, _, ids = gdn.documents("stdlib", run.tokenizer, 1, 500)[0]
    assert re.fullmatch(r"[^/]+/[^/]+\.py", file)
    with torch.no_grad():
        assert net(ids, labels=ids).loss < 5                                # guessing costs 8.3


# ---- documents -----------------------------------------------------------------------------------

def with_template(template):
    """The tokenizer of tiny/hybrid, with a post-processor of this template."""
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tiny" / "hybrid")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<|endoftext|>", 0)])
    return tokenizer


@pytest.mark.parametrize("template, before", [("$A <|endoftext|>", []), ("<|endoftext|> $A", [0]),
                                              ("<|endoftext|> $A <|endoftext|>", [0])])
def test_what_a_tokenizer_puts_after_a_text_is_taken_off_and_what_it_puts_before_stays(
        template, before, tmp_path, tokenizer):
    other, text = with_template(template), "import a\n" * 20
    assert other(text).input_ids != tokenizer(text).input_ids
    want = before + tokenizer(text).input_ids
    assert gdn.tokenize(other, text) == want
    (tmp_path / "a.txt").write_text(text)
    [(_, _, ids)] = gdn.documents(str(tmp_path), other, 1, len(want))
    assert ids.tolist() == [want]
    with pytest.raises(gdn.Error, match=f"the longest has {len(want)}"):
        gdn.documents(str(tmp_path), other, 1, len(want) + 1)


def test_documents_come_in_order_from_text_jsonl_gzip_and_folders(tmp_path, tokenizer):
    long, short = "a b c d e f g h " * 20, "too short"
    lines = "\n\n".join(json.dumps({"text": text}) for text in (short, long, long + "x\ud800"))
    (tmp_path / "one.txt").write_text("\ufeff" + long, encoding="utf-8")   # its mark is no token
    (tmp_path / "two.JSONL").write_text(lines)
    (tmp_path / "three.jsonl.GZ").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / ".hidden.txt").write_text(long)
    (tmp_path / "folder").mkdir()
    want = tokenizer(long).input_ids[:50]
    for source, names in {
            "one.txt": ["one.txt"], "two.JSONL": ["two.JSONL:3", "two.JSONL:5"],
            "three.jsonl.GZ": ["three.jsonl.GZ:3"],
            ".": ["one.txt", "three.jsonl.GZ:3", "three.jsonl.GZ:5", "two.JSONL:3"]}.items():
        found = gdn.documents(str(tmp_path / source), tokenizer, len(names), 50)
        assert [name for name, *_ in found] == names
        assert all(ids.tolist() == [want] for *_, ids in found)
        assert found[0][1] == hashlib.sha256(long.encode()).hexdigest()
    with pytest.raises(gdn.Error, match="has 2 of 3 documents .*longest has.* --docs asks for 3"):
        gdn.documents(str(tmp_path / "two.JSONL"), tokenizer, 3, 50)


def test_a_source_that_holds_no_text_says_what_is_read(tmp_path, tokenizer):
    (tmp_path / "empty" / "sub").mkdir(parents=True)
    (tmp_path / "empty" / "sub" / "a.txt").write_text("a text")
    (tmp_path / "empty" / ".hidden.txt").write_text("a text")
    with pytest.raises(gdn.Error, match="holds no text: .*subfolders and hidden"):
        gdn.documents(str(tmp_path / "empty"), tokenizer, 1, 1)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "empty" / "pipe.txt")                              # would wait for ever
    with pytest.raises(gdn.Error, match="holds no text"):
        gdn.documents(str(tmp_path / "empty"), tokenizer, 1, 1)
    pipe = str(tmp_path / "empty" / "pipe.txt")
    for source in (str(tmp_path / "dangling"), "a" * 400, "no/such", pipe):
        with pytest.raises(gdn.Error, match="existing file or folder"):
            gdn.documents(source, tokenizer, 1, 50)


WHOLE = gzip.compress(b'{"text": "a b c"}\n' * 200)
BAD = {"bad.jsonl": [(b'{"text": "fine"}\n' + line, "bad.jsonl, at line 2.*" + says)
                     for line, says in ((b"{", ""), (b"[1]", "list"), (b'{"a": 1, "txt": 2}',
                                        "has a, txt"), (b'{"text": null}', "text"),
                                        (b'{"text": 3}', ""), (b"[" * 100_000, ""))],
       "bad.jsonl.gz": [(WHOLE[:-9], "line 200.*gzipped"), (gzip.compress(b"\xff"), "line 1"),
                        (WHOLE[:30] + bytes(9) + WHOLE[39:], "gzipped if so named"),
                        (b'{"text": "fine"}\n', "line 1.*Not a gzipped file")],
       "bad.parquet": [(b"PAR1\xff\xfe\x00", "bad.parquet as UTF-8.*convert it")],
       "bad.txt": [(b"\xff\xfe\x00", "bad.txt as UTF-8")]}


@pytest.mark.parametrize("file, content, says", [
    (file, content, says) for file, cases in BAD.items() for content, says in cases])
def test_a_bad_line_or_a_broken_file_of_documents_is_named(file, content, says, tmp_path,
                                                           tokenizer):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(gdn.Error, match=says) as error:
        gdn.documents(str(tmp_path / file), tokenizer, 1, 50)
    assert "line 0" not in str(error.value) and len(str(error.value)) < 600


NASTY = {"letters": "x" * 100_000, "pairs": "A" + "ab" * 50_000, "spaces": " " * 100_000,
         "lines": "\n\r\n" * 30_000, "emoji": "\U0001f469\u200d" * 30_000,
         "accents": "e\u0301\u0323" * 30_000, "digits": "0123456789" * 10_000,
         "code": "def f(x):\r\n\treturn 12\r\n" * 4000, "chinese": "\u4f60\u597d" * 40_000,
         "mixed": "word " * 30 + "y" * 99_000 + " end"}


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY)
def test_the_first_tokens_of_a_nasty_text_are_those_of_the_whole(tokenizer, text):
    whole = tokenizer(text).input_ids
    for count in (1, 100, 3000):
        assert gdn.first_tokens(text, tokenizer, count)[:count] == whole[:count]


def test_a_word_cut_at_the_last_token_asked_for_is_read_to_its_end(tokenizer):
    text = " function" * 5000                                               # 9 letters, one token
    whole = tokenizer(text).input_ids
    assert len(whole) == 5000
    for count in range(1020, 1036):                                         # for some, " functi"
        assert gdn.first_tokens(text, tokenizer, count)[:count] == whole[:count]


def test_a_long_text_is_not_tokenised_to_its_end(tokenizer, monkeypatch):
    sizes, tokenize = [], gdn.tokenize
    monkeypatch.setattr(gdn, "tokenize",
                        lambda *args: sizes.append(len(args[1])) or tokenize(*args))
    assert len(gdn.first_tokens("some words of a long text " * 100_000, tokenizer, 1000)) >= 1000
    assert sum(sizes) < 100_000


def test_c4_comes_from_the_cache_else_from_the_hub_in_the_order_of_its_shards(
        tmp_path, tokenizer, monkeypatch):
    asked = []

    def download(repo, file, repo_type, local_files_only=False):
        assert (repo, repo_type) == ("allenai/c4", "dataset")
        asked.append((file, local_files_only))
        if local_files_only:
            raise gdn.huggingface_hub.errors.LocalEntryNotFoundError("not here")
        path = tmp_path / Path(file).name
        path.write_bytes(gzip.compress(json.dumps({"text": "word " * 30}).encode()))
        return str(path)

    monkeypatch.setattr(gdn.huggingface_hub, "hf_hub_download", download)
    names = [f"en/c4-validation.0000{i}-of-00008.json.gz" for i in (0, 1)]
    found = gdn.documents("c4", tokenizer, 2, 20)
    assert [name for name, *_ in found] == [f"{name}:1" for name in names]
    assert asked == [(name, local) for name in names for local in (True, False)]


def test_the_held_out_files_and_the_training_files_are_disjoint_and_both_plenty():
    held, trained = gdn.stdlib_files(True), gdn.stdlib_files(False)
    assert not set(held) & set(trained) and len(held) > 50 and len(trained) > 200
    assert not any({"test", "site-packages"} & set(path.parts) for path in held + trained)
    for files, is_held in ((held, True), (trained, False)):
        names = [path.relative_to(sysconfig.get_paths()["stdlib"]).as_posix() for path in files]
        hashes = [hashlib.sha256(name.encode()).hexdigest() for name in names]
        assert hashes == sorted(hashes)
        assert all((int(digest, 16) % 5 == 0) == is_held for digest in hashes)


# ---- result files --------------------------------------------------------------------------------

STAGES = pytest.mark.parametrize("stage", MODULES[:4], ids=SCRIPTS[:4])


@pytest.fixture
def start(small, texts, tmp_path, monkeypatch):
    """start(stage, **flags) runs a stage on the small model and returns its result file."""
    monkeypatch.setitem(ruler.NEW_TOKENS, "niah", 4)
    monkeypatch.setitem(ruler.NEW_TOKENS, "vt", 4)

    def start(stage, folder="results", **flags):
        common = {"model": str(small), "results": str(tmp_path / folder), "segment": 64}
        if stage is ruler:
            common |= {"tasks": ("niah_single_1",), "lengths": (150,), "samples": 3}
        else:
            common |= {"documents": texts, "docs": 3, "tokens": 150}
        if "ranks" in stage.main.__annotations__:
            common["ranks"] = (8, 2) if stage is spectrum else (8, 2, 0)
        stage.main(**{**common, **flags})
        files = sorted((tmp_path / folder).glob("*/**/*.json"), key=os.path.getmtime)
        return files[-1]
    return start


def items_of(path):
    """The items of a result file, without their times."""
    items = json.loads(path.read_text())["items"]
    assert all(item.pop("seconds")["total"] > 0 for item in items)
    return items


@STAGES
def test_a_killed_run_goes_on_after_what_is_there_to_the_numbers_of_a_whole_one(
        stage, start, small, monkeypatch, capsys):
    more = {"samples": 5} if stage is ruler else {"docs": 5}
    whole = start(stage, "whole", **more)
    measure, calls = stage.measure, []

    def killed(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(stage, "measure", killed)
    with pytest.raises(KeyboardInterrupt):
        start(stage)
    path = start(stage)
    again = stage is spectrum                           # which runs the first document once more
    assert items_of(path) == items_of(whole)[:3] and len(calls) == 4 + again
    shown = capsys.readouterr()
    assert "1 to measure" in shown.err and shown.out.count(f"{small}") == 2         # two tables
    assert items_of(start(stage, **more)) == items_of(whole) and len(calls) == 6 + 2 * again
    one, other = (json.loads(file.read_text()) for file in (path, whole))
    del one["arguments"]["results"], other["arguments"]["results"]
    assert {**one, "items": 0} == {**other, "items": 0} and len(other["items"]) == 5
    monkeypatch.setattr(gdn, "load_model", lambda run: pytest.fail("it was loaded again"))
    before = path.read_bytes()
    start(stage, **more)
    assert "is complete" in capsys.readouterr().err
    start(stage)                                                            # fewer is there, too
    assert path.read_bytes() == before


def test_01_compares_with_the_last_boundary_of_the_first_document_alone(start):
    first, *others = items_of(start(spectrum))
    assert "overlap_other" not in first and all("overlap_other" in item for item in others)


@pytest.mark.parametrize("keep", typing.get_args(gdn.Keep))
def test_ranks_give_the_same_numbers_whichever_run_beside_them(keep, start):
    single = items_of(start(loss, "single", rows=1, keep=keep))
    together = items_of(start(loss, "together", keep=keep))
    for item, other in zip(single, together):
        for key in ("loss", "kl", "agree"):
            assert item[key] == pytest.approx(other[key], abs=1e-5)


@pytest.mark.parametrize("flags, named", [
    (dict(dtype="bfloat16"), "dtype float32, not bfloat16"), (dict(ranks=(3,)), "ranks"),
    (dict(tokens=140), "tokens 150, not 140"), ("segment", "segment"), ("store", "store"),
    ("keep", "keep"), ("device", "device"), ("torch", "torch"), ("transformers", "transformers")])
def test_a_result_made_with_something_else_is_refused_with_its_name_and_left_as_it_is(
        flags, named, start):
    path = start(loss, docs=1)
    if isinstance(flags, str):                                              # what another file had
        record = json.loads(path.read_text())
        record["depends"][flags], flags = "other", {}
        path.write_text(json.dumps(record))
    before = path.read_bytes()
    with pytest.raises(gdn.Error, match=f"made with {named}"):
        start(loss, docs=2, **flags)
    assert path.read_bytes() == before


CHANGES = [
    ("weights", lambda model: retensor(model, lambda x: x[A_LOG].mul_(1.01))),
    ("config", lambda model: edit(model / "config.json", rms_norm_eps=0.5)),
    ("config", lambda model: edit(model / "generation_config.json", eos_token_id=7)),
    ("tokenizer", lambda model: edit(model / "tokenizer.json", normalizer={"type": "Lowercase"})),
    ("tokenizer", lambda model: edit(model / "tokenizer_config.json", eos_token="a")),
    ("tokenizer", lambda model: (model / "special_tokens_map.json").write_text("{}")),
    ("tokenizer", lambda model: (model / "added_tokens.json").write_text("{}")),
    ("tokenizer", lambda model: (model / "tokenizer.model").write_text("x"))]


@pytest.mark.parametrize("part, change", CHANGES)
def test_another_model_at_the_same_place_is_refused_with_the_part_that_is_another(
        part, change, start, small, tmp_path):
    model = copied(small, tmp_path / "model")
    path = start(decay, model=str(model), docs=1)
    before = path.read_bytes()
    change(model)
    for stage in (decay, loss):                                             # nor beside its results
        with pytest.raises(gdn.Error, match=f"with another {part} "):
            start(stage, model=str(model), docs=2)
    assert path.read_bytes() == before and len([*path.parent.iterdir()]) == 1
    (path.parent / "04_ruler").mkdir()
    path.rename(path.parent / "04_ruler" / "vt_99.json")                    # nor of its tasks
    with pytest.raises(gdn.Error, match="04_ruler/vt_99.json comes from .* with another"):
        start(decay, model=str(model))


def test_the_same_texts_under_another_path_go_on_and_others_do_not(
        start, texts, tmp_path, monkeypatch):
    start(loss, docs=1)
    (tmp_path / "moved").mkdir()
    shutil.copy(texts, tmp_path / "moved" / "other.jsonl")
    monkeypatch.chdir(tmp_path)
    path = start(loss, docs=2, documents="moved/")
    assert [item["name"] for item in items_of(path)] == ["texts.jsonl:1", "other.jsonl:2"]
    lines = Path(texts).read_text().splitlines()
    (tmp_path / "moved" / "other.jsonl").write_text("\n".join(lines[1:]))
    with pytest.raises(gdn.Error, match="holds another document than other.jsonl:1"):
        start(loss, docs=3, documents="moved")


def test_damage_nan_and_another_runs_change_are_refused(start, monkeypatch):
    path = start(loss, docs=1)
    before = path.read_bytes()
    wrong = [(key, value) for key in ("items", "arguments", "depends") for value in (None, [None])]
    for damaged in (before[:300], b"[]", b'{"items": []}', b"\xff",
                    before.replace(b'"kl": {', b'"kl": {"9": NaN, '),
                    *(json.dumps({**json.loads(before), key: x}).encode() for key, x in wrong)):
        path.write_bytes(damaged)
        with pytest.raises(gdn.Error, match="cannot be read as a result file"):
            start(loss, docs=2)
    path.write_bytes(before)
    measure = loss.measure
    monkeypatch.setattr(loss, "measure", lambda *args: measure(*args) * torch.nan)
    with pytest.raises(gdn.Error, match="NaN or infinite"):
        start(loss, docs=2)
    assert path.read_bytes() == before

    def meanwhile(*args):
        path.write_text(json.dumps({**json.loads(before), "items": theirs}))
        return measure(*args)

    monkeypatch.setattr(loss, "measure", meanwhile)
    ours = json.loads(before)["items"]
    for theirs in ([], [{**ours[0], "kl": {}}], [*ours, ours[0]]):
        path.write_bytes(before)
        with pytest.raises(gdn.Error, match="changed by another run"):
            start(loss, docs=2)
        assert json.loads(path.read_text())["items"] == theirs
    assert [file.name for file in path.parent.iterdir()] == [path.name]     # nothing temporary


@pytest.mark.parametrize("stage, tokens", [(loss, 66), (spectrum, 129)], ids=["03", "01"])
def test_the_shortest_document_that_a_stage_takes_has_something_to_measure_and_to_report(
        stage, tokens, start, drawn):
    with pytest.raises(gdn.Error, match=f"--tokens {tokens - 1} holds"):
        start(stage, tokens=tokens - 1)
    path = start(stage, tokens=tokens, docs=1)
    record = json.loads(path.read_text())
    report.main(results=str(path.parent.parent))
    if stage is loss:
        ticks = [figure.axes[0].get_xticklabels() for figure in drawn]
        assert ["first\nsegment", "0"] in [[tick.get_text() for tick in row] for row in ticks]
        assert record["after_counts"] == [64, 1, 0, 0, 0]
        assert record["items"][0]["after"]["0"][1] != record["items"][0]["after"]["full"][1]
    else:
        assert record["items"][0]["positions"] == [64, 128]


def test_each_item_has_its_own_seconds(tmp_path, monkeypatch):
    clock = iter([10.0, 12.0, 15.0, 20.0, 26.0])
    monkeypatch.setattr(gdn.time, "perf_counter", lambda: next(clock))
    run, record = run_of(random_model()), {"script": "", "items": [], "arguments": {},
                                           "depends": {}, "environment": {"weights": ""}}
    run.began = 9.0
    with gdn.at_boundary(run):                                              # from 10 to 12
        pass
    for _ in range(2):                                                      # at 15 and at 20
        gdn.add_item(run, tmp_path / "a.json", record, {})
    assert [item["seconds"] for item in gdn.read_results(tmp_path / "a.json")["items"]] == [
        {"total": 6.0, "truncate": 2.0}, {"total": 5.0, "truncate": 0.0}]


def test_a_file_that_is_being_written_is_the_old_one_until_it_is_whole(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")

    def killed(temporary):
        temporary.write_text("ne")
        assert path.read_text() == "old"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gdn.write_whole(path, killed)
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]
    gdn.write_whole(path, lambda temporary: temporary.write_text("new"))
    assert path.read_text() == "new" and [*tmp_path.iterdir()] == [path]


@STAGES
def test_a_results_folder_that_cannot_be_written_is_known_before_the_model_loads(
        stage, start, monkeypatch, tmp_path):
    monkeypatch.setattr(gdn, "load_model", lambda run: pytest.fail("the model was loaded"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):                                            # command says it
        start(stage, "file/results")
    monkeypatch.setattr(gdn.tempfile, "TemporaryFile", lambda dir: open(dir / "no" / "file"))
    with pytest.raises(OSError):                                            # another's folder
        start(stage, "mine")


def test_variants_stand_side_by_side_in_the_documented_names_and_keys(start, tmp_path):
    folder = start(decay).parent
    record = json.loads(start(loss, heads="upto-99999", keep="random", store="int4", docs=1,
                              ranks=(16, 8, 0)).read_text())
    assert (record["script"], record["state"], record["layers"]) == ("03_loss", [16, 16], [0, 1])
    assert record["heads_cut"] == [8, 8]
    assert record["bytes"] == {"16": 160, "8": 160, "0": 0}
    assert set(record["environment"]) == {"torch", "transformers", "device", "dtype", "weights",
                                          "config", "tokenizer"}
    assert record["after_bins"] == [0, 1, 4, 16, 64] and sum(record["after_counts"]) == 149
    assert set(record["arguments"]) == {
        "model", "documents", "docs", "tokens", "segment", "ranks", "keep", "heads", "store",
        "rows", "device", "dtype", "results"} and record["arguments"]["ranks"] == [16, 8, 0]
    start(loss, docs=1, segment=64)
    start(loss, docs=1, tokens=300, segment=256, documents="stdlib")
    start(loss, docs=1, keep="read", store="fp8")
    start(spectrum, docs=1)
    assert sorted(path.name for path in folder.glob("**/*.json")) == [
        "01_spectrum.segment=64.json", "02_decay.json",
        "03_loss.heads=upto-99999.keep=random.store=int4.segment=64.json", "03_loss.json",
        "03_loss.keep=read.store=fp8.segment=64.json", "03_loss.segment=64.json"]


def test_a_control_a_store_and_a_choice_of_heads_change_the_numbers(start):
    start(decay)
    full, changes = items_of(start(loss))[0]["loss"], set()
    for other in ({"keep": "bottom"}, {"keep": "random"}, {"keep": "read"}, {"store": "int4"},
                  {"heads": "over-3"}, {"dtype": "bfloat16", "folder": "other"}):
        loss_ = items_of(start(loss, **other))[0]["loss"]
        assert (loss_["full"] == full["full"]) == ("dtype" not in other)
        changes.add(round(loss_["8"] - full["8"], 7))
    assert len(changes) == 6 and 0 not in changes


def test_the_chosen_heads_have_the_horizon_of_the_mean_log_decay(tmp_path):
    run = SimpleNamespace(output=tmp_path, layers=[0, 2], model="a/b",
                          config=SimpleNamespace(linear_num_value_heads=2))
    assert gdn.chosen_heads(run, "all").tolist() == [[True, True], [True, True]]
    with pytest.raises(gdn.Error, match="run 02_decay.py first"):
        gdn.chosen_heads(run, "over-4")
    items = [{"log_a": [[-1.0, -0.125], [-0.5, 0.0]]}, {"log_a": [[-0.5, -0.125], [-0.5, 0.0]]}]
    (tmp_path / "02_decay.json").write_text(json.dumps(
        {"script": "", "items": items, "arguments": {}, "depends": {},
         "environment": {"weights": ""}}))
    assert gdn.chosen_heads(run, "over-2").tolist() == [[False, True], [False, True]]
    assert gdn.chosen_heads(run, "upto-2").tolist() == [[True, False], [True, False]]
    assert gdn.chosen_heads(run, "over-8").tolist() == [[False, False], [False, True]]
    for none in ("upto-1", "over-" + "9" * 5000):
        with pytest.raises(gdn.Error, match=f"{none} is no head .* 1 to inf"):
            gdn.chosen_heads(run, none)


def test_a_run_does_not_go_on_with_other_heads_when_02_has_other_horizons(start):
    decays = start(decay)
    record = json.loads(decays.read_text())
    logs = [[[-1.0, -0.01, -1.0, -1.0], [-1.0] * 4], [[-0.01] + [-1.0] * 3, [-1.0] * 4]]
    for log_a, docs in zip(logs, (1, 2)):                                   # one head, another head
        record["items"] = [{**record["items"][0], "log_a": log_a}]
        decays.write_text(json.dumps(record))
        if docs == 1:
            path = start(loss, heads="over-9", docs=1)
            before = path.read_bytes()
        else:
            words = r"heads of 02_decay.json \[\[0, 1\]\], not \[\[0, 0\]\]"
            with pytest.raises(gdn.Error, match=words):
                start(loss, heads="over-9", docs=2)
    assert path.read_bytes() == before and json.loads(before)["heads_cut"] == [1, 8]


@pytest.mark.parametrize("ranks, store, want", [
    ((48, 12, 0), "float32", [12, 0]), ((48, 12, 0), "int8", [16, 12, 0]),
    ((3, 8, 3), "int8", [8, 3]), ((16,), "float32", [16]), ((17,), "int8", None)])
def test_ranks_are_sorted_and_the_default_ones_have_all_modes_where_states_are_stored(
        ranks, store, want):
    run = SimpleNamespace(state=[24, 16], model="m")
    if want:
        assert gdn.check_ranks(run, ranks, (48, 12, 0), store) == want
    else:
        with pytest.raises(gdn.Error, match="17 is beyond the 16 modes"):
            gdn.check_ranks(run, ranks, (48, 12, 0), store)


def test_horizons_are_measured_in_float32_and_all_else_as_the_checkpoint_says(
        start, small, tmp_path):
    half = copied(small, tmp_path / "half")
    edit(half / "config.json", dtype="bfloat16")
    for stage in MODULES[:4]:
        record = json.loads(start(stage, model=str(half), docs=1).read_text() if stage is not ruler
                            else start(ruler, model=str(half), samples=1).read_text())
        assert record["environment"]["dtype"] == ("float32" if stage is decay else "bfloat16")


def test_a_text_longer_than_the_model_is_made_for_is_told(start, small, tmp_path, capsys):
    short = copied(small, tmp_path / "short")
    edit(short / "config.json", max_position_embeddings=149)
    start(decay, model=str(short), docs=1)
    assert "made for at most 149 tokens" in capsys.readouterr().err
    start(decay, docs=1)
    assert "made for" not in capsys.readouterr().err


def test_a_mean_and_its_standard_error_have_ddof_1_and_are_shown_to_its_digits():
    assert gdn.mean_se([1.0, 2.0, 6.0]) == (3.0, pytest.approx((7 / 3) ** 0.5))
    assert gdn.mean_se([4.0]) == (4.0, None)
    for values, shown in {
            (1.0, 2.0, 6.0): "+3.0 ± 1.5", (0.005, 0.006): "+0.00550 ± 0.00050",
            (0.00123, 0.0011): "+0.001165 ± 0.000065", (100.0, 0.0, 0.0): "+33 ± 33",
            (0.0904, 0.1096): "+0.1000 ± 0.0096", (0.09004, 0.10996): "+0.100 ± 0.010",
            (1e-9, 3e-9): "+2.0e-09 ± 1.0e-09", (-10.0, -35.0): "-22 ± 12",
            (0.0, 0.0): "+0 (none of 2)", (-5.0,): "-5 (all of 1)",
            (0.1, 0.1, 0.1): "+0.1 (all of 3)"}.items():
        assert gdn.with_error(values) == shown


# ---- 04: the samples -----------------------------------------------------------------------------

@pytest.mark.parametrize("task", ruler.TASKS)
def test_samples_fill_the_length_never_exceed_it_and_hide_each_answer_once(task, tokenizer):
    places = set()
    for length, count in ((512, 10), (1024, 3), (2048, 2), (4096, 1)):
        for index in range(count):
            sample = ruler.make_sample(task, length, index, 0, tokenizer)
            prompt, references = sample["prompt"], sample["references"]
            assert sample["ids"] == tokenizer(prompt).input_ids
            tokens = len(sample["ids"]) + ruler.NEW_TOKENS[ruler.family(task)]
            wide = task == "niah_multikey_3" and length <= 2048             # long needles
            assert (0.7 if wide else 0.95) * length <= tokens <= length
            assert not prompt.endswith(" ")
            context = prompt[:prompt.rindex("\n")]
            if length >= 2048 and task in ("vt", "cwe"):
                example, context = context.split("\n\n")
                assert not any(re.search(rf"\b{word}\b", example) for word in references)
            CHECKS[ruler.family(task)](task, context, prompt, references, length)
            places.add(context.index(references[0]) * 4 // len(context))
            assert not any(a != b and a in b for a in references for b in references)
    if task not in ("cwe", "fwe"):                                          # there it is all over
        assert len(places) > 1


def check_niah(task, context, prompt, references, length):
    needles = re.findall(r"The code of (\S+) is (\S+)\.", context)
    plural = r" The codes of (.*) are$" if len(references) > 1 else r" The code of (.*) is$"
    asked, = re.findall(plural, prompt)
    assert f"?{prompt[prompt.rindex(' The code'):]}" in prompt
    asked = asked.replace(" and ", ", ").split(", ")
    assert len(asked) == (4 if task == "niah_multiquery" else 1)
    assert sorted(value for name, value in needles if name in asked) == sorted(references)
    assert len({value for _, value in needles}) == len(needles)
    names = len({name for name, _ in needles})
    if task in ("niah_multikey_2", "niah_multikey_3"):
        assert names == len(needles) >= 2
        assert re.sub(r"The code of \S+ is \S+\.\s?", "", context).count(" ") == 7      # no prose
    else:
        four = {"niah_multikey_1": (4, 4), "niah_multiquery": (4, 4), "niah_multivalue": (4, 1)}
        assert (len(needles), names) == four.get(task, (1, 1))
        assert ("The river is wide." in context) == (task == "niah_single_1")
    shape = {"niah_single_3": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"}
    shape["niah_multikey_3"] = shape["niah_single_3"]
    for value in references:
        assert context.count(value) == 1 and re.fullmatch(shape.get(task, r"\d{7}"), value)


def check_vt(task, context, prompt, references, length):
    value = re.findall(r"Which variables hold (\d{5})\?", prompt)[-1]
    assert re.findall(r"VAR ([A-Z]{5}) = ", context) == references and len(references) == 5
    assert re.findall(r" = (?:VAR )?(\w+)\.", context) == [value, *references[:-1]]
    for name in references:                         # nowhere but in its own and the next assignment
        assert context.upper().count(name) == (1 if name == references[-1] else 2)


def check_cwe(task, context, prompt, references, length):
    words = re.findall(r"^\d+ (\S+)$", context, re.MULTILINE)
    counts = {word: words.count(word) for word in set(words)}
    common, rare = (6, 1) if length < 4096 else (30, 3)
    assert len(references) == 10 and all(counts[word] == common for word in references)
    assert all(n == rare for word, n in counts.items() if word not in references)
    assert not any(asked in word for asked in references for word in counts if word != asked)
    numbers = re.findall(r"^(\d+) ", context, re.MULTILINE)
    assert list(map(int, numbers)) == list(range(1, len(words) + 1))


def check_fwe(task, context, prompt, references, length):
    words = context.split("\n")[1].split()
    counts = sorted(((words.count(word), word) for word in set(words)), reverse=True)
    assert [word for _, word in counts[:4]] == ["...", *references]
    assert len(counts) <= max(length // 50, 4) and (len(counts) > 10 or length < 2048)
    assert counts[1][0] > counts[2][0] > counts[3][0] > (counts[4][0] if len(counts) > 4 else 0)
    total = sum(n for n, _ in counts)
    assert counts[0][0] / total == pytest.approx(0.63, abs=0.06)            # 1 / zeta(2), rounded
    assert all(re.fullmatch("[a-z]{6}", word) for _, word in counts[1:])


CHECKS = {"niah": check_niah, "vt": check_vt, "cwe": check_cwe, "fwe": check_fwe}


@pytest.mark.parametrize("task", ruler.TASKS)
def test_the_sample_is_the_largest_a_plain_search_finds_in_a_few_guesses(
        task, tokenizer, monkeypatch):
    sized_sample, calls = ruler.sized_sample, []

    def counted(*args):
        calls.append(args)
        return sized_sample(*args)

    monkeypatch.setattr(ruler, "sized_sample", counted)
    ruler.make_sample(task, 16384, 0, 0, tokenizer)
    assert len(calls) <= 8
    for length, index in ((300, 0), (700, 1), (5000, 2)):
        def fits(size):
            sample = sized_sample(task, length, index, 7, tokenizer, size)
            return len(sample["ids"]) + ruler.NEW_TOKENS[ruler.family(task)] <= length
        low = ruler.SMALLEST[ruler.family(task)]
        while fits(2 * low):
            low *= 2
        high = 2 * low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        sample = ruler.make_sample(task, length, index, 7, tokenizer)
        assert sample == sized_sample(task, length, index, 7, tokenizer, low)
    prompts = {ruler.make_sample(task, 600, i, seed, tokenizer)["prompt"]
               for i in (0, 1) for seed in (0, 1)}
    assert len(prompts) == 4                                                # all of them others


def test_all_tasks_run_and_the_bar_ends_at_what_there_is_to_read(start, monkeypatch):
    ends = []
    bar = SimpleNamespace(n=0, set_description=str, close=lambda: ends.append(bar.n))
    bar.update = lambda tokens: setattr(bar, "n", bar.n + tokens)
    monkeypatch.setattr(gdn, "tqdm", lambda **options: bar.__dict__.update(options) or bar)
    monkeypatch.setattr(ruler, "generate", lambda run, *_: [[]] * 4)
    path = start(ruler, tasks=("all",), lengths=(700,), samples=1, rows=2)
    assert len([*path.parent.iterdir()]) == len(ruler.TASKS) and bar.n == bar.total == 11 * 2 * 700
    for stage in MODULES[:3]:
        bar.n = 0
        start(stage)
        assert bar.n == bar.total == 3 * 150
    assert ends == [11 * 2 * 700, 450, 450, 450]                            # before their tables


def test_needles_and_assignments_keep_their_order_even_in_a_haystack_of_four_sentences():
    for seed in range(300):
        context, [(_, _, names)] = ruler.vt(4, Random(seed))
        assert re.findall(r"VAR ([A-Z]{5}) = ", context) == names


def test_the_solved_example_gives_no_answer_away():
    for seed in range(40):
        context, [(_, _, asked)] = ruler.build("cwe", 200, Random(seed), 4096)
        example, listed = (set(re.findall(r"^\d+ (\S+)$", part, re.MULTILINE))
                           for part in context.split("\n\n"))
        assert len(example) == 40 and not example & listed
        for length in (2048, 4096):
            part = ruler.build("cwe", 200, Random(seed), length)[0].split("\n\n")[0]
            words = re.findall(r"^\d+ (\S+)$", part, re.MULTILINE)
            often, times = (3, 1) if length == 2048 else (10, 3)
            assert sorted(map(words.count, set(words)))[-11:] == [times] + [often] * 10
            assert len(words) == 10 * often + (10 if length == 2048 else 30) * times
        assert not any(word in other or other in word for word in asked for other in example)
    _, [(ask, _, names)] = ruler.vt(4, Random(0), avoid=["-"] * 6)
    avoid = [*names, re.search(r"\d{5}", ask)[0]]
    _, [(other_ask, _, others)] = ruler.vt(4, Random(0), avoid=avoid)       # the same draws
    assert not {*avoid} & {*others, re.search(r"\d{5}", other_ask)[0]} and len(others) == 5


def test_common_words_beyond_the_list_are_filled_with_pairs():
    context, [(_, _, asked)] = ruler.cwe(9000, Random(0))
    words = re.findall(r"^\d+ (\S+)$", context, re.MULTILINE)
    assert len(set(words)) == 9010 and len(words) == 27300 and any("-" in word for word in words)
    assert not any(word in other for word in asked for other in set(words) - {word})


def test_the_score_is_the_share_of_references_found_whatever_their_case():
    assert ruler.score("vt", "they are abcde FGHIJ.", ["ABCDE", "FGHIJ", "KLMNO", "PQRST"]) == 50
    assert ruler.score("niah_single_1", "1234567", ["1234567"]) == 100
    assert ruler.score("cwe", "", ["a", "b"]) == 0
    assert ruler.score("cwe", "artist", ["art", "artist"]) == 100           # as in RULER
    assert ruler.score("qa_1", "in Paris", ["paris", "the city of Paris"]) == 100   # any wording
    assert ruler.score("cwe", "in Paris", ["paris", "rome"]) == 50


@pytest.mark.parametrize("task", ruler.TASKS)
def test_a_length_too_short_for_a_task_is_told_with_what_its_smallest_prompts_take(
        task, start, tokenizer, monkeypatch):
    monkeypatch.setattr(gdn, "load_model", lambda run: pytest.fail("it was loaded"))
    sizes = [len(ruler.sized_sample(task, 20, index, 0, tokenizer,
                                    ruler.SMALLEST[ruler.family(task)])["ids"])
             for index in range(3)]
    needed = max(sizes) + ruler.NEW_TOKENS[ruler.family(task)]
    with pytest.raises(gdn.Error, match=f"too short for {task}: .* up to {needed} tokens"):
        start(ruler, tasks=(task,), lengths=(20,), segment=8)


def test_a_length_whose_prompt_crosses_no_boundary_is_told(start):
    with pytest.raises(gdn.Error, match="no prompt beyond the first boundary"):
        start(ruler, lengths=(150,), segment=146)


# ---- 04: generation ------------------------------------------------------------------------------

def generate(net, ids, ranks, new_tokens, segment, stop=frozenset(), **cut):
    return ruler.generate(run_of(net), ids, ranks, segment, cut_of(net, **cut), new_tokens, stop)


@pytest.mark.parametrize("segment, ranks", [(60, [0]), (50, [2]), (7, [1, 2])])
def test_row_0_generates_what_transformers_generates_token_for_token(net, segment, ranks):
    ids = ids_of(61)
    want = net.generate(ids, do_sample=False, max_new_tokens=25, eos_token_id=-1)[0, 61:].tolist()
    answers = generate(net, ids, ranks, 25, segment)
    assert answers[0] == want and [len(answer) for answer in answers] == [25] * (1 + len(ranks))


def test_a_row_ends_at_its_own_end_of_text_token_and_the_others_go_on(monkeypatch):
    net, ids = random_model(), ids_of(61)
    whole = generate(net, ids, [3, 0], 25, segment=32)
    stop = whole[0][4]
    cut = [answer[:answer.index(stop)] if stop in answer else answer for answer in whole]
    assert generate(net, ids, [3, 0], 25, segment=32, stop={stop}) == cut
    assert len(cut[0]) < 5 and max(map(len, cut)) > len(cut[0])
    head = iter([net.lm_head])                      # one token a row, and no head for a second one
    monkeypatch.setattr(net, "get_output_embeddings", lambda: next(head))
    assert generate(net, ids, [3, 0], 25, segment=32, stop={*range(256)}) == [[], [], []]


@pytest.mark.parametrize("keep", ["top", "bottom", "read"])
def test_boundaries_in_prompt_and_answer_truncate_as_a_plain_loop_does(net, keep):
    ids, mask = ids_of(60), torch.ones(2, net.config.linear_num_value_heads, dtype=torch.bool)
    mask[1, 0] = False
    got = generate(net, ids, [3, 0], 12, 35, keep=keep, heads=mask)         # 35, and 70 of 71
    for row, rank in ((1, 3), (2, 0)):
        tokens = ids[0].tolist()
        while len(tokens) < 72:
            logits, _ = plain_run(net, torch.tensor([tokens]), 35, rank, keep, mask)
            tokens.append(logits[-1].argmax().item())
        assert got[row] == tokens[60:]
    assert got[0] != got[1] != got[2]


def test_04_does_not_go_on_with_another_seed_or_other_ranks_or_words(start, monkeypatch):
    start(ruler, samples=1)
    for words, flags in (("seed 0, not 1", {"seed": 1}), ("ranks", {"ranks": (8, 2)})):
        with pytest.raises(gdn.Error, match=words):
            start(ruler, samples=6, **flags)
    monkeypatch.setattr(ruler, "WORDS", ruler.WORDS[1:])
    with pytest.raises(gdn.Error, match="made with data"):
        start(ruler, samples=6)


@pytest.mark.parametrize("keep", ["top", "random"])
def test_04_gives_each_rank_the_same_answer_whichever_run_beside_it(keep, start):
    single = items_of(start(ruler, "single", rows=1, keep=keep))
    assert single == items_of(start(ruler, "together", keep=keep))


def test_the_table_of_04_shows_changes_and_not_scores(capsys):
    items = [{"scores": {"full": 50.0, "8": 60.0, "2": 20.0}},
             {"scores": {"full": 100.0, "8": 100.0, "2": 40.0}}]
    ruler.print_table([{"model": "a/m", "depends": {"task": "vt", "length": 512},
                        "bytes": {"8": 1, "2": 1}, "items": items}])
    text = capsys.readouterr().out
    assert re.search(r"vt +512 +2 +75\.0 +8: \+5\.0 ± 5\.0 +2: -45 ± 15", text), text


# ---- 04: prompts of RULER's own files ------------------------------------------------------------

def write_data(file, task, tokenizer, length=200, **changes):
    """Two samples as RULER's generator writes them; a change of None leaves a field out."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(2):
        sample = ruler.make_sample(task, length, index, 3, tokenizer)
        at = sample["prompt"].rindex(" The ")
        row = {"index": index, "input": sample["prompt"][:at], "outputs": sample["references"],
               "answer_prefix": sample["prompt"][at:], "length": length, **changes}
        row = {key: value for key, value in row.items() if value is not None}
        lines.append(json.dumps(row, ensure_ascii=False))
    file.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return str(file)


@pytest.fixture
def answered(monkeypatch, tokenizer):
    """The prompts that are run; each is answered in every row with its last code."""
    prompts = []

    def answer(run, ids, ranks, segment, cut, new_tokens, stop):
        assert stop == {tokenizer.eos_token_id, 5, 9}
        prompts.append((tokenizer.decode(ids[0]), new_tokens))
        code = re.findall(r"\d{5,7}", prompts[-1][0])[0]
        return [tokenizer(f" it is {code}").input_ids] * (1 + len(ranks))

    monkeypatch.setattr(ruler, "generate", answer)
    return prompts


def test_rulers_own_tree_runs_as_it_is_length_by_length(start, tokenizer, tmp_path, answered):
    tree = tmp_path / "tree"
    for length in (200, 300):
        for task in ("niah_single_2", "vt"):
            file = tree / str(length) / "data" / task / "validation.jsonl"
            write_data(file, task, tokenizer, length)
    path = start(ruler, data=str(tree), tasks=ruler.DEFAULT_TASKS, lengths=(), samples=25)
    names = {f"{task}_{length}.segment=64.data=ruler.json"
             for task in ("niah_single_2", "vt") for length in (200, 300)}
    assert {file.name for file in path.parent.iterdir()} == names
    made = [ruler.make_sample(task, length, i, 3, tokenizer) for length in (200, 300)
            for task in ("niah_single_2", "vt") for i in range(2)]
    assert answered == [(sample["prompt"], 4) for sample in made]
    record = json.loads((path.parent / "niah_single_2_200.segment=64.data=ruler.json").read_text())
    assert record["arguments"]["length"] == 200 and record["heads_cut"] == [8, 8]
    for item, sample in zip(record["items"], made):
        assert item["references"] == sample["references"]
        assert list(item["outputs"]) == list(item["scores"]) == ["full", "8", "2", "0"]
        assert item["outputs"]["2"] == f" it is {sample['references'][0]}"
        assert item["scores"]["0"] == 100
    record = json.loads((path.parent / "vt_300.segment=64.data=ruler.json").read_text())
    assert [item["scores"]["full"] for item in record["items"]] == [0, 0]
    answered.clear()
    for samples in (1, 2):                                                  # and goes on
        start(ruler, "one", data=str(tree), tasks=("vt",), lengths=(300,), samples=samples)
    assert answered == [(sample["prompt"], 4) for sample in made[6:]]
    write_data(tree / "300" / "data" / "vt" / "validation.jsonl", "vt", tokenizer, outputs=["a"])
    with pytest.raises(gdn.Error, match="was made with data"):
        start(ruler, "one", data=str(tree), tasks=("vt",), lengths=(300,))
    for tasks, length, lacks in ((("vt",), 512, "512, vt"), (("vt", "cwe"), 300, "cwe")):
        with pytest.raises(gdn.Error, match=f"validation.jsonl for {lacks}: there is .*vt/valid"):
            start(ruler, data=str(tree), tasks=tasks, lengths=(length,))
    shutil.copytree(tree / "300", tree / "again" / "300")
    with pytest.raises(gdn.Error, match="is a second file for niah_single_2 at 300"):
        start(ruler, data=str(tree), tasks=(), lengths=(300,))


def test_one_file_of_rulers_tree_runs_and_one_that_is_elsewhere_is_told_where_to_go(
        start, tokenizer, tmp_path, answered, monkeypatch):
    whole = ruler.make_sample("vt", 200, 0, 3, tokenizer)["prompt"] + "\u2028\x85"    # no line ends
    old = write_data(tmp_path / "200" / "data" / "vt" / "my.jsonl", "vt", tokenizer,
                     input=whole, answer_prefix=None)                       # as before 2025
    monkeypatch.chdir(Path(old).parent)                                     # a path without folders
    path = start(ruler, data="my.jsonl", tasks=ruler.DEFAULT_TASKS, lengths=(), samples=1)
    assert path.name == "vt_200.segment=64.data=ruler.json" and answered == [(whole, 4)]
    with pytest.raises(gdn.Error, match="crosses no boundary of --segment 250"):
        start(ruler, data=old, tasks=("vt",), lengths=(), segment=250)
    for place, says in (("vt/my.jsonl", "put it where RULER does"),
                        ("200/data/other/my.jsonl", "other, which is no task")):
        elsewhere = write_data(tmp_path / place, "vt", tokenizer)
        with pytest.raises(gdn.Error, match=says):
            start(ruler, data=elsewhere, tasks=(), lengths=())


@pytest.mark.parametrize("line", [
    "{", '"text"', "[" * 100_000, '{"outputs": ["b"]}', '{"input": "a"}',
    '{"input": "", "outputs": ["b"]}', '{"input": "a", "outputs": [""]}',
    '{"input": "a", "outputs": "b"}', '{"input": "a", "outputs": []}',
    '{"input": 5, "outputs": ["b"]}'])
def test_a_bad_line_of_a_ruler_file_is_named_before_the_model_is_loaded(
        tmp_path, start, tokenizer, monkeypatch, line):
    monkeypatch.setattr(gdn, "load_model", lambda *_: pytest.fail("it was loaded"))
    file = Path(write_data(tmp_path / "200" / "data" / "vt" / "my.jsonl", "vt", tokenizer))
    file.write_text(file.read_text().strip() + "\n" + line)
    with pytest.raises(gdn.Error, match="my.jsonl, line 3"):
        start(ruler, data=str(file), tasks=("vt",), lengths=())
    with pytest.raises(gdn.Error, match="there is nothing"):
        start(ruler, data=str(tmp_path / "nothing"))


# ---- the command line ----------------------------------------------------------------------------

@pytest.fixture
def typed(monkeypatch, capsys):
    """typed(stage, *words): what its main is called with, or the exit code; and what it says."""
    def run(stage, *words):
        given = []
        stand_in = functools.wraps(stage.main)(lambda **flags: given.append(flags))
        monkeypatch.setattr(sys, "argv", [f"{stage.__name__}.py", *words])
        try:
            gdn.command(stand_in)
        except SystemExit as end:
            given.append(end.code)
        return given, "".join(capsys.readouterr())
    return run


def test_defaults_are_what_the_readmes_numbers_were_measured_with():
    def defaults(stage):
        return {name: p.default for name, p in inspect.signature(stage.main).parameters.items()}

    common = {"model": "tiny/hybrid", "segment": 256, "device": "auto", "results": "results"}
    texts = {**common, "documents": "stdlib", "docs": 8, "tokens": 4096}
    cut = {"keep": "top", "heads": "all", "store": "float32", "rows": None, "dtype": "auto"}
    ranks = (48, 32, 24, 16, 12, 8, 4, 2, 1)
    assert defaults(spectrum) == {**texts, "ranks": ranks, "dtype": "auto"}
    assert defaults(decay) == {**texts, "dtype": "float32"}
    assert defaults(loss) == {**texts, **cut, "ranks": (*ranks, 0)}
    assert defaults(ruler) == {
        **common, **cut, "tasks": ("niah_single_1", "niah_multikey_2", "vt", "cwe", "fwe"),
        "lengths": (), "samples": 25, "ranks": (32, 12, 6, 3, 1, 0), "seed": 0, "data": None}
    assert defaults(report) == {"model": None, "results": "results"}


def test_flags_arrive_as_they_were_typed_and_in_their_own_types(typed):
    assert typed(loss, "--results", "2024_05", "--documents", "data#v2", "--ranks=48, 12,048",
                 "--docs", "08", "--model", "tiny/recurrent", "--store=int4")[0] == [
        {"results": "2024_05", "documents": "data#v2", "ranks": (48, 12, 48), "docs": 8,
         "model": "tiny/recurrent", "store": "int4"}]
    assert typed(loss, "--results", "1e3", "--model", "./c", "--heads", "over-256", "--keep=read")[
        0] == [{"results": "1e3", "model": "./c", "heads": "over-256", "keep": "read"}]
    assert typed(decay)[0] == [{}]
    assert gdn.names("vt, cwe,vt") == ("vt", "cwe") and gdn.count0("00") == 0


def test_help_says_what_a_flag_is_once_and_a_scripts_own_words_go_first(typed):
    (code,), text = typed(report, "--help")
    assert code in (0, None) and "the folder that stages 01 to 04 wrote to" in text
    assert gdn.FLAGS["results"] not in text and gdn.FLAGS["model"] not in text
    assert gdn.FLAGS["results"] in typed(decay, "--help")[1]


MISTAKES = {"--modle tiny": "modle", "--docs 1 -- --tokens 9": "a dash alone", "-": "a dash alone",
            "stray": "stray", "--docs 3 stray": "stray",
            "--model": "--model needs a value", "--nodocs": "--docs needs a value",
            "--ranks=": "--ranks needs a value", "--docs 0": "--docs takes a whole number from 1",
            "--docs -5": "--docs takes", "--docs=2.5": "--docs takes", "--rows 0": "--rows takes",
            "--ranks 8,x": "--ranks takes whole numbers with commas",
            "--ranks 1.5": "--ranks takes",
            "--keep best": "--keep takes top, bottom, random, read, not 'best'",
            "--heads over": "--heads takes", "--store int1": "--store takes float32, ",
            "--segment 1_0": "--segment takes", "--dtype int8": "--dtype takes"}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_on_the_command_line_is_told_in_a_sentence_and_nothing_runs(typed, words):
    (code,), text = typed(loss, *words.split())
    assert code not in (0, None) and not isinstance(code, dict)             # main was not called
    assert MISTAKES[words] in f"{text}{code}" and "Traceback" not in text


@pytest.mark.parametrize("stage, flags", [
    (spectrum, dict(tokens=512)), (spectrum, dict(ranks=(2, 0))), (loss, dict(tokens=257)),
    (loss, dict(ranks=(17,))), (loss, dict(heads="over-9")), (decay, dict(device="cuda:99")),
    (decay, dict(documents="no/such")), (decay, dict(model="no such")), (decay, dict(tokens=9999))])
def test_what_cannot_be_measured_is_an_error_before_weights_are_loaded(
        stage, flags, start, monkeypatch):
    monkeypatch.setattr(gdn, "load_model", lambda run: pytest.fail("the model was loaded"))
    with pytest.raises(gdn.Error):
        start(stage, **{"segment": 256, "tokens": 600, **flags})


@pytest.mark.parametrize("failure, says", [
    (gdn.Error("a sentence"), "error: a sentence"), (KeyboardInterrupt(), "stopped; .* goes on"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried"), "out of memory: try fewer --rows"),
    (MemoryError(), "out of memory"), (RuntimeError("DefaultCPUAllocator: can't allocate memory"),
                                       "out of memory"),
    (PermissionError(13, "Permission denied", "a/b"), "error: .*Permission denied: 'a/b'$")])
def test_errors_end_in_a_sentence_and_other_failures_are_not_hidden(
        failure, says, monkeypatch, capfd):
    def main():
        """Docs."""
        raise failure

    monkeypatch.setattr(sys, "argv", ["x.py"])
    with pytest.raises(SystemExit, match=says):
        gdn.command(main)
    for failure in (RuntimeError("a fault of ours"), ValueError("of ours"), KeyError("of ours")):
        with pytest.raises(type(failure), match="of ours"):
            gdn.command(main)


FAKE = 'def __getattr__(name): raise RuntimeError("a fast kernel was used on a CPU")\n'


@pytest.fixture
def program(tmp_path):
    """program(*words, **options) starts Python with these words in tmp_path."""
    for package in ("fla", "causal_conv1d"):                                # installed, but no GPU
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(FAKE)
        info = tmp_path / f"{package}-9.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.9\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONIOENCODING": "ascii",
                   "OMP_NUM_THREADS": "1"}
    started = []

    def program(*words, **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        started.append(subprocess.Popen(words, text=True, env=environment, cwd=tmp_path, **options))
        return started[-1]

    yield program
    for process in started:
        process.kill()
        process.communicate()


def test_the_scripts_run_as_programs_and_ctrl_c_ends_even_their_imports(program, tmp_path):
    """Several at once: as each imports transformers, they are much of what these tests cost."""
    whole = program(sys.executable, HERE / "03_loss.py", "--docs", "2", "--tokens", "300",
                    "--ranks", "48,12", "--model", "tiny/recurrent")
    shown = program(sys.executable, HERE / "03_loss.py", "--help")
    early = program(sys.executable, "-X", "importtime", HERE / "02_decay.py")
    for line in early.stderr:
        if line.endswith("| torch.types\n") or " torch." in line:           # amid the imports
            break
    early.send_signal(signal.SIGINT)
    text = early.communicate(timeout=100)[1]
    assert early.returncode == -signal.SIGINT and "Traceback" not in text
    (out, err), help_ = whole.communicate(timeout=100), shown.communicate(timeout=100)
    assert whole.returncode == 0, err
    assert "3 GDN layers x 4 heads, states 64 x 64, float32 on cpu, reference kernels" in err
    assert out.strip().endswith("recurrent/03_loss.json") and "? " in out   # a ± in ASCII
    assert len(items_of(tmp_path / "results" / "recurrent" / "03_loss.json")) == 2
    assert shown.returncode == 0
    text = "".join(help_)
    for line in ("--model=MODEL", "--store=STORE", "Default: 256", "Default: 'top'",
                 "top, bottom or random", "tokens between boundaries", "how many documents."):
        assert line in text.replace("largest (top), those read most (read), or as controls bottom, "
                                    "random", "top, bottom or random"), line
    assert "FIRE_METADATA" not in text and "INFO" not in text


def test_a_closed_or_full_output_is_no_traceback_and_loses_no_result(program, tmp_path):
    words = [sys.executable, HERE / "02_decay.py", "--docs", "1", "--tokens", "64", "--results"]
    pipe = program(*words, "pipe")
    pipe.stdout.close()                                                     # as `| head -1` does
    pipe.stdout = None
    full = program(*words, "full", stdout=open("/dev/full", "w"))
    closed = program("sh", "-c", 'exec "$@" >&-', "sh", *words, "closed")
    for process, says in ((pipe, "error: .*Broken pipe"), (full, "error: .*No space left"),
                          (closed, "to measure")):
        err = process.communicate(timeout=100)[1]
        assert re.search(says, err) and "Traceback" not in err and "Exception ignored" not in err
        assert (process.returncode == 0) == (process is closed)
    for folder in ("pipe", "full", "closed"):
        assert len(items_of(tmp_path / folder / "hybrid" / "02_decay.json")) == 1


# ---- what the scripts print, from records written by hand ----------------------------------------

def table(stage, capsys, items, **more):
    stage.print_table({"model": "a/m", "layers": [3, 7], "items": items, **more})
    return capsys.readouterr().out


def test_the_table_of_01_averages_over_boundaries_and_documents_and_then_over_heads(capsys):
    items = [{"effective_rank": [[[3.0, 5, 10], [1, 2, 3]], [[5.0, 9, 20], [1, 2, 3]]],
              "effective_rank_null": [[[11.0, 14, 29], [4, 5, 6]], [[13.0, 16, 31], [4, 5, 6]]],
              "energy": {"4": [[0.9, 0.8, 0.4], [1, 1, 1]], "2": [[0.7, 0.7, 0.7], [1, 1, 1]],
                         "1": [[0.2, 0.1, 0.0], [1, 1, 1]]}},
             {"effective_rank": [[[4.0, 6, 12], [1, 2, 3]], [[8.0, 8, 14], [1, 2, 3]]],
              "effective_rank_null": [[[10.0, 19, 40], [4, 5, 6]], [[10.0, 19, 44], [4, 5, 6]]],
              "energy": {"4": [[0.8, 0.6, 0.7], [1, 1, 1]], "2": [[0.6, 0.6, 0.6], [1, 1, 1]],
                         "1": [[0.2, 0.2, 0.2], [1, 1, 1]]}}]
    text = table(spectrum, capsys, items, depends={"ranks": [4, 2, 1]})
    assert text.startswith("a/m\n") and "energy in the top 4, 1 modes" in text
    assert re.search(r"\n +3 +5\.0 +7\.0 +14\.0 +17\.0 +70\.0% +15\.0%\n", text), text
    assert re.search(r"\n +7 +1\.0 +2\.0 +3\.0 +5\.0 +100\.0% +100\.0%\n", text), text


def test_the_table_of_02_averages_log_a_before_it_inverts_and_counts_long_and_short_heads(capsys):
    items = [{"log_a": [[-0.1, -2 / 10_000, -1.0], [-1 / 256, -1 / 300, -1 / 4096]],
              "write_strength": [[0.2, 0.5, 0.5], [0.1, 0.1, 0.4]]},
             {"log_a": [[-0.001, 0.0, -1.0], [-1 / 256, -1 / 300, -1 / 4096]],
              "write_strength": [[0.6, 0.5, 0.9], [0.3, 0.3, 0.3]]}]
    text = table(decay, capsys, items)
    assert re.search(r"\n +3 +1\.0 +19\.8 +10000\.0 +0\.533\n", text), text
    assert re.search(r"\n +7 +256\.0 +300\.0 +4096\.0 +0\.250\n", text), text
    assert "1 of 6 heads have a horizon over 4,096 tokens, 50% one of at most 256" in text


def test_the_table_of_03_shows_each_ranks_own_bytes_change_kl_and_agreement(capsys):
    items = [{"loss": {"full": 2.0, "48": 2.01, "0": 3.5}, "kl": {"48": 0.002, "0": 1.0},
              "agree": {"48": 0.99, "0": 0.5}},
             {"loss": {"full": 3.0, "48": 3.03, "0": 4.0}, "kl": {"48": 0.004, "0": 2.0},
              "agree": {"48": 0.97, "0": 0.25}},
             {"loss": {"full": 7.0, "48": 7.08, "0": 7.9}, "kl": {"48": 0.009, "0": 6.0},
              "agree": {"48": 0.92, "0": 0.0}}]
    text = table(loss, capsys, items, bytes={"48": 12345, "0": 0})
    assert "full state: 4.0000 nats a token over 3 documents" in text
    for line in (r"48 +12,345 +\+0\.040 ± 0\.021 +0\.0050 ± 0\.0021 +96\.0%",
                 r"0 +0 +\+1\.13 ± 0\.19 +3\.0 ± 1\.5 +25\.0%"):
        assert re.search(rf"\n +{line}\n", text), text


# ---- the report, from result files written by hand ----------------------------------------------

def write_result(root, model, file, items, arguments=None, **more):
    """A result file of a model of 2 GDN layers x 2 heads with 64 x 64 states."""
    script = re.match(r"\d\d_[a-z]+", file)[0]
    record = {"script": script, "model": model, "layers": [0, 2], "state": [64, 64],
              "depends": {}, "heads_cut": [4, 4],
              "arguments": {"documents": "c4", "docs": len(items), "tokens": 16384, "segment": 256,
                            "ranks": [48, 12, 0], "device": "auto", **(arguments or {})},
              "environment": {"torch": "2", "transformers": "5", "device": "cpu",
                              "dtype": "float32", "weights": "0"}, **more}
    if script in ("03_loss", "04_ruler"):
        record["arguments"] = {"keep": "top", "heads": "all", "store": "float32",
                               **record["arguments"]}
    if script == "04_ruler":
        for key in ("documents", "docs", "tokens"):
            del record["arguments"][key]
        record["arguments"] = {"samples": len(items), "seed": 7, "data": None,
                               **record["arguments"]}
    record["items"] = [{"seconds": {"total": 2.0, "truncate": 0.5}, **item} for item in items]
    path = root / Path(model).name / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    return {**record["arguments"], **record}                # as 05 reads it


def plus(heads, amount):
    return (np.array(heads) + amount).tolist()


def spectrum_items():
    """Two documents; every quantity has values of its own, the second document its own too."""
    first, null = [[1.0, 2.0], [3.0, 4.0]], [[2.0, 9.0], [8.0, 10.0]]
    later = [[3.0, 4.0], [5.0, 9.0]]
    items = []
    for more in (0, 1):
        item = {"positions": [256, 512],
                "effective_rank": [plus(first, more), plus(later, more)],
                "effective_rank_null": [plus(null, more / 2), plus(null, more / 2)],
                "spectrum": plus([[[0.5, 0.3, 0.1], [0.6, 0.2, 0.15]],
                                  [[0.7, 0.19, 0.01], [0.8, 0.12, 0.05]]], more / 50)}
        for key, of_heads, step in (("energy", [[0.9, 0.8], [0.7, 0.5]], -0.02),
                                    ("readout", [[0.6, 0.55], [0.4, 0.2]], 0.02),
                                    ("overlap", [[0.3, 0.31], [0.34, 0.45]], 0.04),
                                    ("overlap_other", [[0.2, 0.22], [0.1, 0.3]], 0.01)):
            if more or key != "overlap_other":
                item[key] = {"12": plus(of_heads, step * more), "48": plus(of_heads, 0.05)}
        items.append(item)
    return items


def loss_items(kl, change, agree=(0.96, 0.8, 0.6)):
    """Up to three documents: kl and change {rank: [of each document]}."""
    items = []
    for i, full in enumerate((2.0, 2.6, 3.5)[:len(kl[min(kl)])]):
        item = {"loss": {"full": full}, "kl": {}, "agree": {}, "after": {"full": [full, 1.0, 2.0]}}
        for n, rank in enumerate(kl):
            item["loss"][rank] = full + change[rank][i]
            item["kl"][rank] = kl[rank][i]
            item["agree"][rank] = agree[n % 3] + i / 100
            item["after"][rank] = [full, 1 + change[rank][i] * 2, 2 + change[rank][i] / 2]
        items.append(item)
    return items


KL = {"48": [1e-4, 3e-4, 8e-4], "12": [0.02, 0.03, 0.07], "0": [0.4, 0.5, 0.9]}
CHANGE = {"48": [0.01, -0.02, -0.08], "12": [0.1, 0.2, 0.6], "0": [1.0, 2.0, 4.5]}
KL8 = {"64": [1e-5, 3e-5, 8e-5], "12": [0.03, 0.05, 0.1], "0": [0.4, 0.5, 0.9]}
CHANGE8 = {"64": [0.001, 0.002, 0.009], "12": [0.2, 0.3, 0.7], "0": [1.0, 2.0, 4.5]}
SCORES = {"full": [50, 40, 90, 80], "48": [50, 40, 90, 80], "12": [100, 10, 50, 60],
          "0": [0, 0, 20, 10]}


def task_items(scores):
    n = len(scores["full"])
    return [{"scores": {rank: float(scores[rank][i]) for rank in scores}} for i in range(n)]


def write_task(root, model, task, length, scores, variant="", **arguments):
    made = {"task": task, "length": length, "ranks": sorted(map(int, list(scores)[1:]))[::-1],
            **arguments}
    return write_result(root, model, f"04_ruler/{task}_{length}{variant}.json",
                        task_items(scores), made)


def write_model(root, model="a/model"):
    log_a = np.array([[-1 / 5000, -1 / 4200], [-1 / 300, -1 / 256]])
    write_result(root, model, "01_spectrum.json", spectrum_items(), {"ranks": [48, 12]})
    write_result(root, model, "02_decay.json", [{"log_a": (log_a * 0.5).tolist()},
                                                {"log_a": (log_a * 1.5).tolist()}])
    bins = {"after_bins": [0, 1, 256], "after_counts": [256, 1, 255]}
    write_result(root, model, "03_loss.json", loss_items(KL, CHANGE), **bins,
                 bytes={"48": 24576, "12": 6144, "0": 0})
    for keep, items in (("top", loss_items(KL8, CHANGE8, (0.9, 0.7, 0.5))), ("read", loss_items(
            {**KL8, "12": [0.03, 0.04, 0.05]}, {**CHANGE8, "12": [0.2, 0.4, 0.5]},
            (0.9, 0.75, 0.4)))):
        file = f"03_loss.{'keep=read.' if keep == 'read' else ''}store=int8.json"
        write_result(root, model, file, items, {"ranks": [64, 12, 0], "keep": keep,
                                                "store": "int8"}, **bins,
                     bytes={"64": 4224, "12": 1584, "0": 0})
    write_result(root, model, "03_loss.heads=over-256.json", loss_items(KL, CHANGE)[:2],
                 {"heads": "over-256"}, heads_cut=[2, 4], bytes={"48": 24576, "12": 6144, "0": 0},
                 **bins)
    write_task(root, model, "vt", 65536, SCORES)
    write_task(root, model, "vt", 1100, {**SCORES, "12": [70, 60, 100, 99]}, samples=9)
    write_task(root, model, "vt", 600, {"full": [75.0], "12": [70.0], "0": [5.0]})
    write_task(root, model, "cwe", 65536, {"full": [30, 20, 31], "32": [10, 15, 11],
                                           "12": [9, 9, 10]})
    write_task(root, model, "niah_multikey_2", 4000, {"full": [100, 100], "32": [100, 100],
                                                      "12": [100, 0]})
    write_task(root, model, "vt", 65536, {**SCORES, "12": [1, 2, 3, 5]}, ".data=own", data="/x/own")
    write_task(root, model, "vt", 65536, {**SCORES, "12": [5, 3, 2, 2]}, ".keep=random",
               keep="random")


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    write_model(root)
    figures, close = {}, report.plt.close
    order = iter([panel.__name__[:-6] for panel, *_ in report.FIGURES])
    report.plt.close = lambda figure: figures.update({next(order): figure})
    report.plt.rcParams["savefig.dpi"] = 50
    report.main(results=str(root))
    report.plt.close = close
    return (root / "report.md").read_text(), figures, root


# Every number was worked out by hand from the items above.
PAGE = """\
# How much of the Gated DeltaNet state do these models depend on?
- **model**: with 12 of 64 modes (all heads, top modes; 3 documents of 16,384 tokens) the loss in \
nats changes by +0.30 ± 0.15 (12% of rank 0), and 81.0% of the most likely tokens stay; the \
smallest coding with a KL of at most 0.001 nats is int8, whole state: 4,224 bytes a head, KL 4e-05 \
(3 documents of 16,384 tokens); 2 of 4 heads have a horizon over 4,096 tokens, 25% one of at most \
256; 12 modes move 3 of 5 scores (by over two standard errors where samples differ), each of a \
task at a length and of 1 or more samples: in points, vt at 600 -5 (all of 1), vt at 1,100 \
+17.2 ± 2.4, cwe at 65,536 -17.7 ± 3.3.
Missing, unfinished or mixed:
- model/04\\_ruler/vt\\_1100.json: 4 of 9 samples, unfinished
## The post's claims
| claim | the post says | model |
| heads with a decay horizon over 4,096 tokens | 48 of 288 | 2 of 4 |
| heads that largely forget within 256 tokens: horizon at most 256 | 61% | 25% |
| effective rank of the heads with a horizon over 4,096 | 30 to 47 | 2 to 4, in 1 of 2 less than \
random keys give; of all heads 3 of 4 have less than random keys give |
| change in loss, 48 modes kept | -0.0001 ± 0.0010 nats | -0.030 ± 0.026 nats (all heads, top \
modes; 3 documents of 16,384 tokens) |
| change in loss, 12 modes kept | +0.005 nats | +0.30 ± 0.15 nats (all heads, top modes; 3 \
documents of 16,384 tokens) |
| multikey needles, 32 and 12 modes kept | at baseline with 32 at 16K, 64K and 128K; no measurable \
decline with 12 | 4,000 tokens (all heads, top modes; 2 samples): full state 100, rank 32 +0 (none \
of 2), rank 12 -50 ± 50 |
| frequent words (fwe), 32 and 12 modes kept | no noticeable decline | not run |
| variable tracking (vt) at 64K, 32 to 12 modes kept | +8 to +19 points, errors 3 to 5 | 65,536 \
tokens (all heads, top modes; 4 samples): full state 65, rank 12 -10 ± 20<br>65,536 tokens (data \
own; 4 samples): full state 65, rank 12 -62 ± 11 |
| common words (cwe) at 64K, 32 modes kept | full state 27; -18 points | 65,536 tokens (all heads, \
top modes; 3 samples): full state 27, rank 32 -15.0 ± 5.0 |
- model: another model; 01\\_spectrum: --docs 2; 02\\_decay: --docs 2; 03\\_loss: --docs 3; \
04\\_ruler: lengths 600, 1100, 4000, samples from 1, our wording, not RULER's
## Next-token loss
**model**: all heads, top modes; 3 documents of 16,384 tokens
| rank | change in loss, nats | KL, nats | same token |
| full | 2.7000 nats |  |  |
| 48 | -0.030 ± 0.026 (-1% of rank 0) | 0.00040 ± 0.00021 | 97.0% |
| 12 | +0.30 ± 0.15 (12% of rank 0) | 0.040 ± 0.015 | 81.0% |
| 0 | +2.5 ± 1.0 | 0.60 ± 0.15 | 61.0% |
**model**: heads over-256 (2 of 4); 2 documents of 16,384 tokens
| rank | change in loss, nats | KL, nats | same token |
| full | 2.3000 nats |  |  |
| 48 | -0.005 ± 0.015 (0% of rank 0) | 0.00020 ± 0.00010 | 96.5% |
| 12 | +0.150 ± 0.050 (10% of rank 0) | 0.0250 ± 0.0050 | 80.5% |
| 0 | +1.50 ± 0.50 | 0.450 ± 0.050 | 60.5% |
## What a byte of the state buys
**model**: 7 of 7 codings
| bytes a head | stored | KL, nats | change in loss, nats | same token | front | over |
| 0 | nothing | 0.60 ± 0.15 | +2.5 ± 1.0 | 61.0% | front | 3 documents of 16,384 tokens |
| 1,584 | int8, 12 read modes | 0.0400 ± 0.0058 | +0.367 ± 0.088 (15% of rank 0) | 76.0% | \
front | 3 documents of 16,384 tokens |
| 1,584 | int8, 12 top modes | 0.060 ± 0.021 | +0.40 ± 0.15 (16% of rank 0) | 71.0% |  | 3 \
documents of 16,384 tokens |
| 4,224 | int8, whole state | 0.000040 ± 0.000021 | +0.0040 ± 0.0025 (0% of rank 0) | 91.0% | \
front | 3 documents of 16,384 tokens |
| 6,144 | float32, 12 top modes | 0.040 ± 0.015 | +0.30 ± 0.15 (12% of rank 0) | 81.0% |  | 3 \
documents of 16,384 tokens |
| 16,384 | untouched, float32 | 0 | 0 | 100% | front | 3 documents of 16,384 tokens |
| 24,576 | float32, 48 top modes | 0.00040 ± 0.00021 | -0.030 ± 0.026 (-1% of rank 0) | 97.0% \
|  | 3 documents of 16,384 tokens |
## Tasks
| model | task | length | truncated | full state | rank 48 | rank 32 | rank 12 | rank 0 |
| model | vt | 600 | all heads, top modes; 1 sample | 75.0 |  |  | -5 (all of 1), 0 up 1 down | \
-70 (all of 1), 0 up 1 down |
| model | vt | 1,100 | all heads, top modes; 4 of 9 samples, unfinished | 65.0 | +0 (none of 4) |  \
| +17.2 ± 2.4, 4 up 0 down | -57.5 ± 7.5, 0 up 4 down |
| model | niah\\_multikey\\_2 | 4,000 | all heads, top modes; 2 samples | 100.0 |  | +0 (none of \
2) | -50 ± 50, 0 up 1 down |  |
| model | cwe | 65,536 | all heads, top modes; 3 samples | 27.0 |  | -15.0 ± 5.0, 0 up 3 down | \
-17.7 ± 3.3, 0 up 3 down |  |
| model | vt | 65,536 | all heads, top modes; 4 samples | 65.0 | +0 (none of 4) |  | -10 ± 20, 1 \
up 3 down | -57.5 ± 7.5, 0 up 4 down |
| model | vt | 65,536 | data own; 4 samples | 65.0 | +0 (none of 4) |  | -62 ± 11, 0 up 4 down | \
-57.5 ± 7.5, 0 up 4 down |
| model | vt | 65,536 | keep random; 4 samples | 65.0 | +0 (none of 4) |  | -62 ± 12, 0 up 4 down \
| -57.5 ± 7.5, 0 up 4 down |
## Heads
| model | over | effective rank: least, median, most of the heads | mean | with random keys | r | \
energy in the top r | of what is read | overlap with the boundary before | with another document |
| model | all heads; 2 documents of 16,384 tokens | 2.5, 4.0, 7.0 of 64 | 4.38 ± 0.50 | 7.50 ± \
0.25 | 12 | 0.715 ± 0.010 | 0.447 ± 0.010 | 0.370 ± 0.020 | 0.215 (all of 1) |
"""


def unwrapped(page):
    """The lines of a page up to its runs, without figures, rules and the fixed notes."""
    left_out = r"!|\*[^*]|\| ---|Truncated states|The post measured|What crosses|$"
    lines = page.partition("## Runs")[0].splitlines()
    return [line for line in lines if not re.match(left_out, line)]


def test_the_page_says_what_the_items_hold_word_by_word(shown):
    page, _, root = shown
    assert unwrapped(page) == unwrapped(PAGE)
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        head, rule, *_ = table.splitlines()
        assert rule == "|" + " --- |" * (head.count(" | ") + 1)
    for line in (
            "- model (a/model)",
            "02\\_decay.json: 2 documents of 16,384 tokens, from c4, segment 256, float32 on cpu; "
            "4 s, of these 1 at boundaries",
            "vt\\_1100.json: 4 of 9 samples, unfinished, seed 7, segment 256, float32 on cpu; 8 s, "
            "of these 2 at boundaries",
            "vt\\_65536.data=own.json: 4 samples, from /x/own, segment 256, float32 on cpu; 8 s"):
        assert line in page.partition("## Runs")[2], line
    names = [panel.__name__.removesuffix("_panel") for panel, *_ in report.FIGURES]
    assert re.findall(r"\]\((.*)\.png\)", page) == names
    assert all((root / f"{name}.png").stat().st_size > 5000 for name in names)


def read_back(ax):
    """{label: points (x, y) or (x, y, error)} of a panel; what is unlabelled, by its number."""
    found = {}
    for bars in ax.containers:
        ends = [segment[:, 1] for segment in bars[2][0].get_segments()]
        found[len(found) if bars.get_label() == "_nolegend_" else bars.get_label()] = [
            (x, y, (high - low) / 2) for (x, y), (low, high) in zip(bars[0].get_xydata(), ends)]
    for line in () if found else ax.lines:
        label = line.get_label()
        found[len(found) if label.startswith("_") else label] = line.get_xydata().tolist()
    return found


def m(x, *numbers):
    """A point at x: the mean of the numbers and its standard error."""
    return x, mean(numbers), stdev(numbers) / len(numbers) ** 0.5 if len(numbers) > 1 else 0


DOCUMENTS = "3 documents of 16,384 tokens"
BOTH = {"": f"all heads, top modes; {DOCUMENTS}",
        "heads": "heads over-256 (2 of 4); 2 documents of 16,384 tokens"}
HEADS = "model\nall heads; 2 documents of 16,384 tokens"
FULL, LAST = SCORES["full"], [-50, -40, -70, -70]
PANELS = {  # (figure, number): title, labels of x and y, ticks of x, what is drawn
    ("loss", 0): ("model", "modes kept per head, r", "change in loss, nats (linear up to 0.01)",
                  ["48", "12", "0"],
                  {BOTH[""]: [m(i - 0.03, *CHANGE[r]) for i, r in enumerate(CHANGE)],
                   BOTH["heads"]: [m(i + 0.03, *CHANGE[r][:2]) for i, r in enumerate(CHANGE)]}),
    ("kl", 0): ("model", "modes kept per head, r", "KL from the untouched model, nats",
                ["48", "12", "0"],
                {BOTH[""]: [m(i - 0.03, *KL[r]) for i, r in enumerate(KL)],
                 BOTH["heads"]: [m(i + 0.03, *KL[r][:2]) for i, r in enumerate(KL)]}),
    ("after", 0): (f"model\n{BOTH['']}", "tokens since the boundary", "change in loss, nats",
                   ["first\nsegment", "0", "1-255"],
                   {f"rank {r}": [(0, 0, 0), m(1, *(2 * x for x in CHANGE[r])),
                                  m(2, *(x / 2 for x in CHANGE[r]))] for r in CHANGE}),
    ("bytes", 0): ("model", "bytes carried per head", "KL from the untouched model, nats",
                   ["0", "1,024", "4,096", "16,384"],
                   {f"float32, top modes; {DOCUMENTS}": [m(24576, *KL["48"]), m(6144, *KL["12"]),
                                                         m(0, *KL["0"])],
                    1: [m(4224, *KL8["64"])],
                    f"int8, read modes; {DOCUMENTS}": [m(1584, 0.03, 0.04, 0.05), m(0, *KL8["0"])],
                    3: [m(4224, *KL8["64"])],
                    f"int8, top modes; {DOCUMENTS}": [m(1584, *KL8["12"]), m(0, *KL8["0"])]}),
    ("tasks", 0): ("model, 600 tokens", "modes kept per head, r", "change in score, points",
                   ["12", "0"], {"vt, 1 sample; full state 75": [m(0, -5), m(1, -70)]}),
    ("tasks", 3): ("model, 65,536 tokens", "modes kept per head, r", "change in score, points",
                   ["48", "32", "12", "0"],
                   {"cwe, 3 samples; full state 27": [m(0.97, -20, -5, -20),
                                                      m(1.97, -21, -11, -21)],
                    "vt, 4 samples; full state 65": [
                        m(0.03, 0, 0, 0, 0), m(2.03, 50, -30, -40, -20), m(3.03, *LAST)]}),
    ("tasks", 4): ("model, 65,536 tokens\ndata own", "modes kept per head, r", "", None, None),
    ("tasks", 5): ("model, 65,536 tokens\nkeep random", "modes kept per head, r", "",
                   ["48", "12", "0"], {"vt, 4 samples; full state 65": [
                       m(0, 0, 0, 0, 0), m(1, -45, -37, -88, -78), m(2, *LAST)]}),
    ("lengths", 0): ("model, vt", "length, tokens", "score, points",
                     ["600\n(1 sample)", "1,100\n(4 of 9 samples,\nunfinished)",
                      "65,536\n(4 samples)"],
                     {"full state": [m(-0.06, 75), m(0.94, *FULL), m(1.94, *FULL)],
                      "rank 12": [m(0, 70), m(1, 70, 60, 100, 99), m(2, 100, 10, 50, 60)],
                      "rank 0": [m(0.06, 5), m(1.06, 0, 0, 20, 10), m(2.06, 0, 0, 20, 10)]}),
    ("horizon", 0): (HEADS, "decay horizon, tokens", "effective rank", None,
                     {0: [(5000, 2.5), (5000, 2.25)], 1: [(4200, 3.5), (4200, 9.25)],
                      2: [(5000, 2.25), (4200, 9.25)], "layer 0": [(5000, 2.5), (4200, 3.5)],
                      4: [(300, 4.5), (300, 8.25)], 5: [(256, 7), (256, 10.25)],
                      6: [(300, 8.25), (256, 10.25)], "layer 2": [(300, 4.5), (256, 7)],
                      8: [(256, 0), (256, 1)], 9: [(4096, 0), (4096, 1)], 10: [(0, 64), (1, 64)]}),
    ("along", 0): (HEADS, "tokens read", "effective rank", None,
                   {"horizon over 256 tokens (heads: 3)": [(256, 2.5), (512, 4.5)],
                    "horizon at most 256 tokens (heads: 1)": [(256, 4.5), (512, 9.5)]}),
    ("readout", 0): (HEADS, "share of energy beyond 12 modes", "share of what is read beyond them",
                     None, {"layer 0": [(0.11, 0.39), (0.21, 0.44)],
                            "layer 2": [(0.31, 0.59), (0.51, 0.79)], 2: [(0.1, 0.1), (1, 1)]}),
    ("spectra", 0): (HEADS, "mode j", "singular value / sum of them", None,
                     {"layer 0": [(1, 0.51), (2, 0.31), (3, 0.11)],
                      1: [(1, 0.61), (2, 0.21), (3, 0.16)],
                      "layer 2": [(1, 0.71), (2, 0.2), (3, 0.02)],
                      3: [(1, 0.81), (2, 0.13), (3, 0.06)]})}


@pytest.mark.parametrize("name, number", PANELS)
def test_every_panel_shows_what_the_items_hold(shown, name, number):
    title, x, y, ticks, lines = PANELS[name, number]
    ax = shown[1][name].axes[number]
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == (title, x, y)
    if ticks:
        assert [label.get_text() for label in ax.get_xticklabels()] == ticks
    if lines:
        found = read_back(ax)
        assert list(found) == list(lines)
        for label in lines:
            assert np.allclose(found[label], lines[label]), label
        shown_labels = [text.get_text() for text in ax.get_legend().get_texts()]
        assert shown_labels == [label for label in lines if isinstance(label, str)]


def test_axes_span_what_they_show_and_marks_tell_what_they_are(shown):
    panels = {name: len(figure.axes) for name, figure in shown[1].items()}
    assert panels == dict.fromkeys(panels, 1) | {"tasks": 6}
    axes = {name: figure.axes[0] for name, figure in shown[1].items()}
    scales = {name: (ax.get_xscale(), ax.get_yscale()) for name, ax in axes.items()}
    assert scales == {
        "loss": ("linear", "symlog"), "kl": ("linear", "log"), "after": ("linear", "linear"),
        "bytes": ("symlog", "log"), "tasks": ("linear", "linear"), "lengths": ("linear", "linear"),
        "horizon": ("log", "linear"), "along": ("linear", "linear"), "readout": ("log", "log"),
        "spectra": ("linear", "log")}
    assert axes["kl"].get_ylim() == pytest.approx((1e-4, 1))
    assert axes["bytes"].get_ylim() == pytest.approx((1e-5, 1))
    assert axes["bytes"].get_xticks().tolist() == [0, 1024, 4096, 16384]
    low, high = axes["bytes"].get_xlim()
    assert low < 0 and high > 24576
    assert axes["lengths"].get_ylim() == (-5, 105) and axes["loss"].get_xlim() == (-0.5, 2.5)
    low, high = axes["loss"].get_ylim()
    ticks = sorted(tick for tick in axes["loss"].get_yticks() if low < tick < 0.05)
    assert ticks == pytest.approx([-0.1, -0.03, -0.01, -0.005, 0, 0.005, 0.01, 0.03])
    looks = [bars[0] for bars in axes["bytes"].containers]
    blue, orange = report.COLOURS[:2]
    assert [line.get_color() for line in looks] == [blue, orange, orange, orange, orange]
    assert [line.get_marker() for line in looks] == ["o", "*", "s", "*", "s"]
    assert [line.get_linestyle() for line in looks] == ["-", "--", "--", "-", "-"]
    hollow = [line.get_markerfacecolor() == "white" for line in axes["horizon"].lines]
    assert [i for i, is_hollow in enumerate(hollow) if is_hollow] == [2, 6]
    low, high = axes["along"].collections[0].get_paths()[0].get_extents().get_points()
    assert low.tolist() == [256, 2] and high.tolist() == [512, 5]   # of 1.5 to 3.5, 3.5 to 5.5


def loss_run(root, kl, model="a/m", file="03_loss.json", **arguments):
    """A run of these KLs {rank: [of each document]} that changes the loss as much, read back."""
    change = {rank: [x * 2 for x in kl[rank]] for rank in kl}
    items = loss_items(kl, change)
    ranks = sorted(map(int, kl))[::-1]
    write_result(root, model, file, items, {"ranks": ranks, **arguments},
                 after_bins=[0, 1, 256], after_counts=[256, 1, 255],
                 bytes={str(rank): 256 * rank for rank in ranks}, heads_cut=[1, 4])
    return report.read_model(root / Path(model).name)[0]


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(report, "draw", lambda *_: "")


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn from here on."""
    figures, close = [], report.plt.close
    monkeypatch.setattr(report.plt, "close", lambda figure: close(figures.append(figure) or figure))
    return figures


def reported(root, folder="", **flags):
    report.main(results=str(root), **flags)
    return (root / folder / "report.md").read_text()


@pytest.mark.parametrize("changes, says", [
    ([[-50]], "moves 1 of 1 scores, each of a task at a length and of 1 or more samples: in "
              "points, vt at 100 -50 (all of 1)"),
    ([[0]], "moves 0 of 1 scores, each of a task at a length and of 1 or more samples"),
    ([[-30.1] * 3, [0, 0]], "moves 1 of 2 scores, each of a task at a length and of 2 or more "
                            "samples: in points, vt at 100 -30.1 (all of 3)"),
    ([[-30, -31, -32], [5, -5]], "moves 1 of 2 scores (by over two standard errors where samples "
     "differ), each of a task at a length and of 2 or more samples: in points, vt at 100 "
     "-31.00 ± 0.58")])
def test_of_standard_errors_is_spoken_where_there_are_some(tmp_path, changes, says):
    for i, numbers in enumerate(changes):
        full = [60.1 + j for j in range(len(numbers))]
        write_task(tmp_path, "a/m", "vt", 100 + i,
                   {"full": full, "12": [x + y for x, y in zip(full, numbers)]})
    records, _ = report.read_model(tmp_path / "m")
    assert report.finding(records) == f"12 modes {says}".replace("modes moves", "modes move")


def test_what_is_unfinished_mixed_unreadable_or_has_not_run_is_said(tmp_path, undrawn):
    loss_run(tmp_path, {"12": [0.1, 0.2]}, docs=8)
    loss_run(tmp_path, {"12": [0.1]}, file="03_loss.keep=read.json", keep="read", documents="own")
    write_task(tmp_path, "a/m", "vt", 600, {"full": [9], "12": [9]}, samples=1)
    write_task(tmp_path, "a/m", "vt", 700, {"full": [], "12": []}, samples=5)
    path = tmp_path / "m" / "03_loss.keep=read.json"
    path.write_text(path.read_text().replace('"weights": "0"', '"weights": "1"'))
    (tmp_path / "m" / "01_spectrum.json").write_text('{"script": "01_spectrum"')
    (tmp_path / "m" / "folder.json").mkdir()
    text = reported(tmp_path).replace("\\", "")
    for line in ("m/03_loss.json: 2 of 8 documents of 16,384 tokens, unfinished",
                 "m/04_ruler/vt_700.json: 0 of 5 samples, unfinished", "02_decay has not run on m",
                 "01_spectrum has not run on m", "m has results of different weights: 0, 1",
                 "m has results of different documents: c4, own"):
        assert f"- {line}\n" in text, line
    assert "01_spectrum.json cannot be read as a result file" in text
    assert "folder.json cannot be read as a result file" in text
    assert "vt_600.json:" not in text.partition("##")[0]
    assert text.count("| not run |") == 7
    assert "(all heads, top modes; 2 of 8 documents of 16,384 tokens, unfinished) the loss" in text
    assert "**m**: keep read; 1 document of 16,384 tokens\n" in text


def test_each_claim_is_met_with_its_own_task_lengths_and_ranks(tmp_path, undrawn):
    scores = {"full": [50.0], **{rank: [50.0 + int(rank)] for rank in ("48", "32", "24", "16", "12",
                                                                       "6")}}
    for task in ("niah_multikey_2", "fwe", "vt", "cwe", "niah_single_1"):
        for length in (1024, 16384, 65536, 131072):
            write_task(tmp_path, "a/m", task, length, scores)
            for other in ({"heads": "over-9"}, {"keep": "read"}, {"store": "int8"}):
                write_task(tmp_path, "a/m", task, length, scores, f".{[*other][0]}", **other)
    found = {}
    for line in reported(tmp_path).splitlines():
        cells = line.split(" | ")
        if "1 sample)" in cells[-1] and len(cells) == 3:
            assert cells[-1].count("all heads, top modes") == cells[-1].count("1 sample)")
            found[cells[0][2:11]] = (re.findall(r"([\d,]+) tokens", cells[-1]),
                                     re.findall(r"rank (\d+) \+(\d+)", cells[-1])[:4])
    all_lengths, few = ["16,384", "65,536", "131,072"], [("32", "32"), ("12", "12")]
    assert found == {"multikey ": (all_lengths, few * 2), "frequent ": (all_lengths, few * 2),
                     "variable ": (["65,536"], [(r, r) for r in ("32", "24", "16", "12")]),
                     "common wo": (["65,536"], [("32", "32")])}


def test_names_are_shown_as_they_are_and_a_model_is_chosen_by_name_id_or_path(
        tmp_path, monkeypatch, undrawn):
    name = "a|b*_<i>&`$[x]"
    for model in ("a/plain", f"b/{name}"):
        loss_run(tmp_path / "r", {"12": [0.1, 0.2]}, model)
    text = reported(tmp_path / "r")
    assert r"- **a\|b\*\_\<i\>\&\`\$\[x\]**: with" in text
    assert r"| claim | the post says | a\|b\*\_\<i\>\&\`\$\[x\] | plain |" in text
    (tmp_path / "plain").mkdir()
    for chosen in ("plain", "some/plain", str(tmp_path / "plain")):
        assert "`" not in reported(tmp_path / "r", "plain", model=chosen), chosen
    assert "**plain**" not in reported(tmp_path / "r", name, model=name)
    assert (tmp_path / "r" / "report.md").read_text() == text               # that of all is kept
    with pytest.raises(gdn.Error, match="no result file of other to report"):
        report.main(model="some/other", results=str(tmp_path / "r"))


def test_one_rank_a_kl_of_0_and_any_name_can_be_read_off_the_axes(tmp_path, drawn):
    models = {f"m$_{i}^$": loss_run(tmp_path, {"12": [0.0]}, f"a/m{i}") for i in range(7)}
    models["m7"] = loss_run(tmp_path, {"12": [3e-7, 5e-7], "0": [0.002, 0.004]}, "a/m9",
                            documents="co$t_$x")
    for panel in (report.loss_panel, report.kl_panel, report.bytes_panel):
        report.draw(tmp_path, models, panel, report.by_rank)
    for figure in drawn:
        boxes = [ax.get_subplotspec().get_geometry() for ax in figure.axes]
        assert [box[:3] for box in boxes] == [(3, 3, i) for i in range(8)]
        assert [bool(ax.get_ylabel()) for ax in figure.axes] == ([True, False, False] * 3)[:8]
        assert len({ax.get_ylim() for ax in figure.axes}) == 1
    loss, kl, size = (figure.axes for figure in drawn)
    assert read_back(loss[0]) == {"all heads, top modes; 1 document of 16,384 tokens": [(0, 0, 0)]}
    assert loss[0].get_xlim() == (-0.5, 0.5) and loss[0].get_title() == "m$_0^$"
    for ax in (kl[0], size[0]):
        assert ax.get_yscale() == "symlog" and ax.get_ylim() == pytest.approx((-2.5e-8, 0.01))
        assert ax.get_ylabel() == "KL, nats (linear up to 1e-07)"
    assert size[7].get_xticks().tolist() == [0, 1024]
    assert [label.get_text() for label in size[7].get_xticklabels()] == ["0", "1,024"]
    little = {"m": loss_run(tmp_path, {"12": [1e-5, 2e-5]}, "a/m11")}
    report.draw(tmp_path, little, report.loss_panel, report.by_rank)
    report.draw(tmp_path, little, report.after_panel, report.first, "03_loss")
    assert all(figure.axes[0].get_ylim()[1] > 0.01 for figure in drawn[-2:])        # and looks it
    nothing = {"m": loss_run(tmp_path, {"0": [0.1]}, "a/m10")}
    assert "bytes.png" in report.draw(tmp_path, nothing, report.bytes_panel, report.codings)


def test_stored_runs_of_some_heads_or_with_other_boundaries_are_shown_by_rank(tmp_path):
    loss_run(tmp_path, {"12": [0.1]}, file="03_loss.store=int8.json", store="int8")
    loss_run(tmp_path, {"12": [0.2]}, file="03_loss.heads.json", store="int8", heads="over-9")
    records = loss_run(tmp_path, {"12": [0.3]}, file="03_loss.segment.json", store="fp8", segment=1)
    shown = ["heads over-9 (1 of 4), store int8", "store fp8, segment 1"]
    assert [report.variant(record) for record in report.by_rank(records)] == shown
    assert [report.variant(record) for record in report.codings(records)] == ["store int8"]
    for line in shown:
        assert any(line in part for part in report.loss_tables({"m": records}))


def test_many_ranks_layers_and_runs_are_told_apart(tmp_path):
    ranks = (48, 32, 24, 16, 12, 8, 4, 2, 1, 0)
    runs = loss_run(tmp_path, {str(rank): [0.1, 0.2] for rank in ranks})
    figure, [ax, other] = report.plt.subplots(1, 2)
    report.after_panel(ax, runs)
    assert list(read_back(ax)) == [f"rank {rank}" for rank in (32, 12, 4, 1, 0)]
    report.loss_panel(other, runs * 20)
    firsts = [bars[0].get_xdata()[0] for bars in other.containers]
    assert max(firsts) - min(firsts) < 0.3 and len(set(firsts)) == 20
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle())
             for line in (bars[0] for bars in other.containers)}
    assert len(looks) == 20
    labels = [look["label"] for look in report.layer_looks(range(10))]
    assert labels == ["layer 0", *[None] * 8, "layer 9"]
    report.along_panel(ax, [{"items": [{"positions": [9], "effective_rank": [[[1.0]]]}]},
                            {"items": [{"log_a": [[-1.0]]}]}])              # no head over 256
    assert "horizon at most 256 tokens (heads: 1)" in ax.get_legend_handles_labels()[1]
    assert len(ax.get_legend_handles_labels()[1]) == 6          # beside the five ranks
    report.plt.close(figure)
    for ranks, rank in (((16, 10), 10), ((48, 13, 8), 13), ((16, 12, 8), 12)):
        assert report.near_12({"ranks": ranks}) == rank


def test_a_front_is_of_runs_on_as_many_documents_and_long_lists_are_cut_to_it(tmp_path):
    ranks = {str(rank): [rank / 100 + 0.002] * 2 for rank in range(1, 30)}
    loss_run(tmp_path, ranks)
    records = loss_run(tmp_path, {"64": [1e-4], "9": [0.001]}, file="03_loss.store=int8.json",
                       store="int8")
    front = [row[2] for row in report.coding_rows(records) if row[-1]]
    assert front == ["float32, 1 top modes", "int8, 9 top modes", *["untouched, float32"] * 2]
    few = report.read_model(tmp_path / "m")[0][:1]
    for ranks_, shown in ((23, "24 of 24"), (24, "2 of 25")):               # and the untouched one
        few[0]["ranks"] = list(range(1, 1 + ranks_))
        assert f"**m**: {shown} codings" in "".join(report.coding_tables({"m": few}))
    text = "".join(report.coding_tables({"m": records}))
    assert "**m**: 5 of 33 codings" in text and "float32, 2 top modes" not in text
    assert "smallest coding with a KL of at most 0.001 nats is int8, 9 top modes: 2,304 bytes a " \
           "head, KL 0.001 (1 document" in report.finding(records)


@pytest.mark.parametrize("size, kl, front", [(8, 0.1, False), (9, 0.09, False), (8, 0.2, True),
                                             (9, 0.11, True), (10, 0.1, True)])
def test_a_coding_is_on_the_front_unless_another_is_as_small_and_as_close(
        size, kl, front, tmp_path):
    records = []
    for name, bytes_, values in (("one", 9, [0.1, 0.1]), ("other", size, [kl, kl])):
        record = write_result(tmp_path, "a/m", f"03_loss.{name}.json", loss_items(
            {"12": values}, {"12": values}), {"ranks": [12], "keep": name}, bytes={"12": bytes_})
        records.append(record)
    found = {row[2]: row[-1] for row in report.coding_rows(records)}
    assert found["float32, 12 one modes"] == front and found["untouched, float32"]


def test_a_run_on_one_document_has_as_many_cells_as_the_table_of_heads_has_columns(tmp_path):
    record = write_result(tmp_path, "a/m", "01_spectrum.json", spectrum_items()[:1],
                          {"ranks": [48, 12]})
    [text] = report.head_table({"m": [record]})
    assert {line.count(" |") for line in text.strip().split("\n")} == {10}
    assert text.endswith("|  |\n")
    for made in ("head_table", "task_table", "loss_tables", "coding_tables"):
        assert not [*getattr(report, made)({"m": []})]
    for length in (100, 200):                                               # two are enough
        write_task(tmp_path, "a/m", "vt", length, SCORES)
        records, _ = report.read_model(tmp_path / "m")
        panels = report.panels({"m": records}, report.lengths_panel, report.find, "04_ruler")
        assert len(panels) == (length == 200)


@pytest.mark.parametrize("wiped, says", [(2.0, "+0.200 ± 0.058 (10% of rank 0)"),
                                         (-2.0, "+0.200 ± 0.058")])
def test_a_share_of_what_wiping_costs_is_given_where_it_costs(wiped, says, tmp_path):
    change = {"12": [0.1, 0.2, 0.3], "0": [wiped] * 3}
    record = write_result(tmp_path, "a/m", "03_loss.json", loss_items(change, change))
    record["ranks"] = [12, 0]
    assert report.effects(record, 12)[0] == says
    assert "of rank 0" not in report.effects(record, 0)[0]


def test_the_same_scope_is_the_posts_model_documents_number_length_and_wording(tmp_path):
    shape = {"layers": list(range(18)), "state": [128, 128]}

    def scope(model="Qwen/Qwen3.5-0.8B", docs=8, **arguments):
        item, arguments = {"loss": {}}, {"docs": 8, **arguments}            # asked, and done
        return report.differences([write_result(tmp_path, model, "03_loss.json", [item] * docs,
                                                arguments, **shape)])

    assert scope() == "03_loss: same scope" == scope(model="Qwen/Qwen3.5-0.8B-Base")
    assert scope(model="/data/Qwen3.5-0.8B") == "03_loss: same scope"
    assert scope(docs=3) == "03_loss: --docs 3" and scope(segment=64) == "03_loss: --segment 64"
    assert "another model" in scope(model="me/Qwen3.5-0.8B")
    for other in ({"layers": list(range(24))}, {"state": [128, 64]}):
        whole, shape = shape, {**shape, **other}
        assert "another model" in scope(model="/data/Qwen3.5-0.8B")
        shape = whole
    scores = {"full": [1] * 50, "12": [1] * 50}
    for file, length, more, says in (
            ("v", 65536, {}, "our wording, not RULER's"), ("v", 65536, {"data": "x"}, "same scope"),
            ("v", 999, {"data": "x"}, "lengths 999"),
            ("v", 16384, {"data": "x", "segment": 64}, "another segment")):
        record = write_result(tmp_path, "Qwen/Qwen3.5-0.8B", "04_ruler/v.json", task_items(scores),
                              {"task": "vt", "length": length, **more}, **shape)
        assert report.differences([record]) == f"04_ruler: {says}"
    record["items"].pop()
    assert report.differences([record]) == "04_ruler: samples from 49, another segment"


# ---- the README ---------------------------------------------------------------------------------

def test_the_readme_names_every_script_and_no_flag_that_does_not_exist():
    text = (HERE / "README.md").read_text()
    for name, module in zip(SCRIPTS, MODULES):
        assert f"{name}.py" in text
        for line in re.findall(rf"python {name}.py (.*)", text):
            for flag in re.findall(r"--([a-z-]+)", line):
                assert flag in module.main.__annotations__, (name, flag)
