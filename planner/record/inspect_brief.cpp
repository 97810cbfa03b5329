#include "planner/record/inspect_brief.h"

#include <algorithm>
#include <memory>

#include "common/files/json.h"
#include "planner/record/inspect.h"

namespace poise {
namespace {

const char* name_of(Successor successor) {
  switch (successor) {
    case Successor::attempt:
      return "attempt";
    case Successor::planner:
      return "planner";
    case Successor::gpu_executor:
      return "gpu_executor";
  }
  return "?";
}

bool is_token(const std::unique_ptr<messages::SampleResultT>& result) { return result->token >= 0; }

}  // namespace

std::string brief_json(const LoggedIteration& iteration, const LogFacts& facts) {
  if (!iteration.done) {
    return "";
  }
  std::uint64_t sequences = 0, rows = 0, context = 0;
  for (const auto& batch : iteration.tables.mini_batches) {
    sequences += batch->sequences.size();
    rows += batch->tokens.size();
    for (const messages::Sequence& sequence : batch->sequences) {
      context += sequence.context();
    }
  }
  nlohmann::ordered_json json{
      {"type", "iteration"},
      {"iteration", iteration.tables.iteration},
      {"generates_only", kind_of(iteration.tables).decodes},
      {"sent_s", iteration.sent},
      {"done_s", *iteration.done},
      {"mini_batches", iteration.tables.mini_batches.size()},
      {"sequences", sequences},
      {"rows", rows},
      {"context", context},
      {"tokens", std::ranges::count_if(iteration.answers.results, is_token)}};
  if (has_reports(iteration)) {
    json["balance"] = json_of(sums_of(iteration, facts));
  }
  return json.dump() + "\n";
}

std::string successor_json(Successor successor, double time) {
  const nlohmann::ordered_json json{
      {"type", "successor"}, {"of", name_of(successor)}, {"time_s", time}};
  return json.dump() + "\n";
}

void RequestTimes::take(const LoggedIteration& iteration) {
  if (!iteration.done) {
    return;
  }
  for (const auto& batch : iteration.tables.mini_batches) {
    for (std::size_t i = 0; i < batch->sequences.size(); ++i) {
      const messages::Sequence& sequence = batch->sequences[i];
      const auto [found, is_new] = requests_.try_emplace(sequence.request());
      Times& times = found->second;
      if (is_new) {
        times.first = iteration.sent;
      }
      times.done = *iteration.done;
      times.rows += sequence.new_tokens();
      if (i < batch->prompt_tokens.size()) {
        times.prompt_tokens = batch->prompt_tokens[i];
      }
    }
  }
  for (const auto& result : iteration.answers.results) {
    const auto found = requests_.find(result->request);
    if (found != requests_.end() && is_token(result)) {
      ++found->second.tokens;
    }
  }
}

std::string RequestTimes::json() const {
  std::string lines;
  for (const auto& [request, times] : requests_) {
    const nlohmann::ordered_json json{{"type", "request"},
                                      {"request", request},
                                      {"first_s", times.first},
                                      {"done_s", times.done},
                                      {"prompt_tokens", times.prompt_tokens},
                                      {"rows", times.rows},
                                      {"tokens", times.tokens}};
    lines += json.dump() + "\n";
  }
  return lines;
}

}  // namespace poise
