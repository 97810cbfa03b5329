#pragma once
// How long a request is, without its tokens: all that planning its memory takes.

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "planner/requests/request.h"

namespace poise {

struct RequestSize {
  RequestId id;
  std::int32_t prompt = 0;  // tokens
  std::int32_t answer = 0;  // at most
  std::int32_t edits = 0;   // of logits, at most, each time a token is sampled

  std::int32_t most_context() const { return prompt + std::max(answer - 1, 0); }
};
RequestSize size_of(const Request& request);
std::vector<RequestSize> sizes_of(std::span<const Request* const> requests);

}  // namespace poise
