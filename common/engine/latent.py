"""Multi-head latent attention over compressed rows: the projections of K and V are applied to queries and outputs.

A row holds `rank` latent numbers and `rope` numbers of the shared rotated key, whatever the number of heads. With
W_uk, W_uv the halves of kv_b_proj, a score q_nope . (W_uk c) + q_rope . k_rope is (q_nope W_uk) . c + q_rope . k_rope,
and the output is W_uv (sum of p c): K and V of single heads are never built ("weight absorption", DeepSeek-V2,
arXiv 2405.04434, section 2.1.2). A long chunk is cheaper with K and V built once for all its queries, a few heads at a
time. Called by the attention function; the weights are taken from the loaded model once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from common.errors import StartupError

# K and V of as many heads as fit here are built at a time.
MAX_EXPANDED_BYTES = 64 << 20
NEEDED = ("kv_b_proj", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")

# query [1, heads, c, d], keys [1, heads, n, d], values [1, heads, n, dv] -> [1, heads, c, dv]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def is_latent(module: Any) -> bool:
    """Whether an attention module caches compressed rows and builds K and V from them itself."""
    return hasattr(module, "expand_kv")


class LatentWeights:
    """W_uk [heads, nope, rank] and W_uv [heads, v, rank] of one attention module."""

    def __init__(self, module: Any) -> None:
        missing = [name for name in NEEDED if not hasattr(module, name)]
        if missing or getattr(module.kv_b_proj, "bias", None) is not None:
            what = f"has no {missing[0]}" if missing else "has a bias in kv_b_proj"
            raise StartupError(f"layer {module.layer_idx} attends over latents but {what}: it cannot be carried.")
        self.nope, self.rope, self.v = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
        self.rank = module.kv_lora_rank
        weight = module.kv_b_proj.weight.detach().view(-1, self.nope + self.v, self.rank)
        self.up_k = weight[:, : self.nope].contiguous()
        self.up_v = weight[:, self.nope :].contiguous()
        # The model would build K and V of the new tokens, and nobody reads them.
        module.expand_kv = lambda latent, rope: (latent, rope)
        module.kv_b_proj = torch.nn.Identity()

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """query [B, heads, c, nope + rope] -> [B, heads, c, rank + rope], to be compared with rows."""
        latent = torch.einsum("bhcn,hnr->bhcr", query[..., : self.nope], self.up_k)
        return torch.cat([latent, query[..., self.nope :]], dim=-1)

    def project(self, attended: torch.Tensor) -> torch.Tensor:
        """Attended latents [B, heads, c, rank] -> outputs [B, heads, c, v]."""
        return torch.einsum("bhcr,hvr->bhcv", attended, self.up_v)

    def expands(self, num_queries: int) -> bool:
        """Whether building K and V takes fewer operations per row than comparing latents for so many queries."""
        build = self.rank * (self.nope + self.v)
        return bool(num_queries * (2 * self.rank + self.rope) > build + num_queries * (self.nope + self.rope + self.v))

    def expanded(self, query: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        """query [heads, c, nope + rope] over rows [n, rank + rope]; returns [heads, c, v]."""
        latent, rope = rows[:, : self.rank], rows[:, self.rank :]
        heads, num = query.shape[0], rows.shape[0]
        step = max(1, MAX_EXPANDED_BYTES // (num * (self.nope + self.rope + self.v) * rows.element_size()))
        outputs = []
        for first in range(0, heads, step):
            part = slice(first, first + step)
            nope = torch.matmul(latent, self.up_k[part].transpose(1, 2))
            keys = torch.cat([nope, rope.expand(nope.shape[0], -1, -1)], dim=-1)
            values = torch.matmul(latent, self.up_v[part].transpose(1, 2))
            outputs.append(attend(query[None, part], keys[None], values[None])[0])
        return torch.cat(outputs)
