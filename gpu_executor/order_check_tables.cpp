#include <algorithm>
#include <cmath>

#include "common/trouble.h"
#include "gpu_executor/order_check.h"
#include "kernels/kernels.h"

namespace poise {
namespace {

using messages::Kind;
using messages::Place;
using messages::Where;

// What a mini-batch does with one slot of the KV buffer, or of the ACT and regenerated buffers.
struct Slot {
  std::uint32_t block = 0;    // that was loaded into it …
  Place place = Place::Host;  // … from there
  std::uint16_t loaded = 0;   // rows, one bit each, as below
  std::uint16_t read = 0;     // by a sequence as its context
  std::uint16_t written = 0;  // by new rows
  std::uint16_t made = 0;     // of them, those of the entry below, whose block is kept nowhere
  std::uint32_t entry = 0, position = 0, request = 0;
  bool regenerated = false;
};

constexpr std::uint32_t row_bits(std::uint32_t first, std::uint32_t end) {
  return ((1u << end) - 1) & ~((1u << first) - 1);
}

template <typename Vector>
std::uint32_t size_of_vector(const Vector* vector) {
  return vector == nullptr ? 0 : vector->size();
}

// Goes through one mini-batch's tables in the order in which they depend on one another.
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

  void run() {
    check_sizes();
    check_tokens();
    check_sequences();
    check_loads();
    check_regenerate();
    check_entries();
    check_stores();
    check_samples();
  }

 private:
  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> what, Args&&... args) const {
    fail("mini-batch {}: {}", batch_.id(), fmt::format(what, std::forward<Args>(args)...));
  }

  void check_sizes() {
    rows_ = size_of_vector(batch_.tokens());
    if (rows_ == 0 || rows_ > static_cast<std::uint32_t>(limits_.max_mini_batch_rows)) {
      refuse("{} rows, not 1 to {}", rows_, limits_.max_mini_batch_rows);
    }
    const std::uint32_t sequences = size_of_vector(batch_.sequences());
    if (sequences == 0 || sequences > static_cast<std::uint32_t>(limits_.max_sequences)) {
      refuse("{} sequences, not 1 to {}", sequences, limits_.max_sequences);
    }
    entries_ = size_of_vector(batch_.entries());
    if (entries_ == 0 || entries_ > limits_.max_entries()) {
      refuse("{} attention entries, not 1 to {}", entries_, limits_.max_entries());
    }
  }

  void check_tokens() const {
    for (std::uint32_t row = 0; row < rows_; ++row) {
      const std::int32_t token = batch_.tokens()->Get(row);
      if (token < 0 || token >= shape_.vocab_size) {
        refuse("row {} is token {} of a vocabulary of {}", row, token, shape_.vocab_size);
      }
    }
  }

  // They cover the rows one behind the other.
  void check_sequences() {
    std::uint64_t row = 0;
    const std::uint64_t longest =
        static_cast<std::uint64_t>(std::min(limits_.max_context, shape_.max_position_embeddings));
    for (std::uint32_t i = 0; i < batch_.sequences()->size(); ++i) {
      const messages::Sequence& sequence = *batch_.sequences()->Get(i);
      const std::uint64_t end = std::uint64_t{sequence.context()} + sequence.new_tokens();
      if (sequence.new_tokens() == 0 || end > longest) {
        refuse(
            "sequence {} has {} tokens of context and {} new ones; at least 1 is new and all "
            "are at most {}",
            i, sequence.context(), sequence.new_tokens(), longest);
      }
      if (sequence.first_row() != row || row + sequence.new_tokens() > rows_) {
        refuse("sequence {} starts at row {} with {} rows, the next row is {} of {}", i,
               sequence.first_row(), sequence.new_tokens(), row, rows_);
      }
      if (sequence.first_entry() + blocks_of(sequence) > entries_) {
        refuse("sequence {} has entries {} to {} of {}", i, sequence.first_entry(),
               sequence.first_entry() + blocks_of(sequence), entries_);
      }
      row += sequence.new_tokens();
      sequence_of_row_.insert(sequence_of_row_.end(), sequence.new_tokens(), i);
    }
    if (row != rows_) {
      refuse("its sequences have {} rows of {}", row, rows_);
    }
  }

  static std::uint64_t blocks_of(const messages::Sequence& sequence) {
    return static_cast<std::uint64_t>(
        ceil_div(std::int64_t{sequence.context()} + sequence.new_tokens(), kBlockTokens));
  }

