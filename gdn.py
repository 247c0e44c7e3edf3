"""The Gated DeltaNet (GDN) state: its recurrence, its singular modes, and a model run without some.

A GDN head reads a text with a matrix for a memory. With keys and values as columns, and the decay
taken first, the gated delta rule (Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks", eq. 10)

    S_t = a_t S_{t-1} + b_t (v_t - a_t S_{t-1} k_t) k_t^T              y_t = S_t q_t

The state S fades by a_t, is asked what it holds under the key k_t, and is corrected towards the
value v_t with strength b_t; the query q_t reads it. How much of S does a trained model depend on?
The first part of this file has what is needed to ask: the recurrence, token by token; the state's
singular modes, and its truncation to the largest r of them; and the run of a Hugging Face model in
segments, with every state truncated in between. The numbered scripts ask, one question each.

    B  rows of a batch               H  value heads, each with a state      K  key dimension
    T  tokens of a document          G  key heads, each for H/G heads       V  value dimension
    n  tokens of one call            L  GDN layers                          M  modes, min(V, K)
    R  ranks, run as rows            W  words of the vocabulary             D  hidden size
"""
import contextlib
import functools
import gzip
import hashlib
import json
import os
import re
import sys
import sysconfig
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import fire
import huggingface_hub
import safetensors
import torch
import transformers
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache


class Error(Exception):
    """What a user can mend: told in one sentence, without a traceback."""


# ---- 1. the recurrence --------------------------------------------------------------------------

def gated_delta_rule(q, k, v, log_a, b, state=None):
    """The gated delta rule, one token at a time: the reference, in the precision of its inputs.

    Args:
        q, k: queries and keys, [B, T, G, K], as they enter the recurrence. (Qwen3.5 normalises
            both to length one and scales q by K ** -0.5 before: that is the layer's doing.)
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
    A head that never decays (mean 0) has horizon infinity. Raises Error for a mean above 0, which
    no decay has.
    """
    mean_log_a = torch.as_tensor(mean_log_a, dtype=torch.float64)
    if (mean_log_a > 0).any():
        raise Error("a mean log decay is above 0: a decay is at most 1, so its logarithm at most 0")
    return 1 / mean_log_a.abs()                                     # abs: 1 / -0.0 is -infinity


# ---- 2. the state: its modes, effective rank, truncation ----------------------------------------

def modes(state):
    """Singular values and right singular vectors of every matrix, the largest first.

    state [..., V, K] -> sigma [..., M] and the vectors [..., K, M], as columns, both in float64.

    S = U Sigma W^T gives S^T S = W Sigma^2 W^T, so one symmetric eigenproblem of size K has both.
    The Gram matrix squares the condition number, which in float64 costs none of the digits that
    the float32 states of models have; it is formed from a state scaled to size one, so that
    nothing under- or overflows. Raises Error for a state with NaN or infinity.
    """
    if splits(state):
        sigmas, vectors = zip(*on_every_core(modes, state))
        return torch.cat(sigmas), torch.cat(vectors)
    M = min(state.shape[-2:])
    size = state.abs().amax((-2, -1), keepdim=True).double()        # [..., 1, 1]
    if not torch.isfinite(size).all():
        raise Error("a state holds NaN or infinity, so it has no singular modes: the model has "
                    "diverged (try --dtype float32)")
    scaled = state.double() / size.clamp_min(torch.finfo(torch.float64).tiny)
    squares, vectors = eigh(scaled.mT @ scaled)                     # [..., K], [..., K, K]
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


KEEP = ("top", "bottom", "random")


