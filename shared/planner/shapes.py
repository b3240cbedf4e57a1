"""The shapes of published language models, and the exact number of parameters of each.

Each one is a decoder of identical layers: attention with `heads` heads, then an MLP of width `ffn`. Two families exist:

    GPT     LayerNorm with a bias, a bias on every linear layer, learned positions, an MLP of two matrices, and an
            output layer that is tied to the token embedding
    Llama   RMSNorm, no biases, rotary positions (which have no parameters), a gated MLP of three matrices, and an
            untied output layer; keys and values may have fewer heads than queries (grouped-query attention)

A model may also have `experts`, each of which is such an MLP, and a router: a matrix that chooses top_k of them for
each token.

Sources:
    GPT-2    Radford et al. 2019, table 2, and the hparams.json released with each model (github.com/openai/gpt-2).
             The paper's own totals, 117M to 1542M, were wrong; that repository's README corrects them.
    GPT-3    Brown et al. 2020 (arXiv 2005.14165), table 2.1; the total in millions in table D.1
    Llama 2  Touvron et al. 2023 (arXiv 2307.09288), §2.2 and table 1; the params.json released with each model
    Llama 3  Grattafiori et al. 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3 and §3.4;
             the params.json released with each model
    Mixtral  Jiang et al. 2024, "Mixtral of Experts" (arXiv 2401.04088), table 1 and §2.2
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ModelShape:
    """The values that determine how many parameters a decoder has.

    Attributes:
        context: The sequence length with which the model was first trained.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    context: int
    gated: bool = False
    tied: bool = True
    biases: bool = True  # on linear layers and norms
    learned_positions: bool = True
    experts: int = 0  # of each layer; 0: an ordinary MLP
    top_k: int = 0  # experts per token

    @property
    def attention_parameters(self) -> int:
        """Parameters of the query, key, value and output projections of one layer."""
        matrices = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_width
        return matrices + (2 * self.hidden + 2 * self.kv_width if self.biases else 0)

    @property
    def kv_width(self) -> int:
        """The width of the keys of one layer, and of its values."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def mlp_parameters(self) -> int:
        """Parameters of the MLP of one layer, or of all its experts and their router."""
        if self.experts:
            return self.expert_parameters + self.experts * self.hidden
        return self._one_mlp_parameters

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer, without their router."""
        return self.experts * self._one_mlp_parameters

    @property
    def active_mlp_parameters(self) -> int:
        """Parameters of the MLP that one token meets: with experts, those of top_k of them and the router."""
        if self.experts:
            return self.top_k * self._one_mlp_parameters + self.experts * self.hidden
        return self.mlp_parameters

    @property
    def _one_mlp_parameters(self) -> int:
        matrices = (3 if self.gated else 2) * self.hidden * self.ffn
        biases = (2 if self.gated else 1) * self.ffn + self.hidden
        return matrices + (biases if self.biases else 0)

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm: a scale per hidden dimension, and a bias in families that have biases."""
        return (2 if self.biases else 1) * self.hidden

    @property
    def layer_parameters(self) -> int:
        return self.attention_parameters + self.mlp_parameters + 2 * self.norm_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding, and of the position embedding if positions are learned."""
        positions = self.context if self.learned_positions else 0
        return (self.vocabulary + positions) * self.hidden

    @property
    def output_parameters(self) -> int:
        """Parameters of the last norm, and of the output layer if it is not tied to the embedding."""
        return self.norm_parameters + (0 if self.tied else self.vocabulary * self.hidden)

    @property
    def unit_parameters(self) -> list[int]:
        """Parameters of each unit that ZeRO-3 unshards: the embedding, each layer, the output."""
        return [self.embedding_parameters, *[self.layer_parameters] * self.layers, self.output_parameters]

    @property
    def parameters(self) -> int:
        return sum(self.unit_parameters)


def gpt(name: str, layers: int, hidden: int, heads: int, context: int) -> ModelShape:
    """Return the shape of a GPT model: an MLP of width 4h, and GPT-2's vocabulary, which GPT-3 kept."""
    return ModelShape(name, layers, hidden, heads, heads, 4 * hidden, vocabulary=50257, context=context)


def llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, context: int
) -> ModelShape:
    """Return the shape of a Llama model."""
    family = {"gated": True, "tied": False, "biases": False, "learned_positions": False}
    return ModelShape(name, layers, hidden, heads, kv_heads, ffn, vocabulary, context, **family)


SHAPES = {
    shape.name: shape
    for shape in (
        gpt("GPT-2 124M", 12, 768, 12, context=1024),
        gpt("GPT-2 355M", 24, 1024, 16, context=1024),
        gpt("GPT-2 774M", 36, 1280, 20, context=1024),
        gpt("GPT-2 1.5B", 48, 1600, 25, context=1024),
        gpt("GPT-3 175B", 96, 12288, 96, context=2048),
        llama("Llama-2 7B", 32, 4096, 32, 32, 11008, vocabulary=32000, context=4096),
        llama("Llama-2 13B", 40, 5120, 40, 40, 13824, vocabulary=32000, context=4096),
        llama("Llama-2 70B", 80, 8192, 64, 8, 28672, vocabulary=32000, context=4096),
        llama("Llama-3 8B", 32, 4096, 32, 8, 14336, vocabulary=128256, context=8192),
        llama("Llama-3 70B", 80, 8192, 64, 8, 28672, vocabulary=128256, context=8192),
        llama("Llama-3 405B", 126, 16384, 128, 8, 53248, vocabulary=128256, context=8192),
    )
}

# Models with experts. They are no choices of tables and widgets about models that every token passes through.
MIXTRAL = replace(llama("Mixtral 8x7B", 32, 4096, 32, 8, 14336, vocabulary=32000, context=32768), experts=8, top_k=2)
