#pragma once
// One mini-batch of an iteration's tables, checked before anything is done with it
// (gpu_executor/order_check.h): in the order in which the tables depend on one another. Fails with the
// first thing that cannot be.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "common/trouble.h"
#include "gpu_executor/order_check.h"

namespace poise {

class BatchCheck {
 public:
  BatchCheck(const messages::MiniBatch& batch, const ModelShape& shape, const DeviceLimits& limits,
             const PoolPartition& pool)
      : batch_(batch),
        shape_(shape),
        limits_(limits),
        pool_(pool),
        kv_(static_cast<std::size_t>(limits.kv_slots)),
        act_(static_cast<std::size_t>(limits.act_slots)) {}

  void run();

 private:
  // What a mini-batch does with one slot of the KV buffer, or of the ACT and regenerated buffers.
  struct Slot {
    std::uint32_t block = 0;                        // that was loaded into it …
    messages::Place place = messages::Place::Host;  // … from there
    std::uint16_t loaded = 0;                       // rows, one bit each, as below
    std::uint16_t read = 0;                         // by a sequence as its context
    std::uint16_t written = 0;                      // by new rows
    std::uint16_t made = 0;  // of them, those of the entry below, whose block is kept nowhere
    std::uint32_t entry = 0, position = 0, request = 0;
    bool regenerated = false;
  };

  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> what, Args&&... args) const {
    fail("mini-batch {}: {}", batch_.id(), fmt::format(what, std::forward<Args>(args)...));
  }

  void check_sizes();
  void check_tokens() const;
  // They cover the rows one behind the other.
  void check_sequences();
  void check_stores() const;
  // New rows are written into the device's KV blocks whether or not a store says so. Only what stores
  // say is kept apart from other mini-batches and sequences (check_block_hazards), so they say it all.
  void check_stored_on_device() const;
  // Rows of one sequence, to the tokens they are of, and to the block its entry names.
  void check_store_target(std::uint32_t i, const messages::Store& store) const;
  void check_samples() const;
  void check_targets(std::uint32_t i, const messages::Sample& sample) const;
  void check_loads();
  void check_regenerate();
  void check_entries();
  void check_entry_of_device(std::uint32_t i, const messages::AttentionEntry& entry) const;
  // A sequence's context is read from rows that were loaded or made; its new rows go where no other
  // sequence reads or writes.
  void check_context(std::uint32_t index, const messages::Sequence& sequence);
  // Of a block that is kept nowhere, a sequence reads what earlier ones of its request make through the
  // same entry at the same place of their context, and its own new rows go on with that.
  void check_made_again(std::uint32_t index, std::uint32_t j, Slot& slot, std::uint32_t reads,
                        std::uint32_t writes);
  void check_source(std::uint32_t index, std::uint32_t j, const messages::AttentionEntry& entry,
                    const Slot& slot, std::uint32_t reads) const;

  static std::uint64_t blocks_of(const messages::Sequence& sequence) {
    return static_cast<std::uint64_t>(
        ceil_div(std::int64_t{sequence.context()} + sequence.new_tokens(), kBlockTokens));
  }
  void check_place(const char* what, std::uint32_t i, messages::Kind kind,
                   messages::Place place) const;
  std::uint32_t pool_blocks(messages::Kind kind, messages::Place place) const;
  std::vector<Slot>& slots(messages::Kind kind) { return kind == messages::Kind::Kv ? kv_ : act_; }
  std::vector<Slot>& slots_read(const messages::AttentionEntry& entry) {
    return entry.where() == messages::Where::LoadedKv ? kv_ : act_;
  }

  const messages::MiniBatch& batch_;
  const ModelShape& shape_;
  const DeviceLimits& limits_;
  const PoolPartition& pool_;
  std::uint32_t rows_ = 0, entries_ = 0;
  std::vector<Slot> kv_, act_;
  std::vector<std::uint32_t> sequence_of_row_;
};

template <typename Vector>
std::uint32_t size_of_vector(const Vector* vector) {
  return vector == nullptr ? 0 : vector->size();
}

}  // namespace poise
