// tokenizer.json, the form of HuggingFace's `tokenizers`. Every component must be one whose effect
// is known here; another is refused by its name. A vocabulary is of bytes if the pre-tokenizer ends in
// ByteLevel, and of text otherwise.

#include <algorithm>
#include <utility>

#include "common/files/json_file.h"
#include "common/files/regular_file.h"
#include "common/trouble.h"
#include "planner/tokenizer/description.h"
#include "planner/tokenizer/pre_tokenizer.h"
#include "planner/tokenizer/special_tokens.h"
#include "planner/tokenizer/unicode.h"

namespace poise {
namespace {

[[noreturn]] void refuse_component(const std::string& what, const std::string& component,
                                   const nlohmann::json& value) {
  fail("{}: {} {} is not supported; give prompts as token ids with --skip-tokenizer-init", what,
       component, described(value));
}

// The components of a list of them, of one alone, or none of null. `list` is the name of a
// Sequence's list.
std::vector<JsonObject> components(const JsonObject& parent, std::string_view name,
                                   std::string_view list) {
  const std::optional<JsonObject> component = parent.object(name);
  if (!component) {
    return {};
  }
  if (component->string("type").value_or("") != "Sequence") {
    return {*component};
  }
  const nlohmann::json* members = component->find(list);
  if (members == nullptr || !members->is_array()) {
    component->refuse(list, "must be a list");
  }
  std::vector<JsonObject> all;
  for (const nlohmann::json& member : *members) {
    all.emplace_back(member, fmt::format("{}: \"{}\"", parent.what(), name));
  }
  return all;
}

std::string type_of(const JsonObject& component) {
  const std::optional<std::string> type = component.string("type");
  if (!type) {
    component.refuse("type", "is missing");
  }
  return *type;
}

// A field that must be one character.
std::string read_character(const JsonObject& component, std::string_view name) {
  const std::string text = component.string(name).value_or("");
  if (text.empty() || code_point_at(text, 0).bytes != text.size()) {
    component.refuse(name, "must be one character");
  }
  return text;
}

// What Replace puts where; the same in normalizers and decoders.
ReplaceStep read_replace(const JsonObject& replace) {
  const std::optional<JsonObject> pattern = replace.object("pattern");
  const std::optional<std::string> text = pattern ? pattern->string("String") : std::nullopt;
  if (!text || text->empty()) {
    replace.refuse("pattern", "must have a \"String\" that is not empty; others are not supported");
  }
  const std::optional<std::string> content = replace.string("content");
  if (!content) {
    replace.refuse("content", "is missing");
  }
  return {*text, *content};
}

std::vector<NormalizerStep> read_normalizer(const JsonObject& document) {
  std::vector<NormalizerStep> steps;
  for (const JsonObject& component : components(document, "normalizer", "normalizers")) {
    const std::string type = type_of(component);
    if (type == "NFC") {
      steps.emplace_back(NfcStep{});
    } else if (type == "Replace") {
      steps.emplace_back(read_replace(component));
    } else if (type == "Prepend") {
      steps.emplace_back(PrependStep{component.string("prepend").value_or("")});
    } else {
      refuse_component(document.what(), "normalizer", type);
    }
  }
  return steps;
}

BpeDescription read_model(const JsonObject& model, const Vocabulary& vocabulary) {
  const std::string& what = model.what();
  const nlohmann::json* dropout = model.find("dropout");
  if (dropout != nullptr && *dropout != 0) {
    refuse_component(what, "dropout", *dropout);
  }
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!model.string(name).value_or("").empty()) {
      refuse_component(what, name, *model.find(name));
    }
  }
  BpeDescription bpe;
  bpe.byte_fallback = model.boolean("byte_fallback").value_or(false);
  bpe.vocabulary = vocabulary.sorted();
  bpe.fuse_unknown = model.boolean("fuse_unk").value_or(false);
  bpe.ignore_merges = model.boolean("ignore_merges").value_or(false);
  if (const auto unknown = model.string("unk_token")) {
    bpe.unknown = vocabulary.find(*unknown);
    if (!bpe.unknown) {
      model.refuse("unk_token", "must be in the vocabulary");
    }
  }
  const nlohmann::json* merges = model.find("merges");
  if (merges == nullptr || !merges->is_array()) {
    model.refuse("merges", "must be a list of merges");
  }
  for (const nlohmann::json& merge : *merges) {
    const std::size_t rank = bpe.merges.size() + 1;
    if (merge.is_string()) {
      bpe.merges.push_back(vocabulary.merge(merge.get_ref<const std::string&>(), rank, what));
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      bpe.merges.push_back(vocabulary.merge(merge[0].get_ref<const std::string&>(),
                                            merge[1].get_ref<const std::string&>(), rank, what));
    } else {
      fail("{}: merge {} must be a string or a pair of strings, not {}", what, rank,
           described(merge));
    }
  }
  return bpe;
}

