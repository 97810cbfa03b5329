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

  std::int32_t most_context() const { return prompt + std::max(answer - 1, 0); }
};
std::vector<RequestSize> sizes_of(std::span<const Request* const> requests);

}  // namespace poise
