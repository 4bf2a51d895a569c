"""Groups of inputs hung on a text, differentiable: what training runs where the target reads vectors beside its text."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int

from foretell.model.decoder import Block, Decoder
from foretell.model.rope import rotate
from foretell.model.sequence import masked_attention, split_heads


def run_branches(
    decoder: Decoder,
    token: Int[torch.Tensor, "b s"],
    cut: Int[torch.Tensor, "b g"],
    inputs: Float[torch.Tensor, "l d"],
) -> Float[torch.Tensor, "b g l d"]:
    """What the head sees at `inputs`, read in order after each of `g` places of a text: input `i` (from 0) stands at position `cut + 1 + i`.

    A group sees its text up to and with position `cut`, and itself; texts and other groups see nothing of it, as probes of a token tree. Padding
    stands at the end. The text itself is read without a gradient: none of it depends on the inputs.
    """
    b, s = token.shape
    g, n = cut.shape[1], cut.shape[1] * len(inputs)
    place = torch.arange(1, len(inputs) + 1, device=token.device)
    position = (cut[:, :, None] + place).clamp(max=decoder.config.context - 1).flatten(1)
    text = _Stream(torch.arange(s, device=token.device).expand(b, s), _causal(s, token.device).expand(b, s, s))
    branch = _Stream(position, _seen(cut, len(inputs), s))
    x = decoder.embed(token.flatten()).view(b, s, -1)
    y = inputs.to(x.dtype).repeat(g, 1).expand(b, n, -1)
    for i, block in enumerate(decoder.blocks):
        assert isinstance(block, Block)
        with torch.no_grad():
            before = _keys(decoder, i, block, x, text)
        own = _keys(decoder, i, block, y, branch)
        y = _through(decoder, i, block, y, branch, _Keys.joined(before, own))
        if i + 1 < len(decoder.blocks):
            with torch.no_grad():
                x = _through(decoder, i, block, x, text, before)
    return decoder.final(y).view(b, g, len(inputs), -1)


@dataclass(frozen=True)
class _Stream:
    """Where the places of a stream stand, and which keys each may see."""

    position: Int[torch.Tensor, "b n"]
    seen: Bool[torch.Tensor, "b n s"]


@dataclass(frozen=True)
class _Keys:
    """Rotated keys, values and positions of what may be seen."""

    k: Float[torch.Tensor, "b h s e"]
    v: Float[torch.Tensor, "b h s e"]
    position: Int[torch.Tensor, "b s"]

    @staticmethod
    def joined(before: "_Keys", own: "_Keys") -> "_Keys":
        """The keys of the text, then those of the groups."""
        parts = ((before.k, own.k, 2), (before.v, own.v, 2), (before.position, own.position, 1))
        return _Keys(*(torch.cat((a, b), axis) for a, b, axis in parts))


def _causal(s: int, device: torch.device) -> Bool[torch.Tensor, "s s"]:
    return torch.ones(s, s, dtype=torch.bool, device=device).tril()


def _seen(cut: Int[torch.Tensor, "b g"], ahead: int, s: int) -> Bool[torch.Tensor, "b n t"]:
    """What every input of every group sees: of `s` places of the text, then of the `n` inputs of all groups."""
    b, g = cut.shape
    text = torch.arange(s, device=cut.device) <= cut[:, :, None]
    groups = torch.kron(torch.eye(g, device=cut.device), _causal(ahead, cut.device).float()).bool()
    return torch.cat((text.repeat_interleave(ahead, 1), groups.expand(b, g * ahead, g * ahead)), 2)


def _turned(decoder: Decoder, i: int, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Heads `[b n h e]` at their positions, as `[b h n e]`."""
    table = decoder.local_rope if decoder.config.window_of(i) else decoder.rope
    turned: torch.Tensor = rotate(x.flatten(0, 1), position.flatten(), table)
    return turned.view_as(x).transpose(1, 2)


def _keys(decoder: Decoder, i: int, block: Block, x: torch.Tensor, stream: _Stream) -> _Keys:
    _, k, v = split_heads(block, decoder.config, block.attention_norm(x))
    k = k if block.k_norm is None else block.k_norm(k)
    return _Keys(_turned(decoder, i, k, stream.position), v.transpose(1, 2), stream.position)


def _through(decoder: Decoder, i: int, block: Block, x: torch.Tensor, stream: _Stream, keys: _Keys) -> torch.Tensor:
    """A stream through the `i`-th block."""
    q = split_heads(block, decoder.config, block.attention_norm(x))[0]
    q = _turned(decoder, i, q if block.q_norm is None else block.q_norm(q), stream.position)
    part: torch.Tensor = block.output(_attend(decoder, i, q, stream, keys))
    x = x + (part if block.post_attention_norm is None else block.post_attention_norm(part))
    part = block.mlp(block.mlp_norm(x).flatten(0, 1)).view_as(x)
    return x + (part if block.post_mlp_norm is None else block.post_mlp_norm(part))


def _attend(decoder: Decoder, i: int, q: torch.Tensor, stream: _Stream, keys: _Keys) -> torch.Tensor:
    """Attention of `[b h n e]` over keys, as `[b n (h e)]`."""
    c = decoder.config
    window, seen = c.window_of(i), stream.seen
    if window:
        seen = seen & (stream.position[:, :, None] - keys.position[:, None] < window)
    k, v = (part.repeat_interleave(c.heads // c.kv_heads, 1) for part in (keys.k, keys.v))
    out = masked_attention(q, k, v, seen[:, None], c.scale, c.attention_softcap)
    joined: torch.Tensor = out.transpose(1, 2).flatten(2)
    return joined
