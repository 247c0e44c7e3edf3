"""The Gated DeltaNet (GDN) state: its recurrence, its singular modes, and a model run without some.

A GDN head reads a text with a matrix for a memory. With keys and values as columns, and the decay
taken first, the gated delta rule (Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks", eq. 10)

    S_t = a_t S_{t-1} + b_t (v_t - a_t S_{t-1} k_t) k_t^T              y_t = S_t q_t

The state S fades by a_t, is asked what it holds under the key k_t, and is corrected towards the
value v_t with strength b_t; the query q_t reads it. How much of S does a trained model depend on?
The first part of this file has what is needed to ask: the recurrence, token by token; the state's
singular modes, its truncation to r of them, and what storing it rounds; and the run of a Hugging
Face model in segments, with every state cut in between. The numbered scripts ask, one question
each, as an experiment did that was published without its code ("the post", see the README).

    B  rows of a batch               H  value heads, each with a state      K  key dimension
    T  tokens of a document          G  key heads, each for H/G heads       V  value dimension
    n  tokens of a call or segment   L  GDN layers                          M  modes, min(V, K)
    R  ranks, run as rows            D  hidden size
"""
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)            # Ctrl-C while the libraries load just ends

import contextlib
import functools
import gzip
import hashlib
import json
import os
import re
import sys
import sysconfig
import tempfile
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args
from unittest import mock

import fire
import huggingface_hub
import safetensors
import torch
import transformers
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

signal.signal(signal.SIGINT, signal.default_int_handler)


class Error(Exception):
    """What a user can mend: told in one sentence, without a traceback."""


# ---- 1. the recurrence --------------------------------------------------------------------------

