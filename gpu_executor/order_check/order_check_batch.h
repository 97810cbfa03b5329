#pragma once
// One mini-batch of an iteration's tables, checked before anything is done with it
// (gpu_executor/order_check/order_check.h): in the order in which the tables depend on one another. Fails with the
// first thing that cannot be.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "common/trouble.h"
#include "gpu_executor/order_check/order_check.h"

namespace poise {

template <typename Vector>
std::uint32_t size_of_vector(const Vector* vector) {
  return vector == nullptr ? 0 : vector->size();
}

// A mini-batch, and what it is checked by.
struct CheckedBatch {
  const messages::MiniBatch& tables;
  const ModelShape& shape;
  const DeviceLimits& limits;
  const PoolPartition& pool;

  std::uint32_t rows() const { return size_of_vector(tables.tokens()); }
  std::uint32_t entries() const { return size_of_vector(tables.entries()); }
  std::uint32_t pool_blocks(messages::Kind kind, messages::Place place) const;
  // Entries that have a slot, or a block where they lie.
  std::uint32_t entries_there() const;
  // Of a sequence's `block`-th entry, which is dropped: fails if a row may see the block.
  void check_dropped(std::uint32_t sequence, std::uint32_t block) const;
  // Of a table's line `i`.
  void check_place(const char* what, std::uint32_t i, messages::Kind kind,
                   messages::Place place) const;

  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> what, Args&&... args) const {
    fail("mini-batch {}: {}", tables.id(), fmt::format(what, std::forward<Args>(args)...));
  }
};

// The attention entries that cover a sequence.
inline std::uint64_t blocks_of(const messages::Sequence& sequence) {
  return static_cast<std::uint64_t>(
      ceil_div(std::int64_t{sequence.context()} + sequence.new_tokens(), kBlockTokens));
}

// Rows: which there are, of which sequence, where they are stored and sampled.
class RowCheck {
 public:
  explicit RowCheck(const CheckedBatch& batch) : batch_(batch) {}

  // Sizes, tokens and sequences, which all other checks rely on.
  void check_rows();
  // Stores and samples. REQUIRES: check_rows() and SlotCheck::run() passed.
  void check_results() const;

 private:
  void check_sizes() const;
  void check_tokens() const;
  // They cover the rows one behind the other.
  void check_sequences();
  void check_stores() const;
  // New rows are written into the device's KV blocks, and into those that host cores attend, even if no store
  // names them. But check_block_hazards protects only rows that a store names. So stores must name all of
  // these rows.
  void check_stored_in_place() const;
  // Rows of one sequence, to the tokens they are of, and to the block its entry names.
  void check_store_target(std::uint32_t i, const messages::Store& store) const;
  void check_samples() const;
  void check_targets(std::uint32_t i, const messages::Sample& sample) const;
  void check_edits(std::uint32_t i, const messages::Sample& sample) const;
  void check_mask(std::uint32_t i, const messages::Sample& sample) const;

  const CheckedBatch& batch_;
  std::vector<std::uint32_t> sequence_of_row_;
};

// Slots of the KV and ACT buffers: what is loaded into them, made there and read.
class SlotCheck {
 public:
  // REQUIRES: the batch's rows were checked.
  explicit SlotCheck(const CheckedBatch& batch)
      : batch_(batch),
        kv_(static_cast<std::size_t>(batch.limits.all_kv_slots())),
        act_(static_cast<std::size_t>(batch.limits.act_slots)) {}

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

  void check_loads();
  void check_regenerate();
  void check_entries();
  // Of an entry that is read straight from activations.
  void check_absorbed(std::uint32_t i, const messages::AttentionEntry& entry) const;
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

  // Of a buffer's slots, those that a block of this place may have: the last KV slots are for blocks of the
  // device alone.
  std::size_t slots_for(messages::Kind kind, messages::Place place) const {
    return kind != messages::Kind::Kv      ? act_.size()
           : place == messages::Place::Gpu ? kv_.size()
                                           : static_cast<std::size_t>(batch_.limits.kv_slots);
  }
  std::vector<Slot>& slots(messages::Kind kind) { return kind == messages::Kind::Kv ? kv_ : act_; }
  std::vector<Slot>& slots_read(const messages::AttentionEntry& entry) {
    return entry.where() == messages::Where::LoadedKv ? kv_ : act_;
  }

  const CheckedBatch& batch_;
  std::vector<Slot> kv_, act_;
};

// Instead of its slots, for a mini-batch that host cores attend: every entry is a KV block of the host, no
// two sequences have one block, and nothing is loaded. REQUIRES: the batch's rows were checked.
void check_host_batch(const CheckedBatch& batch);

}  // namespace poise
