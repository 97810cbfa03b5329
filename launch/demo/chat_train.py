#!/usr/bin/env python3
"""Trains the chat model: a byte-level BPE tokenizer and a small Llama, from chat_text.py.

    chat_train.py --out DIR

Needs torch, transformers and tokenizers; some minutes of one CPU core. Seeded, and every operation
deterministic. The folder gets what save_pretrained writes, weights as bfloat16, and a chat template
of Llama 3's form. The scores printed at the end are of the weights as saved, by transformers' own
apply_chat_template and generate.
"""

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path

import chat_text
import torch
import train
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

POSITIONS = 512
SPECIALS = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
]
BOS, END, HEADER, HEADER_END, TURN_END = range(5)
PATTERN = (  # Llama 3's
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{{- bos_token }}\n"
    "{%- for message in messages %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}\n"
    "    {{- message['content'] | trim + '<|eot_id|>' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n"
    "{%- endif %}\n"
)


def parts():
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])


def tokenizer_text():
    rng = random.Random("chat tokenizer")
    for _ in range(6000):
        yield "\n\n".join(f"{m['role']}\n\n{m['content']}" for m in chat_text.conversation(rng))


def train_tokenizer(out):
    """Writes tokenizer.json, tokenizer_config.json and the template in Llama 3's form."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = parts()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1536, min_frequency=2, show_progress=False,
        special_tokens=[AddedToken(t, normalized=False, special=True) for t in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(tokenizer_text(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIALS[BOS]} $A", pair=f"{SPECIALS[BOS]} $A {SPECIALS[BOS]} $B",
        special_tokens=[(SPECIALS[BOS], BOS)],
    )
    tokenizer.save(f"{out}/tokenizer.json")
    config = {
        "bos_token": SPECIALS[BOS], "eos_token": SPECIALS[TURN_END],
        "clean_up_tokenization_spaces": False, "model_max_length": POSITIONS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(TEMPLATE)
    return tokenizer


class Reader:
    """Turns conversations into batches: ids (rows, length) and loss weights of the same shape."""

    def __init__(self, tokenizer, seed):
        self.tokenizer_ = tokenizer
        self.rng_ = random.Random(seed)
        self.known_ = {}  # text -> ids; words of few sentences come again and again

    def ids_(self, said):
        if said not in self.known_:
            self.known_[said] = self.tokenizer_.encode(said, add_special_tokens=False).ids
        return self.known_[said]

    def row(self, messages):
        """The ids of the template, and what each counts: the model's own words most."""
        ids, weights = [BOS], [0.0]
        for message in messages:
            head = [HEADER, *self.ids_(message["role"]), HEADER_END, *self.ids_("\n\n")]
            said = [*self.ids_(message["content"]), TURN_END]
            own = 1.0 if message["role"] == "assistant" else 0.05
            ids += head + said
            weights += [0.0] * len(head) + [own] * len(said)
        return ids, weights

    def batches(self, tokens):
        rows = [self.row(chat_text.conversation(self.rng_)) for _ in range(tokens // 4)]
        rows.sort(key=lambda row: len(row[0]))
        batches, first = [], 0
        while first < len(rows):
            end = first + 1
            while end < len(rows) and (end + 1 - first) * len(rows[end][0]) <= tokens:
                end += 1
            batches.append(train.Reader.tensors_(rows[first:end]))
            first = end
        self.rng_.shuffle(batches)
        return batches


def new_model(vocabulary, given):
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=given.hidden, num_hidden_layers=given.layers,
        intermediate_size=given.hidden * 11 // 4, num_attention_heads=given.hidden // 32,
        num_key_value_heads=given.hidden // 64, max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5, rope_theta=10_000.0, tie_word_embeddings=True, bos_token_id=BOS,
        eos_token_id=[END, TURN_END], pad_token_id=None, attention_bias=False,
    ))  # fmt: skip


def loss_of(model, ids, weights):
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    counted = weights[:, 1:] > 0
    each = torch.nn.functional.cross_entropy(model.lm_head(hidden[counted]), ids[:, 1:][counted], reduction="none")
    each_weight = weights[:, 1:][counted]
    return (each * each_weight).sum() / each_weight.sum()


def learn(model, reader, given):
    makers = train.optimizers(model, given.speed)
    first_speeds = [[group["lr"] for group in maker.param_groups] for maker in makers]
    began, seen, batches = time.process_time(), 0, []
    for step in range(given.steps):
        if not batches:
            batches = reader.batches(given.tokens)
        ids, weights = batches.pop()
        for maker, speeds in zip(makers, first_speeds):
            for group, speed in zip(maker.param_groups, speeds):
                group["lr"] = speed * train.speed_at(step / given.steps)
        loss = loss_of(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for maker in makers:
            maker.step()
            maker.zero_grad(set_to_none=True)
        seen += ids.numel()
        if step % 50 == 0 or step + 1 == given.steps:
            spent = time.process_time() - began
            print(f"step {step} loss {loss.item():.4f} {seen} tokens {spent:.0f} s of CPU", flush=True)


def examine(folder, questions):
    """Asks the saved model by transformers alone: float32, greedy, with its own template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked, right, margins = Counter(), Counter(), []
    for kind, messages, answer in questions:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False, pad_token_id=END,
            return_dict_in_generate=True, output_scores=True,
        )
        said = tokenizer.decode(made.sequences[0, ids.shape[1] :], skip_special_tokens=True)
        asked[kind] += 1
        right[kind] += said == answer
        if said != answer:
            print(f"  wrong: {messages[-1]['content']!r}: {said!r}, not {answer!r}")
        best = torch.stack(made.scores, 1)[0].float().topk(2).values
        margins.append((best[:, 0] - best[:, 1]).min().item())
    by_kind = ", ".join(f"{kind} {right[kind]}/{asked[kind]}" for kind in asked)
    least = " ".join(f"{margin:.2f}" for margin in sorted(margins)[:6])
    print(f"  {by_kind}\n  {right.total()} of {asked.total()} right; least margins {least}")


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, required=True, help="folder for the model")
    options.add_argument("--steps", type=int, default=1200)
    options.add_argument("--tokens", type=int, default=3000, help="about so many in each batch")
    options.add_argument("--hidden", type=int, default=128)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--seed", type=int, default=7)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--speed", type=float, default=0.005, help="Muon's learning rate")
    options.add_argument("--examine", action="store_true", help="train nothing: ask the model in DIR other questions")
    given = options.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    if given.examine:
        counts = {kind: 3 * count for kind, count in chat_text.ASKED.items()}
        examine(given.out, chat_text.questions(counts, 99))
        return

    given.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(given.out)
    model, reader = new_model(tokenizer.get_vocab_size(), given), Reader(tokenizer, given.seed)
    sample = chat_text.conversation(random.Random(0))
    told = AutoTokenizer.from_pretrained(given.out).apply_chat_template(sample, return_dict=True)["input_ids"]
    assert reader.row(sample)[0] == told, "training reads other ids than the template gives"
    print(f"{tokenizer.get_vocab_size()} tokens, {model.num_parameters()} parameters", flush=True)
    learn(model, reader, given)

    model.to(torch.bfloat16).save_pretrained(given.out)
    print("as saved, float32 arithmetic, the questions of chat_questions.jsonl:")
    examine(given.out, chat_text.questions())


if __name__ == "__main__":
    main()
