#include "planner/requests/request_size.h"

namespace poise {

std::vector<RequestSize> sizes_of(std::span<const Request* const> requests) {
  std::vector<RequestSize> sizes;
  for (const Request* request : requests) {
    sizes.push_back({request->id, static_cast<std::int32_t>(request->prompt.size()),
                     request->sampling.max_tokens});
  }
  return sizes;
}

}  // namespace poise
