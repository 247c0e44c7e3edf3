"""The Gated DeltaNet (GDN) state: its recurrence, its singular modes, and a model run with the modes cut back.

A GDN head reads a sequence with a matrix for a memory. With keys and values as columns, and the decay taken first, the
gated delta rule of Yang, Kautz & Hatamizadeh (2024, "Gated Delta Networks", eq. 10) is

    S_t = a_t S_{t-1} + b_t (v_t - a_t S_{t-1} k_t) k_t^T          y_t = S_t q_t

The state S decays by a_t, says what it holds under the key k_t, and is corrected towards the value v_t with strength b_t.
How much of S does a trained model depend on? This file has what is needed to ask: the recurrence token by token (the
oracle that everything fast is tested against), the state's singular values and its truncation to rank r, and the run of
a Hugging Face model in segments, with every state truncated at each boundary. The numbered scripts ask.

    B  batch rows           H  value heads (each with a state of its own)     K  key dimension (columns of S)
    T  tokens               G  key heads (each serves H / G value heads)      V  value dimension (rows of S)
    R  ranks run as rows    L  GDN layers of the model                        M  modes of a state, min(V, K)
"""
import contextlib
import functools
import gzip
import hashlib
import importlib.util
import inspect
import json
import os
import re
import sys
import sysconfig
import time
import zlib
from pathlib import Path

import fire
import huggingface_hub
import torch
import torch.nn.functional as F
import transformers
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

HERE = Path(__file__).resolve().parent


class Error(Exception):
    """What a user can mend: told in one sentence, without a traceback."""


# ---- 1. the recurrence ----------------------------------------------------------------------------------------------

