"""Faster float32 CPU training of transformers' Qwen3_5ForCausalLM: patch() replaces slow module functions.

Everything here computes what the originals compute (float32); only first derivatives are supported.
Calls with a cache (generation), or on another dtype than float32, go to the originals.
"""
import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as Q

CHUNK = 32  # chunk length of the delta rule
_orig_rule, _orig_conv = Q.torch_chunk_gated_delta_rule, Q.causal_conv1d_fn
_orig_norm, _orig_gated = Q.Qwen3_5RMSNorm.forward, Q.Qwen3_5RMSNormGated.forward
_orig_mlp = Q.Qwen3_5MLP.forward


def _inv_unit_lower(A):
    """(I + A)^-1 for strictly lower A [M, C, C]: LAPACK-style solve on blocks <= 32, joined by blocks."""
    M, C, _ = A.shape
    if C <= 32:
        return torch.linalg.solve_triangular(A, torch.eye(C).expand(M, C, C), upper=False, unitriangular=True).contiguous()
    h = C // 2
    out = A.new_zeros(M, C, C)
    a, d = _inv_unit_lower(A[:, :h, :h]), _inv_unit_lower(A[:, h:, h:])
    out[:, :h, :h], out[:, h:, h:] = a, d
    out[:, h:, :h] = torch.bmm(torch.bmm(d, A[:, h:, :h]), a).neg_()
    return out


