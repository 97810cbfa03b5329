#pragma once
// Compares the answers of a replayed iteration with those that a log recorded, bit by bit: tokens and
// log probabilities. Pure; one thread.

#include <cstdint>
#include <optional>
#include <string>

#include "common/messages_generated.h"

namespace poise {

class AnswersCompared {
 public:
  struct Difference {
    std::uint64_t iteration = 0;
    std::uint32_t request = 0;
    std::string what;                // "token", "logprob of token 5"
    std::string recorded, replayed;  // as text
  };
  struct Count {
    std::uint64_t all = 0, differ = 0;
  };

  void take(std::uint64_t iteration, const messages::IterationDoneT& recorded,
            const messages::IterationDoneT& replayed);

  std::uint64_t iterations() const { return iterations_; }
  const Count& tokens() const { return tokens_; }
  const Count& logprobs() const { return logprobs_; }
  // Answers that differ in shape: of another request, or with other numbers of log probabilities.
  std::uint64_t shapes_differ() const { return shapes_differ_; }
  const std::optional<Difference>& first() const { return first_; }

 private:
  struct Place {
    std::uint64_t iteration;
    std::uint32_t request;
  };

  void take(const Place& place, const messages::SampleResultT& recorded,
            const messages::SampleResultT& replayed);
  void take(const Place& place, const messages::LogprobRowT& recorded,
            const messages::LogprobRowT& replayed);
  void take_token(const Place& place, const char* what, std::int32_t recorded,
                  std::int32_t replayed);
  void take_logprob(const Place& place, std::int32_t token, float recorded, float replayed);
  void take_shape(const Place& place, const char* what, std::size_t recorded, std::size_t replayed);
  void differs(const Place& place, std::string what, std::string recorded, std::string replayed);

  std::uint64_t iterations_ = 0;
  Count tokens_, logprobs_;
  std::uint64_t shapes_differ_ = 0;
  std::optional<Difference> first_;
};

}  // namespace poise
