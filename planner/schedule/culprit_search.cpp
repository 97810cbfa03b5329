#include "planner/schedule/culprit_search.h"

#include <algorithm>

#include "common/trouble.h"

namespace poise {
namespace {

const RequestPart* part_of(std::span<const RequestPart> iteration, RequestId request) {
  const auto found = std::ranges::find(iteration, request, &RequestPart::request);
  return found == iteration.end() ? nullptr : &*found;
}

}  // namespace

std::optional<RequestId> CulpritSearch::died(std::span<const RequestPart> iteration) {
  check(!iteration.empty(), "an executor that had no work died of no request");
  std::vector<RequestPart> common;
  for (const RequestPart& suspect : state_.suspects) {
    if (const RequestPart* part = part_of(iteration, suspect.request)) {
      common.push_back({suspect.request, std::max(suspect.end, part->end)});
    }
  }
  if (common.empty()) {
    state_ = {.suspects = {iteration.begin(), iteration.end()}, .searching = false};
    return std::nullopt;
  }
  if (iteration.size() == 1) {
    end();
    return common.front().request;
  }
  state_ = {.suspects = std::move(common), .searching = true};
  return std::nullopt;
}

void CulpritSearch::survived(std::span<const RequestPart> iteration) {
  std::erase_if(state_.suspects, [&](const RequestPart& suspect) {
    const RequestPart* part = part_of(iteration, suspect.request);
    return part != nullptr && part->end >= suspect.end;
  });
  state_.searching = state_.searching && !state_.suspects.empty();
}

std::vector<RequestId> CulpritSearch::probe() const {
  std::vector<RequestId> half;
  if (state_.searching) {
    for (std::size_t i = 0; i < (state_.suspects.size() + 1) / 2; ++i) {
      half.push_back(state_.suspects[i].request);
    }
  }
  return half;
}

}  // namespace poise
