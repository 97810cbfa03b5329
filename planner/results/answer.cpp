#include "planner/results/answer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/trouble.h"
#include "planner/results/answer_logprobs.h"
#include "planner/results/result_json.h"
#include "planner/results/result_line.h"
#include "planner/tokenizer/detokenizer.h"
#include "planner/tokenizer/tokenizer.h"

namespace poise {
namespace {

const char* name_of(FinishReason reason) {
  check(reason != FinishReason::error, "an answer that was broken off has no finish reason");
  return reason == FinishReason::stop ? "stop" : "length";
}

void append_ids(std::string& out, std::span<const TokenId> ids) {
  out += '[';
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i > 0) {
      out += ',';
    }
    append_json_integer(out, ids[i]);
  }
  out += ']';
}

// What can be written: minus infinity can (an impossible token), the others are no probability.
bool is_probability(float logprob) { return !std::isnan(logprob) && logprob < HUGE_VALF; }

bool is_sound(const TokenLogprobs& value) {
  return is_probability(value.logprob) &&
         std::ranges::all_of(value.top, is_probability, &std::pair<TokenId, float>::second);
}

// Bytes of the longest part that `word` begins and `text` ends with; the whole word is none. In time that grows with the
// word alone (Knuth, Morris, Pratt): `borders` of its parts are the same measure of that part and itself.
std::size_t begun_part(std::string_view word, std::string_view text,
                       std::vector<std::size_t>& borders) {
  const std::size_t most = std::min(word.size() - 1, text.size());
  borders.assign(most + 1, 0);
  const auto extended = [&](std::size_t part, char next) {
    while (part > 0 && (part == most || word[part] != next)) {
      part = borders[part];
    }
    return part < most && word[part] == next ? part + 1 : part;
  };
  for (std::size_t size = 2; size <= most; ++size) {
    borders[size] = extended(borders[size - 1], word[size - 1]);
  }
  std::size_t part = 0;
  for (const char next : text.substr(text.size() - most)) {
    part = extended(part, next);
  }
  return part;
}

bool holds(const std::vector<TokenId>& ids, TokenId id) {
  return std::ranges::find(ids, id) != ids.end();
}

}  // namespace

Answer::Answer(const Request& request, const Tokenizer* tokenizer, const std::vector<TokenId>& eos)
    : request_(&request), tokenizer_(tokenizer), eos_(&eos) {
  if (tokenizer_ != nullptr) {
    detokenizer_ =
        std::make_unique<Detokenizer>(*tokenizer_,
                                      /*skip_special_tokens=*/!request.sampling.keep_special,
                                      /*continues=*/request.sampling.echo);
  }
  check(tokenizer_ != nullptr || request.sampling.stop.empty(),
        "stop strings without a tokenizer were refused");
}

Answer::Answer(Answer&&) noexcept = default;
Answer& Answer::operator=(Answer&&) noexcept = default;
Answer::~Answer() = default;

void Answer::set_prompt_values(std::vector<TokenLogprobs> values) {
  check(request_->sampling.prompt_logprobs(), "prompt values are of a request that asked for them");
  check(size_ == 0 && prompt_values_.empty(), "prompt values come once, before any token");
  check(values.size() == request_->valued(), "every prompt token but the first has a value");
  prompt_values_ = std::move(values);
  if (!std::ranges::all_of(prompt_values_, is_sound)) {
    break_off();
  }
}

void Answer::push(TokenId token, TokenLogprobs logprobs) {
  check(!finished(), "an answer that is finished takes no token");
  const SamplingParams& sampling = request_->sampling;
  check(size_ < sampling.max_tokens, "an answer has at most max_tokens tokens");
  const bool wants_values = sampling.logprobs >= 0;
  if (wants_values && !is_sound(logprobs)) {
    break_off();
    return;
  }
  ++size_;
  if (wants_values) {
    values_.push_back(std::move(logprobs));
  }

  // As in vLLM: ids are asked before lengths, and the id that stops leaves no text unless it is wanted.
  const bool is_eos = !sampling.ignore_eos && holds(*eos_, token);
  const bool is_stop_id = !is_eos && holds(sampling.stop_token_ids, token);
  const bool stops = is_eos || is_stop_id;
  const bool is_last = size_ == sampling.max_tokens;
  if (is_stop_id) {
    stop_id_ = token;
  }

  const std::size_t searched = text_.size();
  if (detokenizer_) {
    if (!stops || sampling.include_stop) {
      text_ += detokenizer_->push(token);
    }
    if (stops || is_last) {
      text_ += detokenizer_->finish();
    }
  }
  // What is held back may yet change, but it is the text if the answer ends now.
  const std::size_t certain = text_.size();
  // Among the first min_tokens no stop string is looked for.
  const bool may_stop = !sampling.stop.empty() && size_ > sampling.min_tokens;
  if (detokenizer_ && may_stop) {
    text_ += detokenizer_->held_back();
  }
  const bool stopped = may_stop && cut_at_stop_string(searched);
  if (!stopped) {
    text_.resize(certain);
  }
  if (stopped || stops) {
    finish(FinishReason::stop);
  } else if (is_last) {
    finish(FinishReason::length);
  }
}

// Finds the stop string that begins first in text_, of which the first `searched` bytes hold none
// whole, and ends the text before it.
bool Answer::cut_at_stop_string(std::size_t searched) {
  std::size_t first = std::string::npos;
  for (const std::string& stop : request_->sampling.stop) {
    const std::size_t from = searched - std::min(searched, stop.size() - 1);
    const std::size_t at = text_.find(stop, from);
    if (at < first) {
      first = at;
      stop_string_ = &stop;
    }
  }
  if (first == std::string::npos) {
    return false;
  }
  text_.resize(first + (request_->sampling.include_stop ? stop_string_->size() : 0));
  stop_id_.reset();
  return true;
}