def gated_delta_rule(q, k, v, log_a, b, state=None):
    """The gated delta rule, one token at a time: the reference, in the precision of its inputs.

    Args:
        q, k: queries and keys, [B, T, G, K], as they enter the recurrence. (Qwen3.5 normalises both to length one and
            scales q by K ** -0.5 before; that is the layer's doing.)
        v: values, [B, T, H, V]; H is a multiple of G, and key head g serves the value heads g H/G ... (g+1) H/G - 1.
        log_a: log of the decay, [B, T, H], in nats per token, <= 0.
        b: write strength, [B, T, H], in 0...1 (0...2 where a model allows negative eigenvalues).
        state: S before the first token, [B, H, V, K]; zero if None. It is not changed.

    Returns:
        the readouts y [B, T, H, V], and S after the last token [B, H, V, K].

    Source: Yang, Kautz & Hatamizadeh 2024, eq. 10, S (a (I - b k k^T)) + b v k^T, multiplied out.
    """
    B, T, H, V = v.shape
    G, K = k.shape[2:]
    q, k = (x.repeat_interleave(H // G, dim=2) for x in (q, k))            # [B, T, H, K]
    S = v.new_zeros(B, H, V, K) if state is None else state
    y = torch.empty_like(v)
    for t in range(T):
        S = S * log_a[:, t, :, None, None].exp()                           # decay first                  [B, H, V, K]
        held = S @ k[:, t, :, :, None]                                     # what S holds under k_t       [B, H, V, 1]
        error = b[:, t, :, None, None] * (v[:, t, :, :, None] - held)      # what is missing              [B, H, V, 1]
        S = S + error @ k[:, t, :, None, :]                                # written under k_t            [B, H, V, K]
        y[:, t] = (S @ q[:, t, :, :, None])[..., 0]                        # read with q_t                [B, H, V]
    return y, S


def decay_horizon(mean_log_a):
    """Tokens over which a head's decay alone shrinks its state by a factor e: h = -1 / mean_t(log a_t).

    mean_log_a: the mean of log a over tokens, any shape, in nats per token; average first, then invert. A head that
    never decays (mean 0) has horizon infinity.
    """
    return 1 / torch.as_tensor(mean_log_a, dtype=torch.float64).abs()                      # abs: 1 / -0.0 is -infinity


# ---- 2. the state: its modes, and truncation ------------------------------------------------------------------------

def check_states(state):
    if not torch.isfinite(state).all():
        raise Error("a state holds NaN or infinity, so it has no singular modes: the model has diverged "
                    "(try --dtype float32)")


def first_that_converges(fast, slow):
    """fast(), or slow() where cuSOLVER gives up, as on ill-conditioned matrices (pytorch issues 94772 and 105359)."""
    try:
        return fast()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return slow()


def singular_values(state):
    """Singular values of every matrix of a batch, [..., V, K] -> [..., M], largest first, in at least float32.

    They come from an SVD, not from the Gram matrix, which squares the condition number: these are the values reported.
    Raises Error for NaN or infinity.
    """
    check_states(state)
    state = state.to(torch.promote_types(state.dtype, torch.float32))
    return first_that_converges(lambda: torch.linalg.svdvals(state),
                                lambda: torch.linalg.svdvals(state.double().cpu()).to(state))


def effective_rank(sigma):
    """exp of the entropy of the normalised singular values: exp(-sum_j p_j log p_j), p = sigma / sum sigma.

    sigma: singular values [..., M] -> [...]. n equal values give n, one value alone gives 1, and the zero matrix, which
    has no modes, gives 0 here. Source: Roy & Vetterli 2007, "The effective rank", the definition in section 2.
    """
    total = sigma.sum(-1)
    p = sigma / total.clamp_min(torch.finfo(sigma.dtype).tiny)[..., None]
    return torch.special.entr(p).sum(-1).exp() * (total > 0)


def right_modes(state):
    """Right singular vectors of every matrix, [..., V, K] -> [..., K, K], as columns, the smallest mode first.

    The eigenvectors of the Gram matrix S^T S. It is formed in float64, where squaring costs none of the digits of the
    float32 states that models have, and from a state scaled to size one, so that nothing under- or overflows.
    """
    scaled = state.double()
    scaled = scaled / scaled.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    gram = scaled.mT @ scaled                                              # [..., K, K]
    return first_that_converges(lambda: torch.linalg.eigh(gram).eigenvectors,
                                lambda: torch.linalg.svd(scaled.cpu()).Vh.mT.flip(-1).to(gram))


def truncate(state, rank, keep="top", seed=0):
    """Each matrix with only `rank` of its singular modes: S_r = sum_{j<=r} sigma_j u_j v_j^T, the post's intervention.

    Args:
        state: any batch of matrices [..., V, K], in any float dtype, on any device.
        rank: modes to keep, from 1 up: an int, or a tensor of ints that broadcasts against the batch [...]. Where it is
            at or above M = min(V, K), the matrix comes back untouched, bit for bit.
        keep: "top", the largest modes; the controls are "bottom", the smallest, and "random", drawn with `seed`, anew
            for each matrix but shared along the dimensions that the ranks vary in, so that ranks compare like with like.

    Returns:
        a tensor like `state`. Raises Error for another rank, and for a state with NaN or infinity.

    S_r = S W W^T with W the kept right singular vectors (of the transpose, if that is smaller): by Eckart & Young (1936)
    the best approximation of rank r, without the left singular vectors or any division by a small sigma.
    """
    M = min(state.shape[-2:])
    ranks = torch.as_tensor(rank)
    if ranks.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64) or (ranks < 1).any():
        raise Error(f"a rank is a whole number from 1 up, not {rank}")
    if keep not in KEEP:
        raise Error(f"keep is one of {', '.join(KEEP)}, not {keep!r}")
    check_states(state)
    if (ranks >= M).all():
        return state
    ranks = ranks.to(state.device)
    wide = state.mT if state.shape[-1] > state.shape[-2] else state        # the Gram matrix of the smaller side, M x M
    modes = right_modes(wide)                                              # [..., M, M], ascending
    order = torch.arange(M, device=state.device)                           # bottom: the smallest are first
    if keep == "top":
        order = order.flip(0)
    elif keep == "random":
        shape = list(modes.shape[:-1])                                     # [..., M]
        for i, n in enumerate(reversed(ranks.shape), 2):
            shape[-i] = 1 if n > 1 else shape[-i]
        order = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).argsort(-1).to(state.device)
    kept = (order < ranks[..., None])[..., None, :]                        # [..., 1, M]
    cut = (wide.to(modes) @ (modes * kept)) @ modes.mT
    cut = (cut.mT if wide is not state else cut).to(state.dtype)
    return torch.where((ranks >= M)[..., None, None], state, cut)


