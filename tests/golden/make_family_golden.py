#!/usr/bin/env python3
"""Makes tests/golden/models/<family>_*: tiny checkpoints of Llama, Mistral, Qwen and GPT-2, and what transformers makes of them.

    python3 tests/golden/make_family_golden.py [NAME ...]     (needs torch and transformers)

As make_model_golden.py does for OPT: random weights, fitted for a moment to random continuations, written, read back, and run in
float32 arithmetic on the stored weights. Tokens are generated with transformers' cache, one by one behind a prompt that is read at
once, because rotary positions of some kinds depend on that. README.md says what golden.json holds. The script refuses to write a
model whose logits would stand the test without attention, without its window, or with plain rotary positions.
"""

import copy
import importlib
import json
import math
import pathlib
import shutil
import sys

import torch
from make_model_golden import UNIT, best, write_golden
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

HERE = pathlib.Path(__file__).resolve().parent / "models"
PROMPT_LENGTHS = {1: 10, 2: 8, 17: 8, 33: 8, 100: 8, 600: 8}  # and new tokens
POSITIONS = 640
TOP_FIRST, TOP_LATER = 8, 4
FIRST_TOKEN = 3

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 10.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "factor": 10.0}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.2],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0, 9.0, 10.0],
}


def rotary(heads, groups, head_dim=16, **more):
    """A small model of Llama's layout; `groups`: query heads that share a key."""
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 61}
    return sizes | {"num_attention_heads": heads, "num_key_value_heads": heads // groups, "head_dim": head_dim} | more


def gpt2(heads, width, **more):
    return {"n_embd": width, "n_head": heads, "n_layer": 2, "n_positions": POSITIONS, "vocab_size": 61} | more


# family, stored type, config; what the written files look like: "sharded", "no_prefix", "old_rope" (fields as before version 5)
MODELS = {
    "llama_grouped2": ("llama", "float16", rotary(4, 2, eos_token_id=[2, 1]), ()),
    "llama_linear": ("llama", "float32", rotary(2, 1, 12, tie_word_embeddings=True, rope={"rope_type": "linear", "factor": 4.0}), ("old_rope",)),
    "llama_3": ("llama", "bfloat16", rotary(8, 8, rope=LLAMA3, theta=500000.0), ("old_rope",)),
    "llama_yarn_biases": ("llama", "float16", rotary(2, 2, 20, rope=YARN, attention_bias=True, mlp_bias=True), ("sharded",)),
    "llama_dynamic": ("llama", "float16", rotary(2, 2, rope=DYNAMIC, max_position_embeddings=64), ()),
    "llama_longrope": ("llama", "float32", rotary(2, 1, rope=LONGROPE), ()),
    "mistral_window": ("mistral", "float16", rotary(4, 2, sliding_window=24), ()),
    "mistral_no_window": ("mistral", "bfloat16", rotary(2, 1, 24, sliding_window=None), ("no_prefix",)),
    "mistral_grouped8": ("mistral", "float32", rotary(8, 8, 8, sliding_window=50, hidden_act="gelu_pytorch_tanh"), ("sharded",)),
    "mistral_yarn_tied": ("mistral", "float16", rotary(2, 1, rope=YARN, sliding_window=40, tie_word_embeddings=True), ("old_rope",)),
    "qwen2_windows_from_1": (
        "qwen2", "float16", rotary(4, 2, 8, use_sliding_window=True, sliding_window=20, max_window_layers=1), ()),
    "qwen2_tied": ("qwen2", "float16", rotary(2, 2, tie_word_embeddings=True), ("old_rope",)),
    "qwen2_yarn": ("qwen2", "float32", rotary(2, 1, 16, rope=YARN), ()),
    "qwen2_layer_types": (
        "qwen2", "bfloat16",
        rotary(4, 1, 8, use_sliding_window=True, sliding_window=33, layer_types=["sliding_attention", "full_attention"]), ("sharded",)),
    "qwen3_grouped2": ("qwen3", "float16", rotary(4, 2, 12), ()),
    "qwen3_biases": ("qwen3", "float32", rotary(2, 1, 10, attention_bias=True), ("no_prefix",)),
    "qwen3_window": ("qwen3", "bfloat16", rotary(2, 2, use_sliding_window=True, sliding_window=24, max_window_layers=0), ()),
    "qwen3_tied": ("qwen3", "float16", rotary(8, 8, 8, tie_word_embeddings=True, rope=LLAMA3), ("old_rope",)),
    "gpt2_odd_heads": ("gpt2", "float32", gpt2(3, 21), ()),
    "gpt2_inner": ("gpt2", "float16", gpt2(2, 32, n_inner=40), ("sharded",)),
    "gpt2_no_prefix": ("gpt2", "bfloat16", gpt2(2, 32, n_inner=64), ("no_prefix",)),
    "gpt2_untied": ("gpt2", "float16", gpt2(4, 32, n_inner=48, activation_function="relu", tie_word_embeddings=False), ()),
}  # fmt: skip


def config_of(family, fields):
    fields = dict(fields)
    rope, theta = fields.pop("rope", None), fields.pop("theta", 10000.0)
    if family != "gpt2":
        fields = {"max_position_embeddings": POSITIONS} | fields
        fields["rope_parameters"] = {"rope_theta": theta, **(rope or {"rope_type": "default"})}
    return AutoConfig.for_model(family, **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | fields)


def fresh(config, dtype=torch.float32):
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)


