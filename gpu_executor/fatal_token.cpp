#include "gpu_executor/fatal_token.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace poise {

void die_of_fatal_token(const messages::Iteration& iteration) {
  static const char* const given = std::getenv("POISE_FATAL_TOKEN");
  if (given == nullptr || iteration.mini_batches() == nullptr) {
    return;
  }
  static const int token = std::atoi(given);
  for (const messages::MiniBatch* batch : *iteration.mini_batches()) {
    const auto* tokens = batch->tokens();
    if (tokens != nullptr && std::ranges::find(*tokens, token) != tokens->end()) {
      for (volatile bool hangs = std::strstr(given, ":hang") != nullptr; hangs;) {
      }
      std::abort();
    }
  }
}

}  // namespace poise
