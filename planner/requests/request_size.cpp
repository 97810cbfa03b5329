#include "planner/requests/request_size.h"

namespace poise {

std::int32_t LogitWishes::most_edits(std::int32_t max_tokens) const {
  const bool penalised = repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0;
  return static_cast<std::int32_t>(bias.size() + bad_words.size() + allowed.size() +
                                   barred_at_first.size() + prompt_tokens.size()) +
         (penalised ? max_tokens : 0);
}

RequestSize size_of(const Request& request) {
  const SamplingParams& sampling = request.sampling;
  return {.id = request.id,
          .prompt = static_cast<std::int32_t>(request.prompt.size()),
          .answer = sampling.max_tokens,
          .edits = sampling.wishes ? sampling.wishes->most_edits(sampling.max_tokens) : 0};
}

std::vector<RequestSize> sizes_of(std::span<const Request* const> requests) {
  std::vector<RequestSize> sizes;
  sizes.reserve(requests.size());
  for (const Request* request : requests) {
    sizes.push_back(size_of(*request));
  }
  return sizes;
}

}  // namespace poise