def gated_delta_rule(q, k, v, log_a, b, state=None):
    """The gated delta rule, one token at a time: the reference, in the precision of its inputs.

    Args:
        q, k: queries and keys, [B, T, G, K], as they enter the recurrence. (transformers' rules
            take them raw: they first normalise both to length one and scale q by K ** -0.5.)
        v: values, [B, T, H, V]; key head g serves the value heads g H/G ... (g+1) H/G - 1.
        log_a: log of the decay, [B, T, H], in nats a token, at most 0.
        b: write strength, [B, T, H], in 0...1 (0...2 where negative eigenvalues are allowed).
        state: S before the first token, [B, H, V, K]; zero if None. It is not changed.

    Returns:
        the readouts y [B, T, H, V], and S after the last token [B, H, V, K].

    Source: Yang, Kautz & Hatamizadeh 2024, eq. 10, S (a (I - b k k^T)) + b v k^T, multiplied out.
    """
    B, T, H, V = v.shape
    G, K = k.shape[2:]
    q = q.repeat_interleave(H // G, dim=2)                          # [B, T, H, K]
    k = k.repeat_interleave(H // G, dim=2)                          # [B, T, H, K]
    S = v.new_zeros(B, H, V, K) if state is None else state
    y = torch.empty_like(v)
    for t in range(T):
        S = S * log_a[:, t, :, None, None].exp()                    # decay first      [B, H, V, K]
        held = S @ k[:, t, :, :, None]                              # held under k_t   [B, H, V, 1]
        error = v[:, t, :, :, None] - held                          # what is missing  [B, H, V, 1]
        write = b[:, t, :, None, None] * error                      # written of it    [B, H, V, 1]
        S = S + write @ k[:, t, :, None, :]                         # under k_t        [B, H, V, K]
        y[:, t] = (S @ q[:, t, :, :, None])[..., 0]                 # read with q_t    [B, H, V]
    return y, S


def decay_horizon(mean_log_a):
    """Tokens over which a head's decay alone shrinks its state by a factor e: -1 / mean_t(log a_t).

    mean_log_a: the mean of log a over tokens, any shape, nats a token; average first, then invert.
    A head that never decays (mean 0) has horizon infinity. Raises Error for a mean above 0.
    """
    mean_log_a = torch.as_tensor(mean_log_a, dtype=torch.float64)
    if (mean_log_a > 0).any():
        raise Error("a mean log decay is above 0: a decay is at most 1, so its logarithm at most 0")
    return 1 / mean_log_a.abs()                                     # abs: 1 / -0.0 is -infinity


# ---- 2. the state: its modes, effective rank, truncation, storage -------------------------------

def modes(state):
    """Singular values and right singular vectors of every matrix, the largest first.

    state [..., V, K] -> sigma [..., M] and the vectors [..., K, M], as columns, both in float64.

    S = U Sigma W^T gives S^T S = W Sigma^2 W^T, so one symmetric eigenproblem of size K has both.
    The Gram matrix squares the condition number, which in float64 costs none of the digits that
    the float32 states of models have; it is formed from a state scaled to size one, so that
    nothing under- or overflows. Raises Error for a state with NaN or infinity.
    """
    M = min(state.shape[-2:])
    size = state.abs().amax((-2, -1), keepdim=True).double()        # [..., 1, 1]
    if not torch.isfinite(size).all():
        raise Error("a state holds NaN or infinity, so it has no singular modes: the model has "
                    "diverged (if it ran in half precision, try --dtype float32)")
    scaled = state.double() / size.clamp_min(torch.finfo(torch.float64).tiny)
    squares, vectors = eigh(scaled.mT @ scaled)                     # torch.linalg's, see below
    sigma = squares[..., -M:].clamp_min(0).sqrt() * size[..., 0]    # [..., M], ascending
    return sigma.flip(-1), vectors[..., -M:].flip(-1)


def effective_rank(sigma):
    """exp of the entropy of the normalised singular values, exp(-sum_j p_j log p_j).

    sigma: singular values [..., M] -> [...]. n equal values give n, one value alone gives 1, and
    the zero matrix, which has no modes, gives 0. Source: Roy & Vetterli 2007, "The effective rank",
    section 2.
    """
    total = sigma.sum(-1, keepdim=True)
    p = sigma / total.clamp_min(torch.finfo(sigma.dtype).tiny)
    return torch.special.entr(p).sum(-1).exp() * (total[..., 0] > 0)


BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int6": 6, "int5": 5,
        "int4": 4, "int3": 3, "int2": 2}
Store = Literal[tuple(BITS)]


def truncate(state, rank, place=None, metric=None, store="float32"):
    """Each matrix with `rank` of its singular modes: S_r = sum_{j<=r} sigma_j u_j w_j^T.

    Args:
        state: matrices [..., V, K], in any float dtype, on any device.
        rank: modes to keep, from 0 up: an int, or ints that broadcast with the states' [...]; so
            ranks [R, 1] of states [H, V, K] give [R, H, V, K], each state decomposed once. Rank 0
            wipes it; a rank of M or more leaves it whole, in float32 bit for bit.
        place: [..., M], of mode j (0 is the largest) its place in the order of keeping: modes whose
            place is below the rank are kept. Mode j has place j if None.
        metric: A [..., K, K], of read_metric, if modes are to be those of S A; by default A = 1.
        store: how numbers are stored, one of BITS: all of a whole state, or the two factors.

    Returns:
        the states as they come back, in their own dtype. Raises Error for what is no rank, and for
        a state with NaN or infinity.

    S_r = S W W^T with the kept right singular vectors W as columns: by Eckart & Young (1936) the
    nearest matrix of rank r, without left singular vectors or a division by a small sigma. With a
    metric, S_r = (S A W)(W^T A^-1), of all matrices of rank r the one with the least readout error
    E |(S - S_r) q|^2 of queries with E q q^T = A A^T (weighted low-rank approximation; as the
    whitening of SVD-LLM, Wang et al. 2024, arXiv 2403.07378, section 3.1).
    """
    M = min(state.shape[-2:])
    rank = torch.as_tensor(rank, device=state.device)
    if rank.is_floating_point() or rank.dtype == torch.bool or (rank < 0).any():
        raise Error(f"a rank is a whole number from 0 up, not {rank.tolist()}")
    place = torch.arange(M) if place is None else place
    S = state.to(torch.promote_types(state.dtype, torch.float32))
    if metric is not None:
        S = S @ metric.to(S)                                        # S A              [..., V, K]
    right = modes(S)[1].to(S.dtype)                                 # W                [..., K, M]
    left = stored(S @ right, store)                                 # S A W            [..., V, M]
    if metric is not None:
        right = torch.linalg.inv(metric).mT.to(S) @ right           # A^-T W           [..., K, M]
    kept = place.to(state.device) < rank[..., None]                 #                  [..., M]
    cut = (left * kept[..., None, :]) @ stored(right, store).mT     # S_r              [..., V, K]
    whole = rank[..., None, None] >= M
    return torch.where(whole, stored(state, store), cut.to(state.dtype))


def read_metric(gram):
    """A [..., K, K] for truncate, from the sum of q~ q~^T over the effective queries so far.

    A A^T is that sum, scaled to a mean diagonal of 1, plus 1e-3 of the identity: what has not been
    read so far may still be.
    """
    size = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    share = gram / size.clamp_min(torch.finfo(gram.dtype).tiny)
    return torch.linalg.cholesky(share + 1e-3 * torch.eye(gram.shape[-1]).to(gram))


def stored(x, store):
    """Matrices [..., V, K] as they come back from storage in one of BITS.

    bfloat16 and float16 take each number as it is; fp8 (float8_e4m3fn) and the symmetric integers
    take it in units of its column's scale, absmax / largest, itself a bfloat16 (in float16 small
    ones vanish), as SGLang's int8 pool of states does (its pull request 28185). A column is a key
    channel of a whole state, and a mode of a factor. What is too large saturates.
    """
    if store == "float32":
        return x
    floats = {"bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.float8_e4m3fn}
    kind = floats.get(store)                                        # None: an integer
    largest = torch.finfo(kind).max if kind else 2 ** (BITS[store] - 1) - 1
    scale = 1
    if BITS[store] <= 8:                                            # one for each column
        scale = (x.abs().amax(-2, keepdim=True) / largest).bfloat16().to(x.dtype)
        scale[scale == 0] = 1
    units = (x / scale).clamp(-largest, largest)
    units = units.to(kind).to(x.dtype) if kind else units.round()
    return units * scale


# ---- 3. the run: segments, states, gates and queries, losses ------------------------------------

@torch.inference_mode()
def segments(model, ids, segment, cache, end=None):
    """Feed ids [B, T] to the model so that no call crosses a multiple of `segment`.

    Yields, after each call, (start, hidden, boundary): the position of the call's first token, the
    hidden states [B, n, D] before the head, and whether the position now reached is a boundary, a
    multiple of `segment` with tokens to follow. What the caller does to the cache in the body of
    its loop happens before the next call; if it makes one row many, the ids go to all of them.

    cache: of transformers, changed in place; positions count on from the tokens that it has seen.
    end: the length of the whole run, if more ids follow in a later call.

    Raises Error for NaN or infinity in the hidden states, and where the model ignored the cache.
    """
    start, rows = cache.get_seq_length(), len(ids)
    end = end or start + ids.shape[1]
    cuts = range(segment - start % segment, ids.shape[1], segment)
    for part in ids.tensor_split(tuple(cuts), dim=1):
        stop = start + part.shape[1]
        part = part.expand(rows, -1).to(model.device)
        hidden = model.base_model(part, cache=cache, use_cache=True).last_hidden_state
        if cache.get_seq_length() != stop:
            raise Error(f"transformers {transformers.__version__} does not fill the cache it is "
                        "given, so the model would run without a memory: install 5.24.0 or later")
        if not torch.isfinite(hidden).all():
            raise Error(f"the model's output is NaN or infinite by token {stop}: its weights are, "
                        "or it has overflowed (if it ran in half precision, try --dtype float32)")
        yield start, hidden, stop % segment == 0 and stop < end
        start, rows = stop, len(states_in(cache)[0])


def states_in(cache):
    """The states of every GDN layer, views [B, H, V, K] of the cache, which has the transposes."""
    layers = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    return [layer.recurrent_states[0].mT for layer in layers]


@contextlib.contextmanager
def recorded_rule(model):
    """The calls that the layers make of the gated delta rule: a list that grows as the model runs.

    A call of the model adds one for each GDN layer, in their order: (rule, q, k, v, others) of row
    0, the untouched one, so that rule(q, k, v, **others) repeats it. q and k [1, n, G, K] are raw,
    v is [1, n, H, V]; among the others are g, which is log a, and beta, which is b, [1, n, H] each.
    """
    layer = next(m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet"))
    module = sys.modules[type(layer).__module__]                    # of its family
    names = ("torch_chunk_gated_delta_rule",                        # for many tokens, and for one
             "torch_recurrent_gated_delta_rule")
    calls = []

    def recording(rule):
        def recorded(q, k, v, g, beta, **others):
            row = [x[:1].clone() for x in (q, k, v, g, beta)]
            calls.append((rule, *row[:3], {**others, "g": row[3], "beta": row[4]}))
            return rule(q, k, v, g=g, beta=beta, **others)
        return recorded

    recorders = {name: recording(getattr(module, name)) for name in names}
    with mock.patch.multiple(module, **recorders):                  # and puts them back
        yield calls


@torch.inference_mode()
def effective_queries(calls):
    """What a segment asks of the state S carried into it: q~_t [n, H, K]; it reads S q~_t.

    calls: those of one layer in the segment, as recorded.

    With values 0 the rule is S_t = S F_1 ... F_t, F_i = a_i (I - b_i k_i k_i^T), counted from the
    segment's first token; so it reads S_t q_t = S q~_t, and from the identity as S it reads q~_t.
    """
    rule, _, _, _, others = calls[0]
    q, k, v = (torch.cat([call[i] for call in calls], dim=1) for i in (1, 2, 3))
    H, K = v.shape[2], k.shape[-1]
    gates = {name: torch.cat([call[4][name] for call in calls], dim=1) for name in ("g", "beta")}
    identity = torch.eye(K, device=q.device).repeat(1, H, 1, 1)     # [1, H, K, V = K]
    nothing = v.new_zeros(*v.shape[:3], K)
    others = {**others, **gates, "initial_state": identity, "output_final_state": False}
    return rule(q, k, nothing, **others)[0][0]


def query_gram(calls, layers):
    """sum_t q~_t q~_t^T of every head over the calls of a segment, [L, H, K, K], in float64."""
    grams = []
    for layer in range(layers):
        one = calls[layer::layers]                                  # they come layer by layer
        queries = effective_queries(one).double().cpu()             # [n, H, K]
        grams.append(torch.einsum("nhk,nhj->hkj", queries, queries))
    return torch.stack(grams)


Keep = Literal["top", "bottom", "random", "read"]


@dataclass
class Cut:
    """What is done to the states at a boundary."""
    keep: Keep              # which modes stay: the largest, smallest, random ones, or the most read
    store: Store            # how what stays is stored
    heads: torch.Tensor     # whether a head is cut at all, [L, H]


@torch.inference_mode()
def truncate_rows(cache, ranks, cut, seed, calls, gram=0.0):
    """Truncate row 1 + i of every state in the cache to ranks[i] modes, in place; row 0 is left.

    Until the first boundary all rows are the same, so the run begins with one: a cache of a single
    row becomes one of 1 + R rows, and its states are decomposed once for all of them. For modes
    that are read most the caller keeps what has been read so far: it gives gram and gets the next.

    Args:
        seed: of the random modes, drawn anew for each layer and head, and alike for all ranks.
        calls: those since the boundary before, as recorded of row 0; the list is emptied.
        gram: what this returned at the boundary before: for each head the sum of q~ q~^T over all
            effective queries so far, [L, H, K, K], or 0 where modes are not kept by what is read.
    """
    one_row = len(states_in(cache)[0]) == 1
    if one_row:
        cache.reorder_cache(torch.zeros(1 + len(ranks), dtype=torch.long))      # row 0, 1 + R times
    states = states_in(cache)                                       # [1 + R, H, V, K] each
    rank = torch.tensor(ranks)[:, None]                             # [R, 1]
    draws = torch.Generator().manual_seed(seed)
    if cut.keep == "read":
        gram = gram + query_gram(calls, len(states))
    calls.clear()
    for layer, rows in enumerate(states):
        place = torch.arange(min(rows.shape[-2:])).expand(rows.shape[1], -1)        # [H, M]
        if cut.keep == "bottom":
            place = place.flip(-1)
        if cut.keep == "random":
            place = torch.rand(place.shape, generator=draws).argsort(-1)
        heads = cut.heads[layer].nonzero()[:, 0]
        metric = read_metric(gram[layer, heads]) if cut.keep == "read" else None
        before = rows[:1, heads] if one_row else rows[1:, heads]    # [1 or R, heads, V, K]
        rows[1:, heads] = truncate(before, rank, place[heads], metric, cut.store)
    return gram


@torch.inference_mode()
def token_losses(model, hidden, targets):
    """Loss, KL and agreement of every row and token, [3, B, n], in float64 on the CPU.

    hidden: states [B, n, D] before the head; the untouched model is row 0. targets [n]: the tokens
        that follow.

    The next-token cross-entropy in nats; KL(p_0 || p_row) in nats, over the W words of the
    vocabulary; and whether row 0's most likely token is the row's, too (1 or 0). Logits are held of
    row 0 and of one more row at a time; each row goes through the head once.
    """
    head = model.get_output_embeddings()
    full = head(hidden[0]).float()                                  # [n, W]
    top, targets = full.argmax(-1, keepdim=True), targets.to(full.device)[:, None]      # [n, 1]
    words = 2 ** 19 if full.device.type == "cpu" else 2 ** 24       # at once: a cache holds them
    few = max(1, words // full.shape[-1])                           # tokens at once
    found = torch.zeros(3, *hidden.shape[:2], dtype=torch.float64, device=full.device)
    for row in range(len(hidden)):
        logits = full if row == 0 else head(hidden[row])            # [n, W]
        for start in range(0, len(full), few):
            at = slice(start, start + few)
            x = logits[at].float()
            found[0, row, at] = x.logsumexp(-1) - x.gather(1, targets[at])[:, 0]
            if row > 0:
                found[1, row, at] = kl_divergence(full[at], x)
            found[2, row, at] = x.gather(1, top[at])[:, 0] == x.amax(-1)
        del logits                                                  # before there is another
    return found.cpu()


def kl_divergence(full, logits):
    """KL(p_full || p_logits) of each token, [n], in nats, in float64; logits [n, W] of float32.

    With d = logits - full, less its mean under p_full, it is log(sum p_full exp(d)): no difference
    of large sums, so exact where it is small.
    """
    p, d = full.softmax(-1).double(), (logits - full).double()      # [n, W]
    total = p.sum(-1)                                   # 1 but for rounding, of the size of some KL
    d -= (torch.linalg.vecdot(p, d) / total)[:, None]
    return (torch.linalg.vecdot(p, d.expm1_()) / total).clamp_min(0).log1p()


# From here on it is plumbing, and you may stop reading: threads, models, documents, files, flags.

# LAPACK on several threads gains nothing on matrices this small, and loses everything when the
# machine is busy (OpenBLAS issue 5517): so a thread for each part of a batch. On a GPU, cuSOLVER's
# batched routine has returned wrong vectors without a word (pytorch issue 192483) and failed to
# converge (94772): so its results are checked.

def eigh(gram):
    """Eigenvalues [..., K], ascending, and eigenvectors of symmetric matrices [..., K, K]."""
    solve = eigh_on_cpu if gram.device.type == "cpu" else checked_eigh
    values, vectors = solve(gram.reshape(-1, *gram.shape[-2:]))
    return values.view(gram.shape[:-1]), vectors.view(gram.shape)


def eigh_on_cpu(gram):
    """Of a batch [N, K, K] in memory: parts of it side by side, a thread each."""
    threads = torch.get_num_threads()
    parts = gram.tensor_split(max(1, min(len(gram), 8 * threads)))  # small parts even out
    torch.set_num_threads(1)                                        # also in threads begun now
    try:
        with ThreadPoolExecutor(threads) as pool:
            values, vectors = zip(*pool.map(torch.linalg.eigh, parts))
    finally:
        torch.set_num_threads(threads)
    return torch.cat(values), torch.cat(vectors)


def checked_eigh(gram, solve=torch.linalg.eigh):
    """solve(gram), where V^T V = 1 and G V = V Lambda hold; the rest is solved on the CPU."""
    size = gram.abs().amax((-2, -1)) + torch.finfo(gram.dtype).tiny
    try:
        values, vectors = solve(gram)
    except torch.linalg.LinAlgError:
        values, vectors = gram[..., 0] * torch.nan, gram * torch.nan
    slant = vectors.mT @ vectors - torch.eye(gram.shape[-1]).to(gram)
    residual = gram @ vectors - vectors * values[..., None, :]
    error = slant.abs().amax((-2, -1)) + residual.abs().amax((-2, -1)) / size
    wrong = ~(error < 1e-9)                                         # NaN is wrong, too
    if wrong.any():
        warnings.warn(f"the eigensolver of {gram.device} failed on some matrices: these, and such "
                      "as come later, are solved on the CPU")       # which is shown once
        for result, again in zip((values, vectors), eigh_on_cpu(gram[wrong].cpu())):
            result[wrong] = again.to(gram)
    return values, vectors


# ---- models -------------------------------------------------------------------------------------

BUNDLED = ("tiny/hybrid", "tiny/recurrent")


@dataclass
class Run:
    """One model, all that is to be known of it, and the clock of what is being measured."""
    model: str              # the hub id, tiny/..., or the folder's path
    folder: Path            # where its files are
    output: Path            # where its results go: results/<last part of the name>
    config: object          # the configuration of its text model, of transformers
    tokenizer: object
    device: str             # as typed: transformers' device_map
    dtype: torch.dtype
    layers: list            # the indices of its GDN layers
    state: list             # the shape of a state, [V, K]
    environment: dict       # versions, device, dtype, and what tells this model from others
    net: object = None      # the model itself, once its weights are loaded
    bar: tqdm = field(default_factory=lambda: tqdm(disable=True))
    began: float = 0.0      # when the item that is being measured was begun
    cutting: float = 0.0    # seconds of it spent at boundaries


@contextlib.contextmanager
def at_boundary(run):
    """Count the block's seconds as spent at boundaries; `segments` has waited for a GPU before."""
    start = time.perf_counter()
    yield
    run.cutting += time.perf_counter() - start


def one_line(error):
    return " ".join(str(error).split())[:300] or type(error).__name__


def from_hub(get, *names, **options):
    """get(*names) of huggingface_hub: from its cache where that is complete, else from the hub."""
    with contextlib.suppress(huggingface_hub.errors.LocalEntryNotFoundError):
        path = Path(get(*names, local_files_only=True, **options))
        # Other programs leave folders in the cache that hold only some of a model's files.
        needed = [path / "tokenizer_config.json", *weight_files(path)] if path.is_dir() else [path]
        if all(file.exists() for file in needed):
            return path
    print(f"asking the Hugging Face hub for {' '.join(names)}, which is not in the cache",
          file=sys.stderr)
    return Path(get(*names, **options))


def weight_files(folder):
    """The files that transformers reads a folder's weights from."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists() or not index.exists():
        return [folder / "model.safetensors"]
    with reading(index):
        names = json.loads(index.read_text())["weight_map"].values()
        return [folder / name for name in sorted(set(names))]


def find_model(model):
    """The name and the folder of a model, None for a hub id; of a hub's snapshot folder, the id."""
    if model in BUNDLED:
        return model, Path(__file__).resolve().parent / model
    folder = Path(os.path.abspath(os.path.expanduser(model)))
    if folder.is_dir() and folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/"), folder
    if folder.is_dir():
        return str(folder), folder
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
        raise Error(f"--model {model!r} is no folder, and a hub id looks like name/model")
    return model, None


@contextlib.contextmanager
def reading(what):
    """Whatever a library raises on a model's files, of many kinds, is one sentence about them."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MemoryError) or "memory" in str(error):
            raise
        says = f"{type(error).__name__}: {one_line(error)}"
        says = says.split(":")[0] if "above report" in says else says       # it is not shown here
        raise Error(f"transformers {transformers.__version__} cannot read {what} ({says})"
                    ) from None


def open_model(model, device="auto", dtype="auto", results="results"):
    """A Run, without the weights. Raises Error for what is no GDN model, is incomplete, cannot run
    here, or is not the model whose results are there."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device_found = device_name(device)
    name, folder = find_model(model)
    here = folder or from_hub(huggingface_hub.hf_hub_download, model, "config.json").parent
    with reading(f"the config.json of --model {model}"):
        whole = AutoConfig.from_pretrained(here)
        config = whole.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or []
    if "linear_attention" not in kinds or not hasattr(config, "linear_key_head_dim"):
        raise Error(f"--model {model!r} ({config.model_type}) has no Gated DeltaNet layers; "
                    "qwen3_5, qwen3_5_moe, qwen3_next and olmo_hybrid models have")
    if set(kinds) == {"linear_attention"}:
        raise Error(f"--model {model!r} has GDN layers alone, which transformers "
                    f"{transformers.__version__} cannot run with a cache")
    here = folder or from_hub(huggingface_hub.snapshot_download, model,
                              allow_patterns=["*.json", "*.txt", "*.model", "*.safetensors"])
    with reading(f"the tokenizer of --model {model}"):
        tokenizer = AutoTokenizer.from_pretrained(here)
    if not tokenize(tokenizer, "a text"):
        raise Error(f"--model {model!r} has no tokenizer.json beside its config.json")
    last = max(tokenizer.get_vocab().values())
    if last >= config.vocab_size:
        raise Error(f"--model {model!r} has embeddings for {config.vocab_size} tokens, and its "
                    f"tokenizer gives ids up to {last}: it is another model's")
    if dtype == "auto":
        dtype = config.dtype or whole.dtype or torch.float32
    else:
        dtype = getattr(torch, dtype)
    digests = identity(here)
    output = Path(results) / Path(name).name
    for path in sorted(output.glob("**/*.json")):
        made = read_results(path)
        for part in digests:
            if made["environment"].get(part) != digests[part]:
                raise Error(f"{path} comes from {made['model']} with another {part} than {name} has"
                            f" now: delete the folder {output} to start over, or give another "
                            "--results")
    environment = {"torch": torch.__version__, "transformers": transformers.__version__,
                   "device": device_found, "dtype": str(dtype).removeprefix("torch."), **digests}
    layers = [i for i, kind in enumerate(kinds) if kind == "linear_attention"]
    state = [config.linear_value_head_dim, config.linear_key_head_dim]
    return Run(name, here, output, config, tokenizer, device, dtype, layers, state, environment)


def identity(folder):
    """What the numbers depend on: eight digits each of the weights, configuration and tokenizer.

    Of 512 values of every stored tensor, at places drawn once for all: so it hangs neither on
    --dtype nor on what fits into memory nor on how many files the weights are in.
    """
    weights = []
    for file in weight_files(folder):
        with reading(f"{file}: is it whole?"), safetensors.safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                values = tensors.get_tensor(name).reshape(-1, 1).view(torch.uint8)  # [n, bytes]
                if len(values) > 512:
                    draws = torch.Generator().manual_seed(0)
                    values = values[torch.randint(len(values), (512,), generator=draws)]
                weights.append(name.encode() + hashlib.sha256(values.numpy().tobytes()).digest())
    contents = {"weights": sorted(weights)}
    files = {"config": ["config.json", "generation_config.json"],
             "tokenizer": ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                           "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt"]}
    for part, names in files.items():
        contents[part] = [(folder / name).read_bytes() for name in names
                          if (folder / name).exists()]
    return {part: hashlib.sha256(b"".join(content)).hexdigest()[:8]
            for part, content in contents.items()}


def device_name(device):
    """Check that --device is to be had, and name it, without the number of a GPU."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if device == "auto":
        return f"cuda ({' + '.join(gpus)})" if gpus else "cpu"
    try:
        found = torch.zeros(1, device=device, dtype=torch.float64)  # Apple's mps has no float64
        found.item()                                                # "meta" has no values
    except (RuntimeError, AssertionError, TypeError) as error:
        raise Error(f"--device {device!r} is not to be had here: {one_line(error)}") from None
    return f"cuda ({gpus[found.device.index]})" if found.is_cuda else found.device.type


def load_model(run, **placement):
    """The weights of an opened model, run.net, ready to run; one line says which, and on what.

    A checkpoint saved with its vision tower loads as its text model. placement: as transformers'.
    """
    half = run.dtype in (torch.bfloat16, torch.float16)
    if not (half and run.environment["device"].startswith("cuda")):
        for package in ("fla", "causal_conv1d"):                    # fail on CPUs, fla in float32
            sys.modules.setdefault(package, None)
    with reading(f"the weights in {run.folder}: its config.json asks for what is not to be had, or "
                 "tensors have other names or shapes than it says, or stand there twice"):
        run.net, info = AutoModelForCausalLM.from_pretrained(
            run.folder, dtype=run.dtype, device_map=run.device, output_loading_info=True,
            ignore_mismatched_sizes=True, **placement)
    for key, says in (("missing_keys", "lacks weights that its config.json asks for"),
                      ("mismatched_keys", "has weights of other shapes than its config.json says"),
                      ("unexpected_keys", "has weights that the model would not read")):
        names = [str(name) for name in info[key]]                   # mismatched: with both shapes
        names = [name for name in names if not re.search(r"\b(visual|vision_\w+|mtp)\.", name)]
        if names:                               # they would be random, or silently left out
            raise Error(f"{run.model} {says}: {min(names)} ({len(names)} in all)")
    with reading(f"a token with {run.model}: its config.json may ask for what its classes lack"):
        run.net(torch.tensor([[0]]).to(run.net.device), cache=DynamicCache(config=run.net.config))
    fast = [package for package in ("fla", "causal_conv1d") if sys.modules.get(package)]
    print(f"{run.model}: {len(run.layers)} GDN layers x {run.config.linear_num_value_heads} heads, "
          f"states {run.state[0]} x {run.state[1]}, {run.environment['dtype']} on "
          f"{run.environment['device']}, {' and '.join(fast) or 'reference'} kernels",
          file=sys.stderr)


# ---- documents ----------------------------------------------------------------------------------

def tokenize(tokenizer, content):
    """The ids of a text, without what a tokenizer appends to it, such as an end-of-text token."""
    found = tokenizer(content, verbose=False, return_special_tokens_mask=True)
    last = len(found.input_ids)
    while last and found.special_tokens_mask[last - 1]:
        last -= 1
    return found.input_ids[:last]


def documents(source, tokenizer, count, tokens):
    """The first `count` texts of a source with at least `tokens` tokens: [(name, SHA-256, ids
    [1, tokens])]. Raises Error, with what was found, if there are too few."""
    found, longest, seen = [], 0, 0
    for name, content in source_texts(source):
        seen += 1
        ids = first_tokens(content, tokenizer, tokens)
        longest = max(longest, len(ids))
        if len(ids) >= tokens:
            sha = hashlib.sha256(content.encode()).hexdigest()
            found.append((name, sha, torch.tensor([ids[:tokens]])))
        if len(found) == count:
            return found
    if not seen:
        raise Error(f"--documents {source} holds no text: it takes .txt, .jsonl or .jsonl.gz files "
                    "(those of subfolders and hidden ones are not read)")
    raise Error(f"--documents {source} has {len(found)} of {seen} documents with at least {tokens} "
                f"tokens (the longest has {longest}), and --docs asks for {count}: ask for fewer "
                "with --docs, or for shorter ones with --tokens")


def first_tokens(content, tokenizer, count):
    """At least the first `count` tokens of a text, or all, without reading a long one to its end.

    A cut changes tokens near it: so a beginning is enough where it has twice as many.
    """
    ids = tokenize(tokenizer, content[:16 * count + 1024])
    if len(ids) > 2 * count + 16:
        return ids
    return tokenize(tokenizer, content)


def source_texts(source):
    """(name, text) of every document of --documents, in an order that is the same for everybody."""
    path = Path(os.path.expanduser(source))
    if source == "stdlib":
        for file in stdlib_files(held_out=True):
            yield "/".join(file.parts[-2:]), file.read_text(encoding="utf-8", errors="replace")
    elif source == "c4":
        for shard in range(8):
            name = f"en/c4-validation.{shard:05d}-of-00008.json.gz"
            file = from_hub(huggingface_hub.hf_hub_download, "allenai/c4", name,
                            repo_type="dataset")
            yield from jsonl_texts(file, name)
    elif os.path.isdir(path) or os.path.isfile(path):               # no pipe, no device
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if not file.is_file() or file.name.startswith("."):
                continue
            if re.search(r"\.jsonl?(\.gz)?$", file.name.lower()):
                yield from jsonl_texts(file, file.name)
            else:
                yield file.name, read_text(file)
    else:
        raise Error(f"--documents is stdlib, c4, or an existing file or folder, not {source!r}")


def read_text(path):
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise Error(f"cannot read {path} as UTF-8 text ({error}): convert it to .txt, .jsonl or "
                    ".jsonl.gz") from None


def jsonl_texts(path, name):
    """(name:line, text) of a .jsonl file, gzipped or not, whose lines have a "text"."""
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    number = 1
    try:
        with opened(path, "rt", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                row = json.loads(line) if line.strip() else {"text": ""}
                if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                    has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                    raise ValueError(f"it has {has}"[:200])
                if row["text"]:
                    yield f"{name}:{number}", row["text"].encode(errors="replace").decode()
    except (ValueError, RecursionError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Error(f'{path}, at line {number}: not JSON lines with a "text" that is text, gzipped '
                    f"if so named ({one_line(error)})") from None


def stdlib_files(held_out):
    """Python's own source files: the fifth held out for evaluation, or what tiny/ is trained on.

    A file is held out when the SHA-256 of its name, relative to the library's folder, is 0 modulo
    5; files come in the order of that hash. Test suites, encodings, lib2to3, IDLE and other
    people's packages are in neither part. Other Python versions have other files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings",
            "pydoc_data", "config"}
    order = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not skip & set(name.parts):
            order[path] = int(hashlib.sha256(name.as_posix().encode()).hexdigest(), 16)
    return [path for path in sorted(order, key=order.get) if (order[path] % 5 == 0) == held_out]


# ---- result files -------------------------------------------------------------------------------

DEFAULTS = {"heads": "all", "keep": "top", "store": "float32", "segment": 256, "data": None}


def write_whole(path, write):
    """write(a temporary path), then rename: a killed run leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_results(path):
    """The content of a result file. Raises Error if it is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=int)      # no NaN
        record["script"], record["environment"]["weights"]
        parts = [record["arguments"], record["depends"], *record["items"]]
        if not all(isinstance(part, dict) for part in parts):
            raise TypeError
        return record
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Error(f"{path} cannot be read as a result file ({type(error).__name__}): delete "
                    "it to start over, or give another --results") from None


def bytes_stored(V, K, rank, store="float32"):
    """Bytes of one head's state [V, K] as `truncate` stores it, with two bytes a scale."""
    columns = [V] * K if rank >= min(V, K) else [V, K] * rank       # their lengths
    scale = 2 if BITS[store] <= 8 else 0
    return -(-sum(columns) * BITS[store] // 8) + scale * len(columns)           # rounded up


def open_results(run, stem, arguments, texts=(), cut=None, data=None, **more):
    """The path and the record of a result file: one to go on from, or a new one without items.

    The path is results/<model>/<stem>.json, named by what is not the default:
    <stem>.keep=random.json. What the numbers depend on is kept beside all arguments, and compared:
    the environment, the documents (texts) or data's hash, the cut, and of the arguments those that
    are listed here. Raises Error where the file was made with something else.
    """
    tokens = arguments.get("tokens") or arguments["length"]
    if tokens > run.config.max_position_embeddings:
        print(f"warning: {run.model} is made for at most {run.config.max_position_embeddings} "
              f"tokens (max_position_embeddings) and will read {tokens}", file=sys.stderr)
    script = stem.partition("/")[0]
    for key, default in DEFAULTS.items():
        if script != "02_decay" and arguments.get(key, default) != default:
            stem += f".{key}={'ruler' if key == 'data' else arguments[key]}"
    path = run.output / f"{stem}.json"
    depends = {**run.environment, "data": data}
    for key in ("task", "length", "tokens", "segment", "ranks", "seed", "keep", "store"):
        if key in arguments:
            depends[key] = arguments[key]
    if cut:
        depends["heads of 02_decay.json"] = cut.heads.nonzero().tolist()
        more["heads_cut"] = [int(cut.heads.sum()), cut.heads.numel()]
        more["bytes"] = {rank: bytes_stored(*run.state, rank, cut.store)
                         for rank in arguments["ranks"]}
    record = {"script": script, "model": run.model, "layers": run.layers, "state": run.state,
              "arguments": {**arguments, "model": run.model}, "environment": run.environment,
              "depends": depends, **more, "items": []}
    record = json.loads(json.dumps(record))
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()                 # known now, not in hours
    if not path.exists():
        return path, record
    made = read_results(path)
    again = "to go on; delete it, or give another --results, to start over"
    for key, now in record["depends"].items():
        if made["depends"].get(key) != now:
            raise Error(f"{path} was made with {key} {str(made['depends'].get(key))[:99]}, not "
                        f"{str(now)[:99]}: run it with the same {again}")
    for item, (name, sha, _) in zip(made["items"], texts):
        if item["sha256"] != sha:
            raise Error(f"{path} holds another document than {name}: run it with the same "
                        f"--documents {again}")
    return path, {**record, "items": made["items"]}


def start(run, path, left, tokens):
    """Where items are left to measure, load the model, and begin the bar and the first's time."""
    if not left:
        print(f"{path} is complete", file=sys.stderr)
        return
    load_model(run)
    print(f"{path}: {left} to measure", file=sys.stderr)
    run.bar = tqdm(total=tokens, unit="token", unit_scale=True)
    run.began, run.cutting = time.perf_counter(), 0.0


def add_item(run, path, record, item):
    """Append what was measured on one document or sample, with its time, and write the file whole.

    Raises Error for NaN, and where another run has changed the file in the meantime.
    """
    now = time.perf_counter()
    item["seconds"] = {"total": now - run.began, "truncate": run.cutting}
    run.began, run.cutting = now, 0.0
    there = read_results(path)["items"] if path.exists() else []
    if there != record["items"]:
        raise Error(f"{path} was changed by another run: this one stops, and leaves it as it is")
    record["items"].append(item)
    try:
        content = json.dumps(record, allow_nan=False) + "\n"
    except ValueError:
        raise Error(f"a result for {path} is NaN or infinite, so it was not written: the model has "
                    "overflowed (if it ran in half precision, try --dtype float32)") from None
    write_whole(path, lambda temporary: temporary.write_text(content, encoding="utf-8"))


def chosen_heads(run, heads):
    """The mask [L, H] of the heads that --heads names, by the horizons in 02_decay.json."""
    if heads == "all":
        return torch.ones(len(run.layers), run.config.linear_num_value_heads, dtype=torch.bool)
    path = run.output / "02_decay.json"
    items = read_results(path)["items"] if path.exists() else []
    if not items:
        raise Error(f"--heads {heads} needs the decay horizons of {run.model}, and there are none "
                    f"in {path}: run 02_decay.py first")
    log_a = torch.tensor([item["log_a"] for item in items])
    horizon = decay_horizon(log_a.double().mean(0))                 # [L, H]
    side, limit = heads.split("-")
    mask = horizon > float(limit) if side == "over" else horizon <= float(limit)
    if not mask.any():
        raise Error(f"--heads {heads} is no head of {run.model}: their horizons are "
                    f"{horizon.min():.0f} to {horizon.max():.0f} tokens")
    return mask


def check_ranks(run, ranks, default, store="float32"):
    """The ranks, largest first; the default ones as far as the states have so many modes, and all
    modes where a store rounds them."""
    modes = min(run.state)
    if ranks == default:
        ranks = [rank for rank in default if rank <= modes]
        if store != "float32":
            ranks.append(modes)
    if max(ranks) > modes:
        raise Error(f"--ranks {max(ranks)} is beyond the {modes} modes of {run.model}'s states")
    return sorted(set(ranks), reverse=True)


def mean_se(values):
    """Mean and standard error (ddof=1), which is None for a single value, and 0 of equal ones."""
    x = torch.tensor(values, dtype=torch.float64)
    if len(x) == 1:
        return x.item(), None
    return x.mean().item(), ((x - x[0]).std() / len(x) ** 0.5).item()


def with_error(values):
    """Their mean and standard error, like '+0.0053 ± 0.0011': two significant digits of the error.

    Where all values are the same there is no such error, and it is said of how many they are.
    """
    mean, error = mean_se(values)
    if not error:
        return f"{mean:+.4g} ({'all' if mean else 'none'} of {len(values)})"
    digits = 1 - int(f"{error:.1e}".split("e")[1])                  # 0.0011 -> 4
    if digits > 7:
        return f"{mean:+.1e} ± {error:.1e}"
    return f"{mean:+.{max(digits, 0)}f} ± {error:.{max(digits, 0)}f}"


# ---- flags: a parameter's annotation is str, a Literal, or one of these functions from what was
# typed to its value, whose docstring says what it takes ------------------------------------------

DType = Literal["auto", "float32", "bfloat16", "float16"]


def matched(pattern, typed):
    if not re.fullmatch(pattern, typed):
        raise ValueError
    return typed


def names(typed):
    """names with commas"""
    parts = matched(" *[^, ]+ *(, *[^, ]+ *)*", typed).replace(" ", "").split(",")
    return tuple(dict.fromkeys(parts))


def count(typed):
    """a whole number from 1"""
    return int(matched("0*[1-9][0-9]*", typed))


def count0(typed):
    """a whole number from 0"""
    return int(matched("[0-9]+", typed))


def counts(typed):
    """whole numbers with commas"""
    return tuple(map(count0, names(typed)))


def heads(typed):
    """all, over-N or upto-N"""
    return matched("all|(over|upto)-[0-9]+", typed)


FLAGS = {
    "model": "a folder, a hub id, tiny/hybrid or tiny/recurrent",
    "documents": "stdlib, c4, or a .txt, .jsonl, .jsonl.gz or folder of such files",
    "docs": "how many documents",
    "tokens": "how many tokens of each document",
    "segment": "tokens between boundaries; with 1 every token is followed by one",
    "ranks": "modes to keep, with commas; 0 keeps none",
    "keep": "which modes: the largest (top), those read most (read), or as controls bottom, random",
    "heads": "all, or those with a decay horizon over-N or upto-N tokens; 02 must have run",
    "store": f"how the states that cross a boundary are stored: {', '.join(BITS)}",
    "rows": "at most so many ranks side by side, if memory is short; all of them by default",
    "device": "auto, cpu, cuda, cuda:1, ...: transformers' device_map",
    "dtype": "the model's: auto (the checkpoint's own), float32, bfloat16 or float16",
    "results": "the folder of the results"}


def command(main):
    """Run main with the flags of the command line; an Error ends the program with one sentence.

    By itself Fire calls main first and complains of a mistyped flag afterwards. So it calls a
    stand-in with main's signature, which takes down what was typed, and main runs when Fire has
    found nothing to complain of.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):           # None: it was closed
        stream.reconfigure(errors="replace")                        # a terminal without a ±
    typed, help_asked = {}, {"-h", "--help"} & set(sys.argv)
    stand_in = functools.wraps(main)(lambda **flags: typed.update(flags))
    own = "" if "Args:" in main.__doc__ else "\n\n    Args:"
    shared = [f"\n        {name}: {FLAGS[name]}." for name in main.__annotations__
              if name in FLAGS and f" {name}: " not in main.__doc__]
    stand_in.__doc__ = main.__doc__.rstrip() + own + "".join(shared)
    fire.parser.DefaultParseValue = str                             # values stay as they were typed
    try:
        if {"-", "--"} & set(sys.argv[1:]):                         # Fire stops reading flags there
            raise Error("a dash alone is no flag: flags look like --docs 8, or --docs=8")
        fire.Fire(stand_in, ["--", "--help"] if help_asked else sys.argv[1:])
        main(**{name: converted(main, name, value) for name, value in typed.items()})
        if sys.stdout:
            sys.stdout.flush()
    except Error as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; what was finished is kept, and the same command goes on from there")
    except (OSError, huggingface_hub.errors.HFValidationError) as error:    # of files, of the hub
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)                # a pipe may have ended
        sys.exit(f"error: {one_line(error)}")
    except (RuntimeError, MemoryError) as error:
        if "memory" not in f"{type(error).__name__} {error}".lower():
            raise
        sys.exit("error: out of memory: try fewer --rows side by side, or shorter --tokens or "
                 f"--lengths ({one_line(error)})")


def converted(main, name, typed):
    """What was typed as its flag's value."""
    convert = main.__annotations__[name]
    choices = get_args(convert)                                     # of a Literal
    takes = ", ".join(choices) or ("text" if convert is str else convert.__doc__)
    if typed in ("", "True", "False"):                              # what Fire makes of no value
        raise Error(f"--{name} needs a value: {takes}")
    try:
        return choices[choices.index(typed)] if choices else convert(typed)
    except ValueError:
        raise Error(f"--{name} takes {takes}, not {typed!r}") from None
