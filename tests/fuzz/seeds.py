"""What each fuzz target starts from: the inputs of other tests, as the target takes them (tests/fuzz/NAME_fuzz.cpp says how)."""

import json
import struct
import sys
import tempfile
from pathlib import Path

import record

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
LARGEST = 8192  # bytes: small inputs are tried more often


def of(target):
    """Name to bytes, in an order that does not change."""
    # An empty input lets a target make one.
    made = {name: content for name, content in _SEEDS[target]() if len(content) <= LARGEST}
    if not made:
        raise SystemExit(f"no seeds for {target}")
    return made


def _hostile_models():
    """The directories of e2e/hostile_models.py, one after the other."""
    sys.path.insert(0, str(TESTS / "e2e"))
    arguments, sys.argv = sys.argv, sys.argv[:1]
    import hostile_models  # it looks for options of its own

    sys.argv = arguments
    wanted = ("config:", "file:", "header:", "tensors:", "index:", "sound:", "directory: generation")
    for number, case in enumerate(hostile_models.HOSTILE + hostile_models.SOUND):
        if case[0].startswith(wanted):
            with tempfile.TemporaryDirectory() as folder:
                directory = Path(folder) / "model"
                directory.mkdir()
                case[1](directory)
                yield f"hostile_{number}", directory


def _content(path):
    """Of a regular file that is not large; nothing else."""
    return path.read_bytes() if path.is_file() and path.stat().st_size <= 1 << 20 else None


def _safetensors_seed(path):
    size = path.stat().st_size
    with open(path, "rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        return struct.pack("<Q", size) + first + file.read(min(length, LARGEST))


def _safetensors():
    for name, directory in _hostile_models():
        if _content(directory / "model.safetensors") is not None:
            yield name, _safetensors_seed(directory / "model.safetensors")
    for path in sorted((TESTS / "golden" / "models").glob("*/*.safetensors")):
        yield f"{path.parent.name}_{path.name}", _safetensors_seed(path)
    tensors = {"a": ("F16", [2, 3], 12), "empty": ("F32", [0], 0), "b": ("F4", [4], 2), "c": ("BF16", [], 2)}
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    yield "small", struct.pack("<QQ", 8 + len(text) + end, len(text)) + text


def _index():
    for name, directory in _hostile_models():
        content = _content(directory / "model.safetensors.index.json")
        if content is not None:
            yield name, content
    yield "golden", (TESTS / "golden" / "models" / "sharded" / "model.safetensors.index.json").read_bytes()
    shards = {"w": "a.safetensors", "x": "a.safetensors", "y": "b.safetensors"}
    for name, weight_map in {
        "sharded": shards, "one": dict.fromkeys("wxy", "model.safetensors"), "some": {"y": "b.safetensors"},
        "outside": shards | {"w": "../a.safetensors"}, "wrong": shards | {"y": "a.safetensors"},
    }.items():  # fmt: skip
        yield name, json.dumps({"metadata": {"total_size": 3}, "weight_map": weight_map}).encode()


def _config():
    for name, directory in _hostile_models():
        content, generation = _content(directory / "config.json"), _content(directory / "generation_config.json")
        if content is not None:
            yield name, content if generation is None else content + b"\0" + generation
    for path in sorted((TESTS / "golden" / "models").glob("*/config.json")):
        generation = _content(path.with_name("generation_config.json"))
        yield path.parent.name, path.read_bytes() if generation is None else path.read_bytes() + b"\0" + generation
    for path in sorted((TESTS.parent / "bench" / "models").glob("*.json")):
        yield path.stem, path.read_bytes()


_TEXTS = ("Hello, world! it's 12345 <mask></s>", "ab abc\n\nabcabc  \t", "naïve café 東京 \U0001f642")


def _tokenizer():
    words = {"a": 0, "b": 1, "c": 2, "Ġ": 3, "1": 4, "2": 5, "Ċ": 6, "Ã": 7, "©": 8, "ab": 9, "abc": 10, "Ġa": 11}
    merges = ["a b", "ab c", "Ġ a"]
    configs = (
        {}, {"add_prefix_space": True, "add_bos_token": True, "bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>"},
        {"add_bos_token": True, "bos_token": {"content": "<s>", "lstrip": True, "rstrip": True, "single_word": True}},
    )  # fmt: skip
    special = ("", json.dumps({"bos_token": "</s>", "pad_token": "<pad>"}))
    for number, (config, text) in enumerate(zip(configs, _TEXTS)):
        files = [json.dumps(words), "#version: 0.2\n" + "\n".join(merges) + "\n", json.dumps(config), special[number % 2], text]
        yield f"vocabulary_{number}", b"v" + "\0".join(files).encode()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split = {"type": "Split", "pattern": {"Regex": r"(?i:'s|'t)| ?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+"}, "behavior": "Isolated", "invert": False}
    steps = {
        "plain": byte_level,
        "split": {"type": "Sequence", "pretokenizers": [split, byte_level | {"use_regex": False}]},
        "digits": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "removed": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}, byte_level]},
    }  # fmt: skip
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": 12, "content": "<mask>", **flags, "lstrip": True}, {"id": 13, "content": "</s>", **flags}]
    processors = (None, {"type": "RobertaProcessing", "sep": ["</s>", 13], "cls": ["</s>", 13], "add_prefix_space": False},
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
         "pair": [], "special_tokens": {"</s>": {"id": "</s>", "ids": [13], "tokens": ["</s>"]}}})  # fmt: skip
    for number, (name, step) in enumerate(steps.items()):
        document = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": step,
            "post_processor": processors[number % 3], "decoder": byte_level,
            "model": {"type": "BPE", "unk_token": "a" if number % 2 else None, "fuse_unk": number == 3, "ignore_merges": number == 2,
                      "vocab": words, "merges": [merge.split() if number % 2 else merge for merge in merges]},
        }  # fmt: skip
        yield f"json_{name}", b"j" + "\0".join([json.dumps(document), "", "", _TEXTS[number % 3]]).encode()
    for path in sorted((TESTS / "golden" / "tokenizer").glob("*/tokenizer.json")):
        yield path.parent.name, b"j" + path.read_bytes() + b"\0\0\0" + _TEXTS[2].encode()
    yield "text_level", b"j" + "\0".join([json.dumps(_text_level()), "", "", "ab \u00e9a<mask> b"]).encode()


