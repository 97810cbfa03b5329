"""The reference: HuggingFace `tokenizers` for a directory, in tokenizer.json form or in OPT's
vocab.json + merges.txt form.  Needs the package tokenizers."""

import json
import pathlib

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors


def load(directory):
    directory = pathlib.Path(directory)
    if (directory / "tokenizer.json").exists():
        return Tokenizer.from_file(str(directory / "tokenizer.json"))
    config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    bpe = models.BPE.from_file(str(directory / "vocab.json"), str(directory / "merges.txt"))
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=config["add_prefix_space"])
    tokenizer.decoder = decoders.ByteLevel()
    named = dict.fromkeys(str(config[k]) for k in ("bos_token", "eos_token", "unk_token", "pad_token"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in named])
    if config["add_bos_token"]:
        bos = config["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    return tokenizer
