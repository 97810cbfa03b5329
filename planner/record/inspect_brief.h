#pragma once
// `poise inspect --json --brief`: a line for each iteration, with sums in place of orders and tables, and
// at the end of the log a line for each request: when its first rows were ordered and when its last token
// was there. It is a hundredth of the whole, for readers of long runs. Its memory grows with the number of
// requests alone. Iterations that were not finished are left out. One thread.

#include <cstdint>
#include <map>
#include <string>

#include "planner/record/log_digest.h"

namespace poise {

std::string brief_json(const LoggedIteration& iteration, const LogFacts& facts);
// Another process, or another attempt, goes on from here.
std::string successor_json(Successor successor, double time);

class RequestTimes {
 public:
  void take(const LoggedIteration& iteration);
  std::string json() const;  // by request

 private:
  struct Times {
    double first = 0, done = 0;  // seconds since the log began
    std::uint64_t rows = 0, tokens = 0;
    std::uint32_t prompt_tokens = 0;
  };
  std::map<std::uint32_t, Times> requests_;
};

}  // namespace poise
