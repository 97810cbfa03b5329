#pragma once
// A tokenizer as its files describe it, read and checked, before anything is built from it. Two
// readers fill it, one for each form that HuggingFace checkpoints come in; another kind of
// tokenizer would be a third.

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "common/units.h"
#include "planner/tokenizer/pattern.h"

namespace poise {

// A token that is looked for in the text itself, before the text is cut into words.
struct AddedToken {
  std::string content;
  TokenId id = 0;
  bool single_word = false;  // only where no word character touches it
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // and behind it
  bool normalized = false;   // looked for after those that are not
  bool special = false;      // left out of decoded text
};

// Byte-pair encoding: which symbols there are, and which two become which one, in what order.
struct BpeDescription {
  // Words are bytes and tokens are written in GPT-2's alphabet; otherwise both are plain text.
  bool byte_level = true;
  std::vector<std::pair<std::string, TokenId>> vocabulary;  // by id
  struct Merge {
    TokenId left, right, whole;
  };
  std::vector<Merge> merges;       // the first is the first to be done
  std::optional<TokenId> unknown;  // for bytes or characters without a token, which else vanish
  bool fuse_unknown = false;       // neighbouring unknown ones are one token
  bool byte_fallback = false;      // of text: such a character is its bytes, "<0x00>" to "<0xFF>"
  bool ignore_merges = false;      // a word that is a token is that token, whatever the merges say
};

// Puts `text` before every text that is not empty.
struct PrependStep {
  std::string text;
};
// Puts `content` where `pattern` stands.
struct ReplaceStep {
  std::string pattern;  // not empty
  std::string content;
};
// Unicode's normal form C.
struct NfcStep {};
using NormalizerStep = std::variant<PrependStep, ReplaceStep, NfcStep>;

// Cuts the text where a pattern matches.
struct SplitStep {
  enum class Behavior { removed, isolated, merged_with_previous, merged_with_next, contiguous };
  Pattern pattern;
  Behavior behavior = Behavior::isolated;
  bool invert = false;  // what the pattern does not match counts as the match
};
// Cuts digits off, each for itself or a row of them together.
struct DigitsStep {
  bool individual = false;
};
// Spaces become `replacement`, which also goes before the text, before all of them or the very first.
struct MetaspaceStep {
  enum class Prepend { always, first, never };
  std::string replacement;  // one character
  Prepend prepend = Prepend::always;
  bool split = true;  // each replacement begins a word
};
// Always the last step: words become bytes.
struct ByteLevelStep {
  bool add_prefix_space = false;
  std::optional<Pattern> pattern;  // GPT-2's, unless use_regex is false
};
using PreTokenizerStep = std::variant<SplitStep, DigitsStep, MetaspaceStep, ByteLevelStep>;

// How tokens become text again. Each step works on every token by itself, after FuseStep on the text
// that all tokens are.
struct ByteFallbackStep {};  // a run of "<0x..>" is UTF-8, or else U+FFFD for each
struct FuseStep {};
struct StripStep {      // takes up to `start` of `content` off the beginning
  std::string content;  // one character
  std::size_t start = 0;
};
struct UnmetaspaceStep {    // `replacement` is a space again, and nothing in the first token
  std::string replacement;  // one character
  bool strips_first = true;
};
struct LossyUtf8Step {};  // tokens are bytes; U+FFFD for what is not UTF-8; fuses
using DecoderStep = std::variant<ReplaceStep, ByteFallbackStep, FuseStep, StripStep,
                                 UnmetaspaceStep, LossyUtf8Step>;

struct TokenizerDescription {
  std::string source;  // the file that decided, for messages
  BpeDescription bpe;
  std::vector<AddedToken> added;  // in order of being added
  std::vector<NormalizerStep> normalizer;
  std::vector<PreTokenizerStep> pre_tokenizer;
  std::vector<DecoderStep> decoder{LossyUtf8Step{}};
  std::vector<TokenId> before, after;  // special tokens around an encoded text
  std::optional<TokenId> bos, eos;     // as named by the configuration
};

// From tokenizer.json, with tokenizer_config.json where that is there.
TokenizerDescription read_tokenizer_json(const std::filesystem::path& directory);
// From vocab.json and merges.txt, as GPT-2 and OPT have them.
TokenizerDescription read_vocabulary_files(const std::filesystem::path& directory);

}  // namespace poise
