#include "planner/results/answer_logprobs.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "common/trouble.h"
#include "planner/results/result_json.h"
#include "planner/tokenizer/tokenizer.h"

namespace poise {
namespace {

using Entry = std::pair<std::string, float>;

std::string token_name(TokenId token, const Tokenizer* tokenizer) {
  return tokenizer == nullptr ? fmt::format("token_id:{}", token) : tokenizer->token_text(token);
}

class LogprobsWriter {
 public:
  LogprobsWriter(const SamplingParams& sampling, const Tokenizer* tokenizer)
      : best_(static_cast<std::size_t>(sampling.logprobs)),
        tokenizer_(sampling.tokens_as_ids ? nullptr : tokenizer) {}

  // The first token of all: nothing predicts it.
  void add_first(TokenId token) {
    begin_entry(name_of(token));
    values_ += "null";
    top_ += "null";
  }

  void add(TokenId chosen, const TokenLogprobs& value) {
    begin_entry(name_of(chosen));
    append_json_logprob(values_, value.logprob);
    top_ += '{';
    bool later = false;
    for (const auto& [name, logprob] : entries_of(chosen, value)) {
      if (std::exchange(later, true)) {
        top_ += ',';
      }
      append_json_text(top_, name);
      top_ += ':';
      append_json_logprob(top_, logprob);
    }
    top_ += '}';
  }

  void append_to(std::string& out) const {
    out += "{\"tokens\":[" + names_ + "],\"token_logprobs\":[" + values_ + "],\"top_logprobs\":[" +
           top_ + "],\"text_offset\":[" + offsets_ + "]}";
  }

 private:
  std::string name_of(TokenId token) const { return token_name(token, tokenizer_); }

  void begin_entry(const std::string& name) {
    for (std::string* list : {&names_, &values_, &top_, &offsets_}) {
      if (!names_empty_) {
        *list += ',';
      }
    }
    names_empty_ = false;
    append_json_text(names_, name);
    append_json_integer(offsets_, offset_);
    // In characters, as Python counts them: all bytes but those that continue one.
    offset_ += std::ranges::count_if(
        name, [](char byte) { return (static_cast<unsigned char>(byte) & 0xc0) != 0x80; });
  }

  // The best k, best first, and the token itself; tokens of equal text share the higher value.
  std::vector<Entry> entries_of(TokenId chosen, const TokenLogprobs& value) const {
    std::vector<Entry> entries;
    const auto add = [&](TokenId token, float logprob) {
      std::string name = name_of(token);
      const auto same = std::ranges::find(entries, name, &Entry::first);
      if (same == entries.end()) {
        entries.emplace_back(std::move(name), logprob);
      } else {
        same->second = std::max(same->second, logprob);
      }
    };
    const std::size_t count = std::min(best_, value.top.size());
    bool chosen_stands = false;
    for (std::size_t i = 0; i < count; ++i) {
      const auto& [token, logprob] = value.top[i];
      chosen_stands = chosen_stands || token == chosen;
      add(token, logprob);
    }
    if (!chosen_stands) {
      add(chosen, value.logprob);
    }
    return entries;
  }