def truncate(state, rank, keep="top", seed=0):
    """Each matrix with `rank` of its singular modes: S_r = sum_{j<=r} sigma_j u_j w_j^T (the post).

    Args:
        state: any batch of matrices [..., V, K], in any float dtype, on any device.
        rank: modes to keep, from 0 up: an int, or a tensor of ints that broadcasts with the batch;
            a state that several ranks share is decomposed once. Where the rank is at or above M
            the matrix comes back untouched, bit for bit; rank 0 wipes it.
        keep: "top", the largest modes; the controls are "bottom", the smallest, and "random", drawn
            with `seed` (an int, or a torch.Generator to go on with), anew for each matrix but
            shared along the dimensions that ranks vary in, so that ranks compare like with like.

    Returns:
        the truncated states, in the state's dtype. Raises Error for another rank or keep, and for
        a state with NaN or infinity.

    S_r = S W W^T with the kept right singular vectors W as columns: by Eckart & Young (1936) the
    nearest matrix of rank r, without left singular vectors or a division by a small sigma.
    """
    M = min(state.shape[-2:])
    rank = torch.as_tensor(rank, device=state.device)
    if rank.is_floating_point() or rank.dtype == torch.bool or (rank < 0).any():
        raise Error(f"a rank is a whole number from 0 up, not {rank.tolist()}")
    if keep not in KEEP:
        raise Error(f"keep is one of {', '.join(KEEP)}, not {keep!r}")
    batch = torch.broadcast_shapes(state.shape[:-2], rank.shape)
    ndim = max(len(batch), 1)
    state = state[(None,) * (ndim + 2 - state.ndim)]                # [..., V, K], at least one ...
    rank = rank[(None,) * (ndim - rank.ndim)]                       # [...], of as many
    place = torch.arange(M, device=state.device)                    # in the order of keeping
    if keep == "bottom":
        place = place.flip(0)
    if keep == "random":
        shape = [1 if ranks > 1 else n for ranks, n in zip(rank.shape, state.shape)]
        if not isinstance(seed, torch.Generator):
            seed = torch.Generator().manual_seed(seed)
        place = torch.rand(*shape, M, generator=seed).argsort(-1).to(state.device)
    kept = place < rank[..., None]                                  # [..., M], largest first
    if len(state) > 1:
        kept = kept.expand(len(state), *kept.shape[1:])             # to split with the states
    return keep_modes(state, kept).view(*batch, *state.shape[-2:])


def keep_modes(state, kept):
    """The states [..., V, K] with those modes alone where kept [..., M] is True."""
    if splits(state):
        return torch.cat(on_every_core(keep_modes, state, kept))
    _, W = modes(state)                                             # [..., K, M]
    used = kept.flatten(0, -2).any(0)                               # columns that some row keeps
    precise = state.to(torch.promote_types(state.dtype, torch.float32))
    W = W[..., used].to(precise.dtype)
    cut = precise @ (W * kept[..., None, used]) @ W.mT              # S W W^T
    return torch.where(kept.all(-1)[..., None, None], state, cut.to(state.dtype))


# ---- 3. the run: segments, states, gates and queries, losses ------------------------------------

