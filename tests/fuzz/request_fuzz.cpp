// One line of a request file, read with a tokenizer and without one. It becomes a request that keeps all rules or an
// error; both make one sound result line. Nothing is thrown.

#include "common/files/json.h"
#include "planner/results/result_line.h"
#include "tests/fuzz/fuzzing.h"
#include "tests/planner/requests/request_support.h"

namespace poise::fuzzing {
namespace {

constexpr RequestId kLine{7};

void check_result(const std::string& line, bool error) {
  expect(line.find('\n') == std::string::npos, "a result is one line");
  const ResultMark mark = read_result_line(line, "a result line");
  expect(mark.line == kLine && mark.error == error, "a result line says what it is");
}

void check_request(const Request& request, const RequestRules& rules, bool lines) {
  const SamplingParams& sampling = request.sampling;
  expect(request.id == kLine && !request.custom_id.empty() && !request.prompt.empty(),
         "a request has a line, a name and a prompt");
  expect(std::ranges::all_of(request.prompt,
                             [&](TokenId id) { return id >= 0 && id < rules.vocab_size; }),
         "a prompt's tokens are of the vocabulary");
  const auto tokens = static_cast<std::int64_t>(request.prompt.size()) + sampling.max_tokens;
  expect(tokens <= rules.context && request.most_context() <= rules.context &&
             sampling.max_tokens >= (sampling.echo || sampling.score_from > 0 ? 0 : 1),
         "prompt and answer fit the context");
  expect(sampling.score_from >= 0 && (sampling.score_from == 0 || request.valued() > 0) &&
             sampling.score_from <= std::ssize(request.prompt) &&
             request.scored_last < rules.vocab_size,
         "what is scored lies behind the first token");
  expect(sampling.temperature >= 0 && sampling.temperature <= 2 && sampling.top_p > 0 &&
             sampling.top_p <= 1 && sampling.top_k >= 0 && sampling.top_k < rules.vocab_size &&
             sampling.logprobs >= -1 && sampling.logprobs <= 20,
         "sampling parameters are in their ranges");
  expect(std::ranges::is_sorted(sampling.stop_token_ids) &&
             std::ranges::none_of(sampling.stop, &std::string::empty),
         "stops are sound");
  if (lines) {
    check_result(answered_line(request.id, request.custom_id, "{}"), false);
  }
}

// With `lines`, what would be written of it is read again, which takes as long as all else.
void read(std::string_view text, const RequestRules& rules, bool lines) {
  const ParsedLine parsed = parse_request(kLine, text, rules);
  if (const auto* request = std::get_if<Request>(&parsed)) {
    // nlohmann itself ends at a NUL.
    expect(text.find('\0') == std::string_view::npos && nlohmann::json::accept(text),
           "a request is JSON");
    check_request(*request, rules, lines);
    return;
  }
  const auto& error = std::get<RequestError>(parsed);
  expect_sentence(error.message);
  expect(error.line == kLine && error.status == 400 && !error.code.empty(),
         "an error says what it is");
  expect(nlohmann::json::accept(text) || error.code == "invalid_json",
         "what is no JSON is called so");
  if (lines) {
    check_result(error_line(error), true);
  }
}

void run_request(Input input) {
  const std::uint8_t* data = input.data();
  const std::size_t size = input.size();
  static const Tokenizer tokenizer = testing_support::byte_tokenizer();
  RequestRules rules{.context = 64, .vocab_size = testing_support::kRows, .tokenizer = &tokenizer};
  const std::string_view text = fuzzing::text_of({data, size});
  fuzzing::read(text, rules, true);
  rules.tokenizer = nullptr;
  rules.model = "poise";
  fuzzing::read(text, rules, false);
}

}  // namespace

const Target kRequestTarget{"request", run_request};

}  // namespace poise::fuzzing
