"""Published heads that correct a block: what is read computes what a plain transcription of the published description
computes (and, where the library is installed, what its modules compute), what is exported reads back, and what does not
fit is refused in a sentence.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from published import D, Tensors, V, drawn, embedding_and_head, matrix, put
from test_dflash_formats import ANCHOR, MASK, SIZE, TOKENS, block_attention, dflash, load, predicted
from test_eagle_formats import norm
from test_export import VERIFIER
from torch import nn

from foretell.speculator.export import export
from foretell.speculator.network.dflash import DFlash

GROUP, WIDTH, HEADS, FACTORS, TOP = 4, 6, 2, 5, 3
KINDS = ("dflash2", "dflash2 of the library", "domino", "domino shifted", "xpress", "lilicorr", "lilicorr numbered")


def checkpoint(name: str) -> tuple[dict[str, Any], Tensors]:
    """As the authors publish it, or the `speculators` library."""
    kind, how = name.partition(" ")[::2]
    library = kind == "xpress" or how == "of the library"
    config, t = dflash(library=library)
    own = config if library else config["dflash_config"]
    shapes: dict[str, tuple[int, ...]] = {}
    if kind in ("dflash2", "lilicorr"):
        own |= {"conv_kernel_size": 2, "conv_group_size": GROUP}
        for at in (f"layers.{i}.{part}_conv" for i in range(2) for part in ("attention", "mlp")):
            shapes |= {f"{at}.base_kernel": (2, 2, D), f"{at}.kernel_projection.weight": (4 * D // GROUP, D)}
    if kind == "dflash2":
        own |= {"selector_rank": 4, "selector_top_k": TOP}
        shapes |= {f"candidate_selector.{n}_codebook": (V, 4) for n in ("predecessor", "successor")}
        shapes["candidate_selector.hidden_projection.weight"] = (4, D)
    if kind == "domino":
        shifted = how == "shifted"
        own |= {"projector_type": "domino", "shift_label": shifted, "pure_draft_prefix_len": 1, "emb_dim": 4}
        own |= {"gru_hidden_dim": WIDTH}
        shapes |= {"prefix_gru.weight_ih_l0": (3 * WIDTH, D), "prefix_gru.weight_hh_l0": (3 * WIDTH, WIDTH)}
        shapes |= {"embed_proj.0.weight": (4, D + WIDTH), "embed_proj.2.weight": (V, 4)}
    if kind == "xpress":
        own |= {"xpress_rank": 4, "xpress_mlp_ratio": 2, "num_jacobi_passes": 6}
        shapes |= {"token_embed.weight": (V, 4), "down_h.weight": (4, D), "down_g.weight": (4, D)}
        shapes |= {"in_proj.weight": (4, 12), "mix_l": (4, SIZE, SIZE), "mlp_gate.weight": (8, 4)}
        shapes |= {"mlp_up.weight": (8, 4), "mlp_down.weight": (4, 8), "readout.weight": (V, 4)}
        shapes = {f"refiner_head.{n}": shape for n, shape in shapes.items()}
    if kind == "lilicorr":
        own |= {"lilicorr_candidate_topk": TOP, "lilicorr_hidden_size": WIDTH, "lilicorr_num_layers": 2}
        own |= {"lilicorr_num_heads": HEADS, "lilicorr_mlp_ratio": 2.0, "lilicorr_factor_dim": FACTORS}
        own |= {"lilicorr_vector_eps": 1e-4, "lilicorr_logit_scale": 8.0, "lilicorr_enabled": True}
        shapes |= {
            f"lilicorr.{n}": shape for n, shape in lattice(("0", "2") if how else ("up_proj", "down_proj")).items()
        }
    named = {"dflash2": "DFlash2DraftModel", "lilicorr": "LiLiCorrDraftModel"}
    config |= {"speculators_model_type": kind} if library else {}
    config |= {"architectures": [named[kind]]} if kind in named else {}
    return config, t | drawn(shapes)


def lattice(parts: tuple[str, str]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"feature_norm.weight": (5,), "feature_norm.bias": (5,)}
    shapes |= {"slot_embedding": (1, 1, SIZE - 1, 1, WIDTH), "rank_embedding": (1, 1, 1, TOP, WIDTH)}
    shapes |= {"relative_slot_bias": (HEADS, 2 * SIZE - 1), "same_slot_bias": (HEADS,)}
    shapes |= {f"{n}_norm.weight": (WIDTH,) for n in ("output", "anchor")}
    linear = {f"{n}_proj": (WIDTH, D) for n in ("token", "pass_hidden", "context")}
    linear |= {f"feature_mlp.{parts[0]}": (WIDTH, 5), f"feature_mlp.{parts[1]}": (WIDTH, WIDTH)}
    linear |= {"factor_input_proj": (WIDTH, 3 * WIDTH)} | {
        f"{n}_head": (FACTORS, WIDTH) for n in ("out", "in", "anchor_out")
    }
    for at in ("layers.0", "layers.1"):
        shapes |= {f"{at}.{n}_norm.weight": (WIDTH,) for n in ("attn", "mlp")}
        shapes |= {f"{at}.attn.in_proj_weight": (3 * WIDTH, WIDTH), f"{at}.attn.in_proj_bias": (3 * WIDTH,)}
        linear |= {f"{at}.attn.out_proj": (WIDTH, WIDTH)}
        linear |= {f"{at}.mlp.{parts[0]}": (2 * WIDTH, WIDTH), f"{at}.mlp.{parts[1]}": (WIDTH, 2 * WIDTH)}
    for name, (rows, columns) in linear.items():
        shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    return shapes


def block(t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of all slots after the final norm, and the feature before the anchor."""
    states = torch.cat([matrix(1, len(TOKENS), D, seed=30 + i)[0, :ANCHOR] for i in range(2)], -1)
    c = norm(states @ t["fc.weight"].T, t["hidden_norm.weight"])
    x = embedding_and_head().embedding[[TOKENS[ANCHOR], *[MASK] * (SIZE - 1)]]
    for at in ("layers.0", "layers.1"):
        y = norm(x, t[f"{at}.input_layernorm.weight"])
        x = x + around(lambda z, at=at: block_attention(c, z, t, at), y, t, f"{at}.attention_conv")
        y = norm(x, t[f"{at}.post_attention_layernorm.weight"])
        x = x + around(lambda z, at=at: gated(z, t, at), y, t, f"{at}.mlp_conv")
    return norm(x, t["norm.weight"]), c[-1]