class _Delta(torch.autograd.Function):
    """Gated delta rule on chunks. n chunks, G = batch*heads, M = n*G, chunk length C, key width D, value width E.

    q, k [n, G, C, D], v [n, G, C, E], g, beta [n, G, C]; q is already scaled. Returns [n, G, C, E]."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta):
        n, G, C, D = q.shape
        E, M = v.shape[-1], n * G
        q, k, v, g, beta = q.view(M, C, D), k.view(M, C, D), v.view(M, C, E), g.view(M, C), beta.view(M, C)
        c = g.cumsum(1)                                                     # log decay since the chunk's start
        P = (c[:, :, None] - c[:, None, :]).clamp_(max=0).exp_().tril_()     # [M, C, C] decay from j to i
        ec = c.exp()[:, :, None]                                            # [M, C, 1]
        el = (c[:, -1:] - c).exp_()[:, :, None]                             # [M, C, 1] decay to the chunk's end
        d = ec[:, -1:].view(n, G, 1, 1)                                     # decay of a whole chunk
        kT, b = k.transpose(1, 2), beta[:, :, None]
        A = torch.bmm(k, kT).mul_(P).mul_(b).tril_(-1)                      # [M, C, C]
        Aqk = torch.bmm(q, kT).mul_(P)                                      # [M, C, C]
        inv = _inv_unit_lower(A)
        rhs = torch.empty(M, C, E + D)
        torch.mul(v, b, out=rhs[:, :, :E])
        torch.mul(k, b * ec, out=rhs[:, :, E:])
        UW = torch.bmm(inv, rhs)                                            # [M, C, E+D] = U | W
        ke, qe = k * el, q * ec
        U, W, ke_ = UW[:, :, :E].view(n, G, C, E), UW[:, :, E:].view(n, G, C, D), ke.view(n, G, C, D)
        S, Vn = torch.zeros(n, G, D, E), torch.empty(n, G, C, E)            # states before, new values of each chunk
        for i in range(n):
            torch.baddbmm(U[i], W[i], S[i], alpha=-1, out=Vn[i])
            if i + 1 < n:
                torch.mul(S[i], d[i], out=S[i + 1])
                S[i + 1].baddbmm_(ke_[i].transpose(1, 2), Vn[i])
        o = torch.bmm(qe, S.view(M, D, E)).baddbmm_(Aqk, Vn.view(M, C, E))
        ctx.save_for_backward(q, k, v, beta, P, ec, el, A, Aqk, inv, UW, ke, qe, S, Vn)
        return o.view(n, G, C, E)

    @staticmethod
    def backward(ctx, do):
        q, k, v, beta, P, ec, el, A, Aqk, inv, UW, ke, qe, S, Vn = ctx.saved_tensors
        n, G, D, E = S.shape
        M, C, _ = q.shape
        do = do.contiguous().view(M, C, E)
        b, d = beta[:, :, None], ec[:, -1:].view(n, G, 1, 1)
        Sm, Vm = S.view(M, D, E), Vn.view(M, C, E)
        # the scan, backwards: dS[i] is the gradient of the state after chunk i
        dVn = torch.bmm(Aqk.transpose(1, 2), do).view(n, G, C, E)
        dSq = torch.bmm(qe.transpose(1, 2), do).view(n, G, D, E)
        dS = torch.zeros(n, G, D, E)
        ke_, W = ke.view(n, G, C, D), UW[:, :, E:].view(n, G, C, D)
        for i in range(n - 1, -1, -1):
            if i + 1 < n:
                dVn[i].baddbmm_(ke_[i], dS[i])
            if i:
                torch.addcmul(dSq[i], dS[i], d[i], out=dS[i - 1])
                dS[i - 1].baddbmm_(W[i].transpose(1, 2), dVn[i], alpha=-1)
        dVm, dSm, ST = dVn.view(M, C, E), dS.view(M, D, E), Sm.transpose(1, 2)
        # the triangular system
        dUW = torch.empty(M, C, E + D)
        dUW[:, :, :E] = dVm
        dUW[:, :, E:] = torch.bmm(dVm, ST).neg_()
        R = torch.bmm(inv.transpose(1, 2), dUW)                             # gradient of rhs
        dA = torch.bmm(R, UW.transpose(1, 2)).neg_().tril_(-1)
        dAqk = torch.bmm(do, Vm.transpose(1, 2))                            # P is lower, so no mask is needed
        Rv, Rk = R[:, :, :E], R[:, :, E:]
        dke, dqe = torch.bmm(Vm, dSm.transpose(1, 2)), torch.bmm(do, ST)
        # log decay
        E1 = dA * A
        rowA = E1.sum(2)
        E1.addcmul_(dAqk, Aqk)
        sk = (Rk * k).sum(2).mul_(ec[:, :, 0])
        t = (dke * ke).sum(2)
        dc = E1.sum(2).sub_(E1.sum(1)).addcmul_(sk, beta).add_((dqe * qe).sum(2)).sub_(t)
        dc[:, -1] += t.sum(1) + (Sm * dSm).sum((1, 2)) * ec[:, -1, 0]
        dg = dc @ torch.ones(C, C).tril_()
        # beta enters A's rows and both halves of rhs
        dA.mul_(P)
        KKrow = torch.bmm(dA, k)                                            # sum_j dA P k_j, [M, C, D]
        dbeta = (Rv * v).sum(2).add_(sk).add_((KKrow * k).sum(2))
        dA.mul_(b)
        dQK = dAqk.mul_(P)
        dq = torch.bmm(dQK, k).addcmul_(dqe, ec)
        dk = torch.bmm(dQK.transpose(1, 2), q).baddbmm_(dA.transpose(1, 2), k)
        dk.addcmul_(KKrow, b).addcmul_(dke, el).addcmul_(Rk, b * ec)
        dv = Rv * b
        s = (n, G, C, -1)
        return dq.view(s), dk.view(s), dv.view(s), dg.view(n, G, C), dbeta.view(n, G, C)


class _L2(torch.autograd.Function):
    """x * scale / |x| over the last dimension."""

    @staticmethod
    def forward(ctx, x, scale):
        r = (x * x).sum(-1, keepdim=True).add_(1e-6).rsqrt_()
        y = x * (r * scale)
        ctx.save_for_backward(y, r)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, dy):
        y, r = ctx.saved_tensors
        s = ctx.scale
        dot = (dy * y).sum(-1, keepdim=True)
        return (dy * (r * s)).addcmul_(y, dot.mul_(r).div_(s), value=-1), None


def _chunks(x, n, C):
    """[B, T, H, ...] -> [n, B*H, C, ...], contiguous."""
    B, T, H = x.shape[:3]
    return x.view(B, n, C, H, *x.shape[3:]).permute(1, 0, 3, 2, *range(4, x.dim() + 1)).contiguous().view(n, B * H, C, *x.shape[3:])


def chunk_gated_delta_rule(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, **kw):
    if (initial_state is not None or output_final_state or query.dtype != torch.float32
            or key.shape[2] != value.shape[2] or not use_qk_l2norm_in_kernel):
        return _orig_rule(query, key, value, g, beta, chunk_size=chunk_size, initial_state=initial_state,
                          output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **kw)
    B, T, H, D = query.shape
    C = CHUNK
    pad = -T % C
    if pad:
        query, key, value = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad)) for x in (query, key, value))
        g, beta = (torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in (g, beta))
    n = (T + pad) // C
    q, k, v, g, beta = (_chunks(x, n, C) for x in (query, key, value, g, beta))
    o = _Delta.apply(_L2.apply(q, D ** -0.5), _L2.apply(k, 1.0), v, g, beta)
    o = o.view(n, B, H, C, -1).permute(1, 0, 3, 2, 4).reshape(B, T + pad, H, -1)
    return (o[:, :T] if pad else o), None


class _ConvSilu(torch.autograd.Function):
    """Causal depthwise convolution + silu. x [B, T, F] contiguous, w [F, K]."""

    @staticmethod
    def forward(ctx, x, w):
        B, T, _ = x.shape
        K = w.shape[1]
        wt = w.t().contiguous()                                             # [K, F]
        y = x * wt[K - 1]
        for j in range(1, K):
            y[:, j:].addcmul_(x[:, :T - j], wt[K - 1 - j])
        ctx.save_for_backward(x, wt, y)
        return torch.nn.functional.silu(y)

    @staticmethod
    def backward(ctx, do):
        x, wt, y = ctx.saved_tensors
        K, F = wt.shape
        T = x.shape[1]
        dy = torch.ops.aten.silu_backward(do, y)
        dx, dw, tmp = dy * wt[K - 1], torch.empty(K, F), torch.empty_like(x)
        dw[K - 1] = torch.mul(dy, x, out=tmp).sum((0, 1))
        for j in range(1, K):
            dx[:, :T - j].addcmul_(dy[:, j:], wt[K - 1 - j])
            dw[K - 1 - j] = torch.mul(dy[:, j:], x[:, :T - j], out=tmp[:, j:]).sum((0, 1))
        return dx, dw.t()


def causal_conv1d(hidden_states, weight, bias=None, activation=None, **kw):
    if bias is not None or activation != "silu" or hidden_states.dtype != torch.float32:
        return _orig_conv(hidden_states, weight, bias, activation=activation, **kw)
    return _ConvSilu.apply(hidden_states.transpose(1, 2).contiguous(), weight).transpose(1, 2)


class _Norm(torch.autograd.Function):
    """RMS norm over the last dimension: x [N, D], w [D] (the factor itself)."""

    @staticmethod
    def forward(ctx, x, w, eps):
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        xh = x * r
        ctx.save_for_backward(xh, r, w)
        return xh * w

    @staticmethod
    def backward(ctx, dy):
        xh, r, w = ctx.saved_tensors
        dy = dy.contiguous()
        D = xh.shape[-1]
        t = dy * xh                                                         # sums: over rows for w, with w over D for x
        m = torch.mv(t.view(-1, D), w).view(r.shape).div_(-D)
        dw = t.view(-1, D).sum(0)
        return torch.mul(dy, w, out=t).addcmul_(xh, m).mul_(r), dw, None


def rms_norm(self, x):
    if x.dtype != torch.float32:
        return _orig_norm(self, x)
    return _Norm.apply(x.contiguous(), 1.0 + self.weight, self.eps)


class _SiluMul(torch.autograd.Function):
    """silu(a) * b."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return torch.nn.functional.silu(a).mul_(b)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return torch.ops.aten.silu_backward(dy * b, a), torch.nn.functional.silu(a).mul_(dy)