  void check_place(const char* what, std::uint32_t i, Kind kind, Place place) const {
    if (kind != Kind::Kv && kind != Kind::Act) {
      refuse("{} {} is of block kind {}, which is none", what, i, static_cast<int>(kind));
    }
    if (place != Place::Host && place != Place::Gpu) {
      refuse("{} {} is of place {}, which is none", what, i, static_cast<int>(place));
    }
  }

  std::vector<Slot>& slots(Kind kind) { return kind == Kind::Kv ? kv_ : act_; }
  std::uint32_t pool_blocks(Kind kind, Place place) const {
    if (place == Place::Gpu) {
      return static_cast<std::uint32_t>(kind == Kind::Kv ? limits_.gpu_kv_blocks
                                                         : limits_.gpu_act_blocks);
    }
    return pool_.blocks(kind == Kind::Kv ? BlockKind::kv : BlockKind::act);
  }

  void check_loads() {
    for (std::uint32_t i = 0; i < size_of_vector(batch_.loads()); ++i) {
      const messages::BlockRun& run = *batch_.loads()->Get(i);
      check_place("load", i, run.kind(), run.place());
      if (run.count() == 0 || run.tail_tokens() == 0 || run.tail_tokens() > kBlockTokens) {
        refuse("load {} is of {} blocks, the last with {} tokens of {}", i, run.count(),
               run.tail_tokens(), kBlockTokens);
      }
      const std::uint32_t blocks = pool_blocks(run.kind(), run.place());
      if (std::uint64_t{run.first_block()} + run.count() > blocks) {
        refuse("load {} is of {} {} blocks from {}, the {} pool has {}", i, run.count(),
               messages::EnumNameKind(run.kind()), run.first_block(),
               messages::EnumNamePlace(run.place()), blocks);
      }
      auto& into = slots(run.kind());
      if (std::uint64_t{run.first_slot()} + run.count() > into.size()) {
        refuse("load {} goes to {} {} slots from {}, the buffer has {}", i, run.count(),
               messages::EnumNameKind(run.kind()), run.first_slot(), into.size());
      }
      for (std::uint32_t j = 0; j < run.count(); ++j) {
        Slot& slot = into[run.first_slot() + j];
        if (slot.loaded != 0) {
          refuse("load {} goes to {} slot {}, which another load fills", i,
                 messages::EnumNameKind(run.kind()), run.first_slot() + j);
        }
        const std::uint32_t tokens = j + 1 == run.count() ? run.tail_tokens() : kBlockTokens;
        slot.loaded = static_cast<std::uint16_t>(row_bits(0, tokens));
        slot.block = run.first_block() + j;
        slot.place = run.place();
      }
    }
  }

  void check_regenerate() {
    for (std::uint32_t i = 0; i < size_of_vector(batch_.regenerate()); ++i) {
      const messages::SlotRange& range = *batch_.regenerate()->Get(i);
      if (range.count() == 0 || std::uint64_t{range.first_slot()} + range.count() > act_.size()) {
        refuse("regenerate {} is of {} slots from {}, the ACT buffer has {}", i, range.count(),
               range.first_slot(), act_.size());
      }
      for (std::uint32_t slot = range.first_slot(); slot < range.first_slot() + range.count();
           ++slot) {
        if (act_[slot].loaded == 0) {
          refuse("regenerate {} reads ACT slot {}, which nothing loads", i, slot);
        }
        if (act_[slot].regenerated) {
          refuse("regenerate {} makes slot {} a second time", i, slot);
        }
        act_[slot].regenerated = true;
      }
    }
  }

  void check_entries() {
    for (std::uint32_t i = 0; i < entries_; ++i) {
      const messages::AttentionEntry& entry = *batch_.entries()->Get(i);
      if (entry.place() != Place::Nowhere) {
        check_place("entry", i, entry.kind(), entry.place());
      } else if (entry.kind() != Kind::Kv || entry.where() != Where::LoadedKv) {
        refuse("entry {} is kept nowhere: it is of kind Kv, in the KV buffer", i);
      }
      if (entry.where() != Where::LoadedKv && entry.where() != Where::RegeneratedKv) {
        refuse("entry {} is to be computed {} ({}), which this device does not do", i,
               entry.where() == Where::Activation    ? "straight from activations"
               : entry.where() == Where::HostInPlace ? "on host cores"
                                                     : "nowhere known",
               static_cast<int>(entry.where()));
      }
      if (entry.slot() >= slots_read(entry).size()) {
        refuse("entry {} is slot {} of {}", i, entry.slot(), slots_read(entry).size());
      }
    }
    for (std::uint32_t i = 0; i < batch_.sequences()->size(); ++i) {
      check_context(i, *batch_.sequences()->Get(i));
    }
  }

