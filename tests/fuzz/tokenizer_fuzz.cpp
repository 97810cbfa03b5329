// A tokenizer's files, and a text to encode with it. Input: one letter, then files and the text, with NUL bytes between
// (an empty file is not there). `j`: tokenizer.json, tokenizer_config.json, special_tokens_map.json. `v`: vocab.json,
// merges.txt and the two. What a tokenizer encodes is compared with a byte-pair encoder that is written to be plain; its
// bytes are the text's, and they come back from decoding, at once and token by token.

#include <map>

#include "planner/tokenizer/added_token_finder.h"
#include "planner/tokenizer/byte_alphabet.h"
#include "planner/tokenizer/description.h"
#include "planner/tokenizer/detokenizer.h"
#include "planner/tokenizer/normalizer.h"
#include "planner/tokenizer/pre_tokenizer.h"
#include "planner/tokenizer/tokenizer.h"
#include "planner/tokenizer/unicode.h"
#include "tests/fuzz/fuzzing.h"

namespace poise::fuzzing {
namespace {

constexpr std::int64_t kRows = 2000;
constexpr std::size_t kLongestText = 400;  // the plain encoder takes the square of a word's length

// Byte-pair encoding as it is defined: again and again the first of the best merges.
class PlainBpe {
 public:
  explicit PlainBpe(const BpeDescription& description) : description_(description) {
    for (const auto& [token, id] : description.vocabulary) {
      const auto word = description.byte_level ? alphabet_to_bytes(token) : token;
      if (word && !word->empty()) {
        words_[*word] = id;
      }
    }
    for (std::size_t rank = 0; rank < description.merges.size(); ++rank) {
      const auto& merge = description.merges[rank];
      merges_[{merge.left, merge.right}] = {rank, merge.whole};
    }
  }

  std::vector<TokenId> encode(std::string_view word) const {
    if (const auto whole = words_.find(word); description_.ignore_merges && whole != words_.end()) {
      return {whole->second};
    }
    std::vector<TokenId> tokens = description_.byte_level ? bytes_of(word) : characters_of(word);
    while (true) {
      std::size_t best = tokens.size();
      for (std::size_t at = 0; at + 1 < tokens.size(); ++at) {
        const auto merge = merges_.find({tokens[at], tokens[at + 1]});
        if (merge != merges_.end() &&
            (best == tokens.size() ||
             merge->second.first < merges_.at({tokens[best], tokens[best + 1]}).first)) {
          best = at;
        }
      }
      if (best == tokens.size()) {
        return tokens;
      }
      tokens[best] = merges_.at({tokens[best], tokens[best + 1]}).second;
      tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    }
  }
  bool knows_all(std::string_view word) const {
    return description_.byte_level && ((description_.ignore_merges && words_.contains(word)) ||
                                       std::ranges::all_of(word, [&](char c) {
                                         return words_.contains(std::string_view(&c, 1));
                                       }));
  }

 private:
  std::vector<TokenId> bytes_of(std::string_view word) const {
    std::vector<TokenId> tokens;
    bool after_unknown = false;
    for (const char c : word) {
      const auto byte = words_.find(std::string_view(&c, 1));
      if (byte != words_.end()) {
        tokens.push_back(byte->second);
      } else if (description_.unknown && !(after_unknown && description_.fuse_unknown)) {
        tokens.push_back(*description_.unknown);
      }
      after_unknown = byte == words_.end();
    }
    return tokens;
  }

  // Of unknown characters a token is held back, as `tokenizers` does: it comes before what is known.
  std::vector<TokenId> characters_of(std::string_view word) const {
    std::vector<TokenId> tokens;
    std::optional<TokenId> waits;
    const auto flush = [&] {
      if (waits) {
        tokens.push_back(*std::exchange(waits, std::nullopt));
      }
    };
    for (std::size_t at = 0; at < word.size();) {
      const std::string_view character = word.substr(at, code_point_at(word, at).bytes);
      at += character.size();
      if (const auto known = words_.find(character); known != words_.end()) {
        flush();
        tokens.push_back(known->second);
      } else if (const auto bytes = fallback_of(character); !bytes.empty()) {
        tokens.insert(tokens.end(), bytes.begin(), bytes.end());
      } else if (description_.unknown) {
        if (!description_.fuse_unknown) {
          flush();
        }
        waits = description_.unknown;
      }
    }
    flush();
    return tokens;
  }

  std::vector<TokenId> fallback_of(std::string_view character) const {
    std::vector<TokenId> tokens;
    for (const char c : character) {
      const auto byte = words_.find(fmt::format("<0x{:02X}>", static_cast<unsigned char>(c)));
      if (!description_.byte_fallback || byte == words_.end()) {
        return {};
      }
      tokens.push_back(byte->second);
    }
    return tokens;
  }