def gated_norm(self, x, gate):
    if x.dtype != torch.float32 or gate.dtype != torch.float32:
        return _orig_gated(self, x, gate)
    return _SiluMul.apply(gate, _Norm.apply(x.contiguous(), self.weight, self.variance_epsilon))


def mlp(self, x):
    if x.dtype != torch.float32 or self.config.hidden_act != "silu":
        return _orig_mlp(self, x)
    return self.down_proj(_SiluMul.apply(self.gate_proj(x), self.up_proj(x)))


class _LinearCE(torch.autograd.Function):
    """Mean cross entropy of h [N, D] @ W[V, D]^T against y [N], in slices; gradients are made in the forward pass."""

    @staticmethod
    def forward(ctx, h, W, y, rows):
        N = h.shape[0]
        loss, dh, dW = h.new_zeros(()), torch.empty_like(h), torch.zeros_like(W)
        for s in range(0, N, rows):
            hs, ys = h[s:s + rows], y[s:s + rows, None]
            z = hs @ W.t()                                                  # [rows, V]
            zy = z.gather(1, ys)
            mx = z.amax(1, keepdim=True)
            z.sub_(mx).exp_()
            sm = z.sum(1, keepdim=True)
            loss += (sm.log() + mx - zy).sum()
            z.div_(sm * N)
            z.scatter_add_(1, ys, torch.full_like(zy, -1.0 / N))
            torch.mm(z, W, out=dh[s:s + rows])
            dW.addmm_(z.t(), hs)
        ctx.save_for_backward(dh, dW)
        return loss / N

    @staticmethod
    def backward(ctx, g):
        dh, dW = ctx.saved_tensors
        return dh * g, dW * g, None, None


def linear_cross_entropy(h, W, y, rows=256):
    """Equals F.cross_entropy(h @ W.T, y); h [N, D] holds only the rows that count in the loss."""
    return _LinearCE.apply(h, W, y, rows)


def patch(only=None):
    on = lambda name: only is None or name in only
    if on("rule"): Q.torch_chunk_gated_delta_rule = chunk_gated_delta_rule
    if on("conv"): Q.causal_conv1d_fn = causal_conv1d
    if on("norm"):
        Q.Qwen3_5RMSNorm.forward = rms_norm
        Q.Qwen3_5RMSNormGated.forward = gated_norm
    if on("mlp"): Q.Qwen3_5MLP.forward = mlp
