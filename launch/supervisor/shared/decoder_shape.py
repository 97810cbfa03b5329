"""What a config.json says of a decoder's matrices, for figures and estimates; the programs read it for themselves (common/families)."""

import dataclasses

from .trouble import Refusal, shown

# Every family of common/families/ has its place in one of the two (tests/e2e/house_rules.py compares): model_type, and its classes.
_GATED = {  # the MLP has three matrices; positions are rotary
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
}
_PLAIN = {  # the MLP has two matrices; positions are learned
    "opt": ("OPTForCausalLM", "OPTModel"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Model"),
}
FAMILIES = _GATED | _PLAIN


@dataclasses.dataclass(frozen=True)
class DecoderShape:
    layers: int
    hidden: int
    q_dim: int  # all query heads
    kv_dim: int  # all key heads, or all value heads
    ffn: int
    mlp_matrices: int
    vocabulary: int
    word_width: int  # of an embedding
    positions: int  # learned ones: rows of their table

    def layer_entries(self):
        """Of a layer's matrices: Q, K, V, output, MLP."""
        return self.hidden * (2 * self.q_dim + 2 * self.kv_dim + self.mlp_matrices * self.ffn)

    def head_entries(self):
        return self.vocabulary * self.word_width


def _family_of(config):
    """The model_type; where there is none, that of the class (as common/model_config.cpp has it)."""
    kind, classes = config.get("model_type"), config.get("architectures") or []
    if not kind:
        kind = next((kind for kind, known in FAMILIES.items() if any(name in classes for name in known)), None)
    if kind not in FAMILIES:
        named = f"model_type {shown(kind)}" if kind else "a config without a known model_type or architecture"
        raise Refusal(f"{named} is not supported; supported are {', '.join(FAMILIES)}")
    return kind


def decoder_shape(config):
    """Fails with KeyError or TypeError where a size is missing or no number, and refuses a family that poise does not run."""
    kind = _family_of(config)
    if kind == "gpt2":
        hidden, layers, heads = config["n_embd"], config["n_layer"], config["n_head"]
        ffn, positions = config.get("n_inner") or 4 * hidden, config["n_positions"]
    else:
        hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        gated = kind in _GATED
        ffn = config["intermediate_size"] if gated else config.get("ffn_dim", 4 * hidden)
        positions = 0 if gated else config.get("max_position_embeddings", 2048)
    head_dim = config.get("head_dim") or hidden // heads
    return DecoderShape(
        layers=layers,
        hidden=hidden,
        q_dim=heads * head_dim,
        kv_dim=(config.get("num_key_value_heads") or heads) * head_dim,
        ffn=ffn,
        mlp_matrices=3 if kind in _GATED else 2,
        vocabulary=config["vocab_size"],
        word_width=config.get("word_embed_proj_dim", hidden),
        positions=positions,
    )