SplitStep::Behavior read_behavior(const JsonObject& split) {
  using Behavior = SplitStep::Behavior;
  const std::string name = split.string("behavior").value_or("");
  static const std::pair<std::string_view, Behavior> kBehaviors[] = {
      {"Removed", Behavior::removed},
      {"Isolated", Behavior::isolated},
      {"MergedWithPrevious", Behavior::merged_with_previous},
      {"MergedWithNext", Behavior::merged_with_next},
      {"Contiguous", Behavior::contiguous}};
  const auto* known = std::find_if(std::begin(kBehaviors), std::end(kBehaviors),
                                   [&](const auto& entry) { return entry.first == name; });
  if (known == std::end(kBehaviors)) {
    split.refuse("behavior", fmt::format("\"{}\" is unknown", shown(name)));
  }
  return known->second;
}

SplitStep read_split(const JsonObject& split) {
  const std::optional<JsonObject> pattern = split.object("pattern");
  const std::string what = split.what();
  const std::optional<std::string> regex = pattern ? pattern->string("Regex") : std::nullopt;
  const std::optional<std::string> text = pattern ? pattern->string("String") : std::nullopt;
  if (regex.has_value() == text.has_value()) {
    split.refuse("pattern", "must have either \"Regex\" or \"String\"");
  }
  return {regex ? Pattern::compile(*regex, what) : Pattern::literal(*text, what),
          read_behavior(split), split.boolean("invert").value_or(false)};
}

// "prepend_scheme", with the older "add_prefix_space" beside it. Files in which the two disagree are
// refused by `tokenizers`, too.
MetaspaceStep::Prepend read_prepend(const JsonObject& metaspace) {
  using Prepend = MetaspaceStep::Prepend;
  const std::string scheme = metaspace.string("prepend_scheme").value_or("always");
  if (scheme != "always" && scheme != "first" && scheme != "never") {
    metaspace.refuse("prepend_scheme", fmt::format("\"{}\" is unknown", shown(scheme)));
  }
  if (!metaspace.boolean("add_prefix_space").value_or(true) && scheme != "never") {
    metaspace.refuse("add_prefix_space", "is false, but \"prepend_scheme\" is not \"never\"");
  }
  return scheme == "always" ? Prepend::always : scheme == "first" ? Prepend::first : Prepend::never;
}

bool is_byte_level(const std::vector<PreTokenizerStep>& steps) {
  return !steps.empty() && std::holds_alternative<ByteLevelStep>(steps.back());
}

std::vector<PreTokenizerStep> read_pre_tokenizer(const JsonObject& document) {
  std::vector<PreTokenizerStep> steps;
  bool metaspace = false;
  for (const JsonObject& component : components(document, "pre_tokenizer", "pretokenizers")) {
    const std::string type = type_of(component);
    if (is_byte_level(steps) || (metaspace && type == "Metaspace")) {
      fail("{}: pre_tokenizer {} after {} is not supported", document.what(), shown(type),
           metaspace ? "Metaspace" : "ByteLevel");
    }
    if (type == "ByteLevel") {
      ByteLevelStep step;
      step.add_prefix_space = component.boolean("add_prefix_space").value_or(true);
      if (component.boolean("use_regex").value_or(true)) {
        step.pattern = gpt2_pattern();
      }
      steps.emplace_back(std::move(step));
    } else if (type == "Metaspace") {
      steps.emplace_back(MetaspaceStep{read_character(component, "replacement"),
                                       read_prepend(component),
                                       component.boolean("split").value_or(true)});
      metaspace = true;
    } else if (type == "Split") {
      steps.emplace_back(read_split(component));
    } else if (type == "Digits") {
      steps.emplace_back(DigitsStep{component.boolean("individual_digits").value_or(false)});
    } else {
      refuse_component(document.what(), "pre_tokenizer", component.json().at("type"));
    }
  }
  return steps;
}