KEEP = ("top", "bottom", "random")


# ---- 3. the model: loading, its GDN layers, the segmented run --------------------------------------------------------

# In tiny/recurrent the one attention layer comes first, where it sees bare tokens and can retrieve nothing by itself.
BUNDLED = {"tiny": "tiny/recurrent", "tiny/hybrid": "tiny/hybrid", "tiny/recurrent": "tiny/recurrent"}


def locate(model):
    """Where a model named by --model is: a bundled folder, the folder itself, or the hub id."""
    model = model.rstrip("/") or model
    if model in BUNDLED:
        return str(HERE / BUNDLED[model])
    return os.path.abspath(os.path.expanduser(model)) if os.path.isdir(os.path.expanduser(model)) else model


def from_hub(load, model, what):
    """load(model) with a failure told in one sentence."""
    huggingface_hub.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = os.path.isdir(locate(model))
    if not folder and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
        raise Error(f"--model {model!r}: there is no such folder, and a hub id looks like name/model")
    try:
        return load(locate(model))
    except Exception as error:      # the libraries raise OSError, ValueError, KeyError, ImportError... for what a user typed
        where = (f"the folder {model}" if folder else f"{model!r}, which is no folder and no bundled model "
                 f"({', '.join(BUNDLED)}), from the Hugging Face hub")
        raise Error(f"cannot load the {what} of {where} with transformers {transformers.__version__}: {first_line(error)}") from None


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def model_config(model):
    """The text configuration of a model named by --model. Raises Error if it has no GDN layers; loads no weights."""
    config = from_hub(AutoConfig.from_pretrained, model, "configuration").get_text_config(decoder=True)
    if "linear_attention" not in (getattr(config, "layer_types", None) or ()) or not hasattr(config, "linear_key_head_dim"):
        raise Error(f"--model {model!r} ({config.model_type}) has no Gated DeltaNet layers; qwen3_5, qwen3_5_moe, qwen3_next "
                    f"and olmo_hybrid models have")
    if set(config.layer_types) == {"linear_attention"}:
        raise Error(f"--model {model!r} has GDN layers alone, which transformers {transformers.__version__} cannot run "
                    f"with a cache")
    return config


def load_tokenizer(model):
    tokenizer = from_hub(AutoTokenizer.from_pretrained, model, "tokenizer")
    if not tokenizer("a text").input_ids:
        raise Error(f"--model {model!r} has no tokenizer: put its tokenizer.json beside its config.json")
    return tokenizer


def load_model(model, device="auto", dtype="auto"):
    """The model, its tokenizer and the indices of its GDN layers.

    model: a bundled model, a folder, or a hub id. dtype "auto" is the checkpoint's own. A checkpoint saved as
    Qwen3_5ForConditionalGeneration, as the published ones are, loads as its text model.
    """
    tokenizer = load_tokenizer(model)
    dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    net, info = from_hub(functools.partial(AutoModelForCausalLM.from_pretrained, dtype=dtype, output_loading_info=True),
                         model, "weights")
    if info["missing_keys"]:                                               # they would be random, without a word
        raise Error(f"--model {model!r} lacks weights that its config.json asks for: {sorted(info['missing_keys'])[0]}, ...")
    return net.to(device).eval(), tokenizer, gdn_layers(net)