  std::vector<Slot>& slots_read(const messages::AttentionEntry& entry) {
    return entry.where() == Where::LoadedKv ? kv_ : act_;
  }

  // A sequence's context is read from rows that were loaded or made, its new rows go where nobody
  // else reads or writes.
  void check_context(std::uint32_t index, const messages::Sequence& sequence) {
    const std::int64_t end = std::int64_t{sequence.context()} + sequence.new_tokens();
    for (std::uint32_t j = 0; j < blocks_of(sequence); ++j) {
      const messages::AttentionEntry& entry = *batch_.entries()->Get(sequence.first_entry() + j);
      const std::int64_t start = std::int64_t{j} * kBlockTokens;
      const auto old_rows = static_cast<std::uint32_t>(
          std::clamp<std::int64_t>(sequence.context() - start, 0, kBlockTokens));
      const auto all_rows =
          static_cast<std::uint32_t>(std::min<std::int64_t>(end - start, kBlockTokens));
      Slot& slot = slots_read(entry)[entry.slot()];
      const std::uint32_t reads = row_bits(0, old_rows);
      const std::uint32_t writes = row_bits(old_rows, all_rows);
      const bool nowhere = entry.place() == Place::Nowhere;
      if (nowhere) {
        check_made_again(index, j, slot, reads, writes);
      } else if (old_rows > 0) {
        check_source(index, j, entry, slot, reads);
      }
      if ((reads & slot.written & ~slot.made) != 0 || (!nowhere && (reads & slot.made) != 0) ||
          (writes & (slot.read | slot.written)) != 0) {
        refuse("sequence {}, block {}: its rows in slot {} are another's too", index, j,
               entry.slot());
      }
      slot.read = static_cast<std::uint16_t>(slot.read | reads);
      slot.written = static_cast<std::uint16_t>(slot.written | writes);
    }
  }

  // Of a block that is kept nowhere, a sequence reads what earlier ones of its request make through the
  // same entry at the same place of their context, and its own new rows go on with that.
  void check_made_again(std::uint32_t index, std::uint32_t j, Slot& slot, std::uint32_t reads,
                        std::uint32_t writes) {
    const messages::Sequence& sequence = *batch_.sequences()->Get(index);
    const std::uint32_t entry = sequence.first_entry() + j;
    const bool same =
        slot.entry == entry && slot.position == j && slot.request == sequence.request();
    if (slot.loaded != 0 || (slot.made != 0 && !same)) {
      refuse("sequence {}, block {}: its rows in slot {} are another's too", index, j,
             batch_.entries()->Get(entry)->slot());
    }
    if ((reads & ~std::uint32_t{slot.made}) != 0) {
      refuse("sequence {}, block {}: rows of slot {} are read that nothing makes", index, j,
             batch_.entries()->Get(entry)->slot());
    }
    slot.entry = entry;
    slot.position = j;
    slot.request = sequence.request();
    slot.made = static_cast<std::uint16_t>(slot.made | (writes & ~std::uint32_t{slot.written}));
  }

  void check_source(std::uint32_t index, std::uint32_t j, const messages::AttentionEntry& entry,
                    const Slot& slot, std::uint32_t reads) const {
    const bool loaded = entry.where() == Where::LoadedKv;
    if ((reads & ~std::uint32_t{slot.loaded}) != 0 || (!loaded && !slot.regenerated)) {
      refuse("sequence {}, block {}: rows of slot {} are read that nothing {}", index, j,
             entry.slot(), loaded ? "loads" : "loads and makes");
    }
    if (entry.kind() != (loaded ? Kind::Kv : Kind::Act) || entry.block() != slot.block ||
        entry.place() != slot.place) {
      refuse("sequence {}, block {} is {} block {} ({}), slot {} holds {} block {} ({})", index, j,
             messages::EnumNameKind(entry.kind()), entry.block(),
             messages::EnumNamePlace(entry.place()), entry.slot(), loaded ? "Kv" : "Act",
             slot.block, messages::EnumNamePlace(slot.place));
    }
  }

