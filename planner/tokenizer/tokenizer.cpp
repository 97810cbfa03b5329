#include "planner/tokenizer/tokenizer.h"

#include <algorithm>
#include <utility>

#include "common/files/regular_file.h"
#include "common/trouble.h"
#include "planner/tokenizer/added_token_finder.h"
#include "planner/tokenizer/bpe.h"
#include "planner/tokenizer/byte_alphabet.h"
#include "planner/tokenizer/decoder.h"
#include "planner/tokenizer/description.h"
#include "planner/tokenizer/normalizer.h"
#include "planner/tokenizer/pre_tokenizer.h"
#include "planner/tokenizer/unicode.h"

namespace poise {
namespace {

constexpr const char* kRemedy =
    "fetch the model again, or give prompts as token ids with --skip-tokenizer-init";

TokenizerDescription read_description(const std::filesystem::path& directory) {
  // A broken symbolic link is there: opening it says what is wrong with it.
  auto there = [&](const char* name) {
    std::error_code error;
    const auto kind = std::filesystem::symlink_status(directory / name, error).type();
    return kind != std::filesystem::file_type::not_found &&
           kind != std::filesystem::file_type::none;
  };
  if (there("tokenizer.json")) {
    return read_tokenizer_json(directory);
  }
  const bool vocabulary = there("vocab.json");
  const bool merges = there("merges.txt");
  const std::string name = shown(directory.string(), 300);
  if (!vocabulary && !merges && there("tokenizer.model")) {
    fail(
        "{} holds tokenizer.model (sentencepiece) but not tokenizer.json, which is read; make it "
        "with "
        "`python3 -c \"from transformers import AutoTokenizer; "
        "AutoTokenizer.from_pretrained('DIR').save_pretrained('DIR')\"` (packages transformers, "
        "sentencepiece, protobuf), or give prompts as token ids with --skip-tokenizer-init",
        name);
  }
  if (!vocabulary && !merges) {
    fail("{} holds neither tokenizer.json nor vocab.json and merges.txt; {}", name, kRemedy);
  }
  if (!vocabulary || !merges) {
    fail("{} holds {} but not {}; {}", name, vocabulary ? "vocab.json" : "merges.txt",
         vocabulary ? "merges.txt" : "vocab.json", kRemedy);
  }
  return read_vocabulary_files(directory);
}

}  // namespace

struct Tokenizer::Parts {
  explicit Parts(TokenizerDescription description, std::int64_t model_rows);

  // Appends the ids of a text without added tokens that are not `normalized`. `first`: the whole text
  // begins with it.
  void encode_plain(std::string_view text, bool first, std::vector<TokenId>& ids) const;

