"""MaskGIT: hidden codes are told by a softmax over the codebook, and decoded most confident first."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compgen_fast.draws import Draws
from compgen_fast.generate.config import MaskGITConfig
from compgen_fast.generate.generator import Corrupted, Generator
from compgen_fast.generate.masking import decoded_per_round, expected_hidden, hide, rounds
from compgen_fast.generate.trunk import STD
from compgen_fast.models.slot_vae import UNSEEDED, in_full
from compgen_fast.worlds.source import Factor


class MaskGIT(Generator):
    """Codes int64 [B, T]. A hidden token is one more code, the last."""

    measure = "cross_entropy"

    def __init__(self, config: MaskGITConfig, factors: Sequence[Factor]) -> None:
        embedding = nn.Embedding(config.codes + 1, config.trunk.width)
        nn.init.trunc_normal_(embedding.weight, std=STD)
        super().__init__(config, factors, embedding)
        self.config = config
        self.to_logits = nn.Linear(config.trunk.width, config.codes)
        nn.init.trunc_normal_(self.to_logits.weight, std=STD)
        nn.init.zeros_(self.to_logits.bias)

    def check(self, latents: Tensor) -> None:
        if latents.dtype != torch.int64 or latents.dim() != 2 or latents.shape[1] != self.tokens:
            raise ValueError(
                f"MaskGIT: latents are {latents.dtype} {list(latents.shape)}; expected codes, torch.int64 "
                f"[B, {self.tokens}] (set side to the tokenizer's grid)"
            )

    def blank(self, batch: int) -> Tensor:
        return torch.zeros(batch, self.tokens, dtype=torch.int64, device=self.to_logits.bias.device)

    def corrupt(self, latents: Tensor, condition: Tensor, draws: Draws) -> Corrupted:
        hidden = hide(self.tokens, latents, draws)
        tokens = self.embedding(latents.masked_fill(hidden, self.config.codes))
        return Corrupted(tokens, condition, hidden, expected_hidden(self.tokens), latents)

    def score(self, output: Tensor, seen: Corrupted, draws: Draws) -> Tensor:
        logits = in_full(self.to_logits(seen.scored(output)))
        smoothing = self.config.label_smoothing
        return seen.mean(F.cross_entropy(logits, seen.scored(seen.target), reduction="none", label_smoothing=smoothing))

    @torch.no_grad()
    def sample(
        self,
        factors: Mapping[str, Tensor],
        *,
        draws: Draws = UNSEEDED,
        steps: int | None = None,
        guidance: float = 1.0,
        temperature: float = 4.5,
    ) -> Tensor:
        """Codes int64 [B, T]. Each round draws a code for every hidden token and keeps those it is most confident of.

        ``steps`` are rounds, at most T; if not given, 8 or T. ``temperature`` is that of the noise on confidences, and
        falls linearly to 0.
        """
        steps = rounds(self.tokens, steps)
        guide = self.guide(factors, guidance)
        shape = (guide.batch, self.tokens)
        codes = torch.full(shape, self.config.codes, device=guide.condition.device)
        for step, count in enumerate(decoded_per_round(self.tokens, steps)):
            output = self.trunk(guide.both(self.embedding(codes)), guide.condition).tokens
            scores = guide.mixed(in_full(self.to_logits(output))).log_softmax(-1)
            drawn = (scores + gumbel(scores, draws)).argmax(-1)
            confidence = scores.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)
            confidence = confidence + temperature * (1 - (step + 1) / steps) * gumbel(confidence, draws)
            places = confidence.masked_fill(codes != self.config.codes, -torch.inf).topk(count).indices
            codes = codes.scatter(1, places, drawn.gather(1, places))
        return codes


def gumbel(like: Tensor, draws: Draws) -> Tensor:
    """Gumbel noise for each number in ``like`` [n, …]; the largest of scores with it is a draw from their softmax."""
    chances = draws.uniform(like).clamp_min_(torch.finfo(like.dtype).tiny)
    return chances.log_().neg_().log_().neg_()
