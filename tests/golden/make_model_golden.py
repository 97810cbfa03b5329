#!/usr/bin/env python3
"""Makes tests/golden/models: tiny OPT checkpoints and what HuggingFace transformers makes of them.

    python3 tests/golden/make_model_golden.py [NAME ...]     (needs torch and transformers)

Each model starts from random weights, larger than the usual initialisation, and is then fitted for
a moment to random continuations of its own prompts, so that its greedy tokens are no repetition and
the best logit stands clear of the second. What is written is then read back from the checkpoint, in
float32 arithmetic on the stored weights; README.md says what golden.json holds and where its
tolerance comes from. The script refuses to write a model that could not fail a wrong program.
"""

import json
import math
import pathlib
import shutil
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import OPTConfig, OPTForCausalLM
from transformers.utils import logging

HERE = pathlib.Path(__file__).resolve().parent / "models"
PROMPT_LENGTHS = [1, 2, 15, 16, 17, 33, 100, 300]
NEW_TOKENS = {1: 24, 2: 20, 15: 20, 16: 20, 17: 16, 33: 16, 100: 12, 300: 16}
POSITIONS = 320
EOS = 2
TOP_FIRST, TOP_LATER = 32, 8  # logits kept: after the prompt, after each new token
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # half an ulp of 1

MODELS = {
    "pre_norm_head32": dict(dtype="float32", hidden=64, heads=2, layers=2, ffn=96, vocab=211),
    "post_norm_projected": dict(dtype="float16", hidden=64, heads=2, layers=3, ffn=96, vocab=257,
                                word_embed_proj_dim=32, do_layer_norm_before=False),
    "head64": dict(dtype="float16", hidden=128, heads=2, layers=2, ffn=16, vocab=131),
    "head80": dict(dtype="bfloat16", hidden=80, heads=1, layers=2, ffn=112, vocab=199),
    "head128": dict(dtype="float16", hidden=128, heads=1, layers=2, ffn=24, vocab=97),
    "odd_vocabulary": dict(dtype="bfloat16", hidden=64, heads=2, layers=2, ffn=96, vocab=509),
    "no_bias": dict(dtype="float16", hidden=64, heads=2, layers=2, ffn=100, vocab=211,
                    enable_bias=False),
    "no_affine": dict(dtype="float16", hidden=64, heads=4, layers=2, ffn=96, vocab=151,
                      layer_norm_elementwise_affine=False, enable_bias=False),
    "gelu_untied": dict(dtype="float16", hidden=64, heads=2, layers=2, ffn=128, vocab=127,
                        activation_function="gelu", tie_word_embeddings=False),
    "gelu_tanh": dict(dtype="float32", hidden=48, heads=3, layers=2, ffn=80, vocab=113,
                      activation_function="gelu_new"),
    "no_prefix": dict(dtype="float16", hidden=64, heads=2, layers=2, ffn=96, vocab=211),
    "sharded": dict(dtype="bfloat16", hidden=64, heads=2, layers=3, ffn=64, vocab=173),
}


def config_of(spec):
    extra = {k: v for k, v in spec.items()
             if k not in ("dtype", "hidden", "heads", "layers", "ffn", "vocab")}
    extra.setdefault("word_embed_proj_dim", spec["hidden"])
    return OPTConfig(vocab_size=spec["vocab"], hidden_size=spec["hidden"], ffn_dim=spec["ffn"],
                     num_hidden_layers=spec["layers"], num_attention_heads=spec["heads"],
                     max_position_embeddings=POSITIONS, dropout=0.0, attention_dropout=0.0,
                     bos_token_id=EOS, eos_token_id=EOS, pad_token_id=1,
                     attn_implementation="eager", **extra)


def random_weights(model, generator):
    for name, weight in model.named_parameters():
        values = torch.randn(weight.shape, generator=generator)
        if "layer_norm" in name:
            weight.data = 1 + 0.2 * values if name.endswith("weight") else 0.1 * values
        elif "embed" in name:
            weight.data = 0.5 * values
        elif name.endswith("bias"):
            weight.data = 0.1 * values
        else:  # (outputs, inputs)
            gain = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
            weight.data = gain * values / math.sqrt(weight.shape[1])


