"""Layouts of trees in the cache: the logits of a node are those of its path alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from foretell.core.tree import root_tree, tree_from_lists
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout
from foretell.model.config.model import ModelConfig, RopeConfig
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.testing import TINY, tiny_decoder, tiny_deepseek, tiny_gpt_oss, tiny_moe
from helpers import chain_tree, random_tokens

CONFIGS: dict[str, ModelConfig] = {
    "llama": replace(TINY, vocab=31),
    "window": replace(TINY, vocab=31, window=4, window_layers=(1,)),
    "gemma": replace(
        TINY, vocab=31, architecture="gemma3_text", post_norms=True, qk_norm=True, norm_offset=1.0,
        activation="gelu_tanh",
        attention_softcap=4.0, logit_softcap=9.0, embedding_scale=4.0, window=4, window_layers=(0,),
        local_rope=RopeConfig(theta=500.0),
    ),
    "mixture": tiny_moe(replace(TINY, vocab=31)),
    "gpt-oss": tiny_gpt_oss(replace(TINY, vocab=31)),
    "deepseek": tiny_deepseek(replace(TINY, vocab=31)),
}  # fmt: skip
PARENTS = [-1, 0, 0, 1, 3, 1, 2, 6, 4, 0]


def layout_of(
    parents: list[int], prefix_length: int, length: int, active: list[bool] | None = None
) -> list[tuple[int, ...]]:
    """Slot, position, visible prefix and extra slots of every active node."""
    tree = tree_from_lists([[0] * len(parents)], [parents])
    tree = replace(tree, prefix_length=np.full(tree.rows, prefix_length))
    layout, _ = Layout.from_tree(tree, [0], np.array([length]), tree.valid if active is None else np.array([active]))
    columns = (layout.slot, layout.position, layout.visible_prefix)
    return [
        (*(int(c[t]) for c in columns), *layout.extra_slots[t][layout.extra_slots[t] >= 0].tolist())
        for t in range(layout.token_count)
    ]


def test_the_worked_example() -> None:
    assert layout_of([-1, 0, 0], 1, 5) == [(5, 5, 6), (6, 6, 7), (7, 6, 6, 7)]


def test_a_chain_needs_no_extra_slots() -> None:
    assert layout_of([-1, 0, 1, 2], 3, 10) == [(10 + i, 10 + i, 11 + i) for i in range(4)]


def test_deeper_branches_list_their_own_slots() -> None:
    assert layout_of([-1, 0, 0, 1, 2, 4], 1, 0) == [
        (0, 0, 1),
        (1, 1, 2),
        (2, 1, 1, 2),
        (3, 2, 2, 3),
        (4, 2, 1, 2, 4),
        (5, 3, 1, 2, 4, 5),
    ]


def test_nodes_that_run_later_see_their_ancestors() -> None:
    whole = layout_of([-1, 0, 0, 2], 1, 5)
    assert layout_of([-1, 0, 0, 2], 1, 5, [False, False, False, True]) == whole[3:]


@pytest.mark.parametrize("name", CONFIGS)
def test_tree_logits_are_path_logits(name: str) -> None:
    network = tiny_decoder(CONFIGS[name])
    text, tokens = random_tokens(13, 31), random_tokens(10, 31, seed=1)
    runner = DecoderRunner(network)
    runner.forward([0], chain_tree(text))
    runner.commit(0, range(13))
    tree = tree_from_lists([tokens], [PARENTS])
    whole = runner.forward([0], tree, hidden_layers=(0, 1, 2, 3))
    early = tree.valid & (np.arange(10) < 6)
    first, second = (runner.forward([0], tree, active=part) for part in (early, tree.valid & ~early))
    torch.testing.assert_close(torch.cat([first.logits, second.logits]), whole.logits, rtol=0, atol=1e-9)
    for node in range(10):
        path = [*text, *(tokens[a] for a in tree.ancestors(0, node))]
        alone = DecoderRunner(network).forward([0], chain_tree(path), hidden_layers=(0, 1, 2, 3))
        torch.testing.assert_close(whole.logits[node], alone.logits[-1], rtol=0, atol=1e-9)
        for found, expected in zip(whole.hidden_states, alone.hidden_states, strict=True):
            torch.testing.assert_close(found[node], expected[-1], rtol=0, atol=1e-9)


def test_decoding_after_a_committed_path_equals_decoding_after_the_same_tokens() -> None:
    network, text = tiny_decoder(CONFIGS["window"]), random_tokens(5, 31)
    runner, tree = DecoderRunner(network), tree_from_lists([random_tokens(10, 31, seed=1)], [PARENTS])
    runner.forward([2, 0], root_tree([1, 1]).with_prefix([text, text[:2]]))
    runner.commit(2, range(5))
    runner.forward([2], tree)
    runner.commit(2, [0, 1, 3, 4, 8])
    assert runner.length(2) == 10
    path = [*text, *(int(tree.token[0, n]) for n in (0, 1, 3, 4, 8)), 7]
    found = runner.forward([2], chain_tree([7])).logits
    torch.testing.assert_close(
        found[0], DecoderRunner(network).forward([0], chain_tree(path)).logits[-1], rtol=0, atol=1e-9
    )
    runner.truncate(2, 3)
    again = runner.forward([2], chain_tree(path[3:])).logits[-1]
    torch.testing.assert_close(again, found[0], rtol=0, atol=1e-9)


def test_only_scored_nodes_have_scores() -> None:
    runner, tree = DecoderRunner(tiny_decoder()), tree_from_lists([[1, 2, 3], [4, 5]], [[-1, 0, 0], [-1, 0]])
    scored = np.array([[False, True, False], [True, False, False]])
    output = runner.forward([0, 1], tree, scored=scored)
    assert output.logit_index.tolist() == [[-1, 0, -1], [1, -1, -1]]
    everything = runner.forward([0, 1], tree)
    torch.testing.assert_close(output.logits, everything.logits[[1, 3]])


def write_numbers(cache: KVCache, row: int, first: int, last: int) -> None:
    """Let every key and value of these slots be the slot's number."""
    cache.reserve([row], [last])
    slot = torch.arange(first, last)
    number = slot.to(cache.dtype)[:, None, None]
    cache.write(0, torch.full_like(slot, row), slot, number, number)