  std::vector<AddedToken> added;
  Normalizer normalizer;
  AddedTokenFinder finder;
  PreTokenizer pre_tokenizer;
  Bpe bpe;
  std::vector<DecoderStep> decoder;
  std::vector<TokenId> before, after;
  std::optional<TokenId> bos, eos;
  std::vector<std::string> bytes;  // by id
  std::vector<bool> has, special;  // by id
};

Tokenizer::Parts::Parts(TokenizerDescription description, std::int64_t model_rows)
    : added(std::move(description.added)),
      normalizer(std::move(description.normalizer)),
      finder(added, normalizer),
      pre_tokenizer(std::move(description.pre_tokenizer)),
      bpe(description.bpe),
      decoder(std::move(description.decoder)),
      before(std::move(description.before)),
      after(std::move(description.after)) {
  const auto& vocabulary = description.bpe.vocabulary;
  check(!vocabulary.empty(), "a vocabulary is not empty");
  if (vocabulary.front().second >= model_rows) {
    fail(
        "{}: the smallest token id is {}, but the model has {} rows; these files do not belong "
        "together",
        description.source, vocabulary.front().second, model_rows);
  }
  for (const std::vector<TokenId>* around : {&before, &after}) {
    for (const TokenId id : *around) {
      if (id >= model_rows) {
        fail(
            "{}: the special token {} is put around every prompt, but the model has {} rows; these "
            "files do not belong together",
            description.source, id, model_rows);
      }
    }
  }
  TokenId largest = vocabulary.back().second;
  for (const AddedToken& token : added) {
    largest = std::max(largest, token.id);
  }
  bytes.resize(static_cast<std::size_t>(largest) + 1);
  has.resize(bytes.size());
  special.resize(bytes.size());
  auto set_bytes = [&](TokenId id, const std::string& token) {
    const auto at = static_cast<std::size_t>(id);
    has[at] = true;
    bytes[at] = description.bpe.byte_level ? alphabet_to_bytes(token).value_or(token) : token;
  };
  for (const auto& [token, id] : vocabulary) {
    set_bytes(id, token);
  }
  for (const AddedToken& token : added) {
    // As `tokenizers` since 0.23. (It then takes a special token for a plain one; we leave it out.)
    set_bytes(token.id, token.normalized ? normalizer.normalize(token.content) : token.content);
    special[static_cast<std::size_t>(token.id)] = token.special;
  }
  auto if_in_model = [&](std::optional<TokenId> id) {
    return id && *id < model_rows ? id : std::nullopt;
  };
  bos = if_in_model(description.bos);
  eos = if_in_model(description.eos);
}

void Tokenizer::Parts::encode_plain(std::string_view text, bool first,
                                    std::vector<TokenId>& ids) const {
  std::string normalized;
  if (!normalizer.changes_nothing()) {
    normalized = normalizer.normalize(text);
    text = normalized;
  }
  for (const AddedTokenFinder::TextPart& part : finder.split_normalized(text)) {
    if (part.token != nullptr) {
      ids.push_back(part.token->id);
    } else {
      pre_tokenizer.cut(part.text, first && part.text.data() == text.data(),
                        [&](std::string_view word) { bpe.encode(word, ids); });
    }
  }
}

Tokenizer Tokenizer::load(const std::filesystem::path& model_directory, std::int64_t model_rows) {
  return Tokenizer(std::make_shared<const Parts>(read_description(model_directory), model_rows));
}

std::vector<TokenId> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  if (const std::optional<std::size_t> at = invalid_utf8_at(text)) {
    fail("the text is not UTF-8 at byte {}", *at);
  }
  std::vector<TokenId> ids;
  ids.reserve(text.size() / 4 + parts_->before.size() + parts_->after.size());
  if (add_special_tokens) {
    ids = parts_->before;
  }
  for (const AddedTokenFinder::TextPart& part : parts_->finder.split(text)) {
    if (part.token != nullptr) {
      ids.push_back(part.token->id);
    } else {
      parts_->encode_plain(part.text, part.text.data() == text.data(), ids);
    }
  }
  if (add_special_tokens) {
    ids.insert(ids.end(), parts_->after.begin(), parts_->after.end());
  }
  return ids;
}

std::string Tokenizer::decode(std::span<const TokenId> ids, bool skip_special_tokens) const {
  TokenDecoder decoding = decoder();
  std::string text;
  for (const TokenId id : ids) {
    if (has(id) && (!skip_special_tokens || !is_special(id))) {
      decoding.push(token_bytes(id), text);
    }
  }
  decoding.finish(text);
  return text;
}

std::string Tokenizer::token_text(TokenId id) const { return decode({&id, 1}, false); }

TokenDecoder Tokenizer::decoder(bool continues) const {
  return TokenDecoder(parts_->decoder, continues);
}

std::string_view Tokenizer::token_bytes(TokenId id) const {
  const bool known = id >= 0 && static_cast<std::size_t>(id) < parts_->bytes.size();
  return known ? std::string_view(parts_->bytes[static_cast<std::size_t>(id)]) : "";
}

bool Tokenizer::has(TokenId id) const {
  return id >= 0 && static_cast<std::size_t>(id) < parts_->has.size() &&
         parts_->has[static_cast<std::size_t>(id)];
}

bool Tokenizer::is_special(TokenId id) const {
  const bool known = id >= 0 && static_cast<std::size_t>(id) < parts_->special.size();
  return known && parts_->special[static_cast<std::size_t>(id)];
}

std::optional<TokenId> Tokenizer::bos() const { return parts_->bos; }
std::optional<TokenId> Tokenizer::eos() const { return parts_->eos; }
bool Tokenizer::adds_bos() const { return !parts_->before.empty(); }
std::int64_t Tokenizer::size() const { return static_cast<std::int64_t>(parts_->bytes.size()); }

}  // namespace poise