def gated(x: torch.Tensor, t: Tensors, at: str) -> torch.Tensor:
    y = F.silu(x @ t[f"{at}.mlp.gate_proj.weight"].T) * (x @ t[f"{at}.mlp.up_proj.weight"].T)
    return y @ t[f"{at}.mlp.down_proj.weight"].T


def around(part: Any, x: torch.Tensor, t: Tensors, at: str) -> torch.Tensor:
    """Slot after slot and channel after channel: two taps before the part and after it, both from its input."""
    if f"{at}.base_kernel" not in t:
        return part(x)  # type: ignore[no-any-return]
    base, delta = t[f"{at}.base_kernel"], x @ t[f"{at}.kernel_projection.weight"].T
    groups = D // GROUP

    def mixed(y: torch.Tensor, side: int) -> torch.Tensor:
        out = torch.zeros_like(y)
        for slot in range(len(y)):
            for channel in range(D):
                for tap in range(min(2, slot + 1)):
                    kernel = base[side, tap, channel] + delta[slot, (side * 2 + tap) * groups + channel // GROUP]
                    out[slot, channel] += kernel * y[slot - tap, channel]
        return out

    return mixed(part(mixed(x, 0)), 1)


def plain(name: str, t: Tensors) -> torch.Tensor:
    """The corrected logits of the predicting slots along the true tokens."""
    h, feature = block(t)
    first = 0 if name == "domino shifted" else 1
    text, lent = [*TOKENS, *[0] * SIZE], embedding_and_head()
    logits = h @ lent.head.T
    out = []
    for slot in range(first, SIZE):
        before = text[ANCHOR : ANCHOR + slot - first + 1]
        if name.startswith("dflash2"):
            out.append(selected(logits[slot], h[slot], before[-1], t))
        elif name.startswith("domino"):
            changed = logits[slot] + domino(h[slot], lent.embedding[before], t)
            out.append(changed if len(before) > 1 else logits[slot])
        elif name == "xpress":
            out.append(logits[slot] + refined(h, text[ANCHOR - 1 : ANCHOR + SIZE - 1], slot, t))
    if name.startswith("lilicorr"):
        return latticed(logits[1:], h[1:], feature, text[ANCHOR : ANCHOR + SIZE - 1], t)
    return torch.stack(out)


def only(row: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.full_like(row, float("-inf")).scatter(0, tokens, scores)


def selected(row: torch.Tensor, h: torch.Tensor, before: int, t: Tensors) -> torch.Tensor:
    a, b = (t[f"candidate_selector.{n}_codebook"] for n in ("predecessor", "successor"))
    tokens = row.topk(TOP).indices
    projected = t["candidate_selector.hidden_projection.weight"] @ h
    return only(row, tokens, torch.stack([row[c] + sum(a[before] * projected * b[c]) for c in tokens]))


def domino(h: torch.Tensor, embedded: torch.Tensor, t: Tensors) -> torch.Tensor:
    s = torch.zeros(WIDTH)
    for x in embedded:
        (r, z, n), (ur, uz, un) = (
            (t["prefix_gru.weight_ih_l0"] @ x).chunk(3),
            (t["prefix_gru.weight_hh_l0"] @ s).chunk(3),
        )
        z, n = torch.sigmoid(z + uz), torch.tanh(n + torch.sigmoid(r + ur) * un)
        s = (1 - z) * n + z * s
    return t["embed_proj.2.weight"] @ F.silu(t["embed_proj.0.weight"] @ torch.cat((h, s)))


def refined(h: torch.Tensor, before: list[int], slot: int, t: Tensors) -> torch.Tensor:
    t = {n.removeprefix("refiner_head."): w for n, w in t.items() if n.startswith("refiner_head.")}
    mean = t["down_g.weight"] @ h.mean(0)
    x = [
        t["in_proj.weight"] @ torch.cat((t["down_h.weight"] @ h[k], mean, t["token_embed.weight"][before[k]]))
        for k in range(SIZE)
    ]
    y = x[slot] + sum(t["mix_l"][:, slot, j] * x[j] for j in range(slot + 1))
    y = y + t["mlp_down.weight"] @ (F.silu(t["mlp_gate.weight"] @ y) * (t["mlp_up.weight"] @ y))
    return t["readout.weight"] @ y


def latticed(
    logits: torch.Tensor, h: torch.Tensor, feature: torch.Tensor, before: list[int], t: Tensors
) -> torch.Tensor:
    t = {n.removeprefix("lilicorr."): w for n, w in t.items() if n.startswith("lilicorr.")}
    t = {n.replace("mlp.0.", "mlp.up_proj.").replace("mlp.2.", "mlp.down_proj."): w for n, w in t.items()}

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def two(name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(f"{name}.down_proj", F.silu(linear(f"{name}.up_proj", x)))

    slots, best = len(logits), logits.log_softmax(-1).topk(TOP)
    x = []
    for s in range(slots):
        for rank in range(TOP):
            log_p = best.values[s, rank]
            five = torch.stack(
                (
                    log_p,
                    log_p.exp(),
                    log_p - best.values[s].max(),
                    torch.tensor(rank / (TOP - 1)),
                    torch.tensor(float(rank == 0)),
                )
            )
            token = embedding_and_head().embedding[best.indices[s, rank]]
            node = linear("token_proj", token) + linear("pass_hidden_proj", h[s])
            node = node + two("feature_mlp", F.layer_norm(five, (5,), t["feature_norm.weight"], t["feature_norm.bias"]))
            x.append(node + t["slot_embedding"][0, 0, s, 0] + t["rank_embedding"][0, 0, 0, rank])
    z, bias = torch.stack(x), torch.zeros(HEADS, slots * TOP, slots * TOP)
    for i in range(slots * TOP):
        for j in range(slots * TOP):
            bias[:, i, j] = t["relative_slot_bias"][:, i // TOP - j // TOP + SIZE - 1]
            bias[:, i, j] += t["same_slot_bias"] * (i // TOP == j // TOP)
    for at in ("layers.0", "layers.1"):
        attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
        attention.load_state_dict({n: t[f"{at}.attn.{n}"] for n in names})
        y = norm(z, t[f"{at}.attn_norm.weight"])[None]
        z = z + attention(y, y, y, attn_mask=bias, need_weights=False)[0][0].detach()
        z = z + two(f"{at}.mlp", norm(z, t[f"{at}.mlp_norm.weight"]))
    z = norm(z, t["output_norm.weight"])
    anchor = norm(linear("context_proj", feature), t["anchor_norm.weight"])
    f = F.silu(linear("factor_input_proj", torch.cat((z, anchor.expand_as(z), z * anchor), -1)))
    unit = [
        y / y.norm(dim=-1, keepdim=True).clamp_min(1e-4)
        for y in (linear("out_head", f), linear("in_head", f), linear("anchor_out_head", anchor))
    ]
    from_, to = (y.view(slots, TOP, -1) for y in unit[:2])
    out = [only(logits[0], best.indices[0], 8 * to[0] @ unit[2])]
    for s in range(1, slots):
        row = best.values[s]
        if before[s] in best.indices[s - 1].tolist():
            row = 8 * to[s] @ from_[s - 1, best.indices[s - 1].tolist().index(before[s])]
        out.append(only(logits[s], best.indices[s], row))
    return torch.stack(out)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_read_corrects_as_it_is_described(tmp_path: Path, name: str) -> None:
    config, t = checkpoint(name)
    network = load(put(tmp_path, config, t))
    assert network.correction is not None and network.depth == SIZE - (name != "domino shifted")
    torch.testing.assert_close(predicted(network)[0], plain(name, t), atol=1e-4, rtol=1e-4)
    # What is compared depends on the correction: without it the same block predicts otherwise.
    assert not torch.allclose(
        predicted(network)[0][1:], block(t)[0][-len(predicted(network)[0]) + 1 :] @ embedding_and_head().head.T
    )


@pytest.mark.parametrize(("kind", "causal"), [("dflash2", False), ("dflash", True)])
def test_windows_of_the_library_hide_later_slots_by_kind(tmp_path: Path, kind: str, causal: bool) -> None:
    """Where `sliding_window_non_causal` is missing, its default is the class's: true for DFlash 2 alone."""
    config, t = checkpoint("dflash2 of the library") if kind == "dflash2" else dflash(library=True)
    windows = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "use_sliding_window": True}
    config["transformer_layer_config"] |= windows
    assert load(put(tmp_path, config, t)).config.window_causal == causal


@pytest.mark.parametrize("name", KINDS)
def test_what_is_exported_reads_back(tmp_path: Path, name: str) -> None:
    network = load(put(tmp_path / "in", *checkpoint(name)))
    export(network, VERIFIER, "speculators" if name == "xpress" or "library" in name else "dflash", tmp_path / "out")
    again = load(tmp_path / "out")
    assert again.config.model_dump(exclude={"target"}) == network.config.model_dump(exclude={"target"})
    assert torch.equal(predicted(again)[0], predicted(network)[0])


@pytest.mark.parametrize("format_name", ["dflash", "speculators"])
def test_a_learned_mask_is_exported_in_the_row_of_its_token(tmp_path: Path, format_name: str) -> None:
    config = load(put(tmp_path / "in", *dflash())).config.model_copy(update={"mask_token": None})
    network = DFlash(config, embedding_and_head())
    for i, parameter in enumerate(network.parameters()):
        parameter.data = matrix(*parameter.shape, seed=300 + i)
    export(network, VERIFIER, format_name, tmp_path / "out")
    again = load(tmp_path / "out")
    assert again.config.mask_token == V - 1 and again.config.own_embedding
    torch.testing.assert_close(predicted(again)[0], predicted(network)[0])


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("dflash2", {"selector_top_k": None}, "selector_top_k"),
        ("dflash2", {"conv_kernel_size": 3}, "conv_kernel_size should be 2: nothing else is supported"),
        ("domino", {"pure_draft_prefix_len": None}, "pure_draft_prefix_len"),
        ("lilicorr", {"lilicorr_logit_scale": None}, "lilicorr_logit_scale"),
    ],
)
def test_what_is_not_said_is_refused_by_name(tmp_path: Path, name: str, changed: dict[str, Any], words: str) -> None:
    config, t = checkpoint(name)
    config["dflash_config"] |= changed
    config["dflash_config"] = {k: v for k, v in config["dflash_config"].items() if v is not None}
    with pytest.raises(ValueError, match=words) as error:
        load(put(tmp_path, config, t))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["dflash2 of the library", "xpress"])
def test_the_librarys_own_modules_give_the_same(tmp_path: Path, name: str) -> None:
    kind = name.split()[0]
    modules = pytest.importorskip(f"speculators.models.{kind}.model_definitions", exc_type=ImportError)
    config, t = checkpoint(name)
    h, lent = block(t)[0], embedding_and_head()
    logits, before = h @ lent.head.T, torch.tensor([*TOKENS, *[0] * SIZE][ANCHOR - 1 : ANCHOR + SIZE - 1])
    if kind == "xpress":
        head = modules.XPressRefinerHead(
            verifier_vocab_size=V, draft_vocab_size=V, hidden_size=D, block_size=SIZE, rank=4
        )
        head.load_state_dict(
            {n.removeprefix("refiner_head."): w for n, w in t.items() if n.startswith("refiner_head.")}
        )
        expected = (logits + head.block_bias(before[None], h[None])[0])[1:]
    else:
        around_ = modules.GroupedDynamicCausalConv(D, block_size=SIZE, kernel_size=2, group_size=GROUP)
        at = "layers.0.attention_conv"
        around_.load_state_dict({n.removeprefix(f"{at}."): w for n, w in t.items() if n.startswith(at)})
        x = matrix(SIZE, D, seed=77)
        mixed, kernel = around_.prepare(x)
        torch.testing.assert_close(around_.finish(mixed * 2, kernel), around(lambda y: y * 2, x, t, at))
        head = modules.CandidateSelector(vocab_size=V, hidden_size=D, rank=4, top_k=TOP)
        head.load_state_dict(
            {n.removeprefix("candidate_selector."): w for n, w in t.items() if n.startswith("candidate_selector.")}
        )
        tokens, scores = head.select(logits[1:], h[1:], before[1:])
        expected = torch.full_like(logits[1:], float("-inf")).scatter(1, tokens, scores)
    torch.testing.assert_close(predicted(load(put(tmp_path, config, t)))[0], expected.detach(), atol=1e-4, rtol=1e-4)