  void check_stores() const {
    for (std::uint32_t i = 0; i < size_of_vector(batch_.stores()); ++i) {
      const messages::Store& store = *batch_.stores()->Get(i);
      check_place("store", i, store.kind(), store.place());
      if (store.count() == 0 || std::uint64_t{store.token()} + store.count() > kBlockTokens) {
        refuse("store {} is of {} rows from token {} of a block of {}", i, store.count(),
               store.token(), kBlockTokens);
      }
      if (std::uint64_t{store.row()} + store.count() > rows_) {
        refuse("store {} is of {} rows from {}, there are {}", i, store.count(), store.row(),
               rows_);
      }
      const std::uint32_t blocks = pool_blocks(store.kind(), store.place());
      if (store.block() >= blocks) {
        refuse("store {} goes to {} block {}, the {} pool has {}", i,
               messages::EnumNameKind(store.kind()), store.block(),
               messages::EnumNamePlace(store.place()), blocks);
      }
      check_store_target(i, store);
    }
  }

  // Rows of one sequence, to the tokens they are of, and to the block its entry names.
  void check_store_target(std::uint32_t i, const messages::Store& store) const {
    const std::uint32_t index = sequence_of_row_[store.row()];
    if (sequence_of_row_[store.row() + store.count() - 1] != index) {
      refuse("store {} is of rows of two sequences", i);
    }
    const messages::Sequence& sequence = *batch_.sequences()->Get(index);
    const std::uint32_t position = sequence.context() + store.row() - sequence.first_row();
    if (position % kBlockTokens != store.token()) {
      refuse("store {} puts position {} at token {} of its block", i, position, store.token());
    }
    const messages::AttentionEntry& entry =
        *batch_.entries()->Get(sequence.first_entry() + position / kBlockTokens);
    if (entry.kind() == store.kind() && entry.place() == store.place() &&
        entry.block() != store.block()) {
      refuse("store {} goes to {} block {}, its sequence has block {} there", i,
             messages::EnumNameKind(store.kind()), store.block(), entry.block());
    }
  }

  void check_samples() const {
    std::vector<bool> sampled(batch_.sequences()->size());
    for (std::uint32_t i = 0; i < size_of_vector(batch_.samples()); ++i) {
      const messages::Sample& sample = *batch_.samples()->Get(i);
      if (sample.sequence() >= sampled.size() || sampled[sample.sequence()]) {
        refuse("sample {} is of sequence {} {}", i, sample.sequence(),
               sample.sequence() >= sampled.size() ? "of none such" : "again");
      }
      sampled[sample.sequence()] = true;
      if (!std::isfinite(sample.temperature()) || sample.temperature() < 0 ||
          !(sample.top_p() > 0 && sample.top_p() <= 1) || sample.top_k() < 0) {
        refuse("sample {} has temperature {}, top_p {}, top_k {}", i, sample.temperature(),
               sample.top_p(), sample.top_k());
      }
      if (sample.logprobs() < -1 || sample.logprobs() > kMaxLogprobs) {
        refuse("sample {} wants {} logprobs, not -1 to {}", i, sample.logprobs(), kMaxLogprobs);
      }
      check_targets(i, sample);
    }
  }

  void check_targets(std::uint32_t i, const messages::Sample& sample) const {
    const std::uint32_t targets = size_of_vector(sample.prompt_targets());
    const std::uint32_t wanted =
        sample.prompt_logprobs() ? batch_.sequences()->Get(sample.sequence())->new_tokens() : 0;
    if (targets != wanted) {
      refuse("sample {} has {} prompt targets for {} rows", i, targets, wanted);
    }
    for (std::uint32_t row = 0; row < targets; ++row) {
      const std::int32_t token = sample.prompt_targets()->Get(row);
      if (token < -1 || token >= shape_.vocab_size) {
        refuse("sample {} has prompt target {} of a vocabulary of {}", i, token, shape_.vocab_size);
      }
    }
  }

  const messages::MiniBatch& batch_;
  const ModelShape& shape_;
  const DeviceLimits& limits_;
  const PoolPartition& pool_;
  std::uint32_t rows_ = 0, entries_ = 0;
  std::vector<Slot> kv_, act_;
  std::vector<std::uint32_t> sequence_of_row_;
};

}  // namespace

void check_mini_batch(const messages::MiniBatch& batch, const ModelShape& shape,
                      const DeviceLimits& limits, const PoolPartition& pool) {
  BatchCheck(batch, shape, limits, pool).run();
}

}  // namespace poise
