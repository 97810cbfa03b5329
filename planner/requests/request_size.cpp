#include "planner/requests/request_size.h"

namespace poise {

std::int32_t LogitWishes::most_edits(std::int32_t max_tokens) const {
  return mask_edits +
         static_cast<std::int32_t>(constant.size() + bad_words.size() + barred_at_first.size()) +
         (penalises() ? max_tokens : 0);
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