  std::size_t best_;
  const Tokenizer* tokenizer_;
  std::string names_, values_, top_, offsets_;
  bool names_empty_ = true;
  std::int64_t offset_ = 0;
};

// The best `most` tokens, best first. `value.top` leaves out the chosen one, so it is shorter where that
// is among them.
std::vector<std::pair<TokenId, float>> best_of(TokenId chosen, const TokenLogprobs& value,
                                               std::size_t most) {
  std::vector<std::pair<TokenId, float>> best = value.top;
  if (best.size() < most) {
    const auto place =
        std::ranges::find_if(best, [&](const auto& one) { return one.second < value.logprob; });
    best.emplace(place, chosen, value.logprob);
  }
  best.resize(std::min(best.size(), most));
  return best;
}

// "token", "bytes" and "logprob", without the braces around them.
void append_chat_token(std::string& out, TokenId token, float logprob, const Tokenizer* tokenizer) {
  const std::string name = token_name(token, tokenizer);
  out += "\"token\":";
  append_json_text(out, name);
  out += ",\"bytes\":[";
  for (std::size_t n = 0; n < name.size(); ++n) {
    out += n > 0 ? "," : "";
    append_json_integer(out, static_cast<unsigned char>(name[n]));
  }
  out += "],\"logprob\":";
  append_json_logprob(out, logprob);
}

// Of an echoed prompt's token as many of the best as "logprobs" says, where "prompt_logprobs" asked for more.
TokenLogprobs cut_to_best(const Request& request, std::size_t place, const TokenLogprobs& value) {
  const SamplingParams& sampling = request.sampling;
  if (sampling.prompt_best() <= sampling.logprobs) {
    return value;
  }
  const TokenId own = request.prompt[place + 1];
  auto best = best_of(own, value, static_cast<std::size_t>(sampling.prompt_best()));
  best.resize(std::min(best.size(), static_cast<std::size_t>(sampling.logprobs)));
  std::erase_if(best, [&](const auto& one) { return one.first == own; });
  return {.logprob = value.logprob, .top = std::move(best)};
}

// `rank`: from 1; 0: unknown.
void append_prompt_token(std::string& out, const std::pair<TokenId, float>& token, std::size_t rank,
                         const Tokenizer* tokenizer) {
  out += fmt::format("\"{}\":{{\"logprob\":", token.first);
  append_json_logprob(out, token.second);
  out += ",\"rank\":";
  out += rank > 0 ? fmt::format("{}", rank) : "null";
  out += ",\"decoded_token\":";
  if (tokenizer != nullptr) {
    append_json_text(out, tokenizer->token_text(token.first));
  } else {
    out += "null";
  }
  out += '}';
}

}  // namespace

void append_logprobs(std::string& out, const Request& request, const Tokenizer* tokenizer,
                     std::span<const TokenLogprobs> prompt_values, std::span<const TokenId> tokens,
                     std::span<const TokenLogprobs> values) {
  LogprobsWriter writer(request.sampling, tokenizer);
  if (request.sampling.echo) {
    check(prompt_values.size() + 1 == request.prompt.size(),
          "the echoed prompt's values were set before the answer was written");
    writer.add_first(request.prompt.front());
    for (std::size_t i = 0; i < prompt_values.size(); ++i) {
      writer.add(request.prompt[i + 1], cut_to_best(request, i, prompt_values[i]));
    }
  }
  check(tokens.size() == values.size(), "each token of an answer with logprobs has its own");
  for (std::size_t i = 0; i < values.size(); ++i) {
    writer.add(tokens[i], values[i]);
  }
  writer.append_to(out);
}

void append_prompt_logprobs(std::string& out, const Request& request, const Tokenizer* tokenizer,
                            std::span<const TokenLogprobs> prompt_values) {
  const auto most = static_cast<std::size_t>(request.sampling.prompt_best());
  out += "[null";
  for (std::size_t i = 0; i < prompt_values.size(); ++i) {
    const TokenId own = request.prompt[i + 1];
    const auto best = best_of(own, prompt_values[i], most);
    const bool is_best =
        std::ranges::find(best, own, &std::pair<TokenId, float>::first) != best.end();
    out += ",{";
    if (!is_best) {
      append_prompt_token(out, {own, prompt_values[i].logprob}, 0, tokenizer);
    }
    for (std::size_t place = 0; place < best.size(); ++place) {
      out += out.back() == '{' ? "" : ",";
      append_prompt_token(out, best[place], place + 1, tokenizer);
    }
    out += '}';
  }
  out += ']';
}

void append_scores(std::string& out, const Request& request,
                   std::span<const TokenLogprobs> values) {
  check(values.size() == request.valued(), "what was scored has its values");
  const auto most = static_cast<std::size_t>(request.sampling.prompt_best());
  std::string best;
  out += "{\"logprobs\":[";
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) {
      out += ',';
      best += ',';
    }
    append_json_logprob(out, values[i].logprob);
    const TokenId own = request.token_or_scored(request.first_valued() + i);
    best += best_of(own, values[i], most).front().first == own ? "true" : "false";
  }
  out += "],\"best\":[" + best + ']';
  if (request.sampling.score_best > 0) {
    out += ",\"last\":{";
    for (const auto& [token, logprob] : best_of(request.scored_last, values.back(), most)) {
      out += out.back() == '{' ? "" : ",";
      out += fmt::format("\"{}\":", token);
      append_json_logprob(out, logprob);
    }
    out += '}';
  }
  out += '}';
}

void append_chat_logprobs(std::string& out, const Request& request, const Tokenizer* tokenizer,
                          std::span<const TokenId> tokens, std::span<const TokenLogprobs> values) {
  check(tokens.size() == values.size(), "each token of an answer with logprobs has its own");
  const Tokenizer* names = request.sampling.tokens_as_ids ? nullptr : tokenizer;
  const auto most = static_cast<std::size_t>(request.sampling.logprobs);
  out += "{\"content\":[";
  for (std::size_t i = 0; i < values.size(); ++i) {
    out += i > 0 ? ",{" : "{";
    append_chat_token(out, tokens[i], values[i].logprob, names);
    out += ",\"top_logprobs\":[";
    bool later = false;
    for (const auto& [token, logprob] : best_of(tokens[i], values[i], most)) {
      out += std::exchange(later, true) ? ",{" : "{";
      append_chat_token(out, token, logprob, names);
      out += '}';
    }
    out += "]}";
  }
  out += "]}";
}

}  // namespace poise
