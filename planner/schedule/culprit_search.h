#pragma once
// Finds the request that kills the executor. When an executor died with an iteration under way, each
// request of that iteration is a suspect; after a second death that can be of the same request, only
// half of the suspects run in an iteration, until one that runs alone dies again: that is the culprit.
// A suspect is cleared once it got past the rows that were under way when it died, so a death that no
// request caused (kill -9, a machine short of memory) costs some small iterations and no request.
//
// A function of the calls made; one thread. The number of deaths after the second is at most the
// logarithm of the number of suspects and two: each one halves them.

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "common/units.h"

namespace poise {

// A request of an iteration, and how many tokens of its text have run once the iteration is done.
struct RequestPart {
  RequestId request;
  std::int32_t end;

  friend bool operator==(const RequestPart&, const RequestPart&) = default;
};

class CulpritSearch {
 public:
  struct State {
    std::vector<RequestPart> suspects;  // oldest first; how far they have to come
    bool searching = false;

    friend bool operator==(const State&, const State&) = default;
  };

  CulpritSearch() = default;
  explicit CulpritSearch(State state) : state_(std::move(state)) {}

  // The executor died while this iteration was under way. Returns the culprit once it is known; it is
  // no suspect any more. REQUIRES: not empty, oldest first.
  std::optional<RequestId> died(std::span<const RequestPart> iteration);
  // The iteration was done.
  void survived(std::span<const RequestPart> iteration);
  // The requests that may run in the next iteration; empty: all.
  std::vector<RequestId> probe() const;
  // The search cannot go on: all requests run again.
  void end() { state_ = {}; }

  bool searching() const { return state_.searching; }
  const State& state() const { return state_; }

 private:
  State state_;
};

}  // namespace poise
