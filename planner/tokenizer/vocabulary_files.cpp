// vocab.json + merges.txt, the form of GPT-2 and OPT. How they are used stands in no file: it is
// what the class GPT2Tokenizer of `transformers` does, with its defaults.

#include "common/files/json_file.h"
#include "common/files/regular_file.h"
#include "common/trouble.h"
#include "planner/tokenizer/description.h"
#include "planner/tokenizer/pre_tokenizer.h"
#include "planner/tokenizer/special_tokens.h"
#include "planner/tokenizer/unicode.h"

namespace poise {
namespace {

// What GPT2Tokenizer calls the tokens that no configuration names.
constexpr const char* kDefaultName = "<|endoftext|>";
constexpr Bytes kLargestMerges = 256 * kMiB;

std::vector<BpeDescription::Merge> read_merges(const std::filesystem::path& path,
                                               const Vocabulary& vocabulary) {
  const std::string text = read_text_file(path, kLargestMerges);
  const std::string what = shown(path.string(), 300);
  if (const auto at = invalid_utf8_at(text)) {
    fail("{} is not UTF-8 at byte {}; fetch the model again", what, *at);
  }
  std::vector<BpeDescription::Merge> merges;
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.ends_with('\r')) {
      line.remove_suffix(1);
    }
    if (!line.starts_with("#version")) {
      merges.push_back(vocabulary.merge(line, merges.size() + 1, what));
    }
  }
  return merges;
}

}  // namespace

TokenizerDescription read_vocabulary_files(const std::filesystem::path& directory) {
  const TokenizerConfiguration configuration(directory);
  if (const auto name = configuration.tokenizer_class();
      name && *name != "GPT2Tokenizer" && *name != "GPT2TokenizerFast") {
    fail(
        "{}: vocab.json and merges.txt are read as GPT2Tokenizer reads them, but "
        "tokenizer_config.json asks for \"{}\"; save the tokenizer as tokenizer.json",
        shown(directory.string(), 300), shown(*name));
  }
  TokenizerDescription description;
  description.source = shown((directory / "vocab.json").string(), 300);
  const Vocabulary vocabulary(read_json_file(directory / "vocab.json"), description.source);
  description.bpe.vocabulary = vocabulary.sorted();
  description.bpe.merges = read_merges(directory / "merges.txt", vocabulary);

  ByteLevelStep byte_level;
  byte_level.add_prefix_space = configuration.flag("add_prefix_space");
  byte_level.pattern = gpt2_pattern();
  description.pre_tokenizer.emplace_back(std::move(byte_level));

  AddedTokenList added(vocabulary);
  configuration.apply(added, kDefaultName);
  auto id_of = [&](const char* role) -> std::optional<TokenId> {
    const auto name = configuration.name(role, kDefaultName);
    return name ? added.find(*name) : std::nullopt;
  };
  description.bos = id_of("bos_token");
  description.eos = id_of("eos_token");
  if (configuration.flag("add_bos_token") && description.bos) {
    description.before.push_back(*description.bos);
  }
  if (configuration.flag("add_eos_token") && description.eos) {
    description.after.push_back(*description.eos);
  }
  description.added = added.take();
  return description;
}

}  // namespace poise