std::string_view Answer::settled_text() const {
  const std::string_view text = text_;
  std::size_t begun = 0;
  std::vector<std::size_t> borders;
  for (const std::string& stop : request_->sampling.stop) {
    begun = std::max(begun, begun_part(stop, text, borders));
  }
  return text.substr(0, text.size() - begun);
}

void Answer::append_logprobs_from(std::string& out, std::span<const TokenId> tokens,
                                  std::size_t first) const {
  check(request_->sampling.logprobs >= 0 && !request_->sampling.echo,
        "these logprobs are wanted, and are the answer's alone");
  const auto values = std::span(values_).subspan(first);
  const auto chosen = tokens.subspan(first);
  if (request_->chat) {
    append_chat_logprobs(out, *request_, tokenizer_, chosen, values);
  } else {
    append_logprobs(out, *request_, tokenizer_, {}, chosen, values);
  }
}

void Answer::finish(FinishReason reason) {
  reason_ = reason;
  detokenizer_.reset();
}

void Answer::break_off(bool barred) {
  check(!finished(), "an answer that is finished cannot be broken off");
  barred_ = barred;
  finish(FinishReason::error);
}

void Answer::finish_scoring() {
  check(request_->sampling.max_tokens == 0 && !finished(), "this request only scores its prompt");
  finish(FinishReason::length);
}

std::string Answer::choice_text(std::span<const TokenId> tokens) const {
  check(finished() && std::ssize(tokens) == size_,
        "an answer is written with the tokens it was made of");
  std::string out = fmt::format("{{\"index\":{},", request_->choice);
  append_text(out, tokens);
  out += fmt::format(",\"finish_reason\":\"{}\",\"stop_reason\":", name_of(*reason_));
  if (stop_string_ != nullptr) {
    append_json_text(out, *stop_string_);
  } else if (stop_id_) {
    append_json_integer(out, *stop_id_);
  } else {
    out += "null";
  }
  if (request_->sampling.return_token_ids) {
    out += ",\"token_ids\":";
    append_ids(out, tokens);
  }
  return out + (request_->chat ? "}" : of_the_prompt() + "}");
}

std::string Answer::beside_choices() const { return request_->chat ? of_the_prompt() : ""; }

// As in vLLM: what is told of the prompt stands in a completion's choice, but beside the choices of a chat.
std::string Answer::of_the_prompt() const {
  std::string out;
  if (request_->sampling.return_token_ids) {
    out += ",\"prompt_token_ids\":";
    std::vector<TokenId> given = request_->prompt;
    if (request_->sampling.score_from > 0) {
      given.push_back(request_->scored_last);
    }
    append_ids(out, given);
  }
  if (request_->sampling.score_from > 0) {
    out += ",\"scores\":";
    append_scores(out, *request_, prompt_values_);
  } else if (request_->sampling.prompt_top >= 0) {
    out += ",\"prompt_logprobs\":";
    append_prompt_logprobs(out, *request_, tokenizer_, prompt_values_);
  }
  return out;
}

std::string response_body(const Request& request, std::span<const std::string> choices,
                          const std::string& beside, std::size_t tokens,
                          const std::string& model_name, std::int64_t created) {
  std::string out = fmt::format("{{\"id\":\"{}\",\"object\":\"{}\",\"created\":{}",
                                completion_id(request.line(), request.chat),
                                request.chat ? "chat.completion" : "text_completion", created);
  out += ",\"model\":";
  append_json_text(out, model_name);
  out += ",\"choices\":[";
  for (const std::string& choice : choices) {
    out += out.back() == '[' ? "" : ",";
    out += choice;
  }
  out += ']' + beside;
  const std::size_t prompt = request.given_tokens();
  out += fmt::format(
      ",\"usage\":{{\"prompt_tokens\":{},\"completion_tokens\":{},\"total_tokens\":{}}}}}", prompt,
      tokens, prompt + tokens);
  return out;
}

// What the choice says, and its logprobs.
void Answer::append_text(std::string& out, std::span<const TokenId> tokens) const {
  const SamplingParams& sampling = request_->sampling;
  if (request_->chat) {
    out += "\"message\":{\"role\":\"assistant\",\"content\":";
    append_json_text(out, text_);
    out += ",\"refusal\":null}";
  } else {
    out += "\"text\":";
    append_json_text(out, sampling.echo ? request_->prompt_text.get() + text_ : text_);
  }
  out += ",\"logprobs\":";
  if (sampling.logprobs < 0) {
    out += "null";
  } else if (request_->chat) {
    append_chat_logprobs(out, *request_, tokenizer_, tokens, values_);
  } else {
    append_logprobs(out, *request_, tokenizer_, prompt_values_, tokens, values_);
  }
}

std::string Answer::error_line_text() const {
  check(finished() && *reason_ == FinishReason::error, "an error line is of an answer that failed");
  if (barred_) {
    return error_line(
        {request_->line(), request_->custom_id.get(),
         fmt::format("no token is left for place {} of the answer: allowed_token_ids, "
                     "bad_words, min_tokens and the answer's form together bar all of them",
                     size_ + 1),
         "", "no_token_allowed", 400});
  }
  return error_line({request_->line(), request_->custom_id.get(),
                     "the model's output is not finite for this request, no token follows from "
                     "it; its weights may be damaged",
                     "", "not_finite", 500});
}

}  // namespace poise