// `fused`: all tokens are one text by then.
DecoderStep read_decoder_step(const JsonObject& decoder, bool fused) {
  const std::string type = type_of(decoder);
  if (type == "Fuse") {
    return FuseStep{};
  }
  if (type == "ByteFallback" && !fused) {
    return ByteFallbackStep{};
  }
  if (type == "Replace") {
    ReplaceStep replace = read_replace(decoder);
    if (!fused || code_point_at(replace.pattern, 0).bytes == replace.pattern.size()) {
      return replace;
    }
  }
  if (type == "Strip") {
    if (decoder.integer("stop", {.min = 0}).value_or(0) != 0) {
      decoder.refuse("stop", "must be 0: no other is supported");
    }
    const auto start = decoder.integer("start", {.min = 0, .max = 1 << 20}).value_or(0);
    return StripStep{read_character(decoder, "content"), static_cast<std::size_t>(start)};
  }
  if (type == "Metaspace") {
    return UnmetaspaceStep{read_character(decoder, "replacement"),
                           read_prepend(decoder) != MetaspaceStep::Prepend::never};
  }
  fail(
      "{}: decoder \"{}\"{} is not supported; give prompts as token ids with --skip-tokenizer-init",
      decoder.what(), shown(type), fused ? " after Fuse" : "");
}

std::vector<DecoderStep> read_decoder(const JsonObject& document, bool byte_level) {
  const std::vector<JsonObject> decoders = components(document, "decoder", "decoders");
  if (byte_level) {
    if (decoders.size() != 1 || type_of(decoders.front()) != "ByteLevel") {
      refuse_component(document.what(), "beside the pre_tokenizer ByteLevel, a decoder other than",
                       "ByteLevel");
    }
    return {LossyUtf8Step{}};
  }
  if (decoders.empty()) {
    document.refuse("decoder", "is missing; tokens cannot be joined to text without it");
  }
  std::vector<DecoderStep> steps;
  bool fused = false;
  for (const JsonObject& decoder : decoders) {
    steps.push_back(read_decoder_step(decoder, fused));
    fused = fused || std::holds_alternative<FuseStep>(steps.back());
  }
  return steps;
}

TokenId read_id(const nlohmann::json& value, const std::string& what) {
  const std::optional<std::int64_t> id = as_integer(value);
  if (!id || *id < 0 || *id > kLargestTokenId) {
    fail("{}: a token id must be an integer from 0 to {}, not {}", what, kLargestTokenId,
         described(value));
  }
  return static_cast<TokenId>(*id);
}

// ["</s>", 2], as RobertaProcessing and BertProcessing have it.
TokenId read_pair(const JsonObject& processor, std::string_view name) {
  const nlohmann::json* pair = processor.find(name);
  if (pair == nullptr || !pair->is_array() || pair->size() != 2) {
    processor.refuse(name, "must be a token and its id");
  }
  return read_id((*pair)[1], processor.what());
}

struct Surroundings {
  std::vector<TokenId> before, after;
};