  const BpeDescription& description_;
  std::map<std::string, TokenId, std::less<>> words_;  // by their bytes
  std::map<std::pair<TokenId, TokenId>, std::pair<std::size_t, TokenId>> merges_;
};

struct Encoded {
  std::vector<TokenId> ids;
  std::string bytes;
};

class PlainTokenizer {
 public:
  PlainTokenizer(const TokenizerDescription& description, const Tokenizer& tokenizer)
      : tokenizer_(tokenizer),
        bpe_(description.bpe),
        normalizer_(description.normalizer),
        finder_(description.added, normalizer_),
        pre_tokenizer_(description.pre_tokenizer) {}

  Encoded encode(std::string_view text) const {
    Encoded encoded;
    for (const auto& part : finder_.split(text)) {
      if (part.token != nullptr) {
        add(part.token->id, encoded);
      } else {
        encode_normalized(normalizer_.normalize(part.text), part.text.data() == text.data(),
                          encoded);
      }
    }
    return encoded;
  }

 private:
  void add(TokenId id, Encoded& encoded) const {
    encoded.ids.push_back(id);
    encoded.bytes += tokenizer_.token_bytes(id);
  }
  void encode_normalized(std::string_view text, bool first, Encoded& encoded) const {
    for (const auto& part : finder_.split_normalized(text)) {
      if (part.token != nullptr) {
        add(part.token->id, encoded);
        continue;
      }
      pre_tokenizer_.cut(
          part.text, first && part.text.data() == text.data(), [&](std::string_view word) {
            const std::size_t before = encoded.bytes.size();
            for (const TokenId id : bpe_.encode(word)) {
              add(id, encoded);
            }
            expect(std::string_view(encoded.bytes).substr(before) == word || !bpe_.knows_all(word),
                   "a word's tokens are its bytes");
          });
    }
  }

  const Tokenizer& tokenizer_;
  const PlainBpe bpe_;
  const Normalizer normalizer_;
  const AddedTokenFinder finder_;
  const PreTokenizer pre_tokenizer_;
};

void check_text(const TokenizerDescription& description, const Tokenizer& tokenizer,
                std::string_view text) {
  const Encoded plain = PlainTokenizer(description, tokenizer).encode(text);
  for (const char* time : {"first", "second"}) {  // words that were met before take another way
    expect(tokenizer.encode(text, false) == plain.ids, "encoding is the plain one", time);
  }
  if (description.bpe.byte_level) {
    std::string decoded;
    append_lossy(decoded, plain.bytes, false);
    expect(tokenizer.decode(plain.ids, false) == decoded, "decoded text is the tokens' bytes");
  }
  const std::vector<TokenId> whole = tokenizer.encode(text);
  Detokenizer detokenizer(tokenizer);
  std::string streamed;
  for (const TokenId id : whole) {
    expect(id >= 0 && (id < tokenizer.size() || id < kRows), "an id has a token or a row");
    streamed += detokenizer.push(id);
  }
  streamed += detokenizer.finish();
  expect(streamed == tokenizer.decode(whole), "token by token the text is the same");
}

struct Files {
  std::vector<const char*> names;
  TokenizerDescription (*read)(const std::filesystem::path&);
};

const Files& files_of(std::uint8_t letter) {
  static const Files json{{"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"},
                          read_tokenizer_json};
  static const Files vocabulary{
      {"vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json"},
      read_vocabulary_files};
  return letter == 'v' ? vocabulary : json;
}

void run_tokenizer(Input input) {
  const std::uint8_t* data = input.data();
  const std::size_t size = input.size();
  static const Folder json, vocabulary;
  if (size == 0) {
    return;
  }
  const Files& files = files_of(data[0]);
  const Folder& folder = data[0] == 'v' ? vocabulary : json;
  auto parts = parts_of({data + 1, size - 1}, files.names.size() + 1);
  parts.resize(files.names.size() + 1);
  for (std::size_t i = 0; i < files.names.size(); ++i) {
    parts[i].empty() ? folder.remove(files.names[i]) : folder.write(files.names[i], parts[i]);
  }
  std::optional<Tokenizer> tokenizer;
  if (refusal([&] { tokenizer = Tokenizer::load(folder.path(), kRows); })) {
    return;
  }
  const TokenizerDescription description = files.read(folder.path());
  const std::string_view given = parts.back().substr(0, kLongestText);
  if (invalid_utf8_at(given)) {
    expect(refusal([&] { tokenizer->encode(given); }).has_value(),
           "text that is not UTF-8 is refused");
  }
  std::string text;
  append_lossy(text, given, false);
  refusal([&] { check_text(description, *tokenizer, text); });
}

}  // namespace

const Target kTokenizerTarget{"tokenizer", run_tokenizer};

}  // namespace poise::fuzzing
