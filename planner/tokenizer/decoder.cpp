#include "planner/tokenizer/decoder.h"

#include <optional>

#include "planner/tokenizer/unicode.h"

namespace poise {
namespace {

constexpr std::string_view kReplacement = "\uFFFD";

// The byte that "<0x0A>" stands for. A sign is a digit's equal, as Rust reads numbers.
std::optional<char> fallback_byte(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') {
    return std::nullopt;
  }
  auto digit = [](char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
  };
  const int high = token[3] == '+' ? 0 : digit(token[3]);
  const int low = digit(token[4]);
  if (high < 0 || low < 0) {
    return std::nullopt;
  }
  return static_cast<char>(high << 4 | low);
}

std::string replaced(std::string_view text, std::string_view pattern, std::string_view content) {
  std::string out;
  std::size_t done = 0;
  for (std::size_t at = 0; (at = text.find(pattern, done)) != std::string_view::npos;) {
    out.append(text.substr(done, at - done)).append(content);
    done = at + pattern.size();
  }
  return out.append(text.substr(done));
}

// Takes up to `most` of `content` off the beginning of `text`; returns how many.
std::size_t strip(std::string_view& text, std::string_view content, std::size_t most) {
  std::size_t taken = 0;
  while (taken < most && text.starts_with(content)) {
    text.remove_prefix(content.size());
    ++taken;
  }
  return taken;
}

bool fuses(const DecoderStep& step) {
  return std::holds_alternative<FuseStep>(step) || std::holds_alternative<LossyUtf8Step>(step);
}

}  // namespace

TokenDecoder::TokenDecoder(std::span<const DecoderStep> steps, bool continues)
    : steps_(steps), states_(steps.size()), continues_(continues) {
  bool fused = false;
  for (std::size_t n = 0; n < steps.size(); ++n) {
    states_[n].fused = fused;
    states_[n].first = !continues;
    if (const auto* step = std::get_if<StripStep>(&steps[n])) {
      states_[n].strips = continues ? 0 : step->start;
    }
    fused = fused || fuses(steps[n]);
  }
}

void TokenDecoder::push(std::size_t n, std::string_view token, std::string& text) {
  if (n == steps_.size()) {
    text += token;
    return;
  }
  State& state = states_[n];
  const bool first = state.first || (state.fused && !continues_);
  state.first = false;
  const DecoderStep& now = steps_[n];
  if (const auto* replace = std::get_if<ReplaceStep>(&now)) {
    push(n + 1, replaced(token, replace->pattern, replace->content), text);
  } else if (std::holds_alternative<ByteFallbackStep>(now)) {
    if (const auto byte = fallback_byte(token)) {
      state.bytes += *byte;
    } else {
      flush_bytes(n, text);
      push(n + 1, token, text);
    }
  } else if (const auto* stripping = std::get_if<StripStep>(&now)) {
    if (!state.fused) {
      strip(token, stripping->content, stripping->start);
    } else if (!token.empty()) {
      state.strips -= strip(token, stripping->content, state.strips);
      state.strips = token.empty() ? state.strips : 0;
    }
    push(n + 1, token, text);
  } else if (const auto* metaspace = std::get_if<UnmetaspaceStep>(&now)) {
    const bool vanishes = first && metaspace->strips_first;
    push(n + 1, replaced(token, metaspace->replacement, vanishes ? "" : " "), text);
  } else if (std::holds_alternative<LossyUtf8Step>(now)) {
    state.bytes += token;
    std::string certain;
    state.bytes.erase(0, append_lossy(certain, state.bytes, true));
    push(n + 1, certain, text);
  } else {
    push(n + 1, token, text);
  }
}

void TokenDecoder::flush_bytes(std::size_t n, std::string& text) {
  const std::string bytes = std::move(states_[n].bytes);
  states_[n].bytes.clear();
  if (std::holds_alternative<LossyUtf8Step>(steps_[n])) {
    std::string rest;
    append_lossy(rest, bytes, false);
    push(n + 1, rest, text);
  } else if (!bytes.empty() && !invalid_utf8_at(bytes)) {
    push(n + 1, bytes, text);
  } else {
    for (std::size_t byte = 0; byte < bytes.size(); ++byte) {
      push(n + 1, kReplacement, text);
    }
  }
}

void TokenDecoder::finish(std::string& text) {
  for (std::size_t n = 0; n < steps_.size(); ++n) {
    flush_bytes(n, text);
  }
}

std::string TokenDecoder::held_back() const {
  std::string text;
  for (const State& state : states_) {
    if (invalid_utf8_at(state.bytes)) {
      return text;
    }
  }
  TokenDecoder(*this).finish(text);
  return text;
}

}  // namespace poise