def gdn_layers(model):
    """Indices of the model's Gated DeltaNet layers, ascending: [L]. The four families name the class alike."""
    layers = [m.layer_idx for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet")]
    if not layers:
        raise Error(f"{type(model).__name__} has no Gated DeltaNet layers")
    return sorted(layers)


def read_states(cache, layers):
    """All states of a run, [L, B, H, V, K]. The cache of transformers keeps their transposes: this is the one conversion."""
    return torch.stack([cache.layers[i].recurrent_states[0] for i in layers]).mT


def write_states(cache, layers, states):
    for i, state in zip(layers, states):
        cache.layers[i].recurrent_states[0].copy_(state.mT)


@torch.inference_mode()
def truncate_rows(cache, layers, ranks, keep="top", seed=0):
    """Truncate row i of every state in the cache to ranks[i] modes, in place; None leaves the row alone.

    All layers, rows and heads go through one batched call, since all states of a model have one shape.
    """
    rows = [i for i, rank in enumerate(ranks) if rank is not None]
    if rows:
        states = read_states(cache, layers)                                # [L, R, H, V, K]
        cut = torch.tensor([ranks[i] for i in rows])[:, None]              # [R', 1], against [L, R', H]
        states[:, rows] = truncate(states[:, rows], cut, keep, seed)
        write_states(cache, layers, states)


@torch.inference_mode()
def segments(model, ids, segment, at_boundary, cache=None, position=0, timing=None):
    """Feed ids [B, T] to the model so that no call crosses a multiple of `segment`, and yield each call's hidden states.

    When a multiple of `segment`, counted from the first token, has been consumed and another token follows,
    at_boundary(position, cache) may read and change the states first. So the end of a document is no boundary, and the
    end of a prompt is one only if its answer goes on from there.

    Args:
        cache, position: a run to go on with, and how many tokens it has consumed; the cache is changed in place.
        timing: a dict whose "model" and "boundary" seconds grow.

    Yields (position of the first token, hidden states [B, n, D] before the head). The logits are not computed here: over
    a vocabulary of 248,320 they are the peak of memory, and most callers need few of them.
    """
    cache = cache if cache is not None else DynamicCache(config=model.config)
    timing = timing if timing is not None else {}
    end = position + ids.shape[1]
    start = position
    while start < end:
        stop = min(end, (start // segment + 1) * segment)
        if start and start % segment == 0:
            with stopwatch(timing, "boundary", ids.device):
                at_boundary(start, cache)
        with stopwatch(timing, "model", ids.device):
            hidden = model.base_model(ids[:, start - position:stop - position], cache=cache, use_cache=True).last_hidden_state
        yield start, hidden
        start = stop


@contextlib.contextmanager
def stopwatch(timing, name, device):
    """Add the seconds that the block takes, on its device too, to timing[name]."""
    def sync():
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    sync()
    start = time.perf_counter()
    yield
    sync()
    timing[name] = timing.get(name, 0.0) + time.perf_counter() - start


@torch.inference_mode()
def token_losses(model, hidden, targets):
    """Next-token cross-entropy in nats, [B, n], of hidden states [B, n, D] and the tokens that follow [B, n].

    Row by row: the logits of one row and segment are all that is ever held. They come in the model's dtype, as from the
    model itself; the cross-entropy is taken in float32.
    """
    head = model.get_output_embeddings()
    return torch.stack([F.cross_entropy(head(h).float(), t, reduction="none") for h, t in zip(hidden, targets)])


@contextlib.contextmanager
def record_gates(model):
    """Record what the GDN layers feed to the recurrence: a list that grows by one (log a, b), each [B, n, H] in float32,
    per layer and call, in the order of the layers. A layer takes its decay in float32, but from weights and projections
    in the model's dtype, and its b in that dtype altogether: load the model in float32 for gates that are exact.

    Every family calls two functions of its own module, one for many tokens and one for a single one; recording there
    needs none of the layers' differing names, and works with or without the fast kernels.
    """
    module = sys.modules[next(type(m) for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet")).__module__]
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    originals, gates = {name: getattr(module, name) for name in names}, []

    def recording(rule):
        @functools.wraps(rule)
        def record(*args, g, beta, **kwargs):
            gates.append((g.float(), beta.float()))
            return rule(*args, g=g, beta=beta, **kwargs)
        return record

    for name, rule in originals.items():
        setattr(module, name, recording(rule))
    try:
        yield gates
    finally:
        for name, rule in originals.items():
            setattr(module, name, rule)


# ---- 4. the documents -----------------------------------------------------------------------------------------------

def documents(source, tokenizer, count, tokens):
    """The first `count` texts of the source with at least `tokens` tokens: [(name, SHA-256 of the text, ids [1, tokens])].

    source: "stdlib", "c4", or a path to a .txt, a .jsonl or .jsonl.gz with a "text" field, or a folder of text files.
    Raises Error, with what was found, if there are too few.
    """
    found, longest, seen = [], 0, 0
    for name, text in texts(source):
        seen += 1
        if len(text.encode()) >= tokens:                   # no token is shorter than a byte
            ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids
            longest = max(longest, ids.shape[1])
            if ids.shape[1] >= tokens:
                found.append((name, hashlib.sha256(text.encode()).hexdigest(), ids[:, :tokens]))
                if len(found) == count:
                    return found
    if not seen:
        raise Error(f"--documents {source} holds no document")
    length = f"the longest has {longest}" if longest else "all are shorter"
    raise Error(f"--documents {source} has {len(found)} of {seen} documents with at least {tokens} tokens ({length}), "
                f"and --docs asks for {count}: ask for fewer with --docs or for shorter ones with --tokens")


def texts(source):
    """(name, text) of every document of a source, in an order that is the same for everybody."""
    if source == "stdlib":
        for path in stdlib_files(held_out=True):
            yield "/".join(path.parts[-2:]), path.read_text(encoding="utf-8", errors="replace")
    elif source == "c4":
        huggingface_hub.logging.set_verbosity_error()
        for shard in range(8):
            file = f"en/c4-validation.{shard:05d}-of-00008.json.gz"
            try:
                path = huggingface_hub.hf_hub_download("allenai/c4", file, repo_type="dataset")
            except Exception as error:                                     # OSError, HfHubHTTPError, httpx.ConnectError...
                raise Error(f"cannot download {file} of allenai/c4 from the Hugging Face hub, and it is not in the cache: "
                            f"{type(error).__name__}; run once with a connection, or name a file of your own with "
                            f"--documents") from None
            yield from jsonl_texts(Path(path), file)
    else:
        path = Path(os.path.expanduser(source))
        if os.path.isdir(path):
            files = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        elif os.path.isfile(path):
            files = [path]
        else:
            raise Error(f"--documents is stdlib, c4, or an existing file or folder, not {source!r}")
        for file in files:
            if re.search(r"\.jsonl?(\.gz)?$", file.name.lower()):
                yield from jsonl_texts(file, file.name)
            else:
                yield file.name, read_text(file)


def read_text(path):
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise Error(f"cannot read {path} as UTF-8 text: {first_line(error)}") from None


def jsonl_texts(path, name):
    """(name:line, text) of a .jsonl file, gzipped or not, whose lines have a "text"."""
    opened = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rt", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    text = json.loads(line)["text"]
                    if not isinstance(text, str):
                        raise TypeError("its text is no string")
                    yield f"{name}:{number}", text.encode(errors="replace").decode()       # no lone surrogates
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise Error(f"cannot read {path} beyond line {number}: {first_line(error)}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Error(f"{path}, line {number}: no JSON object with a \"text\" ({type(error).__name__}: {error})") from None


def stdlib_files(held_out):
    """Python's own source files: the fifth that is held out for evaluation, or the rest, which tiny/ is trained on.

    The one rule: a file is held out when the SHA-256 of its name, relative to the library's folder, is 0 modulo 5; files
    come in the order of that hash. Test suites, encodings, lib2to3, IDLE and other people's packages are in neither part.
    The library differs between Python versions, and so do its files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "config"}
    names = {p.relative_to(root).as_posix(): p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts)}
    digest = {name: int(hashlib.sha256(name.encode()).hexdigest(), 16) for name in names}
    return [names[name] for name in sorted(names, key=digest.get) if (digest[name] % 5 == 0) == held_out]


# ---- 5. result files, and the command line ----------------------------------------------------------------------------

def write_whole(path, write):
    """write(a temporary path beside it), then rename: a killed run leaves the old file or the new one, and no half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        temporary.replace(path)
    except OSError as error:
        raise Error(f"cannot write {path}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_json(path, data):
    """Write a result file, whole or not at all. NaN is refused."""
    try:
        text = json.dumps(data, allow_nan=False) + "\n"
    except ValueError:
        raise Error(f"a result for {path} is NaN or infinite, so it was not written: the model has diverged "
                    f"(try --dtype float32)") from None
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path):
    """The dict in a JSON file; {} if there is no file, or none that is whole."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return data if isinstance(data, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def mean_se(changes):
    """{"mean", "se"} of paired changes; the standard error over documents or samples has ddof=1, and is None for one."""
    x = torch.tensor(changes, dtype=torch.float64)
    return {"mean": x.mean().item(), "se": (x.std() / len(x) ** 0.5).item() if len(x) > 1 else None}


def result_folder(model, results):
    """results/<the last part of the model's id or path>."""
    return Path(results) / Path(locate(model)).name


def check_run(arguments):
    """Check the flags that the stages share, and return the folder for the results: all that can be known without a model."""
    for flag, low in (("docs", 1), ("tokens", 2), ("segment", 1)):
        if flag in arguments:
            whole(flag, arguments[flag], low)
    if arguments["dtype"] not in DTYPES:
        raise Error(f"--dtype is one of {', '.join(DTYPES)}, not {arguments['dtype']!r}")
    try:
        torch.zeros(1, device=resolve(arguments["device"]), dtype=torch.float64).item()         # which Apple's mps has not
    except (RuntimeError, AssertionError, TypeError) as error:
        raise Error(f"--device {arguments['device']!r} is not to be had here: {first_line(error)}") from None
    folder = result_folder(arguments["model"], arguments["results"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Error(f"--results {arguments['results']}: cannot write there ({error.strerror})") from None
    for path in folder.glob("**/*.json"):
        other = read_json(path).get("model")
        if isinstance(other, str) and locate(other) != locate(arguments["model"]):
            raise Error(f"{folder} holds results of another model, {other}: give --results another folder")
    return folder


def resolve(device):
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def begin(script, arguments):
    """Load the model that the flags name and say so: (model, tokenizer, GDN layers)."""
    net, tokenizer, layers = load_model(arguments["model"], resolve(arguments["device"]), arguments["dtype"])
    heads = net.config.get_text_config(decoder=True).linear_num_value_heads
    kernels = ""
    if net.device.type != "cpu":
        fast = [name for name in ("fla", "causal_conv1d") if importlib.util.find_spec(name)]
        kernels = f", kernels: {' and '.join(fast) or 'those of transformers; flash-linear-attention would be faster'}"
    print(f"{script}: {arguments['model']}, {len(layers)} GDN layers x {heads} heads, states "
          f"{' x '.join(map(str, state_shape(net)))}, {str(net.dtype)[6:]} on {net.device}{kernels}", file=sys.stderr)
    return net, tokenizer, layers


def state_shape(net):
    """[V, K] of the model's states."""
    config = net.config.get_text_config(decoder=True)
    return [config.linear_value_head_dim, config.linear_key_head_dim]


def fingerprint(net):
    """Eight digits that tell weights apart: a hash of some thousand evenly spaced values of every tensor."""
    digest = hashlib.sha256()
    for tensor in net.state_dict().values():
        digest.update(tensor.flatten()[::max(tensor.numel() // 4096, 1)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:8]


def environment(net):
    gpu = f" ({torch.cuda.get_device_name(net.device)})" if net.device.type == "cuda" else ""
    return {"torch": torch.__version__, "transformers": transformers.__version__, "device": f"{net.device}{gpu}",
            "dtype": str(net.dtype)[6:], "weights": fingerprint(net)}


def check_same(path, record, wanted):
    """Raise Error if a result file (its record, {} for none) was made with other values of wanted arguments or weights."""
    made = {**record.get("arguments", {}), "weights": record.get("environment", {}).get("weights")} if record else wanted
    for name, value in wanted.items():
        if made.get(name) != value and not (name == "model" and locate(str(made.get(name))) == locate(value)):
            what = "the weights" if name == "weights" else f"--{name.removesuffix('_sha256')}"
            raise Error(f"{path} was made with {what} {made.get(name)}, not {value}: run it with the same to go on, or delete "
                        f"it, or give another --results, to start over")


def measure_documents(script, arguments, measure, summarise, rows=1, suffix=""):
    """Stages 01 to 03: measure every document, save each as it is done, and write results/<model>/<script><suffix>.json.

    A run that was killed leaves a .part.json; the next one with the same flags goes on from it. A finished file is left
    as it is, and never replaced by one of other flags or weights.

    Args:
        arguments: the script's flags, as it ran with them.
        measure: (model, GDN layers, ids [1, T], timing) -> a dict of plain numbers for one document.
        summarise: list of those dicts -> the file's results.
        rows: rows that each document is run in, for the tokens per second.
    """
    folder = check_run(arguments)
    model_config(arguments["model"])
    found = documents(arguments["documents"], load_tokenizer(arguments["model"]), arguments["docs"], arguments["tokens"])
    path = folder / f"{script}{suffix}.json"
    before, same = read_json(path), json.loads(json.dumps(arguments))
    for flag in ("rows", "results"):                              # no number depends on them, but for rounding
        same.pop(flag, None)
    check_same(path, before, same)
    net, _, layers = begin(script, arguments)
    print(f"{len(found)} documents of {arguments['tokens']} tokens from {arguments['documents']}: "
          f"{', '.join(name for name, *_ in found[:3])}{', ...' if len(found) > 3 else ''}", file=sys.stderr)
    key = {"arguments": same, "environment": environment(net),
           "documents": [{"name": name, "sha256": sha} for name, sha, _ in found]}
    check_same(path, before, {"weights": key["environment"]["weights"]})
    if before.get("environment") == key["environment"] and before.get("results", {}).get("documents") == key["documents"]:
        print(f"{path} is complete: delete it to measure again", file=sys.stderr)
        return path
    part = path.with_suffix(f".{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]}.part.json")
    done = read_json(part).get("done", [])
    if done:
        print(f"going on after {len(done)} documents in {part}", file=sys.stderr)
    for _, _, ids in tqdm(found[len(done):], desc=script, unit="doc", initial=len(done), total=len(found)):
        timing, start = {"model": 0.0, "boundary": 0.0}, time.perf_counter()
        values = measure(net, layers, ids.to(net.device), timing)
        done.append({"values": values, "seconds": {**timing, "total": time.perf_counter() - start}})
        write_json(part, {**key, "done": done})
    seconds = {k: sum(d["seconds"][k] for d in done) for k in ("model", "boundary", "total")}
    tokens = sum(ids.numel() for *_, ids in found) * rows
    write_json(path, {
        "script": script, "model": arguments["model"], "arguments": arguments, "environment": key["environment"],
        "timing": {"tokens_per_second": tokens / seconds["total"], "model_seconds": seconds["model"],
                   "truncate_seconds": seconds["boundary"], "total_seconds": seconds["total"]},
        "results": {"layers": layers, "state": state_shape(net), "documents": key["documents"],
                    **summarise([d["values"] for d in done])}})
    part.unlink()
    return path


DTYPES = ("auto", "float32", "bfloat16", "float16")
NAMES = ("model", "documents", "keep", "data", "device", "dtype", "results")       # flags that are a name, not a number


def command(main):
    """Run main as a command line with Fire: strict, since by itself Fire runs first and complains of a typo afterwards.

    Fire only parses here (main's flags are keyword-only, so it can fill nothing by position); main runs when all of it
    was understood, and an Error, or a library's complaint about memory, ends the program with one sentence.
    """
    known, words = list(inspect.signature(main).parameters), sys.argv[1:]
    wants_value, given = False, set()
    for word in [] if {"--help", "-h"} & set(words) else words:
        flag = re.match(r"--?([A-Za-z][\w-]*)(=.*)?$", word, re.DOTALL)
        if flag and flag[1].replace("-", "_") not in known and [name[0] for name in known].count(flag[1]) != 1:
            sys.exit(f"unknown flag {word.split('=')[0]!r}: this script takes {', '.join('--' + name for name in known)}")
        if flag and flag[1] in given:
            sys.exit(f"--{flag[1]} is given twice: give it once, a list with commas")
        given.add(flag and flag[1])
        if not flag and not wants_value:
            sys.exit(f"{word!r} belongs to no flag: write --flag value, and lists with commas and no spaces")
        wants_value = bool(flag) and flag[2] is None
    called = []
    parse = functools.wraps(main)(lambda **flags: called.append(flags))
    fire.Fire(parse, serialize=lambda _: None)
    try:
        for flags in called:
            for name, value in flags.items():
                if isinstance(value, bool) or (value is None and inspect.signature(main).parameters[name].default is not None):
                    raise Error(f"--{name} needs a value")
                if name in NAMES and value is not None:
                    flags[name] = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            main(**flags)
    except Error as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; what was finished is kept, and the same command goes on from there")
    except torch.OutOfMemoryError:
        sys.exit("error: out of memory on the device: run fewer rows side by side with --rows, or shorter --tokens or --lengths")


def whole(flag, value, low=1):
    """A whole number of at least `low`, as a flag gave it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise Error(f"--{flag} is a whole number from {low} up, not {value!r}")
    return value


def listed(flag, value, allowed=None):
    """The strings of a list flag: Fire makes 48 an int, 48,12 a tuple, vt a string and a-b,c one string."""
    parts = value if isinstance(value, (list, tuple)) else str(value).split(",")
    parts = list(dict.fromkeys(str(part).strip() for part in parts if str(part).strip()))
    if not parts:
        raise Error(f"--{flag} is empty: give one value, or several with commas")
    for part in parts:
        if allowed is not None and part not in allowed:
            raise Error(f"--{flag} knows {', '.join(allowed)}, not {part!r}")
    return parts


def whole_numbers(flag, value, low=1, high=None):
    """The whole numbers of a list flag, each within low...high."""
    numbers = []
    for part in listed(flag, value):
        if not re.fullmatch(r"-?\d+", part) or int(part) < low or (high and int(part) > high):
            raise Error(f"--{flag} takes whole numbers {f'from {low} to {high}' if high else f'from {low} up'}, not {part}")
        numbers.append(int(part))
    return numbers


RANKS = "48,32,24,16,12,8,4"        # the default of stages 01 and 03; what exceeds a smaller model's states is left out


def check_ranks(ranks, model, default=RANKS):
    """The ranks of a flag, largest first, within 1...M of the model's states; reads the model's configuration only."""
    config = model_config(model)
    modes = min(config.linear_key_head_dim, config.linear_value_head_dim)
    if ranks == default:
        ranks = [rank for rank in default.split(",") if int(rank) <= modes]
    return sorted(whole_numbers("ranks", ranks, 1, modes), reverse=True)


def row_groups(every, rows):
    """The rows to run side by side: all of them, or at most `rows` at a time."""
    rows = len(every) if rows is None else whole("rows", rows)
    return [every[i:i + rows] for i in range(0, len(every), rows)]
