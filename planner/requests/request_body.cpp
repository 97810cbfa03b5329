#include "planner/requests/request_body.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "common/trouble.h"
#include "planner/tokenizer/tokenizer.h"

namespace poise {
namespace {

// Bounds the work a single line can ask for at every token; far above what anybody uses.
constexpr std::size_t kMaxStopStrings = 1024;
constexpr std::size_t kMaxStopBytes = 1 << 16;  // of all; each token of a stream is compared with them
constexpr std::size_t kMaxStopIds = 1 << 16;
// Below this vLLM takes a temperature for 0: logits divided by it would leave float's range.
constexpr double kGreedyBelow = 1e-5;
// A rendered prompt has at most 16 MiB, and each byte of it may be escaped.
constexpr JsonLimits kEntryLimits{kMiB * 128, 8};

// Runs a getter of JsonObject and keeps the name of the field that it refuses.
template <typename Getter>
auto named(std::string_view name, const Getter& getter) {
  try {
    return getter();
  } catch (const Failure& failure) {
    throw BadRequest{failure.what(), std::string(name), kInvalid};
  }
}

std::vector<TokenId> ids_of(const RequestFields& body, const nlohmann::json& list,
                            const RequestRules& rules) {
  std::vector<TokenId> ids;
  ids.reserve(list.size());
  for (const nlohmann::json& element : list) {
    const auto id = as_integer(element);
    if (!id) {
      body.refuse("prompt", fmt::format("must hold token ids, not {}, at place {}",
                                        described(element), ids.size() + 1));
    }
    if (*id < 0 || *id >= rules.vocab_size) {
      body.refuse("prompt", fmt::format("must hold token ids from 0 to {}, not {}, at place {}",
                                        rules.vocab_size - 1, *id, ids.size() + 1));
    }
    ids.push_back(static_cast<TokenId>(*id));
  }
  if (ids.empty()) {
    body.refuse("prompt", "must not be an empty list");
  }
  return ids;
}

// "text", [ids], ["text"] or [[ids]]; harnesses send the last two with one element.
const nlohmann::json& only_prompt(const RequestFields& body) {
  const nlohmann::json* prompt = body.find("prompt");
  if (prompt == nullptr) {
    throw BadRequest{"\"prompt\" is missing", "prompt", kMissing};
  }
  if (prompt->is_string()) {
    return *prompt;
  }
  if (!prompt->is_array()) {
    body.refuse("prompt",
                fmt::format("must be a string or a list of token ids, not {}", described(*prompt)));
  }
  if (prompt->empty() || !(prompt->front().is_string() || prompt->front().is_array())) {
    return *prompt;
  }
  if (prompt->size() > 1) {
    body.refuse("prompt", fmt::format("holds {} prompts; only one on a line is answered for now",
                                      prompt->size()));
  }
  return prompt->front();
}

// `name`: the field that the text came from.
std::vector<TokenId> tokens_of(const RequestFields& body, const char* name, std::string_view text,
                               bool add_special, const RequestRules& rules) {
  std::vector<TokenId> tokens;
  try {
    tokens = rules.tokenizer->encode(text, add_special);
  } catch (const Failure& failure) {
    throw BadRequest{failure.what(), name, kInvalid};
  }
  if (tokens.empty()) {
    body.refuse(name, "must not be empty: this model's tokenizer adds no token of its own");
  }
  // A tokenizer may know more tokens than the model has rows.
  const auto beyond =
      std::ranges::find_if(tokens, [&](TokenId id) { return id < 0 || id >= rules.vocab_size; });
  if (beyond != tokens.end()) {
    body.refuse(name, fmt::format("holds a token with id {}; the model knows ids below {}", *beyond,
                                  rules.vocab_size));
  }
  return tokens;
}

// "truncate_prompt_tokens": the prompt's last tokens alone are kept, behind what the tokenizer puts
// before every text. Returns whether any was left out. -1 leaves room for `asked` tokens of answer, unless the prompt
// fits beside fewer of them.
bool truncate_prompt(const RequestFields& body, const RequestRules& rules, std::int64_t asked,
                     std::int64_t special, std::vector<TokenId>& prompt) {
  const auto wanted = body.integer("truncate_prompt_tokens", -1, rules.context);
  if (!wanted) {
    return false;
  }
  if (*wanted == 0) {
    body.refuse("truncate_prompt_tokens", "must be at least 1, or -1 for what the context leaves");
  }
  if (*wanted < 0 && std::ssize(prompt) + std::min<std::int64_t>(asked, 1) <= rules.context) {
    return false;
  }
  if (*wanted < 0 && asked >= rules.context) {
    body.refuse("truncate_prompt_tokens",
                fmt::format("cannot be -1 here: an answer of {} tokens leaves the prompt nothing of the "
                            "model's context, which holds {}; ask for fewer",
                            asked, rules.context));
  }
  const std::int64_t room = *wanted > 0 ? *wanted : rules.context - asked;
  const std::int64_t left_out = std::ssize(prompt) - room;
  if (left_out <= 0) {
    return false;
  }
  const auto first = prompt.begin() + std::min(special, room);
  prompt.erase(first, first + left_out);
  return true;
}

// How many tokens the tokenizer puts before `text`.
std::int64_t special_before(const RequestRules& rules, std::string_view text,
                            const std::vector<TokenId>& tokens) {
  const std::vector<TokenId> alone = rules.tokenizer->encode(text, false);
  const auto found = std::ranges::search(tokens, alone);
  return found.begin() - tokens.begin();
}

void read_prompt(const RequestFields& body, const RequestRules& rules, std::int64_t asked,
                 Request& request) {
  const nlohmann::json& prompt = only_prompt(body);
  const bool add_special = body.flag("add_special_tokens", true);
  if (!prompt.is_string()) {
    std::vector<TokenId> ids = ids_of(body, prompt, rules);
    truncate_prompt(body, rules, asked, 0, ids);
    request.prompt = std::move(ids);
    if (request.sampling.echo && rules.tokenizer != nullptr) {
      request.prompt_text = rules.tokenizer->decode(request.prompt);
    }
    return;
  }
  if (rules.tokenizer == nullptr) {
    body.refuse("prompt", "must be token ids: the run has no tokenizer (--skip-tokenizer-init)");
  }
  const auto& text = prompt.get_ref<const std::string&>();
  std::vector<TokenId> ids = tokens_of(body, "prompt", text, add_special, rules);
  const bool may_be_cut = body.find("truncate_prompt_tokens") != nullptr && add_special;
  const std::int64_t special = may_be_cut ? special_before(rules, text, ids) : 0;
  const bool cut = truncate_prompt(body, rules, asked, special, ids);
  request.prompt = std::move(ids);
  if (request.sampling.echo) {
    request.prompt_text = cut ? rules.tokenizer->decode(request.prompt) : text;
  }
}

std::vector<std::string> read_stop(const RequestFields& body, const RequestRules& rules) {
  const nlohmann::json* stop = body.find("stop");
  if (stop == nullptr) {
    return {};
  }
  std::vector<std::string> strings;
  const auto take = [&](const nlohmann::json& value) {
    if (!value.is_string()) {
      body.refuse("stop", fmt::format("must be a string or a list of strings, not {}{}",
                                      stop->is_array() ? "a list with " : "", described(value)));
    }
    if (value.get_ref<const std::string&>().empty()) {
      body.refuse("stop", "must not hold an empty string");
    }
    strings.push_back(value.get<std::string>());
  };
  if (!stop->is_array()) {
    take(*stop);
  } else {
    if (stop->size() > kMaxStopStrings) {
      body.refuse("stop", fmt::format("must hold at most {} strings, not {}", kMaxStopStrings,
                                      stop->size()));
    }
    std::ranges::for_each(*stop, take);
  }
  std::size_t bytes = 0;
  for (const std::string& one : strings) {
    bytes += one.size();
  }
  if (bytes > kMaxStopBytes) {
    body.refuse("stop", fmt::format("must hold at most {} bytes in all, not {}", kMaxStopBytes, bytes));
  }
  if (!strings.empty() && rules.tokenizer == nullptr) {
    body.refuse("stop", "needs a tokenizer: the run has none (--skip-tokenizer-init)");
  }
  return strings;
}

std::vector<TokenId> read_stop_ids(const RequestFields& body) {
  const nlohmann::json* list = body.find("stop_token_ids");
  if (list == nullptr) {
    return {};
  }
  if (!list->is_array()) {
    body.refuse("stop_token_ids",
                fmt::format("must be a list of token ids, not {}", described(*list)));
  }
  if (list->size() > kMaxStopIds) {
    body.refuse("stop_token_ids",
                fmt::format("must hold at most {} token ids, not {}", kMaxStopIds, list->size()));
  }
  std::vector<TokenId> ids;
  for (const nlohmann::json& element : *list) {
    const auto id = as_integer(element);
    // An id beyond the model's rows is accepted, as in vLLM: it is never sampled.
    if (!id || *id < 0 || *id > std::numeric_limits<TokenId>::max()) {
      body.refuse("stop_token_ids", fmt::format("must hold token ids, not {}", described(element)));
    }
    ids.push_back(static_cast<TokenId>(*id));
  }
  std::ranges::sort(ids);
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

SamplingParams read_sampling(const RequestFields& body, const RequestRules& rules) {
  SamplingParams sampling;
  const double temperature = body.number("temperature", 0, 2).value_or(1);
  sampling.temperature = temperature < kGreedyBelow ? 0 : static_cast<float>(temperature);

  const double top_p = body.number("top_p", 0, 1).value_or(1);
  if (top_p <= 0) {
    body.refuse("top_p", fmt::format("must be above 0 and at most 1, not {}", top_p));
  }
  sampling.top_p = std::max(static_cast<float>(top_p), std::numeric_limits<float>::min());

  const std::int64_t top_k = body.integer("top_k", -1).value_or(0);
  sampling.top_k = top_k <= 0 || top_k >= rules.vocab_size ? 0 : static_cast<std::int32_t>(top_k);

  // Negative seeds are seeds too: the 64 bits count.
  sampling.seed = static_cast<std::uint64_t>(
      body.integer("seed", std::numeric_limits<std::int64_t>::min()).value_or(0));

  sampling.prompt_top =
      static_cast<std::int32_t>(body.integer("prompt_logprobs", 0, 20).value_or(-1));
  sampling.include_stop = body.flag("include_stop_str_in_output");
  sampling.keep_special = !body.flag("skip_special_tokens", true);
  sampling.ignore_eos = body.flag("ignore_eos");
  sampling.return_token_ids = body.flag("return_token_ids");
  sampling.tokens_as_ids = body.flag("return_tokens_as_token_ids");
  sampling.stop = read_stop(body, rules);
  sampling.stop_token_ids = read_stop_ids(body);
  return sampling;
}

// What the context leaves of the tokens asked for.
std::int32_t granted_tokens(std::int64_t asked, std::size_t prompt, const RequestRules& rules,
                            const char* field) {
  const auto length = static_cast<std::int64_t>(prompt);
  const std::int64_t room = rules.context - length;
  if (room < 0) {
    throw BadRequest{fmt::format("\"{}\" is {} tokens long; the model's context holds {}", field,
                                 length, rules.context),
                     field, "context_length_exceeded"};
  }
  if (room == 0 && asked > 0) {
    throw BadRequest{
        fmt::format("\"{}\" is {} tokens long and leaves no room for an answer; the model's "
                    "context holds {}",
                    field, length, rules.context),
        field, "context_length_exceeded"};
  }
  return static_cast<std::int32_t>(std::min(asked, room));
}

// What both kinds of requests must hold of the model and the number of answers.
void check_common(const RequestFields& body, const RequestRules& rules) {
  // Which model runs was decided on the command line. Where it was given a name there, too, a request
  // for another was meant for another run.
  const auto model = body.string("model");
  if (model && !rules.model.empty() && *model != rules.model) {
    body.refuse("model",
                fmt::format("must be \"{}\", the name this run serves, not {}", rules.model,
                            described(*model)),
                "model_not_found");
  }
  refuse_unsupported(body);
}

// How many answers the line wants: "n", and "best_of" where it is the same.
std::int32_t read_choices(const RequestFields& body, const SamplingParams& sampling) {
  const std::int64_t n = body.integer("n", 1, kMostChoices).value_or(1);
  if (n > 1 && sampling.temperature == 0) {
    body.refuse("n", "must be 1 with a temperature of 0: all answers would be the same");
  }
  if (const auto best_of = body.integer("best_of", 1); best_of.value_or(n) != n) {
    body.refuse(
        "best_of",
        fmt::format("must be n, {}, not {}: no answer is made and thrown away", n, *best_of),
        kUnsupported);
  }
  return static_cast<std::int32_t>(n);
}

// The prompt that was rendered, or the error that it became.
std::string rendered_prompt(std::string_view entry) {
  if (entry.empty()) {
    throw BadRequest{
        "this line was not taken for a chat line: write its \"url\" as \"/v1/chat/completions\"",
        "url", kInvalid};
  }
  const std::string what = "the rendered chat lines";
  const nlohmann::json document = parse_json(entry, what, kEntryLimits);
  const JsonObject object(document, what);
  if (const auto error = object.string("error")) {
    throw BadRequest{*error, object.string("param").value_or(""),
                     object.string("code").value_or(kInvalid)};
  }
  const auto prompt = object.string("prompt");
  if (!prompt) {
    object.refuse("prompt", "is missing");
  }
  return *prompt;
}

// Only the prompt's tokens from `from` on are scored, each by the tokens before it. The last is never fed, so it may lie
// behind the context.
void read_scored(const RequestFields& body, const RequestRules& rules, std::int64_t from,
                 Request& request) {
  if (request.sampling.echo || request.sampling.logprobs >= 0 ||
      request.sampling.prompt_top >= 0 || body.integer("max_tokens", 0).value_or(0) != 0 ||
      body.integer("n", 1).value_or(1) != 1) {
    body.refuse("score_from",
                "only scores the prompt: leave out \"max_tokens\", \"n\", \"echo\", "
                "\"logprobs\" and \"prompt_logprobs\"");
  }
  RequestRules one_more = rules;
  ++one_more.context;
  read_prompt(body, one_more, 0, request);
  if (std::ssize(request.prompt) > one_more.context) {
    throw BadRequest{
        fmt::format("\"prompt\" is {} tokens long; the model's context holds {}, and the last one "
                    "beside it if it is only scored",
                    request.prompt.size(), rules.context),
        "prompt", "context_length_exceeded"};
  }
  if (request.prompt.size() < 2) {
    body.refuse("score_from", "needs a prompt of two tokens: the first has none before it");
  }
  if (from >= std::ssize(request.prompt)) {
    body.refuse("score_from", fmt::format("must be below {}, the number of the prompt's tokens",
                                          request.prompt.size()));
  }
  request.sampling.max_tokens = 0;
  read_wishes(body, rules, 0, request);
  if (request.sampling.wishes != nullptr || request.sampling.min_p > 0) {
    body.refuse("score_from",
                "scores with the model's own logits: leave out penalties, \"logit_bias\", "
                "\"bad_words\", \"allowed_token_ids\" and \"min_p\"");
  }
  request.sampling.score_best =
      static_cast<std::int32_t>(body.integer("score_best", 0, 20).value_or(0));
  request.sampling.prompt_top = std::max(request.sampling.score_best, 1);
  request.sampling.score_from = static_cast<std::int32_t>(from);
  std::vector<TokenId> fed = request.prompt;
  request.scored_last = fed.back();
  fed.pop_back();
  request.prompt = std::move(fed);
}

// "logprobs" says whether, "top_logprobs" how many beside the chosen token.
std::int32_t chat_logprobs(const RequestFields& body) {
  const auto top = body.integer("top_logprobs", 0, 20);
  const bool wanted = body.flag("logprobs");
  if (top.value_or(0) > 0 && !wanted) {
    body.refuse("top_logprobs", "needs \"logprobs\": true");
  }
  return wanted ? static_cast<std::int32_t>(top.value_or(0)) : -1;
}

}  // namespace

std::optional<std::int64_t> RequestFields::integer(std::string_view name, std::int64_t min,
                                                   std::int64_t max) const {
  return named(name, [&] { return object_.integer(name, {min, max}); });
}

std::optional<double> RequestFields::number(std::string_view name, double min, double max) const {
  return named(name, [&] { return object_.number(name, {min, max}); });
}

bool RequestFields::flag(std::string_view name, bool absent) const {
  return named(name, [&] { return object_.boolean(name); }).value_or(absent);
}

std::optional<std::string> RequestFields::string(std::string_view name) const {
  return named(name, [&] { return object_.string(name); });
}

void RequestFields::refuse(std::string_view name, const std::string& rule, const char* code) const {
  throw BadRequest{fmt::format("\"{}\" {}", name, rule), std::string(name), code};
}

Request read_body(const RequestFields& body, const RequestRules& rules) {
  check_common(body, rules);
  Request request;
  request.sampling = read_sampling(body, rules);
  request.sampling.logprobs =
      static_cast<std::int32_t>(body.integer("logprobs", 0, 20).value_or(-1));
  request.sampling.echo = body.flag("echo");
  if (const auto from = body.integer("score_from", 1)) {
    read_scored(body, rules, *from, request);
    return request;
  }
  const std::int64_t asked = body.integer("max_tokens", 0).value_or(16);
  if (asked == 0 && !request.sampling.echo) {
    body.refuse("max_tokens",
                "must be at least 1; 0 only scores a prompt and needs \"echo\": true");
  }
  read_prompt(body, rules, asked, request);
  request.sampling.max_tokens = granted_tokens(asked, request.prompt.size(), rules, "prompt");
  read_wishes(body, rules, asked, request);
  request.choices = read_choices(body, request.sampling);
  return request;
}

Request read_chat_body(const RequestFields& body, std::string_view entry,
                       const RequestRules& rules) {
  check_common(body, rules);
  refuse_unsupported_in_chat(body);
  Request request;
  request.chat = true;
  request.sampling = read_sampling(body, rules);
  request.sampling.logprobs = chat_logprobs(body);
  const auto most = body.integer("max_tokens", 1);
  const auto asked = body.integer("max_completion_tokens", 1);
  if (rules.tokenizer == nullptr) {
    body.refuse("messages", "need a tokenizer: the run has none (--skip-tokenizer-init)");
  }
  // The template writes BOS and the like itself.
  std::vector<TokenId> prompt = tokens_of(body, "messages", rendered_prompt(entry), false, rules);
  const std::optional<std::int64_t> limit = asked ? asked : most;
  truncate_prompt(body, rules, limit.value_or(1), 0, prompt);
  request.prompt = std::move(prompt);
  request.sampling.max_tokens =
      granted_tokens(limit.value_or(rules.context), request.prompt.size(), rules, "messages");
  read_wishes(body, rules, limit.value_or(rules.context), request);
  request.choices = read_choices(body, request.sampling);
  return request;
}

}  // namespace poise