def random_weights(model, generator):
    conv1d = model.config.model_type == "gpt2"
    for name, weight in model.named_parameters():
        values = torch.randn(weight.shape, generator=generator)
        if "norm" in name or ".ln_" in name:
            weight.data = 0.1 * values if name.endswith("bias") else 1 + 0.2 * values
        elif "embed" in name or "wte" in name or "wpe" in name:
            weight.data = 0.5 * values
        elif name.endswith("bias"):
            weight.data = 0.1 * values
        else:
            gain = 1.5 if any(part in name for part in ("q_proj", "k_proj", "c_attn")) else 1.0
            inputs = weight.shape[0] if conv1d and "lm_head" not in name else weight.shape[1]
            weight.data = gain * values / math.sqrt(inputs)


def cases_of(vocab, generator):
    """Prompts, and the continuations a model is fitted to; no token ends a sequence."""
    return [
        (torch.randint(FIRST_TOKEN, vocab, (length,), generator=generator).tolist(),
         torch.randint(FIRST_TOKEN, vocab, (new,), generator=generator).tolist())
        for length, new in PROMPT_LENGTHS.items()
    ]  # fmt: skip


def forget_lengths(model):
    """`dynamic` positions remember the longest sequence that a module has seen; each request here is seen alone."""
    embedding = getattr(model.base_model, "rotary_emb", None)
    if embedding is not None and "dynamic" in embedding.rope_type:
        embedding.inv_freq = embedding.original_inv_freq.clone()
        embedding.max_seq_len_cached = embedding.original_max_seq_len


def logits_of(model, tokens):
    forget_lengths(model)
    return model(input_ids=torch.tensor([tokens])).logits[0]


def fit(model, cases, steps, learning_rate=3e-3):
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for _ in range(steps):
        optimizer.zero_grad()
        for prompt, continuation in cases:
            logits = logits_of(model, prompt + continuation[:-1])[len(prompt) - 1 :]
            torch.nn.functional.cross_entropy(logits, torch.tensor(continuation)).backward()
        optimizer.step()


@torch.no_grad()
def answer(model, prompt, count, given=None):
    """Greedy tokens (or those given) behind a prompt, with the cache; and the logits at each position."""
    forget_lengths(model)
    out = model(input_ids=torch.tensor([prompt]), use_cache=True)
    tokens, logits = [], [out.logits[0]]
    for i in range(count):
        tokens.append(given[i] if given else int(logits[-1][-1].argmax()))
        position = torch.tensor([[len(prompt) + i]])
        out = model(input_ids=torch.tensor([[tokens[-1]]]), past_key_values=out.past_key_values, position_ids=position, use_cache=True)
        logits.append(out.logits[0])
    return tokens, torch.cat(logits)