def cases_of(vocab, generator):
    """Prompts, and the continuations a model is fitted to; no token ends a sequence."""
    cases = []
    for length in PROMPT_LENGTHS:
        prompt = torch.randint(3, vocab, (length,), generator=generator).tolist()
        if length > 1:
            prompt[0], prompt[-1] = EOS, vocab - 1
        cases.append((prompt, torch.randint(3, vocab, (NEW_TOKENS[length],),
                                            generator=generator).tolist()))
    return cases


def logits_of(model, tokens):
    return model(input_ids=torch.tensor([tokens])).logits[0]


def fit(model, cases, steps, learning_rate=2e-3):
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for _ in range(steps):
        optimizer.zero_grad()
        for prompt, continuation in cases:
            logits = logits_of(model, prompt + continuation[:-1])[len(prompt) - 1:]
            torch.nn.functional.cross_entropy(logits, torch.tensor(continuation)).backward()
        optimizer.step()


def round_as_stored(model, dtype):
    """Makes a float32 model keep what poise keeps in `dtype`: attention inputs, keys, values."""
    hooks = []
    for layer in model.model.decoder.layers:
        attention = layer.self_attn
        hooks.append(attention.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "hidden_states":
                                            kwargs["hidden_states"].to(dtype).float()}),
            with_kwargs=True))
        for projection in (attention.k_proj, attention.v_proj):
            hooks.append(projection.register_forward_hook(lambda _, __, out: out.to(dtype).float()))
    return hooks


def without_attention(model):
    return [layer.self_attn.out_proj.register_forward_hook(lambda _, __, out: torch.zeros_like(out))
            for layer in model.model.decoder.layers]


@torch.no_grad()
def compare(model, cases, exact, hooks_of):
    """The largest change of any logit under some hooks."""
    hooks = hooks_of(model)
    worst = max((logits_of(model, prompt + tokens) - reference).abs().max().item()
                for (prompt, _), (tokens, reference) in zip(cases, exact))
    for hook in hooks:
        hook.remove()
    return worst


def best(logits, count):
    values, ids = torch.topk(logits, count)
    return {"ids": ids.tolist(), "logits": [float(f"{v:.7g}") for v in values.tolist()]}


