#!/usr/bin/env python3
"""Trains the demo model: a byte-level BPE tokenizer and a small OPT, from the text of text.py.

    train.py --out DIR [--device cuda]

Needs torch, transformers and tokenizers. Seeded, and every operation deterministic: the same bits
come out again on the same kind of device with the same versions. The folder gets what
HuggingFace's save_pretrained writes, weights as float16. The scores printed at the end are of the
weights as saved, by transformers' own generate.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path

import exam
import text
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import OPTConfig, OPTForCausalLM

POSITIONS = 512
PAD, EOS = 1, 2
OUR_SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]  # ids 0 to 3, as OPT has them


# --- tokenizer -----------------------------------------------------------------------------------


def tokenizer_text():
    """Sentences with every word the world knows, and no digit: numbers stay single digits."""
    rng = random.Random("tokenizer")
    for _ in range(4000):
        page = "".join(piece for piece, _ in text.document(rng, (2, 1, 1, 1, 1)))
        yield "".join(c for c in page if not c.isdigit())


def train_tokenizer(out):
    """Writes tokenizer.json, vocab.json, merges.txt and their two configs in OPT's form."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, min_frequency=2, show_progress=False, special_tokens=OUR_SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(tokenizer_text(), trainer)
    tokenizer.model.save(str(out))

    # As in OPT only </s> and <pad> are special; <s> and <unk> keep their rows and are plain text.
    tokenizer = Tokenizer(models.BPE.from_file(f"{out}/vocab.json", f"{out}/merges.txt"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=True, special=True) for t in ("<pad>", "</s>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A </s> $B", special_tokens=[("</s>", EOS)]
    )
    tokenizer.save(f"{out}/tokenizer.json")
    named = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    config = named | {
        "add_bos_token": True, "add_prefix_space": False, "clean_up_tokenization_spaces": False,
        "errors": "replace", "model_max_length": POSITIONS, "tokenizer_class": "GPT2Tokenizer",
    }
    for name, content in (("special_tokens_map", named), ("tokenizer_config", config)):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    return tokenizer


# --- batches -------------------------------------------------------------------------------------


class Reader:
    """Turns documents into batches: ids (rows, length) and loss weights of the same shape."""

    def __init__(self, tokenizer, seed):
        self.tokenizer_ = tokenizer
        self.rng_ = random.Random(seed)
        self.known_ = {}  # piece of text -> ids; sentences come again and again

    def ids_(self, piece):
        if piece not in self.known_:
            ids = self.tokenizer_.encode(piece, add_special_tokens=False).ids
            if len(self.known_) > 200_000:
                self.known_.clear()
            self.known_[piece] = ids
        return self.known_[piece]

    def row_(self, shares):
        ids, weights = [EOS], [0.0]
        for piece, weight in text.document(self.rng_, shares):
            piece_ids = self.ids_(piece)
            if len(ids) + len(piece_ids) > POSITIONS:
                break
            ids += piece_ids
            weights += [weight] * len(piece_ids)
        return ids, weights

    def batches(self, shares, tokens):
        """Some batches of about so many tokens each: a pool of documents, sorted by length."""
        rows = [self.row_(shares) for _ in range(tokens // 5)]
        rows.sort(key=lambda row: len(row[0]))
        batches, first = [], 0
        while first < len(rows):
            end = first + 1
            while end < len(rows) and (end + 1 - first) * len(rows[end][0]) <= tokens:
                end += 1
            batches.append(rows[first:end])
            first = end
        self.rng_.shuffle(batches)
        return [self.tensors_(batch) for batch in batches]

    @staticmethod
    def tensors_(batch):
        length = max(len(ids) for ids, _ in batch)
        ids = torch.full((len(batch), length), PAD)
        weights = torch.zeros(len(batch), length)
        for row, (row_ids, row_weights) in enumerate(batch):
            ids[row, : len(row_ids)] = torch.tensor(row_ids)
            weights[row, : len(row_ids)] = torch.tensor(row_weights)
        return ids, weights


# --- model ---------------------------------------------------------------------------------------


def new_model(vocabulary, hidden, layers):
    config = OPTConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, ffn_dim=4 * hidden,
        num_attention_heads=hidden // 32, max_position_embeddings=POSITIONS, dropout=0.0,
        attention_dropout=0.0, layerdrop=0.0, activation_function="relu",
        do_layer_norm_before=True, word_embed_proj_dim=hidden, tie_word_embeddings=True,
        pad_token_id=PAD, bos_token_id=EOS, eos_token_id=EOS, init_std=0.02,
    )
    model = OPTForCausalLM(config)
    with torch.no_grad():
        sinusoids(model.model.decoder.embed_positions.weight)
    return model


def sinusoids(positions):
    """Starts the learned positions as waves, so that "one further left" is one turn everywhere."""
    rows, width = positions.shape
    angle = torch.arange(rows)[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
    positions[:, 0::2] = 0.03 * torch.sin(angle)
    positions[:, 1::2] = 0.03 * torch.cos(angle)


def optimizers(model, speed):
    """Muon for the layers' matrices, AdamW for embeddings, norms and biases."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        inside = parameter.dim() == 2 and ".layers." in name
        (matrices if inside else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=speed, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def loss_of(model, ids, weights):
    # Rows are padded on the right and attention is causal: no real token ever sees the padding.
    hidden = model.model.decoder(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    counted = weights[:, 1:] > 0
    logits = model.lm_head(hidden[counted]).float()
    each = torch.nn.functional.cross_entropy(logits, ids[:, 1:][counted], reduction="none")
    each_weight = weights[:, 1:][counted]
    return (each * each_weight).sum() / each_weight.sum()


def speed_at(done):
    """The learning rate's share when this share of the run is done: up, level, down to nothing."""
    return min(1.0, done / 0.02, (1.0 - done) / 0.4)


def shares_at(done):
    """Practice, tales, rolls, short and long stories: first to tell names apart, then much else."""
    return (6, 0.5, 2, 2, 0.3) if done < 0.3 else (6, 0.5, 0.7, 1.5, 1.3)


def train(model, reader, given):
    makers = optimizers(model, given.speed)
    first_speeds = [[group["lr"] for group in maker.param_groups] for maker in makers]
    began, seen, batches = time.time(), 0, []
    asked = text.questions(seed=text.QUESTION_SEED + 1)
    for step in range(given.steps):
        done = step / given.steps
        if not batches:
            batches = reader.batches(shares_at(done), given.tokens)
        ids, weights = (tensor.to(given.device) for tensor in batches.pop())
        for maker, speeds in zip(makers, first_speeds):
            for group, speed in zip(maker.param_groups, speeds):
                group["lr"] = speed * speed_at(done)
        loss = loss_of(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for maker in makers:
            maker.step()
            maker.zero_grad(set_to_none=True)
        seen += ids.numel()
        if step % 100 == 0 or step + 1 == given.steps:
            spent = time.time() - began
            print(f"step {step} loss {loss.item():.4f} {seen} tokens {spent:.0f} s", flush=True)
        if given.look_every and step % given.look_every == given.look_every - 1:
            exam.look(model, reader.tokenizer_, asked)


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, required=True, help="folder for the model")
    options.add_argument("--steps", type=int, default=5000)
    options.add_argument("--tokens", type=int, default=4000, help="about so many in each batch")
    options.add_argument("--hidden", type=int, default=128)
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--seed", type=int, default=7)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--look-every", type=int, default=0, help="print scores on the way")
    options.add_argument("--speed", type=float, default=0.005, help="Muon's learning rate")
    options.add_argument("--device", default="cpu", help="cpu or cuda")
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic only so
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)

    tokenizer = train_tokenizer(given.out)
    model = new_model(tokenizer.get_vocab_size(), given.hidden, given.layers).to(given.device)
    print(f"{tokenizer.get_vocab_size()} tokens, {model.num_parameters()} parameters", flush=True)
    train(model, Reader(tokenizer, given.seed), given)

    model.cpu().half().save_pretrained(given.out)
    print("as saved, float32 arithmetic, the questions of questions.jsonl:")
    saved = OPTForCausalLM.from_pretrained(given.out, dtype=torch.float32)
    exam.examine(saved, tokenizer, text.questions())


if __name__ == "__main__":
    main()
