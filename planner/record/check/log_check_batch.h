#pragma once
// One mini-batch of a checked log (planner/record/check/log_check.h): applies its tables to symbolic rows
// (request, position, token), in the order in which they depend on one another. All layers do the same,
// so one stands for all.

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "planner/record/check/log_check.h"

namespace poise {

template <typename Named>
CheckedBlockName name_of(const Named& named) {
  return {.kind = named.kind(), .place = named.place(), .number = named.block()};
}
// The tokens of a sequence once its new rows are there, and the blocks that they fill. A log may say
// anything: both can be larger than an order may be.
inline std::uint64_t end_of(const messages::Sequence& sequence) {
  return std::uint64_t{sequence.context()} + sequence.new_tokens();
}
inline std::uint64_t blocks_of(const messages::Sequence& sequence) {
  return static_cast<std::uint64_t>(
      ceil_div(static_cast<std::int64_t>(end_of(sequence)), kBlockTokens));
}
// False if an entry's rows are computed each time and not stored, or were given back.
bool is_kept(const messages::AttentionEntry& entry);
// What is wrong with a mini-batch some of which host cores attend: they attend all of it or nothing, from blocks
// of the host, and nothing is loaded for them.
std::vector<std::string> wrong_on_host(const messages::MiniBatchT& batch);
// … or some of which read activations as they are: only single new rows do, and only where that is configured.
std::vector<std::string> wrong_absorbed(const messages::MiniBatchT& batch, bool configured);
bool is_in_place(const messages::AttentionEntry& entry);
bool is_absorbed(const messages::AttentionEntry& entry);  // read straight from activations
// Whether the sequence took over the beginning of its `block`-th block, and no more: the block is another's.
bool takes_part(const messages::MiniBatchT& batch, std::size_t sequence, std::uint64_t block);
// The sequence's entries that exist in the table.
std::span<const messages::AttentionEntry> entries_of(const messages::MiniBatchT& batch,
                                                     const messages::Sequence& sequence);

// Takes time and memory in proportion to the mini-batch's message, whatever numbers are in it: where sizes
// are impossible, it says so and checks no further.
class MiniBatchCheck {
 public:
  MiniBatchCheck(LogCheck& log, const messages::MiniBatchT& batch, std::uint32_t number);
  void run();

 private:
  struct Slot {
    std::int64_t entry = -1;  // whose it is
    std::optional<CheckedBlockName> loaded;
    bool made = false;    // keys and values from what was loaded
    CheckedBlock act{};   // of the ACT buffer
    CheckedBlock rows{};  // keys and values, loaded or made
  };

  // Whether the steps behind it can rely on the sizes: sequences cover the rows and have their entries.
  bool check_sizes();
  bool check_size(const messages::Sequence& sequence, std::uint32_t index, std::size_t rows);
  void claim_slots();
  void load();
  void load(const messages::BlockRun& run);
  void regenerate();
  void read_texts();
  void read_text(const messages::Sequence& sequence, std::uint32_t index, CheckedText& text);
  void place_new_rows();
  void attend();
  void attend(const messages::Sequence& sequence, std::uint32_t index, std::uint32_t block);
  void store();
  void check_samples();

  Slot* slot_of(const messages::AttentionEntry& entry);
  // Whether the row that is read there may have been stored before the log begins.
  bool is_trusted(const messages::AttentionEntry& entry, const CheckedRow& found);
  // What attention reads through an entry; null if there is nothing.
  const CheckedBlock* read_through(const messages::AttentionEntry& entry);
  std::string at(std::uint32_t sequence) const;  // "iteration 1, mini-batch 2, sequence 3 (…)"
  void violation(const std::string& what) { log_.violation(where_, what); }

  LogCheck& log_;
  const messages::MiniBatchT& batch_;
  std::uint32_t number_;
  std::string where_;
  std::unordered_map<std::uint32_t, Slot> slots_[2];  // KV buffer, ACT buffer; those of an entry
  std::vector<CheckedText*> texts_;                   // by sequence
  std::vector<std::uint32_t> sequence_of_row_;
};

}  // namespace poise
