from dataclasses import dataclass
import torch, torch.distributed as dist
from motet.models.arch.attention_core import _attend_locally
from motet.models.arch.attention_mask import AttentionMask, AttentionTokens
@dataclass(frozen=True)
class ContextGroup:
    partition: object; rank: int; group: object; kind: str; inner: object
class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        p = ranks.partition
        parts=[x.new_empty(*x.shape[:2], p.length(r), x.shape[3]) for r in range(p.ranks)]
        for r,t in enumerate(parts):
            if r==ranks.rank: t.copy_(x)
            dist.broadcast(t, dist.get_global_rank(ranks.group.process_group, r), group=ranks.group.process_group)
        out=x.new_empty(*x.shape[:2], p.tokens, x.shape[3])
        for r,t in enumerate(parts):
            idx=[i for a,b in p.spans(r) for i in range(a,b)]
            out[:,:,idx]=t
        return out
    @staticmethod
    def backward(ctx, g):
        g=g.contiguous(); dist.all_reduce(g, group=ctx.ranks.group.process_group)
        idx=[i for a,b in ctx.ranks.partition.spans(ctx.ranks.rank) for i in range(a,b)]
        return g[:,:,idx], None
class _E:
    def __init__(s, ranks, documents): s.ranks, s.documents = ranks, documents
    def attend(s, q,k,v,*,mask,options):
        k,v=_Gather.apply(k.contiguous(),s.ranks),_Gather.apply(v.contiguous(),s.ranks)
        idx=torch.tensor([i for a,b in s.ranks.partition.spans(s.ranks.rank) for i in range(a,b)])
        d=s.documents
        m=AttentionMask(AttentionTokens(idx, None if d is None else d[:,idx]), AttentionTokens(None,d), causal=mask.causal, window=mask.window)
        return _attend_locally(q,k,v,mask=m,options=options)
def context_attention(ranks, documents): return _E(ranks, documents)
