#include "planner/tokenizer/pre_tokenizer.h"

#include <algorithm>
#include <string>

#include "planner/tokenizer/unicode.h"

namespace poise {
namespace {

struct Cut {
  std::size_t begin, end;
  bool match;
};

// Each match and each stretch between two, if it is not empty.
template <typename Take>
void isolate(const Pattern& pattern, std::string_view text, Take take) {
  std::vector<Pattern::Match> matches;
  pattern.find_all(text, matches);
  std::size_t done = 0;
  auto advance_to = [&](std::size_t end) {
    if (end > done) {
      take(text.substr(done, end - done));
      done = end;
    }
  };
  for (const Pattern::Match& match : matches) {
    advance_to(match.begin);
    advance_to(match.end);
  }
  advance_to(text.size());
}

// The whole of `text`, as matches and what lies between them.
std::vector<Cut> cuts_of(const std::vector<Pattern::Match>& matches, std::string_view text,
                         bool invert) {
  std::vector<Cut> cuts;
  cuts.reserve(2 * matches.size() + 1);
  std::size_t done = 0;
  for (const Pattern::Match& match : matches) {
    if (match.begin > done) {
      cuts.push_back({done, match.begin, invert});
    }
    cuts.push_back({match.begin, match.end, !invert});
    done = match.end;
  }
  if (done < text.size()) {
    cuts.push_back({done, text.size(), invert});
  }
  return cuts;
}

// Joins neighbours. A match joins the part before it unless that ends in a match too; or the one
// behind it likewise; or neighbours of the same kind join.
std::vector<Cut> joined(const std::vector<Cut>& cuts, SplitStep::Behavior behavior) {
  using Behavior = SplitStep::Behavior;
  std::vector<Cut> parts;
  parts.reserve(cuts.size());
  for (const Cut& cut : cuts) {
    bool joins = false;
    if (!parts.empty()) {
      const bool last = parts.back().match;
      joins = behavior == Behavior::contiguous             ? cut.match == last
              : behavior == Behavior::merged_with_previous ? cut.match && !last
                                                           : last && !cut.match;
    }
    if (joins) {
      parts.back().end = cut.end;
      parts.back().match = cut.match;
    } else {
      parts.push_back(cut);
    }
  }
  return parts;
}

}  // namespace

const Pattern& gpt2_pattern() {
  static const Pattern pattern = Pattern::compile(
      R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)", "ByteLevel");
  return pattern;
}

void PreTokenizer::apply(std::size_t step, std::string_view part, const Cutting& cutting) const {
  if (part.empty()) {
    return;
  }
  if (step == steps_.size()) {
    cutting.sink(part);
    return;
  }
  const PreTokenizerStep& now = steps_.at(step);
  if (const auto* split = std::get_if<SplitStep>(&now)) {
    apply_split(*split, step, part, cutting);
  } else if (const auto* digits = std::get_if<DigitsStep>(&now)) {
    apply_digits(*digits, step, part, cutting);
  } else if (const auto* metaspace = std::get_if<MetaspaceStep>(&now)) {
    apply_metaspace(*metaspace, step, part, cutting);
  } else {
    apply_byte_level(std::get<ByteLevelStep>(now), part, cutting.sink);
  }
}

void PreTokenizer::apply_split(const SplitStep& split, std::size_t step, std::string_view part,
                               const Cutting& cutting) const {
  using Behavior = SplitStep::Behavior;
  if (split.behavior == Behavior::isolated) {
    isolate(split.pattern, part, [&](std::string_view cut) { apply(step + 1, cut, cutting); });
    return;
  }
  std::vector<Pattern::Match> matches;
  split.pattern.find_all(part, matches);
  std::vector<Cut> cuts = cuts_of(matches, part, split.invert);
  if (split.behavior != Behavior::removed) {
    cuts = joined(cuts, split.behavior);
  }
  for (const Cut& cut : cuts) {
    if (split.behavior != Behavior::removed || !cut.match) {
      apply(step + 1, part.substr(cut.begin, cut.end - cut.begin), cutting);
    }
  }
}

void PreTokenizer::apply_digits(const DigitsStep& digits, std::size_t step, std::string_view part,
                                const Cutting& cutting) const {
  std::size_t begin = 0;
  bool in_digits = false;
  for (std::size_t at = 0; at < part.size();) {
    const CodePoint c = code_point_at(part, at);
    const bool digit = is_numeric(c.value);
    if (digit != in_digits || (digit && digits.individual)) {
      apply(step + 1, part.substr(begin, at - begin), cutting);
      begin = at;
      in_digits = digit;
    }
    at += c.bytes;
  }
  apply(step + 1, part.substr(begin), cutting);
}

void PreTokenizer::apply_metaspace(const MetaspaceStep& metaspace, std::size_t step,
                                   std::string_view part, const Cutting& cutting) const {
  using Prepend = MetaspaceStep::Prepend;
  const std::string& mark = metaspace.replacement;
  const bool prepends = metaspace.prepend == Prepend::always ||
                        (metaspace.prepend == Prepend::first && part.data() == cutting.first);
  std::string text;
  if (prepends && !part.starts_with(' ') && !part.starts_with(mark)) {
    text = mark;
  }
  for (const char c : part) {
    c == ' ' ? text.append(mark) : text.append(1, c);
  }
  if (!metaspace.split) {
    apply(step + 1, text, cutting);
    return;
  }
  const std::string_view whole = text;
  std::size_t begin = 0;
  while (begin < whole.size()) {
    const std::size_t end = std::min(whole.find(mark, begin + 1), whole.size());
    apply(step + 1, whole.substr(begin, end - begin), cutting);
    begin = end;
  }
}

void PreTokenizer::apply_byte_level(const ByteLevelStep& byte_level, std::string_view part,
                                    const WordSink& sink) {
  std::string prefixed;
  if (byte_level.add_prefix_space && !part.starts_with(' ')) {
    prefixed.reserve(part.size() + 1);
    prefixed.append(" ").append(part);
    part = prefixed;
  }
  if (!byte_level.pattern) {
    sink(part);
    return;
  }
  isolate(*byte_level.pattern, part, sink);
}

}  // namespace poise
