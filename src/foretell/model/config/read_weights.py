"""How many weights a token reads: the time of a pass over few tokens is in proportion to them."""

from foretell.model.config.model import ModelConfig


def attention_weights(config: ModelConfig, layer: int) -> int:
    """Weights of the projections of a layer's attention."""
    sizes = config.sizes_of(layer)
    return config.hidden * sizes.head_dim * (2 * sizes.heads + 2 * sizes.kv_heads)


def mlp_weights(config: ModelConfig, layer: int) -> int:
    """Weights of a layer's feed-forward network that a token reads: of a mixture, those of its experts."""
    experts = config.experts
    if experts is None or layer not in experts.layers:
        return _matrices(config, config.ffn_of(layer))
    dense = experts.beside_dense * config.ffn_of(layer)
    return _matrices(config, experts.active * experts.ffn + experts.shared_ffn + dense)


def layer_weights(config: ModelConfig) -> int:
    """Weights of all layers that a token reads."""
    return sum(attention_weights(config, i) + mlp_weights(config, i) for i in range(config.layers))


def _matrices(config: ModelConfig, neurons: int) -> int:
    """Weights of so many neurons."""
    return (3 if config.gated else 2) * config.hidden * neurons