def numbers(cache: KVCache, row: int, slots: int) -> list[float]:
    """The keys of the first slots of a row."""
    keys, values = cache.read(0, torch.tensor([row]), slots)
    assert torch.equal(keys, values)
    return list(map(float, keys[0, 0, :, 0]))


def test_moving_slots_that_overlap_goes_through_a_copy() -> None:
    cache = KVCache(1, 1, 1, torch.float32, torch.device("cpu"))
    write_numbers(cache, 0, 0, 8)
    cache.move(0, [2, 4, 3, 5], 2)
    assert numbers(cache, 0, 8)[2:6] == [2, 4, 3, 5]


def test_a_growing_cache_keeps_what_it_holds() -> None:
    cache = KVCache(1, 1, 1, torch.float32, torch.device("cpu"))
    write_numbers(cache, 0, 0, 3)
    cache.reserve([0, 3], [100, 2000])
    assert cache.rows >= 4
    assert numbers(cache, 0, 3) == [0, 1, 2]
    assert len(numbers(cache, 3, 2000)) == 2000


def test_the_first_layers_share_weights_and_all_layers_predict_alike() -> None:
    network = tiny_decoder(replace(TINY, layers=3))
    cut, tree = network.first_layers(3), chain_tree([1, 2, 3])
    assert cut.blocks[0] is network.blocks[0]
    assert torch.equal(DecoderRunner(cut).forward([0], tree).logits, DecoderRunner(network).forward([0], tree).logits)
    with pytest.raises(ValueError, match="cannot cut after 4 layers: the model has 3"):
        network.first_layers(4)