@torch.inference_mode()
def segments(model, ids, segment, cache, position=0, end=None):
    """Feed ids [B, T] to the model so that no call crosses a multiple of `segment`.

    Yields, after each call, (start, hidden, boundary): the position of the call's first token, the
    hidden states [B, n, D] before the head, and whether the position now reached is a boundary, a
    multiple of `segment` with tokens to follow. What the caller does to the cache in the body of
    its loop happens before the next call. The logits are left to the caller: over a vocabulary of
    248,320 they are the peak of memory, and most callers need few of them.

    Args:
        ids: a single row is fed to as many rows as the cache has.
        cache: of transformers, changed in place; `position` says how many tokens it has consumed.
        end: how many tokens the whole run has, where it goes on after these ids.

    Raises Error for NaN or infinity in the hidden states, and where the model ignored the cache.
    """
    last = position + ids.shape[1]
    end = last if end is None else end
    start = position
    while start < last:
        stop = min(last, (start // segment + 1) * segment)
        part = ids[:, start - position:stop - position]
        part = part.expand(max(len(part), rows_in(cache)), -1)
        hidden = model.base_model(part, cache=cache, use_cache=True).last_hidden_state
        if cache.get_seq_length() != stop:
            raise Error(f"transformers {transformers.__version__} does not fill the cache it is "
                        "given, so the model would run without a memory: install 5.24.0 or later")
        if not torch.isfinite(hidden).all():
            raise Error(f"the model's output is NaN or infinite by token {stop}: it has overflowed "
                        "(try --dtype float32)")
        yield start, hidden, stop % segment == 0 and stop < end
        start = stop


def rows_in(cache):
    """Rows that a cache holds, 0 before it is used. (Its own batch_size ignores reorder_cache.)"""
    layer = next(layer for layer in cache.layers if hasattr(layer, "recurrent_states"))
    return len(layer.recurrent_states[0]) if layer.is_recurrent_states_initialized[0] else 0


def read_states(cache, layers):
    """All states of a run, [L, B, H, V, K], on the first one's device; the cache has transposes."""
    states = [cache.layers[i].recurrent_states[0].mT for i in layers]
    return torch.stack([state.to(states[0].device) for state in states])


@torch.inference_mode()
def truncate_rows(cache, layers, ranks, keep="top", seed=0, heads=None):
    """Truncate row i of every state in the cache to ranks[i] modes, in place; None leaves it whole.

    Until the first boundary all rows are the same, so the run begins with one: a cache of a single
    row becomes one of a row for each rank, and its states are decomposed once for all of them.

    heads: a boolean mask [L, H] of the heads to truncate; the others stay whole. All by default.
    """
    alike = rows_in(cache) < len(ranks)
    if alike:
        cache.reorder_cache(torch.zeros(len(ranks), dtype=torch.long))
    cut = torch.tensor([row for row, rank in enumerate(ranks) if rank], dtype=torch.long)
    rank = torch.tensor([ranks[row] for row in cut], dtype=torch.long)[:, None]     # [R, 1]
    wiped = [row for row, rank in enumerate(ranks) if rank == 0]
    draws = torch.Generator().manual_seed(seed)                     # one stream for all layers
    for layer, i in enumerate(layers):
        states = cache.layers[i].recurrent_states[0].mT             # a view, [rows, H, V, K]
        chosen = torch.arange(states.shape[1]) if heads is None else heads[layer].nonzero()[:, 0]
        source = states[:1, chosen] if alike else states[cut[:, None], chosen]
        states[cut[:, None], chosen] = truncate(source, rank, keep, draws)          # [R, h, V, K]
        for row in wiped:
            states[row, chosen] = 0.0


@contextlib.contextmanager
def recorded_rule(model):
    """Record the calls of the gated delta rule: a list of (rule, q, k, v, arguments by name).

    It grows by one entry for each GDN layer and call of the model, in the order of the layers. q
    and k [B, n, G, K] arrive before the normalisation, v is [B, n, H, V], and among the others are
    g, which is log a, and beta, which is b, both [B, n, H]. A layer takes its decay in float32, but
    from weights in the model's dtype: load the model in float32 for gates that are exact.

    Every family calls two functions of its own module, one for many tokens and one for a single
    one; recording there needs none of the layers' differing names, and works with fast kernels too.
    """
    layer = next(m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet"))
    module = sys.modules[type(layer).__module__]
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    rules = [getattr(module, name) for name in names]
    calls = []
    for name, rule in zip(names, rules):
        setattr(module, name, functools.partial(record_call, calls, rule))
    try:
        yield calls
    finally:
        for name, rule in zip(names, rules):
            setattr(module, name, rule)


def record_call(calls, rule, q, k, v, **others):
    calls.append((rule, q, k, v, others))
    return rule(q, k, v, **others)


@torch.inference_mode()
def effective_queries(rule, q, k, v, others):
    """What a segment asks of the state S carried into it: q~_t [B, n, H, K]; it reads S q~_t.

    q~_t = P_t q_t, where P_t is the product of the factors a (I - b k k^T) up to token t: the query
    as the decays and overwritings in between leave it. With values 0 and the identity for a state
    the gated delta rule returns just that; the arguments are those of a recorded call.
    """
    B, n, H = v.shape[:3]
    K = k.shape[-1]
    identity = torch.eye(K, dtype=torch.float32, device=q.device).repeat(B, H, 1, 1)
    nothing = v.new_zeros(B, n, H, K)
    others = {**others, "initial_state": identity, "output_final_state": False}
    return rule(q, k, nothing, **others)[0]


@torch.inference_mode()
def token_losses(model, hidden, targets):
    """Loss, KL and agreement of every row and token, each [B, n] in float32 on the CPU.

    hidden: states [B, n, D] before the head; the untouched model is row 0. targets [n]: the tokens
        that follow.

    Returns the next-token cross-entropy in nats; KL(p_0 || p_row) in nats, over the vocabulary; and
    whether a row's most likely token is that of row 0 (1 or 0). The probabilities [n, W] of row 0
    and those of one more row are all that is ever held, and each row goes through the head once.
    """
    head = model.get_output_embeddings()
    losses, divergences, agreements = [], [], []
    for row in hidden:
        log_p = head(row).float().log_softmax(-1)                   # [n, W]
        likeliest = log_p.argmax(-1)                                # [n]
        if not losses:
            full = log_p.exp()                                      # row 0, the untouched model
            entropy = -torch.linalg.vecdot(full, log_p)
            full_likeliest = likeliest
        losses.append(-log_p.gather(1, targets.to(log_p.device)[:, None])[:, 0])
        divergences.append(-entropy - torch.linalg.vecdot(full, log_p))
        agreements.append((likeliest == full_likeliest).float())
        del log_p                                                   # before there is another
    return tuple(torch.stack(rows).cpu() for rows in (losses, divergences, agreements))


# From here on it is plumbing, and you may stop reading: threads, models, documents, files, flags.

# ---- where eigenproblems run --------------------------------------------------------------------
# LAPACK on several threads gains nothing on matrices this small, and loses everything when the
# machine is busy (OpenBLAS issue 5517): so one thread for each part of a batch, and in it the whole
# of the part's work. On a GPU, cuSOLVER's batched routine has returned wrong vectors without a word
# (pytorch issue 192483) and failed to converge (94772): so its results are checked.

def splits(states):
    """Whether a batch is worth several threads; inside one of them torch counts a single one."""
    batch = states.ndim > 2 and len(states) > 1
    return batch and states.device.type == "cpu" and torch.get_num_threads() > 1


def on_every_core(work, *batches):
    """[work(*parts), ...] for parts of the batches along their first dimension, a thread each."""
    threads = torch.get_num_threads()
    count = min(len(batches[0]), 8 * threads)                       # small parts even out
    parts = [batch.tensor_split(count) for batch in batches]
    torch.set_num_threads(1)                                        # also in threads begun now
    try:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(work, *parts))
    finally:
        torch.set_num_threads(threads)


def eigh(gram):
    """Eigenvalues [..., K], ascending, and eigenvectors of symmetric matrices [..., K, K]."""
    if gram.device.type == "cpu":
        return torch.linalg.eigh(gram)
    return checked_eigh(gram, torch.linalg.eigh)


def checked_eigh(gram, solve):
    """solve(gram), where V^T V = 1 and G V = V Lambda hold; the rest is solved on the CPU."""
    size = gram.abs().amax((-2, -1)) + torch.finfo(gram.dtype).tiny
    try:
        values, vectors = solve(gram)
        slant = vectors.mT @ vectors - torch.eye(gram.shape[-1]).to(gram)
        residual = gram @ vectors - vectors * values[..., None, :]
        error = slant.abs().amax((-2, -1)) + residual.abs().amax((-2, -1)) / size
    except torch.linalg.LinAlgError:
        values, vectors = gram[..., 0].clone(), gram.clone()
        error = torch.full_like(size, torch.inf)
    wrong = ~(error < 1e-9)                                         # NaN is wrong, too
    if wrong.any():
        say_once(f"the eigensolver of {gram.device} failed on {int(wrong.sum())} of "
                 f"{wrong.numel()} matrices: these, and later ones, are solved on the CPU")
        solved = zip(*on_every_core(torch.linalg.eigh, gram[wrong].cpu()))
        values[wrong], vectors[wrong] = (torch.cat(parts).to(gram) for parts in solved)
    return values, vectors


@contextlib.contextmanager
def stopwatch(seconds, name):
    """Add the seconds that the block takes, on the GPUs too, to seconds[name]."""
    synchronize()
    start = time.perf_counter()
    yield
    synchronize()
    seconds[name] += time.perf_counter() - start


def synchronize():
    for i in range(torch.cuda.device_count()):
        torch.cuda.synchronize(i)


# ---- models -------------------------------------------------------------------------------------

HERE = Path(__file__).resolve().parent
# In tiny/recurrent the attention layer comes first, where it sees bare tokens and can't retrieve.
BUNDLED = ("tiny/hybrid", "tiny/recurrent")


def say_once(text, said=set()):
    if text not in said:
        said.add(text)
        print(text, file=sys.stderr)


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def from_library(what, load, *args, **kwargs):
    """load(...), with a library's failure told in one sentence."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        return load(*args, **kwargs)
    except Exception as error:           # OSError, ValueError, KeyError, ... for what a user typed
        raise Error(f"cannot load the {what} (transformers {transformers.__version__}): "
                    f"{first_line(error)}") from None


def from_hub(what, get, complete):
    """get(), from the hub's cache where it is complete there; else from the hub, which is said.

    Other programs leave folders in the cache that hold only some of a model's files.
    """
    with contextlib.suppress(huggingface_hub.errors.LocalEntryNotFoundError, ValueError):
        path = Path(get(local_files_only=True))
        if complete(path):
            return path
    print(f"asking the Hugging Face hub for the {what}", file=sys.stderr)
    return Path(from_library(f"{what} from the Hugging Face hub, and it is not in the cache", get))


def has_tokenizer(folder):
    return (folder / "config.json").exists() and (folder / "tokenizer_config.json").exists()


def has_weights(folder):
    index, names = folder / "model.safetensors.index.json", ["model.safetensors"]
    if index.exists():
        names = json.loads(index.read_text())["weight_map"].values()
    return all((folder / name).exists() for name in names)


def find_model(model):
    """The name and the folder of a model; of a hub id, the folder is None.

    The name is the id or the folder's path; of a snapshot folder in the hub's cache, the id.
    """
    path = HERE / model if model in BUNDLED else Path(os.path.abspath(os.path.expanduser(model)))
    if not os.path.isdir(path):
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
            raise Error(f"--model {model!r} is no folder, and a hub id looks like name/model")
        return model, None
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--").replace("--", "/"), path
    return (model if model in BUNDLED else str(path)), path


def open_model(model, device="auto", dtype="auto"):
    """All of a model but its weights: configuration, tokenizer, what it will run on.

    dtype "auto" is the checkpoint's own; device "map" spreads the layers over all devices. Raises
    Error for what is no GDN model, is incomplete, or cannot run here.
    """
    environment = {"torch": torch.__version__, "transformers": transformers.__version__,
                   "device": device_name(device)}
    name, folder = find_model(model)
    here = folder
    if folder is None:
        files = ["*.json", "*.txt", "*.model", "*.jinja"]
        here = from_hub(f"configuration of {model}, which is no folder here,", functools.partial(
            huggingface_hub.snapshot_download, model, allow_patterns=files), has_tokenizer)
    config = from_library(f"configuration of {model}", AutoConfig.from_pretrained, here)
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or []
    if "linear_attention" not in kinds or not hasattr(text, "linear_key_head_dim"):
        raise Error(f"--model {model!r} ({text.model_type}) has no Gated DeltaNet layers; qwen3_5, "
                    "qwen3_5_moe, qwen3_next and olmo_hybrid models have")
    if set(kinds) == {"linear_attention"}:
        raise Error(f"--model {model!r} has GDN layers alone, which transformers "
                    f"{transformers.__version__} cannot run with a cache")
    tokenizer = from_library(f"tokenizer of {model}", AutoTokenizer.from_pretrained, here)
    if not tokenizer("a text").input_ids:
        raise Error(f"--model {model!r} has no tokenizer.json beside its config.json")
    if folder is None:
        files += ["*.safetensors"]
        here = from_hub(f"weights of {model}", functools.partial(
            huggingface_hub.snapshot_download, model, allow_patterns=files), has_weights)
    own = text.dtype or config.dtype or torch.float32
    dtype = own if dtype == "auto" else getattr(torch, dtype)
    environment |= {"dtype": str(dtype)[6:], "weights": fingerprint(here)}
    return SimpleNamespace(
        model=name, folder=here, config=config, text=text, tokenizer=tokenizer, dtype=dtype,
        layers=[i for i, kind in enumerate(kinds) if kind == "linear_attention"],
        heads=text.linear_num_value_heads, device=device, environment=environment,
        state=[text.linear_value_head_dim, text.linear_key_head_dim])


def fingerprint(folder):
    """Eight digits that tell weights apart: a hash of some hundred values of every stored tensor.

    Of what is stored, so that it depends neither on --dtype nor on what fits into memory.
    """
    digests = []
    for file in sorted(folder.glob("*.safetensors")):
        with from_library(f"weights {file}", safetensors.safe_open, file, "pt") as tensors:
            for name in tensors.keys():
                values = tensors.get_tensor(name).flatten()
                some = values[::max(values.numel() // 512, 1)].contiguous().view(torch.uint8)
                digests.append(name.encode() + hashlib.sha256(some.numpy().tobytes()).digest())
    if not digests:
        raise Error(f"{folder} holds no .safetensors weights: save the model with save_pretrained")
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()[:8]


def device_name(device):
    """Check that --device is to be had, and name it, without the number of a GPU."""
    if device == "map":
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return " + ".join(["map", *gpus])
    try:
        found = torch.zeros(1, device=resolve(device), dtype=torch.float64)
        found.item()                                                # which "meta" has not
        found = found.device
    except (RuntimeError, AssertionError, TypeError) as error:      # Apple's mps has no float64
        raise Error(f"--device {device!r} is not to be had here: {first_line(error)}") from None
    return f"cuda ({torch.cuda.get_device_name(found)})" if found.type == "cuda" else found.type


def resolve(device):
    """The torch device where token ids begin their way."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cpu" if device == "map" else device


def load_model(run, **placement):
    """The weights of an opened model, ready to run; one line says which, and on what.

    A checkpoint saved with its vision tower loads as its text model. placement: more of what
    transformers takes, such as max_memory beside device "map".
    """
    on_gpu = torch.cuda.is_available() if run.device == "map" else "cuda" in resolve(run.device)
    if not on_gpu:                                                  # where fast kernels fail
        for package in ("fla", "causal_conv1d"):
            sys.modules.setdefault(package, None)
    if run.device == "map":
        placement["device_map"] = "auto"
    net, info = from_library(
        f"weights of {run.model}", AutoModelForCausalLM.from_pretrained, run.folder,
        config=run.config, dtype=run.dtype, output_loading_info=True, **placement)
    if info["missing_keys"]:                                        # they would be random, unsaid
        raise Error(f"{run.model} lacks weights that its config.json asks for: "
                    f"{sorted(info['missing_keys'])[0]}, ...")
    fast = [package for package in ("fla", "causal_conv1d") if sys.modules.get(package)]
    print(f"{run.model}: {len(run.layers)} GDN layers x {run.heads} heads, states {run.state[0]} x "
          f"{run.state[1]}, {run.environment['dtype']} on {run.environment['device']}, "
          f"{' and '.join(fast) or 'reference'} kernels", file=sys.stderr)
    return (net if run.device == "map" else net.to(resolve(run.device))).eval()


# ---- documents ----------------------------------------------------------------------------------

def documents(source, tokenizer, count, tokens):
    """The first `count` texts with at least `tokens` tokens: [(name, SHA-256, ids [1, tokens])].

    source: "stdlib", "c4", or a path to a .txt, a .jsonl or .jsonl.gz with a "text" field, or a
    folder of such files. Raises Error, with what was found, if there are too few.
    """
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
    raise Error(f"--documents {source} has {len(found)} of {seen} documents with at least {tokens} "
                f"tokens (the longest has {longest}), and --docs asks for {count}: ask for fewer "
                "with --docs, or for shorter ones with --tokens")


def first_tokens(content, tokenizer, count):
    """At least the first `count` tokens of a text, or all, without reading a long one to its end.

    A cut changes tokens near it, as a rule those of one word; a beginning is long enough when
    twice as much of the text begins with the same tokens.
    """
    size, before = 8 * count + 1024, None
    while True:
        ids = tokenizer(content[:size], verbose=False).input_ids
        if size >= len(content) or (len(ids) > count and ids[:count] == before):
            return ids
        size, before = 2 * size, ids[:count]


def source_texts(source):
    """(name, text) of every document of a source, in an order that is the same for everybody."""
    path = Path(os.path.expanduser(source))
    if source == "stdlib":
        for file in stdlib_files(held_out=True):
            yield "/".join(file.parts[-2:]), file.read_text(encoding="utf-8", errors="replace")
    elif source == "c4":
        for shard in range(8):
            file = f"en/c4-validation.{shard:05d}-of-00008.json.gz"
            get = functools.partial(huggingface_hub.hf_hub_download, "allenai/c4", file,
                                    repo_type="dataset")
            yield from jsonl_texts(from_hub(f"file {file} of allenai/c4", get, Path.exists), file)
    elif os.path.isdir(path) or os.path.isfile(path):
        for file in [path] if path.is_file() else sorted(path.iterdir()):
            if re.search(r"\.jsonl?(\.gz)?$", file.name.lower()):
                yield from jsonl_texts(file, file.name)
            elif file.is_file() and not file.name.startswith("."):
                yield file.name, read_text(file)
    else:
        raise Error(f"--documents is stdlib, c4, or an existing file or folder, not {source!r}")


def read_text(path):
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise Error(f"cannot read {path} as UTF-8 text: {first_line(error)}") from None


def jsonl_texts(path, name):
    """(name:line, text) of a .jsonl file, gzipped or not, whose lines have a "text"."""
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    number = 0
    try:
        with opened(path, "rt", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    content = json.loads(line)["text"]
                    yield f"{name}:{number}", content.encode(errors="replace").decode()
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError,
            RecursionError) as error:
        raise Error(f'{path}, at line {number}: not JSON lines with a "text" '
                    f"({type(error).__name__}: {first_line(error)})") from None


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

def write_whole(path, write):
    """write(a temporary path), then rename: a killed run leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        temporary.replace(path)
    except OSError as error:
        raise Error(f"cannot write {path}: {error.strerror or first_line(error)}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def read_results(path):
    """The content of a result file. Raises Error if it is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        record["script"], record["items"], record["arguments"], record["environment"]["weights"]
        return record
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Error(f"{path} is no result file of these scripts ({type(error).__name__}): delete "
                    "it to start over, or give another --results") from None


def plan(script, arguments):
    """An opened model for each name in --model, so that all are checked before the first runs."""
    runs = []
    for model in arguments["model"]:
        run = open_model(model, arguments["device"], arguments["dtype"])
        run.script, run.output = script, Path(arguments["results"]) / Path(run.model).name
        if run.output in [other.output for other in runs]:
            raise Error(f"--model names two models whose results would both go to {run.output}: "
                        "run one of them with another --results")
        for path in sorted(run.output.glob("**/*.json")):
            made = read_results(path)
            if made["environment"]["weights"] != run.environment["weights"]:
                raise Error(f"{path} comes from other weights, of {made['model']}: delete the "
                            f"folder {run.output} to start over, or give another --results")
        try:
            run.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Error(f"--results: {run.output} cannot be a folder here "
                        f"({error.strerror})") from None
        runs.append(run)
    return runs


def warn_of_length(run, tokens):
    limit = getattr(run.text, "max_position_embeddings", None)
    if limit and tokens > limit:
        say_once(f"warning: {run.model} is made for at most {limit} tokens "
                 f"(max_position_embeddings) and will read {tokens}")


def result_path(run, stem, arguments):
    """results/<model>/<stem>.json; what is not the default is named: <stem>.keep=random.json."""
    for key, default in {"heads": "all", "keep": "top", "segment": 256, "data": None}.items():
        if stem != "02_decay" and arguments.get(key, default) != default:
            stem += f".{key}={'ruler' if key == 'data' else arguments[key]}"
    return run.output / f"{stem}.json"


# A run may go on with other values of these: what they come to is in the environment and the items.
FREE = {"model", "docs", "samples", "rows", "results", "device", "dtype", "tasks", "lengths"}


def open_results(run, path, arguments, **more):
    """The record of a result file: what is there to go on from, or a new one without items.

    Raises Error where it was made with other arguments, weights, versions or on another device.
    """
    record = {"script": run.script, "model": run.model, "layers": run.layers, "state": run.state,
              "shape": {"layers": run.text.num_hidden_layers, "hidden": run.text.hidden_size,
                        "heads": run.heads},
              "arguments": {**arguments, "model": run.model}, "environment": run.environment,
              **more, "items": []}
    record = json.loads(json.dumps(record))
    if not path.exists():
        return record
    made = read_results(path)
    now = {key: value for key, value in record["arguments"].items() if key not in FREE}
    now |= {**record["environment"], **{key: record[key] for key in more}}
    before = {**made, **made["arguments"], **made["environment"]}
    for key in now:
        if before.get(key) != now[key]:
            raise Error(f"{path} was made with {key} {before.get(key)}, not {now[key]}: run it "
                        "with the same to go on; delete it, or give another --results, to start "
                        "over")
    return {**record, "items": made["items"]}


def add_item(path, record, item):
    """Append what was measured on one document or sample, and write the file whole.

    Raises Error for NaN, and where another run has changed the file in the meantime.
    """
    there = read_results(path)["items"] if path.exists() else []
    if there != record["items"]:
        raise Error(f"{path} was changed by another run: this one stops, and leaves it as it is")
    try:
        record["items"].append(json.loads(json.dumps(item, allow_nan=False)))
    except ValueError:
        raise Error(f"a result for {path} is NaN or infinite, so it was not written: the model has "
                    "overflowed (try --dtype float32)") from None
    content = json.dumps(record) + "\n"
    write_whole(path, lambda temporary: temporary.write_text(content, encoding="utf-8"))


def open_documents(run, arguments, **more):
    """Give a run of stages 01 to 03 its documents, its result file, and what is left to do."""
    warn_of_length(run, arguments["tokens"])
    run.documents = documents(arguments["documents"], run.tokenizer, arguments["docs"],
                              arguments["tokens"])
    run.path = result_path(run, run.script, arguments)
    run.record = open_results(run, run.path, arguments, **more)
    for item, (name, sha, _) in zip(run.record["items"], run.documents):
        if item["sha256"] != sha:
            raise Error(f"{run.path} holds another document than {name}: run it with the same "
                        "--documents to go on; delete it, or give another --results, to start over")
    run.left = run.documents[len(run.record["items"]):]


def unmeasured(run, passes=1):
    """Loads the model, and yields (net, ids [1, T], item, bar) for each document without a result.

    The caller measures into the item, a dict, and counts tokens on the bar, in so many passes over
    a document; when it comes back the item is written. The next run goes on after what is there.
    """
    if not run.left:
        print(f"{run.path} is complete", file=sys.stderr)
        return
    net = load_model(run)
    tokens = run.left[0][2].numel()
    print(f"{run.script}: {len(run.left)} of {len(run.documents)} documents of {tokens} tokens: "
          f"{', '.join(name for name, *_ in run.left[:3])}, ...", file=sys.stderr)
    with tqdm(total=len(run.left) * tokens * passes, desc=run.script, unit="token",
              unit_scale=True) as bar:
        for name, sha, ids in run.left:
            item = {"name": name, "sha256": sha, "seconds": {"total": 0.0, "truncate": 0.0}}
            with stopwatch(item["seconds"], "total"):
                yield net, ids.to(resolve(run.device)), item, bar
            add_item(run.path, run.record, item)


def chosen_heads(run, heads):
    """The mask [L, H] of the heads that --heads names, by the horizons in 02_decay.json."""
    if heads == "all":
        return torch.ones(len(run.layers), run.heads, dtype=torch.bool)
    path = run.output / "02_decay.json"
    if not path.exists():
        raise Error(f"--heads {heads} needs the decay horizons of {run.model}, and there is no "
                    f"{path}: run 02_decay.py first")
    log_a = torch.tensor([item["log_a"] for item in read_results(path)["items"]])
    horizon = decay_horizon(log_a.double().mean(0))                 # [L, H]
    side, limit = heads.split("-")
    mask = horizon > int(limit) if side == "over" else horizon <= int(limit)
    if not mask.any():
        raise Error(f"--heads {heads} is no head of {run.model}: their horizons are "
                    f"{horizon.min():.0f} to {horizon.max():.0f} tokens")
    return mask


def check_ranks(run, ranks, default):
    """The ranks, largest first; of the default, those beyond a small state's modes are left out."""
    modes = min(run.state)
    if max(ranks) > modes and ranks != default:
        raise Error(f"--ranks {max(ranks)} is beyond the {modes} modes of the states of "
                    f"{run.model}")
    return sorted((rank for rank in set(ranks) if rank <= modes), reverse=True)


def row_groups(ranks, rows):
    """Ranks to run side by side, each time beside the untouched model: [[None, 48, 32], ...]."""
    rows = rows or len(ranks)
    return [[None, *ranks[i:i + rows]] for i in range(0, len(ranks), rows)]


def mean_se(values):
    """Mean and standard error (ddof=1); the error is None for a single value."""
    x = torch.tensor(values, dtype=torch.float64)
    return x.mean().item(), (x.std() / len(x) ** 0.5).item() if len(x) > 1 else None


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


# ---- flags --------------------------------------------------------------------------------------

def flag(says, pattern, convert=str):
    """A parameter's annotation: a function from what was typed to a value, or a refusal."""
    def value(typed):
        if typed in ("", "True", "False"):                          # what Fire makes of no value
            raise Error(f"needs a value: {says}")
        if not re.fullmatch(pattern, typed, re.DOTALL):
            raise Error(f"takes {says}, not {typed!r}")
        return convert(typed)
    value.__qualname__ = says                                       # the type that --help shows
    return value


def parts(typed):
    return tuple(dict.fromkeys(part.strip() for part in typed.split(",")))


TEXT = flag("text", ".+")
NAMES = flag("names with commas", " *[^, ]+ *(, *[^, ]+ *)*", parts)
MODELS = flag("models with commas", "[^,]+(,[^,]+)*",
              lambda typed: BUNDLED if typed == "tiny" else parts(typed))
NUMBER = flag("a whole number from 1", "0*[1-9][0-9]*", int)
NUMBER_0 = flag("a whole number from 0", "[0-9]+", int)
NUMBERS = flag("whole numbers with commas", " *[0-9]+ *(, *[0-9]+ *)*",
               lambda typed: tuple(map(int, parts(typed))))
MODES = flag("top, bottom or random", "|".join(KEEP))
HEADS = flag("all, over-N or upto-N", "all|(over|upto)-[0-9]+")
DTYPE = flag("a dtype, or auto", "auto|float32|bfloat16|float16")


def command(main):
    """Run main with the flags of the command line; an Error ends the program with one sentence.

    By itself Fire calls main first and complains of a mistyped flag afterwards. So it calls a
    stand-in with main's signature, which takes down what was typed, and main runs when Fire has
    found nothing to complain of.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")                        # a terminal without a ±
    typed = {}
    stand_in = functools.wraps(main)(lambda **flags: typed.update(flags))
    fire.parser.DefaultParseValue = str                             # values stay as they were typed
    fire.Fire(stand_in, ["--", "--help"] if {"-h", "--help"} & set(sys.argv) else sys.argv[1:])
    try:
        main(**{name: converted(main, name, value) for name, value in typed.items()})
    except Error as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; what was finished is kept, and the same command goes on from there")
    except (RuntimeError, MemoryError) as error:
        if "memory" not in f"{type(error).__name__} {error}".lower():
            raise
        sys.exit("error: out of memory: try fewer --rows side by side, or shorter --tokens or "
                 f"--lengths ({first_line(error)})")


def converted(main, name, typed):
    try:
        return main.__annotations__[name](typed)
    except Error as error:
        raise Error(f"--{name} {error}") from None
