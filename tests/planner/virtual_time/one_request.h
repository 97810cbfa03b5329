#pragma once
// A mini-batch of one request, for tests in virtual time.

#include <cstdint>
#include <memory>

#include "common/messages_generated.h"
#include "common/units.h"

namespace poise::testing_support {

// It has so many full blocks of each kind on the host, and so many new rows.
inline std::unique_ptr<messages::MiniBatchT> one_request(std::size_t id, std::uint32_t act,
                                                         std::uint32_t kv, std::uint32_t rows) {
  using messages::Kind, messages::Place;
  auto batch = std::make_unique<messages::MiniBatchT>();
  batch->id = static_cast<std::uint32_t>(id);
  batch->tokens.assign(rows, 1);
  batch->sequences.emplace_back(1, (act + kv) * kBlockTokens, rows, 0, 0);
  if (kv > 0) {  // in the message before the ACT blocks
    batch->loads.emplace_back(Kind::Kv, Place::Host, kBlockTokens, kv, 0, 0);
  }
  if (act > 0) {
    batch->loads.emplace_back(Kind::Act, Place::Host, kBlockTokens, act, 0, 0);
    batch->regenerate.emplace_back(0, act);
  }
  return batch;
}

}  // namespace poise::testing_support