def _text_level():
    """A small tokenizer of Llama-2's kind: Metaspace, byte fallback, a decoder of four steps."""
    words = ["<unk>", "\u2581", "a", "b", "\u2581a", "ab", *(f"<0x{byte:02X}>" for byte in (0x20, 0x61, 0xC3, 0xA9))]
    steps = [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
             {"type": "Strip", "content": " ", "start": 1, "stop": 0}]  # fmt: skip
    normalizers = [{"type": "Prepend", "prepend": "\u2581"}, {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "pre_tokenizer": None, "post_processor": None,
        "normalizer": {"type": "Sequence", "normalizers": normalizers}, "decoder": {"type": "Sequence", "decoders": steps},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "merges": ["\u2581 a", "a b"],
                  "vocab": {word: number for number, word in enumerate(words)}},
    }  # fmt: skip


def _request():
    cases = json.loads((TESTS / "e2e" / "hostile_requests.json").read_text(encoding="utf-8"))["cases"]
    for case in cases:
        text = "".join(part for part in case.get("file", []) if isinstance(part, str)).replace("@vocab@", "300")
        for number, line in enumerate(text.split("\n")):
            if line.strip():
                yield f"{case['name']}_{number}", line.encode()
    body = {"model": "poise", "prompt": "abc 12", "max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": -3, "n": 1}
    more = {"logprobs": 3, "echo": True, "stop": ["\n", "x"], "stop_token_ids": [2, 9], "ignore_eos": False, "stream": False}
    for name, content in {"text": body | more, "ids": body | {"prompt": [5, 6, 260]}, "nested": {"prompt": [[1, 2]], "max_tokens": 0, "echo": True}}.items():
        yield name, json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": content}).encode()


def _recorded(target):
    return lambda: ((path.name, path.read_bytes()) for path in sorted((HERE / "recorded").glob(f"{target}_*")))


def _order_logs():
    """Recorded ones up to the end of their first iteration, of half the length, which are tried twice as often; one whole."""
    for name, content in _recorded("order_log")():
        done = [end for _, end, message in record.records(content) if record.body_type(message) == record.ITERATION_DONE]
        yield f"{name}_first", content[: done[0]]
    yield name, content


_SEEDS = {
    "safetensors": _safetensors, "index": _index, "config": _config, "tokenizer": _tokenizer, "request": _request,
    "message": _recorded("message"), "order_log": _order_logs, "control": lambda: [("none", b"")],
}  # fmt: skip
TARGETS = tuple(_SEEDS)