@torch.no_grad()
def golden_of(directory, spec, cases):
    name = spec["dtype"]
    dtype = getattr(torch, name)
    model = OPTForCausalLM.from_pretrained(directory, dtype=torch.float32,
                                           attn_implementation="eager").eval()
    native = OPTForCausalLM.from_pretrained(directory, dtype=dtype,
                                            attn_implementation="eager").eval()
    exact = []  # (greedy tokens, logits at every position)
    for prompt, continuation in cases:
        out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)),
                             max_new_tokens=len(continuation), do_sample=False, use_cache=True)
        tokens = out[0, len(prompt):].tolist()
        if len(tokens) != len(continuation) or EOS in tokens:
            return None, "a greedy continuation ends early"
        exact.append((tokens, logits_of(model, prompt + tokens)))

    largest = max(logits.abs().max().item() for _, logits in exact)
    depth = spec["layers"] * 3  # roundings to the stored type on the way
    tolerance = largest * (2**-24 * 64 + (0 if name == "float32" else
                                          2 * UNIT[name] * math.sqrt(depth)))
    rounded = compare(model, cases, exact, lambda m: round_as_stored(m, dtype))
    blind = compare(model, cases, exact, without_attention)
    double = OPTForCausalLM.from_pretrained(directory, dtype=torch.float64,
                                            attn_implementation="eager").eval()
    arithmetic = max((logits_of(double, prompt + tokens) - logits).abs().max().item()
                     for (prompt, _), (tokens, logits) in zip(cases, exact))
    margin = math.inf
    for (prompt, _), (tokens, logits) in zip(cases, exact):
        top = torch.topk(logits[len(prompt) - 1:-1], 2).values
        margin = min(margin, (top[:, 0] - top[:, 1]).min().item())
    distinct = min(len(set(tokens)) / len(tokens) for tokens, _ in exact)
    native_error = max((logits_of(native, prompt + tokens).float() - logits).abs().max().item()
                       for (prompt, _), (tokens, logits) in zip(cases, exact))
    print(f"  logits to {largest:.1f}, tolerance {tolerance:.2g}, float32 itself {arithmetic:.2g}, "
          f"stored roundings {rounded:.2g}, HuggingFace in {name} {native_error:.2g}, margin {margin:.3g}, "
          f"without attention {blind:.3g}, distinct tokens {distinct:.2f}")
    if margin < 10 * tolerance:
        return None, "the margin is under ten tolerances"
    if rounded + arithmetic > tolerance / 2 or blind < 10 * tolerance or distinct < 0.6:
        return None, "the tolerance would not tell right from wrong"

    fixed = sorted({0, 1, EOS, spec["vocab"] // 2, spec["vocab"] - 1})
    entries = []
    for (prompt, _), (tokens, logits) in zip(cases, exact):
        own = logits_of(native, prompt + tokens).float()
        scored = torch.log_softmax(logits[:len(prompt) - 1], dim=-1)
        chosen = scored[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:], dtype=torch.long)]
        steps = []
        for i in range(len(tokens)):
            row = logits[len(prompt) - 1 + i]
            steps.append({**best(row, TOP_FIRST if i == 0 else TOP_LATER),
                          "fixed": [float(f"{v:.7g}") for v in row[fixed].tolist()],
                          "logsumexp": float(f"{torch.logsumexp(row, 0).item():.7g}")})
        entries.append({"prompt": prompt, "tokens": tokens,
                        "prompt_logprobs": [float(f"{v:.6g}") for v in chosen.tolist()],
                        "steps": steps, "native_first": best(own[len(prompt) - 1], TOP_LATER)})
    return {"model": directory.name, "dtype": name, "tolerance": float(f"{tolerance:.3g}"),
            "margin": float(f"{margin:.4g}"), "stored_roundings": float(f"{rounded:.3g}"),
            "native_error": float(f"{native_error:.3g}"), "fixed_ids": fixed,
            "cases": entries}, None


def write_checkpoint(model, spec, directory):
    shutil.rmtree(directory, ignore_errors=True)
    model = model.to(getattr(torch, spec["dtype"]))
    if directory.name == "sharded":
        model.save_pretrained(directory, max_shard_size="60KB")
        assert (directory / "model.safetensors.index.json").exists()
    else:
        model.save_pretrained(directory)
    if directory.name == "no_prefix":
        file = directory / "model.safetensors"
        save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()},
                  file, metadata={"format": "pt"})


def write_golden(directory, golden):
    text = json.dumps(golden, separators=(",", ":")).replace('{"prompt"', '\n{"prompt"')
    (directory / "golden.json").write_text(text + "\n")
    size = sum(f.stat().st_size for f in directory.glob("*.safetensors"))
    print(f"  {size} bytes of weights, {len(text)} of golden.json")


def make(name, spec):
    print(name)
    directory = HERE / name
    for attempt in range(6):
        generator = torch.Generator().manual_seed(1000 * attempt + sum(map(ord, name)))
        torch.manual_seed(attempt)
        model = OPTForCausalLM(config_of(spec)).train()
        random_weights(model, generator)
        model.tie_weights()
        cases = cases_of(spec["vocab"], generator)
        for _ in range(8):
            fit(model, cases, 40)
            write_checkpoint(OPTForCausalLM.from_pretrained(
                None, config=model.config, state_dict=model.state_dict()), spec, directory)
            golden, trouble = golden_of(directory, spec, cases)
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
        make(name, MODELS[name])


if __name__ == "__main__":
    main()
