"""Groups of inputs hung on a text, differentiable: what training runs where the target reads vectors beside its
text.
"""

import torch
from jaxtyping import Bool, Float, Int

from foretell.model.attention import Sight
from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder, DecoderBlock
from foretell.model.rope import rotation
from foretell.model.training.full_forward import masked_attention


def probe_forward(
    decoder: Decoder,
    token: Int[torch.Tensor, "b s"],
    cut: Int[torch.Tensor, "b g"],
    inputs: Float[torch.Tensor, "l d"],
) -> Float[torch.Tensor, "b g l d"]:
    """What the head sees at `inputs`, read in order after each of `g` places of a text: input `i` (from 0) stands at
    position `cut + 1 + i`.

    A group sees its text up to and with position `cut`, and itself; texts and other groups see nothing of it, as probes
    of a token tree. Padding stands at the end. The text itself is read without a gradient: none of it depends on the
    inputs.
    """
    b, s = token.shape
    c, g, n = decoder.config, cut.shape[1], cut.shape[1] * len(inputs)
    place = torch.arange(1, len(inputs) + 1, device=token.device)
    position = torch.arange(s, device=token.device).expand(b, s)
    ahead = (cut[:, :, None] + place).clamp(max=c.context - 1).flatten(1)
    text = _Keys(c, position, _causal(s, token.device).expand(b, s, s))
    branch = _Keys(c, ahead, _seen(cut, len(inputs), s), text)
    ropes = decoder.rope, decoder.local_rope
    text_angles, branch_angles = ([rotation(rope, at) for rope in ropes] for at in (position, ahead))
    x = decoder.embed(token.flatten()).view(b, s, -1)
    y = inputs.to(x.dtype).repeat(g, 1).expand(b, n, -1)
    for i, block in enumerate(decoder.blocks):
        assert isinstance(block, DecoderBlock)
        local = c.window_of(i) > 0
        with torch.no_grad():
            if i + 1 < len(decoder.blocks):
                x = block(x, c, text_angles[local], i, text)
            else:
                text.read(*block.project(block.attention_norm(x), c, text_angles[local])[1:])
        y = block(y, c, branch_angles[local], i, branch)
    return decoder.final(y).to(decoder.embedding.dtype).view(b, g, len(inputs), -1)


class _Keys(Sight):
    """Attention within a stream of `[b, n]` positions and, if there is one, the stream `before` it, whose current layer
    was read already.
    """

    def __init__(
        self,
        config: ModelConfig,
        position: Int[torch.Tensor, "b n"],
        seen: Bool[torch.Tensor, "b n s"],
        before: "_Keys | None" = None,
    ) -> None:
        self._config, self._position, self._before = config, position, before
        key_position = position if before is None else torch.cat((before._position, position), 1)
        age = position[:, :, None] - key_position[:, None]
        self._seen, self._near = seen, seen & (age < config.window) if config.window else seen
        self._k, self._v = torch.empty(0), torch.empty(0)

    def read(self, k: Float[torch.Tensor, "b n g e"], v: Float[torch.Tensor, "b n g e"]) -> None:
        """Take the keys and values of the current layer."""
        self._k, self._v = k.transpose(1, 2), v.transpose(1, 2)

    def attend(
        self,
        layer: int,
        q: Float[torch.Tensor, "b n h e"],
        k: Float[torch.Tensor, "b n g e"],
        v: Float[torch.Tensor, "b n g e"],
    ) -> Float[torch.Tensor, "b n he"]:
        """Attention over the keys of the layer that each position sees."""
        c, before = self._config, self._before
        self.read(k, v)
        keys, values = self._k, self._v
        if before is not None:
            keys, values = torch.cat((before._k, keys), 2), torch.cat((before._v, values), 2)
        keys, values = (part.repeat_interleave(c.heads // c.kv_heads, 1) for part in (keys, values))
        seen = self._near if c.window_of(layer) else self._seen
        out = masked_attention(q.transpose(1, 2), keys, values, seen[:, None], c.scale, c.attention_softcap)
        joined: torch.Tensor = out.transpose(1, 2).flatten(2)
        return joined


def _causal(s: int, device: torch.device) -> Bool[torch.Tensor, "s s"]:
    return torch.ones(s, s, dtype=torch.bool, device=device).tril()


def _seen(cut: Int[torch.Tensor, "b g"], ahead: int, s: int) -> Bool[torch.Tensor, "b n t"]:
    """What every input of every group sees: of `s` places of the text, then of the `n` inputs of all groups."""
    b, g = cut.shape
    text = torch.arange(s, device=cut.device) <= cut[:, :, None]
    groups = torch.kron(torch.eye(g, device=cut.device), _causal(ahead, cut.device).float()).bool()
    return torch.cat((text.repeat_interleave(ahead, 1), groups.expand(b, g * ahead, g * ahead)), 2)