Surroundings read_template(const JsonObject& processor) {
  Surroundings around;
  const std::optional<JsonObject> specials = processor.object("special_tokens");
  const nlohmann::json* single = processor.find("single");
  if (single == nullptr || !single->is_array()) {
    processor.refuse("single", "must be a list");
  }
  int texts = 0;
  for (const nlohmann::json& item : *single) {
    const JsonObject part(item, processor.what());
    if (const auto sequence = part.object("Sequence")) {
      if (sequence->string("id").value_or("") != "A" || ++texts > 1) {
        processor.refuse("single", "must have the text, A, once and no other");
      }
    } else if (const auto special = part.object("SpecialToken")) {
      const std::string name = special->string("id").value_or("");
      const auto entry = specials ? specials->object(name) : std::nullopt;
      const nlohmann::json* ids = entry ? entry->find("ids") : nullptr;
      if (ids == nullptr || !ids->is_array()) {
        processor.refuse("special_tokens", fmt::format("must give the ids of \"{}\"", shown(name)));
      }
      for (const nlohmann::json& id : *ids) {
        (texts == 0 ? around.before : around.after).push_back(read_id(id, entry->what()));
      }
    } else {
      processor.refuse("single", "must be made of Sequence and SpecialToken");
    }
  }
  if (texts != 1) {
    processor.refuse("single", "must have the text, A, once");
  }
  return around;
}

void read_post_processor(const JsonObject& document, TokenizerDescription& description) {
  for (const JsonObject& component : components(document, "post_processor", "processors")) {
    const std::string type = type_of(component);
    Surroundings around;
    if (type == "TemplateProcessing") {
      around = read_template(component);
    } else if (type == "RobertaProcessing" || type == "BertProcessing") {
      around = {{read_pair(component, "cls")}, {read_pair(component, "sep")}};
    } else if (type != "ByteLevel") {  // which moves offsets alone
      refuse_component(document.what(), "post_processor", component.json().at("type"));
    }
    description.before.insert(description.before.begin(), around.before.begin(),
                              around.before.end());
    description.after.insert(description.after.end(), around.after.begin(), around.after.end());
  }
}

void read_added_tokens(const JsonObject& document, AddedTokenList& added) {
  const nlohmann::json* tokens = document.find("added_tokens");
  if (tokens == nullptr) {
    return;
  }
  if (!tokens->is_array()) {
    document.refuse("added_tokens", "must be a list");
  }
  const std::string what = document.what() + ": \"added_tokens\"";
  for (const nlohmann::json& token : *tokens) {
    const auto id = JsonObject(token, what).integer("id", {.min = 0, .max = kLargestTokenId});
    if (!id) {
      JsonObject(token, what).refuse("id", "is missing");
    }
    added.add(token, id, what);
  }
}

}  // namespace

TokenizerDescription read_tokenizer_json(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / "tokenizer.json";
  const nlohmann::json json = read_json_file(path);
  const JsonObject document(json, shown(path.string(), 300));
  TokenizerDescription description;
  description.source = document.what();

  const std::optional<JsonObject> model = document.object("model");
  if (!model) {
    document.refuse("model", "is missing; is this a tokenizer's file?");
  }
  if (const auto type = model->string("type"); type && *type != "BPE") {
    refuse_component(document.what(), "model", *type);
  }
  description.normalizer = read_normalizer(document);
  description.pre_tokenizer = read_pre_tokenizer(document);
  const bool byte_level = is_byte_level(description.pre_tokenizer);
  description.decoder = read_decoder(document, byte_level);

  const nlohmann::json* tokens = model->find("vocab");
  const Vocabulary vocabulary(tokens == nullptr ? nlohmann::json() : *tokens,
                              model->what() + " \"vocab\"");
  description.bpe = read_model(*model, vocabulary);
  description.bpe.byte_level = byte_level;
  if (byte_level && description.bpe.byte_fallback) {
    refuse_component(document.what(), "beside the pre_tokenizer ByteLevel, byte_fallback", true);
  }

  const TokenizerConfiguration configuration(directory);
  AddedTokenList added(vocabulary);
  read_added_tokens(document, added);
  configuration.apply(added, "");
  read_post_processor(document, description);
  auto id_of = [&](const char* role) -> std::optional<TokenId> {
    const auto name = configuration.name(role, "");
    return name ? added.find(*name) : std::nullopt;
  };
  description.bos = id_of("bos_token");
  description.eos = id_of("eos_token");
  description.added = added.take();
  return description;
}

}  // namespace poise