class StoredRoundings:
    """Makes a float32 model keep what poise keeps in `dtype`: attention inputs, keys before and after they are rotated, values."""

    def __init__(self, model, dtype):
        self.hooks, self.module = [], importlib.import_module(type(model).__module__)
        rounded = lambda x: x.to(dtype).float()  # noqa: E731
        for name, module in model.named_modules():
            if name.endswith(("self_attn", ".attn")):
                key = "hidden_states"
                self.hooks.append(
                    module.register_forward_pre_hook(
                        lambda _, args, kwargs: (tuple(map(rounded, args[:1])) + args[1:], kwargs | ({key: rounded(kwargs[key])} if key in kwargs else {})),
                        with_kwargs=True,
                    )
                )
            if name.endswith(("k_proj", "v_proj")):
                self.hooks.append(module.register_forward_hook(lambda _, __, out: rounded(out)))
            if name.endswith("c_attn"):
                self.hooks.append(module.register_forward_hook(lambda m, __, out: torch.cat([out[..., : m.nf // 3], rounded(out[..., m.nf // 3 :])], -1)))
        self.rotate = getattr(self.module, "apply_rotary_pos_emb", None)
        if self.rotate:
            self.module.apply_rotary_pos_emb = lambda *args, **more: (lambda q, k: (q, rounded(k)))(*self.rotate(*args, **more))

    def remove(self):
        for hook in self.hooks:
            hook.remove()
        if self.rotate:
            self.module.apply_rotary_pos_emb = self.rotate


def without_attention(model):
    ends = ("o_proj", "attn.c_proj")
    return [m.register_forward_hook(lambda _, __, out: torch.zeros_like(out)) for name, m in model.named_modules() if name.endswith(ends)]


def worst_change(model, cases, exact):
    return max((answer(model, prompt, len(tokens), tokens)[1] - logits).abs().max().item()
               for (prompt, _), (tokens, logits) in zip(cases, exact))  # fmt: skip


def other_configs(config):
    """The same model without what makes it special: each must give other logits."""
    if getattr(config, "sliding_window", None):
        other = copy.deepcopy(config)
        other.sliding_window = None
        if hasattr(other, "layer_types"):
            other.layer_types = ["full_attention"] * config.num_hidden_layers
        yield "no window", other
    rope = getattr(config, "rope_parameters", None)
    if rope and rope["rope_type"] != "default":
        other = copy.deepcopy(config)
        other.rope_parameters = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        yield "plain positions", other
    if rope:
        other = copy.deepcopy(config)
        other.rope_parameters = {"rope_type": "linear", "rope_theta": rope["rope_theta"], "factor": 1e6}
        yield "no positions", other


def golden_of(directory, name, cases):
    dtype = getattr(torch, name)
    load = lambda dtype: AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()  # noqa: E731
    model = load(torch.float32)
    exact = []  # (greedy tokens, logits at every position)
    for prompt, continuation in cases:
        tokens, logits = answer(model, prompt, len(continuation))
        if any(token < FIRST_TOKEN for token in tokens):
            return None, "a greedy continuation ends early"
        exact.append((tokens, logits))

    config = model.config
    largest = max(logits.abs().max().item() for _, logits in exact)
    depth = config.num_hidden_layers * 4  # roundings to the stored type on the way
    roundings = StoredRoundings(model, dtype)
    rounded = worst_change(model, cases, exact)
    roundings.remove()
    expected = 0 if name == "float32" else 2 * UNIT[name] * math.sqrt(depth) * largest
    arithmetic = worst_change(load(torch.float64), cases, exact)
    tolerance = max(largest * 2**-24 * 64, 3 * arithmetic) + max(expected, 3 * rounded)
    hooks = without_attention(model)
    blind = worst_change(model, cases, exact)
    for hook in hooks:
        hook.remove()
    others = {}
    for what, other in other_configs(config):
        changed = fresh(other).eval()
        changed.load_state_dict(model.state_dict())
        others[what] = worst_change(changed, cases, exact)
    margin = math.inf
    for (prompt, _), (tokens, logits) in zip(cases, exact):
        top = torch.topk(logits[len(prompt) - 1 : -1], 2).values
        margin = min(margin, (top[:, 0] - top[:, 1]).min().item())
    distinct = min(len(set(tokens)) / len(tokens) for tokens, _ in exact)
    print(
        f"  logits to {largest:.1f}, tolerance {tolerance:.2g}, float32 itself {arithmetic:.2g}, stored roundings {rounded:.2g}, "
        f"margin {margin:.3g}, without attention {blind:.3g}, {others}, distinct tokens {distinct:.2f}"
    )
    if margin < 10 * tolerance:
        return None, "the margin is under ten tolerances"
    if rounded + arithmetic > tolerance / 2 or min([blind, *others.values()]) < 10 * tolerance or distinct < 0.5:
        return None, "the tolerance would not tell right from wrong"
    entries = []
    for (prompt, _), (tokens, logits) in zip(cases, exact):
        scored = torch.log_softmax(logits[: len(prompt) - 1], dim=-1)
        chosen = scored[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:], dtype=torch.long)]
        steps = []
        for i in range(len(tokens)):
            row = logits[len(prompt) - 1 + i]
            steps.append({**best(row, TOP_FIRST if i == 0 else TOP_LATER), "logsumexp": float(f"{torch.logsumexp(row, 0).item():.7g}")})
        prompt_logprobs = [float(f"{v:.7g}") for v in chosen.tolist()]
        entries.append({"prompt": prompt, "tokens": tokens, "prompt_logprobs": prompt_logprobs, "steps": steps})
    golden = {"model": directory.name, "dtype": name, "tolerance": float(f"{tolerance:.3g}"), "margin": float(f"{margin:.4g}"),
              "stored_roundings": float(f"{rounded:.3g}"), "cases": entries}  # fmt: skip
    return golden, None


def write_checkpoint(model, dtype, ways, directory):
    shutil.rmtree(directory, ignore_errors=True)
    written = copy.deepcopy(model).to(getattr(torch, dtype))
    written.save_pretrained(directory, **({"max_shard_size": "12KB"} if "sharded" in ways else {}))
    if "sharded" in ways:
        assert (directory / "model.safetensors.index.json").exists()
    if "no_prefix" in ways:
        file, prefix = directory / "model.safetensors", model.base_model_prefix + "."
        save_file({name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    if "old_rope" in ways:
        file = directory / "config.json"
        config = json.loads(file.read_text())
        rope = config.pop("rope_parameters")
        config["rope_theta"], kind = rope.pop("rope_theta"), rope.pop("rope_type")
        config["rope_scaling"] = {"type" if kind == "linear" else "rope_type": kind, **rope} if kind != "default" else None
        config["torch_dtype"] = config.pop("dtype")
        file.write_text(json.dumps(config, indent=2) + "\n")


def make(name):
    print(name)
    family, dtype, fields, ways = MODELS[name]
    directory = HERE / name
    for attempt in range(6):
        generator = torch.Generator().manual_seed(1000 * attempt + sum(map(ord, name)))
        torch.manual_seed(attempt)
        model = fresh(config_of(family, fields)).train()
        random_weights(model, generator)
        model.tie_weights()
        cases = cases_of(model.config.vocab_size, generator)
        for _ in range(10):
            fit(model, cases, 40)
            write_checkpoint(model, dtype, ways, directory)
            golden, trouble = golden_of(directory, dtype, cases)
            if golden:
                write_golden(directory, golden)
                return
        print(f"  another seed: {trouble}")
    sys.exit(f"{name}: {trouble}")


def main():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        make(name)


if __name__ == "__main__":
    main()
